"""Reproduce DOPD: the ratio of prefill to decode, batches by length, static and dynamic comparisons, its claims."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd

from disagg_sim.simulation.metrics import summary
from disagg_sim.workload.statistics import MINUTE
from lab.studies.claims import claims_of
from lab.studies.dopd import as_authors, claims, claims_runs
from lab.studies.dopd.claims_runs import BIMODAL_LOADS, bimodal_ttft, throughputs, utilisations
from lab.studies.dopd.figures import FIGURES
from lab.studies.dopd.setup import CASES, PROFILE, SERVICE, SLO, DopdBench
from lab.studies.panels import Axes, Picture, curve_points
from lab.studies.papers import Paper

#: Curves of the pictures: of closed loops, of bursts by planner, of batches.
LOOPS = ("vllm", "vllm_six", "dopd", "dopd_4_1")
SHOWN = ("DOPD", "SLA-driven", "load-driven")
LABELS = {"knapsack": "by length", "fifo": "in order, up to as many tokens", "chunked": "chunks of 2,048 in order"}


def runs(bench: DopdBench) -> pd.DataFrame:
    """Every run, in the columns of a simulation's summary."""
    return pd.DataFrame([{"experiment": name} | asdict(summary(result, SLO)) for name, result in bench.results()])


def ratio(bench: DopdBench) -> Picture:
    """Throughput and utilisation over the prefill instances of one decode instance."""
    rates, shares = throughputs(bench), utilisations(bench)
    count = np.arange(1, len(rates) + 1)
    frames = [
        curve_points(panel, curve, count, values, label)
        for panel, curve, values, label in (
            ("throughput", "simulated", rates, "requests/s"),
            ("throughput", "in proportion", count * rates[0], "requests/s"),
            ("prefill instances", "simulated", shares, "share of the time at work"),
        )
    ]
    return Picture(
        title="1000/150 tokens, one decode instance, Llama-70B on H100",
        axes=Axes(x_label="prefill instances", y_label=""),
        table=pd.concat(frames),
    )


def batches(bench: DopdBench) -> Picture:
    """P90 of the TTFT over the load, by how batches are formed."""
    rows = [
        {"panel": "", "curve": label, "x": load, "y": bimodal_ttft(bench, load, name), "x_unit": 1.0}
        for name, label in LABELS.items()
        for load in BIMODAL_LOADS
    ]
    return Picture(
        title="Prompts of 100 and 1,900 tokens on four prefill instances",
        axes=Axes(x_label="load over what they serve one by one", y_label="P90 TTFT [s]"),
        table=pd.DataFrame(rows),
    )


def static(bench: DopdBench) -> Picture:
    """Goodput and P90 of the TPOT over the requests in service."""
    rows = [
        {"panel": panel, "curve": CASES[name].label, "x": concurrency, "y": value, "x_unit": 1.0, "y_label": unit}
        for panel, unit in (("goodput", "requests/s inside the SLO"), ("P90 TPOT", "s"))
        for name in LOOPS
        for concurrency, found in bench.tried(name)
        for value in [found.goodput if panel == "goodput" else found.tpot_p90]
    ]
    return Picture(
        title=f"{bench.azure.name}, closed loop, TTFT 2 s and TPOT 0.08 s",
        axes=Axes(x_label="requests in service", y_label="", x_scale="log2"),
        table=pd.DataFrame(rows),
    )


def bursts(bench: DopdBench) -> Picture:
    """GPUs and waiting prompts over one hour of bursts, by planner."""
    frames = []
    for name in SHOWN:
        samples = bench.dynamic(name, 0).samples
        minutes = samples.time_s / MINUTE
        for panel, values, label in (
            ("prefill GPUs", samples.prefill_gpus, "GPUs"),
            ("decode GPUs", samples.decode_gpus, "GPUs"),
            ("requests that wait for their first token", samples.queued, "requests"),
        ):
            frames.append(curve_points(panel, name, minutes, values, label))
    table = pd.concat(frames).sort_values("panel", kind="stable")
    return Picture(
        title=f"An hour of bursts, {SERVICE} times the clip's rate, eight GPUs",
        axes=Axes(x_label="time [min]", y_label=""),
        table=table,
    )


PAPER = Paper(
    bench=lambda traces, quick, engine: DopdBench(traces, quick=quick, engine=engine),
    profile=PROFILE,
    claims=claims_of(claims, claims_runs),
    as_authors=as_authors.CLAIMS,
    engines=as_authors.ENGINES,
    tables={"runs": runs},
    figures=FIGURES,
    pictures={"ratio": ratio, "batches": batches, "static": static, "bursts": bursts},
)
