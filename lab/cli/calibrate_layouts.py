"""``disagg-sim calibrate layouts``: count the served runs behind each kind of layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.errors import InputError
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.kinds import checked_kinds, evidence_text, write_evidence
from lab.calibration.served.read import read_files


def layouts(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Served measurements, and tables of their launch flags.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Evidence file to write.")],
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Count the served runs behind each kind of layout, print them, write the evidence file."""
    rows, faults = read_files(files)
    if faults:
        raise InputError("\n".join(faults))
    kinds = checked_kinds(rows, evaluate(rows))
    if not kinds:
        raise InputError("no run in these files can be compared with a forecast")
    spec = write_evidence(out, evidence_text(kinds, date=date))
    table = [
        (
            *(each.family, each.systems, each.layout, str(each.most_gpus), str(each.rows), str(each.points)),
            *(each.judged_by, "-" if each.error is None else f"{each.error:.1%}"),
        )
        for each in spec.kinds
    ]
    head = ("family", "systems", "layout", "GPUs", "runs", "points", "judged by", "error")
    print_table(table, header=head, numeric=(3, 4, 5, 7))
