"""``disagg-sim validate optimum``: is what a plan recommends one that engines reach?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from disagg_sim.atomic import write_csv
from disagg_sim.cli.progress import listener
from disagg_sim.cli.tables import print_table
from lab.calibration.served.boards import NEAR, boards, judged_boards
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.optimum import (
    FASTEST,
    LEAST_WORKERS,
    heights_by,
    judged_optima,
    preferred,
    ratios_by,
    split_groups,
)
from lab.calibration.served.ranking import NEAR_BEST, ranked, served_points, summed
from lab.calibration.served.read import read_files


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
    _print_picks(served_points(table))
    if out is not None:
        write_csv(out / "boards.csv", planned, digits=6)
        write_csv(out / "optima.csv", optima, digits=6)


def _print_boards(planned: pd.DataFrame) -> None:
    """One line a board."""
    if planned.empty:
        return
    typer.echo("MLPerf: output tokens/s/GPU of the plan over the best submission (limits at p99, as many GPUs):")
    header = ("model", "system", "scenario", "GPUs", "at its rate", "results", "best", "plan", "plan/run", "planned")
    lines = [
        (
            *(line.model, line.system, line.scenario, line.gpus, _number(line.gpus_for_run, 0), line.submissions),
            *(f"{line.run:,.0f}", _number(line.plan, 0), _number(line.plan_over_run, 2)),
            line.reason or f"{line.planned}{' *' * bool(line.never_served)}",
        )
        for line in planned.itertuples()
    ]
    print_table(lines, header=header, numeric=range(3, 9))
    typer.echo("* a kind of layout that nobody is known to have run on such a system")
    ratio = planned["plan_over_run"].dropna()
    good = int(ratio.between(*NEAR).sum())
    typer.echo(
        f"plan/run: median {ratio.median():.2f}, {good} of {len(ratio)} boards within {NEAR[0]:g} to {NEAR[1]:g}"
    )


def _print_optima(optima: pd.DataFrame) -> None:
    """Heights by system and class, layouts that are preferred, and ratios of pools."""
    if optima.empty:
        return
    typer.echo(
        f"\nDisaggregated, below {FASTEST:g} tokens/s/user: forecast over published throughput at the interactivity of "
        "each run on a published frontier, medians:"
    )
    header = ("system", "weights", "tokens/s/user", "runs", "as run", "same workers", "same kinds", "free")
    found = heights_by(optima)
    print_table(
        ((*line[:4], *(_number(each, 2) for each in line[4:])) for line in found.itertuples(index=False)),
        header=header,
        numeric=range(3, 8),
    )
    typer.echo("\nLayouts that free frontiers take, and what they gain over all others in the same phase:")
    print_table(
        (
            (
                line.phase,
                line.layout,
                line.points,
                _number(line.gain, 2),
                _number(line.most, 2),
                _number(line.height, 2),
            )
            for line in preferred(optima).itertuples()
        ),
        header=("phase", "layout", "runs", "gain", "most", "free/published"),
        numeric=range(2, 6),
    )
    ratios = ratios_by(optima)
    if len(ratios):
        typer.echo(
            "\nPrefill GPUs over decode GPUs of the run's own kinds, forecast over published, from "
            f"{LEAST_WORKERS} prefill workers on:"
        )
        print_table(
            (
                (f"{line.isl:,.0f}", line.points, *(_number(each, 2) for each in (line.median, line.p10, line.p90)))
                for line in ratios.itertuples()
            ),
            header=("tokens in", "runs", "median", "p10", "p90"),
            numeric=range(5),
        )


def _print_picks(runs: pd.DataFrame) -> None:
    """How often the pick among measured configurations is the best, or nearly."""
    cells = ranked(runs)
    if cells.empty:
        return
    typer.echo("\nThe configuration picked at equal interactivity:")
    lines = pd.concat([summed(cells), summed(cells, "model")])
    print_table(
        (
            (line.group, line.cells, f"{line.best_picked:.0%}", f"{line.near_best:.0%}", f"{line.regret:.1%}")
            for line in lines.itertuples()
        ),
        header=("", "picks", "best", f"within {NEAR_BEST:.0%}", "regret"),
        numeric=range(1, 5),
    )


def _number(value: Any, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "-" if pd.isna(value) else f"{value:,.{digits}f}"
