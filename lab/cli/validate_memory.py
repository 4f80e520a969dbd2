"""``disagg-sim validate memory``: compare the memory that is counted with that of real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.facts.load import load_engine
from disagg_sim.units import GIB
from lab.calibration.served.memory import judge_memory, memory_errors
from lab.calibration.served.tables import write_frames

#: Relative error that a line of a server must not pass to go untold. [1]
WORTH_TELLING = 0.015


def memory(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Memory of servers at start-up (CSV; docs/fidelity.md).")
    ],
    engine: Annotated[str, typer.Option(help="Engine profile.")] = "vllm",
    configs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of ORG--NAME.json, configurations of models that are not shipped."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of rows.csv and summary.csv.")] = None,
) -> None:
    """Predict the memory of every server that a start-up log tells of, and print the errors by term.

    "fitted" are models whose rows the numbers of the engine profile saw, "judged" all others. Servers that differ in
    the longest context alone are one case. Every server that is not evaluated is named with the reason.
    """
    profile = load_engine(engine)
    found = pd.concat([judge_memory(path, profile, configs=configs).assign(file=path.name) for path in files])
    summary = memory_errors(found.assign(case=found["file"] + found["case"].astype(str)))
    lines = [(*row[:4], *(f"{number:.2%}" for number in row[4:])) for row in summary.itertuples(index=False)]
    print_table(lines, header=list(summary.columns), numeric=range(2, len(summary.columns)))
    good = found[(found["reason"] == "") & found["error"].notna()]
    once = good.drop_duplicates(["file", "case", "term"])
    missed = once[once["error"].abs() > WORTH_TELLING].sort_values("error", key=abs, ascending=False)
    told = ((row.term, row.row, row.model, row.tp, row.pp, row.part, *_sizes(row)) for row in missed.itertuples())
    header = ("term", "row", "model", "tp", "pp", "part", "measured", "counted", "error", "measured to")
    typer.echo(f"\nOff by more than {WORTH_TELLING:.1%}:")
    print_table(told, header=header, numeric=(1, 3, 4, 6, 7, 8, 9))
    left = found[(found["reason"] != "") & (found["reason"] != "not measured")].drop_duplicates(["file", "row"])
    if len(left):
        typer.echo("")
        print_table(((row.row, row.model, row.reason) for row in left.itertuples()), header=("row", "model", "reason"))
    write_frames({"rows": found, "summary": summary}, out)
    servers = found.drop_duplicates(["file", "row"])
    typer.echo(f"\n{len(servers) - len(left)} of {len(servers)} servers evaluated, {len(once)} numbers of them once")


def _sizes(row: Any) -> tuple[str, ...]:
    """Measured and counted, in the unit of the term, and the errors of both."""
    unit, digits = (1.0, 0) if row.term == "KV tokens" else (GIB, 2)
    sizes = (row.measured, row.predicted)
    within = f"{row.within:.1%}" if row.within else ""
    return (*(f"{size / unit:,.{digits}f}" for size in sizes), f"{row.error:+.1%}", within)
