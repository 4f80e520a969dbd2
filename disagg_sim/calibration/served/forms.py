"""Readers of the known forms of serving measurements: one function a form, from a line to a ``ServingRow``.

A blank cell is "not stated by the source". Assumptions that fill one are named here, each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from disagg_sim.calibration.served.cells import (
    count,
    groups_of,
    instance,
    mean_or_median,
    names_of,
    stated,
    text,
    times,
    total_throughput,
    value,
    yes,
)
from disagg_sim.calibration.served.published import published_row
from disagg_sim.calibration.served.rows import Quantity, ServingRow, Workers, engine_named, old_engine
from disagg_sim.facts.load import load_model, load_system
from disagg_sim.facts.precision import FORMATS
from disagg_sim.units import MS

#: InferenceX draws lengths from 0.8 to 1.0 of the stated ones and sends 10 prompts per concurrency slot.
INFERENCEX_MEAN_LENGTH, INFERENCEX_WAVES, INFERENCEX_SPREAD = 0.9, 10.0, 0.1 / 0.9
#: Prompts per concurrency slot of the gap runs: not stated, as InferenceX. Runs with lengths in powers of two line up
#: (their TTFT is half of the prefill of all requests in flight), those with lengths in thousands do not.
GAP_WAVES, GAP_SPREAD = 10.0, 0.1
#: Mean input length of the MLPerf data sets [token]: MLCommons posts on Llama 3.1 405B (April 2025), Llama 3.1 8B and
#: DeepSeek-R1 (September 2025). Assumptions: OpenOrca (Llama 2) half of the output, as with all of it the best H200
#: results would take 0.62 of the FP8 peak; gpt-oss as long as the output.
MLPERF_INPUT = {
    "llama_3_1_405b": 9428.0,
    "llama_3_1_8b": 778.0,
    "deepseek_r1": 800.0,
    "llama_2_70b": 150.0,
    "gpt_oss_120b": 1300.0,
}
#: Where no parallelism is stated: the fewest GPUs whose memory the weights fill to this share at most. [1]
WEIGHT_SHARE = 0.6
#: Share by which a whole run of the Splitwise profile may differ from its own prompt and token times. [1]
SPLITWISE_APART = 0.15
#: The A100 nodes of the study are those of Polaris, with 40 GB: 70B models in 16 bit on four GPUs slow down there at
#: batches that 80 GB would hold, and steps take the longer by the ratio of the bandwidths.
ARGONNE_SYSTEMS = {"a100_sxm_80gb": "a100_sxm_40gb"}


def inferencex_r1(line: Any) -> ServingRow:
    """A run of DeepSeek-R1: aggregated, or disaggregated with its workers."""
    names = names_of(line, weights=text(line, "precision"))
    split = text(line, "mode") == "disaggregated"
    workers, prefill = _r1_workers(line, split)
    reason = names.reason
    if split and prefill is None:
        reason = reason or "the split of GPUs into prefill and decode is not stated"
    return _inferencex(
        line,
        replace(
            _row(line, names),
            reason=reason,
            mode="disaggregated" if split else "aggregated",
            workers=workers,
            prefill=prefill,
            speculative=text(line, "spec_decode") not in ("", "none"),
            quantities=mean_or_median(line, "tpot", "ttft") + total_throughput(line, value(line, "gpus_total")),
        ),
    )


def inferencex_dense(line: Any) -> ServingRow:
    """A run of Llama 70B or gpt-oss 120B."""
    gpus = count(line, "gpus_total") or count(line, "tp")
    said = text(line, "spec_decode")
    return _inferencex(
        line,
        replace(
            _row(line, names_of(line, weights=text(line, "precision"))),
            mode="aggregated",
            workers=Workers(mapping=instance(gpus, ep=count(line, "ep"), dp=groups_of(line))),
            speculative="mtp" in said or "eagle" in said,
            quantities=mean_or_median(line, "tpot", "ttft") + total_throughput(line, gpus),
        ),
    )


def _row(line: Any, names: Any) -> ServingRow:
    """The row of a line with its names and nothing measured yet."""
    return ServingRow(
        file="",
        row=text(line, "row_id"),
        form="",
        quantities=(),
        model=names.model,
        system=names.system,
        engine=names.engine,
        recipe=names.recipe,
        hardware=names.hardware,
        framework=names.framework,
        reason=names.reason,
        isl=value(line, "isl"),
        osl=value(line, "osl"),
    )


def _inferencex(line: Any, row: ServingRow) -> ServingRow:
    """What all InferenceX runs share: mean lengths, waves and flag."""
    return replace(
        row,
        load="closed_loop",
        isl=INFERENCEX_MEAN_LENGTH * row.isl,
        osl=INFERENCEX_MEAN_LENGTH * row.osl,
        concurrency=value(line, "concurrency"),
        waves=INFERENCEX_WAVES,
        spread=INFERENCEX_SPREAD,
        qa_flag=text(line, "qa_flag"),
    )


def _r1_workers(line: Any, split: bool) -> tuple[Workers | None, Workers | None]:
    if not split:
        gpus = count(line, "gpus_total") or count(line, "tp")
        return Workers(mapping=instance(gpus, ep=count(line, "ep"), dp=groups_of(line))), None
    sides = []
    for side in ("decode", "prefill"):
        number, gpus = count(line, f"{side}_workers"), count(line, f"{side}_gpus")
        if not number or not gpus:
            return None, None
        own, experts, groups = gpus // number, count(line, f"{side}_ep"), groups_of(line, f"{side}_dp_attention")
        if groups == 0 and count(line, f"{side}_tp") != own:  # stored tp = 1: degrees of one rank, not of the worker
            experts = own
        sides.append(Workers(count=number, mapping=instance(own, ep=experts, dp=groups)))
    return sides[0], sides[1]


def nvidia_gap(line: Any) -> ServingRow:
    """A run of the gap analysis; a blank precision is read as bf16, full lengths.

    The FP8 checkpoints that Qwen publishes are block-scaled, also where the source says "fp8"; those of NVIDIA
    (ModelOpt) ask for an fp8 cache, whatever the engine.

    Where the experts of a model lie on more GPUs than ``tp``, attention is data-parallel over groups of ``tp``.
    """
    weights, model = text(line, "gemm_quant") or text(line, "precision"), text(line, "model")
    block = model.startswith("Qwen/") and model.endswith("-FP8")
    cache = "fp8" if model.startswith("nvidia/") else ""
    names = names_of(line, weights="fp8_block" if block else weights, cache=cache)
    tp, pp = max(count(line, "tp"), 1), max(count(line, "pp"), 1)
    experts = count(line, "moe_tp") * count(line, "moe_ep")
    wider = experts > tp and experts % tp == 0
    gpus = experts if wider else tp
    groups = gpus if yes(line, "attention_dp") else gpus // tp
    isl = value(line, "isl")
    return replace(
        _row(line, names),
        load="closed_loop",
        mode="aggregated",
        concurrency=value(line, "concurrency"),
        quantities=mean_or_median(line, "tpot", "ttft"),
        waves=GAP_WAVES,
        spread=0.0 if isl > 0 and math.log2(isl).is_integer() else GAP_SPREAD,
        workers=Workers(mapping=instance(gpus * pp, ep=count(line, "moe_ep"), dp=groups, pp=pp)),
    )


def trtllm_docs(line: Any) -> ServingRow:
    """A cell of a TensorRT-LLM performance table: everything queued, a static batch, or one prompt."""
    static = "static" in text(line, "framework")
    names = names_of(
        line,
        weights=text(line, "precision_weights"),
        cache=text(line, "precision_kv"),
        engine=old_engine("trtllm") if static else "trtllm",
    )
    gpus, scenario, metric = count(line, "gpus_total"), text(line, "scenario"), text(line, "metric")
    if metric == "first_token_latency":
        quantity = Quantity(name="ttft", measured=value(line, "value") * MS)
    else:
        per = float(gpus) if metric.endswith("per_gpu") else 1.0
        quantity = Quantity(name="throughput", measured=value(line, "value"), basis="output", gpus=per)
    row = _row(line, names)
    return replace(
        row,
        quantities=(quantity,),
        mode="aggregated",
        batch=value(line, "batch"),
        load="offline" if scenario.startswith("offline") else "static" if "static" in scenario else "prefill",
        workers=Workers(mapping=instance(gpus, ep=count(line, "ep"), dp=groups_of(line))),
        osl=row.osl if stated(row.osl) else 1.0,
    )


def mlperf(line: Any) -> ServingRow:
    """An MLPerf result: Offline has everything queued, Server and Interactive a Poisson stream.

    A blank precision is read as what nearly all others of the chip use.
    """
    weights = text(line, "precision_weights")
    if weights in ("", "UNSET"):
        weights = "fp4" if text(line, "gpu_family").startswith(("B", "GB")) else "fp8"
    engine = engine_named(text(line, "framework")) or "trtllm"
    names = names_of(line, weights=weights, engine=engine, cache=text(line, "precision_kv"))
    samples, tokens = value(line, "samples_per_s"), value(line, "tokens_per_sample_out")
    gpus, pp = count(line, "gpus_total"), max(count(line, "pp"), 1)
    if not stated(tokens):
        tokens = value(line, "value") / samples if samples else math.nan
    own = (count(line, "tp") or _least_tp(names.model, names.system, weights, gpus)) * pp
    offline = text(line, "scenario") == "Offline"
    known = "" if offline else "the offered rate, which is the input of this row"
    quantities = (Quantity(name="throughput", measured=samples, basis="request", reason=known),)
    reason = "open division: the model may be changed" if text(line, "division") == "open" else ""
    return replace(
        _row(line, names),
        load="offline" if offline else "server",
        mode="aggregated",
        quantities=quantities if offline else quantities + mean_or_median(line, "tpot", "ttft"),
        workers=Workers(
            count=max(gpus // own, 1), mapping=instance(own, ep=count(line, "ep"), dp=groups_of(line), pp=pp)
        ),
        isl=MLPERF_INPUT.get(names.model, math.nan),
        osl=tokens,
        rate=samples,
        batch=value(line, "batch"),
        reason=names.reason or reason,
    )


@lru_cache(maxsize=1024)
def _least_tp(model: str, system: str, weights: str, gpus: int) -> int:
    if not model or not system:
        return 1
    size = next((each.bytes for name, each in FORMATS.items() if name == weights or name.endswith(weights)), 2.0)
    need = load_model(model).total_params * size / (WEIGHT_SHARE * load_system(system).hbm_reported)
    return min(int(2 ** max(math.ceil(math.log2(need)), 0)), max(gpus, 1))


def argonne(line: Any) -> ServingRow:
    """A fixed batch on one node; several GPUs are tensor parallel unless the row says otherwise."""
    said = text(line, "precision_weights")
    engine = old_engine(engine_named(text(line, "framework")))
    names = names_of(line, weights="", engine=engine, cache="fp8" if "KV Cache = fp8" in said else "bf16")
    gpus = count(line, "gpus_total")
    latency, first = value(line, "latency_s"), value(line, "ttft_latency_s")
    throughput = value(line, "throughput_total_tok_s")
    found = [
        Quantity(name="latency", measured=latency),
        Quantity(name="throughput", measured=throughput, basis="total"),
    ]
    if stated(first):  # a run of one token; the other columns repeat a longer run
        found = [Quantity(name="ttft", measured=first)]
    pipeline = text(line, "parallelism").startswith("Pipeline")
    return replace(
        _row(line, names),
        system=ARGONNE_SYSTEMS.get(names.system, names.system),
        load="static",
        mode="aggregated",
        quantities=tuple(quantity for quantity in found if stated(quantity.measured)),
        batch=value(line, "batch"),
        workers=Workers(mapping=instance(gpus, pp=gpus if pipeline else 1)),
    )


def splitwise(line: Any) -> ServingRow:
    """A profiled batch: time of the prompts, mean time of a token, and the run where it agrees with the two."""
    whole = value(line, "prompt_time_ms") + (value(line, "osl") - 1) * value(line, "token_time_ms")
    apart = abs(value(line, "e2e_time_ms") / whole - 1) > SPLITWISE_APART
    why = "the run made another number of tokens than stated" if apart else ""
    latency = (replace(each, reason=why) for each in times(line, ("latency", "mean", "e2e_time_ms")))
    return replace(
        _row(line, names_of(line, weights="", engine="vllm_eager")),
        load="static",
        mode="aggregated",
        quantities=(*times(line, ("tpot", "mean", "token_time_ms"), ("ttft", "mean", "prompt_time_ms")), *latency),
        workers=Workers(mapping=instance(count(line, "tp"))),
        batch=value(line, "batch"),
    )


def _marks(*names: str) -> frozenset[str]:
    return frozenset(names)


#: Form -> columns that tell it, and its reader.
FORMS: dict[str, tuple[frozenset[str], Callable[[Any], ServingRow]]] = {
    "inferencex_dsr1": (
        _marks("tput_total_tok_s_gpu", "tpot_median_ms", "prefill_workers", "concurrency"),
        inferencex_r1,
    ),
    "inferencex_dense": (_marks("tput_total_tok_s_gpu", "tpot_mean_ms", "inferencex_config_id"), inferencex_dense),
    "nvidia_gap": (_marks("ttft_mean_ms", "tpot_mean_ms", "gemm_quant", "moe_ep"), nvidia_gap),
    "trtllm_docs": (_marks("scenario", "metric", "value", "parallelism_label"), trtllm_docs),
    "mlperf": (_marks("mlperf_id", "scenario", "samples_per_s"), mlperf),
    "argonne": (_marks("latency_s", "throughput_total_tok_s", "batch"), argonne),
    "splitwise": (_marks("prompt_time_ms", "token_time_ms", "batch"), splitwise),
    "published": (_marks("metric", "value", "batch_scope", "phase"), published_row),
}
#: Files beside the measurements that hold none.
LISTS = {"core points": _marks("row_id", "kind", "why"), "manifest": _marks("file", "sha256")}
