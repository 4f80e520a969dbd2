"""The form of each kind of spec file, and how its validated content becomes a frozen spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from disagg_sim.errors import nearest
from disagg_sim.facts.efficiency import (
    AllToAllFit,
    CollectiveFit,
    DecodeAttentionFit,
    EfficiencySpec,
    Fit,
    GemmFit,
    MoeFit,
    PrefillAttentionFit,
)
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import DenseFfn, GqaAttention, LayerKind, MlaAttention, ModelSpec, MoeFfn
from disagg_sim.facts.precision import FORMATS, GroupFormat, PrecisionRecipe
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.facts.schema import Strict, choice, integer, number, quantity, schema_of, span, validate, values
from disagg_sim.facts.traffic import (
    ConstantLength,
    EmpiricalLength,
    LogNormalLength,
    ParetoLength,
    TrafficCase,
    TrafficSpec,
)
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.units import GB, KB, MB, TB, TERA

#: Arithmetic that a chip may have.
ARITHMETICS = ("bf16", "fp8", "nvfp4", "int8", "tf32", "fp32")

_count = integer(1, 10**7)
_share = number(0.0, 1.0)
_positive_share = number(1e-6, 1.0)
_fitted_share = number(1e-6, 2.0)  # of the BF16 peak: fp8 arithmetic passes 1
_latency = quantity("s", 0.0, 1.0)
_link = quantity("B/s", 0.1 * GB, 100 * TB)

# --- systems ---------------------------------------------------------------------------------------------------------

_System = schema_of(
    SystemSpec,
    without=("name",),
    peak_flops=Annotated[dict[choice(ARITHMETICS), quantity("FLOP/s", TERA, 1e6 * TERA)], Field(min_length=1)],
    hbm_capacity=quantity("B", GB, 10 * TB),
    hbm_reported=quantity("B", GB, 10 * TB),
    hbm_bandwidth=quantity("B/s", 10 * GB, 100 * TB),
    l2_capacity=quantity("B", KB, 10 * GB),
    sm_count=integer(1, 10_000),
    nvlink_bandwidth=_link,
    nvlink_domain=integer(1, 10_000),
    nic_bandwidth=_link,
    pcie_bandwidth=_link,
    tdp=quantity("W", 10.0, 10_000.0),
    usd_per_gpu_hour=span(0.0, 1000.0) | None,
    sources=dict[str, str],
)


def system_of(path: Path, data: Mapping[str, Any], name: str) -> SystemSpec:
    """A system from its file; every figure must have a source."""
    file: Any = validate(_System, data, path)
    spec = SystemSpec(name=name, **values(file))
    needed = [key for key in _System.model_fields if key not in ("title", "vendor", "architecture", "confidence", "sources")]
    found = [f"sources: missing key {key!r}" for key in needed if data.get(key) is not None and key not in spec.sources]
    found += [f"sources: unknown key {key!r}{nearest(key, needed)}" for key in spec.sources if key not in needed]
    if found:
        raise spec_error(path, found)
    return spec


# --- models ----------------------------------------------------------------------------------------------------------


def _heads_divide(block: Any) -> Any:
    if block.q_heads % block.kv_heads:
        raise ValueError(f"kv_heads {block.kv_heads} does not divide q_heads {block.q_heads}")
    return block


def _picks_exist(block: Any) -> Any:
    if block.top_k > block.experts:
        raise ValueError(f"top_k {block.top_k} is above experts {block.experts}")
    return block


_Gqa = schema_of(
    GqaAttention, kind="gqa", q_heads=_count, kv_heads=_count, head_dim=_count, window=integer(0, 10**9)
)
_Mla = schema_of(
    MlaAttention, kind="mla", **dict.fromkeys(("q_heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"), _count)
)
_Dense = schema_of(DenseFfn, kind="dense", width=_count, matrices=integer(2, 3))
_Moe = schema_of(
    MoeFfn, kind="moe", experts=_count, top_k=_count, width=_count, shared_experts=integer(0, 100), shared_width=integer(0, 10**7)
)
_ATTENTION: dict[str, type[Any]] = {"gqa": GqaAttention, "mla": MlaAttention}
_FFN: dict[str, type[Any]] = {"dense": DenseFfn, "moe": MoeFfn}


class _Part(Strict):
    attention: str
    ffn: str


class _Run(Strict):
    count: integer(1, 10_000)  # type: ignore[valid-type]
    attention: str | None = None
    ffn: str | None = None
    pattern: list[_Part] | None = None


class _Model(Strict):
    title: str
    hidden: _count
    vocab: _count
    tied_embeddings: bool
    layer_norm: bool = False
    learned_positions: integer(0, 10**7) = 0  # type: ignore[valid-type]
    block_scaled_fp8: bool = False
    max_context: integer(1, 10**9)  # type: ignore[valid-type]
    max_context_sure: bool
    attention: dict[str, Annotated[Annotated[_Gqa, AfterValidator(_heads_divide)] | _Mla, Field(discriminator="kind")]]  # type: ignore[valid-type]
    ffn: dict[str, Annotated[_Dense | Annotated[_Moe, AfterValidator(_picks_exist)], Field(discriminator="kind")]]  # type: ignore[valid-type]
    layers: Annotated[list[_Run], Field(min_length=1)]
    source: str


def model_of(path: Path, data: Mapping[str, Any], name: str) -> ModelSpec:
    """A model from its file: named attention and ffn blocks, and runs of layers that use them."""
    file: Any = validate(_Model, data, path)
    attention = {key: _ATTENTION[block.kind](**values(block, without=("kind",))) for key, block in file.attention.items()}
    ffn = {key: _FFN[block.kind](**values(block, without=("kind",))) for key, block in file.ffn.items()}
    found: list[str] = []
    layers: list[LayerKind] = []
    for index, run in enumerate(file.layers):
        where = f"layers[{index}]"
        if run.pattern is None and run.attention is not None and run.ffn is not None:
            parts = [run]
        elif run.pattern and run.attention is None and run.ffn is None:
            parts = run.pattern
        else:
            found.append(f"{where}: needs either 'attention' and 'ffn', or 'pattern'")
            continue
        for part in parts:
            for key, blocks in (("attention", attention), ("ffn", ffn)):
                block = getattr(part, key)
                if block not in blocks:
                    found.append(f"{where}.{key}: {block!r} is unknown{nearest(block, blocks)}; allowed: {', '.join(blocks)}")
        if not found:
            layers += [LayerKind(attention[part.attention], ffn[part.ffn]) for part in parts] * run.count
    if found:
        raise spec_error(path, list(dict.fromkeys(found)))
    return ModelSpec(name=name, layers=tuple(layers), **values(file, without=("attention", "ffn", "layers")))


# --- precision recipes and profiles ----------------------------------------------------------------------------------

_format = choice(FORMATS)
_Group = schema_of(GroupFormat, gqa=_format, mla=_format)
_group = Annotated[_Group, BeforeValidator(lambda v: {"gqa": v, "mla": v} if isinstance(v, str) else v)]  # type: ignore[valid-type]
_GROUPS = ("attention_projection", "ffn", "expert")
_Recipe = schema_of(
    PrecisionRecipe,
    without=("name",),
    **dict.fromkeys(_GROUPS, _group),
    **dict.fromkeys(("embedding", "head", "router"), _format),
    attention=choice(("bf16", "fp8")),
    cache=choice(("bf16", "fp8")),
    dispatch_bytes=quantity("B", 0.5, 4.0),
    combine_bytes=quantity("B", 0.5, 4.0),
)
_optional_latency = _latency | None
_LATENCIES = ("elementwise_latency", "host", "p2p_latency_inside", "p2p_latency_across", "nic_latency", "all_reduce_step_latency")
_FLOORS = ("gemm_t0", "gemm_t0_cap_quantised", "attention_t0", "moe_t0", "all_reduce_latency", "all_to_all_latency")
_Profile = schema_of(
    ProfileSpec,
    without=("name",),
    **dict.fromkeys(_FLOORS, _optional_latency),
    **dict.fromkeys(_LATENCIES, _latency),
    **dict.fromkeys(("elementwise_efficiency", "p2p_efficiency", "nic_efficiency", "memory_utilisation"), _positive_share),
    prefill_imbalance=number(1.0, 100.0),
    decode_imbalance=number(1.0, 100.0),
    runtime_bytes=quantity("B", 0.0, 100 * GB),
    communication_library_bytes=quantity("B", 0.0, 100 * GB),
    resident_deviations=number(0.0, 10.0),
    all_reduce_hidden_fraction=_share,
    sources=dict[str, str],
)


def recipe_of(path: Path, data: Mapping[str, Any], name: str) -> PrecisionRecipe:
    """A precision recipe from its file."""
    fields = values(validate(_Recipe, data, path))
    return PrecisionRecipe(name=name, **fields | {key: GroupFormat(**values(fields[key])) for key in _GROUPS})


def profile_of(path: Path, data: Mapping[str, Any], name: str) -> ProfileSpec:
    """A profile from its file."""
    fields = values(validate(_Profile, data, path))
    sources: dict[str, str] = fields.pop("sources")
    unknown = [f"sources: unknown key {key!r}{nearest(key, fields)}" for key in sources if key not in fields]
    if unknown:
        raise spec_error(path, unknown)
    return ProfileSpec(name=name, sources=tuple(sources.items()), **fields)


# --- traffic ---------------------------------------------------------------------------------------------------------

_tokens = number(1.0, 1e9)
_LENGTHS: dict[str, type[Any]] = {
    "constant": ConstantLength,
    "log_normal": LogNormalLength,
    "pareto": ParetoLength,
    "empirical": EmpiricalLength,
}


def _bounds_ascend(length: Any) -> Any:
    if length.minimum >= length.maximum:
        raise ValueError(f"minimum {length.minimum:g} is not below maximum {length.maximum:g}")
    return length


def _is_quantile_table(length: Any) -> Any:
    p, x = length.probabilities, length.tokens
    if len(p) != len(x) or len(p) < 2:
        raise ValueError(f"{len(p)} probabilities and {len(x)} tokens; needs the same number, at least 2")
    if p[0] != 0.0 or p[-1] != 1.0 or any(a >= b for a, b in zip(p, p[1:], strict=False)):
        raise ValueError("probabilities must rise strictly from 0 to 1")
    if any(a > b for a, b in zip(x, x[1:], strict=False)):
        raise ValueError("tokens must not fall")
    return length


_numbers = Annotated[tuple[_share, ...], Field(strict=False)]
_token_list = Annotated[tuple[_tokens, ...], Field(strict=False)]
_Constant = schema_of(ConstantLength, kind="constant", tokens=integer(1, 10**9))
_LogNormal = schema_of(LogNormalLength, kind="log_normal", median=_tokens, sigma=number(0.0, 10.0))
_Pareto = schema_of(ParetoLength, kind="pareto", minimum=_tokens, maximum=_tokens, alpha=number(0.01, 100.0))
_Empirical = schema_of(EmpiricalLength, kind="empirical", probabilities=_numbers, tokens=_token_list)
_length = Annotated[
    _Constant  # type: ignore[valid-type]
    | _LogNormal
    | Annotated[_Pareto, AfterValidator(_bounds_ascend)]
    | Annotated[_Empirical, AfterValidator(_is_quantile_table)],
    Field(discriminator="kind"),
    BeforeValidator(lambda v: v if isinstance(v, dict) else {"kind": "constant", "tokens": v}),
]
_Case = schema_of(TrafficCase, isl=_length, osl=_length)
_Traffic = schema_of(TrafficSpec, without=("name",), cases=Annotated[list[_Case], Field(min_length=1)])  # type: ignore[valid-type]


def traffic_of(path: Path, data: Mapping[str, Any], name: str) -> TrafficSpec:
    """A traffic family from its file; a plain number is a constant length."""
    file: Any = validate(_Traffic, data, path)
    cases = tuple(
        TrafficCase(**{key: _LENGTHS[length.kind](**values(length, without=("kind",))) for key, length in case})
        for case in file.cases
    )
    return TrafficSpec(name=name, title=file.title, cases=cases, source=file.source)


# --- efficiencies ----------------------------------------------------------------------------------------------------

_row = dict(points=integer(1, 10**9), median_error=number(0.0, 10.0), p90_error=number(0.0, 10.0))  # noqa: C408
_no_origin = ("inherited_from",)
_fit = number(1.0, 20.0)
_optional_share = _fitted_share | None
SECTIONS: dict[str, type[Fit]] = {
    "gemm": GemmFit,
    "prefill_attention": PrefillAttentionFit,
    "decode_attention": DecodeAttentionFit,
    "moe": MoeFit,
    "collectives": CollectiveFit,
    "alltoall": AllToAllFit,
}
_KIND = choice(("gqa", "mla"))
_BF16_OR_FP8 = choice(("bf16", "fp8"))
_WIRE = choice((*FORMATS, "unlabelled", "default"))
_TYPES: dict[str, dict[str, Any]] = {
    "gemm": {"format": _format, "e_compute": _fitted_share, "e_memory": _fitted_share, "t0": _latency, "blend_q": _fit},
    "prefill_attention": {
        "kind": _KIND,
        "compute": _BF16_OR_FP8,
        "cache": _BF16_OR_FP8,
        "e_compute": _fitted_share,
        "s_half": number(0.0, 1e6),
        "t0": _latency,
    },
    "decode_attention": {
        "kind": _KIND,
        "cache": _BF16_OR_FP8,
        "e_memory": _fitted_share,
        "e_compute": _optional_share,
        "t0": _latency,
    },
    "moe": {
        "format": _format,
        "regime": choice(("single", "tp", "ep2_8", "ep16_256")),
        "picks": choice(("T*k/ep", "T*k")),
        "e_compute": _optional_share,
        "e_memory": _fitted_share,
        "t0": _latency,
        "blend_q": _fit,
    },
    "collectives": {
        "op": choice(("all_reduce", "all_gather", "reduce_scatter", "alltoall")),
        "gpus": integer(2, 10_000),
        "latency": _latency,
        "e_bandwidth": _fitted_share,
    },
    "alltoall": {
        "phase": choice(("dispatch", "combine", "combine_low_precision", "prepare")),
        "format": _WIRE,
        "ranks": integer(2, 10_000),
        "nodes": integer(1, 10_000),
        "bytes_per_element": number(0.1, 8.0) | None,
        "link": choice(("nvlink", "nic")),
        "latency": _latency,
        "e_bandwidth": _optional_share,
        "seconds_per_token": quantity("s", 0.0, 1e-3) | None,
    },
}
_Rows = {key: schema_of(SECTIONS[key], without=_no_origin, **_TYPES[key], **_row) for key in SECTIONS}


class _Transfer(Strict):
    section: choice(SECTIONS)  # type: ignore[valid-type]
    from_: str = Field(alias="from")
    where: dict[str, str]
    reason: str


_Efficiency = schema_of(
    EfficiencySpec,
    without=("measured_on",),
    engine_order=Annotated[tuple[str, ...], Field(strict=False)],
    **{key: list[_Rows[key]] for key in SECTIONS},
)


class _EfficiencyFile(_Efficiency):  # type: ignore[valid-type, misc]
    inherits_rows: list[_Transfer] = []


class _Heir(Strict):
    system: str
    inherits: str
    reason: str


def efficiency_of(path: Path, data: Mapping[str, Any], load: Callable[[str], EfficiencySpec]) -> EfficiencySpec:
    """Fits of one system: its own rows, rows taken over from another system, or all of a parent's (``inherits``)."""
    if "inherits" in data:
        heir: Any = validate(_Heir, data, path)
        parent = load(heir.inherits)
        taken = {key: tuple(_taken_over(row, parent.system) for row in getattr(parent, key)) for key in SECTIONS}
        return replace(parent, system=heir.system, **taken)
    file: Any = validate(_EfficiencyFile, data, path)
    rows: dict[str, tuple[Any, ...]] = {
        key: tuple(SECTIONS[key](**values(row)) for row in getattr(file, key)) for key in SECTIONS
    }
    for transfer in file.inherits_rows:
        parent = load(transfer.from_)
        rows[transfer.section] += tuple(
            _taken_over(row, parent.system)
            for row in getattr(parent, transfer.section)
            if all(str(getattr(row, key)) == value for key, value in transfer.where.items())
        )
    header = values(file, without=(*SECTIONS, "inherits_rows"))
    return EfficiencySpec(measured_on=file.system, **header, **rows)


def _taken_over(row: Any, origin: str) -> Any:
    return replace(row, inherited_from=row.inherited_from or origin)
