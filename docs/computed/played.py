"""Tables of played closed loops on the page of fidelity, made from the measurements beside the checkout."""

from __future__ import annotations

from functools import cache

import pandas as pd

from disagg_sim.sweep.backends.run import run_tasks
from docs.computed import slow, table
from docs.computed.served import from_data, lines, paths
from lab.calibration.served.read import read_files
from lab.calibration.served.rows import ServingRow
from lab.calibration.served.simulate import Answer, play, tasks_of
from lab.calibration.served.simulated import brought, statistics, with_simulated

#: Group of the tables -> its name on the page; the others have too few held-out points.
SOURCES = {
    "dense, TP, aggregated": "dense, TP",
    "other_moe, TP, aggregated": "other MoE, TP",
    "mla_moe, TP, aggregated": "R1, TP, aggregated",
    "mla_moe, TP-EP, aggregated": "R1, TP-EP, aggregated",
    "mla_moe, TP-EP, disaggregated (decode)": "R1, TP-EP, disaggregated",
    "mla_moe, DP-EP, disaggregated (decode)": "R1, DP-EP, disaggregated",
    "4 and fewer": "4 and fewer requests an instance",
    "more than 4, or not stated": "more than 4",
    "all": "all",
}
QUANTITIES = ("TTFT", "TPOT", "throughput")
PART = "held-out"


@cache
def played() -> tuple[pd.DataFrame, list[ServingRow], list[Answer]]:
    """Lines with both predictions, their rows, and what was played of the part that the tables show."""
    rows, _ = read_files(paths())
    done = lines()[lines()["evaluated"] & (lines()["part"] == PART)]
    kept = set(zip(done["file"], done["row"], strict=True))
    tasks = tasks_of([row for row in rows if (row.file, row.row) in kept])
    answers = [answer for found in run_tasks(play, tasks, jobs=1) for answer in found]
    return with_simulated(lines(), rows, answers), rows, answers


def _both(found: pd.DataFrame) -> str:
    """Error and bias of the one line of a group, steady state first."""
    if not len(found):
        return ""
    line = found.iloc[0]
    ways = (
        f"{100 * line[f'median_error_{way}']:.1f}, {100 * line[f'bias_{way}']:+.0f}" for way in ("steady", "simulated")
    )
    return f"{' → '.join(ways)} ({line['points']})"


@slow
@from_data
def served_simulated() -> str:
    """Median error and bias of steady state and simulation on the held-out part, by layout and load."""
    found, rows = brought(played()[0]), []
    for value, name in SOURCES.items():
        mine = found[found["value"] == value]
        mine = mine[mine["part"] == PART]
        rows.append([name, *(_both(mine[mine["quantity"] == quantity.lower()]) for quantity in QUANTITIES)])
    return table(["steady state → simulation", *QUANTITIES], rows)


@slow
@from_data
def served_simulated_statistics() -> str:
    """Errors of every statistic that sources state, of the held-out part, apart by mode."""
    found, rows = statistics(*played()), []
    for (quantity, statistic, mode), mine in found[found["part"] == PART].groupby(
        ["quantity", "statistic", "mode"], sort=True
    ):
        one = mine.iloc[0]
        cell = f"{100 * one['median_error']:.0f}, {100 * one['bias']:+.0f} % ({one['points']})"
        rows.append([f"{str(quantity).upper()}, {statistic}", mode, cell])
    return table(["simulated", "mode", "held out"], rows)
