"""Move caches from prefill to decode: the links that instances share, and what a hand-over adds to TTFT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.physics.kv_transfer import descriptors, post_share, unique_gpus
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric
from disagg_sim.planning.pools import Cache, DecodeChoice, Link, PrefillChoice
from disagg_sim.planning.question import MOST_GPUS
from disagg_sim.planning.queueing import BETWEEN, MIDDLES, Delay, without_queue
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kv_link import LinkSpec, Wire
from disagg_sim.techniques.encode.plan import EncodeChoice, Encoding
from disagg_sim.techniques.split.search import SplitGrid


def wire_of(at: Setup, prefill_at: Setup, gpus: int, max_nic: float | None) -> Wire:
    """What a transfer of a cache takes between two GPUs of a deployment of ``gpus``."""
    wires = [LinkSpec().wire(each, gpus if prefill_at is at else MOST_GPUS) for each in (at, prefill_at)]
    slower = min(wires, key=lambda wire: wire.bandwidth)
    if max_nic is None:
        return slower
    return slower._replace(bandwidth=min(slower.bandwidth, max_nic), inside=False)  # all that leaves a GPU counts


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
    """The choices with the links between them; new blocks for a shared tier leave by the same port, if not NVLink."""
    link, leaves = Link(cache, wire), cache.size if wire.inside else cache.size + cache.stored
    senders = [replace(each, link_rate=_moved(each, wire.bandwidth) / leaves, link=link) for each in prefill]
    return senders, [replace(each, link_rate=_moved(each, wire.bandwidth) / cache.size) for each in decode]


def transfer_between(sender: PrefillChoice, taker: DecodeChoice) -> float:
    """Time in which the cache of a mean prompt moves, for which the receiver first posts a descriptor a piece. [s]"""
    assert sender.link is not None
    cache, wire = sender.link
    posted = cache.pieces * wire.descriptor_s * _posts(sender.at, sender.mapping, taker.mapping)
    return wire.latency_s + posted + max(1.0 / sender.link_rate, 1.0 / taker.link_rate)


def hand_over(transfer: Numeric, step: Numeric, ahead: int = 0, until: Numeric = 0.5, left: Numeric = 0.5) -> Numeric:
    """Time from the end of prefill to the first token, by the times of a transfer and of a step. [s]

    The first token comes from decode, whose scheduler reserves room and looks for caches between two steps. So TTFT has
    in it what is left of a step ``until`` room is reserved, half of it on average; the transfer and what is then
    ``left`` of a step: all of one step, or half a step more than a longer transfer; and a step, after as many as are
    formed ``ahead``.

    >>> float(hand_over(0.0, 2.0)), float(hand_over(3.0, 2.0)), float(hand_over(3.0, 2.0, 1))
    (5.0, 7.0, 9.0)
    """
    found: Numeric = (1 + ahead + until) * step + np.where(transfer <= step, step, transfer + left * step)
    return found


@lru_cache(maxsize=1024)
def running_steps(taker: DecodeChoice, rate: float, instances: int) -> tuple[Floats, Floats]:
    """Times of steps of the sequences that run at a rate [request/s], drafts verified [s], and their probabilities."""
    found = taker.occupied(rate, instances)
    steps = np.interp(found.number, taker.batch, taker.step)
    return steps * float(taker.at.accepted_length(taker.mapping.draft_tokens)), found.share


@lru_cache(maxsize=1024)
def _hand_overs(taker: DecodeChoice, rate: float, instances: int, transfer: float) -> Delay:
    """Hand-overs to a decode pool, which begin and end anywhere in a step."""
    step, until, left = np.ix_(without_queue(*running_steps(taker, rate, instances)).calm, MIDDLES, MIDDLES)
    found = hand_over(transfer, step, taker.at.steps_ahead(taker.mapping), until, left)
    return without_queue(found.ravel(), np.multiply.outer(np.outer(BETWEEN, BETWEEN), BETWEEN).ravel())


@lru_cache(maxsize=4096)  # one choice behind so many encoders is one choice, at every rate
def behind(sender: PrefillChoice, encode: EncodeChoice, gpus: int) -> PrefillChoice:
    """The same, whose requests pass so many GPUs that encode before."""
    return replace(sender, encode=Encoding(encode, gpus))


@lru_cache(maxsize=4096)  # of one choice, so that its delays are found again
def handing(sender: PrefillChoice, taker: DecodeChoice, rate: float, instances: int) -> PrefillChoice:
    """The same, whose caches go to a decode pool at a rate. [request/s]"""
    if sender.link is None:
        return sender
    transfer = transfer_between(sender, taker)
    queued = sender if sender.parts is None else _sending(sender, transfer)
    return replace(queued, hand_over=_hand_overs(taker, rate, instances, transfer), queued=queued)


@lru_cache(maxsize=1024)
def _sending(sender: PrefillChoice, transfer: float) -> PrefillChoice:
    """The same, whose caches take so many seconds on average. [s]"""
    return replace(sender, transfer=transfer)


def least_hand_over(prefill: Sequence[PrefillChoice], decode: Sequence[DecodeChoice]) -> float:
    """The least time from the end of prefill to the first token, with one sequence in a step; 0 without choices. [s]"""
    found = [
        hand_over(
            transfer_between(one, to),
            to.step[0] * to.at.accepted_length(to.mapping.draft_tokens),
            to.at.steps_ahead(to.mapping),
        )
        for one, to in product((each for each in prefill if each.link is not None), decode)
    ]
    return float(min(found, default=0.0))


def _moved(choice: PrefillChoice | DecodeChoice, bandwidth: float) -> float:
    """What an instance moves of caches over the links of its GPUs with distinct parts. [B/s]"""
    return bandwidth * _apart(choice.at, choice.mapping)


@lru_cache(maxsize=4096)
def _apart(at: Setup, mapping: Sharding) -> float:
    return float(unique_gpus(at.model, mapping))


@lru_cache(maxsize=4096)
def _posts(at: Setup, sender: Sharding, receiver: Sharding) -> float:
    return float(post_share(at.model, sender, receiver))
