"""``disagg-sim validate ranking``: does the forecast pick the configuration that was measured best?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.cli.tables import print_frame
from lab.calibration.kernels.residuals import by_group
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.groups import errors_of
from lab.calibration.served.ranking import (
    SLOW,
    heights,
    modes,
    predicted_by,
    ranked,
    read_predictions,
    served_points,
    summed,
)
from lab.calibration.served.read import read_files
from lab.calibration.served.tables import write_frames


def validate_ranking(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="CSV files of serving measurements.")],
    predictions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What another tool predicts (CSV): row_id, tpot_ms, and ttft_ms or tput_total_tok_s_gpu or both.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of ranking.csv, modes.csv and heights.csv.")] = None,
) -> None:
    """Judge the configurations that the forecast would pick by the throughput that was measured.

    Groups are one model, system, engine and pair of lengths. At the interactivity of each measured run that two or more
    configurations reach, the forecast picks one; with --predictions another tool does, on the rows that it predicts.
    """
    rows, faults = read_files(files)
    for fault in faults:
        typer.echo(f"warning: left out: {fault}", err=True)
    table = evaluate(rows)
    told = None if predictions is None else read_predictions(predictions)
    if told is None:
        _judge(table, "", out)
        return
    theirs, ours = predicted_by(table, told)
    unknown = len(set(told.index) - set(table["row"]))
    typer.echo(f"{predictions}: {len(told)} rows, {unknown} of them in none of the files")
    for lines, name in ((theirs, "predictions"), (ours, "own")):
        _judge(lines, name, out if name == "predictions" else None)
        typer.echo("")


def _judge(table: pd.DataFrame, name: str, out: Path | None) -> None:
    """Print, and write, the verdicts over some lines; ``name`` says whose numbers they are, "" = the forecast's own."""
    if name:
        below = table[table["evaluated"] & ~table["saturated"]]
        typer.echo(f"Numbers of {name}:")
        print_frame(pd.DataFrame(by_group(below, ["quantity"], errors_of)))
    runs = served_points(table)
    cells = ranked(runs)
    if cells.empty:
        typer.echo("no two configurations of one model, system, engine and pair of lengths reach one interactivity")
    else:
        typer.echo(f"\n{len(runs)} operating points; the configuration picked at equal interactivity:")
        print_frame(pd.concat([summed(cells), *(summed(cells, by) for by in ("family", "engine", "system"))]))
    both = modes(runs)
    if len(both):
        typer.echo(f"\nAggregated or disaggregated: {both['agree'].sum()} of {len(both)} verdicts agree")
    split = runs[(runs["mode"] == "disaggregated") & (runs["model"] == "deepseek_r1")]
    high = heights(split)
    if len(high):
        slow = high.loc[high["tokens_per_s_per_user"] < SLOW, "height"]
        near = high["height"].between(1 / NEAR, NEAR).mean()
        typer.echo(
            "Height of the frontier of R1 disaggregated over the layouts that ran, forecast over measured: median "
            f"{high['height'].median():.2f} of {len(high)} runs on measured frontiers, {near:.0%} within {NEAR}; "
            f"below {SLOW:g} tokens/s/user {slow.median():.2f} of {len(slow)}"
        )
    write_frames({"ranking": cells, "modes": both, "heights": high}, out)


#: Factor within which the height of a frontier counts as met. [1]
NEAR = 1.15
