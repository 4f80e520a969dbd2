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

#: File or group of the tables -> its name on the page; the others have too few held-out points.
SOURCES = {
    "inferencex_llama70b_gptoss120b_runs.csv": "InferenceX, Llama 70B and gpt-oss",
    "inferencex_dsr1_runs.csv": "InferenceX, DeepSeek-R1",
    "nvidia_gap_runs.csv": "NVIDIA's gap analysis",
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
PARTS = ("fitted", "held-out")
QUANTITIES = ("TTFT", "TPOT", "throughput")
COLUMNS = (("ttft", "fitted"), ("ttft", "held-out"), ("tpot", "held-out"), ("throughput", "held-out"))


@cache
def played() -> tuple[pd.DataFrame, list[ServingRow], list[Answer]]:
    """Lines with both predictions, their rows, and what was played."""
    rows, _ = read_files(paths())
    done = lines()[lines()["evaluated"]]
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
    """Median error and bias of steady state and simulation, by source, layout and load."""
    found, rows = brought(played()[0]), []
    for value, name in SOURCES.items():
        mine = found[found["value"] == value]
        rows.append([name, *(_both(mine[(mine["quantity"] == q) & (mine["part"] == part)]) for q, part in COLUMNS)])
    return table(["steady state → simulation", "TTFT, fitted", *(f"{q}, held out" for q in QUANTITIES)], rows)


@slow
@from_data
def served_simulated_statistics() -> str:
    """Errors of every statistic that sources state, fitted and held-out part together apart by mode."""
    found = statistics(*played())
    rows = []
    for (quantity, statistic, mode), mine in found.groupby(["quantity", "statistic", "mode"], sort=True):
        cells = []
        for part in PARTS:
            one = mine[mine["part"] == part]
            told = one.iloc[0] if len(one) else None
            if told is None:
                cells.append("")
            else:
                cells.append(f"{100 * told['median_error']:.0f}, {100 * told['bias']:+.0f} % ({told['points']})")
        rows.append([f"{str(quantity).upper()}, {statistic}", mode, *cells])
    return table(["simulated", "mode", "fitted", "held out"], rows)
