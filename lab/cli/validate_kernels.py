"""``disagg-sim validate kernels``: compare predictions with kernel measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.cli.tables import print_table
from lab.calibration.kernels.judge import POOLED, judge_kernels, summarise
from lab.calibration.kernels.residuals import lines_of
from lab.calibration.served.tables import write_frames


def kernels(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Kernel tables (CSV; docs/calibration.md).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory of rows.csv and summary.csv.")],
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows to exclude, with conditions and reasons (CSV).")
    ] = None,
    efficiency: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the efficiency files to test; default: the shipped ones."),
    ] = None,
) -> None:
    """Predict every row of kernel tables with the fitted efficiencies and print the errors.

    DIR receives rows.csv (each row with measured, predicted, relative error, or the reason why it was not evaluated)
    and summary.csv (median, 90 % quantile, bias and share inside the 80 % band by operator, library, system, part and
    size).
    """
    verdicts = judge_kernels(files, exclude=exclude, efficiency=efficiency)
    summary = summarise(verdicts)
    write_frames({"rows": verdicts, "summary": summary}, out)
    pooled = summary[(summary["system"] == POOLED) & summary["size"].isin(["all", "below 20 us"])]
    shown = pooled.drop(columns="system")
    print_table(lines_of(shown), header=tuple(shown.columns), numeric=(4, 5, 6, 7, 8))
    left = verdicts.loc[~verdicts["evaluated"], "reason"].value_counts()
    print_table(((count, reason) for reason, count in left.items()), header=("not evaluated", "reason"), numeric=(0,))
    typer.echo(
        f"{out}: {int(verdicts['evaluated'].sum())} of {len(verdicts)} rows evaluated, "
        f"{int((verdicts['masked'] != '').sum())} masked"
    )
