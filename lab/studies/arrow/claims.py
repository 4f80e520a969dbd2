"""Test the claims of "Arrow" (arXiv 2505.11916) on its runs; those on its rules are in ``claims_rules``.

The policy counts requests that wait for memory as load of decode and corrects predictions by the last prompt, which
the paper does not print. So claims on the rates of Arrow come with a second verdict, of the policy without both.
Baselines have the best of five chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from disagg_sim.arrays import Floats, Ints
from lab.studies.arrow import TEXT
from lab.studies.arrow.setup import ALL, AZURE, CHUNKED, COUNTS, HALF, HOUR, TIGHT, TIGHT_TPOT, ArrowBench, loads
from lab.studies.claims import Finding, Without

#: Rate scales over the capacity of least load at which A2 compares, and over that of Arrow at which A5 does. [1]
AROUND = (0.6, 0.8, 1.0, 1.2, 1.4)
BELOW = (0.7, 0.8, 0.9, 1.0, 1.1)
OVERLOAD = 2.0  # times capacity [1]
LOAD_STEP_S = 0.1  # between samples of the loads of A6 [s]
MOST_LAG_S = 30.0  # that A6 tries [s]
SHARES = (0.5, 1.0)  # of capacity at which it looks [1]
COMMON = 0.3  # least correlation of loads that have a burst in common [1]
SLOW_FLIPS = (60, 300)  # of A12 [s]
#: Factors over vLLM and vLLM-disaggregated that the abstract prints, and how near 30 % is. [1]
LARGEST, NEAR = (5.62, 7.78), 0.3
#: What a claim comes to with Arrow as its paper prints it.
printed = partial(
    Without, "requests that wait for memory are no load of decode and no prediction is corrected, as printed"
)
RUN_OVER_FLIP = 10.0  # length of a run of A12 over the time of a flip, at least [1]


@TEXT.claim("A1")
def a1_flipping(bench: ArrowBench) -> Finding:
    """Capacity over static instances."""

    def gains(arrow: str) -> tuple[str, bool]:
        code, conversation = (bench.ratio(name, arrow, "least_load") for name in AZURE)
        return f"code {code:.2f}, conversation {conversation:.2f}", code > conversation >= 1.0 and code >= 1.3

    single = [bench.ratio(name, "arrow_single", "least_load_single") for name in AZURE]
    seven = [bench.ratio(name, "arrow", "static_7_1") for name in AZURE]
    others = ", ".join(f"{name} {bench.ratio(name, 'arrow', 'least_load'):.2f}" for name in ALL[2:])
    return Finding(
        *gains("arrow"),
        f"{bench.stand_ins(*ALL)}{others}; with one prompt a step, code {single[0]:.2f}, conversation "
        f"{single[1]:.2f}; over a static 7 + 1, the split at which Arrow ends on code, {seven[0]:.2f} and "
        f"{seven[1]:.2f}; paper 1.67 and 1.1",
        printed(*gains("arrow_printed")),
    )


@TEXT.claim("A2")
def a2_least_load(bench: ArrowBench) -> Finding:
    """Attainment of least load minus that of round robin, static both."""
    mean, ranges = _points(bench, AZURE, AROUND, "least_load", "round_robin", at="least_load")
    return Finding(
        ", ".join(f"{name} {value:.1f} points" for name, value in mean.items()),
        all(0 <= value <= 10 for value in mean.values()),
        f"{bench.stand_ins(*AZURE)}mean over {AROUND[0]:g} to {AROUND[-1]:g} times the capacity of least load; by rate "
        f"{ranges}; paper 4.3 and 2.4",
    )


@TEXT.claim("A3")
def a3_baselines(bench: ArrowBench) -> Finding:
    """Capacity over TP8 co-located and 4 + 4 disaggregated, each with its best chunk."""

    paper = ", ".join("{:.2f} and {:.2f}".format(*bench.workloads[name].paper) for name in ALL)
    usual = ", ".join(
        " and ".join(f"{bench.ratio(name, 'arrow', baseline):.2f}" for baseline in CHUNKED) for name in ALL
    )
    chosen = ", ".join(
        " and ".join(f"{CHUNKED[baseline][bench.tuned(name, baseline)]:,}" for baseline in CHUNKED) for name in ALL
    )
    same = ", ".join(f"{name} {bench.ratio(name, 'arrow', 'colocated'):.2f}" for name in ALL)
    tight = ", ".join(f"{name} {bench.ratio(name, 'arrow', 'colocated'):.2f}" for name in TIGHT)
    copies = ", ".join(f"{name} {bench.ratio(name, 'colocated', 'vllm'):.2f}" for name in ALL)
    return Finding(
        *above_both(over_tuned(bench, "arrow")),
        f"{bench.stand_ins(*ALL)}over TP8 and 4 + 4, chunks {chosen} tokens; with chunks of 2,048 {usual}; paper "
        f"{paper}; over 8 x TP1 co-located Arrow reaches {same}; those eight copies reach {copies} times "
        f"the TP8 instance. Their steps mix decodes with chunks and stay inside these TPOT limits; under one of "
        f"{TIGHT_TPOT:g} s Arrow reaches {tight} times what they do",
        printed(*above_both(over_tuned(bench, "arrow_printed"))),
    )


def over_tuned(bench: ArrowBench, arrow: str) -> dict[str, list[float]]:
    """Capacity over that of each baseline with its best chunk, by trace. [1]"""
    return {name: [bench.ratio(name, arrow, bench.tuned(name, baseline)) for baseline in CHUNKED] for name in ALL}


def above_both(found: Mapping[str, Sequence[float]]) -> tuple[str, bool]:
    """Factors over both baselines by trace, and whether all are above 1.5."""
    said = ", ".join(f"{name} {both[0]:.2f} and {both[1]:.2f}" for name, both in found.items())
    return said, min(map(min, found.values())) > 1.5


@TEXT.claim("A5")
def a5_reacting(bench: ArrowBench) -> Finding:
    """Attainment when flips answer to late requests instead of predictions."""

    def points(observed: str, arrow: str) -> tuple[str, bool, str]:
        mean, ranges = _points(bench, ALL, BELOW, observed, arrow, at=arrow)
        said = ", ".join(f"{name} {value:.1f} points" for name, value in mean.items())
        return said, all(value < 0 for value in mean.values()), ranges

    value, holds, ranges = points("observed", "arrow")
    return Finding(
        value,
        holds,
        f"{bench.stand_ins(*ALL)}mean over {BELOW[0]:g} to {BELOW[-1]:g} times the capacity of Arrow; by rate {ranges}"
        f"; it looks every second for a first token that came after the limit, and places as Arrow does",
        printed(*points("observed_printed", "arrow_printed")[:2]),
    )


@TEXT.claim("A6")
def a6_lag(bench: ArrowBench) -> Finding:
    """Lag at which the decode load follows the prefill load best, where the two have something in common."""
    lags = {share: {name: best_lag(bench, name, share) for name in ALL} for share in SHARES}

    def follows(least: float) -> tuple[str, bool]:
        said, bursts = [], []
        for share, found in lags.items():
            shown = [f"{name} {lag:.1f} s" if alike >= least else f"{name} -" for name, (lag, alike) in found.items()]
            said.append(f"at {share:g} of capacity {', '.join(shown)}")
            bursts += [lag for lag, alike in found.values() if alike >= least]
        return "; ".join(said), bool(bursts) and min(bursts) > 0

    return Finding(
        *follows(COMMON),
        f"{bench.stand_ins(*ALL)}requests in prefill, waiting ones too, and in decode, every {LOAD_STEP_S:g} s; -: "
        f"correlation below {COMMON:g} at any lag up to {MOST_LAG_S:g} s, no burst to follow",
        Without("the largest correlation counts however small it is", *follows(0.0)),
    )


@TEXT.claim("A7")
def a7_overload(bench: ArrowBench) -> Finding:
    """Latencies at twice the capacity."""
    return Finding(
        *overloaded(bench, "arrow", "arrow"),
        f"{bench.stand_ins(*ALL)}at {OVERLOAD:g} times capacity",
        printed(*overloaded(bench, "arrow_printed", "arrow")),
    )


def over_limits(bench: ArrowBench, workload: str, case: str, scale: float) -> tuple[float, float]:
    """P90 of TTFT and of TPOT at a rate scale, over their limits. [1]"""
    row, slo = bench.seen(workload, case, scale).summary, bench.workloads[workload].slo
    return row.ttft_p90_s / slo.ttft, row.tpot_p90_s / slo.tpot


def overloaded(bench: ArrowBench, arrow: str, at: str) -> tuple[str, bool]:
    """Latencies of a case at twice the capacity of another, and whether TTFT alone is late."""
    said, worst, late = [], 0.0, True
    for name in ALL:
        scale = OVERLOAD * bench.capacity(name, at).rate_scale
        ttft, tpot = over_limits(bench, name, arrow, scale)
        worst, late = max(worst, tpot), late and ttft > 1
        said.append(f"{name} TPOT {tpot:.2f}, TTFT {ttft:.1f}")
    return f"P90 over its limit: {'; '.join(said)}", worst <= 1.2 and late


@TEXT.claim("A8")
def a8_scaling(bench: ArrowBench) -> Finding:
    """Eight instances over four."""

    def grows(arrow: str, four: str) -> tuple[str, bool]:
        ratios = {name: bench.rate(name, arrow) / bench.rate(name, four) for name in AZURE}
        said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        return said, all(1.7 <= ratio <= 2.2 for ratio in ratios.values())

    thinned = bench.rate("code", "arrow") / bench.rate(HALF, "arrow_4")
    return Finding(
        *grows("arrow", "arrow_4"),
        f"{bench.stand_ins(*AZURE)}capacities {_rates(bench, 'arrow')} and {_rates(bench, 'arrow_4')} requests/s. "
        f"Stretched time stamps make bursts as much longer as rates fall, against limits that stay; with every second "
        f"request of code instead, bursts as long for four instances as for eight, {thinned:.2f}; one instance has to "
        f"decode: 7 over 3 for prefill is 2.33",
        printed(*grows("arrow_printed", "arrow_4_printed")),
    )


@TEXT.claim("A11")
def a11_what_breaks(bench: ArrowBench) -> Finding:
    """What the TP8 instance violates just above its capacity, with its best chunk."""
    return Finding(
        *broken(bench, {name: bench.tuned(name, "vllm") for name in ALL}),
        f"{bench.stand_ins(*ALL)}at the smallest rate tried above capacity, with the chunks of A3",
    )


def broken(bench: ArrowBench, cases: Mapping[str, str]) -> tuple[str, bool]:
    """Latencies of a case of each trace just above its capacity, and whether TTFT alone is late."""
    said, holds = [], True
    for name, case in cases.items():
        above = bench.capacity(name, case).above
        if math.isinf(above):
            said.append(f"{name} no rate was too much")
            continue
        ttft, tpot = over_limits(bench, name, case, above)
        holds = holds and ttft > 1 >= tpot
        said.append(f"{name} TTFT {ttft:.2f}, TPOT {tpot:.2f}")
    return f"P90 over its limit: {'; '.join(said)}", holds


@TEXT.claim("A12")
def a12_slow_flips(bench: ArrowBench) -> Finding:
    """Capacity over static instances when a flip takes an instance out of service, on a trace that keeps its hour."""
    free = bench.ratio(HOUR, "arrow", "least_load")
    lasts = bench.workloads[HOUR].trace.duration
    flips = [bench.flips(HOUR, name, 1.0) for name in ("arrow", *(f"flip_{seconds}" for seconds in SLOW_FLIPS))]

    def within(rule: str = "") -> tuple[str, bool]:
        value, ratios = over_static(bench, SLOW_FLIPS, rule)
        return value, all(abs(ratio - 1) <= 0.1 for ratio in ratios) and lasts >= RUN_OVER_FLIP * max(SLOW_FLIPS)

    return Finding(
        *within(),
        f"{bench.stand_ins('code')}without delay {free:.2f}; rates by more requests in the same hour, {lasts:,.0f} s: "
        f"dividing its time stamps leaves {lasts / bench.capacity('code', 'arrow').rate_scale:.0f} s at Arrow's "
        f"capacity, less than one flip; static {bench.rate(HOUR, 'least_load'):.1f} requests/s, Arrow "
        f"{bench.rate(HOUR, 'arrow'):.1f}; flips at capacity {', '.join(f'{n:,}' for n in flips)} "
        f"without delay, with 60 and with 300 s; a flip drains the instance first",
        printed(*within("_printed")),
    )


def over_static(bench: ArrowBench, seconds: Sequence[int], rule: str = "") -> tuple[str, list[float]]:
    """Capacity over static instances on the hour of code by the time of a flip, in words as well; as ``rule`` has it.

    Takes ``rule``: "" with the added rules, "_printed" without them, "_read" with waiting requests as load alone.
    """
    ratios = [bench.ratio(HOUR, f"flip_{each}{rule}", "least_load") for each in seconds]
    return ", ".join(f"{each} s {ratio:.2f}" for each, ratio in zip(seconds, ratios, strict=True)), ratios


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


def correlation(one: Ints | Floats, other: Ints | Floats) -> float:
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


def largest_on_code(found: Mapping[str, Sequence[float]]) -> tuple[str, bool]:
    """The largest factor over either baseline, by trace, against those of the abstract."""
    said, holds = [], True
    for number, (baseline, paper) in enumerate(zip(CHUNKED, LARGEST, strict=True)):
        name = max(found, key=lambda trace: found[trace][number])
        factor = found[name][number]
        holds = holds and name == "code" and abs(factor / paper - 1) <= NEAR
        said.append(f"{factor:.2f} over {baseline} on {name}")
    return ", ".join(said), holds


@TEXT.claim("A13")
def a13_factors(bench: ArrowBench) -> Finding:
    """The largest factors over baselines with their best chunks."""
    ours, theirs = (largest_on_code(over_tuned(bench, arrow)) for arrow in ("arrow", "arrow_printed"))
    return Finding(*ours, bench.stand_ins(*ALL), printed(*theirs))


@TEXT.claim("A15")
def a15_idle_helps(bench: ArrowBench) -> Finding:
    """Attainment with the rule for idle instances less that without it, around the capacity of Arrow."""
    return Finding(
        *helped(bench, "arrow", "no_help"),
        f"{bench.stand_ins('mooncake')}at {BELOW[0]:g} to {BELOW[-1]:g} times the capacity of Arrow; late tokens over "
        f"a time still flip an instance without it",
        printed(*helped(bench, "arrow_printed", "no_help_printed")),
    )


def helped(bench: ArrowBench, arrow: str, alone: str) -> tuple[str, bool]:
    """Attainment on Mooncake with the help of idle instances less that without it."""
    mean, ranges = _points(bench, ("mooncake",), BELOW, arrow, alone, at=arrow)
    return f"{mean['mooncake']:+.1f} points, by rate {ranges.removeprefix('mooncake ')}", mean["mooncake"] > 0


def by_gpus(bench: ArrowBench, name: str) -> tuple[Floats, Floats]:
    """Attainment of Arrow and of minimal load by GPU count, at the rate that Arrow serves with eight. [1]"""
    scale = bench.capacity(name, "arrow_printed").rate_scale
    aware, least = (
        np.array([bench.attainments(name, f"{case}_of_{count}", (scale,))[0] for count in COUNTS])
        for case in ("arrow", "least_load")
    )
    return aware, least


@TEXT.claim("A14")
def a14_every_count(bench: ArrowBench) -> Finding:
    """How far minimal load on half the instances each stays behind, by GPU count."""
    said, holds = [], True
    for name in AZURE:
        aware, least = by_gpus(bench, name)
        holds = holds and bool((aware > least)[np.array(COUNTS) > 2].all())
        said.append(f"{name} {', '.join(f'{100 * points:+.1f}' for points in aware - least)} points")
    return Finding(f"{COUNTS[0]} to {COUNTS[-1]} GPUs: {'; '.join(said)}", holds, bench.stand_ins(*AZURE))
