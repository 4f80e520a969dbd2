"""Choices of an instance by load, against the plain definition."""

from types import SimpleNamespace

import numpy as np
import pytest
from sites import arrays_of

from disagg_sim.simulation.kernel.addresses import addresses_of
from disagg_sim.simulation.kernel.layout import InstanceRecord, dtype_of
from disagg_sim.simulation.kernel.ranking import Rankings
from disagg_sim.simulation.policies.loads import InTurn, fewest_requests, least_decode, least_prefill, shortest_queue

AMONG = np.array([1, 3, 4])


def view(**columns):
    """Instances with these columns, idle but for them."""
    inst = np.zeros(5, dtype_of(InstanceRecord))
    served = {name: np.array(columns.pop(name, [7] * 5)) for name in ("prefill_rate", "seats")}
    for name, values in columns.items():
        inst[name] = values
    arrays = arrays_of(inst)
    rankings = Rankings(addresses_of(arrays))

    def least(load, among, served, own=0, arrays=arrays):  # which lie where home says
        return rankings.least(load, among, served, own, 0.0)

    return SimpleNamespace(refresh=lambda: None, least=least, input_tokens=(1,), **served)  # they are the present ones


@pytest.mark.parametrize(
    ("choice", "columns", "wanted"),
    [
        (fewest_requests, {"queued_requests": [0, 2, 0, 0, 1], "running_requests": [0, 0, 0, 3, 1]}, 1),
        (fewest_requests, {"running_requests": [0, 5, 0, 5, 4]}, 4),
        (shortest_queue, {"queued_requests": [0, 2, 0, 1, 1], "running_requests": [0, 0, 0, 3, 1]}, 1),
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


@pytest.mark.parametrize(
    ("choice", "queued", "served"),
    [
        (fewest_requests, "running_requests", "seats"),
        (shortest_queue, "queued_requests", "prefill_rate"),
        (least_prefill, "queued_prompt_tokens", "prefill_rate"),
        (least_decode, "running_tokens", "seats"),
    ],
)
def test_an_instance_that_serves_eight_times_as_much_gets_eight_times_as_much(choice, queued, served):
    """Nine requests of one token: instance 3, eight times the others, takes the first eight of them but for one."""
    columns = {queued: [0] * 5, served: [1, 1, 1, 8, 1], "running_requests": [0] * 5}
    given = []
    for _ in range(10):
        given.append(choice(view(**columns), AMONG, 0))
        columns[queued][given[-1]] += 1
    assert given == [3] * 7 + [1, 3, 4]


def test_round_robin_goes_round():
    turn = InTurn()
    assert [turn(view(), AMONG) for _ in range(4)] == [1, 3, 4, 1]
