"""Reader of published single numbers: a metric, its value, and as much of the set-up as the source gives."""

from __future__ import annotations

import math
from typing import Any

from disagg_sim.calibration.serving_forms import count, instance, text, value, yes
from disagg_sim.calibration.serving_rows import (
    Quantity,
    ServingRow,
    Workers,
    engine_named,
    model_named,
    recipe_of,
    system_named,
)
from disagg_sim.facts.load import load_engine
from disagg_sim.units import MS

#: GPUs of a node in the throughputs that sources give per node. [1]
NODE_GPUS = 8.0
#: Requests of the run whose total duration is given.
RUN_REQUESTS = 150.0
#: Metrics that are no quantity of a serving model, or parts of one.
NOT_SERVED = {
    "mfu": "MFU follows from the rates and the peak that the source divides by, which it does not name",
    "kv_transfer_bandwidth": "the transfer time of the same line divided by its size",
    "kv_transfer_time": "transfer over a stated network of its own; see physics.kv_transfer",
    "deepep_dispatch_time_per_layer": "a kernel",
    "tbt_p99": "a steady state has no 99th percentile; see the simulator",
    "context_iteration": "part of a step",
}


def published_row(line: Any) -> ServingRow:
    """A ``ServingRow`` of one line of the long form."""
    metric, source = text(line, "metric"), text(line, "source_id")
    model, engine = model_named(text(line, "model")), engine_named(text(line, "framework")) or _engine_of(source)
    system, reason = system_named(text(line, "gpu_family"), text(line, "hardware"))
    weights = text(line, "precision_weights").replace(";", "").lower()
    quantity, load, metric_reason = _quantity(line, metric, source)
    reason = reason or metric_reason
    isl, osl, batch = value(line, "isl"), value(line, "osl"), value(line, "batch")
    concurrency = value(line, "concurrency")
    workers, prefill, layout_reason = _layout(line, source)
    reason = reason or layout_reason
    if load == "decode" and text(line, "phase") != "decode" and not batch == batch:
        batch = concurrency
    if load in ("prefill", "decode") and not isl == isl:
        reason = reason or "the length is not stated"
    if load == "closed_loop" and not concurrency == concurrency:
        load = "offline"
    scope = text(line, "batch_scope")
    if load == "decode" and not batch == batch:
        reason = reason or "the batch is not stated"
    if load == "decode" and ("per GPU" in scope):
        batch = batch * (workers.gpus if workers else 1)
    if load == "prefill":
        batch = batch * (workers.gpus if workers else 1) / isl if "tokens per GPU" in scope else math.nan
        if scope == "max_num_tokens":
            batch = 4.0 * value(line, "batch") / isl
    quantised = "fp8" in weights or "fp4" in weights
    stated = text(line, "precision_kv")
    cache = "fp8" if stated.startswith("fp8") else "bf16" if stated else ""
    if not cache:
        cache = load_engine(engine).cache_of_quantised if engine and quantised else "bf16"
    return ServingRow(
        file="", row=text(line, "row_id"), form="", quantities=(quantity,), model=model, system=system, engine=engine,
        recipe=recipe_of(_weights(weights, model), cache, model), load=load,
        mode="disaggregated" if prefill else "aggregated", workers=workers, prefill=prefill, isl=isl,
        osl=osl if osl == osl else 1.0, concurrency=concurrency, batch=batch,
        chunk_tokens=2048 if source == "paper_dynaserve" else 0,
        speculative=text(line, "spec_decode") not in ("", "none"), hardware=text(line, "hardware"),
        framework=text(line, "framework") or source, reason=reason,
    )  # fmt: skip


def _engine_of(source: str) -> str:
    """Engine of a source whose line names none."""
    known = {"lmsys": "sglang", "deepseek": "sglang", "paper": "vllm", "mooncake": "sglang", "llmd": "vllm"}
    return next((engine for key, engine in known.items() if source.startswith(key)), "")


def _weights(said: str, model: str) -> str:
    """Weight format; DeepSeek without one is its own fp8 checkpoint."""
    return said or ("fp8" if model == "deepseek_r1" else "bf16")


def _quantity(line: Any, metric: str, source: str) -> tuple[Quantity, str, str]:
    """Quantity, load and, where the metric is none of ours, the reason."""
    measured, gpus = value(line, "value"), value(line, "gpus_total")
    mode = text(line, "mode")
    whole = "closed_loop"
    for key, why in NOT_SERVED.items():
        if metric.startswith(key) and metric != "context_iteration_iteration_total":
            return Quantity(name=metric, measured=measured, statistic=""), whole, why
    if metric in ("prefill_time", "ttft", "context_iteration_iteration_total"):
        return Quantity(name="ttft", measured=measured * MS), "prefill", ""
    if metric == "decode_step_time":
        return Quantity(name="tpot", measured=measured * MS), "decode", ""
    if metric in ("itl_median", "tbt_p50"):
        return Quantity(name="tpot", measured=measured * MS, statistic="median"), whole, ""
    if metric == "ttft_median":
        return Quantity(name="ttft", measured=measured * MS, statistic="median"), whole, ""
    if metric == "request_latency_mean":
        return Quantity(name="latency", measured=measured * MS), whole, ""
    if metric == "total_duration_150_requests":
        return Quantity(name="throughput", measured=RUN_REQUESTS / measured, basis="request"), whole, ""
    if metric == "request_throughput":
        return Quantity(name="throughput", measured=measured, basis="request"), whole, ""
    if metric == "total_throughput":
        return Quantity(name="throughput", measured=measured, basis="total"), whole, ""
    if metric == "output_throughput_total":
        return Quantity(name="throughput", measured=measured, basis="output"), whole, ""
    for basis in ("input", "output"):
        if metric.startswith(f"{basis}_throughput_per"):
            # "per node" of the whole deployment: measured * GPUs / 8 over them all, kept as stated
            per = gpus / NODE_GPUS if metric.endswith("node") else gpus
            phase = {"prefill_only": "prefill", "decode_only": "decode"}.get(mode, whole)
            if mode == "disaggregated" and text(line, "phase"):
                phase = text(line, "phase")
            return Quantity(name="throughput", measured=measured, basis=basis, gpus=per), phase, ""
    return Quantity(name=metric, measured=measured, statistic=""), whole, f"metric {metric!r} of {source} has no model"


def _layout(line: Any, source: str) -> tuple[Workers | None, Workers | None, str]:
    """Workers of a line: a disaggregated pair, or one instance over the GPUs that it names."""
    dp = 0 if yes(line, "dp_attention") else 1
    prefill, decode = count(line, "prefill_gpus"), count(line, "decode_gpus")
    if source == "paper_dynaserve" and text(line, "mode") == "aggregated":
        return Workers(count=2, mapping=instance(1)), None, ""
    if source == "mooncake_pd_h20":
        return Workers(mapping=instance(prefill)), None, ""
    if source == "paper_dopd":  # one GPU in prefill, two in decode
        return Workers(mapping=instance(1 if text(line, "mode") == "prefill_only" else 2)), None, ""
    if prefill and decode:
        pair = (Workers(mapping=instance(decode, ep=decode, dp=dp)), Workers(mapping=instance(prefill, ep=prefill, dp=dp)))
        return (*pair, "")
    gpus, ep = count(line, "gpus_total"), count(line, "ep")
    if text(line, "mode") == "disaggregated" and not text(line, "phase"):
        return None, None, "the split of GPUs into prefill and decode is not stated"
    if not gpus:
        return None, None, "the number of GPUs is not stated"
    return Workers(mapping=instance(gpus, ep=ep or (1 if dp else gpus), dp=dp)), None, ""
