"""``disagg-sim calibrate uncertainty``: errors of fits and of served runs to the spreads behind error bars."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.calibration.kernels.spreads import engine_spreads, kernel_spreads, spreads_text, write_spreads
from disagg_sim.calibration.served.bands import with_bands
from disagg_sim.calibration.served.evaluate import evaluate
from disagg_sim.calibration.served.read import read_rows
from disagg_sim.cli.tables import print_table
from disagg_sim.facts.load import load_uncertainty


def uncertainty(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Kernel tables that fits came from (CSV).")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Uncertainty file to write.")],
    serving: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Served measurements (CSV); may be repeated.")
    ] = None,
    exclude: Annotated[Path | None, typer.Option(metavar="FILE", help="Mask of known bad rows (CSV).")] = None,
    efficiency: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Efficiency files; else the shipped ones.")
    ] = None,
    assumed: Annotated[float, typer.Option(help="S.d. of the logarithm of a time that nobody measured.")] = 0.3,
    per_doubling: Annotated[float, typer.Option(help="The same for each doubling outside a range.")] = 0.05,
    data: Annotated[str, typer.Option(help="Name of the data sets, for the file.")] = "own measurements",
    date: Annotated[str, typer.Option(help="Date of the data, for the file.")] = "not stated",
) -> None:
    """Estimate the spreads behind error bars on the fitted part of the data, and write them.

    Without served measurements the shipped spreads of the engines stay.
    """
    kinds, composed = kernel_spreads(files, exclude=exclude, efficiency=efficiency)
    shipped = load_uncertainty("measured")
    spread = replace(shipped, kinds=kinds, composed=composed, assumed=assumed, per_doubling=per_doubling)
    rows = [row for path in serving or [] for row in read_rows(path)]
    engines = engine_spreads(with_bands(evaluate(rows), rows, spread)) if rows else shipped.engines
    text = spreads_text(kinds, composed, engines, data=data, date=date, assumed=assumed, per_doubling=per_doubling)
    spec = write_spreads(out, text)
    told = [
        (name, f"{kind.shared:.2f}", f"{kind.transfer:.3f}", f"{kind.transfer_across:.3f}", str(kind.rows))
        for name, kind in spec.kinds.items()
    ]
    print_table(told, header=("operators", "shared", "transfer", "across", "rows"), numeric=(1, 2, 3, 4))
    names = ("step", "first_token", "first_token_loaded", "throughput", "shared")
    served = [
        (name, *(f"{getattr(each, key):.3f}" for key in names), str(each.rows)) for name, each in spec.engines.items()
    ]
    print_table(served, header=("engine", *names, "lines"), numeric=(1, 2, 3, 4, 5, 6))
