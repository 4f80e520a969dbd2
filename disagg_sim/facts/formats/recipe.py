"""``hw_specs/precision/*.yaml`` and ``hw_specs/profiles/*.yaml``: formats of operator groups, and assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.precision import FORMATS, GroupFormat, PrecisionRecipe
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.facts.schema import (
    choice,
    line,
    mapping_of,
    number,
    optional,
    quantity,
    schema_of,
    short_form,
    validate,
    values,
)
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.units import GB

_format = choice(FORMATS)
_Group = schema_of(GroupFormat, {"gqa": _format, "mla": _format})
_group = short_form(_Group, lambda value: {"gqa": value, "mla": value} if isinstance(value, str) else value)
_GROUPS = ("attention_projection", "ffn", "expert")
_Recipe = schema_of(
    PrecisionRecipe,
    dict.fromkeys(_GROUPS, _group)
    | dict.fromkeys(("embedding", "head", "router"), _format)
    | dict.fromkeys(("attention", "cache"), choice(("bf16", "fp8")))
    | dict.fromkeys(("dispatch_bytes", "combine_bytes"), quantity("B", 0.5, 4.0))
    | {"title": line()},
    without=("name",),
)

_time = quantity("s", 0.0, 1.0)
_FLOORS = ("gemm_t0", "gemm_t0_cap_quantised", "attention_t0", "moe_t0", "all_reduce_latency", "all_to_all_latency")
_TIMES = (
    "elementwise_latency",
    "host",
    "p2p_latency_inside",
    "p2p_latency_across",
    "nic_latency",
    "all_reduce_step_latency",
)
_EFFICIENCIES = ("elementwise_efficiency", "p2p_efficiency", "nic_efficiency", "memory_utilisation")
_Profile = schema_of(
    ProfileSpec,
    dict.fromkeys(_FLOORS, optional(_time))
    | dict.fromkeys(_TIMES, _time)
    | dict.fromkeys(_EFFICIENCIES, number(1e-6, 1.0))
    | dict.fromkeys(("prefill_imbalance", "decode_imbalance"), number(1.0, 100.0))
    | dict.fromkeys(("runtime_bytes", "communication_library_bytes"), quantity("B", 0.0, 100 * GB))
    | {
        "resident_deviations": number(0.0, 10.0),
        "all_reduce_hidden_fraction": number(0.0, 1.0),
        "title": line(),
        "sources": mapping_of(str, str),
    },
    without=("name",),
)


def recipe_of(path: Path, data: Mapping[str, Any], name: str) -> PrecisionRecipe:
    """A precision recipe from its file."""
    fields = values(validate(_Recipe, data, path))
    return PrecisionRecipe(name=name, **fields | {key: GroupFormat(**values(fields[key])) for key in _GROUPS})


def profile_of(path: Path, data: Mapping[str, Any], name: str) -> ProfileSpec:
    """A profile from its file."""
    fields = values(validate(_Profile, data, path))
    sources: dict[str, str] = fields.pop("sources")
    unknown = [f"sources: unknown key {quoted(key)}{nearest(key, fields)}" for key in sources if key not in fields]
    if unknown:
        raise spec_error(path, unknown)
    return ProfileSpec(name=name, sources=tuple(sources.items()), **fields)
