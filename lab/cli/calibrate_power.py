"""``disagg-sim calibrate power``: fit the power of kernels of a system to measured watts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.cli.tables import print_table
from lab.calibration.kernels.residuals import FIGURES, by_group, figures_of, lines_of, part_of
from lab.calibration.kernels.tables import spec_name
from lab.calibration.power.fit import calibrate_power, power_text, write_power
from lab.calibration.power.table import read_power_table


def power(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Table of power (CSV or Parquet; docs/calibration.md).")],
    system: Annotated[str, typer.Option(help="Measured system.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Power file to write.")],
    data: Annotated[str, typer.Option(help="Name of the data set, written into the file.")] = "own measurements",
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Fit the power of kernels, print the errors by kind and engine, write the power file.

    The same data give the same file; the date in it is that of --date.
    """
    table = read_power_table(file, spec_name(system))
    fit = calibrate_power(table)
    write_power(out, power_text(fit, data=data, date=date))
    keys = ("kind", "framework", "part")
    rows = fit.rows.assign(
        error=fit.rows["predicted"] / fit.rows["watts"] - 1.0, part=fit.rows["held_out"].map(part_of)
    )
    found = by_group(rows, keys, lambda part: {"rows": len(part)} | figures_of(part["error"]))
    print_table(lines_of(pd.DataFrame(found).drop(columns="bias")), header=(*keys, *FIGURES[:-1]), numeric=(3, 4, 5))
    dropped = sum(fit.file.dropped.values())
    typer.echo(
        f"{out}: {len(fit.laws)} laws, {fit.file.fitted} rows fitted, {fit.file.held_out} held out, {dropped} dropped"
    )
