"""Read the known forms of serving measurements: one function per form, from a line to a ``ServingRow``.

A blank cell is "not stated by the source". Assumptions that fill one are named here, each with its reason. The last
form is the long one of published single numbers: a metric, its value, and as much of the set-up as the source gives.

Past 400 lines: one reader a form, and the assumptions that they share.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from disagg_sim.facts.load import load_checkpoints, load_model, load_system
from disagg_sim.facts.precision import FORMATS
from disagg_sim.facts.yaml_files import list_specs, read_mapping
from disagg_sim.units import MS
from disagg_sim.workload.named import lengths_named
from lab.calibration.names import engine_named, model_named, old_engine, recipe_of, source_engine, system_named
from lab.calibration.served.cells import (
    Names,
    cache_format,
    count,
    groups_of,
    instance,
    mean_or_median,
    names_of,
    other_statistics,
    stated,
    text,
    times,
    total_throughput,
    value,
    yes,
)
from lab.calibration.served.rows import MULTIPLIED, UNKNOWN_START, Measurement, ServingRow, WorkerGroup

#: InferenceX draws lengths from 0.8 to 1.0 of the stated ones and sends 10 prompts per concurrency slot.
INFERENCEX_MEAN_LENGTH, INFERENCEX_WAVES, INFERENCEX_SPREAD = 0.9, 10.0, 0.1 / 0.9
#: Prompts per concurrency slot of the gap runs: not stated, as InferenceX. Runs with lengths in powers of two line up
#: (their TTFT is half of the prefill of all requests in flight), those with lengths in thousands do not.
GAP_WAVES, GAP_SPREAD = 10.0, 0.1
#: Traffic of the data set that MLPerf runs a model on, as published; what has none states no input length. OpenOrca, of
#: Llama 2, is such: its rows are not judged.
MLPERF_TRAFFIC = "mlperf_{model}"
#: Where no parallelism is stated: the fewest GPUs whose memory the weights fill to this share at most. [1]
WEIGHT_SHARE = 0.6
#: Share by which a whole run of the Splitwise profile may differ from its own prompt and token times. [1]
SPLITWISE_APART = 0.15
#: The A100 nodes of the study are those of Polaris, with 40 GB: 70B models in 16 bit on four GPUs slow down there at
#: batches that 80 GB would hold, and steps take the longer by the ratio of the bandwidths.
ARGONNE_SYSTEMS = {"a100_sxm_80gb": "a100_sxm_40gb"}
#: GPUs of a node in the throughputs that sources give per node. [1]
NODE_GPUS = 8.0
#: Tokens of a full pass of a rank where none are stated. [token]
FULL_PASS = 16384.0
#: Copies of experts of SGLang's deployment on 96 H100, in both phases (LMSYS, large-scale EP, 2025-05-05). [1]
LMSYS_COPIES = 32
#: Most in flight of cells that state acceptance: beyond, some wait for a place. [request]
MOST_IN_FLIGHT = 128
#: Words of the long form (``forms.yaml``).
_WORDS = read_mapping(Path(__file__).with_suffix(".yaml"))
NOT_SERVED, METRICS, THROUGHPUTS, PHASES, SOURCE_CHUNKS = (
    _WORDS[name] for name in ("not_served", "metrics", "throughputs", "phases", "source_chunks")
)


def inferencex(line: Any) -> ServingRow:
    """A run of DeepSeek-R1, Llama 70B or gpt-oss 120B: aggregated, or disaggregated with its workers."""
    names, said = names_of(line, weights=text(line, "precision")), text(line, "spec_decode")
    split = text(line, "mode") == "disaggregated"
    workers, prefill = _workers(line, split)
    reason = names.reason
    if split and prefill is None:
        reason = reason or "the split of GPUs into prefill and decode is not stated"
    gpus = count(line, "gpus_total") or count(line, "tp")
    return _inferencex(
        line,
        names,
        reason=reason,
        mode="disaggregated" if split else "aggregated",
        workers=workers,
        prefill=prefill,
        speculative=bool(said) and not said.startswith(("none", "not stated")),
        quantities=mean_or_median(line, "tpot", "ttft") + total_throughput(line, gpus),
    )


def inferencex_models(line: Any) -> ServingRow:
    """A run of one of the newer models: degrees as numbers, one instance or workers of two kinds; no throughput.

    Where one instance has more GPUs than a node, the source has multiplied degrees that are the same GPUs: those rows
    do not say what ran, unless their launch does.
    """
    split = text(line, "mode") == "disaggregated"
    sides = [_degrees(line, side) for side in ("decode_", "prefill_")] if split else [_degrees(line, "")]
    names = names_of(line, weights=text(line, "gemm_quant") or text(line, "precision"))
    reason = names.reason
    if not all(sides):
        reason = reason or "the workers and their GPUs are not stated"
    elif not split and sides[0] and names.system and sides[0].gpus > max(load_system(names.system).nvlink_domain, 1):
        reason = reason or MULTIPLIED
    if "int4" in text(line, "gemm_quant"):
        reason = reason or "no recipe of 4-bit integer weights"
    return _inferencex(
        line,
        names,
        reason=reason,
        mode="disaggregated" if split else "aggregated",
        workers=sides[0],
        prefill=sides[1] if split else None,
        quantities=mean_or_median(line, "tpot", "ttft"),
    )


def _degrees(line: Any, side: str) -> WorkerGroup | None:
    """Workers by their degrees: ranks of attention times GPUs of each, and how they cut the experts."""
    number = count(line, f"{side}workers") if side else 1
    tp, ranks = count(line, f"{side}tp"), count(line, f"{side}attention_dp")
    if not number or not tp or not ranks:
        return None
    pp = max(count(line, f"{side}pp"), 1)
    return WorkerGroup(
        count=number, mapping=instance(tp * ranks * pp, ep=count(line, f"{side}moe_ep"), dp=ranks, pp=pp)
    )


def _row(line: Any, names: Names, **told: Any) -> ServingRow:
    """The row of a line with its names, lengths and what else its form tells."""
    lengths = {"isl": value(line, "isl"), "osl": value(line, "osl")}
    return ServingRow(file="", row=text(line, "row_id"), form="", **(names._asdict() | lengths | told))


def _inferencex(line: Any, names: Names, **told: Any) -> ServingRow:
    """What all InferenceX runs share: mean lengths, waves and flag.

    A TTFT that the source suspects is that of a warm-up; a point whose runs differ is not known.
    """
    row, flag = _row(line, names, **told), text(line, "qa_flag")
    suspect = "a warm-up, as the source suspects" if flag == "ttft_suspect" else ""
    quantities = (replace(each, reason=suspect) if each.name == "ttft" else each for each in row.quantities)
    return replace(
        row.refused("runs of this point differ by more than 1.35 times") if flag.startswith("spread") else row,
        quantities=tuple(quantities),
        load="closed_loop",
        isl=INFERENCEX_MEAN_LENGTH * row.isl,
        osl=INFERENCEX_MEAN_LENGTH * row.osl,
        concurrency=value(line, "concurrency"),
        waves=INFERENCEX_WAVES,
        others=other_statistics(line, "tpot", "ttft"),
        spread=INFERENCEX_SPREAD,
        qa_flag=text(line, "qa_flag"),
    )


def _workers(line: Any, split: bool) -> tuple[WorkerGroup | None, WorkerGroup | None]:
    if not split:
        gpus = count(line, "gpus_total") or count(line, "tp")
        return WorkerGroup(mapping=instance(gpus, ep=count(line, "ep"), dp=groups_of(line))), None
    sides = []
    for side in ("decode", "prefill"):
        number, gpus = count(line, f"{side}_workers"), count(line, f"{side}_gpus")
        if not number or not gpus:
            return None, None
        own, experts, groups = gpus // number, count(line, f"{side}_ep"), groups_of(line, f"{side}_dp_attention")
        if groups == 0 and count(line, f"{side}_tp") != own:  # stored tp = 1: degrees of one rank, not of the worker
            experts = own
        sides.append(WorkerGroup(count=number, mapping=instance(own, ep=experts, dp=groups)))
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
    first = (replace(each, reason=UNKNOWN_START) for each in mean_or_median(line, "ttft"))
    return _row(
        line,
        names,
        load="closed_loop",
        mode="aggregated",
        concurrency=value(line, "concurrency"),
        quantities=(*mean_or_median(line, "tpot"), *first),
        waves=GAP_WAVES,
        spread=0.0 if isl > 0 and math.log2(isl).is_integer() else GAP_SPREAD,
        workers=WorkerGroup(mapping=instance(gpus * pp, ep=count(line, "moe_ep"), dp=groups, pp=pp)),
    )


def trtllm_docs(line: Any) -> ServingRow:
    """A cell of a TensorRT-LLM performance table: everything queued, a static batch, or one prompt.

    The pages run NVIDIA's fp8 checkpoints where there are such (ModelOpt, a scale for each tensor, an fp8 cache).
    """
    static = "static" in text(line, "framework")
    weights = text(line, "precision_weights")
    known = load_checkpoints().models.get(model_named(text(line, "model")), {})
    if weights == "fp8" and "fp8_block" in known and known.get("fp8", "").startswith("nvidia/"):
        weights = "fp8_tensor"
    names = names_of(
        line, weights=weights, cache=text(line, "precision_kv"), engine=old_engine("trtllm") if static else "trtllm"
    )
    gpus, scenario, metric = count(line, "gpus_total"), text(line, "scenario"), text(line, "metric")
    if metric == "first_token_latency":
        quantity = Measurement(name="ttft", measured=value(line, "value") * MS)
    else:
        per = float(gpus) if metric.endswith("per_gpu") else 1.0
        quantity = Measurement(name="throughput", measured=value(line, "value"), basis="output", gpus=per)
    osl = value(line, "osl")
    return _row(
        line,
        names,
        quantities=(quantity,),
        mode="aggregated",
        batch=value(line, "batch"),
        load="offline" if scenario.startswith("offline") else "static" if "static" in scenario else "prefill",
        workers=WorkerGroup(mapping=instance(gpus, ep=count(line, "ep"), dp=groups_of(line))),
        osl=osl if stated(osl) else 1.0,
    )


def mlperf(line: Any) -> ServingRow:
    """An MLPerf result: Offline has everything queued, Server and Interactive a Poisson stream.

    Requests come at the scheduled rate; what is completed a second is less, as the last answers end after it. A blank
    precision is read as what nearly all others of the chip use.
    """
    weights = text(line, "precision_weights")
    if weights in ("", "UNSET"):
        weights = "fp4" if text(line, "gpu_family").startswith(("B", "GB")) else "fp8"
    engine = engine_named(text(line, "framework")) or "trtllm"
    names = names_of(line, weights=weights, engine=engine, cache=text(line, "precision_kv"))
    samples, tokens = value(line, "samples_per_s"), value(line, "tokens_per_sample_out")
    scheduled = value(line, "scheduled_samples_per_s")
    gpus, pp = count(line, "gpus_total"), max(count(line, "pp"), 1)
    if not stated(tokens):
        tokens = value(line, "value") / samples if samples else math.nan
    own = (count(line, "tp") or _least_tp(names.model, names.system, weights, gpus)) * pp
    offline = text(line, "scenario") == "Offline"
    known = "" if offline else "what an offered rate completes follows from it, the input of this row"
    throughput = (Measurement(name="throughput", measured=samples, basis="request", reason=known),)
    latencies = mean_or_median(line, "tpot", "ttft")
    if not any(each.name == "tpot" for each in latencies):
        latencies = times(line, ("tpot", "median", "tpot_p50_ms")) + latencies
    reason = "open division: the model may be changed" if text(line, "division") == "open" else ""
    return _row(
        line,
        names,
        load="offline" if offline else "server",
        mode="aggregated",
        quantities=throughput if offline else throughput + latencies,
        workers=WorkerGroup(
            count=max(gpus // own, 1), mapping=instance(own, ep=count(line, "ep"), dp=groups_of(line), pp=pp)
        ),
        isl=_mlperf_input(names.model),
        osl=tokens,
        rate=scheduled if stated(scheduled) and not offline else samples,
        batch=value(line, "batch"),
        assumed_layout=not count(line, "tp"),
        submitter=text(line, "submitter"),
        scenario=text(line, "scenario"),
        ttft_limit=value(line, "slo_ttft_ms") * MS,
        tpot_limit=value(line, "slo_tpot_ms") * MS,
        reason=names.reason or reason,
    )


@lru_cache(maxsize=32)
def _mlperf_input(model: str) -> float:
    """Mean input length of the data set of a model, nan where it is not published. [token]"""
    name = MLPERF_TRAFFIC.format(model=model)
    return lengths_named(name).mean_isl if name in list_specs("traffic") else math.nan


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
        Measurement(name="latency", measured=latency),
        Measurement(name="throughput", measured=throughput, basis="total"),
    ]
    if stated(first):  # a run of one token; the other columns repeat a longer run
        found = [Measurement(name="ttft", measured=first)]
    pipeline = text(line, "parallelism").startswith("Pipeline")
    return _row(
        line,
        names,
        system=ARGONNE_SYSTEMS.get(names.system, names.system),
        load="static",
        mode="aggregated",
        quantities=tuple(quantity for quantity in found if stated(quantity.measured)),
        batch=value(line, "batch"),
        workers=WorkerGroup(mapping=instance(gpus, pp=gpus if pipeline else 1)),
    )


def drafted_cells(line: Any) -> ServingRow:
    """A cell of one server that states drafts and the acceptance of each, or none; lengths as InferenceX draws them."""
    model, _, weights = text(line, "model").rstrip(")").partition(" (")
    gpus, _, hardware = text(line, "gpu").partition("x ")
    framework = text(line, "engine")
    system, reason = system_named(hardware, hardware)
    model, engine = model_named(model), engine_named(framework)
    drafts = count(line, "num_spec")
    waits = value(line, "concurrency") > MOST_IN_FLIGHT
    shares = [value(line, f"accept_pos{place}") for place in range(drafts)]
    return ServingRow(
        file="",
        row="",
        form="",
        model=model,
        system=system,
        engine=engine,
        recipe=recipe_of(weights, cache_format(engine, weights), model),
        hardware=hardware,
        framework=framework,
        quantities=mean_or_median(line, "tpot"),
        load="closed_loop",
        mode="aggregated",
        workers=WorkerGroup(mapping=instance(int(gpus))),
        isl=INFERENCEX_MEAN_LENGTH * value(line, "isl"),
        osl=INFERENCEX_MEAN_LENGTH * value(line, "osl"),
        concurrency=value(line, "concurrency"),
        waves=INFERENCEX_WAVES,
        spread=INFERENCEX_SPREAD,
        speculative=drafts > 0,
        drafts=drafts or 1,
        accepted=tuple(float(share) for share in np.minimum.accumulate(shares)) if drafts else (),
        reason=reason or "some requests wait for a place" * waits,
    )


def splitwise(line: Any) -> ServingRow:
    """A profiled batch: time of the prompts, mean time of a token, and the run where it agrees with the two."""
    whole = value(line, "prompt_time_ms") + (value(line, "osl") - 1) * value(line, "token_time_ms")
    apart = abs(value(line, "e2e_time_ms") / whole - 1) > SPLITWISE_APART
    why = "the run made another number of tokens than stated" if apart else ""
    latency = (replace(each, reason=why) for each in times(line, ("latency", "mean", "e2e_time_ms")))
    return _row(
        line,
        names_of(line, weights="", engine="vllm_eager"),
        load="static",
        mode="aggregated",
        quantities=(*times(line, ("tpot", "mean", "token_time_ms"), ("ttft", "mean", "prompt_time_ms")), *latency),
        workers=WorkerGroup(mapping=instance(count(line, "tp"))),
        batch=value(line, "batch"),
    )


def published(line: Any) -> ServingRow:
    """A ``ServingRow`` of one line of the long form."""
    source = text(line, "source_id")
    quantity, reason = _quantity(line)
    load = _load(line)
    workers, prefill, missing = _layout(line)
    batch = _batch(line, load, workers)
    if load in ("prefill", "decode") and not stated(value(line, "isl")):
        missing = missing or "the length is not stated"
    if load == "decode" and not stated(batch):
        missing = missing or "the batch is not stated"
    engine = engine_named(text(line, "framework")) or source_engine(source)
    published_as = "fp8" if model_named(text(line, "model")) == "deepseek_r1" else "bf16"  # where the line states none
    weights = text(line, "precision_weights").lower() or published_as
    names = names_of(line, weights=weights, engine=engine, cache=text(line, "precision_kv"))
    osl = value(line, "osl")
    return _row(
        line,
        names,
        quantities=(quantity,),
        load=load,
        mode="disaggregated" if prefill else "aggregated",
        workers=workers,
        prefill=prefill,
        osl=osl if stated(osl) else 1.0,
        concurrency=value(line, "concurrency"),
        batch=batch,
        chunk_tokens=SOURCE_CHUNKS.get(source, 0),
        speculative=text(line, "spec_decode") not in ("", "none"),
        framework=names.framework or source,
        reason=names.reason or reason or missing,
    )


def _quantity(line: Any) -> tuple[Measurement, str]:
    """Quantity and, where the metric is none of ours, the reason."""
    metric, measured, gpus = text(line, "metric"), value(line, "value"), value(line, "gpus_total")
    why = next((why for start, why in NOT_SERVED.items() if metric.startswith(start)), "")
    if metric in METRICS:
        name, statistic = METRICS[metric]
        return Measurement(name=name, measured=measured * MS, statistic=statistic), why
    if metric in THROUGHPUTS:
        return Measurement(name="throughput", measured=measured, basis=THROUGHPUTS[metric]), why
    basis, _, per = metric.partition("_throughput_per_")
    if basis in ("input", "output") and per in ("gpu", "node"):
        shared = gpus / NODE_GPUS if per == "node" else gpus
        return Measurement(name="throughput", measured=measured, basis=basis, gpus=shared), why
    return Measurement(name=metric, measured=measured, statistic=""), why or f"metric {metric!r} has no model"


def _load(line: Any) -> str:
    """What is in flight: one phase alone, a closed loop where a concurrency is stated, else everything queued."""
    phase = {"prefill_only": "prefill", "decode_only": "decode"}.get(text(line, "mode"), text(line, "phase"))
    phase = PHASES.get(text(line, "metric"), phase)
    return phase or ("closed_loop" if stated(value(line, "concurrency")) else "offline")


def _batch(line: Any, load: str, workers: WorkerGroup | None) -> float:
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


def _layout(line: Any) -> tuple[WorkerGroup | None, WorkerGroup | None, str]:
    """Workers of a line: a disaggregated pair, or one instance over the GPUs that it names; else the reason."""
    source, mode, groups = text(line, "source_id"), text(line, "mode"), groups_of(line)
    prefill, decode = count(line, "prefill_gpus"), count(line, "decode_gpus")
    known = {  # what the papers say beside their tables
        ("paper_dynaserve", "aggregated"): WorkerGroup(count=2, mapping=instance(1)),
        ("mooncake_pd_h20", "disaggregated"): WorkerGroup(mapping=instance(prefill)),
        ("paper_dopd", "prefill_only"): WorkerGroup(mapping=instance(1)),
        ("paper_dopd", "decode_only"): WorkerGroup(mapping=instance(2)),
    }
    if (source, mode) in known:
        return known[source, mode], None, ""
    if prefill and decode:
        pair = [WorkerGroup(mapping=instance(gpus, ep=gpus, dp=groups)) for gpus in (decode, prefill)]
        return pair[0], pair[1], ""
    gpus, experts = count(line, "gpus_total"), count(line, "ep")
    if mode == "disaggregated" and not text(line, "phase"):
        return None, None, "the split of GPUs into prefill and decode is not stated"
    if not gpus:
        return None, None, "the number of GPUs is not stated"
    mapping = instance(gpus, ep=experts or (1 if groups else gpus), dp=groups)
    copies = LMSYS_COPIES if source == "lmsys_96h100" and mapping.ep > 1 else 0
    return WorkerGroup(mapping=replace(mapping, redundant_slots=copies)), None, ""
