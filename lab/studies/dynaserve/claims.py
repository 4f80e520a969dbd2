"""Test the claims of "DynaServe" (arXiv 2504.09285) on its workloads.

Co-location runs with the best of seven chunks for each workload, by the measure of the claim, as section 6.1 of the
paper tunes it. The policy balances the parts of a new request where the paper prints the balance of all work, so claims
on its rates come with a second verdict, of the printed rule.

As the authors set them up DynaServe is algorithm 1 as printed, which balances all work of both instances, on vLLM V0
and V1: section 6.1 names vLLM 0.7.2 for the baselines and an extension from "v0" to "v1" for disaggregation.
Acceptances were set before these runs; where the paper leaves a setting open, ``inferred`` says how it was filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from disagg_sim.workload.trace import concatenate
from lab.studies.claims import Finding, Told, Ways, Without
from lab.studies.dynaserve import TEXT
from lab.studies.dynaserve.claims_equal import DOUBLED, EQUAL, IN_LOOP, LARGEST, PULLED, listed, scan, shape_name
from lab.studies.dynaserve.setup import (
    ARXIV,
    BATCH,
    CASES,
    CHUNK,
    COLOCATED,
    LARGE,
    MIDDLE,
    MIX,
    MODEL,
    SHAPES,
    WORKLOADS,
    DynaServeBench,
    DynaServeMeasures,
    case_with,
    look,
)

ERRORS = (0.0, 10.0, 50.0, 100.0)  # of predicted outputs in Y12 [token]
PUSH_RATE, SMALL_CHUNK = 1.5, 32  # of Y13 [request/s] [token]
#: Chunks of a pushed cache that Y13 tries, the first of them a whole cache: the paper prints none. [token]
PUSHED = (10**6, CHUNK, SMALL_CHUNK)
BELOW = 0.7  # rate of Y13, a share of the capacity; at more caches wait for memory [1]
#: Share of the best split that a bisection of six steps is to reach: "within 1 %" of an offline oracle. [1]
ORACLE = 0.99
#: Rates of Y19 over the capacity of each, up to where all work is late, and the share of the peak that is level. [1]
BEYOND, PLATEAU = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0), 0.9
#: The two readings of section 6.3 of which requests are late.
BY_REQUESTS = Ways("rate", "request_rate", "at most 1 % of the requests have a gap above 100 ms")
THEIRS = ("code", ARXIV, "burstgpt", "reasoning")  # the four workloads of section 6.1
STRONG = ("code", "reasoning")  # workloads of Y10
#: A number of a workload under a case, such as its capacity. [request/s]
Measure = Callable[[str, str], float]


#: Cases of DynaServe, and of its algorithms 1 and 2 as printed and caches as in figure 7.
PRINTED = Ways(
    "dynaserve", "printed", "all work of both instances is balanced, chunks take blocks of their own, as printed"
)
#: Paper: mean ratios of Y7; rates [request/s] and goodput [token/s] of Y9, in the order of its statement.
MEANS, RATES_OF_MIX, GOODPUT_OF_MIX = (2.37, 1.37), (4.6, 5.9, 7.4), (316.3, 399.3, 473.8)


@TEXT.claim("Y7", ways=PRINTED, data=WORKLOADS)
def y7_capacity(bench: DynaServeBench, ours: str) -> Told:
    """Serving capacity over co-location and disaggregation."""
    largest = [bench.rate(name, "dynaserve") / bench.rate(name, LARGEST) for name in WORKLOADS]
    note = f"over co-location with chunk 2048 {_by_name(WORKLOADS, largest)}"
    return *gains(bench, "rate", ours=ours, names=WORKLOADS, chunks=COLOCATED), note


@TEXT.authors("Y7", ways=BY_REQUESTS, data=THEIRS, ours="printed", names=THEIRS, chunks=DOUBLED)
def gains(
    bench: DynaServeBench, by: str, *, ours: str, names: Sequence[str], chunks: Sequence[str]
) -> tuple[str, bool]:
    """Capacities over the best chunk and over disaggregation, and whether none loses and means are near the paper's."""
    rate: Measure = getattr(bench, by)
    tuned = {name: bench.colocated(name, rate, chunks) for name in names}
    ratios = []
    for others in (tuned, dict.fromkeys(names, "disaggregated")):
        both = [(rate(name, ours), rate(name, others[name])) for name in names]
        ratios.append([mine / other if other else math.nan for mine, other in both])
    means = [float(np.mean(found)) for found in ratios]
    close = all(abs(mean / paper - 1) <= 0.3 for mean, paper in zip(means, MEANS, strict=True))
    said = [f"{_by_name(names, found)} (mean {mean:.2f})" for found, mean in zip(ratios, means, strict=True)]
    return f"co-located {said[0]}, disaggregated {said[1]}", bool(np.min(ratios) >= 1) and close


@TEXT.claim("Y8", ways=PRINTED, data=WORKLOADS)
def y8_goodput(bench: DynaServeBench, ours: str) -> Told:
    """Compare goodput at the capacity of each policy."""
    largest = max(bench.goodput(name, "dynaserve") / bench.goodput(name, LARGEST) for name in WORKLOADS)
    found = goodputs(bench, ours, names=WORKLOADS, by="goodput", chunks=COLOCATED)
    return *found, f"with chunk 2048 up to {largest:.2f}"


@TEXT.authors("Y8", data=THEIRS, ours="printed", names=THEIRS, by="rate", chunks=DOUBLED)
def goodputs(
    bench: DynaServeBench, ours: str, *, names: Sequence[str], by: str, chunks: Sequence[str]
) -> tuple[str, bool]:
    """Goodput over co-location with its best chunk and over disaggregation, and whether each is beaten once."""
    tuned = {name: bench.colocated(name, getattr(bench, by), chunks) for name in names}
    found = {
        other: [bench.goodput(name, ours) / bench.goodput(name, case) for name, case in cases.items()]
        for other, cases in (("co-located", tuned), ("disaggregated", dict.fromkeys(tuned, "disaggregated")))
    }
    said = ", ".join(f"{max(each):.2f} times {other}" for other, each in found.items())
    each = "; ".join(f"{other} {_by_name(tuned, ratios)}" for other, ratios in found.items())
    return f"up to {said} ({each})", min(map(max, found.values())) > 1


@TEXT.claim("Y9", ways=PRINTED, data=(MIX,))
def y9_mix(bench: DynaServeBench, ours: str) -> Told:
    """The mix of BurstGPT and Azure code, with the chunk that is best by capacity, and by goodput."""
    chunks = [bench.colocated(MIX, measure) for measure in (bench.rate, bench.goodput)]
    return *ordered(bench, ours, chunks), f"chunk 2048 serves {bench.rate(MIX, LARGEST):.2f}"


@TEXT.authors("Y9", data=(MIX,))
def mix(bench: DynaServeBench) -> Finding:
    """Half BurstGPT, half Azure code."""
    chunk, other = (bench.colocated(MIX, rate, DOUBLED) for rate in (bench.rate, bench.request_rate))
    fewer = [bench.request_rate(MIX, each) for each in (other, "disaggregated", "printed")]
    second = f"{listed(fewer, '.2f')} requests/s, the order alone", fewer[0] < fewer[1] < fewer[2]
    return Finding(*ordered(bench, "printed", (chunk, chunk)), without=Without(BY_REQUESTS.rule, *second))


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


@TEXT.claim("Y10", data=STRONG)
def y10_who_is_strong(bench: DynaServeBench) -> Told:
    """Co-location against disaggregation on prompts and on answers."""
    largest = ", ".join(f"{name} {bench.rate(name, LARGEST):.2f}" for name in STRONG)
    return *strong(bench, "rate", COLOCATED), f"with chunk 2048 {largest}"


@TEXT.authors("Y10", ways=BY_REQUESTS, data=STRONG, chunks=DOUBLED)
def strong(bench: DynaServeBench, by: str, chunks: Sequence[str]) -> tuple[str, bool]:
    """Rates of co-location with its best chunk against disaggregation, and whether each is strong at its own."""
    rate: Measure = getattr(bench, by)
    both = {name: (rate(name, bench.colocated(name, rate, chunks)), rate(name, "disaggregated")) for name in STRONG}
    said = ", ".join(f"{name} {one:.2f} against {other:.2f}" for name, (one, other) in both.items())
    return said, both["code"][1] > both["code"][0] and both["reasoning"][0] > both["reasoning"][1]


@TEXT.claim("Y11", ways=PRINTED, data=(MIX,))
def y11_slo_aware(bench: DynaServeBench, aware: str) -> Told:
    """Tokens within the limit with and without SLO-aware batches."""
    rate, full = bench.rate(MIX, aware), "full_steps" if aware == "dynaserve" else "printed_full_steps"
    ours, theirs = (bench.seen(MIX, name, rate).inside for name in (aware, full))
    return f"{100 * ours:.1f} % against {100 * theirs:.1f} %", ours >= 0.95 and theirs <= 0.75


@TEXT.claim("Y12", ways=PRINTED)
def y12_length_error(bench: DynaServeBench, name: str) -> Told:
    """Goodput by the error of predicted outputs."""
    cases = [case_with(name, length_error=error) for error in ERRORS]
    found = [bench.saturated(SHAPES[-1], case).goodput for case in cases]
    loss = 1 - found[-1] / found[0]
    return f"{listed(found, '.0f')} tokens/s, loss {100 * loss:.1f} %", loss < 0.06


@TEXT.claim("Y13", ways=PRINTED, data=("reasoning",))
def y13_push(bench: DynaServeBench, name: str) -> Told:
    """Transfer that requests wait for."""
    trace = bench.workloads["reasoning"].trace.scaled(PUSH_RATE)
    small = bench.once(
        ("small chunks",), lambda: look(bench.result(trace, CASES["dynaserve"], chunk=SMALL_CHUNK), PUSH_RATE)
    )
    share = bench.seen("reasoning", name, PUSH_RATE).exposed
    note = f"in chunks of {SMALL_CHUNK} {small.exposed:.1%}"
    return f"exposed {100 * share:.1f} % of the transfer", share <= 0.1, note


@TEXT.authors("Y13", ways=Ways(0, 1, f"chunks of {PUSHED[2]} tokens"), data=("reasoning",))
def push(bench: DynaServeBench, number: int) -> Told:
    """Transfer of reasoning requests that they wait for, over that of caches pushed whole, by the size of a chunk."""
    rate = BELOW * bench.rate("reasoning", "printed")
    trace = bench.workloads["reasoning"].trace.scaled(rate)

    def exposed(chunk: int) -> float:
        run = look(bench.result(trace, CASES["printed"], chunk=chunk), rate)
        return run.exposed

    whole, *shares = (bench.once(("pushed", chunk), partial(exposed, chunk)) for chunk in PUSHED)
    left = shares[number] / whole
    return f"{100 * (1 - left):.0f} % less with chunks of {PUSHED[1 + number]}", left <= 0.1


@TEXT.authors("Y15", ways=PULLED, name="printed", least=ORACLE)
def reaches(bench: DynaServeBench, transfer: str | None, *, name: str, least: float) -> tuple[str, bool]:
    """Rates of splits that follow the queue, and whether all are at least a share of the best split for all."""
    said, shares = [], []
    for shape, model, batch in ((EQUAL, MIDDLE, IN_LOOP), (SHAPES[1], MODEL, BATCH), (SHAPES[2], MODEL, BATCH)):
        own = case_with(name, model=model, length_error=0.0, margin=0)  # outputs are predicted exactly
        own = own._replace(transfer=transfer or own.transfer)
        found = scan(bench, shape, model=model, batch=batch, transfer=own.transfer)
        best = max(seen.steady for seen in found.values())
        rate = bench.saturated(shape, own, batch).steady
        shares.append(rate / best)
        said.append(f"{shape_name(shape)} {rate:.3f} of {best:.3f}")
    return f"{'; '.join(said)} requests/s", min(shares) >= least


@TEXT.claim("Y15", ways=PRINTED)
def y15_six_steps(bench: DynaServeBench, name: str) -> Told:
    """Six halvings against all splits, in closed loops of equal requests with outputs known exactly to both."""
    return reaches(bench, None, name=name, least=0.98)


@TEXT.claim("Y18", ways=PRINTED, data=(MIX,))
@TEXT.authors("Y18", data=(MIX,), ours="printed", chunks=DOUBLED)
def y18_sizes(bench: DynaServeBench, ours: str, chunks: Sequence[str] = COLOCATED) -> Told:
    """Goodput over co-location and disaggregation by the size of the model, on instances of one, two and four GPUs."""
    ratios = []
    for model in ("", f"_{MIDDLE}", f"_{LARGE}"):
        mine = bench.goodput(MIX, f"{ours}{model}")
        together = max(bench.goodput(MIX, f"{chunk}{model}") for chunk in chunks)
        ratios.append((mine / together, mine / bench.goodput(MIX, f"disaggregated{model}")))
    over_both, over_apart = zip(*ratios, strict=True)
    said = f"co-located {listed(over_both, '.2f')}, disaggregated {listed(over_apart, '.2f')}"
    return f"14B / 32B / 72B: {said}", min(over_apart) > 1 and over_both[-1] > over_both[0]


@TEXT.claim("Y19", ways=PRINTED, data=(MIX,))
@TEXT.authors("Y19", data=(MIX,), ours="printed", chunks=DOUBLED)
def y19_plateau(bench: DynaServeBench, ours: str, chunks: Sequence[str] = COLOCATED) -> Told:
    """Goodput on the mix at rates from the capacity on, over the largest of them, and what is left past that peak."""
    chunk, said, left = bench.colocated(MIX, chunks=chunks), [], dict[str, float]()
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


def near_ratios(found: Sequence[float], paper: Sequence[float]) -> bool:
    """Whether the last of three numbers is over each other one within 20 % of the paper's ratio."""
    return all(abs(found[2] / found[i] / (paper[2] / paper[i]) - 1) <= 0.2 for i in range(2))


def _by_name(names: Iterable[str], ratios: Sequence[float]) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(names, ratios, strict=True))
