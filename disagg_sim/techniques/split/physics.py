r"""Time a decode step whose layers are split over two pools: attention ranks and feed-forward ranks.

The attention pool holds caches, projections and routers, the feed-forward pool experts and dense layers; m
micro-batches of the sequences alternate between them, so that one is in attention while another is in the feed-forward
part (MegaScale-Infer, arXiv 2504.02263, section 4; Step-3, arXiv 2507.19427). With the times :math:`t_A` and
:math:`t_F` of the halves of a layer, :math:`t_x` of both crossings together, :math:`c = t_A + t_F + t_x` and
:math:`t_m = \max(t_A, t_F)`,

.. math:: TTL = \sum_l \max(m\,t_m, c) + \max(0, c + (m-1)\,t_m - \max(m\,t_m, c))

where the last term is for the last layer alone. Where :math:`m\,t_m \ge c` in equal layers it is the law of a full
pipeline, :math:`c + t_m (m L - 1)`; for m = 1 every half waits for the other, :math:`L c`.
All micro-batches advance one token in a step, with the host time of one step: they are parts of one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.attention import NoAttention
from disagg_sim.facts.ffn import NoFfn
from disagg_sim.facts.layers import LayerKind
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import elementwise, layer_of, layers_of
from disagg_sim.physics.blocks.base import Layer
from disagg_sim.physics.cost import exchange_cost, total_cost
from disagg_sim.physics.kv_transfer import own_link_bandwidth
from disagg_sim.physics.memory import decode_bytes
from disagg_sim.physics.passes.engine_time import host_time
from disagg_sim.physics.passes.layers import attention_cost, routed_time
from disagg_sim.physics.residents import CachedTokens
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, tabulate
from disagg_sim.physics.work import Numeric, Tokens, all_reduce, embedding, head


class Split(NamedTuple):
    """How the layers of an instance are split; numbers, or columns of shape (rows, 1)."""

    attention: Sharding  # tp_attn x dp_attn GPUs
    ffn: Sharding  # dp_attn groups of tp_attn GPUs for dense layers, ep for experts
    microbatches: Numeric  # m, in the ping-pong [1]

    @property
    def gpus(self) -> Numeric:
        """GPUs of both pools. [1]"""
        return self.attention.gpus + self.ffn.gpus


class Halves(NamedTuple):
    """Times of the halves of one layer of each kind, for one micro-batch, and of the model's ends. [s]"""

    attention: tuple[Numeric, ...]
    ffn: tuple[Numeric, ...]
    crossing: tuple[Numeric, ...]  # there and back together
    ends: Numeric  # embedding and head, on the attention ranks


class SplitStep(NamedTuple):
    """Times of one decode step over both pools, of the broadcast shape of split and batch."""

    ttl: Numeric  # [s]
    attention_idle: Numeric  # share of the step in which an attention rank waits [1]
    ffn_idle: Numeric  # and a feed-forward rank [1]
    crossing: Numeric  # of all crossings of one micro-batch, hidden or not [s]


def split_step(
    at: Setup,
    at_ffn: Setup,
    split: Split,
    *,
    sequences: Numeric,
    context: Numeric,
    mla_form: str = "auto",
    fullest: Numeric | None = None,
) -> SplitStep:
    """Time one decode step of m micro-batches of ``sequences`` on each attention rank, at mean length ``context``.

    The docstring of this module has the equation. Attention takes as long as its ``fullest`` rank, whose micro-batches
    have so many sequences (None = all are equal), and feed-forward ranks as long as all tokens.
    """
    rows = np.shape(split.microbatches)[0] if np.ndim(split.microbatches) else 0
    if rows:
        sequences = np.broadcast_to(sequences, (rows, np.shape(sequences)[-1]))
    times = halves(at, at_ffn, split, sequences=sequences, context=context, mla_form=mla_form, fullest=fullest)
    counts, last = at.model.kind_counts, at.model.kinds.index(at.model.layers[-1])
    m = split.microbatches
    layers, (attention, ffn, crossing) = ping_pong(times, counts, last, m)
    total = sequences * split.attention.dp_attn * m
    ttl = at.lengthened(layers + m * times.ends + host_time(at, split.attention, total), total)
    busy = m * (attention + times.ends)
    return SplitStep(ttl, 1.0 - busy / ttl, 1.0 - m * ffn / ttl, crossing)


def ping_pong(
    times: Halves, counts: tuple[int, ...], last: int, microbatches: Numeric
) -> tuple[Numeric, tuple[Numeric, Numeric, Numeric]]:
    """Time the layers of one step of all micro-batches, by the equation in the docstring of this module. [s]

    Also sums the attention halves, feed-forward halves and crossings of one micro-batch over all layers [s].
    """
    total: Numeric = 0.0
    sums: list[Numeric] = [0.0, 0.0, 0.0]
    for kind, count in enumerate(counts):
        parts = times.attention[kind], times.ffn[kind], times.crossing[kind]
        sums = [before + count * part for before, part in zip(sums, parts, strict=True)]
        longer, through = np.maximum(parts[0], parts[1]), parts[0] + parts[1] + parts[2]
        period = np.maximum(microbatches * longer, through)
        total = total + count * period
        if kind == last:
            total = total + np.maximum(through + (microbatches - 1) * longer - period, 0.0)
    return total, (sums[0], sums[1], sums[2])


def halves(
    at: Setup,
    at_ffn: Setup,
    split: Split,
    *,
    sequences: Numeric,
    context: Numeric,
    mla_form: str = "auto",
    fullest: Numeric | None = None,
) -> Halves:
    """Time both halves of a layer of each kind and the crossings between them, for one micro-batch. [s]"""
    own = sequences if fullest is None else np.maximum(fullest, sequences)
    rank, total = DistinctCounts(own), DistinctCounts(sequences * split.attention.dp_attn)

    def attention(tp: Numeric, tokens: Numeric, context: Numeric) -> tuple[tuple[Numeric, ...], Numeric]:
        return _attention_half(at, tp, Tokens(decodes=tokens, context=context, emitted=tokens), mla_form)

    def ffn(tp: Numeric, groups: Numeric, tokens: Numeric) -> tuple[Numeric, ...]:
        return _ffn_half(at_ffn, tp, tokens / groups)

    mine, ends = tabulate(attention, (split.attention.tp_attn,), rank, context)
    theirs = list(tabulate(ffn, (split.ffn.tp_attn, split.ffn.dp_attn), total))
    for kind, (layer, count) in enumerate(layers_of(at.model)):
        if layer.ffn.picks:
            theirs[kind] = theirs[kind] + routed_time(at_ffn, layer.ffn, count, split.ffn, "decode", total)[0]
    across = tuple(crossing_time(at, at_ffn, split, layer, total.arguments[0]) for layer, _ in layers_of(at.model))
    return Halves(mine, tuple(theirs), across, ends)


def _attention_half(at: Setup, tp: Numeric, tokens: Tokens, form: str) -> tuple[tuple[Numeric, ...], Numeric]:
    """Time attention, router and all-reduce of one layer of each kind; then embedding and head together. [s]"""
    model, precision, linear = at.model, at.precision, tokens.linear
    absorbed = linear if form in ("auto", "absorbed") else 0.0
    found: list[Numeric] = []
    for layer, _ in layers_of(model):
        half = attention_alone(layer)
        summed = all_reduce("attention all-reduce", linear, model, precision, tp)
        ops = [*layer.attention.served_projections(model, precision, tp, linear, absorbed), summed]
        ops = ops if layer.attention.present else []
        if layer.ffn.picks:
            ops += layer.ffn.local(model, precision, tp, linear)
        elif layer.ffn.present:
            ops.append(all_reduce("FFN all-reduce", linear, model, precision, tp))
        if half.kind.parts:
            ops.append(elementwise(model, half, tp, linear))
        cost = total_cost(ops, at) + attention_cost(layer.attention, at, tp, tokens, form)
        found.append(cost.time)
    ends = total_cost([embedding(model, precision, linear), head(model, precision, tp, tokens.emitted)], at)
    return tuple(found), ends.time


def _ffn_half(at: Setup, tp: Numeric, tokens: Numeric) -> tuple[Numeric, ...]:
    """Time the dense FFN or the shared experts of one layer of each kind, for the tokens of a group. [s]"""
    model, precision = at.model, at.precision
    found: list[Numeric] = []
    for layer, _ in layers_of(model):
        if not layer.ffn.present:
            found.append(0.0)
            continue
        work = layer.ffn.beside if layer.ffn.picks else layer.ffn.local
        ops = [*work(model, precision, tp, tokens), elementwise(model, ffn_alone(layer), tp, tokens)]
        found.append(total_cost(ops, at).time)
    return tuple(found)


def attention_alone(layer: Layer) -> Layer:
    """The layer without its feed-forward part."""
    return layer_of(LayerKind(layer.kind.attention, NoFfn()))


def ffn_alone(layer: Layer) -> Layer:
    """The layer without its attention."""
    return layer_of(LayerKind(NoAttention(), layer.kind.ffn))


def crossing_time(at: Setup, at_ffn: Setup, split: Split, layer: Layer, total: Numeric) -> Numeric:
    """Time both crossings of a micro-batch of ``total`` tokens, there and back, carried by the smaller pool. [s]

    Tokens go to the ranks of their experts and back in the time of dispatch and combine with as many senders as the
    smaller pool has GPUs (``cost.exchange_cost``: across NVLink domains over the NICs, one copy a domain). One more
    copy of each token goes to the shared experts or the dense layer, over NVLink inside one domain, else over the NIC.
    """
    if not layer.ffn.present:
        return 0.0
    ranks, domain, other = split.ffn.gpus, at.system.nvlink_domain, at_ffn.system.nvlink_domain
    apart = domain * (np.ceil(split.attention.gpus / domain) + np.ceil(ranks / other))
    reach = split.gpus if at.system == at_ffn.system else apart
    carried = total / np.minimum(split.attention.gpus, ranks)
    near = reach <= domain
    sides = (at, at_ffn)
    inside, across = (
        min(own_link_bandwidth(side.system, side.profile, within_domain=within) for side in sides)
        for within in (True, False)
    )
    size = carried * at.model.hidden * (at.precision.dispatch_bytes + at.precision.combine_bytes)
    time = size / np.where(near, inside, across)
    latency = 2.0 * np.where(near, at.profile.p2p_latency_inside, at.profile.p2p_latency_across)
    if not layer.ffn.picks:
        return time + latency
    together = Sharding(dp_attn=reach, ep=split.ffn.ep, redundant_slots=split.ffn.redundant_slots)
    exchange = exchange_cost(carried, together, layer.ffn, "decode", at)
    return time + np.where(np.asarray(ranks) > 1, exchange[0].time + exchange[1].time, latency)


def split_bytes(
    at: Setup, at_ffn: Setup, split: Split, *, sequences: Numeric, cached: CachedTokens
) -> tuple[Numeric, Numeric]:
    """Size the memory of the fullest GPU of each pool. [B]

    An attention rank holds the caches of all micro-batches, a feed-forward rank no cache, embedding or head. Takes
    ``cached`` (cached tokens of a sequence [token]). The result is of the attention and of the feed-forward pool; each
    fits up to ``memory_limit`` of its setup.
    """
    attention, ffn = half_setups(at, at_ffn)
    batch = sequences * split.attention.dp_attn
    no_cache = CachedTokens(mean=0.0, deviation=0.0, most=0.0)
    return (
        decode_bytes(attention, split.attention, batch * split.microbatches, cached=cached),
        decode_bytes(ffn, split.ffn, batch, cached=no_cache),
    )


def half_setups(at: Setup, at_ffn: Setup) -> tuple[Setup, Setup]:
    """Make setups whose models have one half of every layer alone, to size the memory of both pools."""
    model = replace(_alone(at.model, ffn_alone), vocab=1, learned_positions=0, encoder_params=0)
    return replace(at, model=_alone(at.model, attention_alone)), replace(at_ffn, model=model)


def _alone(model: ModelSpec, half: Callable[[Layer], Layer]) -> ModelSpec:
    return replace(model, layers=tuple(half(layer_of(kind)).kind for kind in model.layers))
