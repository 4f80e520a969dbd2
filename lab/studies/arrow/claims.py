"""Test the claims of "Arrow" (arXiv 2505.11916).

The policy counts requests that wait for memory as load of decode and corrects predictions by the last prompt, which
the paper does not print. So claims on the rates of Arrow come with a second verdict, of the policy without both.
Baselines have the best of five chunks. A9 and A10 hold by construction: the policy never gives up the last instance of
a phase, and a cache that stays moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from disagg_sim.arrays import Floats, Ints
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
from lab.studies.arrow.setup import ALL, AZURE, CHUNKED, COUNTS, HOUR, MODEL, TIGHT, TIGHT_TPOT, ArrowBench, loads
from lab.studies.bench import SCHEDULER, replicas
from lab.studies.claims import Finding, twice

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
#: Judges a claim with the cases of Arrow, and with those of Arrow as its paper prints it.
with_printed = partial(
    twice,
    ours="",
    theirs="_printed",
    rule="requests that wait for memory are no load of decode and no prediction is corrected, as printed",
)
RUN_OVER_FLIP = 10.0  # length of a run of A12 over the time of a flip, at least [1]


@TEXT.claim("A1")
def a1_flipping(bench: ArrowBench) -> Finding:
    """Capacity over static instances."""

    def gains(rule: str) -> tuple[str, bool]:
        code, conversation = (bench.ratio(name, f"arrow{rule}", "least_load") for name in AZURE)
        return f"code {code:.2f}, conversation {conversation:.2f}", code > conversation >= 1.0 and code >= 1.3

    seven = [bench.ratio(name, "arrow", "static_7_1") for name in AZURE]
    split = f"over a static 7 + 1, the split at which Arrow ends on code, {seven[0]:.2f} and {seven[1]:.2f}"
    return with_printed(gains, f"{bench.stand_ins(*AZURE)}{split}")


@TEXT.claim("A2")
def a2_least_load(bench: ArrowBench) -> Finding:
    """Attainment of least load minus that of round robin, static both."""
    mean, _ = _points(bench, AZURE, AROUND, "least_load", "round_robin", at="least_load")
    said = ", ".join(f"{name} {value:.1f} points" for name, value in mean.items())
    return Finding(said, all(0 <= value <= 10 for value in mean.values()), bench.stand_ins(*AZURE))


@TEXT.claim("A3")
def a3_baselines(bench: ArrowBench) -> Finding:
    """Capacity over TP8 co-located and 4 + 4 disaggregated, each with its best chunk."""

    def over(names: Sequence[str], one: str, other: str) -> str:
        return ", ".join(f"{name} {bench.ratio(name, one, other):.2f}" for name in names)

    return with_printed(
        lambda rule: above_both(over_tuned(bench, f"arrow{rule}")),
        f"{bench.stand_ins(*ALL)}over 8 x TP1 co-located Arrow reaches {over(ALL, 'arrow', 'colocated')}, under a TPOT "
        f"limit of {TIGHT_TPOT:g} s {over(TIGHT, 'arrow', 'colocated')}; those eight copies reach "
        f"{over(ALL, 'colocated', 'vllm')} times the TP8 instance",
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
    """Attainment when flips answer to first tokens that came late, seen every second, instead of predictions."""

    def points(rule: str) -> tuple[str, bool]:
        mean, _ = _points(bench, ALL, BELOW, f"observed{rule}", f"arrow{rule}", at=f"arrow{rule}")
        said = ", ".join(f"{name} {value:.1f} points" for name, value in mean.items())
        return said, all(value < 0 for value in mean.values())

    return with_printed(points, bench.stand_ins(*ALL))


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

    note = f"{bench.stand_ins(*ALL)}-: correlation below {COMMON:g} at any lag up to {MOST_LAG_S:g} s"
    return twice(follows, note, ours=COMMON, theirs=0.0, rule="the largest correlation counts however small it is")


@TEXT.claim("A7")
def a7_overload(bench: ArrowBench) -> Finding:
    """Latencies at twice the capacity."""
    return with_printed(lambda rule: overloaded(bench, f"arrow{rule}", "arrow"), bench.stand_ins(*ALL))


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

    def grows(rule: str) -> tuple[str, bool]:
        ratios = {name: bench.rate(name, f"arrow{rule}") / bench.rate(name, f"arrow_4{rule}") for name in AZURE}
        said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        return said, all(1.7 <= ratio <= 2.2 for ratio in ratios.values())

    return with_printed(grows, bench.stand_ins(*AZURE))


@TEXT.claim("A11")
def a11_what_breaks(bench: ArrowBench) -> Finding:
    """What the TP8 instance violates just above its capacity, with its best chunk."""
    tuned = {name: bench.tuned(name, "vllm") for name in ALL}
    return Finding(*broken(bench, tuned), bench.stand_ins(*ALL))


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
    lasts = bench.workloads[HOUR].trace.duration

    def within(rule: str) -> tuple[str, bool]:
        value, ratios = over_static(bench, SLOW_FLIPS, rule)
        return value, all(abs(ratio - 1) <= 0.1 for ratio in ratios) and lasts >= RUN_OVER_FLIP * max(SLOW_FLIPS)

    return with_printed(within, bench.stand_ins("code"))


def over_static(bench: ArrowBench, seconds: Sequence[int], rule: str) -> tuple[str, list[float]]:
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
    return with_printed(lambda rule: largest_on_code(over_tuned(bench, f"arrow{rule}")), bench.stand_ins(*ALL))


@TEXT.claim("A15")
def a15_idle_helps(bench: ArrowBench) -> Finding:
    """Attainment with the rule for idle instances less that without it, around the capacity of Arrow."""
    return with_printed(partial(helped, bench), bench.stand_ins("mooncake"))


def helped(bench: ArrowBench, rule: str) -> tuple[str, bool]:
    """Attainment on Mooncake with the help of idle instances less that without it."""
    mean, ranges = _points(bench, ("mooncake",), BELOW, f"arrow{rule}", f"no_help{rule}", at=f"arrow{rule}")
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
    return Finding(
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


@TEXT.claim("A9")
def a9_both_phases(bench: ArrowBench) -> Finding:
    """Fewest instances of either phase over all runs of Arrow, by their decision logs."""
    seen = bench.all_seen(*(name for name, case in bench.cases.items() if isinstance(case.policy, Arrow)))
    prefill, decode = (min(each.fewest[phase] for each in seen) for phase in (0, 1))
    return Finding(f"fewest: {prefill} of prefill, {decode} of decode", min(prefill, decode) >= 1)


@TEXT.claim("A10")
def a10_staying(bench: ArrowBench) -> Finding:
    """Transfer of requests that decode where their prefill was."""
    seen = bench.all_seen("arrow", "arrow_4")
    stayed, transfer = sum(each.stayed for each in seen), sum(each.stayed_transfer_s for each in seen)
    return Finding(f"{transfer:g} s over {stayed:,} requests that stayed", stayed > 0 and transfer == 0.0)


@TEXT.claim("A16")
def a16_no_oscillation(bench: ArrowBench) -> Finding:
    """Flips at the capacity and at twice as much."""
    return with_printed(lambda rule: fewer(flips(bench, f"arrow{rule}")), bench.stand_ins(*ALL))


def flips(bench: ArrowBench, arrow: str) -> dict[str, list[int]]:
    """Flips at the capacity and at twice as much, by trace. [1]"""
    capacities = {name: bench.capacity(name, arrow).rate_scale for name in ALL}
    return {
        name: [bench.seen(name, arrow, load * scale).summary.flips for load in (1.0, OVERLOAD)]
        for name, scale in capacities.items()
    }


def fewer(found: dict[str, list[int]]) -> tuple[str, bool]:
    """Flips in words, and whether overload has no more of them."""
    said = ", ".join(f"{name} {at:,} and {beyond:,}" for name, (at, beyond) in found.items())
    return said, all(beyond <= at for at, beyond in found.values())
