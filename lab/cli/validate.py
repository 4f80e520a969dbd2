"""``disagg-sim validate``: hold predictions against kernels, memory of servers, single passes and requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from disagg_sim.cli.tables import print_frame, print_table
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_engine
from disagg_sim.facts.yaml_files import shown
from disagg_sim.units import GIB
from lab.calibration.kernels.judge import POOLED, judge_kernels, summarise
from lab.calibration.kernels.residuals import figures_of, lines_of
from lab.calibration.served.forward_pass import judge_passes, judge_steps, pass_cells
from lab.calibration.served.groups import write_frames
from lab.calibration.served.memory import judge_memory, memory_errors
from lab.calibration.served.requests import QUANTILES, judge_loops, judge_requests


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


#: Relative error that a line of a server must not pass to go untold. [1]
WORTH_TELLING = 0.015


def memory(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Memory of servers at start-up (CSV; docs/fidelity.md).")
    ],
    engine: Annotated[str, typer.Option(help="Engine profile.")] = "vllm",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of rows.csv and summary.csv.")] = None,
) -> None:
    """Predict the memory of every server that a start-up log tells of, and print the errors by term.

    "fitted" are models whose rows the numbers of the engine profile saw, "judged" all others. Servers that differ in
    the longest context alone are one case. Every server that is not evaluated is named with the reason.
    """
    profile = load_engine(engine)
    found = pd.concat([judge_memory(path, profile).assign(file=path.name) for path in files])
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


def requests(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Requests of a run (CSV), RUN.meta.json with engine_kwargs beside it; or of closed loops (Parquet), "
            "runs.csv beside it.",
        ),
    ],
    system: Annotated[str, typer.Option(help="System that the runs of a CSV were served on.")] = "",
    engine: Annotated[str, typer.Option(help="Engine profile of a CSV.")] = "vllm",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of rows.csv and errors.csv.")] = None,
) -> None:
    """Replay runs of a real server with their own arrivals and limits, and print measured and simulated latencies.

    Quantiles stand as measured -> simulated. "error of a request" is the median over all requests. Closed loops run on
    the system and engine that runs.csv states; those that cannot be played are named with the reason.
    """
    runs = []
    for path in files:
        loops = path.suffix == ".parquet"
        if not (loops or system):
            raise InputError(f"{shown(path)} does not say what it was served on; give --system")
        found, others = judge_loops(path) if loops else ([judge_requests(path, system, engine)], [])
        runs += found
        for other in others:
            typer.echo(f"not judged: {other}")
    if not runs:
        return
    errors = pd.concat([run.errors() for run in runs], ignore_index=True)
    lines = []
    for row in errors.itertuples():
        both = ((getattr(row, f"measured_{word}_s"), getattr(row, f"simulated_{word}_s")) for word in QUANTILES)
        cells = (f"{measured:.4g} -> {simulated:.4g}" for measured, simulated in both)
        lines.append((row.run, row.latency, row.requests, *cells, f"{row.mean_ratio:.3f}", f"{row.request_error:.1%}"))
    header = ("run", "latency", "requests", *(f"{word} [s]" for word in QUANTILES), "mean ratio", "error of a request")
    print_table(lines, header=header, numeric=(2, 3, 4, 5, 6, 7, 8))
    write_frames({"rows": pd.concat([run.frame() for run in runs], ignore_index=True), "errors": errors}, out)
