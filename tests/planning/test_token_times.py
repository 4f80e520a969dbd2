"""TPOT of an instance that prefills between tokens: beside queues that are drawn, and beside the simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from disagg_sim.planning.mixed_steps import share_by_steps
from disagg_sim.planning.token_times import Met, prompts_met, token_times


@pytest.mark.parametrize(("work", "used"), [(2.0, 0.3), (6.0, 0.7)])
def test_prompts_of_a_delay_busy_period(work, used):
    """Decodes of ``work`` seconds are done once prompts of 1 s that come meanwhile are, counted in each period."""
    chance, counts = np.random.default_rng(2), []
    for _ in range(20_000):
        met, until = 0, work
        arrival = chance.exponential(1 / used)
        while arrival < until:
            met, until = met + 1, until + 1.0
            arrival += chance.exponential(1 / used)
        counts.append(met)
    numbers, shares = prompts_met(used * work / (1 - used), 1 / (1 - used) ** 2)
    assert shares @ numbers == pytest.approx(np.mean(counts), rel=0.03)
    for quantile in (0.5, 0.9, 0.99):
        place = numbers[np.searchsorted(np.cumsum(shares), quantile)]
        assert place == pytest.approx(np.quantile(counts, quantile), abs=1 + 0.03 * place)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("pieces", [1, 3])
def test_prompts_of_all_ranks_start_with_a_step(ranks, pieces):
    """Steps of 1 s with prefill and of 0.15 s without, of ranks that are drawn one step after the other."""
    chance, rate = np.random.default_rng(4), 0.3 * ranks / pieces
    left, mixed, whole = np.zeros(ranks, dtype=int), 0.0, 0.0
    for _ in range(20_000):
        step = 1.0 if left.any() else 0.15
        mixed, whole = mixed + step * left.any(), whole + step
        left = np.maximum(left - 1, 0)
        for _ in range(chance.poisson(rate * step)):
            left[np.argmin(left)] += pieces
    come = np.array([rate]), np.array([0.15 * rate])
    found = float(share_by_steps(np.array([rate * pieces]), ranks, 0.0, come)[0])
    assert found == pytest.approx(mixed / whole, rel=0.04)


def test_no_token_takes_longer_than_a_full_step():
    found = token_times(1e-3, 1e-3, Met(5.0, 20.0, 1.0), 1.0, 2.0)
    assert found.at(1.0 - 1e-9) == 2.0


def test_prompts_that_come_evenly_leave_the_mean():
    poisson, even = (token_times(5e-3, 0.0, Met(1.0, 0.1 * share, 0.1), 100, 1.0) for share in (1.0, 1e-3))
    assert even.mean == pytest.approx(poisson.mean, rel=1e-6)
    assert even.at(0.99) == pytest.approx(even.mean, rel=0.02)
    assert poisson.at(0.99) > 1.4 * poisson.mean


def test_one_request_after_the_other_meets_none():
    numbers, shares = prompts_met(1e-6, 1.0)
    assert shares[0] == pytest.approx(math.exp(-1e-6))
    assert numbers[0] == 0.0
