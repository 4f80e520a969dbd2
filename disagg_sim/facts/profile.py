"""Profiles: assumptions about kernels, links and memory, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from disagg_sim.choices import MOST_SKEW
from disagg_sim.errors import InputError, as_float
from disagg_sim.facts.faults import source_faults
from disagg_sim.facts.schema import NOT_IN_FILE, Line, Quantity, Range, Written, keys_of, spec_of
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.notebook import Shown
from disagg_sim.units import GB

_Time = Annotated[float, Quantity("s", 0.0, 1.0)]
_Efficiency = Annotated[float, Range(1e-6, 1.0)]
_Skew = Annotated[float, Range(0.0, MOST_SKEW)]
_Deviations = Annotated[float, Range(0.0, 10.0)]
_Imbalance = Annotated[float, Range(1.0, 100.0)]
_Sources = Annotated[tuple[tuple[str, str], ...], Written(dict[str, str], lambda lines: tuple(lines.items()))]
_Memory = Annotated[float, Quantity("B", 0.0, 100 * GB)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec(Shown):
    """Assumptions of one profile. ``None`` for a floor means "as fitted".

    ``fitted`` says whether the efficiencies of the system are used (else every e = 1, q = infinity).
    """

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    fitted: bool
    best_algorithm: bool  # collectives take the fastest algorithm instead of the fitted ring
    gemm_t0: _Time | None  # all of the floor of a GEMM: start, quantising, loop along K [s]
    gemm_t0_cap_static_scales: _Time | None  # cap on the fitted t0 of formats with static scales [s]
    attention_t0: _Time | None  # [s]
    moe_t0: _Time | None  # [s]
    all_reduce_latency: _Time | None  # [s]
    all_to_all_latency: _Time | None  # of dispatch and of combine, each [s]
    elementwise_efficiency: _Efficiency  # share of HBM bandwidth [1]
    elementwise_latency: _Time  # all elementwise kernels of a layer [s]
    with_engine: bool  # add what the engine adds to its kernels; then ``host`` counts without an engine alone
    host: _Time  # per pass; micro-batches and chunks in flight hide each other's [s]
    prefill_imbalance: (
        _Imbalance  # load of the fullest expert rank over the mean; under random routing for memory only [1]
    )
    decode_imbalance: _Imbalance  # [1]
    p2p_latency_inside: _Time  # pipeline hand-over inside an NVLink domain [s]
    p2p_latency_across: _Time  # and across domains [s]
    p2p_efficiency: _Efficiency  # share of the link [1]
    nic_latency: _Time  # one hop of a collective over NICs [s]
    nic_efficiency: _Efficiency  # share of the NIC [1]
    all_reduce_step_latency: _Time  # added per doubling beyond the largest fitted group [s]
    memory_utilisation: _Efficiency  # share of the reported memory that an engine may fill [1]
    runtime_bytes: _Memory  # context, graphs, libraries [B]
    communication_library_bytes: _Memory  # [B]
    resident_deviations: _Deviations  # standard deviations of resident tokens to provision for [1]
    shared_expert_overlaps_dispatch: bool
    all_reduce_hidden_fraction: Annotated[float, Range(0.0, 1.0)]  # of prefill all-reduce [1]
    sources: _Sources  # (key, where the figure comes from)
    random_routing: bool = False  # picks fall on expert ranks at random, in both phases; else as the imbalances say
    expert_skew: _Skew = 0.0  # coefficient of variation of the popularity of experts under random routing [1]
    rank_skew: _Skew = 0.0  # the same for the load of expert ranks; ``expert_skew`` decides which experts are hit [1]
    kv_efficiency_inside: _Efficiency = 1.0  # share of NVLink that the transfer of a cache reaches, in simulations [1]
    kv_efficiency_across: _Efficiency = 1.0  # and of the NIC [1]
    kv_transfer_latency: _Time = 0.0  # of a transfer of a cache, before its descriptors [s]
    kv_descriptor: _Time = 0.0  # posting a block of a tensor of a layer, one after the other [s]


_SKEWED = re.compile(r"(?P<base>.+)_skew(?P<skew>[0-9.e-]+)")


def skewed_profile(name: str, skew: float) -> str:
    """Name a profile whose experts are not equally popular, as ``load_profile`` reads it."""
    return f"{name}_skew{skew:.12g}" if skew else name


def profile_and_skew(name: str) -> tuple[str, float]:
    """Split the name of a profile into its base and the skew of the experts: the inverse of ``skewed_profile``."""
    found = _SKEWED.fullmatch(name)
    return (found["base"], as_float(float(found["skew"]))) if found else (name, 0.0)


def with_skew(spec: ProfileSpec, skew: float) -> ProfileSpec:
    """Make the profile with experts of unequal popularity; it needs random routing."""
    if not spec.random_routing:
        raise InputError(
            f"expert_skew {skew:g} needs a profile of random routing, such as 'measured'; {spec.name!r} is of another"
        )
    if not 0.0 <= skew <= MOST_SKEW:
        raise InputError(f"expert_skew {skew:g} is out of range; allowed: 0 to {MOST_SKEW:g}")
    return replace(spec, name=skewed_profile(spec.name, skew), expert_skew=skew, rank_skew=skew)


def profile_of(path: Path, data: Mapping[str, Any], name: str) -> ProfileSpec:
    """A profile from its file."""
    spec = spec_of(ProfileSpec, path, data, name)
    if unknown := source_faults(
        dict(spec.sources), [key for key in keys_of(ProfileSpec).model_fields if key != "sources"]
    ):
        raise spec_error(path, unknown)
    return spec
