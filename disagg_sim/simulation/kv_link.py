"""Simulate the network between instances: transfers share bandwidth or queue, and may start early.

Physics page, section 8: a cache leaves over the GPUs that hold distinct parts of it, each with a link of
its own, and arrives over those of the receiver.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from disagg_sim.domain import Mapping
from disagg_sim.errors import InputError, nearest
from disagg_sim.physics.kv_path import path_bandwidth, path_of
from disagg_sim.physics.kv_transfer import own_link_bandwidth, unique_gpus
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.engine import FIRST, LAST, Engine

#: How concurrent transfers share a link: equally, or one after the other.
SHARING = ("fair", "fifo")
#: When a cache whose next instance is known leaves: after its segment, chunk by chunk, or layer by layer.
PUSHES = ("whole", "chunk", "layer")


class Wire(NamedTuple):
    """What a transfer takes between two GPUs."""

    bandwidth: float  # one way [B/s]
    latency_s: float  # before the first byte [s]
    descriptor_s: float  # before it, too, of each block of each tensor [s]


class Spine(NamedTuple):
    """Uplinks that the transfers between leaf switches share, each leaf its own, each way."""

    leaf_gpus: int  # GPUs whose NICs meet in one leaf [1]
    uplink: float  # of a leaf, one way [B/s]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The network as a user states it."""

    bandwidth: float | None = (
        None  # one way, per GPU; None: what is reached of NVLink in a domain, else of the NIC [B/s]
    )
    latency_s: float | None = None  # before the first byte; None: as the profile says [s]
    descriptor_s: float | None = None  # then, of each block of each tensor; None: as the profile says [s]
    sharing: str = "fair"  # of ``SHARING``
    push: str = "chunk"  # of ``PUSHES``
    chunk_tokens: int = 2048  # of a push chunk by chunk [token]

    def __post_init__(self) -> None:
        """``InputError`` for values out of range."""
        for name, value, allowed in (("sharing", self.sharing, SHARING), ("push", self.push, PUSHES)):
            if value not in allowed:
                raise InputError(
                    f"link {name} {value!r} is unknown{nearest(value, allowed)}; allowed: {', '.join(allowed)}"
                )
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise InputError(f"link bandwidth must be above 0 B/s, got {self.bandwidth}")
        if self.latency_s is not None and not 0 <= self.latency_s < math.inf:
            raise InputError(f"link latency_s {self.latency_s} is out of range; allowed: from 0 s")
        if self.descriptor_s is not None and not 0 <= self.descriptor_s < math.inf:
            raise InputError(f"link descriptor_s {self.descriptor_s} is out of range; allowed: from 0 s")
        if self.chunk_tokens < 1:
            raise InputError(f"link chunk_tokens {self.chunk_tokens} is out of range; allowed: whole numbers from 1")

    def spine(self, at: Setup, gpus: float) -> Spine | None:
        """The uplinks that a simulated deployment of ``gpus`` shares; None where its NICs are all that counts."""
        system, profile = at.system, at.profile
        leaf, over = system.leaf_gpus, system.spine_oversubscription or 1.0
        if leaf is None or over == 1.0 or not leaf < gpus < math.inf or self.sharing != "fair" or self.bandwidth:
            return None
        return Spine(leaf, leaf * path_bandwidth(system, profile, "spine"))

    def wire(self, at: Setup, gpus: float, *, shared_spine: bool = False) -> Wire:
        """The links of a deployment of ``gpus``, infinity where an NVLink domain cannot hold it.

        One larger than ``leaf_gpus`` of the system has caches cross the spine, at its oversubscription, as if all did
        at once; with ``shared_spine`` a GPU has its whole NIC, and the uplinks are shared (``spine``).

        Where bandwidth or latency are given, the profile adds no costs.
        """
        system, profile = at.system, at.profile
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
        )

    def pieces(self, tokens: int, layers: int) -> int:
        """Pieces in which the cache of ``tokens`` leaves when its receiver is known from the start. [1]"""
        if self.push == "whole":
            return 1
        return max(1, -(-tokens // self.chunk_tokens)) * (layers if self.push == "layer" else 1)


def instance_bandwidth(at: Setup, mapping: Mapping, per_gpu: float) -> float:
    """One way into or out of an instance: that of its GPUs with distinct parts of the cache. [B/s]"""
    return float(unique_gpus(at.model, mapping)) * per_gpu


class _Transfer:
    __slots__ = ("args", "done", "left", "rate", "receiver", "sender", "serial", "since", "started")

    def __init__(self, sender: int, receiver: int, left: float, now: float, done: Callable[..., None], args: Any):
        self.sender, self.receiver = sender, receiver
        self.left = left  # [B]
        self.rate = 0.0  # [B/s]
        self.since = self.started = now  # ``left`` was true then [s]
        self.serial = 0  # of the end that stands; others are stale
        self.done, self.args = done, args


class KvLink:
    """Transfers in flight between instances.

    Each runs at ``min(egress / transfers out of its sender, ingress / transfers into its receiver)``; a
    transfer that shares with nobody costs one event. Rates are shared anew once an instant: the caches of a pass
    leave together, and end together.
    """

    def __init__(self, engine: Engine, *, sharing: str, latency_s: float, spine: Spine | None = None) -> None:
        self.engine, self.sharing, self.latency_s, self.spine = engine, sharing, latency_s, spine
        self._gpus = 0  # of the instances so far, which stand side by side in the order of their starts [1]
        self._leaf: list[int] = []  # of the first GPU of each instance, where there is a spine
        self._up: dict[int, list[_Transfer]] = {}  # by leaf: transfers that leave it, and those that come
        self._down: dict[int, list[_Transfer]] = {}
        self._latency: list[float] = []  # of instances, before the first byte [s]
        self.bandwidth: list[float] = []  # of instances, one way, at present [B/s]
        self.whole: list[float] = []  # the same where nothing has failed [B/s]
        self.in_flight = 0  # transfers [1]
        self._out: list[list[_Transfer]] = []
        self._in: list[list[_Transfer]] = []
        self._out_free: list[float] = []
        self._in_free: list[float] = []
        self._senders: dict[int, None] = {}  # whose transfers wait for new rates; in the order of their changes
        self._receivers: dict[int, None] = {}

    def join(self, bandwidth: float, latency_s: float | None = None, gpus: int = 1) -> None:
        """Add the next instance [B/s], by default with the latency of all; of two that differ the larger counts. [s]

        With a spine it stands behind those before it, on ``gpus`` GPUs, and counts at the leaf of the first.
        """
        if self.spine is not None:
            self._leaf.append(self._gpus // self.spine.leaf_gpus)
            self._gpus += gpus
        self._latency.append(self.latency_s if latency_s is None else latency_s)
        self.bandwidth.append(bandwidth)
        self.whole.append(bandwidth)
        self._out.append([])
        self._in.append([])
        self._out_free.append(0.0)
        self._in_free.append(0.0)

    def limit(self, instance: int, share: float) -> None:
        """The link of an instance has a share of its bandwidth from now on [1]; at 0 what is on its way waits."""
        self.bandwidth[instance] = share * self.whole[instance]
        self._changed(instance, instance)

    def hidden_bytes(
        self, sender: int, receiver: int, total: float, pieces: int, window_s: float, post_s: float = 0.0
    ) -> float:
        """Bytes of a push in ``pieces`` that have arrived when the last piece becomes ready. [B]

        Pieces become ready evenly over ``window_s``, the time from the start to the end of the segment that
        makes them, and leave at the rate that the link would give one more transfer now, each after its share of
        ``post_s``, the time that all descriptors take.
        """
        if pieces <= 1 or not (self.bandwidth[sender] and self.bandwidth[receiver]):
            return 0.0
        before = (pieces - 1) / pieces
        rate = min(
            self.bandwidth[sender] / (len(self._out[sender]) + 1),
            self.bandwidth[receiver] / (len(self._in[receiver]) + 1),
        )
        if self.spine is not None and self._crosses(sender, receiver):
            beside = (self._up.get(self._leaf[sender], ()), self._down.get(self._leaf[receiver], ()))
            rate = min(rate, self.spine.uplink / (max(map(len, beside)) + 1))
        return min(before * total, before * window_s * total / (total / rate + post_s))

    def send(
        self, sender: int, receiver: int, size: float, post_s: float, done: Callable[..., None], *args: Any
    ) -> None:
        """Move ``size`` [B], whose descriptors take ``post_s``; call ``done(*args)`` when the last byte has arrived."""
        now = self.engine.now + max(self._latency[sender], self._latency[receiver]) + post_s
        self.in_flight += 1
        if self.sharing == "fifo":
            begin = max(now, self._out_free[sender], self._in_free[receiver])
            end = begin + size / min(self.bandwidth[sender], self.bandwidth[receiver])
            self._out_free[sender] = self._in_free[receiver] = end
            self.engine.at(end, FIRST, self._arrived, done, args)
            return
        transfer = _Transfer(sender, receiver, size, now, done, args)
        outgoing, incoming = self._out[sender], self._in[receiver]
        outgoing.append(transfer)
        incoming.append(transfer)
        crosses = self._crosses(sender, receiver)
        if crosses:
            self._up.setdefault(self._leaf[sender], []).append(transfer)
            self._down.setdefault(self._leaf[receiver], []).append(transfer)
        if len(outgoing) == 1 and len(incoming) == 1 and not crosses:
            self._pace(transfer, now)
        else:
            self._changed(sender, receiver)

    def _crosses(self, sender: int, receiver: int) -> bool:
        """Whether a transfer takes uplinks."""
        return self.spine is not None and self._leaf[sender] != self._leaf[receiver]

    def _changed(self, sender: int, receiver: int) -> None:
        """Transfers of both ends get new rates when all that happens now has happened."""
        if not self._senders:
            self.engine.at(self.engine.now, LAST, self._share)
        self._senders[sender] = self._receivers[receiver] = None

    def _share(self) -> None:
        """Bring the transfers of all changed ends to their new rates."""
        now, senders, receivers = self.engine.now, self._senders, self._receivers
        self._senders, self._receivers = {}, {}
        for sender in senders:
            for transfer in self._out[sender]:
                self._pace(transfer, now)
        for receiver in receivers:
            for transfer in self._in[receiver]:
                if transfer.sender not in senders:
                    self._pace(transfer, now)
        if self.spine is not None:
            leaves = {self._leaf[each] for each in (*senders, *receivers)}
            for beside in (self._up, self._down):
                for leaf in sorted(leaves & beside.keys()):
                    for transfer in beside[leaf]:
                        self._pace(transfer, now)

    def _pace(self, transfer: _Transfer, now: float) -> None:
        sender, receiver = transfer.sender, transfer.receiver
        rate, most = self.bandwidth[sender] / len(self._out[sender]), self.bandwidth[receiver] / len(self._in[receiver])
        rate = min(rate, most)
        if self.spine is not None and self._crosses(sender, receiver):
            up, down = self._up[self._leaf[sender]], self._down[self._leaf[receiver]]
            rate = min(rate, self.spine.uplink / max(len(up), len(down)))
        if rate == transfer.rate:
            return
        if now > transfer.since:
            transfer.left = max(0.0, transfer.left - transfer.rate * (now - transfer.since))
            transfer.since = now
        transfer.rate = rate
        transfer.serial += 1
        if rate > 0:  # else it waits until the link is back
            self.engine.at(transfer.since + transfer.left / rate, FIRST, self._ended, transfer, transfer.serial)

    def _ended(self, transfer: _Transfer, serial: int) -> None:
        if serial != transfer.serial:
            return
        sender, receiver = transfer.sender, transfer.receiver
        self._out[sender].remove(transfer)
        self._in[receiver].remove(transfer)
        crossed = self._crosses(sender, receiver)
        if crossed:
            self._up[self._leaf[sender]].remove(transfer)
            self._down[self._leaf[receiver]].remove(transfer)
        if crossed or self._out[sender] or self._in[receiver]:
            self._changed(sender, receiver)
        self.in_flight -= 1
        transfer.done(*transfer.args)

    def _arrived(self, done: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.in_flight -= 1
        done(*args)
