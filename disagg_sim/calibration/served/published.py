"""Reader of published single numbers: a metric, its value, and as much of the set-up as the source gives."""

from __future__ import annotations

import math
from typing import Any

from disagg_sim.calibration.served.cells import count, groups_of, instance, names_of, stated, text, value
from disagg_sim.calibration.served.rows import Quantity, ServingRow, Workers, engine_named, model_named
from disagg_sim.units import MS

#: GPUs of a node in the throughputs that sources give per node. [1]
NODE_GPUS = 8.0
#: Tokens of a full pass of a rank where none are stated. [token]
FULL_PASS = 16384.0
#: Metrics that are no quantity of a serving model, or parts of one: start of the name -> reason.
NOT_SERVED = {
    "mfu": "MFU follows from the rates and the peak that the source divides by, which it does not name",
    "kv_transfer_bandwidth": "the transfer time of the same line divided by its size",
    "kv_transfer_time": "transfer over a stated network of its own; see physics.kv_transfer",
    "deepep_dispatch_time_per_layer": "a kernel",
    "tbt_p99": "a steady state has no 99th percentile; see the simulator",
    "context_iteration_iteration": "",
    "context_iteration": "part of a step",
}
#: Metric -> quantity, statistic, what its value is multiplied by.
METRICS = {
    "prefill_time": ("ttft", "mean", MS),
    "ttft": ("ttft", "mean", MS),
    "ttft_median": ("ttft", "median", MS),
    "context_iteration_iteration_total": ("ttft", "mean", MS),
    "decode_step_time": ("tpot", "mean", MS),
    "itl_median": ("tpot", "median", MS),
    "tbt_p50": ("tpot", "median", MS),
    "request_latency_mean": ("latency", "mean", MS),
}
#: Throughput metric -> what it counts.
THROUGHPUTS = {"request_throughput": "request", "total_throughput": "total", "output_throughput_total": "output"}
#: Metrics of one phase alone, whatever the mode says.
PHASES = {
    "prefill_time": "prefill",
    "ttft": "prefill",
    "context_iteration_iteration_total": "prefill",
    "decode_step_time": "decode",
}
#: Engine of a source whose lines name none: start of its name -> engine. Of papers by the date of their software alone:
#: DOPD is built on NVIDIA Dynamo (2025), whose vLLM is the V1 engine; DynaServe states vLLM 0.7.2, the V0 engine.
SOURCE_ENGINES = {
    "lmsys": "sglang",
    "deepseek": "sglang",
    "paper_dopd": "vllm",
    "paper": "vllm_v0",
    "mooncake": "sglang",
    "llmd": "vllm",
}
#: Token budget of a step where only the paper, not the line, states it. [token]
SOURCE_CHUNKS = {"paper_dynaserve": 2048}


def published_row(line: Any) -> ServingRow:
    """A ``ServingRow`` of one line of the long form."""
    source = text(line, "source_id")
    quantity, reason = _quantity(line)
    load = _load(line)
    workers, prefill, missing = _layout(line)
    isl, osl, batch = value(line, "isl"), value(line, "osl"), _batch(line, load, workers)
    if load in ("prefill", "decode") and not stated(isl):
        missing = missing or "the length is not stated"
    if load == "decode" and not stated(batch):
        missing = missing or "the batch is not stated"
    engine = engine_named(text(line, "framework"))
    engine = engine or next((each for key, each in SOURCE_ENGINES.items() if source.startswith(key)), "")
    weights = text(line, "precision_weights").lower() or _own_weights(text(line, "model"))
    names = names_of(line, weights=weights, engine=engine, cache=text(line, "precision_kv"))
    return ServingRow(
        file="",
        row=text(line, "row_id"),
        form="",
        quantities=(quantity,),
        model=names.model,
        system=names.system,
        engine=names.engine,
        recipe=names.recipe,
        load=load,
        mode="disaggregated" if prefill else "aggregated",
        workers=workers,
        prefill=prefill,
        isl=isl,
        osl=osl if stated(osl) else 1.0,
        concurrency=value(line, "concurrency"),
        batch=batch,
        chunk_tokens=SOURCE_CHUNKS.get(source, 0),
        speculative=text(line, "spec_decode") not in ("", "none"),
        hardware=names.hardware,
        framework=names.framework or source,
        reason=names.reason or reason or missing,
    )


def _own_weights(model: str) -> str:
    """Weights of a model whose line states none: DeepSeek publishes fp8."""
    return "fp8" if model_named(model) == "deepseek_r1" else "bf16"


def _quantity(line: Any) -> tuple[Quantity, str]:
    """Quantity and, where the metric is none of ours, the reason."""
    metric, measured, gpus = text(line, "metric"), value(line, "value"), value(line, "gpus_total")
    why = next((why for start, why in NOT_SERVED.items() if metric.startswith(start)), "")
    if metric in METRICS:
        name, statistic, unit = METRICS[metric]
        return Quantity(name=name, measured=measured * unit, statistic=statistic), why
    if metric in THROUGHPUTS:
        return Quantity(name="throughput", measured=measured, basis=THROUGHPUTS[metric]), why
    basis, _, per = metric.partition("_throughput_per_")
    if basis in ("input", "output") and per in ("gpu", "node"):
        shared = gpus / NODE_GPUS if per == "node" else gpus
        return Quantity(name="throughput", measured=measured, basis=basis, gpus=shared), why
    return Quantity(name=metric, measured=measured, statistic=""), why or f"metric {metric!r} has no model"


def _load(line: Any) -> str:
    """What is in flight: one phase alone, a closed loop where a concurrency is stated, else everything queued."""
    phase = {"prefill_only": "prefill", "decode_only": "decode"}.get(text(line, "mode"), text(line, "phase"))
    phase = PHASES.get(text(line, "metric"), phase)
    return phase or ("closed_loop" if stated(value(line, "concurrency")) else "offline")


def _batch(line: Any, load: str, workers: Workers | None) -> float:
    """Prompts of a pass or sequences of a step, over all GPUs. [request]"""
    batch, scope = value(line, "batch"), text(line, "batch_scope")
    gpus = float(workers.gpus) if workers else math.nan
    if load == "decode":
        return batch * gpus if "per GPU" in scope else batch if stated(batch) else value(line, "concurrency")
    if load == "prefill" and "throughput" in text(line, "metric"):  # every rank fills its pass
        tokens = batch if scope == "tokens per GPU" else FULL_PASS
        ranks = gpus if groups_of(line) == 0 else 1.0
        return ranks * max(tokens / value(line, "isl"), 1.0)
    if load == "prefill" and scope == "max_num_tokens":
        return batch * gpus / value(line, "isl")
    return math.nan


def _layout(line: Any) -> tuple[Workers | None, Workers | None, str]:
    """Workers of a line: a disaggregated pair, or one instance over the GPUs that it names; else the reason."""
    source, mode, groups = text(line, "source_id"), text(line, "mode"), groups_of(line)
    prefill, decode = count(line, "prefill_gpus"), count(line, "decode_gpus")
    known = {  # what the papers say beside their tables
        ("paper_dynaserve", "aggregated"): Workers(count=2, mapping=instance(1)),
        ("mooncake_pd_h20", "disaggregated"): Workers(mapping=instance(prefill)),
        ("paper_dopd", "prefill_only"): Workers(mapping=instance(1)),
        ("paper_dopd", "decode_only"): Workers(mapping=instance(2)),
    }
    if (source, mode) in known:
        return known[source, mode], None, ""
    if prefill and decode:
        pair = [Workers(mapping=instance(gpus, ep=gpus, dp=groups)) for gpus in (decode, prefill)]
        return pair[0], pair[1], ""
    gpus, experts = count(line, "gpus_total"), count(line, "ep")
    if mode == "disaggregated" and not text(line, "phase"):
        return None, None, "the split of GPUs into prefill and decode is not stated"
    if not gpus:
        return None, None, "the number of GPUs is not stated"
    return Workers(mapping=instance(gpus, ep=experts or (1 if groups else gpus), dp=groups)), None, ""
