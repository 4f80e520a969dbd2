"""DOPD reproduced: the ratio of prefill to decode, batches by length, static and dynamic comparisons, its claims."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from disagg_sim.atomic import write_text
from disagg_sim.report.panels import Axes, Picture
from disagg_sim.simulation.metrics import summary
from disagg_sim.study.dopd.claims import DERIVED_CLAIMS
from disagg_sim.study.dopd.claims_runs import BIMODAL_LOADS, RUN_CLAIMS, bimodal_ttft, throughputs, utilisations
from disagg_sim.study.dopd.setup import PROFILE, SERVICE, SLO, Bench
from disagg_sim.study.papers import PaperResults, as_csv, evaluate, prepare, write_claims, write_picture
from disagg_sim.sweep.run import Listener
from disagg_sim.workload.statistics import MINUTE

if TYPE_CHECKING:
    import pandas as pd

CLAIMS = DERIVED_CLAIMS | RUN_CLAIMS
#: Curves of the pictures: of closed loops by case, of bursts by planner.
LOOPS = {
    "vllm": "vLLM, TP4: four GPUs",
    "vllm_six": "vLLM, 3 x TP2: six GPUs",
    "dopd": "DOPD, 2P + 2D: six GPUs",
    "dopd_4_1": "DOPD, 4P + 1D: six GPUs",
}
SHOWN = ("DOPD", "SLA-driven", "load-driven")
LABELS = {"knapsack": "by length", "fifo": "in order, up to as many tokens", "chunked": "chunks of 2,048 in order"}


def reproduce(out: Path, *, traces: Path | None, listener: Listener, quick: bool) -> PaperResults:
    """All experiments of the paper; see ``papers.Reproduction``."""
    prepare(out)
    bench = Bench(traces, quick=quick)
    listener.start(len(CLAIMS))
    claims = evaluate(CLAIMS, bench, PROFILE, listener).sort_values("id", key=lambda ids: ids.str[1:].astype(int))
    listener.finish()
    write_claims(out, claims)
    write_text(out / "runs.csv", as_csv(_runs(bench)))
    pictures = tuple(
        write_picture(out, name, picture(bench))
        for name, picture in {"ratio": ratio, "batches": batches, "static": static, "bursts": bursts}.items()
    )
    return PaperResults(claims=claims, pictures=pictures, simulations=bench.runs)


def _runs(bench: Bench) -> pd.DataFrame:
    """Every run, in the columns of a simulation's summary."""
    import pandas as pd

    return pd.DataFrame([{"experiment": name} | asdict(summary(result, SLO)) for name, result in bench.results()])


def ratio(bench: Bench) -> Picture:
    """Throughput and utilisation over the prefill instances of one decode instance."""
    import pandas as pd

    rates, shares = throughputs(bench), utilisations(bench)
    count = np.arange(1, len(rates) + 1)
    frames = [
        pd.DataFrame({"panel": panel, "curve": curve, "x": count, "y": values, "x_unit": 1.0, "y_label": label})
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


def batches(bench: Bench) -> Picture:
    """P90 of the TTFT over the load, by how batches are formed."""
    import pandas as pd

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


def static(bench: Bench) -> Picture:
    """Goodput and P90 of the TPOT over the requests in service."""
    import pandas as pd

    rows = [
        {"panel": panel, "curve": label, "x": concurrency, "y": value, "x_unit": 1.0, "y_label": unit}
        for panel, unit in (("goodput", "requests/s inside the SLO"), ("P90 TPOT", "s"))
        for name, label in LOOPS.items()
        for concurrency, found in bench.tried(name)
        for value in [found.goodput if panel == "goodput" else found.tpot_p90]
    ]
    return Picture(
        title=f"{bench.azure.name}, closed loop, TTFT 2 s and TPOT 0.08 s",
        axes=Axes(x_label="requests in service", y_label="", x_scale="log2"),
        table=pd.DataFrame(rows),
    )


def bursts(bench: Bench) -> Picture:
    """GPUs and waiting prompts over one hour of bursts, by planner."""
    import pandas as pd

    frames = []
    for name in SHOWN:
        samples = bench.dynamic(name, 0).samples
        minutes = samples.time_s / MINUTE
        for panel, values, label in (
            ("prefill GPUs", samples.prefill_gpus, "GPUs"),
            ("decode GPUs", samples.decode_gpus, "GPUs"),
            ("requests that wait for their first token", samples.queued, "requests"),
        ):
            frames.append(
                pd.DataFrame(
                    {"panel": panel, "curve": name, "x": minutes, "y": values, "x_unit": 1.0, "y_label": label}
                )
            )
    table = pd.concat(frames).sort_values("panel", kind="stable")
    return Picture(
        title=f"An hour of bursts, {SERVICE} times the clip's rate, eight GPUs",
        axes=Axes(x_label="time [min]", y_label=""),
        table=table,
    )
