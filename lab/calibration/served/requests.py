"""Judge runs of a real server request by request: replay their arrivals, compare the distributions of latencies.

A run is a CSV with one row per request, and its engine arguments beside it (``RUN.meta.json``, as vLLM names them).
The simulation replays it under the engine profile, with the limits that the server had. Where the CSV says when a
request reached the engine (``queued_s``), latencies count from there, and the host time of a request before its prefill
(``request_host``) is left out on both sides.

Closed loops are a Parquet table of the requests of several runs, and ``runs.csv`` beside it with a line a run: layout,
limits, requests in flight, and the share of the prompts that its prefix cache found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InputError, nearest, quoted, whole_number
from disagg_sim.facts.load import load_model
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.facts.yaml_files import canonical_name, list_specs, shown
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.reading import read_json, read_table
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.records import Outcome, Requests
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.simulate import simulate
from disagg_sim.simulation.site import SCHEDULER
from disagg_sim.units import MS
from disagg_sim.workload.trace import Trace
from lab.calibration.kernels.tables import TableError, as_table_faults, read_measured, require_numbers
from lab.calibration.names import engine_named, model_named, recipe_of

#: Columns that a run needs; ``queued_s`` is used where it is there. [s], [token]
COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "first_token_s", "last_token_s")
#: Columns of the requests of closed loops, and of the runs beside them.
LOOP_COLUMNS = ("run_id", "order", "ttft_ms", "e2e_ms", "isl", "osl")
RUN_COLUMNS = (
    *("run_id", "model", "checkpoint", "kv_dtype", "system", "mode", "engine", "concurrency"),
    *("max_num_seqs", "max_num_batched_tokens", "prefix_cache", "prefix_hit_share", "turns", "failed"),
)
#: Beginnings of the columns of a layout, by mode.
SIDES = {"disaggregated": ("prefill_", "decode_")}
#: Share of failed requests above which a run is not judged. [1]
MOST_FAILED = 0.05
#: Engine arguments that a run needs.
ARGUMENTS = ("model", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens")
#: Engine arguments that are whole numbers, and the largest that is believed.
COUNTS = ("tensor_parallel_size", "data_parallel_size", "max_num_seqs", "max_num_batched_tokens")
MOST = 1_000_000
#: Scheduler of an engine other than the usual one.
SCHEDULERS = {"sglang": "sglang_2026", "trtllm": "trtllm_2026"}
#: Shares of the requests whose latencies are compared. [1]
QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
#: No limit that any request reaches: nothing steers by it. [s]
NO_LIMIT = Slo(ttft=1e6, tpot=1e6)


@dataclass(frozen=True, slots=True, eq=False)
class RequestRun:
    """What the clients of one run saw, and what the simulation says; arrays of shape (requests,)."""

    name: str
    measured: dict[str, Floats]  # ttft, tpot, latency [s]
    simulated: dict[str, Floats]  # likewise [s]

    def frame(self) -> pd.DataFrame:
        """One row a request: measured and simulated latencies. [s]"""
        columns = {f"{name}_s": values for name, values in self.measured.items()}
        columns |= {f"simulated_{name}_s": values for name, values in self.simulated.items()}
        return pd.DataFrame(columns).assign(run=self.name)

    def errors(self) -> pd.DataFrame:
        """One row a latency: its quantiles, measured and simulated [s], and the median error of a request [1]."""
        lines = []
        for name, measured in self.measured.items():
            simulated = self.simulated[name]
            line: dict[str, Any] = {"run": self.name, "latency": name, "requests": measured.size}
            for word, share in QUANTILES.items():
                line[f"measured_{word}_s"] = float(np.quantile(measured, share))
                line[f"simulated_{word}_s"] = float(np.quantile(simulated, share))
            line["mean_ratio"] = float(simulated.mean() / measured.mean())
            line["request_error"] = float(np.median(np.abs(simulated / measured - 1.0)))
            lines.append(line)
        return pd.DataFrame(lines)


def judge_requests(path: Path, system: str, engine: str = "vllm") -> RequestRun:
    """Replay a run of a real server and hold its latencies against the simulated ones. [s]"""
    table, arguments = _read(path), _arguments(path)
    model = model_named(str(arguments["model"]))
    if not model:
        raise InputError(f"{shown(path)}: no model {quoted(arguments['model'])}")
    mapping, replicas = _mapping(arguments, dense=not load_model(model).is_moe)
    ranks = int(mapping.dp_attn)
    at = setup(model, system, _recipe(arguments, model), engine=engine)
    parts = Replicas(
        mapping=mapping,
        instances=replicas,
        batch=arguments["max_num_seqs"] * ranks,
        token_budget=arguments["max_num_batched_tokens"] * ranks,
    )
    start, tokens = table["start_s"].to_numpy(), table["output_tokens"].to_numpy()
    name = path.name.partition(".")[0]
    trace = Trace(arrival=start, input_tokens=table["input_tokens"].to_numpy(), output_tokens=tokens, name=name)
    requests = replayed(trace, at, {"colocated": (parts,)})
    host = at.overheads.request_host if at.overheads and "queued_s" in table else 0.0
    first, last = requests.first_token_s - host, requests.finish_s - host
    return RequestRun(
        name=name,
        measured=_latencies(start, table["first_token_s"].to_numpy(), table["last_token_s"].to_numpy(), tokens),
        simulated=_latencies(start, first, last, tokens),
    )


def judge_loops(path: Path) -> tuple[list[RequestRun], list[str]]:
    """Play closed loops of which every request is known, in the order of the file, without a pause between two, every
    prompt with the share cached that the run states; a line with the reason for each run that cannot be played.
    """
    requests, stated = read_measured(path, LOOP_COLUMNS, "requests"), path.with_name("runs.csv")
    read_measured(stated, RUN_COLUMNS, "runs")
    requests = require_numbers(path, requests, LOOP_COLUMNS[1:])
    lines = require_numbers(stated, read_table(stated), ("concurrency", "turns", "failed"), whole=True)
    for mode, mine in lines.groupby("mode"):
        degrees = [f"{side}{degree}" for side in SIDES.get(str(mode), ("",)) for degree in ("tp", "dp", "ep")]
        read_measured(stated, degrees, "runs")
        require_numbers(stated, mine, degrees, least=1, whole=True)
    runs: list[RequestRun] = []
    others: list[str] = []
    for line in lines.itertuples():
        mine = requests[requests["run_id"] == line.run_id].sort_values("order")
        if reason := _unplayable(line, len(mine)):
            others.append(f"{line.run_id}: {reason}")
        else:
            runs.append(_loop(line, mine))
    return runs, others


def _unplayable(line: Any, requests: int) -> str:
    """Why a closed loop cannot be judged; "" = it can."""
    if not requests:
        return "no request of it is in the table"
    if line.failed > MOST_FAILED * line.turns:
        return f"{line.failed} of {line.turns} requests failed"
    return "" if _found(line) >= 0 else "what its prefix cache found is not stated"


def _found(line: Any) -> float:
    """Share of the prompts that the prefix cache of a run found; NaN where that is not stated. [1]"""
    return 0.0 if str(line.prefix_cache).startswith("off") else float(line.prefix_hit_share)


def _loop(line: Any, requests: pd.DataFrame) -> RequestRun:
    """Play one closed loop."""
    name, engine = canonical_name(line.model), engine_named(line.engine)
    model = name if name in list_specs("model") else model_named(line.model)
    at = setup(
        model, str(line.system).split()[0], recipe_of(line.checkpoint, _cache_of(line.kv_dtype), model), engine=engine
    )
    dense = not load_model(model).is_moe

    def part(side: str, *, batch: float = np.nan, budget: float = np.nan) -> tuple[Replicas]:
        tp, dp, ep = (int(getattr(line, f"{side}{degree}")) for degree in ("tp", "dp", "ep"))
        told = {"tensor_parallel_size": tp, "data_parallel_size": dp, "enable_expert_parallel": ep > 1}
        limits = [int(most) * dp if most > 0 else None for most in (batch, budget)]  # blank: the scheduler's
        mapping = _mapping(told, dense=dense)[0]
        return (Replicas(mapping=mapping, instances=1, batch=limits[0], token_budget=limits[1]),)

    batch, budget = line.max_num_seqs, line.max_num_batched_tokens
    if line.mode == "disaggregated":
        parts = {"prefill": part("prefill_", budget=budget), "decode": part("decode_", batch=batch)}
    else:
        parts = {"colocated": part("", batch=batch, budget=budget)}
    tokens = requests["osl"].to_numpy()
    prompts = requests["isl"].to_numpy()
    trace = Trace(arrival=np.zeros(tokens.size), input_tokens=prompts, output_tokens=tokens, name=line.run_id)
    reuse = Reuse(share=ConstantShare(share=_found(line)))
    options = RunOptions(concurrency=int(line.concurrency), reuse=reuse, scheduler=SCHEDULERS.get(engine, SCHEDULER))
    found = replayed(trace, at, parts, options)
    first, whole = requests["ttft_ms"].to_numpy() * MS, requests["e2e_ms"].to_numpy() * MS
    sent = found.arrival_s
    return RequestRun(
        name=line.run_id,
        measured=_latencies(np.zeros(tokens.size), first, whole, tokens),
        simulated=_latencies(sent, found.first_token_s, found.finish_s, tokens),
    )


def replayed(
    trace: Trace, at: Setup, parts: Mapping[str, tuple[Replicas]], options: RunOptions | None = None
) -> Requests:
    """What a simulation of these parts says of the requests of a trace, all of which have to end."""
    gpus = sum(group.instances * int(group.mapping.gpus) for (group,) in parts.values())
    served: dict[str, Any] = dict(parts)
    deployment = ServedDeployment(name=trace.name, gpus=gpus, setup=at, **served)
    policy = "vllm" if "colocated" in parts else "disaggregated"
    requests = simulate(deployment, trace, policy, slo=NO_LIMIT, options=options).records.requests
    if np.any(requests.status != Outcome.COMPLETED):
        raise InputError(f"{trace.name}: requests longer than the memory of the instance, {gpus} GPUs")
    return requests


def _latencies(start: Floats, first: Floats, last: Floats, tokens: Any) -> dict[str, Floats]:
    return {"ttft": first - start, "tpot": (last - first) / np.maximum(tokens - 1.0, 1.0), "latency": last - start}


def _mapping(arguments: dict[str, Any], *, dense: bool) -> tuple[Sharding, int]:
    """Sharding by vLLM's arguments, and replicas: experts go over all GPUs, dense ranks stand alone."""
    tp, dp = arguments["tensor_parallel_size"], arguments.get("data_parallel_size") or 1
    if dense:
        return Sharding(tp_attn=tp, tp_ffn=tp), dp
    if arguments.get("enable_expert_parallel"):
        return Sharding(tp_attn=tp, dp_attn=dp, ep=tp * dp), 1
    return Sharding(tp_attn=tp, dp_attn=dp, tp_ffn=tp * dp), 1


def _recipe(arguments: dict[str, Any], model: str) -> str:
    weights = str(arguments.get("quantization") or arguments.get("dtype") or "")
    return recipe_of(weights, _cache_of(arguments.get("kv_cache_dtype")), model)


def _cache_of(kind: Any) -> str:
    return "fp8" if "fp8" in str(kind) else "bf16"


def _read(path: Path) -> pd.DataFrame:
    """Requests in the order in which they reach the engine; ``start_s`` is when."""
    table = read_measured(path, COLUMNS, "requests")
    if table.empty:
        raise TableError(f"{shown(path)}: no rows")
    columns = [*COLUMNS, *(["queued_s"] if "queued_s" in table else [])]
    numbers = require_numbers(path, table[columns], columns).astype({"input_tokens": int, "output_tokens": int})
    start = numbers["queued_s" if "queued_s" in numbers else "arrival_s"]
    ordered: pd.DataFrame = numbers.assign(start_s=start).sort_values("start_s", kind="stable", ignore_index=True)
    return ordered


def _arguments(path: Path) -> dict[str, Any]:
    """Engine arguments of a run."""
    beside = path.with_name(f"{path.name.partition('.')[0]}.meta.json")
    with as_table_faults(beside, "JSON"):
        found = read_json(beside)
    arguments = found.get("engine_kwargs") if isinstance(found, dict) else None
    if not isinstance(arguments, dict):
        raise TableError(f"{shown(beside)}: missing key 'engine_kwargs', the arguments of the engine")
    for name in ARGUMENTS:
        if name not in arguments:
            raise TableError(f"{shown(beside)}: engine_kwargs lacks {name!r}{nearest(name, list(arguments))}")
    counts = {name: arguments.get(name) for name in COUNTS if arguments.get(name) is not None}
    try:
        return arguments | {name: whole_number(f"engine_kwargs: {name}", n, most=MOST) for name, n in counts.items()}
    except InputError as error:
        raise TableError(f"{shown(beside)}: {error}") from None
