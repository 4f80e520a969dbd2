"""``disagg-sim validate serving``: compare predictions with runs of serving engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.calibration.served.bands import with_bands
from disagg_sim.calibration.served.bars import coverage, judged
from disagg_sim.calibration.served.evaluate import evaluate
from disagg_sim.calibration.served.groups import groups
from disagg_sim.calibration.served.read import read_files
from disagg_sim.calibration.served.tables import (
    ENGINE_NOISE,
    RERUN_NOISE,
    counted,
    side_by_side,
    summary,
    who_wins,
    write_rows,
    write_tables,
)
from disagg_sim.cli.tables import print_frame
from disagg_sim.report.fidelity import scatter_plots


def validate_serving(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="CSV files of serving measurements.")],
    out: Annotated[
        Path | None, typer.Option(help="Directory of rows.csv, summary.csv, the other tables and scatter plots.")
    ] = None,
) -> None:
    """Predict every row of served runs and print the errors below saturation.

    Runs of one configuration, layout, lengths and load are one operating point and count once. A file that cannot be
    read is named, and the others are judged.
    """
    rows, faults = read_files(files)
    for fault in faults:
        typer.echo(f"left out: {fault}", err=True)
    table = evaluate(rows)
    if table.empty:
        typer.echo("no measurements in these files")
        if out is not None:
            write_rows(table, out)
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
    wins = who_wins(table)
    if len(wins):
        agree = wins["agree"].sum()
        typer.echo(f"\nAggregated or disaggregated at equal interactivity: {agree} of {len(wins)} verdicts agree")
        print_frame(wins)
    if out is not None:
        write_tables(table, out)
        pictures = scatter_plots(table, out)
        typer.echo(f"\n{len(table)} lines in {out / 'rows.csv'}, {len(pictures)} pictures")
