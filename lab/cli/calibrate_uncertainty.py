"""``disagg-sim calibrate uncertainty``: estimate spreads for error bars from the errors of fits and served runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.facts.load import load_uncertainty
from lab.calibration.kernels.spreads import kernel_spreads, spreads_text, write_spreads
from lab.calibration.served.bands import with_bands
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.read import read_files
from lab.calibration.served.spreads import served_spreads


def uncertainty(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Uncertainty file to write.")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE...]", help="Kernel tables behind the fits (CSV).")
    ] = None,
    serving: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Served measurements (CSV). Repeatable.")
    ] = None,
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows to exclude, with conditions and reasons (CSV).")
    ] = None,
    efficiency: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of efficiency files; default: the shipped ones.")
    ] = None,
    data: Annotated[str, typer.Option(help="Names of the data sets, written into the file.")] = "own measurements",
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Estimate the spreads behind error bars from the fitted part of the data.

    Kernels of which no table is given keep the shipped spreads, and so do served runs without measurements.
    """
    shipped = load_uncertainty("measured")
    kinds, composed = shipped.kinds, shipped.composed
    if files:
        found, others = kernel_spreads(files, exclude=exclude, efficiency=efficiency)
        kinds = {name: kind if kind.rows else kinds[name] for name, kind in found.items()}
        composed = {**composed, **others}
    spread = replace(shipped, kinds=kinds, composed=composed)
    rows, faults = read_files(serving or [])
    for fault in faults:
        typer.echo(f"warning: left out: {fault}", err=True)
    served = served_spreads(with_bands(evaluate(rows), rows, spread)) if rows else (shipped.shared, shipped.served)
    text = spreads_text(spread, served, data=data, date=date)
    spec = write_spreads(out, text)
    told = [
        (name, f"{kind.shared:.2f}", f"{kind.transfer:.3f}", f"{kind.transfer_across:.3f}", str(kind.rows))
        for name, kind in spec.kinds.items()
    ]
    print_table(told, header=("operators", "shared", "transfer", "across", "rows"), numeric=(1, 2, 3, 4))
    beyond = [
        (name, f"{each.base:.3f}", str(each.rows), kind, ", ".join(f"{level} {f:.2f}" for level, f in levels.items()))
        for name, each in spec.served.items()
        for kind, levels in (*each.levels.items(), ("unseen", each.unseen))
    ]
    print_table(beyond, header=("served", "base", "points", "by", "factors"), numeric=(1, 2))
