"""``disagg-sim validate requests``: replay runs of a real server and compare request by request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.cli.tables import print_table
from lab.calibration.served.requests import QUANTILES, judge_requests
from lab.calibration.served.tables import write_frames


def requests(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Requests of a run (CSV); RUN.meta.json with engine_kwargs beside it."),
    ],
    system: Annotated[str, typer.Option(help="System that the runs were served on.")],
    engine: Annotated[str, typer.Option(help="Engine profile.")] = "vllm",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of rows.csv and errors.csv.")] = None,
) -> None:
    """Replay runs of a real server with their own arrivals and limits, and print measured and simulated latencies.

    Quantiles stand as measured -> simulated. "error of a request" is the median over all requests.
    """
    runs = [judge_requests(path, system, engine) for path in files]
    errors = pd.concat([run.errors() for run in runs], ignore_index=True)
    lines = []
    for row in errors.itertuples():
        both = ((getattr(row, f"measured_{word}_s"), getattr(row, f"simulated_{word}_s")) for word in QUANTILES)
        cells = (f"{measured:.4g} -> {simulated:.4g}" for measured, simulated in both)
        lines.append((row.run, row.latency, row.requests, *cells, f"{row.mean_ratio:.3f}", f"{row.request_error:.1%}"))
    header = ("run", "latency", "requests", *(f"{word} [s]" for word in QUANTILES), "mean ratio", "error of a request")
    print_table(lines, header=header, numeric=(2, 3, 4, 5, 6, 7, 8))
    write_frames({"rows": pd.concat([run.frame() for run in runs], ignore_index=True), "errors": errors}, out)
