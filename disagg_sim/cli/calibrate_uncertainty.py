"""``disagg-sim calibrate uncertainty``: estimate spreads for error bars from the errors of fits and served runs."""

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
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Kernel tables behind the fits (CSV).")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Uncertainty file to write.")],
    serving: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Served measurements (CSV). Repeatable.")
    ] = None,
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows to exclude, with conditions and reasons (CSV).")
    ] = None,
    efficiency: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of efficiency files; default: the shipped ones.")
    ] = None,
    assumed: Annotated[float, typer.Option(help="Standard deviation of the logarithm of an unmeasured time.")] = 0.3,
    per_doubling: Annotated[
        float, typer.Option(help="Standard deviation added per doubling outside a fit's range.")
    ] = 0.05,
    data: Annotated[str, typer.Option(help="Names of the data sets, written into the file.")] = "own measurements",
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Estimate the spreads behind error bars from the fitted part of the data.

    Without served measurements the spreads of the engines stay as shipped.
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
