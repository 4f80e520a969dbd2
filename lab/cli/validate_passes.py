"""``disagg-sim validate passes``: compare predictions with forward passes of engines on a cached past."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.cli.tables import print_frame, print_table
from lab.calibration.kernels.residuals import figures_of
from lab.calibration.served.forward_pass import judge_passes, judge_steps, pass_cells
from lab.calibration.served.tables import write_frames

_WHAT = {"whole": "predicted_ms", "past": "from_past_ms"}
#: Bounds of the cells of decodes: beyond the last but one none was captured as a graph. [request]
STEPS = (0, 16, 64, 256, 512, 100_000)


def passes(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Tables of forward passes (parquet or CSV; docs/fidelity.md)."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of rows.csv and cells.csv.")] = None,
) -> None:
    """Predict every prefill on a cached past, and every step of decodes, that engines were timed with.

    "whole" is the pass as the engine profile has it, "past" the measured pass without a past and what the forecast adds
    for it. Cells are medians of predicted over measured by new and by cached tokens of a request; steps of decodes are
    told by how many they are.
    """
    steps = pd.concat([judge_steps(path) for path in files], ignore_index=True)
    rows = pd.concat([judge_passes(path) for path in files], ignore_index=True)
    good = rows[rows["reason"] == ""]
    keys = ["engine", "version", "model", "system", "layout", "part"]
    lines, cells = [], []
    for words, group in good.groupby(keys):
        for what, column in _WHAT.items():
            part = group[group[column].notna()]
            error, grid = part[column] / part["measured_ms"] - 1.0, pass_cells(part, column)
            cells.append(grid.assign(what=what, part=str(words[-1]), layout=" ".join(map(str, words[:-1]))))
            worst = grid["ratio"].where(grid["ratio"] >= 1, 1 / grid["ratio"]).max()
            numbers = (*figures_of(error).values(), worst)
            lines.append((*words, what, len(part), *(f"{number:.3f}" for number in numbers)))
    header = (*keys, "predicted", "passes", "median", "p90", "bias", "worst cell")
    print_table(lines, header=header, numeric=(7, 8, 9, 10, 11))
    told = pd.concat(cells, ignore_index=True) if cells else pd.DataFrame()
    for what in _WHAT if len(told) else ():
        held = told[(told["part"] == "held out") & (told["what"] == what)]
        typer.echo(f"\n{what}, held out: predicted over measured by new (down) and cached tokens (across)")
        print_frame(held.pivot_table("ratio", "new_tokens", "past_tokens", observed=True).reset_index())
    left = rows.loc[rows["reason"] != "", "reason"].value_counts()
    print_table(((count, reason) for reason, count in left.items()), header=("not evaluated", "reason"), numeric=(0,))
    _print_steps(steps)
    write_frames({"rows": rows, "steps": steps, "cells": told}, out)
    typer.echo(f"{len(good)} of {len(rows)} passes evaluated")


def _print_steps(steps: pd.DataFrame) -> None:
    """Print errors of steps of decodes by layout and by how many decodes they have."""
    good = steps[steps["reason"] == ""]
    upto = pd.cut(good["batch"], STEPS, labels=[*map(str, STEPS[1:-1]), "more"])
    error = good["predicted_ms"] / good["measured_ms"] - 1.0
    keys = [good["engine"], good["model"], good["layout"], good["part"], upto]
    lines = [
        (*words, len(some), *(f"{number:.3f}" for number in figures_of(some).values()))
        for words, some in error.groupby(keys, observed=True)
    ]
    header = ("engine", "model", "layout", "part", "decodes to", "steps", "median", "p90", "bias")
    print_table(lines, header=header, numeric=(5, 6, 7, 8))
