"""Test claims of "DynaServe" on equal requests and step times: table 1, the best split, batches and chunks.

Splits are scanned in steps of 1 % of the length. Y14 holds by construction: a cache has as many tokens as it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping as Map

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.metrics import Summary
from disagg_sim.workload.synthetic import synthetic_trace
from lab.studies.bench import StudyCase
from lab.studies.claims import Finding, twice
from lab.studies.dynaserve import TEXT
from lab.studies.dynaserve.setup import (
    CASES,
    LIMIT,
    MIDDLE,
    MODEL,
    PROFILE,
    RECIPE,
    SHAPES,
    SYSTEM,
    DynaServeBench,
    DynaServeMeasures,
    case_of,
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
DOUBLED = (256, 512, 1024, 2048)  # chunks of Y17 [token]
#: Gaps of table 1 are taken over so many requests: several times what is served at once. [request]
COUNTED, QUICK = 2000, 300
LATER = "the second instance reserves blocks when the first part ends, not when it begins"
LARGEST, CO = "chunk_2048", 0  # the paper's co-location; place of its rate in ``RATES``


def cut_at(split: int, shape: tuple[int, int], model: str = MODEL) -> StudyCase:
    """Every request of a shape cut at the same token."""
    return case_of("", "dynaserve", model=model, ratio=split / sum(shape), length_error=0.0, margin=0)


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


def at_rate(bench: DynaServeBench, shape: tuple[int, int], name: str, rate: float) -> DynaServeMeasures:
    """A shape at a rate: equal requests, Poisson arrivals. [request/s]"""
    count = QUICK if bench.quick else COUNTED
    trace = synthetic_trace(rate=rate, lengths=shape, requests=count, name=shape_name(shape))
    return look(bench.result(trace, CASES[name]), rate)


def _table_1(bench: DynaServeBench, shape: tuple[int, int], name: str) -> DynaServeMeasures:
    """A shape at the paper's rate."""
    return at_rate(bench, shape, name, RATES[shape][CO if name == LARGEST else 1])


@TEXT.claim("Y1")
def y1_rates(bench: DynaServeBench) -> Finding:
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
    return Finding(", ".join(said), near and middle and max(losses[0], losses[2]) < 0)


@TEXT.claim("Y2")
def y2_colocated_late(bench: DynaServeBench) -> Finding:
    """Gaps of co-location."""
    rows = {shape: _table_1(bench, shape, LARGEST).summary for shape in SHAPES}
    late = [row.itl_p99_s > LIMIT.tpot for row in rows.values()]
    rate = RATES[SHAPES[-1]][CO]
    faster = [
        look(bench.result(mini_reasoning_standin(rate=more * rate, requests=COUNTED), CASES[LARGEST]), more * rate)
        for more in (0.9, 1.1)
    ]
    gaps = listed([1e3 * seen.summary.itl_p99_s for seen in faster], ".0f")
    half = [row.itl_p50_s > LIMIT.tpot for row in rows.values()]
    return Finding(
        _gaps(rows),
        late == [True] * 3 and half == [True, False, False],
        f"with lengths spread by c_v 1 p99 is {gaps} ms at 0.9 and 1.1 times its rate of 219/1467",
    )


@TEXT.claim("Y3")
def y3_disaggregated_in_time(bench: DynaServeBench) -> Finding:
    """Gaps of disaggregation."""
    rows = {shape: _table_1(bench, shape, "disaggregated").summary for shape in SHAPES}
    return Finding(_gaps(rows), all(row.itl_p99_s < LIMIT.tpot for row in rows.values()))


def imbalance(long: DynaServeMeasures, answers: DynaServeMeasures) -> tuple[str, bool]:
    """Use of both instances with the longest prompts and with the longest answers, and whether each phase uses one."""
    holds = long.mfu[0] > 0.3 and long.memory[0] < 0.05 and long.mfu[0] > long.mfu[1]
    holds = holds and answers.mfu[1] > answers.mfu[0] and answers.memory[1] > answers.memory[0]
    said = [
        f"{shape_name(shape)} MFU {100 * seen.mfu[0]:.1f} % and {100 * seen.mfu[1]:.2f} %, memory "
        f"{100 * seen.memory[0]:.1f} % and {100 * seen.memory[1]:.1f} %"
        for shape, seen in ((SHAPES[0], long), (SHAPES[-1], answers))
    ]
    return "; ".join(said), holds


@TEXT.claim("Y4")
def y4_imbalance(bench: DynaServeBench) -> Finding:
    """Use of compute and memory of both instances."""
    long, answers = (_table_1(bench, shape, "disaggregated") for shape in (SHAPES[0], SHAPES[-1]))
    return Finding(*imbalance(long, answers))


def attained(apart: Iterable[DynaServeMeasures], together: Iterable[DynaServeMeasures]) -> tuple[str, bool]:
    """Tokens within the limit, disaggregated and co-located, against table 1."""
    shares = [[seen.inside for seen in each] for each in (apart, together)]
    said = [listed([100 * share for share in each], ".1f") for each in shares]
    near = all(abs(found - paper) <= POINTS for found, paper in zip(shares[1], ATTAINED[1], strict=True))
    return f"disaggregated {said[0]} %, co-located {said[1]} %", min(shares[0]) >= 0.99 and near


@TEXT.claim("Y20")
def y20_attainment(bench: DynaServeBench) -> Finding:
    """Tokens within the limit at the rates of table 1."""
    return Finding(
        *attained(*([_table_1(bench, shape, name) for shape in SHAPES] for name in ("disaggregated", LARGEST)))
    )


def fills(answers: DynaServeMeasures) -> tuple[str, bool]:
    """Memory of the decode instance with the longest answers, against table 1."""
    return f"{100 * answers.memory[1]:.1f} % of the blocks", abs(answers.memory[1] - FULL) <= POINTS


@TEXT.claim("Y21")
def y21_memory(bench: DynaServeBench) -> Finding:
    """Blocks that requests hold on the decode instance at 219/1467."""
    return Finding(*fills(_table_1(bench, SHAPES[-1], "disaggregated")))


@TEXT.claim("Y5")
def y5_best_split(bench: DynaServeBench) -> Finding:
    """Where the throughput peaks, of all splits in steps of 1 % of the length."""
    return twice(lambda way: peaks(scan(bench, transfer=way)), ours="policy", theirs="pull", rule=LATER)


@TEXT.claim("Y6")
def y6_equal_times(bench: DynaServeBench) -> Finding:
    """Busy times at the best split."""
    return twice(lambda way: equal(scan(bench, transfer=way)), ours="policy", theirs="pull", rule=LATER)


@TEXT.claim("Y14")
def y14_more_cache(bench: DynaServeBench) -> Finding:
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
    return Finding(f"ratios {', '.join(said)} with 2, 3 and 5 prompts of cache at the split", bool(exact))


@TEXT.claim("Y16")
def y16_batch(_bench: DynaServeBench) -> Finding:
    """Number of decodes that fit with 512 tokens of prefill."""
    return Finding(*decodes_that_fit(None))


def decodes_that_fit(engine: str | None) -> tuple[str, bool]:
    """Decodes at 1,024 beside 512 tokens of prefill within 50 ms, and whether they are as many as the paper's."""
    table = StepTable.build(setup("llama_3_1_8b", SYSTEM, RECIPE, PROFILE, engine=engine), Sharding())
    found = sum(table.step_time(n, 1024.0, 512) <= 0.05 for n in range(1, 257))
    return f"{found} decodes", 20 <= found <= 45


@TEXT.claim("Y17")
def y17_chunks(bench: DynaServeBench) -> Finding:
    """Gaps and largest rate by chunk size."""
    found = [bench.saturated(SHAPES[1], CASES[f"chunk_{chunk}"]) for chunk in DOUBLED]
    late = [seen.summary.itl_p99_s for seen in found]
    rates = [seen.steady for seen in found]
    said = f"p99 {listed([1e3 * gap for gap in late], '.0f')} ms, {listed(rates, '.2f')} requests/s"
    return Finding(said, bool((np.diff(late) >= 0).all() and (np.diff(rates) >= 0).all()))


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
