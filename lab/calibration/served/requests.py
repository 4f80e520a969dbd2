"""Judge runs of a real server request by request: replay their arrivals, compare the distributions of latencies.

A run is a CSV with one row per request, and its engine arguments beside it (``RUN.meta.json``, as vLLM names them).
The simulation replays it under the engine profile, with the limits that the server had. Where the CSV says when a
request reached the engine (``queued_s``), latencies count from there, and the host time of a request before its prefill
(``request_host``) is left out on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InputError, nearest, quoted, whole_number
from disagg_sim.facts.load import load_model
from disagg_sim.facts.yaml_files import shown
from disagg_sim.physics.setup import setup
from disagg_sim.reading import read_json
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.simulate import simulate
from disagg_sim.workload.trace import Trace
from lab.calibration.kernels.tables import TableError, as_table_faults, read_measured, require_numbers
from lab.calibration.names import model_named, recipe_of

#: Columns that a run needs; ``queued_s`` is used where it is there. [s], [token]
COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "first_token_s", "last_token_s")
#: Engine arguments that a run needs.
ARGUMENTS = ("model", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens")
#: Engine arguments that are whole numbers, and the largest that is believed.
COUNTS = ("tensor_parallel_size", "data_parallel_size", "max_num_seqs", "max_num_batched_tokens")
MOST = 1_000_000
#: Shares of the requests whose latencies are compared. [1]
QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
#: No limit that any request reaches: nothing steers by it. [s]
NO_LIMIT = Slo(ttft=1e6, tpot=1e6)


@dataclass(frozen=True, slots=True, eq=False)
class RequestRun:
    """What the clients of one run saw, and what the simulation says; arrays of shape (requests,)."""

    name: str
    model: str
    system: str
    engine: str
    layout: str
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
    deployment = ServedDeployment(name=path.name, gpus=replicas * mapping.gpus, colocated=(parts,), setup=at)
    start, tokens = table["start_s"].to_numpy(), table["output_tokens"].to_numpy()
    trace = Trace(arrival=start, input_tokens=table["input_tokens"].to_numpy(), output_tokens=tokens)
    requests = simulate(deployment, trace, "vllm", slo=NO_LIMIT).records.requests
    if np.any(requests.status != Outcome.COMPLETED):
        raise InputError(f"{shown(path)}: requests longer than the memory of the instance, {mapping.gpus} GPUs")
    host = at.overheads.request_host if at.overheads and "queued_s" in table else 0.0
    first, last = requests.first_token_s - host, requests.finish_s - host
    return RequestRun(
        name=path.name.partition(".")[0],
        model=model,
        system=system,
        engine=engine,
        layout=f"TP{mapping.tp_attn} DP{mapping.dp_attn} EP{mapping.ep}",
        measured=_latencies(start, table["first_token_s"].to_numpy(), table["last_token_s"].to_numpy(), tokens),
        simulated=_latencies(start, first, last, tokens),
    )


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
    cache = "fp8" if "fp8" in str(arguments.get("kv_cache_dtype")) else "bf16"
    return recipe_of(str(arguments.get("quantization") or arguments.get("dtype") or ""), cache, model)


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
