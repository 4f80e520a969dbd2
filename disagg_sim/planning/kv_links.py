"""Move caches from prefill to decode: the links that instances share, and what a hand-over adds to TTFT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.kv_transfer import descriptors, post_share, unique_gpus
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.pool_choice import gpus_of
from disagg_sim.planning.pools import DecodeChoice, PrefillChoice
from disagg_sim.planning.question import MOST_GPUS
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kv_link import LinkSpec, Wire
from disagg_sim.techniques.split.search import SplitGrid


def wire_of(at: Setup, prefill_at: Setup, gpus: int, max_nic: float | None) -> Wire:
    """What a transfer of a cache takes between two GPUs of a deployment of ``gpus``."""
    wires = [LinkSpec().wire(each, gpus if prefill_at is at else MOST_GPUS) for each in (at, prefill_at)]
    slower = min(wires, key=lambda wire: wire.bandwidth)
    if max_nic is None:
        return slower
    return slower._replace(bandwidth=min(slower.bandwidth, max_nic), inside=False)  # all that leaves a GPU counts


#: A decode configuration may be taken that serves up to this many times fewer requests a GPU than the best: a choice,
#: as pools are sized apart. [1]
LIKELY = 1.25


class Cache(NamedTuple):
    """What moves for a prompt, on average."""

    size: float  # [B]
    pieces: float  # blocks of each tensor of each layer [1]
    stored: float = 0.0  # that goes to a shared tier meanwhile, by the same port of the sender [B]


def cache_of(grid: PhaseGrid | SplitGrid, sender: PhaseGrid) -> Cache:
    """The cache that a prompt of ``sender`` sends to a decode instance of a grid."""
    model = grid.setup.cached_layers

    def pieces(tokens: float) -> float:
        return float(descriptors(model, math.ceil(tokens), BLOCK_TOKENS))

    moved = grid.lengths.mean_over_prompts(pieces)
    return Cache(grid.kv_bytes_per_request, moved, sender.stored_bytes_per_request)


def linked(
    prefill: Sequence[PrefillChoice], decode: Sequence[DecodeChoice], cache: Cache, wire: Wire
) -> tuple[list[PrefillChoice], list[DecodeChoice]]:
    """The choices with the links between them, which move a cache for each prompt.

    The first token comes from decode, whose scheduler reserves room and looks for caches between two steps. So TTFT has
    in it half a step until room is reserved; the transfer, for which the receiver first posts a descriptor a piece, and
    what is then left of a step: all of one step, or half a step more than a longer transfer; and a step. Pools are
    sized apart, so these are the longest of the decode configurations that serve nearly the most requests a GPU; a
    design says TTFT with steps of what runs in its own pool (``running_step``). New blocks that go to a shared tier
    take their part of the sender's port, unless caches move over NVLink.
    """
    bandwidth, kv_bytes = wire.bandwidth, cache.size
    leaves = kv_bytes if wire.inside else kv_bytes + cache.stored
    takers = [replace(each, link_rate=_moved(each, bandwidth) / kv_bytes) for each in decode]
    served = [each.most / gpus_of(each) for each in takers]
    best = max(served, default=0.0)
    likely = [(each, _step(each)) for each, rate in zip(takers, served, strict=True) if rate * LIKELY >= best]
    posts: dict[tuple[int, ...], float] = {}  # by what they depend on [1]

    def posted(sender: PrefillChoice, taker: DecodeChoice) -> float:
        to = taker.mapping
        key = (sender.mapping.tp_attn, to.tp_attn, to.pp, to.dcp)
        if key not in posts:
            posts[key] = _posts(sender.at, sender.mapping, to)
        return cache.pieces * wire.descriptor_s * posts[key]

    senders = []
    for each in prefill:
        rate = _moved(each, bandwidth) / leaves
        moved = ((wire.latency_s + posted(each, to) + max(1.0 / rate, 1.0 / to.link_rate), step) for to, step in likely)
        ends = ((hand_over(time, step), time) for time, step in moved)
        taken, time = max(ends, default=(0.0, 0.0))
        senders.append(replace(each, link_rate=rate, hand_over=taken, transfer=time))
    return senders, takers


def hand_over(transfer: float, step: float) -> float:
    """Time from the end of prefill to the first token, by the times of a transfer and of a step, see ``linked``. [s]

    >>> hand_over(0.0, 2.0), hand_over(3.0, 2.0)
    (5.0, 7.0)
    """
    return 1.5 * step + (step if transfer <= step else transfer + step / 2)


def _step(taker: DecodeChoice) -> float:
    """Time of a step at the highest rate that is planned, in which every sequence has its drafts verified. [s]"""
    step = np.interp(taker.most, np.maximum.accumulate(taker.completed), taker.step)
    return float(step) * float(taker.at.accepted_length(taker.mapping.draft_tokens))


def running_step(taker: DecodeChoice, rate: float, instances: int) -> float:
    """Time of a step of as many sequences as run at a rate [request/s], at the percentile of TTFT, as ``_step``. [s]"""
    running = taker.occupied(rate, instances).at(taker.work.ttft.share)
    return float(np.interp(running, taker.batch, taker.step) * taker.at.accepted_length(taker.mapping.draft_tokens))


@lru_cache(maxsize=64)  # of one choice, so that its delays are found again
def handing(sender: PrefillChoice, step: float) -> PrefillChoice:
    """The same, whose caches go to decode in steps of so many seconds."""
    return replace(sender, hand_over=hand_over(sender.transfer, step))


def _moved(choice: PrefillChoice | DecodeChoice, bandwidth: float) -> float:
    """What an instance moves of caches over the links of its GPUs with distinct parts. [B/s]"""
    return bandwidth * _apart(choice.at, choice.mapping)


@lru_cache(maxsize=4096)
def _apart(at: Setup, mapping: Sharding) -> float:
    return float(unique_gpus(at.model, mapping))


@lru_cache(maxsize=4096)
def _posts(at: Setup, sender: Sharding, receiver: Sharding) -> float:
    return float(post_share(at.model, sender, receiver))
