"""Describe the network between instances.

Physics page, section 8: the GPUs of the sender that hold distinct parts of a cache each send over their own link, and
the GPUs of the receiver each receive over theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, check_kinds, check_word
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.kv_transfer import own_link_bandwidth, path_bandwidth, path_of, unique_gpus
from disagg_sim.physics.setup import Setup

#: When a cache whose next instance is known leaves: after its segment, chunk by chunk, or layer by layer.
PUSHES = ("whole", "chunk", "layer")


class Wire(NamedTuple):
    """Link of a GPU, as a transfer uses it."""

    bandwidth: float  # one way [B/s]
    latency_s: float  # before the first byte [s]
    descriptor_s: float  # before it, too, of each block of each tensor [s]
    inside: bool = False  # an NVLink domain: not the port by which blocks go to shared tiers


class Spine(NamedTuple):
    """Uplinks of a leaf switch, each way, which its transfers to other leaves share."""

    leaf_gpus: int  # GPUs whose NICs meet in one leaf [1]
    uplink: float  # of a leaf, one way [B/s]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The network as a user states it."""

    #: One way, per GPU; None: what is reached of NVLink in a domain, else of the NIC. [B/s]
    bandwidth: float | None = None
    latency_s: float | None = None  # before the first byte; None: as the profile says [s]
    descriptor_s: float | None = None  # then, of each block of each tensor; None: as the profile says [s]
    push: str = "chunk"  # of ``PUSHES``
    chunk_tokens: int = 2048  # of a push chunk by chunk [token]
    spine_oversubscription: float | None = None  # NICs of a leaf over its uplinks; None: as the system's file says [1]

    def __post_init__(self) -> None:
        """``InputError`` for values out of range."""
        check_kinds(self)
        check_word("link push", self.push, PUSHES)
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise InputError(f"link bandwidth must be above 0 B/s, got {self.bandwidth}")
        if self.latency_s is not None and not 0 <= self.latency_s < math.inf:
            raise InputError(f"link latency_s {self.latency_s} is out of range; allowed: from 0 s")
        if self.descriptor_s is not None and not 0 <= self.descriptor_s < math.inf:
            raise InputError(f"link descriptor_s {self.descriptor_s} is out of range; allowed: from 0 s")
        over = self.spine_oversubscription
        if over is not None and not 1.0 <= over < math.inf:
            raise InputError(f"link spine_oversubscription {over} is out of range; allowed: from 1")
        if self.chunk_tokens < 1:
            raise InputError(f"link chunk_tokens {self.chunk_tokens} is out of range; allowed: whole numbers from 1")

    def spine(self, at: Setup, gpus: float) -> Spine | None:
        """Find the uplinks that a simulated deployment of ``gpus`` shares; None if only its NICs limit transfers."""
        system, profile = self._on(at.system), at.profile
        leaf, over = system.leaf_gpus, system.spine_oversubscription or 1.0
        if leaf is None or over == 1.0 or not leaf < gpus < math.inf or self.bandwidth:
            return None
        return Spine(leaf, leaf * path_bandwidth(system, profile, "spine"))

    def _on(self, system: SystemSpec) -> SystemSpec:
        """The system with the spine of this network."""
        over = self.spine_oversubscription
        return system if over is None else replace(system, spine_oversubscription=over)

    def wire(self, at: Setup, gpus: float, *, shared_spine: bool = False) -> Wire:
        """Find the link of a GPU in a deployment of ``gpus`` (infinity: larger than an NVLink domain).

        Above ``leaf_gpus`` caches cross the spine at its oversubscription, as if all did at once; with ``shared_spine``
        a GPU has its whole NIC, and ``spine`` limits the uplinks. A stated bandwidth or latency replaces the costs of
        the profile.
        """
        system, profile = self._on(at.system), at.profile
        inside = gpus <= system.nvlink_domain
        link = own_link_bandwidth(system, profile, within_domain=inside)
        if path_of(system, gpus) == "spine" and not (shared_spine and self.spine(at, gpus)):
            link /= system.spine_oversubscription or 1.0
        hop = profile.p2p_latency_inside if inside else profile.p2p_latency_across
        descriptor = self.descriptor_s or 0.0
        if self.bandwidth is None and self.latency_s is None:
            link *= profile.kv_efficiency_inside if inside else profile.kv_efficiency_across
            hop += profile.kv_transfer_latency
            descriptor = profile.kv_descriptor if self.descriptor_s is None else descriptor
        return Wire(
            bandwidth=link if self.bandwidth is None else self.bandwidth,
            latency_s=hop if self.latency_s is None else self.latency_s,
            descriptor_s=descriptor,
            inside=inside and self.bandwidth is None,
        )

    def pieces(self, tokens: int, layers: int) -> int:
        """Count the pieces in which the cache of ``tokens`` is sent if its receiver is known from the start. [1]"""
        if self.push == "whole":
            return 1
        return max(1, -(-tokens // self.chunk_tokens)) * (layers if self.push == "layer" else 1)


def instance_bandwidth(at: Setup, mapping: Sharding, per_gpu: float) -> float:
    """Find the bandwidth of an instance, one way: of its GPUs with distinct parts of the cache. [B/s]"""
    return float(unique_gpus(at.model, mapping)) * per_gpu
