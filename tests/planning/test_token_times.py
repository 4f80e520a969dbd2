"""TPOT of an instance that prefills between tokens: beside queues that are drawn, by hand, and as simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.facts.traffic import EmpiricalLength, TrafficCase
from disagg_sim.planning.evaluate import evaluate
from disagg_sim.planning.mixed_steps import MixedSteps
from disagg_sim.planning.pieces import PromptLengths
from disagg_sim.planning.prove import prove
from disagg_sim.planning.token_times import Joining, TimeWithPrefill, at_most, token_times
from disagg_sim.simulation.deployment import Replicas


@pytest.mark.parametrize(("load", "window"), [(0.3, 30.0), (0.5, 10.0), (0.8, 20.0), (0.8, 200.0)])
def test_time_with_prefill_behind_the_end_of_a_prompt(load, window):
    """Windows behind prompts of 1 s that are drawn one after the other."""
    count = 200_000
    come = np.cumsum(np.random.default_rng(2).exponential(1.0 / load, count))
    number = np.arange(1.0, count + 1.0)  # busy seconds up to the end of each
    done = number + np.maximum.accumulate(come - number + 1.0)
    places = np.stack([done - 1.0, done], axis=1).ravel()
    spent = np.interp(done + window, places, np.stack([number - 1.0, number], axis=1).ravel()) - number
    busy = spent[: -int(4 * window)] / window
    for share in (load, min(1.5 * load, 0.95)):
        found = at_most(np.array(share), np.array(window), TimeWithPrefill(load, load))
        assert float(found) == pytest.approx(np.mean(busy <= share), abs=0.06)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_prompts_of_all_ranks_start_with_a_step(ranks, pieces, load):
    """Steps of 1 s with prefill and of 0.15 s without, of ranks that are drawn one step after the other."""
    chance, rate = np.random.default_rng(4), load * ranks / pieces
    left, mixed, whole = np.zeros(ranks, dtype=int), 0.0, 0.0
    for _ in range(20_000):
        step = 1.0 if left.any() else 0.15
        mixed, whole = mixed + step * left.any(), whole + step
        left = np.maximum(left - 1, 0)
        for _ in range(chance.poisson(rate * step)):
            left[np.argmin(left)] += pieces
    table, tokens = np.array([[0.15], [1.0], [1.0]]), np.array([0.0, 1.0, 1000.0])
    steps = MixedSteps(
        ranks=ranks,
        budget=1000 * ranks,
        prompts=PromptLengths(np.array([1000.0 * pieces]), np.zeros(1), np.ones(1)),
        each=100.0,
        waits=(0,),
        batch=np.ones(1),
        verified=np.zeros(1),
        step=table[0],
        tokens=tokens,
        mixed=table,
        single=table,
        longer=np.zeros_like(table),
    )
    idle = 1.0 - float(steps.mixing(rate, 0).share[0])
    assert idle == pytest.approx(1.0 - mixed / whole, rel=0.15, abs=0.005)


def instance(rate: float) -> tuple[MixedSteps, Joining]:
    """Steps of 10 ms alone and of 110 ms with 1,000 prompt tokens; prompts of as many."""
    times, none = np.array([[0.01] * 2, [0.11] * 2]), np.zeros((2, 2))
    law = MixedSteps(
        ranks=1,
        budget=1000,
        prompts=PromptLengths(np.array([1000.0]), np.zeros(1), np.ones(1)),
        each=100.0,
        waits=(0,),
        batch=np.array([1.0, 1e6]),
        verified=np.zeros(2),
        step=times[0],
        tokens=np.array([0.0, 1000.0]),
        mixed=times,
        single=times,
        longer=none,
    )
    return law, Joining(rate, 1.0, 1.0)


def test_slow_and_fast_changes_of_the_steps_by_hand() -> None:
    """Prompts take half of the time.

    Of many steps 11 of 12 take 10 ms, 18.3 ms on average; a single one takes 10 or 110 ms, whichever time it falls in.
    """
    law, arrivals = instance(0.5 / 0.11)
    mixing = law.mixing(arrivals.rate, 0)
    many, one = (token_times(law, mixing, 10.0, (0.0183, 0.0), np.array([steps]), arrivals) for steps in (1e7, 0.01))
    assert many.mean == pytest.approx(1.0 / (0.5 / 0.01 + 0.5 / 0.11), rel=0.01)
    assert many.at(0.99) < 1.05 * many.mean
    assert one.mean == pytest.approx((0.01 + 0.11) / 2.0, rel=0.05)
    assert (one.at(0.25), one.at(0.75)) == pytest.approx((0.01, 0.11), rel=0.01)


def test_one_request_after_the_other_meets_none() -> None:
    law, arrivals = instance(1e-7)
    found = token_times(law, law.mixing(arrivals.rate, 0), 1e-6, (0.01, 0.0), np.array([100.0]), arrivals)
    assert (found.mean, found.at(0.99)) == pytest.approx((0.01, 0.01), rel=1e-3)


def test_prompts_with_more_before_them_count_as_more_tokens() -> None:
    """1 us longer a token of past, of 110 ms with 900 tokens of a prompt and 100 of decodes on each of two ranks."""
    longer = np.array([[0.0] * 2, [1e-6] * 2])
    law = replace(instance(1.0)[0], ranks=2, budget=2000, verified=np.full(2, 200.0), longer=longer)
    assert law.worth(1.0, np.array([1000.0]), 2000.0) == pytest.approx(1000.0 * (1.0 + 2000 * 1e-6 / 0.11), rel=1e-9)


def test_no_token_takes_longer_than_a_full_step() -> None:
    law, arrivals = instance(0.9 / 0.11)
    found = token_times(law, law.mixing(arrivals.rate, 0), 10.0, (0.05, 0.05), np.array([10.0]), arrivals)
    assert found.at(1.0 - 1e-9) == pytest.approx(0.11)


def test_times_are_as_simulated_with_lengths_that_spread() -> None:
    """One prompt of ten takes two steps for itself: with steps of the mean mix p90 would be 1.3 times as fast."""
    pytest.importorskip("numba")
    isl = EmpiricalLength(probabilities=(0.0, 0.899999, 0.9, 1.0), tokens=(1000, 1000, 16000, 16000))
    work = TrafficCase(isl=isl, osl=EmpiricalLength(probabilities=(0.0, 1.0), tokens=(50, 150)))
    both = {"colocated": Replicas(mapping=Sharding(), instances=1, token_budget=8192)}
    found = evaluate("qwen3_30b_a3b", "h100_sxm", both, work, rate=6.8, ttft="60 s", tpot="1 s@p99")
    run = prove(found.given, found.design, adapt=False).planned
    for share in ("p50", "p90", "p99"):
        assert found.tpot[share] == pytest.approx(run.tpot[share], rel=0.06), share
