"""``disagg-sim store``: check the files of a directory of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.sweep.check_store import check_store
from disagg_sim.units import MB

BROKEN = 1  # exit code of ``store check`` where a file is broken, and of nothing else

_Results = Annotated[Path, typer.Argument(metavar="DIR", help="Results of a sweep or a simulation.")]


def check(results: _Results) -> None:
    """Read every byte of stored results; name each file that is missing, damaged or of other inputs.

    Exit code 0: all files are as they were written. 1: some are not. 2: no store, or a run is writing there.
    """
    found = check_store(results)
    for fault in found.faults:
        typer.echo(f"{fault.path}: {fault.said}")
    if found.faults:
        typer.echo(f"{results}: {len(found.faults)} faults; the same {found.holds} computes again what is needed")
        raise typer.Exit(BROKEN)
    typer.echo(f"{results}: ok: {found.blocks:,} blocks in {found.files:,} files, {found.size / MB:,.1f} MB")
