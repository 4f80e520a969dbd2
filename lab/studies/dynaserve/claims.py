"""Test the claims of "DynaServe" (arXiv 2504.09285) on its workloads.

Co-location runs with the best of seven chunks for each workload, by the measure of the claim, as section 6.1 of the
paper tunes it. The policy balances the parts of a new request where the paper prints the balance of all work, so claims
on its rates come with a second verdict, of the printed rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as Map
from functools import partial
from typing import Any

import numpy as np

from disagg_sim.workload.trace import concatenate
from lab.studies.bench import StudyCase
from lab.studies.claims import Finding, twice
from lab.studies.dynaserve import TEXT
from lab.studies.dynaserve.claims_equal import EQUAL, IN_LOOP, LARGEST, listed, scan, shape_name
from lab.studies.dynaserve.setup import (
    BATCH,
    CASES,
    COLOCATED,
    LARGE,
    MIDDLE,
    MIX,
    MODEL,
    SHAPES,
    WORKLOADS,
    DynaServeBench,
    DynaServeMeasures,
    as_printed,
    case_of,
    look,
)

ERRORS = (0.0, 10.0, 50.0, 100.0)  # of predicted outputs in Y12 [token]
PUSH_RATE, SMALL_CHUNK = 1.5, 32  # of Y13 [request/s] [token]
#: Rates of Y19 over the capacity of each, up to where all work is late, and the share of the peak that is level. [1]
BEYOND, PLATEAU = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0), 0.9
STRONG = ("code", "reasoning")  # workloads of Y10
#: A number of a workload under a case, such as its capacity. [request/s]
Measure = Callable[[str, str], float]
#: Makes the case of equal requests by its name, with some options.
EQUAL_LENGTHS = {"dynaserve": partial(case_of, "", "dynaserve"), "printed": partial(as_printed, "")}
KNOWN: dict[str, Any] = {"length_error": 0.0, "margin": 0}  # outputs are predicted exactly


#: Judges a claim with DynaServe, and with its algorithms 1 and 2 as printed and caches as in figure 7.
with_printed = partial(
    twice,
    ours="dynaserve",
    theirs="printed",
    rule="all work of both instances is balanced, chunks take blocks of their own, as printed",
)
#: Paper: mean ratios of Y7; rates [request/s] and goodput [token/s] of Y9, in the order of its statement.
MEANS, RATES_OF_MIX, GOODPUT_OF_MIX = (2.37, 1.37), (4.6, 5.9, 7.4), (316.3, 399.3, 473.8)


@TEXT.claim("Y7")
def y7_capacity(bench: DynaServeBench) -> Finding:
    """Serving capacity over co-location and disaggregation."""
    largest = [bench.rate(name, "dynaserve") / bench.rate(name, LARGEST) for name in WORKLOADS]
    note = f"{bench.stand_ins(*WORKLOADS)}over co-location with chunk 2048 {_by_name(WORKLOADS, largest)}"
    return with_printed(lambda name: gains(bench, WORKLOADS, name, bench.rate), note)


def gains(
    bench: DynaServeBench, names: Sequence[str], ours: str, rate: Measure, chunks: Sequence[str] = COLOCATED
) -> tuple[str, bool]:
    """Capacities over the best chunk and over disaggregation, and whether none loses and means are near the paper's."""
    tuned = {name: bench.colocated(name, rate, chunks) for name in names}
    ratios = []
    for others in (tuned, dict.fromkeys(names, "disaggregated")):
        both = [(rate(name, ours), rate(name, others[name])) for name in names]
        ratios.append([mine / other if other else math.nan for mine, other in both])
    means = [float(np.mean(found)) for found in ratios]
    close = all(abs(mean / paper - 1) <= 0.3 for mean, paper in zip(means, MEANS, strict=True))
    said = [f"{_by_name(names, found)} (mean {mean:.2f})" for found, mean in zip(ratios, means, strict=True)]
    return f"co-located {said[0]}, disaggregated {said[1]}", bool(np.min(ratios) >= 1) and close


@TEXT.claim("Y8")
def y8_goodput(bench: DynaServeBench) -> Finding:
    """Compare goodput at the capacity of each policy."""
    largest = max(bench.goodput(name, "dynaserve") / bench.goodput(name, LARGEST) for name in WORKLOADS)
    tuned = {name: bench.colocated(name, bench.goodput) for name in WORKLOADS}
    note = f"{bench.stand_ins(*WORKLOADS)}with chunk 2048 up to {largest:.2f}"
    return with_printed(lambda name: goodputs(bench, name, tuned), note)


def goodputs(bench: DynaServeBench, ours: str, tuned: Map[str, str]) -> tuple[str, bool]:
    """Goodput over co-location, a case for each workload, and over disaggregation, and whether each is beaten once."""
    found = {
        other: [bench.goodput(name, ours) / bench.goodput(name, case) for name, case in cases.items()]
        for other, cases in (("co-located", tuned), ("disaggregated", dict.fromkeys(tuned, "disaggregated")))
    }
    said = ", ".join(f"{max(each):.2f} times {other}" for other, each in found.items())
    each = "; ".join(f"{other} {_by_name(tuned, ratios)}" for other, ratios in found.items())
    return f"up to {said} ({each})", min(map(max, found.values())) > 1


@TEXT.claim("Y9")
def y9_mix(bench: DynaServeBench) -> Finding:
    """The mix of BurstGPT and Azure code, with the chunk that is best by capacity, and by goodput."""
    chunks = [bench.colocated(MIX, measure) for measure in (bench.rate, bench.goodput)]
    note = f"{bench.stand_ins(MIX)}chunk 2048 serves {bench.rate(MIX, LARGEST):.2f}"
    return with_printed(lambda name: ordered(bench, name, chunks), note)


def ordered(bench: DynaServeBench, ours: str, chunks: Sequence[str]) -> tuple[str, bool]:
    """Capacities and goodput on the mix, and whether their order and ratios are the paper's."""
    rates, good = (
        [measure(MIX, case) for case in (chunk, "disaggregated", ours)]
        for measure, chunk in zip((bench.rate, bench.goodput), chunks, strict=True)
    )
    order = rates[0] < rates[1] < rates[2] and good[0] < good[1] < good[2]
    near = near_ratios(rates, RATES_OF_MIX) and near_ratios(good, GOODPUT_OF_MIX)
    said = f"order {'holds' if order else 'fails'}, ratios {'hold' if near else 'fail'}"
    return f"{listed(rates, '.2f')} requests/s, goodput {listed(good, '.0f')} tokens/s: {said}", order and near


@TEXT.claim("Y10")
def y10_who_is_strong(bench: DynaServeBench) -> Finding:
    """Co-location against disaggregation on prompts and on answers."""
    largest = ", ".join(f"{name} {bench.rate(name, LARGEST):.2f}" for name in STRONG)
    tuned = {name: bench.colocated(name) for name in STRONG}
    return Finding(*strong(bench.rate, tuned), f"{bench.stand_ins(*STRONG)}with chunk 2048 {largest}")


def strong(rate: Measure, together: Map[str, str]) -> tuple[str, bool]:
    """Rates of co-location, by workload in some case, against disaggregation, and whether each is strong at its own."""
    both = {name: (rate(name, case), rate(name, "disaggregated")) for name, case in together.items()}
    said = ", ".join(f"{name} {one:.2f} against {other:.2f}" for name, (one, other) in both.items())
    return said, both["code"][1] > both["code"][0] and both["reasoning"][0] > both["reasoning"][1]


@TEXT.claim("Y11")
def y11_slo_aware(bench: DynaServeBench) -> Finding:
    """Tokens within the limit with and without SLO-aware batches."""

    def inside(aware: str) -> tuple[str, bool]:
        rate, full = bench.rate(MIX, aware), "full_steps" if aware == "dynaserve" else "printed_full_steps"
        ours, theirs = (bench.seen(MIX, name, rate).inside for name in (aware, full))
        return f"{100 * ours:.1f} % against {100 * theirs:.1f} %", ours >= 0.95 and theirs <= 0.75

    return with_printed(inside, bench.stand_ins(MIX))


@TEXT.claim("Y12")
def y12_length_error(bench: DynaServeBench) -> Finding:
    """Goodput by the error of predicted outputs."""

    def loses(name: str) -> tuple[str, bool]:
        cases = [EQUAL_LENGTHS[name](length_error=error) for error in ERRORS]
        found = [bench.saturated(SHAPES[-1], case).goodput for case in cases]
        loss = 1 - found[-1] / found[0]
        return f"{listed(found, '.0f')} tokens/s, loss {100 * loss:.1f} %", loss < 0.06

    return with_printed(loses)


@TEXT.claim("Y13")
def y13_push(bench: DynaServeBench) -> Finding:
    """Transfer that requests wait for."""

    def waits(name: str) -> tuple[str, bool]:
        share = bench.seen("reasoning", name, PUSH_RATE).exposed
        return f"exposed {100 * share:.1f} % of the transfer", share <= 0.1

    trace = bench.workloads["reasoning"].trace.scaled(PUSH_RATE)
    small = look(bench.result(trace, CASES["dynaserve"], chunk=SMALL_CHUNK), PUSH_RATE).exposed
    note = f"{bench.stand_ins('reasoning')}in chunks of {SMALL_CHUNK} {small:.1%}"
    return with_printed(waits, note)


@TEXT.claim("Y15")
def y15_six_steps(bench: DynaServeBench) -> Finding:
    """Six halvings against all splits, in closed loops of equal requests with outputs known exactly to both."""
    return with_printed(lambda name: reaches(bench, EQUAL_LENGTHS[name], 0.98))


def reaches(bench: DynaServeBench, case: Callable[..., StudyCase], least: float) -> tuple[str, bool]:
    """Rates of splits that follow the queue, and whether all are at least a share of the best split for all."""
    said, shares = [], []
    for shape, model, batch in ((EQUAL, MIDDLE, IN_LOOP), (SHAPES[1], MODEL, BATCH), (SHAPES[2], MODEL, BATCH)):
        own = case(model=model, **KNOWN)
        found = scan(bench, shape, model=model, batch=batch, transfer=own.transfer)
        best = max(seen.steady for seen in found.values())
        rate = bench.saturated(shape, own, batch).steady
        shares.append(rate / best)
        said.append(f"{shape_name(shape)} {rate:.3f} of {best:.3f}")
    return f"{'; '.join(said)} requests/s", min(shares) >= least


def over_sizes(bench: DynaServeBench, ours: str, chunks: Sequence[str] = COLOCATED) -> tuple[str, bool]:
    """Goodput on the mix over co-location and disaggregation, by model."""
    ratios = []
    for model in ("", f"_{MIDDLE}", f"_{LARGE}"):
        mine = bench.goodput(MIX, f"{ours}{model}")
        together = max(bench.goodput(MIX, f"{chunk}{model}") for chunk in chunks)
        ratios.append((mine / together, mine / bench.goodput(MIX, f"disaggregated{model}")))
    over_both, over_apart = zip(*ratios, strict=True)
    said = f"co-located {listed(over_both, '.2f')}, disaggregated {listed(over_apart, '.2f')}"
    return f"14B / 32B / 72B: {said}", min(over_apart) > 1 and over_both[-1] > over_both[0]


@TEXT.claim("Y18")
def y18_sizes(bench: DynaServeBench) -> Finding:
    """Goodput over both by the size of the model, on two instances of one, two and four GPUs."""
    return with_printed(partial(over_sizes, bench), bench.stand_ins(MIX))


def beyond_capacity(bench: DynaServeBench, ours: str, chunk: str) -> tuple[str, bool]:
    """Goodput on the mix at rates from the capacity on, over the largest of them, and what is left past that peak."""
    said, left = [], {}
    for case in (ours, chunk):
        found = np.array([_beyond(bench, case, factor).goodput for factor in BEYOND])
        shares = found / found.max()
        left[case] = float(shares[found.argmax() :].min())
        said.append(f"{CASES[case].label} {listed(shares.tolist(), '.2f')} of {found.max():.0f} tokens/s")
    return "; ".join(said), left[ours] >= PLATEAU > left[chunk]


def _beyond(bench: DynaServeBench, case: str, factor: float) -> DynaServeMeasures:
    """A run on the mix at a rate over the capacity, repeated so that arrivals last as long as there."""
    rate = factor * bench.rate(MIX, case)
    trace = concatenate([bench.workloads[MIX].trace] * math.ceil(factor)).scaled(rate)
    return bench.once(("beyond", case, factor), lambda: look(bench.result(trace, CASES[case]), rate))


@TEXT.claim("Y19")
def y19_plateau(bench: DynaServeBench) -> Finding:
    """Goodput beyond the capacity of each."""
    chunk = bench.colocated(MIX)
    return with_printed(lambda name: beyond_capacity(bench, name, chunk), bench.stand_ins(MIX))


def near_ratios(found: Sequence[float], paper: Sequence[float]) -> bool:
    """Whether the last of three numbers is over each other one within 20 % of the paper's ratio."""
    return all(abs(found[2] / found[i] / (paper[2] / paper[i]) - 1) <= 0.2 for i in range(2))


def _by_name(names: Iterable[str], ratios: Sequence[float]) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(names, ratios, strict=True))
