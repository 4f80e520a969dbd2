"""Format specs and simulated runs line by line: key, value in engineers' units and, if there is one, a source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_precision
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.precision_recipe import ANY_KIND, PrecisionRecipe
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.facts.traffic import ConstantLength, LengthSpec, TrafficSpec
from disagg_sim.report.words import text_of
from disagg_sim.simulation.deployment import PARTS, ServedDeployment
from disagg_sim.simulation.metrics import Summary
from disagg_sim.simulation.options import options_of
from disagg_sim.units import GB, MB, MS, TB, TERA, US
from disagg_sim.workload.distributions import length_distribution
from disagg_sim.workload.lengths import nearest_power_of_two

Line = tuple[str, ...]


def system_lines(spec: SystemSpec) -> Iterator[Line]:
    """Describe a system in engineers' units, each figure with its source."""
    yield from (
        ("name", spec.name),
        ("title", spec.title),
        ("vendor", spec.vendor),
        ("architecture", spec.architecture),
    )
    for arithmetic, peak in spec.peak_flops.items():
        yield f"peak {arithmetic}, dense", f"{peak / TERA:g} TFLOPS", spec.sources["peak_flops"]
    figures = {
        "hbm_capacity": f"{spec.hbm_capacity / GB:g} GB",
        "hbm_reported": f"{spec.hbm_reported / GB:.4g} GB",
        "hbm_bandwidth": f"{spec.hbm_bandwidth / TB:g} TB/s",
        "l2_capacity": f"{spec.l2_capacity / MB:g} MB",
        "sm_count": f"{spec.sm_count}",
        "attention_tile_rows": f"{spec.attention_tile_rows} query rows",
        "nvlink_bandwidth": f"{spec.nvlink_bandwidth / GB:g} GB/s one way",
        "nvlink_domain": f"{spec.nvlink_domain} GPUs",
        "in_switch_reduction": "yes" if spec.in_switch_reduction else "no",
        "nic_bandwidth": f"{spec.nic_bandwidth / GB:g} GB/s one way",
        "tdp": f"{spec.tdp:g} W",
    }
    if spec.usd_per_gpu_hour is not None:
        low, high = spec.usd_per_gpu_hour
        figures["usd_per_gpu_hour"] = f"{low:g}-{high:g} USD/h"
    for key, text in figures.items():
        yield key, text, spec.sources[key]
    yield "confidence", spec.confidence


def model_lines(spec: ModelSpec) -> Iterator[Line]:
    """Describe a model: parameters, cache, context limit and its kinds of layers."""
    yield from (("name", spec.name), ("title", spec.title))
    yield "parameters", f"{spec.total_params:,}"
    yield "active parameters", f"{spec.active_params:,}"
    yield "matmul weights of the layers per token", f"{spec.linear_params_per_token:,}"
    for name in ("bf16", "fp8"):
        yield f"cache per token, {name}", f"{spec.kv_bytes_per_token(load_precision(name).resolve(spec)):,.0f} B"
    if spec.state_bytes:
        yield "state of a sequence", f"{spec.state_bytes:,.0f} B"
    sure = "" if spec.max_context_sure else " (unsure)"
    yield "context limit", f"{spec.max_context:,} tokens{sure}"
    yield "hidden, vocabulary", f"{spec.hidden:,}, {spec.vocab:,}"
    for kind, count in zip(spec.kinds, spec.kind_counts, strict=True):
        yield f"{count} layers", _described(kind.attention), _described(kind.ffn)
    yield "fp8 checkpoints", "128x128 block scales" if spec.block_scaled_fp8 else "per tensor scales"
    yield "source", spec.source


def _described(part: Any) -> str:
    fields = {key: getattr(part, key) for key in part.__dataclass_fields__}
    keys = (key if value is True else f"{key} {value}" for key, value in fields.items() if value)
    return f"{type(part).__name__}: {', '.join(keys)}"


def traffic_lines(spec: TrafficSpec) -> Iterator[Line]:
    """Describe the lengths of every case of a traffic."""
    yield from (("name", spec.name), ("title", spec.title))
    for number, case in enumerate(spec.cases, 1):
        yield f"case {number}", f"input: {_length(case.isl)}", f"output: {_length(case.osl)}"
        if not (isinstance(case.isl, ConstantLength) and isinstance(case.osl, ConstantLength)):
            isl, osl = (nearest_power_of_two(length_distribution(each).quantile(0.5)) for each in (case.isl, case.osl))
            yield "  nearest constant shape", f"{isl}/{osl} tokens"
    yield "source", spec.source


def _length(length: LengthSpec) -> str:
    if isinstance(length, ConstantLength):
        return f"{length.tokens} tokens"
    law = length_distribution(length)
    quantiles = f"median {law.quantile(0.5):.0f}, mean {law.mean:.0f}, 99 % {law.quantile(0.99):.0f}"
    return f"{type(law).__name__}, {quantiles} tokens"


def precision_lines(spec: PrecisionRecipe) -> Iterator[Line]:
    """Describe the format of every operator group of a recipe."""
    yield from (("name", spec.name), ("title", spec.title))
    for kind, form in spec.attention_projection.items():
        yield "attention_projection" if kind == ANY_KIND else f"attention_projection of {kind}", form
    for key in ("ffn", "expert", "attention", "cache", "embedding", "head", "router"):
        yield key, getattr(spec, key)
    yield "on the wire: dispatch", f"{spec.dispatch_bytes:g} B"
    yield "on the wire: combine, all-reduce", f"{spec.combine_bytes:g} B"
    yield "source", spec.source


def resolved_lines(spec: Precision) -> Iterator[Line]:
    """Describe the format of every operator group of a recipe, resolved for a model."""
    forms = {f"attention_projection of {kind}": form for kind, form in spec.attention_projection.items()}
    forms |= {key: getattr(spec, key) for key in ("ffn", "expert", "cache", "embedding", "head", "router")}
    for key, form in forms.items():
        yield key, f"{form.name}, {form.bytes:g} B an element"
    yield "attention", spec.attention
    yield "on the wire: dispatch", f"{spec.dispatch_bytes:g} B"
    yield "on the wire: combine, all-reduce", f"{spec.combine_bytes:g} B"
    yield "source", spec.source


def profile_lines(spec: ProfileSpec) -> Iterator[Line]:
    """Describe every assumption of a profile with its source."""
    sources = dict(spec.sources)
    for key in ProfileSpec.__dataclass_fields__:
        if key != "sources":
            yield key, _profile_value(key, getattr(spec, key)), sources.get(key, "")


def option_lines(owner: Any) -> Iterator[Line]:
    """Describe every option of a serving system, or of a run."""
    for name, option in options_of(owner).items():
        default = option.default
        shown = str(default).lower() if isinstance(default, bool) else default if isinstance(default, str) else ""
        yield name, shown or f"{default:.12g} {option.unit}".strip(), option.allowed, option.meaning


_TIMES = ("_t0", "_latency", "_quantised", "_inside", "_across", "host")


def _profile_value(key: str, value: Any) -> str:
    if value is None:
        return "none" if key.endswith("_quantised") else "as fitted"
    if key.endswith(_TIMES):
        return f"{value / US:g} us"
    if key.endswith("_bytes"):
        return f"{value / GB:g} GB"
    return str(value)


def not_completed(rejected: int, failed: int, unfinished: int) -> str:
    """Count the requests that were not completed, by outcome; empty if there are none."""
    counts = {"rejected": rejected, "failed": failed, "unfinished": unfinished}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def summary_lines(row: Summary) -> Iterator[Line]:
    """Summarise a run: completed requests, the SLO, latencies, throughput, use of the GPUs."""
    lost = not_completed(row.rejected, row.failed, row.unfinished)
    yield "requests", f"{row.requests:,}, of which {row.completed:,} were completed{', ' * bool(lost)}{lost}"
    yield "SLO", f"TTFT {row.slo_ttft_s:g} s, TPOT {row.slo_tpot_s / MS:g} ms"
    yield "inside the SLO", f"{row.slo_attainment:.1%} of all requests"
    yield "goodput", f"{row.goodput_requests_per_s:.4g} requests/s, {row.goodput_tokens_per_s:,.4g} tokens/s"
    yield "TTFT p50, p90, p99", f"{row.ttft_p50_s:.3g}, {row.ttft_p90_s:.3g}, {row.ttft_p99_s:.3g} s"
    per_token = (row.tpot_p50_s, row.tpot_p90_s, row.tpot_p99_s)
    yield "TPOT p50, p90, p99", ", ".join(f"{value / MS:.3g}" for value in per_token) + " ms"
    yield "ITL p99, of all gaps", f"{row.itl_p99_s / MS:.3g} ms"
    yield "GPU-hours", f"{row.gpu_hours:.4g}, in passes {row.utilisation:.0%} of the time, MFU {row.mfu:.1%}"
    yield "KV blocks in use", f"{row.kv_use_mean:.1%} on average, {row.kv_use_max:.1%} at most"
    if row.transfers:
        exposed = f"{row.exposed_transfer_mean_s / MS:.3g} ms of each waited for"
        yield "KV transfers", f"{row.transfers:,}, {exposed}"
    if row.flips:
        yield "changes of role", f"{row.flips:,}"
    yield "simulated", f"in {row.wall_s:.3g} s, {row.requests_per_cpu_s:,.0f} requests per CPU second"


def deployment_rows(deployment: ServedDeployment) -> Iterator[Line]:
    """List part, instances, mapping and GPUs of an instance."""
    if (pool := deployment.encode) is not None:
        images = f"{pool.step.images} x {pool.step.height} x {pool.step.width} pixels a request"
        yield "encode", f"{pool.instances:,}", images, "1"
    for part in PARTS:
        for replicas in getattr(deployment, part):
            m = replicas.mapping
            text = text_of(m)
            if (ffn := replicas.ffn) is not None:
                own = text_of(replace(m, ep=1))
                text = f"attention {own}, FFN on {ffn.mapping.gpus} GPUs, {ffn.microbatches} micro-batches"
            yield part, f"{replicas.instances:,}", text, f"{m.gpus:,}"
