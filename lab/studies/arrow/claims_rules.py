"""Test the claims of "Arrow" (arXiv 2505.11916) on its own rules: its predictor, and what they rule out.

A9 and A10 hold by construction: the policy never gives up the last instance of a phase, and a cache that stays moves
nothing.
"""

from __future__ import annotations

import math

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.arrow.account import Predictor, prompt_time
from disagg_sim.simulation.policies.arrow.policy import Arrow
from disagg_sim.simulation.policies.fixed import LeastLoad
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import request_host
from disagg_sim.workload.arrivals import named_rng
from disagg_sim.workload.trace import Trace
from lab.studies.arrow import TEXT
from lab.studies.arrow.claims import OVERLOAD, printed
from lab.studies.arrow.setup import ALL, MODEL, ArrowBench
from lab.studies.bench import SCHEDULER, replicas
from lab.studies.claims import Finding

PAIR = ServedDeployment(name="2 x TP1", gpus=2, prefill=replicas(1, 1), decode=replicas(1, 1))
FIFO_REQUESTS, FIFO_LOAD = 2000, 0.7  # of A4: requests, and share of the time that its instance works [1]
PROMPTS = (200.0, 8000.0)  # of A4, even in the logarithm [token]


@TEXT.claim("A4")
def a4_predictor(bench: ArrowBench) -> Finding:
    """FIFO on one prefill instance: simulated TTFT, without the host's time, against the recursion over predictions."""
    budget = 2048
    at = bench.setting(MODEL)
    table = StepTable.build(at, Sharding())
    shortest, longest = map(math.log, PROMPTS)
    prompts = np.exp(named_rng(0, "prompts").uniform(shortest, longest, FIFO_REQUESTS)).astype(np.int64)
    predictor = Predictor.fit(table, budget)
    whole = np.array([prompt_time(table, length, budget) for length in prompts.tolist()])
    fitted = np.array([predictor(length) for length in prompts.tolist()])
    arrival = np.cumsum(named_rng(0, "arrivals").exponential(whole.mean() / FIFO_LOAD, FIFO_REQUESTS))
    trace = Trace(arrival=arrival, input_tokens=prompts, output_tokens=np.full(FIFO_REQUESTS, 2), name="fifo")
    policy, slo = LeastLoad(prompts_per_step=1, token_budget=budget), bench.workloads["code"].slo
    options = RunOptions(first_token="prefill", scheduler=SCHEDULER)
    result = run(trace, PAIR, policy, at=at, slo=slo, options=options)
    ttft = result.requests.first_token_s - arrival - request_host(at)
    exact, quadratic = (float(np.abs(ttft_in_turn(arrival, times) / ttft - 1).max()) for times in (whole, fitted))
    single = float(np.abs(fitted / whole - 1).max())
    return Finding(
        f"largest error of TTFT {quadratic:.1%}",
        quadratic < 0.01,
        f"the fit is off by up to {single:.1%} for one prompt: kernels work in tiles, no polynomial; if the time of "
        f"each prompt is known the recursion is an identity, off by {exact:.1e}; {FIFO_REQUESTS:,} prompts of "
        f"{PROMPTS[0]:g} to {PROMPTS[1]:g} tokens at load {FIFO_LOAD:g}",
    )


def ttft_in_turn(arrival: Floats, times: Floats) -> Floats:
    """TTFT of prompts one after the other: max(end of the one before - arrival, 0) + own time. [s]"""
    end, found = 0.0, []
    for came, time in zip(arrival.tolist(), times.tolist(), strict=True):
        end = max(end, came) + time
        found.append(end - came)
    return np.array(found)


@TEXT.claim("A9")
def a9_both_phases(bench: ArrowBench) -> Finding:
    """Fewest instances of either phase over all runs of Arrow."""
    seen = bench.all_seen(*(name for name, case in bench.cases.items() if isinstance(case.policy, Arrow)))
    prefill, decode = (min(each.fewest[phase] for each in seen) for phase in (0, 1))
    flips = sum(each.summary.flips for each in seen)
    return Finding(
        f"fewest: {prefill} of prefill, {decode} of decode",
        min(prefill, decode) >= 1,
        f"over {len(seen)} runs with {flips:,} flips, by their decision logs",
    )


@TEXT.claim("A10")
def a10_staying(bench: ArrowBench) -> Finding:
    """Transfer of requests that decode where their prefill was."""
    seen = bench.all_seen("arrow", "arrow_4", "arrow_single")
    stayed, transfer = sum(each.stayed for each in seen), sum(each.stayed_transfer_s for each in seen)
    moved = sum(each.summary.transfers for each in seen)
    return Finding(
        f"{transfer:g} s over {stayed:,} requests that stayed",
        stayed > 0 and transfer == 0.0,
        f"{moved:,} requests moved, over {len(seen)} runs",
    )


@TEXT.claim("A16")
def a16_no_oscillation(bench: ArrowBench) -> Finding:
    """Flips at the capacity and at twice as much."""
    ours, theirs = (fewer(flips(bench, arrow)) for arrow in ("arrow", "arrow_printed"))
    return Finding(*ours, bench.stand_ins(*ALL), printed(*theirs))


def flips(bench: ArrowBench, arrow: str) -> dict[str, list[int]]:
    """Flips at the capacity and at twice as much, by trace. [1]"""
    return {name: [bench.flips(name, arrow, load) for load in (1.0, OVERLOAD)] for name in ALL}


def fewer(found: dict[str, list[int]]) -> tuple[str, bool]:
    """Flips in words, and whether overload has no more of them."""
    said = ", ".join(f"{name} {at:,} and {beyond:,}" for name, (at, beyond) in found.items())
    return said, all(beyond <= at for at, beyond in found.values())
