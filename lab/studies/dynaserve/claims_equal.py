"""Test claims of "DynaServe" on equal requests and step times: table 1, the best split, batches and chunks.

Splits are scanned in steps of 1 % of the length. Y14 holds by construction: a cache has as many tokens as it has.

As the authors set them up rates saturate: arrivals are Poisson at the rate that a full closed loop serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Mapping as Map
from typing import Any

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.metrics import Summary
from disagg_sim.workload.synthetic import synthetic_trace
from lab.studies.bench import StudyCase
from lab.studies.claims import Told, Ways
from lab.studies.dynaserve import TEXT
from lab.studies.dynaserve.setup import (
    CASES,
    FIGURE_7,
    LIMIT,
    MIDDLE,
    MODEL,
    PROFILE,
    RECIPE,
    SHAPES,
    SYSTEM,
    DynaServeBench,
    DynaServeMeasures,
    case_with,
    look,
)
from lab.studies.published_like import mini_reasoning_standin

#: Rates of the paper's table 1, co-located and disaggregated, by shape. [request/s]
RATES = {(8192, 32): (1.49, 0.83), (2048, 512): (2.83, 2.56), (219, 1467): (2.86, 1.68)}
#: Shape of Y5, Y6 and Y15: prompt, output [token]; and the requests in the loop an instance, beyond what memory holds.
EQUAL, IN_LOOP = (1024, 1024), 32
#: Splits that are tried, in percent of the length.
PERCENTS = range(1, 100)
#: Tokens within 100 ms in table 1, disaggregated and co-located, and memory of its second GPU at 219/1467. [1]
ATTAINED = ((1.0, 0.9983, 0.9995), (0.0173, 0.8409, 0.9446))
FULL = 0.963
POINTS = 0.1  # that count as near [1]
#: Chunks of the co-located baseline, "tuned between" 256 and 2048 in section 6.1: the powers of two. [token]
DOUBLED = ("chunk_256", "chunk_512", "chunk_1024", "chunk_2048")
LIGHT = 8  # requests in flight an instance of a light load, for insight 3 [request]
#: Gaps of table 1 are taken over so many requests: several times what is served at once. [request]
COUNTED, QUICK = 2000, 300
#: Two ways to move caches: as ours are, and when the first part has ended.
LATER = Ways("policy", "pull", "the second instance reserves blocks when the first part ends, not when it begins")
#: Figure 7, and the second reading of when the second instance takes blocks.
PULLED = Ways(
    FIGURE_7,
    "pull",
    "blocks for the whole cache are taken, and it moves, when the first part ends, later than figure 7 has it",
)
LARGEST, CO = "chunk_2048", 0  # the paper's co-location; place of its rate in ``RATES``


#: How a shape is run under a case.
At = Callable[[DynaServeBench, tuple[int, int], str], DynaServeMeasures]


def cut_at(split: int, shape: tuple[int, int], model: str = MODEL) -> StudyCase:
    """Every request of a shape cut at the same token."""
    return case_with("dynaserve", model=model, ratio=split / sum(shape), length_error=0.0, margin=0)


def scan(
    bench: DynaServeBench,
    shape: tuple[int, int] = EQUAL,
    *,
    model: str = MIDDLE,
    batch: int = IN_LOOP,
    transfer: str = "policy",
) -> dict[int, DynaServeMeasures]:
    """Runs in a closed loop by split [token], at which every request of the shape is cut."""
    found = {}
    for percent in PERCENTS:
        split = round(percent * sum(shape) / 100)
        found[split] = bench.saturated(shape, cut_at(split, shape, model)._replace(transfer=transfer), batch)
    return found


def best_of(found: Map[int, DynaServeMeasures]) -> int:
    """The split that serves most. [token]"""
    return max(found, key=lambda split: found[split].steady)


def peaks(found: Map[int, DynaServeMeasures]) -> tuple[str, bool]:
    """Where the throughput of Y5 peaks, and whether it does so past the prompt."""
    best, prompt = best_of(found), EQUAL[0]
    return (
        f"best split {best} (phi {best / sum(EQUAL):.2f}), {found[best].steady:.3f} requests/s against "
        f"{found[prompt].steady:.3f}",
        1200 <= best <= 1600 and found[best].steady > found[prompt].steady,
    )


def equal(found: Map[int, DynaServeMeasures]) -> tuple[str, bool]:
    """How long both instances work at the best split of Y6, and whether they work equally long."""
    best = best_of(found)
    one, two = found[best].busy
    return f"busy {one:.3f} and {two:.3f} of the time at {best}", abs(one / two - 1) <= 0.1


def at_splits(bench: DynaServeBench, way: str, said: Callable[[Map[int, DynaServeMeasures]], Any]) -> Any:
    """What a scan of all splits says, in steps of 1 % of the length."""
    return said(scan(bench, transfer=way))


def by_way(bench: DynaServeBench, way: str, said: Callable[[Map[int, DynaServeMeasures]], Any]) -> Told:
    """What a scan of all splits shows, by when the second instance takes blocks."""
    whole, _ = at_splits(bench, LATER.ours, said)
    return *at_splits(bench, way, said), f"blocks for the whole cache from the start: {whole}"


TEXT.claim("Y5", ways=LATER, said=peaks)(at_splits)
TEXT.claim("Y6", ways=LATER, said=equal)(at_splits)
TEXT.authors("Y5", ways=PULLED, said=peaks)(by_way)
TEXT.authors("Y6", ways=PULLED, said=equal)(by_way)


def at_rate(bench: DynaServeBench, shape: tuple[int, int], name: str, rate: float) -> DynaServeMeasures:
    """A shape at a rate: equal requests, Poisson arrivals. [request/s]"""
    count = QUICK if bench.quick else COUNTED
    trace = synthetic_trace(rate=rate, lengths=shape, requests=count, name=shape_name(shape))
    return look(bench.result(trace, CASES[name]), rate)


def saturated(bench: DynaServeBench, shape: tuple[int, int], name: str) -> DynaServeMeasures:
    """A shape with Poisson arrivals at the rate that a full closed loop serves."""
    rate = bench.saturated(shape, CASES[name]).steady
    return bench.once(("at saturation", shape, name), lambda: at_rate(bench, shape, name, rate))


def table_1(bench: DynaServeBench, shape: tuple[int, int], name: str) -> DynaServeMeasures:
    """A shape at the paper's rate."""
    return at_rate(bench, shape, name, RATES[shape][CO if name == LARGEST else 1])


@TEXT.claim("Y1")
def y1_rates(bench: DynaServeBench) -> Told:
    """Saturated rates, disaggregated over co-located."""
    losses, said, near = [], [], True
    for shape in SHAPES:
        found = {name: bench.saturated(shape, CASES[name]).steady for name in (LARGEST, "disaggregated")}
        co, apart = RATES[shape]
        loss, printed = found["disaggregated"] / found[LARGEST] - 1, apart / co - 1
        near = near and abs(loss - printed) <= 0.12
        losses.append(loss)
        said.append(f"{shape_name(shape)} {100 * loss:+.0f} % (paper {100 * printed:+.0f} %)")
    middle = losses[1] > max(losses[0], losses[2])
    return ", ".join(said), near and middle and max(losses[0], losses[2]) < 0


@TEXT.claim("Y2")
def y2_colocated_late(bench: DynaServeBench) -> Told:
    """Gaps of co-location."""
    rows = {shape: table_1(bench, shape, LARGEST).summary for shape in SHAPES}
    late = [row.itl_p99_s > LIMIT.tpot for row in rows.values()]
    rate = RATES[SHAPES[-1]][CO]
    faster = [
        look(bench.result(mini_reasoning_standin(rate=more * rate, requests=COUNTED), CASES[LARGEST]), more * rate)
        for more in (0.9, 1.1)
    ]
    gaps = listed([1e3 * seen.summary.itl_p99_s for seen in faster], ".0f")
    half = [row.itl_p50_s > LIMIT.tpot for row in rows.values()]
    return (
        _gaps(rows),
        late == [True] * 3 and half == [True, False, False],
        f"with lengths spread by c_v 1 p99 is {gaps} ms at 0.9 and 1.1 times its rate of 219/1467",
    )


@TEXT.claim("Y3")
def y3_disaggregated_in_time(bench: DynaServeBench) -> Told:
    """Gaps of disaggregation."""
    rows = {shape: table_1(bench, shape, "disaggregated").summary for shape in SHAPES}
    return _gaps(rows), all(row.itl_p99_s < LIMIT.tpot for row in rows.values())


def _at_saturation(bench: DynaServeBench, name: str) -> tuple[str, list[tuple[float, float]]]:
    rows = [saturated(bench, shape, name) for shape in SHAPES]
    gaps = [(seen.summary.itl_p50_s, seen.summary.itl_p99_s) for seen in rows]
    said = ", ".join(
        f"{shape_name(shape)} {1e3 * half:.0f}/{1e3 * late:.0f} at {seen.rate:.2f}"
        for shape, seen, (half, late) in zip(SHAPES, rows, gaps, strict=True)
    )
    return f"p50/p99 {said} ms at requests/s", gaps


@TEXT.authors("Y2", ways=Ways(False, True, "219/1467 are means, lengths spread by c_v 1"))
def late_at_saturation(bench: DynaServeBench, spread: bool) -> Told:
    """Gaps of co-location."""
    said, gaps = _at_saturation(bench, LARGEST)
    if spread:
        rate = saturated(bench, SHAPES[-1], LARGEST).rate
        trace = mini_reasoning_standin(rate=rate, requests=QUICK if bench.quick else COUNTED)
        row = look(bench.result(trace, CASES[LARGEST]), rate).summary
        gaps[-1] = (row.itl_p50_s, row.itl_p99_s)
        said = f"p50/p99 {1e3 * row.itl_p50_s:.0f}/{1e3 * row.itl_p99_s:.0f} ms"
    late, half = [p99 > LIMIT.tpot for _, p99 in gaps], [p50 > LIMIT.tpot for p50, _ in gaps]
    return said, all(late) and half == [True, False, False]


@TEXT.authors("Y3")
def in_time_at_saturation(bench: DynaServeBench) -> Told:
    """Gaps of disaggregation."""
    said, gaps = _at_saturation(bench, "disaggregated")
    return said, all(p99 < LIMIT.tpot for _, p99 in gaps)


@TEXT.claim("Y4", at=table_1)
@TEXT.authors("Y4", at=saturated)
def y4_imbalance(bench: DynaServeBench, at: At) -> Told:
    """Use of both instances with the longest prompts and with the longest answers: each phase uses one."""
    long, answers = (at(bench, shape, "disaggregated") for shape in SHAPES[::2])
    holds = long.mfu[0] > 0.3 and long.memory[0] < 0.05 and long.mfu[0] > long.mfu[1]
    holds = holds and answers.mfu[1] > answers.mfu[0] and answers.memory[1] > answers.memory[0]
    said = [
        f"{shape_name(shape)} MFU {100 * seen.mfu[0]:.1f} % and {100 * seen.mfu[1]:.2f} %, memory "
        f"{100 * seen.memory[0]:.1f} % and {100 * seen.memory[1]:.1f} %"
        for shape, seen in zip(SHAPES[::2], (long, answers), strict=True)
    ]
    return "; ".join(said), holds


@TEXT.claim("Y20", at=table_1)
@TEXT.authors("Y20", at=saturated)
def y20_attainment(bench: DynaServeBench, at: At) -> Told:
    """Tokens within the limit, disaggregated and co-located, against table 1."""
    shares = [[at(bench, shape, name).inside for shape in SHAPES] for name in ("disaggregated", LARGEST)]
    said = [listed([100 * share for share in each], ".1f") for each in shares]
    near = all(abs(found - paper) <= POINTS for found, paper in zip(shares[1], ATTAINED[1], strict=True))
    return f"disaggregated {said[0]} %, co-located {said[1]} %", min(shares[0]) >= 0.99 and near


@TEXT.claim("Y21", at=table_1)
@TEXT.authors("Y21", at=saturated)
def y21_memory(bench: DynaServeBench, at: At) -> Told:
    """Blocks that requests hold on the decode instance with the longest answers, against table 1."""
    held = at(bench, SHAPES[-1], "disaggregated").memory[1]
    return f"{100 * held:.1f} % of the blocks", abs(held - FULL) <= POINTS


@TEXT.claim("Y14")
def y14_more_cache(bench: DynaServeBench) -> Told:
    """Cache that a split in the decode moves."""
    prompt, _ = SHAPES[-1]
    trace = synthetic_trace(rate=1.0, lengths=SHAPES[-1], requests=1, name="one")
    whole = bench.result(trace, CASES["disaggregated"]).requests.transferred_tokens[0]
    exact = whole == prompt
    said = []
    for times in (2, 3, 5):
        case = cut_at(times * prompt + 1, SHAPES[-1])  # the token emitted last is not in the cache yet
        moved = int(bench.result(trace, case).requests.transferred_tokens[0])
        exact = exact and moved == times * prompt
        said.append(f"{moved / whole:g}")
    return f"ratios {', '.join(said)} with 2, 3 and 5 prompts of cache at the split", bool(exact)


@TEXT.claim("Y16")
def y16_batch(bench: DynaServeBench) -> Told:
    """Decodes at 1,024 beside 512 tokens of prefill within 50 ms."""
    table = StepTable.build(setup("llama_3_1_8b", SYSTEM, RECIPE, PROFILE, engine=bench.place.engine), Sharding())
    found = sum(table.step_time(n, 1024.0, 512) <= 0.05 for n in range(1, 257))
    return f"{found} decodes", 20 <= found <= 45


@TEXT.claim("Y17")
def y17_chunks(bench: DynaServeBench) -> Told:
    """Gaps and largest rate by chunk size."""
    found = [bench.saturated(SHAPES[1], CASES[case]) for case in DOUBLED]
    late = [seen.summary.itl_p99_s for seen in found]
    rates = [seen.steady for seen in found]
    said = f"p99 {listed([1e3 * gap for gap in late], '.0f')} ms, {listed(rates, '.2f')} requests/s"
    return said, bool((np.diff(late) >= 0).all() and (np.diff(rates) >= 0).all())


@TEXT.authors("Y17")
def larger_batches(bench: DynaServeBench) -> Told:
    """Gaps under load and the rate of a light load by chunk, at 2048/512."""
    late = [bench.saturated(SHAPES[1], CASES[case]).summary.itl_p99_s for case in DOUBLED]
    light = [bench.saturated(SHAPES[1], CASES[case], LIGHT).steady for case in DOUBLED]
    said = f"p99 {listed([1e3 * gap for gap in late], '.0f')} ms; light load {listed(light, '.3f')} requests/s"
    return said, bool((np.diff(late) > 0).all()) and late[-1] > LIMIT.tpot and light[-1] >= light[0]


def shape_name(shape: tuple[int, int]) -> str:
    """Prompt and output."""
    return f"{shape[0]}/{shape[1]}"


def listed(values: Iterable[float], form: str) -> str:
    """Numbers one after the other."""
    return " / ".join(format(value, form) for value in values)


def _gaps(rows: Map[tuple[int, int], Summary]) -> str:
    return (
        ", ".join(
            f"{shape_name(shape)} {1e3 * row.itl_p50_s:.0f}/{1e3 * row.itl_p99_s:.0f}" for shape, row in rows.items()
        )
        + " ms (p50/p99)"
    )
