"""Draw figures 1, 3, 5, 6, 8, 9 and 11 and tables of DynaServe from runs on its authors' engine.

For figures 1 and 3 there are no axes at hand: they show what the text says of them, in axes of this project.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.kernel.step_table import StepTable
from lab.studies.dynaserve.as_authors import WORKLOADS, best_chunk, saturated
from lab.studies.dynaserve.claims import ERRORS, GOODPUT, GOODPUT_OF_MIX, RATES_OF_MIX
from lab.studies.dynaserve.claims_equal import ATTAINED, LARGEST, RATES, scan, shape_name
from lab.studies.dynaserve.setup import (
    BATCH,
    CASES,
    FIGURE_7,
    LARGE,
    MIDDLE,
    MIX,
    MODEL,
    PROFILE,
    RECIPE,
    SHAPES,
    SYSTEM,
    DynaServeBench,
    as_printed,
)
from lab.studies.paper_figures import read_figures

#: Context [token] and limit [s] of figure 6, and the decodes and prefill tokens that it has.
STEPS = ((128, 0.03), (1024, 0.05))
MOST_DECODES, MOST_PREFILL = 128, 2048
#: Workloads of figure 3.
BALANCED = ("code", "burstgpt")
#: Rates [request/s] and the time of a decision at each [s].
DECISIONS = ((6.0, 0.0137), (16.0, 0.0175))
#: Of table 1: P50 and P99 of the gaps [ms], disaggregated and co-located.
GAPS = (((22.70, 58.09), (47.00, 65.11), (50.63, 74.47)), ((309.68, 352.93), (46.86, 336.81), (47.99, 162.67)))


def systems(bench: DynaServeBench, workload: str, model: str = "") -> tuple[tuple[str, str], ...]:
    """Cases that the paper compares on a workload, and what they are called; co-location with its best chunk."""
    best = best_chunk(bench, workload, model=model)
    return ("printed", "DynaServe"), ("disaggregated", "disaggregated"), (best, "co-located, tuned")


def late(bench: DynaServeBench) -> pd.DataFrame:
    """P99 of the gaps on the mix over the request rate, up to twice the largest capacity."""
    both = systems(bench, MIX)
    most = 2 * max(bench.rate(MIX, case) for case, _ in both)
    rows = [
        {"system": label, "rate": seen.rate, "gap": 1e3 * seen.summary.itl_p99_s}
        for case, label in both
        for where, what, seen in bench.runs_seen()
        if (where, what) == (MIX, case) and seen.rate <= most
    ]
    return pd.DataFrame(rows)


def balance(bench: DynaServeBench) -> pd.DataFrame:
    """Share of the requests up to a ratio of their prefill to their decode time, in full batches."""
    table = StepTable.build(bench.setting(MODEL), Sharding())
    frames = []
    for name in BALANCED:
        trace = bench.workloads[name].trace
        rows = zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
        prefill, decode = np.array(
            [
                (table.pass_time(prompt)[1], output * table.step_time(BATCH, prompt + output / 2) / BATCH)
                for prompt, output in rows
            ]
        ).T
        ratio, share = np.sort(prefill / decode), 100 * np.arange(1, len(trace) + 1) / len(trace)
        frames.append(pd.DataFrame({"workload": name, "ratio": ratio, "share": share}))
    return pd.concat(frames)


def splits(bench: DynaServeBench) -> pd.DataFrame:
    """Throughput and time at work over the token at which all requests are cut."""
    return pd.DataFrame(
        [
            {"curve": "simulated", "split": split, "rate": seen.steady, "first": seen.busy[0], "second": seen.busy[1]}
            for split, seen in scan(bench, transfer=FIGURE_7).items()
        ]
    )


def steps(bench: DynaServeBench) -> pd.DataFrame:
    """Prefill tokens that fit into a step beside decodes, Llama-3.1-8B on one A100."""
    table = StepTable.build(setup("llama_3_1_8b", SYSTEM, RECIPE, PROFILE, engine=bench.place.engine), Sharding())
    tokens = range(0, MOST_PREFILL + 1, 8)
    rows = []
    for context, limit in STEPS:
        for decodes in range(0, MOST_DECODES + 1, 4):
            fits = [each for each in tokens if table.step_time(decodes, float(context), each) <= limit]
            if fits:
                name = f"context {context}, {1e3 * limit:g} ms"
                rows.append({"limit": name, "decodes": decodes, "tokens": max(fits), "curve": "simulated"})
    return pd.DataFrame(rows)


def rates(bench: DynaServeBench) -> pd.DataFrame:
    """Goodput over the request rate, from the searches for capacities."""
    places = [(name, "", name) for name in WORKLOADS]
    places += [(MIX, f"_{model}", f"{MIX}, {model}") for model in (MIDDLE, LARGE)]
    rows = []
    for workload, model, name in places:
        for case, label in systems(bench, workload, model):
            bench.rate(workload, f"{case}{model}")
            rows += [
                {"workload": name, "system": label, "rate": seen.rate, "goodput": seen.goodput}
                for where, what, seen in bench.runs_seen()
                if (where, what) == (workload, f"{case}{model}")
            ]
    return pd.DataFrame(rows)


def capacities(bench: DynaServeBench) -> pd.DataFrame:
    """Serving capacity over that of both baselines, by workload; the paper prints the range and the mean."""
    rows = []
    for number, name in enumerate(WORKLOADS, 1):
        together = bench.rate(name, best_chunk(bench, name))
        for label, other in (("co-located, tuned", together), ("disaggregated", bench.rate(name, "disaggregated"))):
            ratio = bench.rate(name, "printed") / other
            rows.append({"number": number, "workload": name, "over": label, "ratio": ratio})
    return pd.DataFrame(rows)


def gaps(bench: DynaServeBench) -> pd.DataFrame:
    """Share of the gaps within a time, on the mix at its capacity."""
    rate = bench.rate(MIX, "printed")
    trace = bench.workloads[MIX].trace.scaled(rate)
    frames = []
    for case, label in (("printed", "SLO-aware steps"), ("printed_full_steps", "full steps")):
        result = bench.result(trace, CASES[case])
        share = 100 * np.cumsum(result.itl_counts) / result.itl_counts.sum()
        frames.append(pd.DataFrame({"steps": label, "gap": 1e3 * result.itl_edges[1:], "share": share}))
    table = pd.concat(frames)
    return table[(table["gap"] >= 1) & (table["gap"] <= 1000)]


def table_1(bench: DynaServeBench) -> pd.DataFrame:
    """Table 1: rates, gaps, attainment and MFU of both systems, with the paper's beside ours."""
    rows = []
    for name, place in (("disaggregated", 0), (LARGEST, 1)):
        for number, shape in enumerate(SHAPES):
            seen = saturated(bench, shape, name)
            rows.append(
                {
                    "shape": shape_name(shape),
                    "system": CASES[name].label,
                    "requests_per_s": seen.rate,
                    "itl_p50_ms": 1e3 * seen.summary.itl_p50_s,
                    "itl_p99_ms": 1e3 * seen.summary.itl_p99_s,
                    "inside": seen.inside,
                    "mfu_first": seen.mfu[0],
                    "mfu_second": seen.mfu[1],
                    "memory_first": seen.memory[0],
                    "memory_second": seen.memory[1],
                    "paper_requests_per_s": RATES[shape][1 - place],
                    "paper_itl_p50_ms": GAPS[place][number][0],
                    "paper_itl_p99_ms": GAPS[place][number][1],
                    "paper_inside": ATTAINED[place][number],
                }
            )
    return pd.DataFrame(rows)


def table_of_mix(bench: DynaServeBench) -> pd.DataFrame:
    """Capacity and goodput on the mix of BurstGPT and Azure code."""
    cases = (best_chunk(bench, MIX), "disaggregated", "printed")
    return pd.DataFrame(
        {
            "system": CASES[case].label,
            "requests_per_s": bench.rate(MIX, case),
            "goodput_tokens_per_s": bench.goodput(MIX, case),
            "paper_requests_per_s": rate,
            "paper_goodput_tokens_per_s": goodput,
        }
        for case, rate, goodput in zip(cases, RATES_OF_MIX, GOODPUT_OF_MIX, strict=True)
    )


def table_of_errors(bench: DynaServeBench) -> pd.DataFrame:
    """Goodput by the error of predicted outputs."""
    return pd.DataFrame(
        {
            "error_tokens": error,
            "goodput_tokens_per_s": bench.saturated(SHAPES[-1], as_printed("", length_error=error)).goodput,
            "paper_goodput_tokens_per_s": paper,
        }
        for error, paper in zip(ERRORS, GOODPUT, strict=True)
    )


def table_of_decisions(bench: DynaServeBench) -> pd.DataFrame:
    """Time of a decision that the paper prints at two rates, and goodput with it."""
    return pd.DataFrame(
        {
            "paper_requests_per_s": rate,
            "paper_decision_ms": 1e3 * taken,
            "goodput_tokens_per_s": bench.saturated(SHAPES[-1], as_printed("", overhead_s=taken)).goodput,
        }
        for rate, taken in DECISIONS
    )


FIGURES = read_figures(__file__, globals())
TABLES = {
    "table_1": table_1,
    "table_mix": table_of_mix,
    "table_length_error": table_of_errors,
    "table_decision": table_of_decisions,
}
