"""``disagg-sim validate serving``, ``ranking`` and ``optimum``: hold predictions against runs of serving engines."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.cli.progress import listener
from disagg_sim.cli.tables import print_frame
from disagg_sim.cli.workers import cores
from disagg_sim.laboratory import in_workers
from disagg_sim.sweep.backends.run import run_tasks
from lab.calibration.served.bands import with_bands
from lab.calibration.served.boards import NEAR, boards, judged_boards, met
from lab.calibration.served.drafts import drafts_summed, judged_drafts
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.groups import (
    ENGINE_NOISE,
    RERUN_NOISE,
    counted,
    coverage,
    groups,
    judged,
    side_by_side,
    summary,
    write_frames,
    write_tables,
)
from lab.calibration.served.left_out import Unseen, left_out
from lab.calibration.served.optimum import FASTEST, LEAST_WORKERS, heights_by, judged_optima, ratios_by, split_groups
from lab.calibration.served.ranking import SLOW, heights, modes, ranked, served_points, summed
from lab.calibration.served.read import read_files
from lab.calibration.served.rows import ServingRow
from lab.calibration.served.simulate import Answer, play, tasks_of
from lab.calibration.served.simulated import brought, not_simulated, statistics, with_simulated, write_simulated

#: Factor within which the height of a frontier counts as met. [1]
NEAR_HEIGHT = 1.15


class LeaveOut(Enum):
    """What is left out of fits in turn."""

    ENGINE = "engine"
    MODEL = "model"
    SYSTEM = "system"


def read_with_warnings(files: list[Path]) -> list[ServingRow]:
    """Rows of the files that can be read; the others are told."""
    rows, faults = read_files(files)
    for fault in faults:
        typer.echo(f"warning: left out: {fault}", err=True)
    return rows


def validate_serving(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="CSV files of serving measurements.")],
    out: Annotated[Path | None, typer.Option(help="Directory of rows.csv, summary.csv and the other tables.")] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Play every closed loop request by request, too, and say what that brings."),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of worker processes of --simulate; default: all cores.")
    ] = None,
    leave_out: Annotated[
        LeaveOut | None, typer.Option(help="Fit each engine without one of these in turn, and judge that.")
    ] = None,
) -> None:
    """Predict every row of served runs and print the errors below saturation.

    The prediction is the steady state of each closed loop; with --simulate also the run itself, with its start, queues
    and percentiles: a few minutes for a thousand rows. Runs of one configuration, layout, lengths and load are one
    operating point and count once. A file that cannot be read is named, and the others are judged.
    """
    rows = read_with_warnings(files)
    table = evaluate(rows)
    if table.empty:
        typer.echo("no measurements in these files")
        write_frames({"rows": table}, out)
        return
    table = with_bands(table, rows)
    print_frame(counted(table))
    below = table[~table["saturated"]]
    typer.echo("\nBelow saturation, all parts:")
    print_frame(summary(below, by=("form", "quantity", "mode")))
    apart = groups(table)
    shown = "held-out" if (apart["part"] == "held-out").any() else "all"
    typer.echo(f"\nApart, {shown} part: operating points, median error, bias (medians of points):")
    print_frame(side_by_side(apart[apart["part"] == shown]))
    bars = judged(table)
    if bars["rows"].sum():
        typer.echo("\nBars (engines of today in a closed loop, below saturation, by operating points):")
        print_frame(bars)
    drafts = judged_drafts(rows)
    if len(drafts):
        typer.echo("\nRuns with drafts, apart: TPOT, and its gain over equal runs without:")
        print_frame(drafts_summed(drafts))
        write_frames({"drafts": drafts}, out)
    covered = coverage(table)
    if len(covered):
        typer.echo(
            f"\nCoverage of the 80 % bands, held out: {covered['met'].sum()} of {len(covered)} groups within 70-90 %"
        )
        print_frame(covered[~covered["met"]])
    typer.echo(f"noise floor: re-run {RERUN_NOISE:.1%}, engine to engine {ENGINE_NOISE:.0%}")
    if leave_out is not None:
        typer.echo(f"\nEach {leave_out.value} left out of the fit in turn, all points below saturation:")
        found = pd.DataFrame(left_out(rows, leave_out.value), columns=list(Unseen._fields))
        print_frame(found)
        write_frames({"left_out": found}, out)
    if simulate:
        _simulate(table, rows, jobs or cores(), out)
    if out is not None:
        write_tables(table, out)
        typer.echo(f"\n{len(table)} lines in {out / 'rows.csv'}")


def _simulate(table: pd.DataFrame, rows: list[ServingRow], jobs: int, out: Path | None) -> None:
    """Play the closed loops of evaluated rows; print, and write, what that brings over the steady state."""
    judged_rows = table[table["evaluated"]]
    kept = set(zip(judged_rows["file"], judged_rows["row"], strict=True))
    tasks = tasks_of([row for row in rows if (row.file, row.row) in kept])
    told = listener("operating points", "played")
    told.start(sum(map(len, tasks)))
    answers: list[Answer] = []
    for found in run_tasks(in_workers(play), tasks, jobs=jobs):
        answers += found
        told.advance(len(found))
    told.finish()
    lines = with_simulated(table, rows, answers)
    requests, shorter = sum(answer.requests for answer in answers), sum(answer.shortened for answer in answers)
    typer.echo(f"\nSimulated: {len(answers)} operating points, {requests:,} requests; {shorter} runs with fewer waves")
    print_frame(not_simulated(lines))
    typer.echo("\nSteady state and simulation on the same operating points, below saturation:")
    print_frame(brought(lines))
    print_frame(statistics(lines, rows, answers))
    if out is not None:
        write_simulated(lines, rows, answers, out)


def validate_ranking(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="CSV files of serving measurements.")],
    out: Annotated[Path | None, typer.Option(help="Directory of ranking.csv, modes.csv and heights.csv.")] = None,
) -> None:
    """Judge the configurations that the forecast would pick by the throughput that was measured.

    Groups are one model, system, engine and pair of lengths. At the interactivity of each measured run that two or more
    configurations reach, the forecast picks one.
    """
    runs = served_points(evaluate(read_with_warnings(files)))
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
        near = high["height"].between(1 / NEAR_HEIGHT, NEAR_HEIGHT).mean()
        typer.echo(
            "Height of the frontier of R1 disaggregated over the layouts that ran, forecast over measured: median "
            f"{high['height'].median():.2f} of {len(high)} runs on measured frontiers, {near:.0%} within "
            f"{NEAR_HEIGHT}; "
            f"below {SLOW:g} tokens/s/user {slow.median():.2f} of {len(slow)}"
        )
    write_frames({"ranking": cells, "modes": both, "heights": high}, out)


def validate_optimum(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="CSV files of serving measurements.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of boards.csv and optima.csv.")] = None,
) -> None:
    """Hold what a plan would deploy against the best that was published, on the same GPUs and under the same limits.

    Boards of MLPerf are planned with the lengths of their data sets and held against their best submission; frontiers
    of disaggregated runs are searched over the layouts that ran, in any number, and over all that a plan may take.
    """
    rows = read_with_warnings(files)
    several = boards(rows)
    told = listener("boards", "planned")
    told.start(len(several))
    planned = judged_boards(several, listen=lambda: told.advance(1))
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
