"""Tables of played runs on the page of fidelity, made from the measurements beside the checkout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_model
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.simulate import simulate
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.units import MS
from disagg_sim.workload.readers.load import load_trace
from docs.computed import slow, table
from docs.computed.served import DATA, from_data, from_files, lines, paths
from lab.calibration.served.read import read_files
from lab.calibration.served.requests import NO_LIMIT, judge_requests
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
#: Run of which every request is known -> its name on the page.
REPLAYED = {
    "rtxpro6000_llama31_8b_tp1": "Llama-3.1-8B, one card",
    "rtxpro6000_qwen3_30b_a3b_dp2ep2": "Qwen3-30B-A3B, two cards, attention DP with EP",
}
#: Mooncake's conversations, and the context of the server that took them. [token]
CONVERSATIONS, CONTEXT = DATA / "traces" / "mooncake" / "conversation_trace.jsonl.gz", 131_072


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


def _runs() -> list[Path]:
    return [DATA / "served_traces" / f"{name}{ending}" for name in REPLAYED for ending in (".csv.gz", ".meta.json")]


def _pairs(line: pd.Series, *words: str, unit: float = 1.0) -> str:
    """Measured and simulated quantiles of one latency."""
    pairs = ([line[f"{way}_{word}_s"] / unit for way in ("measured", "simulated")] for word in words)
    return ", ".join(" → ".join(f"{value:#.3g}" for value in pair) for pair in pairs)


@slow
@from_files(_runs)
def requests_replayed() -> str:
    """Runs of which every request is known: quantiles, measured and simulated, and the median error of a request."""
    rows = []
    for path in _runs()[::2]:
        errors = judge_requests(path, "rtx_pro_6000").errors().set_index("latency")
        ttft, tpot, latency = (errors.loc[name] for name in ("ttft", "tpot", "latency"))
        missed = ", ".join(f"{100 * line['request_error']:.1f}" for line in (ttft, tpot, latency))
        told = _pairs(ttft, "p10", "median", "p99"), _pairs(tpot, "p10", "median", "p99", unit=MS)
        rows.append([REPLAYED[path.name.partition(".")[0]], *told, _pairs(latency, "median"), f"{missed} %"])
    head = ["run", "TTFT p10, median, p99 [s]", "TPOT p10, median, p99 [ms]", "latency, median [s]"]
    return table([*head, "median error of a request: TTFT, TPOT, latency"], rows)


@cache
def _conversations(system: str) -> tuple[float, float]:
    """An hour of conversations on one prefill and one decode instance of TP4: time of it all, and median TTFT. [s]"""
    model, tp4 = replace(load_model("qwen3_32b"), max_context=CONTEXT), Sharding(tp_attn=4, tp_ffn=4)
    pools = {
        "prefill": (Replicas(mapping=tp4, instances=1, token_budget=8192),),
        "decode": (Replicas(mapping=tp4, instances=1, batch=1024),),
    }
    parts = ServedDeployment(name=system, gpus=8, setup=setup(model, system, "bf16", engine="vllm"), **pools)
    options = RunOptions(prefix_cache=True)
    found = simulate(parts, load_trace(CONVERSATIONS), "disaggregated", slo=NO_LIMIT, options=options).records.requests
    return float(found.finish_s.max()), float(np.median(found.first_token_s - found.arrival_s))


@slow
@from_files(lambda: [CONVERSATIONS])
def conversations_hour() -> str:
    """How long the conversations take on H200, which they saturate. [s]"""
    return f"{_conversations('h200_sxm')[0]:,.0f}"


@slow
@from_files(lambda: [CONVERSATIONS])
def conversations_first_token() -> str:
    """Median TTFT of them on GB200. [s]"""
    return f"{_conversations('gb200_nvl72')[1]:.0f}"
