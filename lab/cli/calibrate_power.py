"""``disagg-sim calibrate power``: fit the power of kernels of a system to measured watts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.cli.tables import print_table
from lab.calibration.kernels.tables import spec_name
from lab.calibration.power.fit import calibrate_power, compare_forms, power_text, write_power
from lab.calibration.power.table import read_power_table


def power(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Table of power (CSV or Parquet; docs/calibration.md).")],
    system: Annotated[str, typer.Option(help="Measured system.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Power file to write.")],
    split: Annotated[
        bool, typer.Option("--split/--no-split", help="Hold 30 % of the shapes out of the fits, or fit all rows.")
    ] = True,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare the forms of the law, on shapes that are not held out.")
    ] = False,
    data: Annotated[str, typer.Option(help="Name of the data set, written into the file.")] = "own measurements",
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Fit the power of kernels, print the errors by kind and engine, write the power file.

    The same data give the same file; the date in it is that of --date.
    """
    table = read_power_table(file, spec_name(system))
    if compare:
        judged = [
            (one.form, str(one.rows), f"{one.median:.1%}", f"{one.p90:.1%}")
            for one in compare_forms(table).itertuples()
        ]
        print_table(judged, header=("form", "rows that chose", "median", "p90"), numeric=(1, 2, 3))
    fit = calibrate_power(table, split=split)
    write_power(out, power_text(fit, data=data, date=date, split=split))
    rows = fit.rows.assign(error=(fit.rows["predicted"] / fit.rows["watts"] - 1.0).abs())
    rows["part"] = rows["held_out"].map({True: "held out", False: "fitted"})
    keys = ["kind", "framework", "part"]
    told = [
        (*key, str(len(part)), f"{part['error'].median():.1%}", f"{part['error'].quantile(0.9):.1%}")
        for key, part in rows.groupby(keys, sort=True)
    ]
    print_table(told, header=(*keys, "rows", "median", "p90"), numeric=(3, 4, 5))
    dropped = sum(fit.file.dropped.values())
    typer.echo(
        f"{out}: {len(fit.laws)} laws, {fit.file.fitted} rows fitted, {fit.file.held_out} held out, {dropped} dropped"
    )
