"""Test the claims of "Arrow" (arXiv 2505.11916) on times: A4, how TTFT is predicted, and A6, when loads come."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Sharding
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.arrow.account import Predictor, prompt_time
from disagg_sim.simulation.policies.fixed import LeastLoad
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.arrivals import named_rng
from disagg_sim.workload.trace import Trace
from lab.studies.arrow import TEXT
from lab.studies.arrow.setup import ALL, CLIP, MODEL, ArrowBench, loads
from lab.studies.bench import SCHEDULER, replicas
from lab.studies.claims import Told, Ways

PAIR = ServedDeployment(name="2 x TP1", gpus=2, prefill=replicas(1, 1), decode=replicas(1, 1))
FIFO_REQUESTS, FIFO_LOAD = 2000, 0.7  # of A4: requests, and share of the time that its instance works [1]
PROMPTS = (200.0, 8000.0)  # of A4, even in the logarithm [token]
LOAD_STEP_S = 0.1  # between samples of the loads of A6 [s]
MOST_LAG_S = 30.0  # that A6 tries [s]
SHARES = (0.5, 1.0)  # of capacity at which it, and figure 4, look [1]
COMMON = 0.3  # least correlation of loads that have a burst in common [1]
ACCURATE = 0.05  # median relative error of a TTFT that counts as "accurately predicted" [1]
PROFILED = 400  # prompts of a trace that the fit at launch profiles [1]
BUDGET = 2048  # tokens of a step [token]
QUEUED = 2000  # prompts in turn whose TTFT is predicted [1]
WINDOWS = 100  # of smoothing in the clip of figure 4 [1]


@TEXT.claim("A4")
def a4_predictor(bench: ArrowBench) -> Told:
    """FIFO on one prefill instance: simulated TTFT, without the host's time, against the recursion over predictions."""
    at = bench.setting(MODEL)
    table = StepTable.build(at, Sharding())
    shortest, longest = map(math.log, PROMPTS)
    prompts = np.exp(named_rng(0, "prompts").uniform(shortest, longest, FIFO_REQUESTS)).astype(np.int64)
    predictor = Predictor.fit(table, BUDGET)
    whole = np.array([prompt_time(table, length, BUDGET) for length in prompts.tolist()])
    fitted = np.array([predictor(length) for length in prompts.tolist()])
    arrival = np.cumsum(named_rng(0, "arrivals").exponential(whole.mean() / FIFO_LOAD, FIFO_REQUESTS))
    trace = Trace(arrival=arrival, input_tokens=prompts, output_tokens=np.full(FIFO_REQUESTS, 2), name="fifo")
    policy, slo = LeastLoad(prompts_per_step=1, token_budget=BUDGET), bench.workloads["code"].slo
    options = RunOptions(first_token="prefill", scheduler=SCHEDULER)
    result = run(trace, PAIR, policy, at=at, slo=slo, options=options)
    ttft = result.requests.first_token_s - arrival - at.request_host
    exact, quadratic = (float(np.abs(ttft_in_turn(arrival, times) / ttft - 1).max()) for times in (whole, fitted))
    return (
        f"largest error of TTFT {quadratic:.1%}",
        quadratic < 0.01,
        f"kernels work in tiles, no polynomial; if times are known the recursion is an identity, off by {exact:.1e}",
    )


def ttft_in_turn(arrival: Floats, times: Floats) -> Floats:
    """TTFT of prompts one after the other: max(end of the one before - arrival, 0) + own time. [s]"""
    end, found = 0.0, []
    for came, time in zip(arrival.tolist(), times.tolist(), strict=True):
        end = max(end, came) + time
        found.append(end - came)
    return np.array(found)


@TEXT.authors("A4", data=ALL)
def predictor(bench: ArrowBench) -> Told:
    """TTFT of prompts in turn by a quadratic that is fitted at launch to prompts of the trace that is served."""
    table = StepTable.build(bench.setting(MODEL), Sharding())
    said, worst, relative = [], 0.0, []
    for name in ALL:
        lengths = bench.workloads[name].trace.input_tokens
        drawn = named_rng(0, f"prompts of {name}").choice(lengths, PROFILED + QUEUED)
        times = np.array([prompt_time(table, length, BUDGET) for length in drawn.tolist()])
        known, prompts = drawn[:PROFILED], drawn[PROFILED:]
        whole = times[PROFILED:]
        arrival = np.cumsum(named_rng(0, "arrivals").exponential(whole.mean() / FIFO_LOAD, QUEUED))
        errors = []
        for weights in (np.ones(PROFILED), 1 / times[:PROFILED]):
            fitted = np.polyval(np.polyfit(known, times[:PROFILED], 2, w=weights), prompts)
            errors.append(np.abs(ttft_in_turn(arrival, fitted) / ttft_in_turn(arrival, whole) - 1))
        half, most = (float(np.quantile(errors[0], share)) for share in (0.5, 0.9))
        worst = max(worst, half)
        said.append(f"{name} {half:.1%}, {most:.1%}")
        relative.append(f"{name} {np.median(errors[1]):.1%}")
    return (
        f"median and P90 error of a TTFT: {'; '.join(said)}; by least squares of relative errors medians "
        f"{', '.join(relative)}",
        worst <= ACCURATE,
    )


@TEXT.claim("A6", ways=Ways(COMMON, 0.0, "the largest correlation counts however small it is"), data=ALL)
def a6_lag(bench: ArrowBench, least: float) -> Told:
    """Lag at which the decode load follows the prefill load best, where the two have something in common."""
    said, bursts = [], []
    for share in SHARES:
        found = {name: bench.once(("lag", name, share), partial(best_lag, bench, name, share)) for name in ALL}
        shown = [f"{name} {lag:.1f} s" if alike >= least else f"{name} -" for name, (lag, alike) in found.items()]
        said.append(f"at {share:g} of capacity {', '.join(shown)}")
        bursts += [lag for lag, alike in found.values() if alike >= least]
    note = f"-: correlation below {COMMON:g} at any lag up to {MOST_LAG_S:g} s"
    return "; ".join(said), bool(bursts) and min(bursts) > 0, note


def correlation(one: Ints | Floats, other: Ints | Floats) -> float:
    """Pearson's of two loads; 0 where one of them never changes. [1]"""
    return float(np.corrcoef(one, other)[0, 1]) if np.ptp(one) > 0 and np.ptp(other) > 0 else 0.0


def best_lag(bench: ArrowBench, workload: str, share: float) -> tuple[float, float]:
    """Shift of the decode load against the prefill load that makes them most alike [s], and their correlation [1], at a
    ``share`` of Arrow's capacity.
    """
    scale = share * bench.capacity(workload, "arrow").rate_scale
    prefill, decode = loads(bench.result(workload, "arrow", scale), LOAD_STEP_S)
    steps = min(round(MOST_LAG_S / LOAD_STEP_S), prefill.size // 4)
    middle = prefill[steps : prefill.size - steps]
    shifts = range(-steps, steps + 1)
    found = [correlation(middle, decode[steps + shift : decode.size - steps + shift]) for shift in shifts]
    best = int(np.argmax(found))
    return LOAD_STEP_S * shifts[best], found[best]


def phases(load: Ints, step: float) -> tuple[float, float, float]:
    """Onset, peak and decline of a load: where it crosses halfway between its median and its peak. [s]"""
    window = max(load.size // WINDOWS, 1)
    total = np.concatenate(([0], np.cumsum(load)))
    last = np.arange(load.size) + (window + 1) // 2  # of a window, exclusive; there is no load outside
    smooth: Floats = (total[np.minimum(last, load.size)] - total[np.maximum(last - window, 0)]) / window
    peak = int(smooth.argmax())
    half = (float(np.median(smooth)) + float(smooth[peak])) / 2
    before, after = np.flatnonzero(smooth[:peak] < half), np.flatnonzero(smooth[peak:] < half)
    onset = int(before[-1]) if before.size else 0
    decline = peak + int(after[0]) if after.size else smooth.size
    return onset * step, peak * step, decline * step


@TEXT.authors("A6", ways=Ways(SHARES[1], SHARES[0], f"{SHARES[0]:g} of the rate"), data=(CLIP,))
def decode_later(bench: ArrowBench, share: float) -> Told:
    """Onset, peak and decline of the load of decode after those of prefill, on the clip of figure 4."""
    scale = share * bench.capacity("conversation", "least_load").rate_scale
    step = bench.workloads[CLIP].trace.duration / scale / 10_000
    prefill, decode = (phases(load, step) for load in loads(bench.result(CLIP, "least_load", scale), step))
    lags = [there - here for here, there in zip(prefill, decode, strict=True)]
    said = f"onset, peak, decline at {share:g} of capacity: {', '.join(f'{lag:+.1f}' for lag in lags)} s"
    return said, min(lags) > 0
