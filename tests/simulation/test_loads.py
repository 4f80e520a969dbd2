"""Choices of an instance by load, against the plain definition."""

from types import SimpleNamespace

import numpy as np
import pytest

from disagg_sim.simulation.policies.loads import RoundRobin, fewest_requests, least_decode, least_prefill

AMONG = np.array([1, 3, 4])


def view(**columns):
    names = ("queued_requests", "running_requests", "queued_prompt_tokens", "running_tokens", "coming_tokens")
    loads = {name: np.array(columns.get(name, [0] * 5)) for name in names}
    return SimpleNamespace(refresh=lambda: None, **loads)  # they are the present ones


@pytest.mark.parametrize(
    ("choice", "columns", "wanted"),
    [
        (fewest_requests, {"queued_requests": [0, 2, 0, 0, 1], "running_requests": [0, 0, 0, 3, 1]}, 1),
        (fewest_requests, {"running_requests": [0, 5, 0, 5, 4]}, 4),
        (least_prefill, {"queued_prompt_tokens": [0, 9, 0, 8, 8]}, 3),
        (least_decode, {"running_tokens": [0, 100, 0, 90, 95], "coming_tokens": [0, 0, 0, 20, 0]}, 4),
    ],
)
def test_the_least_loaded_of_some_wins_and_the_first_of_equals(choice, columns, wanted):
    assert choice(view(**columns), AMONG) == wanted


def test_caches_that_wait_for_memory_count_as_much_as_the_mean_of_those_that_run():
    """Instance 1: 100 tokens of 2 requests and 3 in wait, 250 in all; instance 3: 240 of them; 4: more."""
    columns = {
        "running_tokens": [0, 100, 0, 240, 300],
        "running_requests": [0, 2, 0, 4, 3],
        "queued_requests": [0, 3, 0, 0, 0],
    }
    assert least_decode(view(**columns), AMONG) == 3


def test_round_robin_goes_round():
    turn = RoundRobin()
    assert [turn(view(), AMONG) for _ in range(4)] == [1, 3, 4, 1]
