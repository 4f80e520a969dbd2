"""``disagg-sim validate optimum``: is what a plan recommends one that engines reach?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.cli.progress import listener
from disagg_sim.cli.tables import print_frame
from lab.calibration.served.boards import NEAR, boards, judged_boards, met
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.optimum import FASTEST, LEAST_WORKERS, heights_by, judged_optima, ratios_by, split_groups
from lab.calibration.served.ranking import ranked, served_points, summed
from lab.calibration.served.read import read_files
from lab.calibration.served.tables import write_frames


def validate_optimum(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="CSV files of serving measurements.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of boards.csv and optima.csv.")] = None,
    at_rate: Annotated[
        bool, typer.Option("--at-rate/--no-at-rate", help="Plan the fewest GPUs at the rate of each board, too.")
    ] = True,
) -> None:
    """Hold what a plan would deploy against the best that was published, on the same GPUs and under the same limits.

    Boards of MLPerf are planned with the lengths of their data sets and held against their best submission; frontiers
    of disaggregated runs are searched over the layouts that ran, in any number, and over all that a plan may take.
    """
    rows, faults = read_files(files)
    for fault in faults:
        typer.echo(f"warning: left out: {fault}", err=True)
    several = boards(rows)
    told = listener("boards", "planned")
    told.start(len(several))
    planned = judged_boards(several, at_rate=at_rate, listen=lambda: told.advance(1))
    told.finish()
    table = evaluate(rows)
    optima = judged_optima(split_groups(table, rows))
    if planned.empty and optima.empty:
        typer.echo("no board with limits of latency, and no disaggregated runs with a measured throughput")
        return
    _print_boards(planned)
    _print_optima(optima)
    picks = ranked(served_points(table))
    if len(picks):
        typer.echo("\nThe configuration picked at equal interactivity:")
        print_frame(pd.concat([summed(picks), summed(picks, "model")]))
    write_frames({"boards": planned, "optima": optima}, out)


def _print_boards(planned: pd.DataFrame) -> None:
    """One line a board."""
    if planned.empty:
        return
    typer.echo("MLPerf: output tokens/s/GPU of the plan over the best submission (limits at p99, as many GPUs):")
    columns = ["model", "system", "scenario", "gpus", "gpus_for_run", "submissions", "run", "plan", "plan_over_run"]
    asterisk = planned["never_served"].fillna("").map(lambda kinds: " *" if kinds else "")
    print_frame(planned.reindex(columns=columns).assign(planned=planned["planned"].fillna("") + asterisk))
    for board in planned[planned["reason"] != ""].itertuples():
        typer.echo(f"{board.model} on {board.system}, {board.scenario}: {board.reason}")
    typer.echo("* a kind of layout that nobody is known to have run on such a system")
    for board in planned[planned["set_aside"] != ""].itertuples():
        typer.echo(f"set aside: {board.model} on {board.system}, {board.scenario}: {board.set_aside}")
    kept = planned[planned["set_aside"] == ""]
    without = f"; {met(kept)} without those set aside" * (len(kept) < len(planned))
    typer.echo(f"boards within {NEAR[0]:g} to {NEAR[1]:g}: {met(planned)}{without}")


def _print_optima(optima: pd.DataFrame) -> None:
    """Heights by system and class, and ratios of pools."""
    if optima.empty:
        return
    typer.echo(
        f"\nDisaggregated, below {FASTEST:g} tokens/s/user: forecast over published throughput at the interactivity of "
        "each run on a published frontier, medians:"
    )
    print_frame(heights_by(optima))
    ratios = ratios_by(optima)
    if len(ratios):
        typer.echo(
            "\nPrefill GPUs over decode GPUs of the run's own kinds, forecast over published, from "
            f"{LEAST_WORKERS} prefill workers on:"
        )
        print_frame(ratios)
