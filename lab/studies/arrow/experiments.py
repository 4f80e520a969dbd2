"""Reproduce Arrow (arXiv 2505.11916): capacities of its policies on four workloads and its claims."""

from __future__ import annotations

from lab.studies.arrow import TEXT
from lab.studies.arrow.setup import ALL, AZURE, CHUNKED, HOUR, PROFILE, TIGHT, ArrowBench, workloads
from lab.studies.papers import Paper

#: Policies whose capacity is searched on every workload; the first is compared with the others.
EVERYWHERE = ("arrow", "observed", "least_load", "vllm", "disaggregated", "colocated")
#: Further searches.
MORE = (
    *((name, case) for case in ("arrow_4", "static_7_1") for name in AZURE),
    *((name, case) for name in ALL for cases in CHUNKED.values() for case in cases if case not in EVERYWHERE),
    *((name, "arrow_printed") for name in ALL),
    *((name, "arrow_4_printed") for name in AZURE),
    *((HOUR, case) for case in ("arrow", "least_load", "flip_60", "flip_300", "flip_60_printed", "flip_300_printed")),
    *((name, case) for name in TIGHT for case in ("arrow", "colocated")),
)


def searches() -> list[tuple[str, str]]:
    """Workload and case of every search."""
    return [*((name, case) for name in ALL for case in EVERYWHERE), *MORE]


PAPER = Paper(
    bench=lambda traces, quick, engine: ArrowBench(workloads(traces, quick=quick), quick=quick, engine=engine),
    profile=PROFILE,
    text=TEXT,
    engines=("vllm_v0",),
    searches=searches,
    search=ArrowBench.rate,
    tables={
        "runs": lambda bench: bench.table(
            lambda seen: {"fewest_prefill": seen.fewest[0], "fewest_decode": seen.fewest[1]}
        ),
        "capacities": lambda bench: bench.capacities(searches()),
    },
)
