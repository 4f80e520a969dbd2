"""Reproduce DynaServe (arXiv 2504.09285): capacities on five workloads and its claims."""

from __future__ import annotations

import pandas as pd

from lab.studies.dynaserve import TEXT
from lab.studies.dynaserve.setup import (
    CASES,
    COLOCATED,
    LARGE,
    MIDDLE,
    MIX,
    PROFILE,
    WORKLOADS,
    DynaServeBench,
    workloads,
)
from lab.studies.papers import Paper

ALL = (*WORKLOADS, MIX)
#: Policies whose capacity is searched on every workload; the first is compared with the others.
EVERYWHERE = ("dynaserve", "disaggregated", *COLOCATED, "printed", "least_loaded")
#: Models beside the first whose capacity is searched on the mix.
OTHERS = (MIDDLE, LARGE)


def searches() -> list[tuple[str, str]]:
    """Workload and case of every search."""
    everywhere = [(name, case) for name in ALL for case in EVERYWHERE]
    others = [f"{case}_{model}" for model in OTHERS for case in ("dynaserve", "disaggregated", *COLOCATED)]
    return everywhere + [(MIX, case) for case in others]


def capacities(bench: DynaServeBench) -> pd.DataFrame:
    """Serving capacity of each search and what the run there showed."""
    rows = []
    for name, case in searches():
        rate = bench.rate(name, case)
        row = {
            "workload": name,
            "case": case,
            "policy": CASES[case].label,
            "model": CASES[case].model,
            "tp": CASES[case].deployment.gpus // 2,
            "stand_in": bench.workloads[name].stand_in,
            "requests_per_s": rate,
        }
        if rate:
            seen = bench.at_capacity(name, case)
            row |= {
                "goodput_tokens_per_s": seen.goodput,
                "inside": seen.inside,
                "itl_p99_s": seen.summary.itl_p99_s,
                "ttft_p90_s": seen.summary.ttft_p90_s,
                "exposed_transfer": seen.exposed,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def runs(bench: DynaServeBench) -> pd.DataFrame:
    """Every run at a request rate, in the columns of a simulation's summary."""
    return bench.table(lambda seen: {"kept_up": seen.kept_up, "inside": seen.inside})


PAPER = Paper(
    bench=lambda traces, quick, engine: DynaServeBench(workloads(traces, quick=quick), quick=quick, engine=engine),
    profile=PROFILE,
    text=TEXT,
    engines=("vllm_v0", "vllm"),  # 0.7.2 by its default engine, and the one that disaggregation was extended to
    engine="vllm",
    searches=searches,
    search=DynaServeBench.rate,
    tables={"runs": runs, "capacities": capacities},
)
