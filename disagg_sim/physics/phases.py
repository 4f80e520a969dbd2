"""Times of whole passes: prefill, chunked pipelined prefill (CPP), decode step, mixed step.

Physics page, section 7. Degrees and batches are numbers or arrays that broadcast; grids hand in
degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from disagg_sim.facts.model import DenseFfn, LayerKind, ModelSpec, MoeFfn
from disagg_sim.physics import layer
from disagg_sim.physics.cost import cheapest, exchange_cost, expert_cost, hop_cost, total_cost
from disagg_sim.physics.layer import Tokens
from disagg_sim.physics.rates import Rates
from disagg_sim.physics.roofline import NOTHING, Cost
from disagg_sim.physics.stages import stage_table
from disagg_sim.physics.tabulate import tabulate
from disagg_sim.physics.work import Numeric

#: Share of the shorter of compute and communication that two-batch overlap leaves exposed (section 5, assumption).
TWO_BATCH_EXPOSED = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Sharding degrees of one instance: tp_attn*dp_attn = tp_ffn*ep in each of pp stages. [1]"""

    tp_attn: Numeric = 1.0
    dp_attn: Numeric = 1.0
    tp_ffn: Numeric = 1.0
    ep: Numeric = 1.0
    pp: Numeric = 1.0

    @property
    def stage_gpus(self) -> Numeric:
        """GPUs of one pipeline stage. [1]"""
        return self.tp_attn * self.dp_attn

    @property
    def gpus(self) -> Numeric:
        """GPUs of the instance. [1]"""
        return self.stage_gpus * self.pp


class DecodeStep(NamedTuple):
    """A decode step of a full batch."""

    ttl: Numeric  # token-to-token latency [s]
    microbatches: Numeric  # [1]
    cost: Cost  # of the whole pass; its four sums name the bound


class PrefillPass(NamedTuple):
    """One pass of a batch of prompts through an instance."""

    ftl: Numeric  # first-token latency, no queue [s]
    busy: Numeric  # of the slowest stage: the instance starts a pass this often [s]
    cost: Cost  # of the whole pass


class _LayerCosts(NamedTuple):
    """Costs of one layer of each kind, and of the ends of the model, for one micro-batch."""

    kinds: tuple[Cost, ...]
    embedding: Cost
    head: Cost


def _attention_side(
    model: ModelSpec, rates: Rates, tp: Numeric, tokens: Tokens, form: str, phase: str, *, core: bool = True
) -> tuple[Cost, ...]:
    """Per kind (everything on the attention ranks, shared experts alone), then embedding and head."""
    precision = rates.precision
    hidden = rates.profile.all_reduce_hidden_fraction if phase == "prefill" else 0.0
    linear = tokens.linear
    costs: list[Cost] = []
    for kind in model.kinds:
        attention = total_cost(layer.projections(model, kind, precision, tp, linear), rates)
        if core:
            attention = attention + attention_cost(kind, rates, tp, tokens, form)
        ffn, shared = kind.ffn, NOTHING
        if isinstance(ffn, DenseFfn):
            local = total_cost(layer.dense_ffn(model, ffn, precision, tp, linear), rates)
        else:
            local = total_cost(layer.moe_local(model, ffn, precision, tp, linear), rates)
            shared = total_cost(layer.shared_experts(model, ffn, precision, tp, linear), rates)
        own = attention + local + total_cost([layer.elementwise(model, kind, tp, linear)], rates)
        if hidden:
            own = Cost(own.time - hidden * own.communication, own.compute, own.memory, own.communication, own.latency)
        costs += [own, shared]
    costs.append(total_cost([layer.embedding(model, precision, linear)], rates))
    costs.append(total_cost([layer.head(model, precision, tp, tokens.emitted)], rates))
    return tuple(costs)


def attention_cost(kind: LayerKind, rates: Rates, tp: Numeric, tokens: Tokens, form: str) -> Cost:
    """Scores and values of one layer, prompts and decodes one after the other (serial kernels)."""
    total = NOTHING
    if np.any(np.asarray(tokens.prompts) > 0):
        total = total + cheapest(
            total_cost(ops, rates) for ops in layer.prefill_attention(kind, rates.precision, tp, tokens, form)
        )
    if np.any(np.asarray(tokens.decodes) > 0):
        total = total + cheapest(
            total_cost(ops, rates) for ops in layer.decode_attention(kind, rates.precision, tp, tokens, form)
        )
    return total


def _layer_costs(
    model: ModelSpec, rates: Rates, degrees: Degrees, *, phase: str, attention_side: tuple[Cost, ...],
    rank_tokens: Numeric, total_tokens: Numeric,
) -> _LayerCosts:  # fmt: skip
    """Join the attention side with experts and their exchange."""
    kinds: list[Cost] = []
    for index, kind in enumerate(model.kinds):
        own, shared = attention_side[2 * index : 2 * index + 2]
        if isinstance(kind.ffn, MoeFfn):
            own = own + _moe_cost(model, kind.ffn, rates, degrees, phase, shared, rank_tokens, total_tokens)
        kinds.append(own)
    return _LayerCosts(tuple(kinds), *attention_side[-2:])


def _moe_cost(
    model: ModelSpec, ffn: MoeFfn, rates: Rates, degrees: Degrees, phase: str, shared: Cost, rank_tokens: Numeric,
    total_tokens: Numeric,
) -> Cost:  # fmt: skip
    """Routed and shared experts with dispatch and combine."""
    profile = rates.profile
    imbalance = profile.prefill_imbalance if phase == "prefill" else profile.decode_imbalance

    def experts(tp_ffn: Numeric, ep: Numeric, tokens: Numeric) -> tuple[Cost]:
        op = layer.routed_experts(
            model, ffn, rates.precision, ep=ep, tp_ffn=tp_ffn, tokens=tokens, imbalance=imbalance
        )
        return (expert_cost(op, ep, tp_ffn, rates),)

    def exchange(tp: Numeric, dp: Numeric, tp_ffn: Numeric, ep: Numeric, tokens: Numeric) -> tuple[Cost, Cost]:
        return exchange_cost(
            tokens / tp, phase=phase, ep=ep, tp_ffn=tp_ffn, gpus=tp * dp, exchanges=np.where(dp > 1, 1.0, 0.0),
            hidden=model.hidden, top_k=ffn.top_k, rates=rates,
        )  # fmt: skip

    (routed,) = tabulate(experts, (degrees.tp_ffn, degrees.ep), total_tokens)
    dispatch, combine = tabulate(
        exchange, (degrees.tp_attn, degrees.dp_attn, degrees.tp_ffn, degrees.ep), rank_tokens
    )
    hidden = np.minimum(shared.time, dispatch.time) if profile.shared_expert_overlaps_dispatch else 0.0
    total = routed + shared + dispatch + combine
    return Cost(total.time - hidden, total.compute, total.memory, total.communication, total.latency)


def _overlapped(cost: Cost, rates: Rates) -> Numeric:
    """Time of a layer; two-batch overlap hides communication behind compute (section 5)."""
    if not rates.profile.two_batch_overlap:
        return cost.time
    rest = cost.time - cost.communication
    return np.maximum(rest, cost.communication) + TWO_BATCH_EXPOSED * np.minimum(rest, cost.communication)


def _slowest_stage(model: ModelSpec, rates: Rates, pp: Numeric, costs: _LayerCosts, emits: float = 1.0) -> Numeric:
    """Time of the slowest stage for one micro-batch, host included. [s]"""
    table = stage_table(model, pp)
    layers = [_overlapped(cost, rates) for cost in costs.kinds]
    slowest: Numeric = 0.0
    for counts, first, last in zip(table.layers, table.first, table.last, strict=True):
        time = first * costs.embedding.time + last * costs.head.time * emits
        for index, one in enumerate(layers):
            time = time + counts[..., index] * one
        slowest = np.maximum(slowest, time)
    return slowest + rates.profile.host


def _whole_pass(model: ModelSpec, rates: Rates, pp: Numeric, costs: _LayerCosts, hop: Cost) -> Cost:
    """Sum over every layer, both ends, the host of every stage and the hops between stages."""
    host = rates.profile.host * pp
    total = costs.embedding + costs.head + Cost(time=host, latency=host) + hop
    for cost, count in zip(costs.kinds, model.kind_counts, strict=True):
        total = total + cost * count
    return total


def decode_step(
    model: ModelSpec, rates: Rates, degrees: Degrees, *, batch: Numeric, context: Numeric, mla_form: str = "auto"
) -> DecodeStep:
    """One decode step of ``batch`` sequences (over all DP ranks) at mean length ``context``.

    ``TTL = max(m, p)*t_stage(B/m) + p*hop`` with m = min(pp, B) micro-batches; the fullest rank
    holds ceil(ceil(B/m)/dp) sequences. The mean context ISL + OSL/2 gives the mean TTL exactly where
    t is affine in context. Source: physics page, section 7.
    """
    pp = degrees.pp
    microbatches = np.minimum(pp, batch)
    micro = np.ceil(batch / microbatches)
    rank = np.ceil(micro / degrees.dp_attn)

    def attention_side(tp: Numeric, sequences: Numeric) -> tuple[Cost, ...]:
        tokens = Tokens(decodes=sequences, context=context, emitted=sequences)
        return _attention_side(model, rates, tp, tokens, mla_form, "decode")

    side = tabulate(attention_side, (degrees.tp_attn,), rank)
    costs = _layer_costs(
        model, rates, degrees, phase="decode", attention_side=side, rank_tokens=rank, total_tokens=micro
    )
    stage = _slowest_stage(model, rates, pp, costs)
    hop = hop_cost(rank, model.hidden, degrees.gpus, rates) * np.where(pp > 1, pp, 0.0)
    return DecodeStep(np.maximum(microbatches, pp) * stage + hop.time, microbatches, _whole_pass(model, rates, pp, costs, hop))


def prefill_pass(
    model: ModelSpec, rates: Rates, degrees: Degrees, *, batch: Numeric, isl: float, mla_form: str = "auto"
) -> PrefillPass:
    """Prefill of ``batch`` prompts of ``isl`` tokens, unchunked.

    With pp stages the prompts of a rank go through in m = min(pp, prompts) micro-batches:
    ``FTL = m*t + (p-1)*(t + hop)``; at pp = 1 it is the pass time. Source: physics page, section 7.
    """
    pp = degrees.pp
    per_rank = np.ceil(batch / degrees.dp_attn)
    microbatches = np.minimum(pp, per_rank)
    prompts = np.ceil(per_rank / microbatches)
    total_tokens = np.minimum(prompts * degrees.dp_attn, batch) * isl

    def attention_side(tp: Numeric, sequences: Numeric) -> tuple[Cost, ...]:
        tokens = Tokens(prompts=sequences, new=float(isl), emitted=sequences)
        return _attention_side(model, rates, tp, tokens, mla_form, "prefill")

    side = tabulate(attention_side, (degrees.tp_attn,), prompts)
    costs = _layer_costs(
        model, rates, degrees, phase="prefill", attention_side=side, rank_tokens=prompts * isl, total_tokens=total_tokens
    )
    stage = _slowest_stage(model, rates, pp, costs)
    hop = hop_cost(prompts * isl, model.hidden, degrees.gpus, rates) * (pp - 1)
    busy = microbatches * stage
    return PrefillPass(busy + (pp - 1) * stage + hop.time, busy, _whole_pass(model, rates, pp, costs, hop))
