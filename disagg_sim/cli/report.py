"""``disagg-sim report``: one HTML file of a directory of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.atomic import require_own
from disagg_sim.cli.progress import listener
from disagg_sim.cli.workers import Jobs, cores
from disagg_sim.report.page.sweep import BESIDE
from disagg_sim.report.page.write import MARK, content_of, write_page
from disagg_sim.sweep.manifest import MANIFEST
from disagg_sim.units import MB


def report(
    results: Annotated[Path, typer.Argument(metavar="DIR", help="Results of sweep, simulate, plan or reproduce.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; default: report.html in the directory.")
    ] = None,
    points: Annotated[int, typer.Option(min=0, help="Sweep: points to show beside the frontiers.")] = BESIDE,
    no_breakdowns: Annotated[
        bool, typer.Option("--no-breakdowns", help="Sweep: leave out what each latency is made of; faster.")
    ] = False,
    jobs: Jobs = None,
) -> None:
    """Write results as one interactive HTML page that needs no network: frontiers, latencies, answers, provenance."""
    path = out or results / "report.html"
    require_own(path.parent, [path.name], MARK)
    if not no_breakdowns and (results / MANIFEST).is_file():
        listener().note("note: taking designs apart, most of the time; --no-breakdowns leaves that out")
    content = content_of(results, beside=points, jobs=jobs or cores(), breakdowns=not no_breakdowns)
    size = write_page(content, path)
    typer.echo(f"{path}: {size / MB:.1f} MB; open it in a browser")
