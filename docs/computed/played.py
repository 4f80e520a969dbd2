"""Tables of played runs on the page of fidelity, made from the measurements beside the checkout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_engine, load_model
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.physics.kv_transfer import own_link_bandwidth
from disagg_sim.physics.setup import setup
from disagg_sim.reading import read_table
from disagg_sim.simulation.deployment import Replicas
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.units import MS
from disagg_sim.workload.readers.load import load_trace
from disagg_sim.workload.trace import Trace
from docs.computed import slow, table
from docs.computed.served import DATA, from_data, from_files, lines, paths
from lab.calibration.served.read import read_files
from lab.calibration.served.requests import judge_loops, judge_requests, replayed
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
#: Mooncake's conversations, the runs of servers that took them, and the context of these. [token]
CONVERSATIONS, CONTEXT = DATA / "traces" / "mooncake" / "conversation_trace.jsonl.gz", 131_072
TOOK = DATA / "measured_3" / "dynamo_1p1d" / "qwen3_32b_1p1d_runs.csv"
#: The ``prefill_stretch`` of vLLM with which the run on H200 lasts as long as it did; plans have the fitted one. [1]
ASKED = 1.15
#: Closed loops of recorded coding agents, by name on the page; and runs of recorded agents of which means are known.
LOOPS, AGENTS = (
    DATA / "measured_3" / name for name in ("raw_requests/requests.parquet", "agentx/tau_bench_prefix_cache_h200.csv")
)
PLAYED = {
    "dsv4_vllm_tp4": "DeepSeek-V4-Pro, vLLM 0.21, TP4",
    "dsv4_sglang_1p_tp4_1d_tp4": "the same, SGLang, TP4 + TP4",
    "kimi25_sglang_tp4": "Kimi-K2.5, SGLang, TP4",
}
#: Offline run of TensorRT-LLM's tech blog 10 (@011cfc2): requests, mean prompt and output [token], and steps that
#: prompts wait for other ranks (``timeout_iters`` 50 is one more here) -> output tokens a second.
QUEUED, LENGTHS = 16_000, (803, 3653)
BALANCED: dict[int | None, float] = {None: 25_664.0, 51: 33_499.0}


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


def _beside(measured: float, simulated: float) -> str:
    """Two numbers of three digits."""
    return " → ".join(f"{value:,.0f}" if value >= 100 else f"{value:#.3g}" for value in (measured, simulated))


def _pairs(line: pd.Series, *words: str, unit: float = 1.0) -> str:
    """Measured and simulated quantiles of one latency."""
    return ", ".join(_beside(line[f"measured_{word}_s"] / unit, line[f"simulated_{word}_s"] / unit) for word in words)


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
def _conversations(system: str, stretch: float | None = None) -> dict[str, Floats]:
    """An hour of conversations on one prefill and one decode instance of TP4 on nodes of their own: the time of it all,
    TTFT and ITL of the requests [s], with another ``prefill_stretch`` than the profile's [1].
    """
    model, engine = replace(load_model("qwen3_32b"), max_context=CONTEXT), load_engine("vllm")
    at = setup(model, system, "bf16", engine=replace(engine, prefill_stretch=stretch or engine.prefill_stretch))
    tp4 = Sharding(tp_attn=4, tp_ffn=4)
    pools = {
        "prefill": (Replicas(mapping=tp4, instances=1, token_budget=8192),),
        "decode": (Replicas(mapping=tp4, instances=1, batch=1024),),
    }
    link = LinkSpec(bandwidth=own_link_bandwidth(at.system, at.profile, within_domain=False))
    trace = load_trace(CONVERSATIONS, spread=False)
    found = replayed(trace, at, pools, RunOptions(prefix_cache=True, link=link))
    several = trace.output_tokens > 1
    itl = ((found.finish_s - found.first_token_s) / np.maximum(trace.output_tokens - 1, 1))[several]
    return {"wall": found.finish_s.max(keepdims=True), "ttft": found.first_token_s - found.arrival_s, "itl": itl}


@slow
@from_files(lambda: [CONVERSATIONS, TOOK])
def conversations_served() -> str:
    """The whole hour: how long it took, TTFT and ITL, measured and simulated."""
    measured = read_table(TOOK).drop_duplicates("system").set_index("system")
    measured["wall_s"] = measured["wall_s"].fillna(measured["wall_s_derived"])
    rows = []
    for words, name, system, stretch in (
        ("H200, far above saturation", "H200 (Nebius)", "h200_sxm", None),
        ("GB200, which kept up", "GB200 (GKE A4X)", "gb200_nvl72", None),
        (f"H200, `prefill_stretch` {ASKED}", "H200 (Nebius)", "h200_sxm", ASKED),
        (f"GB200, `prefill_stretch` {ASKED}", "GB200 (GKE A4X)", "gb200_nvl72", ASKED),
    ):
        line, ours = measured.loc[name], _conversations(system, stretch)
        told = [
            [
                _beside(line[f"{what}_{word}_ms"] * MS / unit, _figure(ours[what], word) / unit)
                for word in ("mean", "p50", "p99")
                if line[f"{what}_{word}_ms"] > 0
            ]
            for what, unit in (("ttft", 1.0), ("itl", MS))
        ]
        rows.append([words, _beside(line["wall_s"], ours["wall"][0]), *map(", ".join, told)])
    return table(["", "all of it [s]", "TTFT, mean, median, p99 [s]", "ITL, likewise [ms]"], rows)


def _figure(values: Floats, word: str) -> float:
    """The mean, or a quantile by its name."""
    return float(values.mean() if word == "mean" else np.quantile(values, float(word[1:]) / 100))


@cache
def _loops() -> pd.DataFrame:
    """One row a run of closed loops: its name, in flight, what was found cached, TTFT and TPOT of both."""
    runs, _ = judge_loops(LOOPS)
    stated, lines = read_table(LOOPS.with_name("runs.csv")).set_index("run_id"), []
    for run in runs:
        errors, told = run.errors().set_index("latency"), stated.loc[run.name]
        lines.append({"run": run.name, "flight": told["concurrency"], "found": told["prefix_hit_share"]})
        for latency in ("ttft", "tpot"):
            lines[-1] |= {f"{latency}_{key}": value for key, value in errors.loc[latency].items()}
    return pd.DataFrame(lines)


def _off(found: pd.DataFrame, word: str) -> pd.Series:
    """Simulated over measured TTFT, less 1. [1]"""
    return found[f"ttft_simulated_{word}_s"] / found[f"ttft_measured_{word}_s"] - 1.0


@slow
@from_files(lambda: [LOOPS])
def loops_played() -> str:
    """Closed loops of which every request is known: TTFT and TPOT, measured and simulated."""
    rows, found = [], _loops()
    for run, words in PLAYED.items():
        mine = found[found["run"].str.startswith(f"{run}_c")]
        for number, (_, line) in enumerate(mine.iterrows()):
            share = f"{100 * line['found']:.0f} %" if line["found"] > 0 else "off"
            cells = [
                _beside(line[f"{latency}_measured_{word}_s"] / unit, line[f"{latency}_simulated_{word}_s"] / unit)
                for latency, word, unit in (("ttft", "median", 1.0), ("ttft", "p99", 1.0), ("tpot", "median", MS))
            ]
            rows.append(["" if number else words, f"{line['flight']:.0f}", share, *cells])
    return table(["", "in flight", "cached", "TTFT, median [s]", "p99 [s]", "TPOT, median [ms]"], rows)


@slow
@from_files(lambda: [LOOPS])
def loops_errors() -> str:
    """Medians over runs of the error of the median and of p99 of TTFT: of all, and of those without a cache."""
    every = _loops()
    told = [
        " and ".join(f"{100 * _off(runs, word).abs().median():.0f}" for word in ("median", "p99"))
        for runs in (every, every[every["found"].isna()])
    ]
    return f"{told[0]} % off ({told[1]} % where no cache was on)"


@slow
@from_files(lambda: [AGENTS])
def agents_played() -> str:
    """Recorded agents on gpt-oss 120B whose cached share is stated: errors of the median TTFT and of the mean ITL."""
    at, off = setup("gpt_oss_120b", "h200_sxm", "mxfp4", engine="vllm"), []
    lines = read_table(AGENTS)
    for line in lines[lines["requests"] > 0].itertuples():
        prompts, output = np.full(int(line.requests), round(line.prompt_mean_tokens)), line.out_tok_s * line.wall_s
        answers = np.random.default_rng(0).exponential(output / line.requests, prompts.size)
        trace = Trace(arrival=0.0 * answers, input_tokens=prompts, output_tokens=np.ceil(answers), name=line.part)
        reuse = Reuse(share=ConstantShare(share=line.realized_hit))
        options = RunOptions(concurrency=int(line.concurrency), reuse=reuse)
        found = replayed(trace, at, {"colocated": (Replicas(mapping=Sharding(), instances=1),)}, options)
        first = float(np.median(found.first_token_s - found.arrival_s)) / (line.ttft_p50_ms * MS)
        off.append((first - 1.0, (found.finish_s - found.first_token_s).mean() / (line.decode_ms * MS) - 1.0))
    words = (
        f"{100 * np.median(np.abs(each)):.0f} % ({100 * np.median(each):+.0f} %)" for each in zip(*off, strict=True)
    )
    return " and ".join(words) + f", {len(off)} runs"


def balanced() -> dict[int | None, float]:
    """Output tokens a second of DeepSeek-V3 on eight GB200, DP8 and EP8, all requests queued at once, by the steps that
    prompts wait until every rank has one. Their means are stated; outputs are spread as those of MLPerf's set of R1.
    """
    at, rng = setup("deepseek_v3", "gb200_nvl72", "nvfp4_fp8kv", engine="trtllm"), np.random.default_rng(0)
    outputs = rng.lognormal(np.log(2105), 1.12, 2 * QUEUED)
    outputs = outputs[outputs <= 20_000][:QUEUED]
    outputs = np.ceil(outputs * (LENGTHS[1] / outputs.mean()))
    prompts = np.full(QUEUED, LENGTHS[0])
    trace = Trace(arrival=np.zeros(QUEUED), input_tokens=prompts, output_tokens=outputs, name="queued")
    made = {}
    for steps in BALANCED:
        part = Replicas(mapping=Sharding(dp_attn=8, ep=8), instances=1, hold_steps=steps)
        found = replayed(trace, at, {"colocated": (part,)}, RunOptions(scheduler="trtllm_2026"))
        made[steps] = float(outputs.sum() / found.finish_s.max())
    return made


@slow
def balanced_gain() -> str:
    """What that wait gains, simulated."""
    off, on = balanced().values()
    return f"{100 * (on / off - 1):.0f} %"
