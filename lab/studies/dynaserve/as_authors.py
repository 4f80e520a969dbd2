"""Judge the claims of DynaServe as its authors set them up: vLLM V0 and V1, rates that saturate, algorithms as printed.

Section 6.1 names vLLM 0.7.2 for the baselines and an extension from "v0" to "v1" for disaggregation: both engines are
judged. Arrivals are Poisson there. Acceptances were set before these runs; where the paper leaves a setting open,
``inferred`` says how it was filled in. DynaServe is algorithm 1 as printed, which balances all work of both instances.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Map
from functools import partial

import numpy as np

from lab.studies.claims import Finding, Without, twice
from lab.studies.dynaserve import TEXT, claims, claims_equal
from lab.studies.dynaserve.claims_equal import COUNTED, LARGEST, QUICK, at_rate, listed, scan, shape_name
from lab.studies.dynaserve.setup import (
    ARXIV,
    CASES,
    CHUNK,
    FIGURE_7,
    LIMIT,
    MIX,
    SHAPES,
    DynaServeBench,
    DynaServeMeasures,
    as_printed,
    look,
)
from lab.studies.published_like import mini_reasoning_standin

#: vLLM 0.7.2 by its default engine, and the one that disaggregation was extended to.
ENGINES = ("vllm_v0", "vllm")
#: The two second readings of the paper: which requests are late, and when the second instance takes blocks.
BY_REQUESTS = "at most 1 % of the requests have a gap above 100 ms"
PULLED = "blocks for the whole cache are taken, and it moves, when the first part ends, later than figure 7 has it"
#: The four workloads of section 6.1.
WORKLOADS = ("code", ARXIV, "burstgpt", "reasoning")
#: Chunks of the co-located baseline, "tuned between" 256 and 2048 in section 6.1: the powers of two. [token]
DOUBLED = ("chunk_256", "chunk_512", "chunk_1024", "chunk_2048")
#: Chunks of a pushed cache that Y13 tries, the first of them a whole cache: the paper prints none. [token]
PUSHED = (10**6, CHUNK, claims.SMALL_CHUNK)
BELOW = 0.7  # rate of Y13, a share of the capacity; at more caches wait for memory [1]
#: Requests in flight an instance of a light load, for insight 3. [request]
LIGHT = 8
#: Share of the best split that a bisection of six steps is to reach: "within 1 %" of an offline oracle. [1]
ORACLE = 0.99


def saturated(bench: DynaServeBench, shape: tuple[int, int], name: str) -> DynaServeMeasures:
    """A shape with Poisson arrivals at the rate that a full closed loop serves."""
    rate = bench.saturated(shape, CASES[name]).steady
    return bench.once(("at saturation", shape, name), lambda: at_rate(bench, shape, name, rate))


def at_saturation(bench: DynaServeBench, name: str) -> list[DynaServeMeasures]:
    """All shapes at such rates."""
    return [saturated(bench, shape, name) for shape in SHAPES]


def _gaps(bench: DynaServeBench, name: str) -> tuple[str, list[tuple[float, float]]]:
    rows = at_saturation(bench, name)
    gaps = [(seen.summary.itl_p50_s, seen.summary.itl_p99_s) for seen in rows]
    said = ", ".join(
        f"{shape_name(shape)} {1e3 * half:.0f}/{1e3 * late:.0f} at {seen.rate:.2f}"
        for shape, seen, (half, late) in zip(SHAPES, rows, gaps, strict=True)
    )
    return f"p50/p99 {said} ms at requests/s", gaps


@TEXT.authors("Y2")
def late_at_saturation(bench: DynaServeBench) -> Finding:
    """Gaps of co-location."""
    said, gaps = _gaps(bench, LARGEST)

    def pattern(found: list[tuple[float, float]]) -> bool:
        late, half = [p99 > LIMIT.tpot for _, p99 in found], [p50 > LIMIT.tpot for p50, _ in found]
        return all(late) and half == [True, False, False]

    rate = saturated(bench, SHAPES[-1], LARGEST).rate
    trace = mini_reasoning_standin(rate=rate, requests=QUICK if bench.quick else COUNTED)
    row = look(bench.result(trace, CASES[LARGEST]), rate).summary
    spread = (row.itl_p50_s, row.itl_p99_s)
    return Finding(
        said,
        pattern(gaps),
        without=Without(
            "219/1467 are means, lengths spread by c_v 1",
            f"p50/p99 {1e3 * spread[0]:.0f}/{1e3 * spread[1]:.0f} ms",
            pattern([*gaps[:-1], spread]),
        ),
    )


@TEXT.authors("Y3")
def in_time_at_saturation(bench: DynaServeBench) -> Finding:
    """Gaps of disaggregation."""
    said, gaps = _gaps(bench, "disaggregated")
    return Finding(said, all(p99 < LIMIT.tpot for _, p99 in gaps))


@TEXT.authors("Y19")
def plateau(bench: DynaServeBench) -> Finding:
    """Goodput on the mix beyond the capacity, against the best power of two."""
    return Finding(
        *claims.beyond_capacity(bench, "printed", bench.colocated(MIX, chunks=DOUBLED)), bench.stand_ins(MIX)
    )


@TEXT.authors("Y7")
def capacity(bench: DynaServeBench) -> Finding:
    """Serving capacity over the best power of two and over disaggregation."""
    return by_rate(
        bench, lambda rate: claims.gains(bench, WORKLOADS, "printed", rate, DOUBLED), bench.stand_ins(*WORKLOADS)
    )


def by_rate(bench: DynaServeBench, judge: Callable[[claims.Measure], tuple[str, bool]], note: str) -> Finding:
    """Judge by the rates at which P99 of all gaps is in time, and at which 99 % of the requests are."""
    return twice(judge, note, ours=bench.rate, theirs=bench.request_rate, rule=BY_REQUESTS)


@TEXT.authors("Y8")
def goodput(bench: DynaServeBench) -> Finding:
    """Goodput at the capacity of each."""
    tuned = {name: bench.colocated(name, chunks=DOUBLED) for name in WORKLOADS}
    return Finding(*claims.goodputs(bench, "printed", tuned), bench.stand_ins(*WORKLOADS))


@TEXT.authors("Y9")
def mix(bench: DynaServeBench) -> Finding:
    """Half BurstGPT, half Azure code."""
    chunk, other = (bench.colocated(MIX, rate, DOUBLED) for rate in (bench.rate, bench.request_rate))
    fewer = [bench.request_rate(MIX, each) for each in (other, "disaggregated", "printed")]
    second = f"{listed(fewer, '.2f')} requests/s, the order alone", fewer[0] < fewer[1] < fewer[2]
    return Finding(
        *claims.ordered(bench, "printed", (chunk, chunk)), bench.stand_ins(MIX), Without(BY_REQUESTS, *second)
    )


@TEXT.authors("Y10")
def who_is_strong(bench: DynaServeBench) -> Finding:
    """Co-location against disaggregation."""

    def compared(rate: claims.Measure) -> tuple[str, bool]:
        return claims.strong(rate, {name: bench.colocated(name, rate, DOUBLED) for name in claims.STRONG})

    return by_rate(bench, compared, bench.stand_ins(*claims.STRONG))


def by_way(said: Callable[[Map[int, DynaServeMeasures]], tuple[str, bool]], bench: DynaServeBench) -> Finding:
    """What a scan of all splits shows, by when the second instance takes blocks."""
    whole, _ = said(scan(bench))
    note = f"blocks for the whole cache from the start: {whole}"
    return twice(lambda way: said(scan(bench, transfer=way)), note, ours=FIGURE_7, theirs="pull", rule=PULLED)


@TEXT.authors("Y13")
def push(bench: DynaServeBench) -> Finding:
    """Transfer of reasoning requests that they wait for, over that of caches pushed whole, by the size of a chunk."""
    rate = BELOW * bench.rate("reasoning", "printed")
    trace = bench.workloads["reasoning"].trace.scaled(rate)
    whole, *shares = (look(bench.result(trace, CASES["printed"], chunk=chunk), rate).exposed for chunk in PUSHED)

    def hides(number: int) -> tuple[str, bool]:
        left = shares[number] / whole
        return f"{100 * (1 - left):.0f} % less with chunks of {PUSHED[1 + number]}", left <= 0.1

    return twice(hides, bench.stand_ins("reasoning"), ours=0, theirs=1, rule=f"chunks of {PUSHED[2]} tokens")


@TEXT.authors("Y15")
def within_the_oracle(bench: DynaServeBench) -> Finding:
    """Six halvings of algorithm 1 against all splits, with outputs known exactly."""

    def reaches(way: str) -> tuple[str, bool]:
        return claims.reaches(bench, lambda **own: as_printed("", **own)._replace(transfer=way), ORACLE)

    return twice(reaches, ours=FIGURE_7, theirs="pull", rule=PULLED)


@TEXT.authors("Y16")
def decodes_in_a_step(bench: DynaServeBench) -> Finding:
    """Number of decodes that fit with 512 tokens of prefill."""
    return Finding(*claims_equal.decodes_that_fit(bench.place.engine))


@TEXT.authors("Y17")
def larger_batches(bench: DynaServeBench) -> Finding:
    """Gaps under load and the rate of a light load by chunk, at 2048/512."""
    late = [bench.saturated(SHAPES[1], CASES[case]).summary.itl_p99_s for case in DOUBLED]
    light = [bench.saturated(SHAPES[1], CASES[case], LIGHT).steady for case in DOUBLED]
    return Finding(
        f"p99 {listed([1e3 * gap for gap in late], '.0f')} ms; light load {listed(light, '.3f')} requests/s",
        bool((np.diff(late) > 0).all()) and late[-1] > LIMIT.tpot and light[-1] >= light[0],
    )


#: By functions of ours.
TEXT.authors("Y4")(lambda bench: Finding(*claims_equal.imbalance(*at_saturation(bench, "disaggregated")[::2])))
TEXT.authors("Y5")(partial(by_way, claims_equal.peaks))
TEXT.authors("Y6")(partial(by_way, claims_equal.equal))
TEXT.authors("Y18")(lambda bench: Finding(*claims.over_sizes(bench, "printed", DOUBLED), bench.stand_ins(MIX)))
TEXT.authors("Y20")(
    lambda bench: Finding(*claims_equal.attained(at_saturation(bench, "disaggregated"), at_saturation(bench, LARGEST)))
)
TEXT.authors("Y21")(lambda bench: Finding(*claims_equal.fills(saturated(bench, SHAPES[-1], "disaggregated"))))
