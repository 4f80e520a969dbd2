"""``disagg-sim calibrate engine``: fit the overheads of an engine profile to served runs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.facts.load import load_engine
from lab.calibration.kernels.tables import TableError
from lab.calibration.served.engine_fit import FITTED, UNITS, engine_text, fit_engine, write_engine
from lab.calibration.served.read import read_files

#: Numbers that can be fitted alone.
Fitted = Enum("Fitted", {name: name for name in FITTED})  # type: ignore[misc]


def engine(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Served measurements (CSV), launch flags.")],
    engine: Annotated[str, typer.Option(help="Engine profile to fit; values that are not fitted stay.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Engine profile to write.")],
    only: Annotated[
        list[Fitted] | None,
        typer.Option(metavar="NAME", help="Fit this number, to all TPOT and TTFT; others stay. Repeatable."),
    ] = None,
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Fit the overheads of an engine to served runs, print them, write its profile.

    Held-out runs are not used. The same data give the same file. Fit the kernels first. Files may be tables of launch
    flags, which say how the rows of the others were launched.
    """
    before = load_engine(engine)
    rows, faults = read_files(files)
    if faults:
        raise TableError("\n".join(faults))
    fit = fit_engine(rows, before.name, only=[each.value for each in only or ()])
    spec = write_engine(out, engine_text(fit, date=date))
    lines = [
        (key, *(f"{getattr(each, key) / UNITS[key][1]:.4g}" for each in (before, spec)), UNITS[key][0] or "1")
        for key in fit.fitted
    ]
    print_table(lines, header=("parameter", "before", "fitted", "unit"), numeric=(1, 2))
    informed = sum(count for _, count in fit.files)
    typer.echo(f"{out}: {fit.lines} numbers of {informed} rows, median error {fit.median_error:.1%}")
