"""``disagg-sim calibrate kernels``: fit the efficiencies of a system to kernel measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.facts.load import load_system
from disagg_sim.facts.yaml_files import is_path
from lab.calibration.kernels.efficiency_yaml import assumptions_of, efficiency_text, find_assumptions, write_efficiency
from lab.calibration.kernels.fit import calibrate_kernels
from lab.calibration.kernels.residuals import error_table, lines_of, part_of
from lab.calibration.kernels.tables import spec_name


def kernels(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Kernel tables (CSV; docs/calibration.md).")],
    system: Annotated[str, typer.Option(help="Measured system: a name, or its YAML file.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Efficiency file to write.")],
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows to exclude, with conditions and reasons (CSV).")
    ] = None,
    split: Annotated[
        bool, typer.Option("--split/--no-split", help="Hold 30 % of the shapes out of the fits, or fit all rows.")
    ] = True,
    assumptions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Assumptions for what is not measured; default: the shipped file of the system."
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="Name of the data set, written into the file.")] = "own kernel measurements",
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Fit kernel measurements, print residuals, write the efficiency file.

    The same data give the same file; the date in it is that of --date.
    """
    beside = assumptions or find_assumptions(load_system(system if is_path(system) else spec_name(system)).name)
    told = assumptions_of(beside).prefill_keys if beside else ()
    done = calibrate_kernels(files, system, exclude=exclude, split=split, prefill_keys=told)
    spec = write_efficiency(out, efficiency_text(done, data=data, date=date, assumptions=beside, split=split))
    rows = done.residuals[(done.residuals["masked"] == "") & done.residuals["predicted"].notna()]
    keys = ("operator", "framework", "part")
    table = error_table(rows.assign(part=rows["held_out"].map(part_of)), keys)
    print_table(lines_of(table), header=(*keys, "size", "rows", "median", "p90", "bias"), numeric=(4, 5, 6, 7))
    for each in done.left_out:
        typer.echo(str(each))
    fitted, unseen = (sum(getattr(file, key) for file in spec.files) for key in ("fitted", "held_out"))
    dropped = sum(sum(file.dropped.values()) for file in spec.files)
    typer.echo(
        f"{out}: {sum(map(len, done.fits.values()))} fits, {fitted} rows fitted, {unseen} held out, {dropped} dropped"
    )
