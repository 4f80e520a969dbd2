"""Prompts of one rank share the budget of its steps: the chain beside a simulation, and limits by hand."""

from __future__ import annotations

import numpy as np
import pytest

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.facts.traffic import ConstantLength, LogNormalLength, TrafficCase
from disagg_sim.planning.evaluate import evaluate
from disagg_sim.planning.prompt_queue import PromptArrivals, prompt_delay
from disagg_sim.planning.prove import prove
from disagg_sim.simulation.deployment import Replicas

ROOM = 8170.0


def step(tokens: Floats) -> Floats:
    """20 ms, and 0.9 s for 8,192 tokens."""
    return 0.02 + 0.9 * np.asarray(tokens) / 8192.0


def played(rate: float, prompts: Floats, weights: Floats, count: int, group: float = 1.0, ahead: int = 0) -> Floats:
    """Times from arrival to the end of the last step of a prompt: tokens first come, first served.

    A step takes what has come when it begins; one that is formed ``ahead``, when the step before it begins.
    """
    rng = np.random.default_rng(1)
    sizes = rng.geometric(1.0 / group, count)
    arrival = np.repeat(np.cumsum(rng.exponential(group / rate, count)), sizes)[:count]
    length = rng.choice(prompts, count, p=weights)
    end = np.cumsum(length)  # tokens up to the end of each prompt
    done, begun, now, computed, seen = np.zeros(count), 0.0, 0.0, 0.0, 0
    while computed < end[-1] - 1e-6:
        come = int(np.searchsorted(arrival, begun if ahead else now, side="right"))
        waiting = (end[come - 1] if come else 0.0) - computed
        if waiting < 1e-6:  # steps of decodes alone, until a prompt comes
            idle = max(np.ceil((arrival[come] - now) / 0.02), 0.0) + ahead
            begun, now = now + 0.02 * (idle - 1), now + 0.02 * idle
            continue
        tokens, begun = min(waiting, ROOM), now
        now += float(step(np.array(tokens)))
        computed += tokens
        last = int(np.searchsorted(end, computed + 1e-6, side="right"))
        done[seen:last], seen = now, last
    return done - arrival


@pytest.mark.parametrize(
    ("prompts", "weights", "rate", "ahead"),
    [
        ((8192.0,), (1.0,), 0.75, 0),  # a last piece of 22 tokens, which others fill up
        ((2048.0,), (1.0,), 3.0, 0),  # four share a step
        ((20000.0,), (1.0,), 0.3, 0),
        ((1000.0, 6000.0), (0.7, 0.3), 2.4, 0),
        ((512.0,), (1.0,), 6.0, 1),
        ((8192.0,), (1.0,), 0.75, 1),
        ((1000.0, 6000.0), (0.7, 0.3), 1.6, 1),
    ],
)
def test_times_are_those_of_a_simulation(prompts, weights, rate, ahead) -> None:
    lengths, shares = np.array(prompts), np.array(weights)
    found = prompt_delay(PromptArrivals(rate), lengths, shares, ROOM, step, running=1.0 if ahead else None)
    times = np.concatenate([each for each, _ in found])
    chances = np.concatenate([weight * each for weight, (_, each) in zip(weights, found, strict=True)])
    assert chances.sum() == pytest.approx(1.0, abs=1e-3)
    run = played(rate, lengths, shares, 60_000, ahead=ahead)
    assert times @ chances == pytest.approx(run.mean(), rel=0.05)
    order = np.argsort(times)
    for share in (0.5, 0.9):
        place = np.searchsorted(np.cumsum(chances[order]), share * chances.sum())
        assert times[order][place] == pytest.approx(np.quantile(run, share), rel=0.08)


def test_long_prompts_wait_and_are_computed_as_simulated() -> None:
    """Log-normal prompts in steps of 2,048 tokens; the mean past of all behind each would make p99 a third too fast."""
    pytest.importorskip("numba")
    work = TrafficCase(isl=LogNormalLength(median=8192, sigma=0.6), osl=ConstantLength(tokens=100))
    both = {"colocated": Replicas(mapping=Sharding(), instances=1, batch=32, token_budget=2048)}
    found = evaluate("llama_3_1_8b", "h100_sxm", both, work, rate=1.5, ttft="60 s@p99", tpot="1 s")
    run = prove(found.given, found.design, adapt=False).planned
    for share, near in (("p50", 0.05), ("p90", 0.08), ("p99", 0.15)):
        assert found.ttft[share] == pytest.approx(run.ttft[share], rel=near)


def test_prompts_that_come_in_groups_wait_for_each_other() -> None:
    """Groups of three on average: five times the variance of Poisson arrivals."""
    lengths, one = np.array([2048.0]), np.ones(1)
    [(times, chances)] = prompt_delay(PromptArrivals(2.0, 5.0), lengths, one, ROOM, step)
    assert times @ chances == pytest.approx(played(2.0, lengths, one, 60_000, group=3.0).mean(), rel=0.1)


def test_limits() -> None:
    """A prompt that meets nobody: the rest of a decode step, a full one and 22 tokens; beyond full load no end."""
    lengths, one = np.array([8192.0]), np.ones(1)
    [(times, chances)] = prompt_delay(PromptArrivals(1e-6), lengths, one, ROOM, step)
    alone = 0.01 + float(step(np.array(ROOM))) + float(step(np.array(22.0)))
    assert times @ chances == pytest.approx(alone, rel=1e-3)
    for running in (0.0, 0.5, 1.0):  # it joins a decode step later where one was formed ahead
        [(times, chances)] = prompt_delay(PromptArrivals(1e-6), lengths, one, ROOM, step, running=running)
        assert times @ chances == pytest.approx(alone + running * 0.02, rel=1e-3)
    assert prompt_delay(PromptArrivals(2.0), lengths, one, ROOM, step)[0][0][0] == np.inf
    even, poisson = (prompt_delay(PromptArrivals(0.7, each), lengths, one, ROOM, step)[0] for each in (0.5, 1.0))
    assert even[0] @ even[1] < poisson[0] @ poisson[1]
