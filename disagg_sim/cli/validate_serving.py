"""``disagg-sim validate serving``: compare predictions with runs of serving engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.calibration.served.bands import with_bands
from disagg_sim.calibration.served.evaluate import evaluate
from disagg_sim.calibration.served.read import read_rows
from disagg_sim.calibration.served.tables import (
    ENGINE_NOISE,
    RERUN_NOISE,
    counted,
    judged,
    summary,
    who_wins,
    write_rows,
    write_tables,
)
from disagg_sim.cli.tables import print_table
from disagg_sim.report.fidelity import scatter_plots


def validate_serving(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="CSV files of serving measurements.")],
    out: Annotated[
        Path | None, typer.Option(help="Directory of rows.csv, summary.csv, the other tables and scatter plots.")
    ] = None,
) -> None:
    """Predict every row of served runs and print the errors below saturation."""
    rows = [row for path in files for row in read_rows(path)]
    table = evaluate(rows)
    if table.empty:
        typer.echo("no measurements in these files")
        if out is not None:
            write_rows(table, out)
        return
    table = with_bands(table, rows)
    _print(counted(table))
    below = table[~table["saturated"]]
    typer.echo("\nBelow saturation, all parts:")
    _print(summary(below, by=("form", "quantity", "mode")))
    bars = judged(table)
    if bars["rows"].sum():
        typer.echo("\nBars (engines of today in a closed loop, below saturation):")
        _print(bars)
    typer.echo(f"noise floor: re-run {RERUN_NOISE:.1%}, engine to engine {ENGINE_NOISE:.0%}")
    wins = who_wins(table)
    if len(wins):
        agree = wins["agree"].sum()
        typer.echo(f"\nAggregated or disaggregated at equal interactivity: {agree} of {len(wins)} verdicts agree")
        _print(wins)
    if out is not None:
        write_tables(table, out)
        pictures = scatter_plots(table, out)
        typer.echo(f"\n{len(table)} lines in {out / 'rows.csv'}, {len(pictures)} pictures")


def _print(table: pd.DataFrame) -> None:
    """Print a table with four digits per number."""
    numeric = [i for i, column in enumerate(table.columns) if table[column].dtype.kind in "fi"]
    rows = [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in table.to_numpy().tolist()]
    print_table(rows, header=list(map(str, table.columns)), numeric=numeric)
