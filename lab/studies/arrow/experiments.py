"""Reproduce Arrow (arXiv 2505.11916): capacities of its policies on four workloads, pools over time, its claims."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from disagg_sim.simulation.options import LEAST_PERIOD_S
from lab.studies.arrow import as_authors, claims, claims_rules
from lab.studies.arrow.figures import FIGURES
from lab.studies.arrow.setup import ALL, AZURE, CASES, CHUNKED, HALF, HOUR, PROFILE, TIGHT, ArrowBench, workloads
from lab.studies.claims import claims_of
from lab.studies.panels import Axes, Picture, curve_points
from lab.studies.papers import Paper, capacity_cells

#: Policies whose capacity is searched on every workload; the first is compared with the others.
EVERYWHERE = ("arrow", "observed", "least_load", "vllm", "disaggregated", "colocated")
#: Further searches.
MORE = (
    *((name, case) for case in ("arrow_4", "arrow_single", "least_load_single", "static_7_1") for name in AZURE),
    *((name, case) for name in ALL for cases in CHUNKED.values() for case in cases if case not in EVERYWHERE),
    *((name, "arrow_printed") for name in ALL),
    *((name, "arrow_4_printed") for name in AZURE),
    *((HOUR, case) for case in ("arrow", "least_load", "flip_60", "flip_300")),
    (HALF, "arrow_4"),
    (HALF, "arrow"),
    *((name, case) for name in TIGHT for case in ("arrow", "colocated")),
)
BURSTY = ("code", "burstgpt")  # workloads whose pools are drawn over time
MOMENTS = 60  # of such a picture [1]


def searches() -> list[tuple[str, str]]:
    """Workload and case of every search."""
    return [*((name, case) for name in ALL for case in EVERYWHERE), *MORE]


def capacities(bench: ArrowBench) -> pd.DataFrame:
    """Serving capacity of each search, and that of Arrow over it."""
    rows = []
    for name, case in searches():
        found = bench.capacity(name, case)
        rows.append(
            {
                "workload": name,
                "policy": CASES[case].label,
                "gpus": CASES[case].deployment.gpus,
                "stand_in": bench.workloads[name].stand_in,
                "rate_scale": found.rate_scale,
                "requests_per_s": found.requests_per_s,
                "above_rate_scale": found.above,
                "arrow_over_it": bench.ratio(name, "arrow", case),
            }
        )
    return pd.DataFrame(rows)


def runs(bench: ArrowBench) -> pd.DataFrame:
    """Every run, in the columns of a simulation's summary."""
    return bench.table(lambda seen: {"fewest_prefill": seen.fewest[0], "fewest_decode": seen.fewest[1]})


def attainment(bench: ArrowBench) -> Picture:
    """Share of requests inside both limits over the request rate, a panel for each workload."""
    rows = [
        {
            "panel": f"{name}, TTFT {bench.workloads[name].slo.ttft:g} s, TPOT {bench.workloads[name].slo.tpot:g} s",
            "curve": CASES[case].label,
            "x": seen.rate_scale * bench.workloads[name].trace.rate,
            "y": 100 * seen.slo_attainment,
            "x_unit": 1.0,
        }
        for name in ALL
        for case in EVERYWHERE
        for seen in bench.capacity(name, case).runs
    ]
    return Picture(
        title="Requests inside both SLOs, Llama-3.1-8B on eight H800",
        axes=Axes(x_label="request rate [requests/s]", y_label="requests inside both SLOs [%]", x_scale="log"),
        table=pd.DataFrame(rows),
    )


def pools(bench: ArrowBench, workload: str) -> Picture:
    """Instances of prefill and waiting requests over time, Arrow and static, at the capacity of Arrow."""
    scale = bench.capacity(workload, "arrow").rate_scale
    lasts = bench.workloads[workload].trace.duration / scale
    frames = []
    for case in ("arrow", "least_load"):
        samples = bench.result(workload, case, scale, sample_s=max(lasts / MOMENTS, LEAST_PERIOD_S)).samples
        last = np.searchsorted(samples.time_s, 1.2 * lasts)
        for panel, label, values in (
            ("instances of prefill", "instances", samples.prefill_gpus),
            ("requests that wait for their first token", "requests", samples.queued),
            ("requests that decode", "requests", samples.running),
        ):
            frames.append(curve_points(panel, CASES[case].label, samples.time_s[:last], values[:last], label))
    return Picture(
        title=f"{workload} at {bench.rate(workload, 'arrow'):.0f} requests/s, the capacity of Arrow",
        axes=Axes(x_label="time [s]", y_label=""),
        table=pd.concat(frames),
    )


PAPER = Paper(
    bench=lambda traces, quick, engine: ArrowBench(workloads(traces, quick=quick), quick=quick, engine=engine),
    profile=PROFILE,
    claims=claims_of(claims, claims_rules),
    as_authors=as_authors.CLAIMS,
    engines=as_authors.ENGINES,
    searches=searches,
    search=ArrowBench.capacity,
    tables={"runs": runs, "capacities": capacities},
    figures=FIGURES,
    pictures={
        "attainment": attainment,
        **{f"pools_{name}": partial(pools, workload=name) for name in BURSTY},
        "ratios": lambda bench: capacity_cells(bench, EVERYWHERE, ALL),
    },
)
