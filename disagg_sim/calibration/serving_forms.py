"""Readers of the known forms of serving measurements: one function a form, from a line to a ``ServingRow``.

A blank cell is "not stated by the source". Assumptions that fill one are named here, each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from disagg_sim.calibration.serving_rows import (
    Quantity,
    ServingRow,
    Workers,
    engine_named,
    model_named,
    old_engine,
    recipe_of,
    system_named,
)
from disagg_sim.domain import Mapping
from disagg_sim.facts.load import load_engine
from disagg_sim.units import MS

#: InferenceX draws lengths from 0.8 to 1.0 of the stated ones and sends 10 prompts per concurrency slot.
INFERENCEX_MEAN_LENGTH, INFERENCEX_WAVES, INFERENCEX_SPREAD = 0.9, 10.0, 0.1 / 0.9
#: Prompts per concurrency slot of the gap runs: not stated, as InferenceX. Runs with lengths in powers of two line up
#: (their TTFT is half of the prefill of all requests in flight), those with lengths in thousands do not.
GAP_WAVES, GAP_SPREAD = 10.0, 0.1
#: Mean input length of the MLPerf data sets [token]: MLCommons posts on Llama 3.1 405B (April 2025), Llama 3.1 8B and
#: DeepSeek-R1 (September 2025); for OpenOrca (Llama 2) and the summaries of gpt-oss an assumption, the order of
#: the output length.
MLPERF_INPUT = {
    "llama_3_1_405b": 9428.0,
    "llama_3_1_8b": 778.0,
    "deepseek_r1": 800.0,
    "llama_2_70b": 294.0,
    "gpt_oss_120b": 1300.0,
}
#: Share by which a whole run of the Splitwise profile may differ from its own prompt and token times. [1]
SPLITWISE_APART = 0.15
#: The A100 nodes of the study are those of Polaris, with 40 GB: 70B models in 16 bit on four GPUs slow down there at
#: batches that 80 GB would hold, and steps take the longer by the ratio of the bandwidths.
ARGONNE_SYSTEMS = {"a100_sxm_80gb": "a100_sxm_40gb"}


def text(line: Any, name: str) -> str:
    """A cell as text, "" where it is blank or the column is missing."""
    value = getattr(line, name, "")
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value).strip()


def value(line: Any, name: str) -> float:
    """A cell as a number, nan where it is blank, no number, or the column is missing."""
    try:
        return float(getattr(line, name, math.nan))
    except (TypeError, ValueError):
        return math.nan


def count(line: Any, name: str) -> int:
    """A cell as a whole number from 1; 0 where it is blank or below 1."""
    number = value(line, name)
    return int(number) if number >= 1 else 0


def yes(line: Any, name: str) -> bool:
    """Whether a cell says true."""
    return text(line, name).lower() in ("true", "1", "1.0")


def times(line: Any, *pairs: tuple[str, str, str]) -> tuple[Quantity, ...]:
    """Quantities in milliseconds: (name, statistic, column), blank ones left out."""
    found = ((name, statistic, value(line, column)) for name, statistic, column in pairs)
    return tuple(Quantity(name=n, statistic=s, measured=v * MS) for n, s, v in found if v == v)


def instance(gpus: int, *, ep: int = 1, dp: int = 1, pp: int = 1) -> Mapping:
    """An instance of ``gpus`` GPUs: attention over ``dp`` groups (0 = every GPU its own), experts over ``ep``."""
    stage = max(gpus // max(pp, 1), 1)
    spread, groups = max(math.gcd(ep, stage), 1), math.gcd(dp or stage, stage)
    return Mapping(tp_attn=stage // groups, dp_attn=groups, tp_ffn=stage // spread, ep=spread, pp=max(pp, 1))


def _cache(engine: str, weights: str, stated: str = "", cut: bool = True) -> str:
    """Cache format: as stated, else the engine's for a quantised checkpoint, else 16 bit."""
    if stated:
        return "fp8" if stated.startswith("fp8") else "bf16"
    if not engine or not ("fp8" in weights or "fp4" in weights) or not cut:
        return "bf16"
    return load_engine(engine).cache_of_quantised


def inferencex_r1(line: Any) -> ServingRow:
    """A run of DeepSeek-R1: aggregated, or disaggregated with its workers."""
    model, engine, weights = model_named(text(line, "model")), engine_named(text(line, "framework")), text(line, "precision")
    system, reason = system_named(text(line, "gpu_family"), text(line, "hardware"))
    split = text(line, "mode") == "disaggregated"
    workers, prefill = _r1_workers(line, split)
    if split and prefill is None:
        reason = reason or "the split of GPUs into prefill and decode is not stated"
    gpus = value(line, "gpus_total")
    throughput = value(line, "tput_total_tok_s_gpu")
    quantities = times(
        line,
        ("tpot", "mean", "tpot_mean_ms") if value(line, "tpot_mean_ms") == value(line, "tpot_mean_ms")
        else ("tpot", "median", "tpot_median_ms"),
        ("ttft", "mean", "ttft_mean_ms") if value(line, "ttft_mean_ms") == value(line, "ttft_mean_ms")
        else ("ttft", "median", "ttft_median_ms"),
    )  # fmt: skip
    if throughput == throughput:
        total = Quantity(name="throughput", measured=throughput * gpus, basis="total")
        quantities += (Quantity(name="throughput", measured=throughput, basis="total", gpus=gpus),) if gpus else (total,)
    return ServingRow(
        file="", row=text(line, "row_id"), form="", quantities=quantities, model=model, system=system, engine=engine,
        recipe=recipe_of(weights, _cache(engine, weights), model), load="closed_loop",
        mode="disaggregated" if split else "aggregated", workers=workers, prefill=prefill,
        isl=INFERENCEX_MEAN_LENGTH * value(line, "isl"), osl=INFERENCEX_MEAN_LENGTH * value(line, "osl"),
        concurrency=value(line, "concurrency"), waves=INFERENCEX_WAVES, spread=INFERENCEX_SPREAD,
        speculative=text(line, "spec_decode") not in ("", "none"), qa_flag=text(line, "qa_flag"),
        hardware=text(line, "hardware"), framework=text(line, "framework"), reason=reason,
    )  # fmt: skip


def _r1_workers(line: Any, split: bool) -> tuple[Workers | None, Workers | None]:
    if not split:
        gpus = count(line, "gpus_total") or count(line, "tp")
        return Workers(mapping=instance(gpus, ep=count(line, "ep"), dp=0 if yes(line, "dp_attention") else 1)), None
    sides = []
    for side in ("decode", "prefill"):
        number, gpus = count(line, f"{side}_workers"), count(line, f"{side}_gpus")
        if not number or not gpus:
            return None, None
        own, spread, dp = gpus // number, count(line, f"{side}_ep"), yes(line, f"{side}_dp_attention")
        if dp and count(line, f"{side}_tp") != own:  # stored tp = 1: degrees of one rank, not of the worker
            spread = own
        sides.append(Workers(count=number, mapping=instance(own, ep=spread, dp=0 if dp else 1)))
    return sides[0], sides[1]


def inferencex_dense(line: Any) -> ServingRow:
    """A run of Llama 70B or gpt-oss 120B."""
    model, engine, weights = model_named(text(line, "model")), engine_named(text(line, "framework")), text(line, "precision")
    system, reason = system_named(text(line, "gpu_family"), text(line, "hardware"))
    gpus = count(line, "gpus_total") or count(line, "tp")
    quantities = times(line, ("tpot", "mean", "tpot_mean_ms"), ("ttft", "mean", "ttft_mean_ms"))
    throughput = value(line, "tput_total_tok_s_gpu")
    if throughput == throughput:
        quantities += (Quantity(name="throughput", measured=throughput, basis="total", gpus=gpus),)
    return ServingRow(
        file="", row=text(line, "row_id"), form="", quantities=quantities, model=model, system=system, engine=engine,
        recipe=recipe_of(weights, _cache(engine, weights), model), load="closed_loop", mode="aggregated",
        workers=Workers(mapping=instance(gpus, ep=count(line, "ep"), dp=0 if yes(line, "dp_attention") else 1)),
        isl=INFERENCEX_MEAN_LENGTH * value(line, "isl"), osl=INFERENCEX_MEAN_LENGTH * value(line, "osl"),
        concurrency=value(line, "concurrency"), waves=INFERENCEX_WAVES, spread=INFERENCEX_SPREAD,
        speculative="mtp" in text(line, "spec_decode") or "eagle" in text(line, "spec_decode"),
        qa_flag=text(line, "qa_flag"), hardware=text(line, "hardware"), framework=text(line, "framework"), reason=reason,
    )  # fmt: skip


def nvidia_gap(line: Any) -> ServingRow:
    """A run of the gap analysis; a blank precision is read as bf16, full lengths."""
    model, engine = model_named(text(line, "model")), engine_named(text(line, "framework"))
    weights = text(line, "gemm_quant") or text(line, "precision")
    system, reason = system_named(text(line, "gpu_family"), text(line, "hardware"))
    tp, pp, experts = max(count(line, "tp"), 1), max(count(line, "pp"), 1), count(line, "moe_tp") * count(line, "moe_ep")
    sparse = experts > tp and experts % tp == 0  # the GPUs hold the experts; attention is data-parallel over groups
    gpus, dp = (experts if sparse else tp) * pp, experts // tp if sparse else 1
    if yes(line, "attention_dp"):
        dp = gpus // pp
    concurrency = value(line, "concurrency")
    if not concurrency > 0:
        reason = reason or "the concurrency is not stated"
    return ServingRow(
        file="", row=text(line, "row_id"), form="",
        quantities=times(line, ("tpot", "mean", "tpot_mean_ms"), ("ttft", "mean", "ttft_mean_ms")),
        model=model, system=system, engine=engine, recipe=recipe_of(weights, _cache(engine, weights), model),
        load="closed_loop", mode="aggregated",
        workers=Workers(mapping=instance(gpus, ep=count(line, "moe_ep"), dp=dp, pp=pp)),
        isl=value(line, "isl"), osl=value(line, "osl"), concurrency=concurrency, waves=GAP_WAVES, spread=_gap_spread(value(line, "isl")), hardware=text(line, "hardware"),
        framework=text(line, "framework"), reason=reason,
    )  # fmt: skip


def _gap_spread(isl: float) -> float:
    return 0.0 if isl > 0 and math.log2(isl).is_integer() else GAP_SPREAD


def trtllm_docs(line: Any) -> ServingRow:
    """A cell of a TensorRT-LLM performance table: everything queued, a static batch, or one prompt."""
    model = model_named(text(line, "model"))
    system, reason = system_named(text(line, "gpu_family"), text(line, "hardware"))
    weights, gpus, batch = text(line, "precision_weights"), count(line, "gpus_total"), value(line, "batch")
    metric, scenario = text(line, "metric"), text(line, "scenario")
    load = "offline" if scenario.startswith("offline") else "static" if "static" in scenario else "prefill"
    measured = value(line, "value")
    if metric == "first_token_latency":
        quantity = Quantity(name="ttft", measured=measured * MS)
    else:
        per = float(gpus) if metric.endswith("per_gpu") else 1.0
        quantity = Quantity(name="throughput", measured=measured, basis="output", gpus=per)
    osl = value(line, "osl")
    return ServingRow(
        file="", row=text(line, "row_id"), form="", quantities=(quantity,), model=model, system=system,
        engine=old_engine("trtllm") if "static" in text(line, "framework") else "trtllm",
        recipe=recipe_of(weights, _cache("trtllm", weights, text(line, "precision_kv")), model),
        load=load, mode="aggregated", workers=Workers(mapping=instance(gpus, ep=count(line, "ep"), dp=0 if yes(line, "dp_attention") else 1)),
        isl=value(line, "isl"), osl=osl if osl == osl else 1.0, batch=batch, hardware=text(line, "hardware"),
        framework=text(line, "framework"), reason=reason,
    )  # fmt: skip


def mlperf(line: Any) -> ServingRow:
    """An MLPerf result: Offline has everything queued, Server and Interactive a Poisson stream."""
    model = model_named(text(line, "model"))
    system, reason = system_named(text(line, "gpu_family"), text(line, "hardware"))
    engine = "vllm" if "vllm" in text(line, "framework").lower() else "trtllm"
    weights = text(line, "precision_weights")
    if weights in ("", "UNSET"):
        reason = reason or "the precision is not stated"
    throughput, samples = value(line, "value"), value(line, "samples_per_s")
    out = value(line, "tokens_per_sample_out")
    osl = out if out == out else throughput / samples
    gpus, tp, pp = count(line, "gpus_total"), count(line, "tp"), max(count(line, "pp"), 1)
    dp = yes(line, "dp_attention")
    tp = tp or _least_tp(model, system, weights, gpus)
    own = max(tp * pp, 1)
    offline = text(line, "scenario") == "Offline"
    quantities: tuple[Quantity, ...] = (Quantity(name="throughput", measured=samples, basis="request"),)
    if not offline:
        known = "" if offline else "the offered rate, which is the input of this row"
        quantities = (Quantity(name="throughput", measured=samples, basis="request", reason=known),)
        quantities += times(line, ("tpot", "mean", "tpot_mean_ms"), ("ttft", "mean", "ttft_mean_ms"))
    if text(line, "division") == "open":
        reason = reason or "open division: the model may be changed"
    return ServingRow(
        file="", row=text(line, "row_id"), form="", quantities=quantities, model=model, system=system, engine=engine,
        recipe=recipe_of(weights, _cache(engine, weights, text(line, "precision_kv")), model),
        load="offline" if offline else "server", mode="aggregated",
        workers=Workers(count=max(gpus // own, 1), mapping=instance(own, ep=count(line, "ep"), dp=0 if dp else 1, pp=pp)),
        isl=MLPERF_INPUT.get(model, math.nan), osl=osl, rate=samples, batch=value(line, "batch"),
        hardware=text(line, "hardware"), framework=text(line, "framework"), reason=reason,
    )  # fmt: skip


def _least_tp(model: str, system: str, weights: str, gpus: int) -> int:
    """Parallelism where none is stated: the least number of GPUs on which weights fill at most 60 % of the memory."""
    from disagg_sim.facts.load import load_model, load_system

    if not model or not system:
        return 1
    size = {"fp4": 0.5625, "mxfp4": 0.53125, "fp8": 1.0}.get(weights, 2.0)
    need = load_model(model).total_params * size / (0.6 * load_system(system).hbm_reported)
    return min(2 ** max(math.ceil(math.log2(need)), 0), max(gpus, 1))


def argonne(line: Any) -> ServingRow:
    """A fixed batch on one node; several GPUs are tensor parallel unless the row says otherwise."""
    model, engine = model_named(text(line, "model")), engine_named(text(line, "framework"))
    system, reason = system_named(text(line, "gpu_family"), text(line, "hardware"))
    system = ARGONNE_SYSTEMS.get(system, system)
    said = text(line, "precision_weights")
    cache = "fp8" if "KV Cache = fp8" in said else "bf16"
    gpus = count(line, "gpus_total")
    pp = gpus if text(line, "parallelism").startswith("Pipeline") else 1
    latency, osl = value(line, "latency_s"), value(line, "osl")
    first = value(line, "ttft_latency_s")
    quantities = (Quantity(name="latency", measured=latency),) if latency == latency else ()
    throughput = value(line, "throughput_total_tok_s")
    if throughput == throughput:
        quantities += (Quantity(name="throughput", measured=throughput, basis="total"),)
    if first == first:  # a run of one token; the other columns repeat a longer run
        quantities = (Quantity(name="ttft", measured=first),)
    return ServingRow(
        file="", row=text(line, "row_id"), form="", quantities=quantities, model=model, system=system, engine=old_engine(engine),
        recipe=recipe_of("bf16", cache, model), load="static", mode="aggregated",
        workers=Workers(mapping=instance(gpus, pp=pp)), isl=value(line, "isl"), osl=osl, batch=value(line, "batch"),
        hardware=text(line, "hardware"), framework=text(line, "framework"), reason=reason,
    )  # fmt: skip


def splitwise(line: Any) -> ServingRow:
    """A profiled batch: time of the prompts, mean time of a token."""
    model = model_named(text(line, "model"))
    system, reason = system_named(text(line, "gpu_family"))
    (latency,) = times(line, ("latency", "mean", "e2e_time_ms"))
    stated = (value(line, "prompt_time_ms") + (value(line, "osl") - 1) * value(line, "token_time_ms")) * MS
    apart = abs(latency.measured / stated - 1) > SPLITWISE_APART
    whole = (replace(latency, reason="the run made another number of tokens than stated" if apart else ""),)
    return ServingRow(
        file="", row=text(line, "row_id"), form="",
        quantities=times(line, ("tpot", "mean", "token_time_ms"), ("ttft", "mean", "prompt_time_ms")) + whole,
        model=model, system=system, engine="vllm_eager", recipe="bf16", load="static", mode="aggregated",
        workers=Workers(mapping=instance(count(line, "tp"))), isl=value(line, "isl"), osl=value(line, "osl"),
        batch=value(line, "batch"), hardware=text(line, "hardware"), framework="vllm", reason=reason,
    )  # fmt: skip


def published(line: Any) -> ServingRow:
    """One number of a blog, README or paper."""
    from disagg_sim.calibration.serving_published import published_row

    return published_row(line)


#: Form -> columns that tell it, and its reader.
FORMS: dict[str, tuple[frozenset[str], Callable[[Any], ServingRow]]] = {
    "inferencex_dsr1": (frozenset({"tput_total_tok_s_gpu", "tpot_median_ms", "prefill_workers", "concurrency"}), inferencex_r1),
    "inferencex_dense": (frozenset({"tput_total_tok_s_gpu", "tpot_mean_ms", "inferencex_config_id"}), inferencex_dense),
    "nvidia_gap": (frozenset({"ttft_mean_ms", "tpot_mean_ms", "gemm_quant", "moe_ep"}), nvidia_gap),
    "trtllm_docs": (frozenset({"scenario", "metric", "value", "parallelism_label"}), trtllm_docs),
    "mlperf": (frozenset({"mlperf_id", "scenario", "samples_per_s"}), mlperf),
    "argonne": (frozenset({"latency_s", "throughput_total_tok_s", "batch"}), argonne),
    "splitwise": (frozenset({"prompt_time_ms", "token_time_ms", "batch"}), splitwise),
    "published": (frozenset({"metric", "value", "batch_scope", "phase"}), published),
}
#: Files beside the measurements that hold none.
LISTS = {"core points": frozenset({"row_id", "kind", "why"}), "manifest": frozenset({"file", "sha256"})}
