"""Times of whole passes: prefill, chunked pipelined prefill (CPP), decode step, mixed step.

Physics page, section 7. Degrees and batches are numbers or arrays that broadcast; grids hand in
degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import AttentionBlock, FfnBlock, elementwise, layers_of
from disagg_sim.physics.cost import cheapest, exchange_cost, expert_cost, hop_cost, total_cost
from disagg_sim.physics.operators import Tokens, all_reduce, embedding, head
from disagg_sim.physics.roofline import NOTHING, Cost, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.stages import stage_table
from disagg_sim.physics.tabulate import Levels, tabulate
from disagg_sim.physics.work import Numeric, fullest_of_random


class DecodeStep(NamedTuple):
    """A decode step of a full batch."""

    ttl: Numeric  # token-to-token latency [s]
    microbatches: Numeric  # [1]
    sums: Sums  # of the whole pass; the largest names its bound [s]


class PrefillPass(NamedTuple):
    """One pass of a batch of prompts through an instance."""

    ftl: Numeric  # first-token latency, no queue [s]
    busy: Numeric  # of the slowest stage: the instance starts a pass this often [s]
    sums: Sums  # of the whole pass [s]


class LayerTimes(NamedTuple):
    """Times of one layer of each kind and of the model's ends, for one micro-batch; sums of the whole pass. [s]"""

    layers: tuple[Numeric, ...]
    embedding: Numeric
    head: Numeric
    sums: Sums


class AttentionSide(NamedTuple):
    """The attention ranks' part of ``LayerTimes``: ``shared`` experts apart, as they may hide dispatch."""

    layers: tuple[Numeric, ...]
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
    emits = not (np.ndim(tokens.emitted) == 0 and tokens.emitted == 0)
    start = total_cost([embedding(model, precision, linear)], at)
    end = total_cost([head(model, precision, tp, tokens.emitted)], at) if emits else NOTHING
    sums = start.sums.plus(end.sums)
    layers: list[Numeric] = []
    shared: list[Numeric] = []
    for layer, count in layers_of(model):
        summed = all_reduce("attention all-reduce", linear, model, precision, tp)
        own = total_cost([*layer.attention.projections(model, precision, tp, linear), summed], at)
        own = own + total_cost(layer.ffn.local(model, precision, tp, linear), at)
        apart = total_cost(layer.ffn.beside(model, precision, tp, linear), at)
        own = own + total_cost([elementwise(model, layer, tp, linear)], at)
        time = own.time - hidden * own.sums.communication
        if core:
            scores = attention_cost(layer.attention, at, tp, tokens, form)
            own, time = own + scores, time + scores.time
        layers.append(time)
        shared.append(apart.time)
        sums = sums.plus(own.sums, count).plus(apart.sums, count)
    return AttentionSide(tuple(layers), tuple(shared), start.time, end.time, sums)


def join_experts(
    at: Setup, degrees: Mapping, side: AttentionSide, *, phase: str, rank: Levels, total: Levels
) -> LayerTimes:
    """Add routed experts and their exchange to the attention side.

    ``rank`` counts the tokens of one attention rank, ``total`` those of all ranks of the stage. The
    shared expert hides dispatch where the profile says so (physics page, section 5, overlap rules).
    """
    layers, sums = list(side.layers), side.sums
    for index, (layer, count) in enumerate(layers_of(at.model)):
        if not layer.ffn.picks:
            continue
        routed, routed_sums = _routed(at, layer.ffn, count, degrees, phase, total)
        dispatch, combine, exchange_sums = _exchange(at, layer.ffn, count, degrees, phase, rank)
        overlap = np.maximum if at.profile.shared_expert_overlaps_dispatch else np.add
        together = overlap(side.shared[index], dispatch)
        layers[index] = layers[index] + routed + together + combine
        sums = sums.plus(routed_sums).plus(exchange_sums)
    return LayerTimes(tuple(layers), side.embedding, side.head, sums)


def _routed(
    at: Setup, ffn: FfnBlock[Any], layers: int, degrees: Mapping, phase: str, total: Levels
) -> tuple[Numeric, Sums]:
    """Time of the routed experts of one layer, and the sums of all ``layers`` of its kind. [s]"""
    profile = at.profile
    imbalance = profile.prefill_imbalance if phase == "prefill" else profile.decode_imbalance

    def experts(tp_ffn: Numeric, ep: Numeric, tokens: Numeric) -> tuple[Numeric, Sums]:
        if profile.random_routing:
            tokens = tokens * fullest_of_random(tokens * (ffn.picks / ep), ep)
        op = ffn.routed(at.model, at.precision, Mapping(tp_ffn=tp_ffn, ep=ep), tokens, imbalance)
        cost = expert_cost(op, ep, tp_ffn, at)
        return cost.time, Sums().plus(cost.sums, layers)

    return tabulate(experts, (degrees.tp_ffn, degrees.ep), total)


def _exchange(
    at: Setup, ffn: FfnBlock[Any], layers: int, degrees: Mapping, phase: str, rank: Levels
) -> tuple[Numeric, Numeric, Sums]:
    """Times of dispatch and combine of one layer, and the sums of all ``layers`` of its kind. [s]"""
    if np.all(np.asarray(degrees.dp_attn) == 1):
        return 0.0, 0.0, Sums()

    def exchange(
        tp: Numeric, dp: Numeric, tp_ffn: Numeric, ep: Numeric, tokens: Numeric
    ) -> tuple[Numeric, Numeric, Sums]:
        here = Mapping(tp_attn=tp, dp_attn=dp, tp_ffn=tp_ffn, ep=ep)
        dispatch, combine = exchange_cost(tokens / tp, here, ffn.picks, phase, at)
        return dispatch.time, combine.time, Sums().plus(dispatch.sums, layers).plus(combine.sums, layers)

    return tabulate(exchange, (degrees.tp_attn, degrees.dp_attn, degrees.tp_ffn, degrees.ep), rank)


def slowest_stage(model: ModelSpec, pp: Numeric, times: LayerTimes) -> Numeric:
    """Time of the slowest stage for one micro-batch, without host. [s]"""
    table = stage_table(model, pp)
    slowest: Numeric = 0.0
    for counts, first, last in zip(table.layers, table.first, table.last, strict=True):
        time = first * times.embedding + last * times.head
        for index, one in enumerate(times.layers):
            time = time + counts[..., index] * one
        slowest = np.maximum(slowest, time)
    return slowest


def all_stages(model: ModelSpec, times: LayerTimes) -> Numeric:
    """Time of one micro-batch through every stage in turn, without host and hops. [s]"""
    total = times.embedding + times.head
    for one, count in zip(times.layers, model.kind_counts, strict=True):
        total = total + one * count
    return total


def with_ends(at: Setup, sums: Sums, hop: Cost) -> Sums:
    """Add host and hops of a pass to the sums of its layers."""
    return sums.plus(hop.sums).plus(Sums(latency=at.profile.host))


def decode_step(at: Setup, degrees: Mapping, *, batch: Numeric, context: Numeric, mla_form: str = "auto") -> DecodeStep:
    """One decode step of ``batch`` sequences (over all DP ranks) at mean length ``context``.

    ``TTL = max(m*max_s t_s, sum_s t_s) + host + p*hop`` over the stages s of m = min(pp, B)
    micro-batches: either the slowest stage is always busy, or a token has to walk through all of them.
    The fullest rank holds ceil(ceil(B/m)/dp) sequences. Host work of one micro-batch hides behind the
    others. The mean context ISL + OSL/2 gives the mean TTL exactly where t is affine in context.
    Source: physics page, section 7.
    """
    pp = degrees.pp
    microbatches = np.minimum(pp, batch)
    micro = np.ceil(batch / microbatches)
    rank = Levels(np.ceil(micro / degrees.dp_attn))

    def side(tp: Numeric, sequences: Numeric) -> AttentionSide:
        tokens = Tokens(decodes=sequences, context=context, emitted=sequences)
        return attention_side(at, tp, tokens, mla_form, "decode")

    times = join_experts(
        at, degrees, tabulate(side, (degrees.tp_attn,), rank), phase="decode", rank=rank, total=Levels(micro)
    )
    stage = slowest_stage(at.model, pp, times)
    hop = hop_cost(rank.tokens, degrees.gpus, at) * np.where(np.asarray(pp) > 1, pp, 0.0)
    ttl = np.maximum(microbatches * stage, all_stages(at.model, times)) + at.profile.host + hop.time
    return DecodeStep(ttl, microbatches, with_ends(at, times.sums, hop))


def prefill_pass(at: Setup, degrees: Mapping, *, batch: Numeric, isl: float, mla_form: str = "auto") -> PrefillPass:
    """Prefill of ``batch`` prompts of ``isl`` tokens, unchunked.

    With pp stages the prompts of a rank go through in m = min(pp, prompts) micro-batches:
    ``FTL = host + sum_s t_s + (m-1)*max_s t_s + (p-1)*hop``, the makespan of m equal jobs in a flow
    shop; at pp = 1 it is the pass time. Source: physics page, section 7.
    """
    pp = degrees.pp
    per_rank = np.ceil(batch / degrees.dp_attn)
    microbatches = np.minimum(pp, per_rank)
    prompts = np.ceil(per_rank / microbatches)

    def side(tp: Numeric, sequences: Numeric) -> AttentionSide:
        tokens = Tokens(prompts=sequences, new=float(isl), emitted=sequences)
        return attention_side(at, tp, tokens, mla_form, "prefill")

    times = join_experts(
        at,
        degrees,
        tabulate(side, (degrees.tp_attn,), Levels(prompts)),
        phase="prefill",
        rank=Levels(prompts * isl),
        total=Levels(np.minimum(prompts * degrees.dp_attn, batch) * isl),
    )
    stage = slowest_stage(at.model, pp, times)
    hop = hop_cost(prompts * isl, degrees.gpus, at) * (pp - 1)
    busy = microbatches * stage + at.profile.host
    ftl = busy + (all_stages(at.model, times) - stage) + hop.time
    return PrefillPass(ftl, busy, with_ends(at, times.sums, hop))
