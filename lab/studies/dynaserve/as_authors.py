"""Judge the claims of DynaServe as its authors set them up: vLLM V0 and V1, rates that saturate, algorithms as printed.

Section 6.1 names vLLM 0.7.2 for the baselines and an extension from "v0" to "v1" for disaggregation: both engines are
judged. Arrivals are Poisson there. Acceptances were set before these runs; where the paper leaves a setting open,
``inferred`` says how it was filled in. DynaServe is algorithm 1 as printed, which balances all work of both instances.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Map
from functools import partial
from typing import Any

import numpy as np

from lab.studies.claims import Finding, Told, Ways, Without
from lab.studies.dynaserve import TEXT, claims
from lab.studies.dynaserve.claims import BY_REQUESTS, DOUBLED, THEIRS
from lab.studies.dynaserve.claims_equal import (
    COUNTED,
    LARGEST,
    LATER,
    QUICK,
    at_splits,
    equal,
    listed,
    peaks,
    saturated,
    shape_name,
)
from lab.studies.dynaserve.setup import (
    CASES,
    CHUNK,
    FIGURE_7,
    LIMIT,
    MIX,
    SHAPES,
    DynaServeBench,
    DynaServeMeasures,
    look,
)
from lab.studies.published_like import mini_reasoning_standin

#: vLLM 0.7.2 by its default engine, and the one that disaggregation was extended to.
ENGINES = ("vllm_v0", "vllm")
#: Figure 7, and the second reading of when the second instance takes blocks.
PULLED = Ways(
    FIGURE_7,
    "pull",
    "blocks for the whole cache are taken, and it moves, when the first part ends, later than figure 7 has it",
)
#: Chunks of a pushed cache that Y13 tries, the first of them a whole cache: the paper prints none. [token]
PUSHED = (10**6, CHUNK, claims.SMALL_CHUNK)
BELOW = 0.7  # rate of Y13, a share of the capacity; at more caches wait for memory [1]
#: Requests in flight an instance of a light load, for insight 3. [request]
LIGHT = 8
#: Share of the best split that a bisection of six steps is to reach: "within 1 %" of an offline oracle. [1]
ORACLE = 0.99


def _gaps(bench: DynaServeBench, name: str) -> tuple[str, list[tuple[float, float]]]:
    rows = [saturated(bench, shape, name) for shape in SHAPES]
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
def in_time_at_saturation(bench: DynaServeBench) -> Told:
    """Gaps of disaggregation."""
    said, gaps = _gaps(bench, "disaggregated")
    return said, all(p99 < LIMIT.tpot for _, p99 in gaps)


@TEXT.authors("Y8", data=THEIRS)
def goodput(bench: DynaServeBench) -> Told:
    """Goodput at the capacity of each."""
    tuned = {name: bench.colocated(name, chunks=DOUBLED) for name in THEIRS}
    return claims.goodputs(bench, "printed", tuned)


@TEXT.authors("Y9", data=(MIX,))
def mix(bench: DynaServeBench) -> Finding:
    """Half BurstGPT, half Azure code."""
    chunk, other = (bench.colocated(MIX, rate, DOUBLED) for rate in (bench.rate, bench.request_rate))
    fewer = [bench.request_rate(MIX, each) for each in (other, "disaggregated", "printed")]
    second = f"{listed(fewer, '.2f')} requests/s, the order alone", fewer[0] < fewer[1] < fewer[2]
    return Finding(*claims.ordered(bench, "printed", (chunk, chunk)), without=Without(BY_REQUESTS.rule, *second))


def by_way(bench: DynaServeBench, way: str, said: Callable[[Map[int, DynaServeMeasures]], Any]) -> Told:
    """What a scan of all splits shows, by when the second instance takes blocks."""
    whole, _ = at_splits(bench, LATER.ours, said)
    return *at_splits(bench, way, said), f"blocks for the whole cache from the start: {whole}"


TEXT.authors("Y5", ways=PULLED, said=peaks)(by_way)
TEXT.authors("Y6", ways=PULLED, said=equal)(by_way)


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


@TEXT.authors("Y15", ways=PULLED)
def within_the_oracle(bench: DynaServeBench, way: str) -> Told:
    """Six halvings of algorithm 1 against all splits, with outputs known exactly."""
    return claims.reaches(bench, "printed", ORACLE, way)


@TEXT.authors("Y17")
def larger_batches(bench: DynaServeBench) -> Told:
    """Gaps under load and the rate of a light load by chunk, at 2048/512."""
    late = [bench.saturated(SHAPES[1], CASES[case]).summary.itl_p99_s for case in DOUBLED]
    light = [bench.saturated(SHAPES[1], CASES[case], LIGHT).steady for case in DOUBLED]
    said = f"p99 {listed([1e3 * gap for gap in late], '.0f')} ms; light load {listed(light, '.3f')} requests/s"
    return said, bool((np.diff(late) > 0).all()) and late[-1] > LIMIT.tpot and light[-1] >= light[0]
