"""Test the claims of "Arrow" (arXiv 2505.11916).

Nothing is tuned for a claim: a miss stands with what decides it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Mapping
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.arrow.profile import Predictor, prompt_time
from disagg_sim.simulation.policies.least_load import LeastLoad
from disagg_sim.simulation.run import RunOptions, run
from disagg_sim.simulation.site import request_host
from disagg_sim.study.arrow.setup import ALL, AZURE, HALF, MODEL, PAIR, TIGHT, TIGHT_TPOT, ArrowBench, loads
from disagg_sim.study.bench import SCHEDULER
from disagg_sim.study.claims import DERIVED, PAPER, Finding, claim
from disagg_sim.workload.arrivals import named_rng
from disagg_sim.workload.trace import Trace

#: Rate scales over the capacity of least load at which A2 compares, and over that of Arrow at which A5 does. [1]
AROUND = (0.6, 0.8, 1.0, 1.2, 1.4)
BELOW = (0.7, 0.8, 0.9, 1.0, 1.1)
OVERLOAD = 2.0  # times capacity [1]
LOAD_STEP_S = 0.1  # between samples of the loads of A6 [s]
MOST_LAG_S = 30.0  # that A6 tries [s]
SHARES = (0.5, 1.0)  # of capacity at which it looks [1]
COMMON = 0.3  # least correlation of loads that have a burst in common [1]
FIFO_REQUESTS, FIFO_LOAD = 2000, 0.7  # of A4: requests, and share of the time that its instance works [1]
PROMPTS = (200.0, 8000.0)  # of A4, even in the logarithm [token]


@claim(
    "A1",
    kind=PAPER,
    statement="SLO-aware flips sustain more than static 4 + 4 with least load, most on bursty traffic",
    acceptance="capacity ratio code > conversation >= 1.0, code >= 1.3",
)
def a1_flipping(bench: ArrowBench) -> Finding:
    """Capacity over static instances."""
    code, conversation = (bench.ratio(name, "arrow", "least_load") for name in AZURE)
    single = [bench.ratio(name, "arrow_single", "least_load_single") for name in AZURE]
    seven = [bench.ratio(name, "arrow", "static_7_1") for name in AZURE]
    others = ", ".join(f"{name} {bench.ratio(name, 'arrow', 'least_load'):.2f}" for name in ALL[2:])
    return Finding(
        f"code {code:.2f}, conversation {conversation:.2f}",
        code > conversation >= 1.0 and code >= 1.3,
        f"{bench.stand_ins(*ALL)}{others}; with one prompt a step, code {single[0]:.2f}, conversation "
        f"{single[1]:.2f}; over a static 7 + 1, the split at which Arrow ends on code, {seven[0]:.2f} and "
        f"{seven[1]:.2f}; paper 1.67 and 1.1",
    )


@claim(
    "A2",
    kind=PAPER,
    statement="least load beats round robin by a few points of attainment",
    acceptance="0 to 10 points on average",
)
def a2_least_load(bench: ArrowBench) -> Finding:
    """Attainment of least load minus that of round robin, static both."""
    mean, ranges = _points(bench, AZURE, AROUND, "least_load", "round_robin", at="least_load")
    return Finding(
        ", ".join(f"{name} {value:.1f} points" for name, value in mean.items()),
        all(0 <= value <= 10 for value in mean.values()),
        f"{bench.stand_ins(*AZURE)}mean over {AROUND[0]:g} to {AROUND[-1]:g} times the capacity of least load; by rate "
        f"{ranges}; paper 4.3 and 2.4",
    )


@claim(
    "A3",
    kind=PAPER,
    statement="Arrow beats vLLM TP8 and vLLM-disaggregated TP4 + TP4 on all four traces",
    acceptance="capacity ratio > 1.5",
)
def a3_baselines(bench: ArrowBench) -> Finding:
    """Capacity over TP8 co-located and 4 + 4 disaggregated."""
    said, ratios = [], []
    for name in ALL:
        vllm, halves = (bench.ratio(name, "arrow", over) for over in ("vllm", "disaggregated"))
        ratios += [vllm, halves]
        paper = bench.workloads[name].paper
        said.append(f"{name} {vllm:.2f} and {halves:.2f} (paper {paper[0]:.2f} and {paper[1]:.2f})")
    same = ", ".join(f"{name} {bench.ratio(name, 'arrow', 'colocated'):.2f}" for name in ALL)
    tight = ", ".join(f"{name} {bench.ratio(name, 'arrow', 'colocated'):.2f}" for name in TIGHT)
    copies = ", ".join(f"{name} {bench.ratio(name, 'colocated', 'vllm'):.2f}" for name in ALL)
    return Finding(
        "over TP8 and 4 + 4: " + ", ".join(said),
        min(ratios) > 1.5,
        f"{bench.stand_ins(*ALL)}over 8 x TP1 co-located Arrow reaches {same}; those eight copies reach {copies} times "
        f"the TP8 instance. Their steps mix decodes with chunks and stay inside these TPOT limits; under one of "
        f"{TIGHT_TPOT:g} s Arrow reaches {tight} times what they do",
    )


@claim(
    "A4",
    kind=DERIVED,
    statement="the predicted TTFT is exact for FIFO prefill of one prompt at a time",
    acceptance="largest error below 1 %",
)
def a4_predictor(bench: ArrowBench) -> Finding:
    """FIFO on one prefill instance: simulated TTFT, without the host's time, against the recursion over predictions."""
    budget = 2048
    at = bench.setting(MODEL)
    table = StepTable.build(at, Mapping())
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
        f"largest error of TTFT {exact:.1e}",
        exact < 0.01,
        f"the time of each prompt known; with the quadratic fit {quadratic:.1%}, because that time is off by up to "
        f"{single:.1%}: kernels work in tiles, no polynomial; {FIFO_REQUESTS:,} prompts of {PROMPTS[0]:g} to "
        f"{PROMPTS[1]:g} tokens at load {FIFO_LOAD:g}",
    )


@claim(
    "A5",
    kind=PAPER,
    statement="TTFT grows during a burst, so that reacting to finished requests is too late",
    acceptance="lower attainment on average over the traces, and on code",
)
def a5_reacting(bench: ArrowBench) -> Finding:
    """Attainment when flips answer to late requests instead of predictions."""
    mean, ranges = _points(bench, ALL, BELOW, "observed", "arrow", at="arrow")
    return Finding(
        ", ".join(f"{name} {value:.1f} points" for name, value in mean.items()),
        mean["code"] < 0 and float(np.mean(list(mean.values()))) < 0,
        f"{bench.stand_ins(*ALL)}mean over {BELOW[0]:g} to {BELOW[-1]:g} times the capacity of Arrow; by rate {ranges}"
        f"; it looks every second for a first token that came after the limit, and places as Arrow does",
    )


@claim(
    "A6",
    kind=PAPER,
    statement="the decode load peaks after the prefill load",
    acceptance="lag of the largest cross-correlation above 0",
)
def a6_lag(bench: ArrowBench) -> Finding:
    """Lag at which the decode load follows the prefill load best, where the two have something in common."""
    said, holds, common = [], True, 0
    for share in SHARES:
        found = {name: best_lag(bench, name, share) for name in ALL}
        bursts = {name: lag for name, (lag, alike) in found.items() if alike >= COMMON}
        holds, common = holds and all(lag > 0 for lag in bursts.values()), common + len(bursts)
        said.append(
            f"at {share:g} of capacity "
            + ", ".join(f"{name} {lag:.1f} s" if name in bursts else f"{name} -" for name, (lag, _) in found.items())
        )
    return Finding(
        "; ".join(said),
        holds and common > 0,
        f"{bench.stand_ins(*ALL)}requests in prefill, waiting ones too, and in decode, every {LOAD_STEP_S:g} s; -: "
        f"correlation below {COMMON:g} at any lag up to {MOST_LAG_S:g} s, no burst to follow",
    )


@claim(
    "A7",
    kind=PAPER,
    statement="in overload TPOT stays near its SLO while TTFT diverges",
    acceptance="at twice capacity P90 TPOT at most 1.2 times its SLO, P90 TTFT above its own",
)
def a7_overload(bench: ArrowBench) -> Finding:
    """Latencies at twice the capacity."""
    said, printed, worst, late = [], [], 0.0, True
    for name in ALL:
        where, scale = bench.workloads[name], OVERLOAD * bench.capacity(name, "arrow").rate_scale
        row, bare = (bench.seen(name, case, scale).summary for case in ("arrow", "arrow_printed"))
        tpot, ttft = row.tpot_p90_s / where.slo.tpot, row.ttft_p90_s / where.slo.ttft
        worst, late = max(worst, tpot), late and ttft > 1
        said.append(f"{name} TPOT {tpot:.2f}, TTFT {ttft:.1f}")
        printed.append(f"{name} {bare.tpot_p90_s / where.slo.tpot:.2f}")
    return Finding(
        f"P90 over its limit: {'; '.join(said)}",
        worst <= 1.2 and late,
        f"{bench.stand_ins(*ALL)}at {OVERLOAD:g} times capacity; TPOT where requests that wait for memory do not count "
        f"as load, as printed: {', '.join(printed)}",
    )


@claim(
    "A8", kind=PAPER, statement="capacity grows nearly linearly with GPUs", acceptance="8 over 4 instances: 1.7 to 2.2"
)
def a8_scaling(bench: ArrowBench) -> Finding:
    """Eight instances over four."""
    ratios = {name: bench.rate(name, "arrow") / bench.rate(name, "arrow_4") for name in AZURE}
    thinned = bench.rate("code", "arrow") / bench.rate(HALF, "arrow_4")
    return Finding(
        ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()),
        all(1.7 <= ratio <= 2.2 for ratio in ratios.values()),
        f"{bench.stand_ins(*AZURE)}capacities {_rates(bench, 'arrow')} and {_rates(bench, 'arrow_4')} requests/s. "
        f"Stretched time stamps make bursts as much longer as rates fall, against limits that stay; with every second "
        f"request of code instead, bursts as long for four instances as for eight, {thinned:.2f}; one instance has to "
        f"decode: 7 over 3 for prefill is 2.33",
    )


@claim("A9", kind=DERIVED, statement="at least one instance always serves each phase", acceptance="exact")
def a9_both_phases(bench: ArrowBench) -> Finding:
    """Fewest instances of either phase over all runs of Arrow."""
    seen = bench.all_seen("arrow", "observed", "arrow_4", "arrow_single")
    prefill, decode = (min(each.fewest[phase] for each in seen) for phase in (0, 1))
    flips = sum(each.summary.flips for each in seen)
    return Finding(
        f"fewest: {prefill} of prefill, {decode} of decode",
        min(prefill, decode) >= 1,
        f"over {len(seen)} runs with {flips:,} flips, by their decision logs",
    )


@claim("A10", kind=DERIVED, statement="staying on the prefill instance removes the transfer", acceptance="exactly 0")
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


@claim(
    "A11",
    kind=PAPER,
    statement="co-located TP8: TPOT low, TTFT explodes first",
    acceptance="just above capacity P90 TTFT is outside, TPOT inside",
)
def a11_what_breaks(bench: ArrowBench) -> Finding:
    """What the TP8 instance violates just above its capacity."""
    said, holds = [], True
    for name in ALL:
        where, above = bench.workloads[name], bench.capacity(name, "vllm").above
        if math.isinf(above):
            said.append(f"{name} no rate was too much")
            continue
        row = bench.seen(name, "vllm", above).summary
        ttft, tpot = row.ttft_p90_s / where.slo.ttft, row.tpot_p90_s / where.slo.tpot
        holds = holds and ttft > 1 >= tpot
        said.append(f"{name} TTFT {ttft:.2f}, TPOT {tpot:.2f}")
    return Finding(
        f"P90 over its limit: {'; '.join(said)}",
        holds,
        f"{bench.stand_ins(*ALL)}at the smallest rate tried above capacity",
    )


@claim(
    "A12",
    kind=PAPER,
    statement="flips are cheap: with 60 to 300 s a flip the gain of A1 vanishes",
    acceptance="code within 10 % of static",
)
def a12_slow_flips(bench: ArrowBench) -> Finding:
    """Capacity over static instances when a flip takes an instance out of service."""
    ratios = {name: bench.ratio("code", name, "least_load") for name in ("arrow", "flip_60", "flip_300")}
    lasts = bench.workloads["code"].trace.duration / bench.capacity("code", "arrow").rate_scale
    return Finding(
        f"code: 60 s {ratios['flip_60']:.2f}, 300 s {ratios['flip_300']:.2f}",
        all(abs(ratios[name] - 1) <= 0.1 for name in ("flip_60", "flip_300")),
        f"{bench.stand_ins('code')}without delay {ratios['arrow']:.2f}, a rate at which the trace lasts {lasts:.0f} s; "
        f"a flip drains the instance first",
    )


def _points(
    bench: ArrowBench, names: Sequence[str], factors: Sequence[float], one: str, other: str, *, at: str
) -> tuple[dict[str, float], str]:
    """Attainment of one case over that of another at ``factors`` times the capacity of ``at``.

    In points of a hundred: the mean by workload, and the ranges in words.
    """
    points = {}
    for name in names:
        scales = tuple(factor * bench.capacity(name, at).rate_scale for factor in factors)
        ours, theirs = (np.array(bench.attainments(name, case, scales)) for case in (one, other))
        points[name] = 100 * (ours - theirs)
    ranges = "; ".join(f"{name} {found.min():.1f} to {found.max():.1f}" for name, found in points.items())
    return {name: float(found.mean()) for name, found in points.items()}, ranges


def _rates(bench: ArrowBench, case: str) -> str:
    return ", ".join(f"{bench.rate(name, case):.1f}" for name in AZURE)


def ttft_in_turn(arrival: Floats, times: Floats) -> Floats:
    """TTFT of prompts one after the other: max(end of the one before - arrival, 0) + own time. [s]"""
    end, found = 0.0, []
    for came, time in zip(arrival.tolist(), times.tolist(), strict=True):
        end = max(end, came) + time
        found.append(end - came)
    return np.array(found)


def correlation(one: Ints, other: Ints) -> float:
    """Pearson's of two loads; 0 where one of them never changes. [1]"""
    return float(np.corrcoef(one, other)[0, 1]) if np.ptp(one) > 0 and np.ptp(other) > 0 else 0.0


def best_lag(bench: ArrowBench, workload: str, share: float) -> tuple[float, float]:
    """Shift of the decode load against the prefill load that makes them most alike [s], and their correlation [1].

    ``share`` is that of Arrow's capacity.
    """
    scale = share * bench.capacity(workload, "arrow").rate_scale
    prefill, decode = loads(bench.result(workload, "arrow", scale), LOAD_STEP_S)
    steps = min(round(MOST_LAG_S / LOAD_STEP_S), prefill.size // 4)
    middle = prefill[steps : prefill.size - steps]
    shifts = range(-steps, steps + 1)
    found = [correlation(middle, decode[steps + shift : decode.size - steps + shift]) for shift in shifts]
    best = int(np.argmax(found))
    return LOAD_STEP_S * shifts[best], found[best]
