"""Reproduce DynaServe (arXiv 2504.09285): capacities on five workloads and its claims."""

from __future__ import annotations

from lab.studies.dynaserve import TEXT
from lab.studies.dynaserve.setup import COLOCATED, LARGE, MIDDLE, MIX, PROFILE, WORKLOADS, DynaServeBench, workloads
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


PAPER = Paper(
    bench=lambda traces, quick, engine: DynaServeBench(workloads(traces, quick=quick), quick=quick, engine=engine),
    profile=PROFILE,
    text=TEXT,
    engines=("vllm_v0", "vllm"),  # 0.7.2 by its default engine, and the one that disaggregation was extended to
    engine="vllm",
    searches=searches,
    search=DynaServeBench.rate,
    tables={
        "runs": lambda bench: bench.table(lambda seen: {"kept_up": seen.kept_up, "inside": seen.inside}),
        "capacities": lambda bench: bench.capacities(searches()),
    },
)
