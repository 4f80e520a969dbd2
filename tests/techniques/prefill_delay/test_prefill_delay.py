"""Passes of prompts that wait for a free seat on every rank: the law against seats that are drawn one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.serving.slot_turnover import refill_passes
from disagg_sim.techniques.prefill_delay.law import delayed_passes

CHAINS = 50  # drawn side by side


def drawn(seats, ranks, ending, steps, passes, seed=0):
    """Prompts and steps of a pass, free seats after it, and seats over those that decode, of seats that end by lot."""
    rng = np.random.default_rng(seed)
    free, waited = np.zeros((CHAINS, ranks), int), np.zeros(CHAINS, int)
    for goal in (10 * CHAINS, passes):  # the first are not counted
        prompts = decoded = left = empty = done = 0
        while done < goal:
            while (ready := free.all(axis=1) | (free.any(axis=1) & (waited >= steps))).any():
                prompts += np.count_nonzero(free[ready])
                free[ready], waited[ready] = np.maximum(free[ready] - 1, 0), 0
                left += free[ready].sum()
                done += np.count_nonzero(ready)
            waited += free.any(axis=1)
            empty += free.sum()
            decoded += CHAINS
            free += rng.binomial(seats - free, ending)
    return prompts / done, decoded / done, left / done, 1 / (1 - empty / decoded / (seats * ranks))


def law(seats, ranks, ending, steps):
    found = delayed_passes(np.array([seats * ranks]), np.array([ranks]), np.array([ending]), np.array([steps]))
    return [float(each[0]) for each in found]


@pytest.mark.parametrize(
    ("seats", "ranks", "ending", "steps"),
    [
        (1, 8, 1 / 100, 64),
        (2, 4, 1 / 100, 32),
        (8, 8, 1 / 1023, 128),
        (32, 16, 1 / 1023, 32),
        (64, 4, 1 / 1023, 16),
        (8, 8, 1 / 1023, 100_000),
    ],
)
def test_seats_that_end_by_lot(seats, ranks, ending, steps):
    prompts, between, left, idle = law(seats, ranks, ending, steps)
    counted = drawn(seats, ranks, ending, steps, passes=2000)
    assert prompts == pytest.approx(counted[0], rel=0.03)
    assert between == pytest.approx(counted[1], rel=0.03)
    assert left == pytest.approx(counted[2], rel=0.2, abs=0.05)
    assert idle == pytest.approx(counted[3], rel=0.02)


def test_one_seat_a_rank():
    """Two ranks of one seat. Both end together with q/(2-q) of the first ends; else the other has w steps to end."""
    ending, steps = 0.01, 50
    prompts, between, left, _ = law(1, 2, ending, steps)
    alone = (1 - ending / (2 - ending)) * (1 - ending) ** steps
    waited = (1 - ending / (2 - ending)) * (1 - (1 - ending) ** steps) / ending
    assert prompts == pytest.approx(2 - alone, rel=0.002)
    assert between == pytest.approx(1 / (1 - (1 - ending) ** 2) + waited, rel=0.005)
    assert left == pytest.approx(0.0, abs=1e-2)


@given(st.floats(1.0, 300.0), st.integers(2, 72), st.floats(1e-4, 0.05), st.floats(0.05, 4.0))
@settings(max_examples=40)
def test_what_always_holds(seats, ranks, ending, freed):
    batch = np.array([round(seats * ranks)])
    steps = np.array([max(round(freed / (batch[0] / ranks * ending)), 1)])
    found = delayed_passes(batch, np.array([ranks]), np.array([ending]), steps)
    prompts, between, left, idle = (float(each[0]) for each in found)
    assert 1.0 - 1e-9 <= prompts <= ranks + 1e-9
    assert between > 0
    assert 0.0 <= left <= batch[0]
    assert idle >= 1.0
    longer = delayed_passes(batch, np.array([ranks]), np.array([ending]), 4 * steps)
    assert longer.prompts[0] >= prompts * (1 - 1e-2)


def test_rows_stand_alone():
    """What a row gives does not depend on the others: designs are scored again one by one."""
    batch, ranks = np.array([64, 512, 100, 96, 3072, 640]), np.array([8, 16, 8, 6, 64, 36])
    steps, ending = np.array([128, 32, 16, 64, 8, 16]), np.full(6, 1 / 1023)
    together = np.stack(delayed_passes(batch, ranks, ending, steps))
    for k in range(6):
        one = delayed_passes(batch[k : k + 1], ranks[k : k + 1], ending[k : k + 1], steps[k : k + 1])
        np.testing.assert_array_equal(np.stack(one)[:, 0], together[:, k])  # to the last digit


def test_weights_of_passes_that_wait():
    """s prompts: a pass lies (s-1)/(R-1) of the way from one prompt to one of every rank."""
    found = refill_passes(np.array([64]), 8, np.array([8]), 1 / 1023, 128)
    s = law(8, 8, 1 / 1023, 128)[0]
    assert found.prompts.tolist() == [[8, 1]]
    assert found.passes[0] == pytest.approx(1 / s)
    assert found.each[0] == pytest.approx([(s - 1) / 7 / s, (8 - s) / 7 / s])
    assert found.own[0] == pytest.approx([s / 8, 1 - s / 8])
    assert (found.each * found.prompts).sum() == pytest.approx(1.0)


def test_no_wait_is_as_without():
    batch, most = np.array([64, 64]), np.array([8, 8])
    both = refill_passes(batch, 8, most, 1 / 1023, np.array([0, 128]))
    alone = refill_passes(batch[:1], 8, most[:1], 1 / 1023)
    assert both.of(slice(0, 1)).each.tolist() == alone.each.tolist()
    assert (both.idle[0], both.left[0]) == (1.0, 0.0)
