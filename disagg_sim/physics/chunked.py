"""Passes that cut a prompt: CPP (chunked pipelined prefill) and the mixed step of piggybacking.

Physics page, section 7 (CPP, Mixed). In CPP the micro-batches of the pipeline are the chunks of one
prompt, so stages work on different chunks of the same prompt at once.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.cost import hop_cost
from disagg_sim.physics.layer import Tokens
from disagg_sim.physics.phases import (
    Degrees,
    PrefillPass,
    _attention_side,
    _layer_costs,
    _slowest_stage,
    _whole_pass,
    attention_cost,
)
from disagg_sim.physics.rates import Rates
from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.stages import stage_table
from disagg_sim.physics.tabulate import tabulate
from disagg_sim.physics.work import Numeric


class ChunkPlan(NamedTuple):
    """How a prompt is cut: equal chunks and a last one that may be shorter."""

    chunks: Numeric  # [1]
    size: Numeric  # of all chunks but the last [token]
    last: Numeric  # [token]


def chunk_plan(isl: float, chunk_tokens: Numeric) -> ChunkPlan:
    """Cut ``isl`` tokens into chunks of ``chunk_tokens``.

    Examples
    --------
    >>> [float(x) for x in chunk_plan(1000, 512)]
    [2.0, 512.0, 488.0]
    """
    size = np.minimum(chunk_tokens, isl)
    chunks = np.ceil(isl / size)
    return ChunkPlan(chunks, size, isl - (chunks - 1) * size)


class _Cores(NamedTuple):
    """Scores and values of all chunks of one layer."""

    whole: Cost  # summed over the chunks
    full: Cost  # of the last chunk of full size
    last: Cost  # of the last chunk


def _chunk_cores(
    model: ModelSpec, rates: Rates, tp: Numeric, chunk_tokens: Numeric, prompts: Numeric, isl: float, form: str
) -> tuple[Cost, ...]:
    """Per kind the three costs of ``_Cores``; the chunks are a trailing axis that is summed away."""
    plan = ChunkPlan(*(np.asarray(x)[..., None] for x in chunk_plan(isl, chunk_tokens)))
    step = np.arange(int(np.max(plan.chunks)), dtype=float)
    live = step < plan.chunks
    last = (plan.chunks - 1).astype(int)
    tokens = Tokens(
        prompts=np.asarray(prompts)[..., None],
        new=np.where(step < plan.chunks - 1, plan.size, plan.last),
        past=np.minimum(step, plan.chunks - 1) * plan.size,
    )
    costs: list[Cost] = []
    for kind in model.kinds:
        every = attention_cost(kind, rates, np.asarray(tp)[..., None], tokens, form)
        shape = np.broadcast_shapes(np.shape(every.time), live.shape)
        parts = [np.broadcast_to(getattr(every, f.name), shape) for f in fields(Cost)]
        costs.append(Cost(*(np.sum(part * live, axis=-1) for part in parts)))
        for where in (np.maximum(last - 1, 0), last):
            index = np.broadcast_to(where, (*shape[:-1], 1))
            costs.append(Cost(*(np.take_along_axis(part, index, axis=-1)[..., 0] for part in parts)))
    return tuple(costs)


def chunked_prefill_pass(
    model: ModelSpec, rates: Rates, degrees: Degrees, *, batch: Numeric, isl: float, chunk_tokens: Numeric,
    mla_form: str = "auto",
) -> PrefillPass:  # fmt: skip
    """CPP: ``FTL = sum(t_i) + (p-1)*max(t_i)``, busy time sum(t_i) of the slowest stage.

    A chunk takes ``chunk_tokens`` of each of the prompts of a rank. Attention re-reads what came
    before; MLA re-projects it (``naive``), works in latent space (``absorbed``) or kept it
    (``cached``). The head runs once, after the last chunk. The steady stream leaves no bubble, so
    an instance takes a new pass every ``busy`` seconds.
    """
    pp = degrees.pp
    prompts = np.ceil(batch / degrees.dp_attn)
    plan = chunk_plan(isl, chunk_tokens)

    def linear(size: Numeric) -> Any:
        def side(tp: Numeric, new: Numeric, sequences: Numeric) -> tuple[Cost, ...]:
            tokens = Tokens(prompts=sequences, new=new, emitted=sequences)
            return _attention_side(model, rates, tp, tokens, mla_form, "prefill", core=False)

        total = np.minimum(prompts * degrees.dp_attn, batch) * size
        return _layer_costs(
            model, rates, degrees, phase="prefill",
            attention_side=tabulate(side, (degrees.tp_attn, size), prompts),
            rank_tokens=prompts * size, total_tokens=total,
        )  # fmt: skip

    def cores(tp: Numeric, size: Numeric, sequences: Numeric) -> tuple[Cost, ...]:
        return _chunk_cores(model, rates, tp, size, sequences, isl, mla_form)

    full = linear(plan.size)
    final = linear(plan.last) if np.any(plan.last != plan.size) else full
    attention = tabulate(cores, (degrees.tp_attn, chunk_tokens), prompts)
    table = stage_table(model, pp)
    host = rates.profile.host
    busy: Numeric = 0.0
    largest: Numeric = 0.0
    for counts, first, last in zip(table.layers, table.first, table.last, strict=True):
        whole = (plan.chunks - 1) * (first * full.embedding.time + host) + host
        one = first * full.embedding.time + host
        end = first * final.embedding.time + last * final.head.time + host
        whole = whole + first * final.embedding.time + last * final.head.time
        for index in range(len(model.kinds)):
            core = _Cores(*attention[3 * index : 3 * index + 3])
            count = counts[..., index]
            whole = whole + count * (
                (plan.chunks - 1) * full.kinds[index].time + final.kinds[index].time + core.whole.time
            )
            one = one + count * (full.kinds[index].time + core.full.time)
            end = end + count * (final.kinds[index].time + core.last.time)
        busy = np.maximum(busy, whole)
        largest = np.maximum(largest, np.maximum(np.where(plan.chunks > 1, one, 0.0), end))
    hop = hop_cost(prompts * plan.size, model.hidden, degrees.gpus, rates) * (pp - 1)
    total = hop + final.head + Cost(time=host * pp * plan.chunks, latency=host * pp * plan.chunks)
    total = total + full.embedding * (plan.chunks - 1) + final.embedding
    for index, count in enumerate(model.kind_counts):
        layers = full.kinds[index] * (plan.chunks - 1) + final.kinds[index] + attention[3 * index]
        total = total + layers * count
    return PrefillPass(busy + (pp - 1) * largest + hop.time, busy, total)


class MixedStep(NamedTuple):
    """One step of B decodes and a chunk of prefill."""

    time: Numeric  # [s]
    cost: Cost


def mixed_step(
    model: ModelSpec, rates: Rates, degrees: Degrees, *, batch: Numeric, context: Numeric, chunk_tokens: Numeric,
    past: Numeric, isl: float, mla_form: str = "auto",
) -> MixedStep:  # fmt: skip
    """ONE linear pass at T = B + c; prefill and decode attention one after the other.

    ``chunk_tokens`` new tokens (over all DP ranks, zero everywhere or positive everywhere) after
    ``past`` cached ones of their prompt; more than ``isl`` of them are several prompts. c = 0 is the
    decode step, B = 0 a chunk. Source: physics page, section 7 (Mixed) and 8.
    """
    pp = degrees.pp
    microbatches = np.minimum(pp, np.maximum(batch, 1.0))
    micro = np.ceil(batch / microbatches)
    decodes = np.ceil(micro / degrees.dp_attn)
    share = chunk_tokens / microbatches / degrees.dp_attn
    has_prefill = bool(np.any(np.asarray(chunk_tokens) > 0))
    prompts = np.maximum(share / isl, 1.0) if has_prefill else 0.0
    new = np.minimum(share, isl) if has_prefill else 0.0
    tokens = Tokens(
        prompts=prompts, new=new, past=past if has_prefill else 0.0, decodes=decodes, context=context,
        emitted=decodes + prompts,
    )  # fmt: skip
    phase = "prefill" if has_prefill else "decode"
    side = _attention_side(model, rates, degrees.tp_attn, tokens, mla_form, phase)
    total_tokens = micro + chunk_tokens / microbatches
    costs = _layer_costs(
        model, rates, degrees, phase=phase, attention_side=side, rank_tokens=tokens.linear, total_tokens=total_tokens
    )
    stage = _slowest_stage(model, rates, pp, costs)
    hop = hop_cost(tokens.linear, model.hidden, degrees.gpus, rates) * np.where(np.asarray(pp) > 1, pp, 0.0)
    time = np.maximum(microbatches, pp) * stage + hop.time
    return MixedStep(time, _whole_pass(model, rates, pp, costs, hop))
