"""Arrow (arXiv 2505.11916) reproduced: capacities of its systems on four workloads, pools over time, its claims."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from disagg_sim.atomic import write_text
from disagg_sim.report.panels import Axes, Cells, Picture, draw_cells
from disagg_sim.simulation.options import LEAST_PERIOD_S
from disagg_sim.study.arrow.claims import CLAIMS
from disagg_sim.study.arrow.setup import ALL, AZURE, CASES, HALF, PROFILE, TIGHT, Bench, workloads
from disagg_sim.study.papers import PaperResults, as_csv, evaluate, prepare, write_claims, write_picture
from disagg_sim.sweep.run import Listener

if TYPE_CHECKING:
    import pandas as pd

#: Systems whose capacity is searched on every workload; the first is compared with the others.
EVERYWHERE = ("arrow", "observed", "least_load", "vllm", "disaggregated", "colocated")
#: Further searches.
MORE = (
    *((name, case) for case in ("arrow_4", "arrow_batched", "least_load_batched", "static_7_1") for name in AZURE),
    ("code", "flip_60"),
    ("code", "flip_300"),
    (HALF, "arrow_4"),
    (HALF, "arrow"),
    *((name, case) for name in TIGHT for case in ("arrow", "colocated")),
)
BURSTY = ("code", "burstgpt")  # workloads whose pools are drawn over time
MOMENTS = 60  # of such a picture [1]


def reproduce(out: Path, *, traces: Path | None, listener: Listener, quick: bool) -> PaperResults:
    """All experiments of the paper; see ``papers.Reproduction``."""
    prepare(out)
    bench = Bench(workloads=workloads(traces, quick=quick))
    searches = [*((name, case) for name in ALL for case in EVERYWHERE), *MORE]
    listener.start(len(searches) + len(CLAIMS))
    for search in searches:
        bench.capacity(*search)
        listener.advance(1)
    claims = evaluate(CLAIMS, bench, PROFILE, listener)
    listener.finish()
    write_claims(out, claims)
    write_text(out / "runs.csv", as_csv(_runs(bench)))
    table = capacities(bench, searches)
    write_text(out / "capacities.csv", as_csv(table))
    pictures = (
        write_picture(out, "attainment", attainment(bench)),
        *(write_picture(out, f"pools_{name}", pools(bench, name)) for name in BURSTY),
        _draw_ratios(table, out / "ratios.png"),
    )
    return PaperResults(claims=claims, pictures=pictures, simulations=bench.runs)


def capacities(bench: Bench, searches: list[tuple[str, str]]) -> pd.DataFrame:
    """Serving capacity of each search, and that of Arrow over it."""
    import pandas as pd

    rows = []
    for name, case in searches:
        found = bench.capacity(name, case)
        rows.append(
            {
                "workload": name,
                "system": CASES[case].label,
                "gpus": CASES[case].deployment.gpus,
                "stand_in": bench.workloads[name].stand_in,
                "rate_scale": found.rate_scale,
                "requests_per_s": found.requests_per_s,
                "above_rate_scale": found.above,
                "arrow_over_it": bench.ratio(name, "arrow", case),
            }
        )
    return pd.DataFrame(rows)


def _runs(bench: Bench) -> pd.DataFrame:
    """Every run, in the columns of a simulation's summary."""
    import pandas as pd

    rows = [
        {"workload": name, "case": case, "fewest_prefill": seen.fewest[0], "fewest_decode": seen.fewest[1]}
        | asdict(seen.summary)
        for name, case, seen in bench.runs_seen()
    ]
    return pd.DataFrame(rows)


def attainment(bench: Bench) -> Picture:
    """Share of requests inside both limits over the request rate, a panel for each workload."""
    import pandas as pd

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


def pools(bench: Bench, workload: str) -> Picture:
    """Instances of prefill and waiting requests over time, Arrow and static, at the capacity of Arrow."""
    import pandas as pd

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
            frames.append(
                pd.DataFrame(
                    {
                        "panel": panel,
                        "curve": CASES[case].label,
                        "x": samples.time_s[:last],
                        "y": values[:last],
                        "x_unit": 1.0,
                        "y_label": label,
                    }
                )
            )
    return Picture(
        title=f"{workload} at {bench.rate(workload, 'arrow'):.0f} requests/s, the capacity of Arrow",
        axes=Axes(x_label="time [s]", y_label=""),
        table=pd.concat(frames),
    )


def _draw_ratios(table: pd.DataFrame, path: Path) -> Path:
    """Capacity of Arrow over that of the other systems, beside its data."""
    import pandas as pd

    others = [CASES[case].label for case in EVERYWHERE[1:]]
    found = table[table["system"].isin(others)].set_index(["system", "workload"])
    found = pd.DataFrame(
        {name: [found.loc[(other, name), "arrow_over_it"] for other in others] for name in ALL}, index=others
    )
    write_text(path.with_suffix(".csv"), as_csv(found.reset_index(names="system")))
    cells = Cells(
        title="Serving capacity of Arrow over that of",
        rows=tuple(others),
        columns=ALL,
        values=tuple(map(tuple, found.to_numpy())),
        legend="capacity of Arrow over it",
        limit=8.0,
        texts=tuple(tuple(f"{value:.2f}" for value in row) for row in found.to_numpy()),
    )
    draw_cells(cells, path)
    return path
