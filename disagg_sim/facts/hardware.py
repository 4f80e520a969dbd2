"""A GPU system as its vendor describes it: chip, NVLink domain, scale-out network; what a node draws beside its GPUs.

Powers of hosts, fans, supplies, network and cooling come from published models, not from measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from disagg_sim.errors import InputError, nearest, quoted
from disagg_sim.facts.schema import (
    NOT_IN_FILE,
    Line,
    NotEmpty,
    OneOf,
    Quantity,
    Range,
    Span,
    faults_of_sources,
    spec_of,
)
from disagg_sim.facts.traffic import HBM
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.notebook import Shown
from disagg_sim.units import GB, GIB, KB, TB, TERA

_Watts = Annotated[float, Quantity("W", 0.0, 1e6)]
_Share = Annotated[float, Range(0.0, 1.0)]
_Count = Annotated[int, Range(1, 10_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Converters:
    """Converters of direct current in front of the GPUs of a rack."""

    count: _Count
    capacity: _Watts  # output of one [W]
    loads: Annotated[tuple[_Share, ...], NotEmpty]  # rising shares of the capacity [1]
    losses: Annotated[tuple[_Watts, ...], NotEmpty]  # of one converter at these loads [W]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fans:
    """Fans whose speed rises with the heat of GPUs and host."""

    rated: _Watts  # at full speed [W]
    slowest: _Share  # speed without heat [1]
    fastest: _Share  # speed at ``heat`` and beyond [1]
    heat: _Watts  # [W]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePower:
    """A chassis or a rack: ``wall = (GPUs + host + fans + converters)/eta + network``, facility = wall*PUE."""

    gpus: _Count
    host: _Watts  # CPUs, memory, drives, switches, NICs, where GPUs of one node work together [W]
    host_across: _Watts  # the same where those of several do [W]
    network: _Watts  # share in external switches and optics [W]
    network_across: _Watts  # [W]
    fans: Fans | None = None
    converters: Converters | None = None
    supply_capacity: _Watts  # of all supplies that share the load [W]
    supply_loads: Annotated[tuple[_Share, ...], NotEmpty]  # rising shares of it [1]
    supply_efficiency: Annotated[tuple[_Share, ...], NotEmpty]  # at these loads [1]
    pue: Annotated[float, Range(1.0, 3.0)]

    @property
    def links(self) -> float:
        """What NICs, switches and optics draw more for traffic between nodes. [W]"""
        return self.host_across - self.host + self.network_across - self.network


#: Arithmetic that a chip may have.
ARITHMETICS = ("bf16", "fp8", "nvfp4", "int8", "tf32", "fp32")
#: A nominal size in GB often counts GiB, so that a driver reports up to that much more. [1]
BINARY_GB = GIB / GB
#: Numbers are written with some five digits. [1]
ROUNDING = 1.0001

_Peak = Annotated[float, Quantity("FLOP/s", TERA, 1e6 * TERA)]
_Peaks = Annotated[Mapping[Annotated[str, OneOf(ARITHMETICS)], _Peak], NotEmpty]
_Link = Annotated[float, Quantity("B/s", 0.1 * GB, 100 * TB)]
_Memory = Annotated[float, Quantity("B", GB, 10 * TB)]


#: How tiers below HBM get what they hold: every block, or what the tier above forgets.
WRITES = ("through", "back")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTier:
    """Memory below HBM that keeps the caches of prefixes; shares of one GPU."""

    bandwidth: _Link  # into HBM [B/s]
    latency_s: Annotated[float, Range(0.0, 1.0, "s")]  # of a load, looking it up included [s]
    capacity: Annotated[float, Quantity("B", GB, 1e6 * TB)] | None = None  # None = as much as is needed [B]
    shared: bool = False  # whether all instances find what any of them has put there


@dataclass(frozen=True, kw_only=True)
class SystemSpec(Shown):
    """One GPU and the links around it. Peaks are dense; links are one way, per GPU."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    vendor: Line
    architecture: Line  # generation of the chip: spreads of fits carry over between equal ones
    peak_flops: _Peaks  # arithmetic ("bf16", "fp8", "nvfp4", ...) -> [FLOP/s]; absent = unsupported
    hbm_capacity: _Memory  # nominal [B]
    hbm_reported: _Memory  # what the driver reports: the usable size [B]
    hbm_visible: _Memory | None = None  # of it, what a process may allocate; None = all that is reported [B]
    hbm_bandwidth: Annotated[float, Quantity("B/s", 10 * GB, 100 * TB)]  # [B/s]
    l2_capacity: Annotated[float, Quantity("B", KB, 10 * GB)]  # [B]
    sm_count: _Count  # [1]
    attention_tile_rows: _Count  # query rows of a thread block of prefill attention [token]
    nvlink_bandwidth: _Link  # [B/s]
    nvlink_domain: _Count  # GPUs of one scale-up domain [1]
    node_gpus: _Count | None = (
        None  # of one host, where its NVLink domain has those of several; None = the domain's [1]
    )
    in_switch_reduction: bool  # whether switches of the domain add up an all-reduce
    nic_bandwidth: _Link  # [B/s]
    leaf_gpus: _Count | None = None  # whose NICs meet in leaf switches of their rails; None = all of a site [1]
    spine_oversubscription: Annotated[float, Range(1.0, 1000.0)] | None = None  # NICs of a leaf over its uplinks [1]
    engine: Line  # that is taken where none is named (``hw_specs/engines/``)
    tdp: Annotated[float, Quantity("W", 10.0, 10_000.0)]  # [W]
    power_cap: Annotated[float, Quantity("W", 10.0, 10_000.0)] | None = None  # set below the TDP; None = none [W]
    usd_per_gpu_hour: Annotated[tuple[float, float] | None, Span(0.0, 1000.0)]  # low and high market price [USD/h]
    node_power: NodePower | None = None  # of a node beside its GPUs; None = not known
    kv_tiers: Mapping[str, KvTier] = field(default_factory=dict)  # dram, ssd, remote: what a node has beside its GPUs
    confidence: Line
    sources: Mapping[str, str]  # key -> where its figure comes from

    def tier(self, name: str) -> KvTier | None:
        """Find a tier by its name; None = HBM, where a past needs no load."""
        if name == HBM:
            return None
        if name not in self.kv_tiers:
            known = (HBM, *self.kv_tiers)
            said = f"{self.name} has no tier {name!r}{nearest(name, known)}; allowed: {', '.join(known)}"
            raise InputError(f"{said} (kv_tiers of its file)")
        return self.kv_tiers[name]

    @property
    def vector_flops(self) -> float:
        """FP32 peak, which goes with multiprocessors and clock; none told: 1/16 of BF16, as on the A100. [FLOP/s]"""
        return self.peak_flops.get("fp32", self.peak_flops["bf16"] / 16.0)

    @property
    def host_gpus(self) -> int:
        """GPUs of one host. [1]"""
        return self.node_gpus or self.nvlink_domain


#: Least cap, as a share of the TDP, at which ``physics.power.slowed`` was met by published runs. [1]
LEAST_CAP = 0.7

_WORDS = ("title", "vendor", "architecture", "confidence")  # need no source


def system_of(path: Path, data: Mapping[str, Any], name: str) -> SystemSpec:
    """A system from its file; every figure must have a source."""
    spec = spec_of(SystemSpec, path, data, name)
    found = faults_of_sources(SystemSpec, spec.sources, data, _WORDS)
    if spec.hbm_reported > spec.hbm_capacity * BINARY_GB * ROUNDING:
        found.append(
            f"hbm_reported: {quoted(data['hbm_reported'])} is above hbm_capacity {quoted(data['hbm_capacity'])}, "
            "even where its GB are GiB"
        )
    if spec.power_cap is not None and not LEAST_CAP * spec.tdp <= spec.power_cap <= spec.tdp:
        found.append(
            f"power_cap: {quoted(data['power_cap'])} is not from {LEAST_CAP:g} times the tdp {quoted(data['tdp'])} to "
            "it: below, no published slowdown follows the law of clocks"
        )
    if found:
        raise spec_error(path, found)
    return spec
