"""``disagg-sim validate serving``: compare predictions with runs of serving engines."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.cli.progress import listener
from disagg_sim.cli.tables import print_frame
from disagg_sim.cli.workers import cores
from disagg_sim.laboratory import in_workers
from disagg_sim.sweep.backends.run import run_tasks
from lab.calibration.served.bands import with_bands
from lab.calibration.served.bars import coverage, judged
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.groups import groups
from lab.calibration.served.left_out import Unseen, left_out
from lab.calibration.served.read import read_files
from lab.calibration.served.rows import ServingRow
from lab.calibration.served.simulate import Answer, play, tasks_of
from lab.calibration.served.simulated import (
    bars_of_both,
    brought,
    not_simulated,
    statistics,
    with_simulated,
    write_simulated,
)
from lab.calibration.served.tables import (
    ENGINE_NOISE,
    RERUN_NOISE,
    counted,
    side_by_side,
    summary,
    write_frames,
    write_tables,
)


class LeaveOut(Enum):
    """What is left out of fits in turn."""

    ENGINE = "engine"
    MODEL = "model"
    SYSTEM = "system"


def validate_serving(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="CSV files of serving measurements.")],
    out: Annotated[Path | None, typer.Option(help="Directory of rows.csv, summary.csv and the other tables.")] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Play every closed loop request by request, too, and say what that brings."),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of worker processes of --simulate; default: all cores.")
    ] = None,
    leave_out: Annotated[
        LeaveOut | None, typer.Option(help="Fit each engine without one of these in turn, and judge that.")
    ] = None,
) -> None:
    """Predict every row of served runs and print the errors below saturation.

    The prediction is the steady state of each closed loop; with --simulate also the run itself, with its start, queues
    and percentiles: a few minutes for a thousand rows. Runs of one configuration, layout, lengths and load are one
    operating point and count once. A file that cannot be read is named, and the others are judged.
    """
    rows, faults = read_files(files)
    for fault in faults:
        typer.echo(f"warning: left out: {fault}", err=True)
    table = evaluate(rows)
    if table.empty:
        typer.echo("no measurements in these files")
        write_frames({"rows": table}, out)
        return
    table = with_bands(table, rows)
    print_frame(counted(table))
    below = table[~table["saturated"]]
    typer.echo("\nBelow saturation, all parts:")
    print_frame(summary(below, by=("form", "quantity", "mode")))
    apart = groups(table)
    shown = "held-out" if (apart["part"] == "held-out").any() else "all"
    typer.echo(f"\nApart, {shown} part: operating points, median error, bias (medians of points):")
    print_frame(side_by_side(apart[apart["part"] == shown]))
    bars = judged(table)
    if bars["rows"].sum():
        typer.echo("\nBars (engines of today in a closed loop, below saturation, by operating points):")
        print_frame(bars)
    covered = coverage(table)
    if len(covered):
        typer.echo(
            f"\nCoverage of the 80 % bands, held out: {covered['met'].sum()} of {len(covered)} groups within 70-90 %"
        )
        print_frame(covered[~covered["met"]])
    typer.echo(f"noise floor: re-run {RERUN_NOISE:.1%}, engine to engine {ENGINE_NOISE:.0%}")
    if leave_out is not None:
        typer.echo(f"\nEach {leave_out.value} left out of the fit in turn, all points below saturation:")
        found = pd.DataFrame(left_out(rows, leave_out.value), columns=list(Unseen._fields))
        print_frame(found)
        write_frames({"left_out": found}, out)
    if simulate:
        _simulate(table, rows, jobs or cores(), out)
    if out is not None:
        write_tables(table, out)
        typer.echo(f"\n{len(table)} lines in {out / 'rows.csv'}")


def _simulate(table: pd.DataFrame, rows: list[ServingRow], jobs: int, out: Path | None) -> None:
    """Play the closed loops of evaluated rows; print, and write, what that brings over the steady state."""
    judged_rows = table[table["evaluated"]]
    kept = set(zip(judged_rows["file"], judged_rows["row"], strict=True))
    tasks = tasks_of([row for row in rows if (row.file, row.row) in kept])
    told = listener("operating points", "played")
    told.start(sum(map(len, tasks)))
    answers: list[Answer] = []
    for found in run_tasks(in_workers(play), tasks, jobs=jobs):
        answers += found
        told.advance(len(found))
    told.finish()
    lines = with_simulated(table, rows, answers)
    requests, shorter = sum(answer.requests for answer in answers), sum(answer.shortened for answer in answers)
    typer.echo(f"\nSimulated: {len(answers)} operating points, {requests:,} requests; {shorter} runs with fewer waves")
    print_frame(not_simulated(lines))
    typer.echo("\nSteady state and simulation on the same operating points, below saturation:")
    print_frame(brought(lines))
    print_frame(statistics(lines, rows, answers))
    bars = bars_of_both(lines)
    if len(bars):
        print_frame(bars)
    if out is not None:
        write_simulated(lines, rows, answers, out)
