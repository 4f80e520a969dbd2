"""Time the layers of a pass: the attention ranks, the routed experts, and the exchange between them.

Physics page, sections 5 to 7. Degrees and batches are numbers or arrays that broadcast; grids pass
degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import elementwise, layers_of
from disagg_sim.physics.blocks.base import OUTWARD, AttentionBlock, FfnBlock
from disagg_sim.physics.cost import (
    adjusted,
    all_reduce_cost,
    cheapest,
    exchange_cost,
    expert_cost,
    kernel_cost,
    total_cost,
)
from disagg_sim.physics.passes.engine_time import LayerTimes, all_stages
from disagg_sim.physics.roofline import NOTHING, AnySums, Cost, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, is_one, tabulate
from disagg_sim.physics.work import Numeric, Operator, Tokens, all_reduce, embedding, head
from disagg_sim.techniques.context.physics import shared_decode, shared_prefill
from disagg_sim.techniques.experts.physics import ExpertRouting


class AttentionSide(NamedTuple):
    """Times on the attention ranks; ``shared`` experts are separate, as they may overlap dispatch. [s]"""

    layers: tuple[Numeric, ...]
    scores: tuple[Numeric, ...]
    shared: tuple[Numeric, ...]
    embedding: Numeric
    head: Numeric
    sums: AnySums


def attention_cost(block: AttentionBlock[Any], at: Setup, tp: Numeric, tokens: Tokens, form: str) -> Cost:
    """Time scores and values of one layer, prompts and decodes one after the other (serial kernels).

    Where GPUs share the tokens of a sequence (DCP, PCP), their exchange is included (``techniques.context``). Takes
    ``tokens`` (prompts and decodes of one rank [token]) and ``form`` (of MLA; ``auto`` = the fastest at each point).
    Returns arrays of the broadcast shape of ``tp`` and ``tokens`` [s].

    64 sequences of 1000 tokens, one of 8 KV heads of 128 a GPU: 2 x 64 x 1000 x 128 B at 4.8 TB/s.
    """
    total = NOTHING
    if np.any(np.asarray(tokens.prompts) > 0):
        if is_one(tokens.pcp) and is_one(tokens.dcp):
            total = total + cheapest(total_cost(ops, at) for ops in block.prefill(at.precision, tp, tokens, form))
        else:
            total = total + shared_prefill(block, at, tp, tokens, form)
    if np.any(np.asarray(tokens.decodes) > 0):
        if is_one(tokens.dcp):
            total = total + cheapest(total_cost(ops, at) for ops in block.decode(at.precision, tp, tokens, form))
        else:
            total = total + shared_decode(block, at, tp, tokens, form)
    return total


def attention_side(
    at: Setup, tp: Numeric, tokens: Tokens, form: str, phase: str, *, core: bool = True
) -> AttentionSide:
    """Time everything on the attention ranks; ``core = False`` leaves scores and values out (chunks add their own).

    The head is timed for ``tokens.emitted`` tokens; it enters the sums only where ``emitted`` is not a plain 0. Takes
    ``tokens`` (prompts and decodes of one rank [token]) and ``phase`` ("prefill" or "decode": which share of the
    all-reduces the profile hides). Returns times of one layer of each kind and sums of all layers, of the broadcast
    shape of ``tp`` and ``tokens`` [s].
    """
    model, precision, linear = at.model, at.precision, tokens.linear
    hidden = at.profile.all_reduce_hidden_fraction if phase == "prefill" else 0.0
    absorbed = tokens.decodes * tokens.queries if form in ("auto", "absorbed") or not core else 0.0
    emits = not (np.ndim(tokens.emitted) == 0 and tokens.emitted == 0)
    start = total_cost([embedding(model, precision, linear)], at)
    end = total_cost([head(model, precision, tp, tokens.emitted)], at) if emits else NOTHING
    sums = start.sums.plus(end.sums)
    layers: list[Numeric] = []
    scores: list[Numeric] = []
    shared: list[Numeric] = []
    summed = all_reduce("attention all-reduce", linear, model, precision, tp)
    reduced = all_reduce_cost(summed.size, tp, at)  # the all-reduce of the FFN has as many bytes

    def timed(operators: Iterable[Operator]) -> Cost:
        costs = (adjusted(op, reduced, at) if op.kind == "all_reduce" else kernel_cost(op, at) for op in operators)
        return sum(costs, NOTHING)

    @cache  # layers of several kinds may have the same attention
    def projected(block: AttentionBlock[Any]) -> Cost:
        return timed([*_projections(block, at, tp, tokens, absorbed), summed] if block.present else [])

    @cache
    def scored(block: AttentionBlock[Any]) -> Cost:
        return attention_cost(block, at, tp, tokens, form) if core else NOTHING

    for layer, count in layers_of(model):
        own = projected(layer.attention) + timed(layer.ffn.local(model, precision, tp, linear))
        apart = total_cost(layer.ffn.beside(model, precision, tp, linear), at)
        own = own + total_cost([elementwise(model, layer, tp, linear)], at)
        layers.append(own.time - hidden * own.sums.communication)
        mixing = scored(layer.attention)
        own = own + mixing
        scores.append(mixing.time)
        shared.append(apart.time)
        sums = sums.plus(own.sums, count).plus(apart.sums, count)
    return AttentionSide(tuple(layers), tuple(scores), tuple(shared), start.time, end.time, sums)


def _projections(block: AttentionBlock[Any], at: Setup, tp: Numeric, tokens: Tokens, absorbed: Numeric) -> list[Any]:
    """Projections of attention; under Helix those before the scores are as in TP of tp/dcp GPUs."""
    operators = block.served_projections(at.model, at.precision, tp, tokens.linear, absorbed)
    if is_one(tokens.dcp) or at.sharing.decode != "helix" or block.spec.shared_rows is None:
        return operators
    wide = block.served_projections(at.model, at.precision, tp / tokens.dcp, tokens.linear, absorbed)
    return [*(op for op in wide if op.name not in OUTWARD), *(op for op in operators if op.name in OUTWARD)]


def stretched(times: LayerTimes, stretch: Numeric) -> LayerTimes:
    """Stretch all times but scores and sums. [s]"""
    layers = tuple(stretch * time for time in times.layers)
    return LayerTimes(layers, times.scores, stretch * times.embedding, stretch * times.head, times.sums)


def with_prefill(decodes: LayerTimes, in_pass: LayerTimes, mixed: LayerTimes, stretch: Numeric) -> LayerTimes:
    """Time a mixed step: its decodes, plus ``stretch`` times the time that prefill adds. [s]

    ``t = decodes + stretch*max(mixed - in_pass, 0)``: ``decodes`` alone in decode kernels, ``in_pass`` alone in the
    kernels of the mixed step, ``mixed`` with prefill in the same kernels. Scores and values are not stretched.

    Decodes take 3 ms in decode kernels and 2 ms in those of the mixed step, to which prefill adds 4 ms, stretched to 5:

    >>> decodes, in_pass, mixed = (LayerTimes((t,), (0.0,), 0.0, 0.0, Sums()) for t in (3e-3, 2e-3, 6e-3))
    >>> f"{1e3 * with_prefill(decodes, in_pass, mixed, 1.25).layers[0]:.1f} ms"
    '8.0 ms'
    """

    def sum_of(alone: Numeric, without: Numeric, with_chunk: Numeric) -> Numeric:
        return alone + stretch * np.maximum(with_chunk - without, 0.0)

    return LayerTimes(
        tuple(map(sum_of, decodes.layers, in_pass.layers, mixed.layers)),
        mixed.scores,
        sum_of(decodes.embedding, in_pass.embedding, mixed.embedding),
        sum_of(decodes.head, in_pass.head, mixed.head),
        mixed.sums,
    )


def with_draft_model(times: LayerTimes, model: ModelSpec, drafted: LayerTimes) -> LayerTimes:
    """Add a pass of a draft model to the last stage: a longer head, and the sums of both. [s]

    A head of 1 ms, and 32 draft layers of 0.5 ms behind it:

    >>> from disagg_sim.facts.load import load_model
    >>> times = LayerTimes(layers=(1e-3,), scores=(0.0,), embedding=0.0, head=1e-3, sums=Sums())
    >>> drafted = LayerTimes(layers=(0.5e-3,), scores=(0.0,), embedding=0.0, head=0.0, sums=Sums())
    >>> f"{1e3 * with_draft_model(times, load_model('llama_3_1_8b'), drafted).head:.0f} ms"
    '17 ms'
    """
    return times._replace(head=times.head + all_stages(model, drafted), sums=times.sums.plus(drafted.sums))


def with_host_and_hops(sums: AnySums, hop: Cost, host: Numeric) -> AnySums:
    """Add host [s] and hops of a pass to the sums of its layers."""
    return sums.plus(hop.sums).plus(Sums(latency=host))


def join_experts(
    at: Setup, mapping: Sharding, side: AttentionSide, *, phase: str, rank: DistinctCounts, total: DistinctCounts
) -> LayerTimes:
    """Add routed experts and their exchange to the attention side: times of a layer of each kind, sums of all. [s]

    The shared expert hides dispatch where the profile says so (overlap rules of the physics page). ``rank`` and
    ``total`` are the tokens of one attention rank, and of all ranks of the stage; expert imbalance and rates of the
    exchange are those of the ``phase``.

    Only the second kind of layers of DeepSeek-R1 has routed experts:

    >>> from disagg_sim.physics.work import Tokens
    >>> from disagg_sim.physics.passes.layers import attention_side
    >>> from disagg_sim.physics.setup import setup
    >>> at, wide = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), Sharding(dp_attn=16, ep=16)
    >>> side = attention_side(at, 1, Tokens(decodes=64.0, context=1000.0, emitted=64.0), "auto", "decode")
    >>> times = join_experts(at, wide, side, phase="decode", rank=DistinctCounts(64.0), total=DistinctCounts(1024.0))
    >>> [bool(joined > alone) for joined, alone in zip(times.layers, side.layers)]
    [False, True]
    """
    layers, sums = list(side.layers), side.sums
    combined = np.maximum if at.profile.shared_expert_overlaps_dispatch else np.add
    for index, (layer, count) in enumerate(layers_of(at.model)):
        if not layer.ffn.picks:
            continue
        routed, routed_sums = routed_time(at, layer.ffn, count, mapping, phase, total)
        dispatch, combine, exchange_sums = _exchange(at, layer.ffn, count, mapping, phase, rank)
        layers[index] = layers[index] + routed + combined(side.shared[index], dispatch) + combine
        sums = sums.plus(routed_sums).plus(exchange_sums)
    return LayerTimes(tuple(layers), side.scores, side.embedding, side.head, sums)


def routed_time(
    at: Setup, ffn: FfnBlock[Any], layers: int, mapping: Sharding, phase: str, total: DistinctCounts
) -> tuple[Numeric, Sums]:
    """Time of the routed experts of one layer, and the sums of all ``layers`` of its kind. [s]"""
    profile = at.profile
    routing = ExpertRouting(profile.prefill_imbalance if phase == "prefill" else profile.decode_imbalance)
    if profile.random_routing:
        routing = ExpertRouting(skew=profile.expert_skew, rank_skew=profile.rank_skew)

    def experts(tp_ffn: Numeric, ep: Numeric, redundant: Numeric, tokens: Numeric) -> tuple[Numeric, Sums]:
        sharding = Sharding(tp_ffn=tp_ffn, ep=ep, redundant_slots=redundant)
        cost = expert_cost(ffn.routed(at.model, at.precision, sharding, tokens, routing), ep, tp_ffn, at)
        return cost.time, Sums().plus(cost.sums, layers)

    return tabulate(experts, (mapping.tp_ffn, mapping.ep, mapping.redundant_slots), total)


def _exchange(
    at: Setup, ffn: FfnBlock[Any], layers: int, mapping: Sharding, phase: str, rank: DistinctCounts
) -> tuple[Numeric, Numeric, Sums]:
    if np.all(np.asarray(mapping.token_ranks) == 1):
        return 0.0, 0.0, Sums()

    def exchanged(
        tp: Numeric, dp: Numeric, tp_ffn: Numeric, ep: Numeric, redundant: Numeric, tokens: Numeric
    ) -> tuple[Numeric, Numeric, Sums]:
        here = Sharding(tp_attn=tp, dp_attn=dp, tp_ffn=tp_ffn, ep=ep, redundant_slots=redundant)
        dispatch, combine = exchange_cost(tokens / tp, here, ffn, phase, at)
        return dispatch.time, combine.time, Sums().plus(dispatch.sums, layers).plus(combine.sums, layers)

    degrees = (mapping.tp_attn, mapping.token_ranks, mapping.tp_ffn, mapping.ep, mapping.redundant_slots)
    return tabulate(exchanged, degrees, rank)
