"""Time the mixed step of piggybacking: decodes and a chunk of prefill in one pass.

Physics page, sections 7 (Mixed) and 8 (piggyback). A step of B decodes and c prefill tokens makes
ONE linear pass at T = B + c; the scores and values of both run one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.errors import InputError
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.cost import hop_cost, total_cost
from disagg_sim.physics.drafting import drafts_of, joining, of_drafter
from disagg_sim.physics.operators import Tokens
from disagg_sim.physics.passes.engine_time import host_time, prefill_stretch, step_time
from disagg_sim.physics.passes.experts import expert_lookups
from disagg_sim.physics.passes.layers import (
    AttentionSide,
    LayerTimes,
    all_stages,
    attention_cost,
    attention_side,
    slowest_stage,
    stretched,
    with_ends,
    with_prefill,
)
from disagg_sim.physics.roofline import Cost, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import Levels, Lookups, evaluate, look_up_pairs, side_by_side
from disagg_sim.physics.work import Numeric


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """What prefill and decode cost each other in one step, beyond the sum of their work. Neutral by default.

    Both are assumptions of a study: no measurement of them is shipped. They act on steps that hold
    both phases and can only slow them down.

    Parameters
    ----------
    minority_efficiency : float
        Efficiency e of the phase that would take less time alone: what it adds to the other phase's
        own step takes 1/e as long, ``T = T_major + (T_mix - T_major)/e``. In (0, 1]. [1]
    overlap_loss : float
        Imperfect overlap k of the step's compute time c and memory time m: the roofline's
        ``max(c, m)`` becomes ``max(c, m) + k*min(c, m)``. In [0, 1]. [1]
    """

    minority_efficiency: float = 1.0
    overlap_loss: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if not 0 < self.minority_efficiency <= 1:
            raise InputError(f"minority_efficiency {self.minority_efficiency:g} is out of range; allowed: (0, 1]")
        if not 0 <= self.overlap_loss <= 1:
            raise InputError(f"overlap_loss {self.overlap_loss:g} is out of range; allowed: [0, 1]")


NO_INTERFERENCE = Interference()


class MixedStep(NamedTuple):
    """One step of B decodes and a chunk of prefill."""

    time: Numeric  # [s]
    sums: Sums  # of the whole pass; the largest names its bound [s]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The prefill that rides along with the decodes of a step.

    Parameters
    ----------
    tokens
        New tokens over all DP ranks. [token]
    isl
        Length of the prompts that they are cut from; a share of a rank above it is several prompts. [token]
    ranks
        DP ranks that take an even share each, from a prompt of its own; None = all. [1]
    past
        Tokens of each prompt whose cache is there already; the others are cut. [token]
    """

    tokens: Numeric
    isl: Numeric
    ranks: Numeric | None = None
    past: Numeric = 0.0

    @property
    def new(self) -> Numeric:
        """Tokens of a prompt that are computed. [token]"""
        return self.isl - self.past


@dataclass(frozen=True, slots=True)
class _Load:
    """What every micro-batch of a step carries."""

    microbatches: Numeric  # [1]
    decodes: Numeric  # sequences in decode, over all DP ranks, the mean [1]
    chunk: Numeric  # prefill tokens, over all DP ranks [token]
    chunk_ranks: Numeric  # DP ranks that share them [1]
    drafts: Numeric = 0  # of each sequence in decode [token]

    @property
    def queries(self) -> Numeric:
        """New tokens of each sequence in decode. [token]"""
        return 1.0 + self.drafts


def chunk_share(chunk_tokens: Numeric, dp: Numeric) -> Numeric:
    """Prefill tokens of the fullest DP rank in a micro-batch: an even share of ``chunk_tokens``, at least 1. [token]"""
    share = chunk_tokens / dp
    return np.where(share > 0, np.maximum(share, 1.0), 0.0)


def mixed_step(
    at: Setup,
    mapping: Mapping,
    *,
    batch: Numeric,
    context: Numeric,
    chunk: Chunk,
    mla_form: str = "auto",
    interference: Interference = NO_INTERFERENCE,
) -> MixedStep:
    """Time one step of ``batch`` decodes at mean length ``context`` and a chunk of prefill.

    Both counts are over all DP ranks, and each is zero everywhere or positive everywhere; no chunk is the decode
    step, no decodes a chunk. The micro-batches of a pipeline take successive pieces of a rank's share. Kernels and
    expert imbalance are those of the phase with more tokens. With draft tokens a sequence brings 1 + k tokens; the
    chunk passes the draft layers together with them, and the further draft passes follow.

    The time is the mean over the chunks of a prompt: it is taken at their mean past, ``C + (ISL-C-S)/2``
    for pieces of S tokens of a prompt that has C cached. Scores, cache traffic and re-projection are affine in the
    past, so this is exact but for the larger of compute and memory time, and for the choice between kernels, which
    is made once a prompt. ``mla_form`` is the form of the chunk (``naive`` re-projects the past,
    ``absorbed`` works in latent space, ``cached`` kept the up-projected past); decodes are absorbed.
    Source: physics page, sections 7 (Mixed) and 8 (piggyback).

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance; its degrees are numbers or of shape (rows, 1). [1]
    batch
        Sequences in decode over all DP ranks, a number or of shape (1, batches). [request]
    context
        Cached tokens of each, the mean. [token]
    chunk
        Prefill tokens of the step, and the prompts that they are cut from. [token]
    mla_form
        Of the chunk; ``auto`` is the faster of ``naive`` and ``absorbed``.
    interference
        What the phases cost each other beyond the sum of their work.

    Returns
    -------
    MixedStep
        Arrays of shape (rows, batches), or numbers. [s]

    Examples
    --------
    A chunk of 2048 tokens makes a step of 64 decodes 14 times as long:

    >>> from disagg_sim.physics.setup import setup
    >>> at, eight = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal"), Mapping(tp_attn=8, tp_ffn=8)
    >>> chunks = [Chunk(tokens, isl=8192) for tokens in (0.0, 2048.0)]
    >>> steps = [mixed_step(at, eight, batch=64.0, context=1000.0, chunk=chunk) for chunk in chunks]
    >>> [f"{1e3 * step.time:.1f} ms" for step in steps]
    ['2.8 ms', '39.5 ms']
    """
    return evaluate(
        mixed_lookups(
            at, mapping, batch=batch, context=context, chunk=chunk, mla_form=mla_form, interference=interference
        )
    )


def mixed_lookups(
    at: Setup,
    mapping: Mapping,
    *,
    batch: Numeric,
    context: Numeric,
    chunk: Chunk,
    mla_form: str = "auto",
    interference: Interference = NO_INTERFERENCE,
) -> Lookups[MixedStep]:
    """Time the same step as ``mixed_step``, its tables joined with those that others ask for.

    Parameters
    ----------
    at, mapping, batch, context, chunk, mla_form, interference
        As in ``mixed_step``.

    Returns
    -------
    Lookups of MixedStep
        For ``tabulate.evaluate``.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> asked = mixed_lookups(at, Mapping(), batch=64.0, context=1000.0, chunk=Chunk(512.0, isl=8192))
    >>> f"{1e3 * evaluate(asked).time:.1f} ms"
    '6.4 ms'
    """
    microbatches = np.minimum(mapping.pp, np.maximum(batch, 1.0))
    ranks = mapping.dp_attn if chunk.ranks is None else chunk.ranks
    both = _Load(microbatches, batch / microbatches, chunk.tokens / microbatches, ranks, drafts_of(at, mapping))
    step = yield from _step(at, mapping, both, context, chunk, mla_form)
    if interference == NO_INTERFERENCE or not (_any(batch) and _any(chunk.tokens)):
        return step
    time = step.time + interference.overlap_loss * np.minimum(step.sums.compute, step.sums.memory)
    if interference.minority_efficiency < 1:
        alone = yield from side_by_side(
            [
                _step(at, mapping, load, context, chunk, mla_form)
                for load in (replace(both, chunk=0.0), replace(both, decodes=0.0))
            ]
        )
        added = np.maximum(step.time - np.maximum(alone[0].time, alone[1].time), 0.0)
        time = time + added * (1.0 / interference.minority_efficiency - 1.0)
    return MixedStep(time, step.sums)


def _any(count: Numeric) -> bool:
    return bool(np.any(np.asarray(count) > 0))


class _Kernels(NamedTuple):
    """Kernels of a step: of one micro-batch on the slowest stage and on all stages, hand-over, sums of the pass."""

    stage: Numeric  # [s]
    whole: Numeric  # [s]
    hop: Cost  # [s]
    sums: Sums  # without host and hops [s]


def _step(at: Setup, mapping: Mapping, load: _Load, context: Numeric, prompts: Chunk, form: str) -> Lookups[MixedStep]:
    """The step without interference.

    With an engine, what the prefill adds to the decodes alone is stretched, and a step with prefill runs outside CUDA
    graphs.
    """
    stage, whole, hop, sums = yield from _kernels(at, mapping, load, context, prompts, form)
    prefills = _any(load.chunk)
    time = step_time(at, mapping, load.microbatches, stage, whole, decodes=load.decodes, graphs=not prefills)
    return MixedStep(time + hop.time, with_ends(sums, hop, host_time(at, mapping, load.decodes)))


def _kernels(
    at: Setup, mapping: Mapping, load: _Load, context: Numeric, prompts: Chunk, form: str
) -> Lookups[_Kernels]:
    """Kernels of a step, those of the phase with more tokens at each point."""
    load = replace(load, decodes=np.ceil(load.decodes))
    prefill_leads = np.asarray(load.chunk > load.decodes * load.queries)
    if np.all(prefill_leads):
        return (yield from _stretched_as("prefill", at, mapping, load, context, prompts, form))
    same_kernels = not at.model.is_moe and at.profile.all_reduce_hidden_fraction == 0.0
    if same_kernels or not np.any(prefill_leads):
        return (yield from _stretched_as("decode", at, mapping, load, context, prompts, form))
    decode, prefill = yield from side_by_side(
        [_stretched_as(phase, at, mapping, load, context, prompts, form) for phase in ("decode", "prefill")]
    )
    sums = Sums(*(np.where(prefill_leads, p, d) for p, d in zip(prefill.sums, decode.sums, strict=True)))
    stage, whole = (
        np.where(prefill_leads, getattr(prefill, name), getattr(decode, name)) for name in ("stage", "whole")
    )
    return _Kernels(stage, whole, decode.hop, sums)


def _stretched_as(
    phase: str, at: Setup, mapping: Mapping, load: _Load, context: Numeric, prompts: Chunk, form: str
) -> Lookups[_Kernels]:
    """Kernels of a step, of ``phase``; with an engine those of a decode step, and what prefill adds, stretched.

    So no step with prefill is faster than its decodes alone, whose exchange of experts lasts longer.
    """
    asked = [_times_as(phase, at, mapping, load, context, prompts, form)]
    stretches, joins = at.overheads is not None and _any(load.chunk), _any(load.decodes)
    if stretches and joins:
        alone = replace(load, chunk=0.0)
        asked += [
            _times_as(name, at, mapping, alone, context, prompts, form) for name in dict.fromkeys(("decode", phase))
        ]
    times, *alone_as = yield from side_by_side(asked)
    if alone_as:
        times = with_prefill(alone_as[0], alone_as[-1], times, prefill_stretch(at))
    elif stretches:
        times = stretched(times, prefill_stretch(at))
    pp = mapping.pp
    tokens = np.ceil(load.decodes / mapping.dp_attn) * load.queries + chunk_share(load.chunk, load.chunk_ranks)
    hops = np.where(np.asarray(pp) > 1, pp, 0.0) if _any(load.decodes) else pp - 1  # decodes return to the first stage
    hop = hop_cost(tokens, mapping.gpus, at) * hops
    return _Kernels(slowest_stage(at.model, pp, times), all_stages(at.model, times), hop, times.sums)


def _times_as(
    phase: str, at: Setup, mapping: Mapping, load: _Load, context: Numeric, prompts: Chunk, form: str
) -> Lookups[LayerTimes]:
    """Times of the layers of a step, of ``phase``, its draft passes at the end of the last stage."""
    times = yield from _layers_as(phase, at, mapping, load, context, prompts, form)
    if at.speculation is None:
        return times
    own = of_drafter(at)

    def draft(part: _Load, *, first: bool) -> Lookups[Cost]:
        """A draft pass, of which each sequence and each prompt takes one token further."""
        layers = yield from _layers_as(phase, own, mapping, part, context, prompts, form, emits_all=False)
        tokens = np.ceil(part.decodes / mapping.dp_attn) * part.queries + chunk_share(part.chunk, part.chunk_ranks)
        joined = total_cost(joining(at, mapping.tp_attn, tokens, first=first), at)
        return Cost(all_stages(own.model, layers) + joined.time, layers.sums.plus(joined.sums))

    passes = yield from draft(load, first=True)
    if _any(load.decodes) and _any(load.drafts):
        later = yield from draft(replace(load, chunk=0.0, drafts=0), first=False)
        more = np.maximum(load.drafts - 1.0, 0.0)
        passes = Cost(passes.time + more * later.time, passes.sums.plus(later.sums, more))
    return times._replace(head=times.head + passes.time, sums=times.sums.plus(passes.sums))


@dataclass(frozen=True, slots=True)
class _Side:
    """The attention ranks' part of a step: a share of the prefill tokens, and sequences in decode."""

    phase: str
    at: Setup
    context: Numeric
    new: Numeric  # of a prompt [token]
    past: Numeric  # cached tokens before them [token]
    form: str
    prefills: bool  # whether the step has prefill tokens
    emits_all: bool  # whether all new tokens of a sequence in decode are sampled, or the last

    def __call__(self, tp: Numeric, dcp: Numeric, rows: Numeric, sequences: Numeric, share: Numeric) -> AttentionSide:
        at, own = self.at, self.new
        some, piece = (np.maximum(share / own, 1.0), np.minimum(share, own)) if self.prefills else (0.0, 0.0)
        latent = self.past * (piece / own)  # a prompt has as many pieces, of which the first up-projects its prefix
        chunk = Tokens(prompts=some, new=piece, past=self.past + (own - piece) / 2, latent=latent, dcp=dcp)
        running = Tokens(decodes=sequences, context=self.context, queries=rows, dcp=dcp)
        emitted = sequences * (rows if self.emits_all else 1.0) + some
        linear = Tokens(prompts=some, new=piece, decodes=sequences, queries=rows, emitted=emitted, dcp=dcp)
        ends = attention_side(at, tp, linear, self.form, self.phase, core=False)
        scores, sums = list(ends.scores), ends.sums
        for index, (layer, count) in enumerate(layers_of(at.model)):
            block = layer.attention
            core = attention_cost(block, at, tp, chunk, self.form) + attention_cost(block, at, tp, running, "auto")
            scores[index] = core.time
            sums = sums.plus(core.sums, count)
        return ends._replace(scores=tuple(scores), sums=sums)


def _layers_as(
    phase: str,
    at: Setup,
    mapping: Mapping,
    load: _Load,
    context: Numeric,
    prompts: Chunk,
    form: str,
    *,
    emits_all: bool = True,
) -> Lookups[LayerTimes]:
    """Times of the layers of one pass; of a sequence in decode all its new tokens are sampled, or the last."""
    queries = load.queries
    decodes = np.ceil(load.decodes / mapping.dp_attn)
    share = chunk_share(load.chunk, load.chunk_ranks)
    dcp, _ = mapping.shares
    side = _Side(phase, at, context, prompts.new, prompts.past, form, _any(load.chunk), emits_all)
    ends = yield from look_up_pairs(side, (mapping.tp_attn, dcp, queries), decodes, share)
    return (
        yield from expert_lookups(
            at,
            mapping,
            ends,
            phase=phase,
            rank=Levels(decodes * queries + share),
            total=Levels(load.decodes * queries + load.chunk),
        )
    )
