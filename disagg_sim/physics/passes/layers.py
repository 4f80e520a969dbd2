"""Times of layers and stages, of which every pass is made.

Physics page, section 7. Degrees and batches are numbers or arrays that broadcast; grids hand in
degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import AttentionBlock, FfnBlock, elementwise, layers_of
from disagg_sim.physics.cost import cheapest, exchange_cost, expert_cost, total_cost
from disagg_sim.physics.expert_load import Routing
from disagg_sim.physics.operators import Tokens, all_reduce, embedding, head
from disagg_sim.physics.roofline import NOTHING, Cost, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.stages import stage_table
from disagg_sim.physics.tabulate import Levels, tabulate
from disagg_sim.physics.work import Numeric


class LayerTimes(NamedTuple):
    """Times of one layer of each kind and of the model's ends, for one micro-batch; sums of the whole pass. [s]

    ``layers`` leaves scores and values of attention out, which are ``scores``.
    """

    layers: tuple[Numeric, ...]
    scores: tuple[Numeric, ...]
    embedding: Numeric
    head: Numeric
    sums: Sums


class AttentionSide(NamedTuple):
    """The attention ranks' part of ``LayerTimes``: ``shared`` experts apart, as they may hide dispatch."""

    layers: tuple[Numeric, ...]
    scores: tuple[Numeric, ...]
    shared: tuple[Numeric, ...]
    embedding: Numeric
    head: Numeric
    sums: Sums


def attention_cost(block: AttentionBlock[Any], at: Setup, tp: Numeric, tokens: Tokens, form: str) -> Cost:
    """Scores and values of one layer, prompts and decodes one after the other (serial kernels)."""
    total = NOTHING
    if np.any(np.asarray(tokens.prompts) > 0):
        total = total + cheapest(total_cost(ops, at) for ops in block.prefill(at.precision, tp, tokens, form))
    if np.any(np.asarray(tokens.decodes) > 0):
        total = total + cheapest(total_cost(ops, at) for ops in block.decode(at.precision, tp, tokens, form))
    return total


def attention_side(
    at: Setup, tp: Numeric, tokens: Tokens, form: str, phase: str, *, core: bool = True
) -> AttentionSide:
    """Everything on the attention ranks; ``core = False`` leaves scores and values out (chunks add their own).

    The head is timed for ``tokens.emitted`` sequences; it enters the sums only where ``emitted`` is not a plain 0.
    """
    model, precision, linear = at.model, at.precision, tokens.linear
    hidden = at.profile.all_reduce_hidden_fraction if phase == "prefill" else 0.0
    absorbed = tokens.decodes if form in ("auto", "absorbed") or not core else 0.0
    emits = not (np.ndim(tokens.emitted) == 0 and tokens.emitted == 0)
    start = total_cost([embedding(model, precision, linear)], at)
    end = total_cost([head(model, precision, tp, tokens.emitted)], at) if emits else NOTHING
    sums = start.sums.plus(end.sums)
    layers: list[Numeric] = []
    scores: list[Numeric] = []
    shared: list[Numeric] = []
    for layer, count in layers_of(model):
        summed = all_reduce("attention all-reduce", linear, model, precision, tp)
        projections = layer.attention.served_projections(model, precision, tp, linear, absorbed)
        own = total_cost([*projections, summed], at)
        own = own + total_cost(layer.ffn.local(model, precision, tp, linear), at)
        apart = total_cost(layer.ffn.beside(model, precision, tp, linear), at)
        own = own + total_cost([elementwise(model, layer, tp, linear)], at)
        layers.append(own.time - hidden * own.sums.communication)
        mixing = attention_cost(layer.attention, at, tp, tokens, form) if core else NOTHING
        own = own + mixing
        scores.append(mixing.time)
        shared.append(apart.time)
        sums = sums.plus(own.sums, count).plus(apart.sums, count)
    return AttentionSide(tuple(layers), tuple(scores), tuple(shared), start.time, end.time, sums)


def join_experts(
    at: Setup, mapping: Mapping, side: AttentionSide, *, phase: str, rank: Levels, total: Levels
) -> LayerTimes:
    """Add routed experts and their exchange to the attention side.

    ``rank`` counts the tokens of one attention rank, ``total`` those of all ranks of the stage. The
    shared expert hides dispatch where the profile says so (physics page, section 5, overlap rules).
    """
    layers, sums = list(side.layers), side.sums
    for index, (layer, count) in enumerate(layers_of(at.model)):
        if not layer.ffn.picks:
            continue
        routed, routed_sums = _routed(at, layer.ffn, count, mapping, phase, total)
        dispatch, combine, exchange_sums = _exchange(at, layer.ffn, count, mapping, phase, rank)
        overlap = np.maximum if at.profile.shared_expert_overlaps_dispatch else np.add
        together = overlap(side.shared[index], dispatch)
        layers[index] = layers[index] + routed + together + combine
        sums = sums.plus(routed_sums).plus(exchange_sums)
    return LayerTimes(tuple(layers), side.scores, side.embedding, side.head, sums)


def stretched(times: LayerTimes, stretch: Numeric) -> LayerTimes:
    """All times but scores and sums, ``stretch`` times as long."""
    layers = tuple(stretch * time for time in times.layers)
    return LayerTimes(layers, times.scores, stretch * times.embedding, stretch * times.head, times.sums)


def with_prefill(own: LayerTimes, same: LayerTimes, both: LayerTimes, stretch: Numeric) -> LayerTimes:
    """Times of a step of decodes and prefill: those of its decodes alone, and what the prefill adds, stretched.

    Scores and values take no stretch.

    Parameters
    ----------
    own, same
        Its decodes alone, in the kernels of decode, and in those of ``both``. [s]
    both
        Decodes and prefill in one pass. [s]
    stretch
        Time of prefill over the sum of its kernels. [1]
    """

    def sum_of(alone: Numeric, without: Numeric, together: Numeric) -> Numeric:
        return alone + stretch * np.maximum(together - without, 0.0)

    return LayerTimes(
        tuple(map(sum_of, own.layers, same.layers, both.layers)),
        both.scores,
        sum_of(own.embedding, same.embedding, both.embedding),
        sum_of(own.head, same.head, both.head),
        both.sums,
    )


def _routed(
    at: Setup, ffn: FfnBlock[Any], layers: int, mapping: Mapping, phase: str, total: Levels
) -> tuple[Numeric, Sums]:
    """Time of the routed experts of one layer, and the sums of all ``layers`` of its kind. [s]"""
    profile = at.profile
    routing = Routing(profile.prefill_imbalance if phase == "prefill" else profile.decode_imbalance)
    if profile.random_routing:
        routing = Routing(skew=profile.expert_skew)

    def experts(tp_ffn: Numeric, ep: Numeric, redundant: Numeric, tokens: Numeric) -> tuple[Numeric, Sums]:
        held = Mapping(tp_ffn=tp_ffn, ep=ep, redundant_slots=redundant)
        op = ffn.routed(at.model, at.precision, held, tokens, routing)
        cost = expert_cost(op, ep, tp_ffn, at)
        return cost.time, Sums().plus(cost.sums, layers)

    return tabulate(experts, (mapping.tp_ffn, mapping.ep, mapping.redundant_slots), total)


def _exchange(
    at: Setup, ffn: FfnBlock[Any], layers: int, mapping: Mapping, phase: str, rank: Levels
) -> tuple[Numeric, Numeric, Sums]:
    """Times of dispatch and combine of one layer, and the sums of all ``layers`` of its kind. [s]"""
    if np.all(np.asarray(mapping.dp_attn) == 1):
        return 0.0, 0.0, Sums()

    def exchange(
        tp: Numeric, dp: Numeric, tp_ffn: Numeric, ep: Numeric, tokens: Numeric
    ) -> tuple[Numeric, Numeric, Sums]:
        here = Mapping(tp_attn=tp, dp_attn=dp, tp_ffn=tp_ffn, ep=ep)
        dispatch, combine = exchange_cost(tokens / tp, here, ffn.picks, phase, at)
        return dispatch.time, combine.time, Sums().plus(dispatch.sums, layers).plus(combine.sums, layers)

    return tabulate(exchange, (mapping.tp_attn, mapping.dp_attn, mapping.tp_ffn, mapping.ep), rank)


def slowest_stage(model: ModelSpec, pp: Numeric, times: LayerTimes) -> Numeric:
    """Time of the slowest stage for one micro-batch, without host. [s]"""
    table = stage_table(model, pp)
    slowest: Numeric = 0.0
    for counts, first, last in zip(table.layers, table.first, table.last, strict=True):
        time = first * times.embedding + last * times.head
        for index, (one, scores) in enumerate(zip(times.layers, times.scores, strict=True)):
            time = time + counts[..., index] * (one + scores)
        slowest = np.maximum(slowest, time)
    return slowest


def all_stages(model: ModelSpec, times: LayerTimes) -> Numeric:
    """Time of one micro-batch through every stage in turn, without host and hops. [s]"""
    total = times.embedding + times.head
    for one, scores, count in zip(times.layers, times.scores, model.kind_counts, strict=True):
        total = total + (one + scores) * count
    return total


def with_ends(sums: Sums, hop: Cost, host: Numeric) -> Sums:
    """Add host [s] and hops of a pass to the sums of its layers."""
    return sums.plus(hop.sums).plus(Sums(latency=host))
