"""Time the mixed step of piggybacking: decodes and a chunk of prefill in one pass.

Physics page, sections 7 (Mixed) and 8 (piggyback). A step of B decodes and c prefill tokens makes
ONE linear pass at T = B + c; the scores and values of both run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.cost import hop_cost, total_cost
from disagg_sim.physics.passes.engine_time import (
    LayerTimes,
    all_stages,
    host_time,
    prefill_stretch,
    slowest_stage,
    step_time,
)
from disagg_sim.physics.passes.layers import (
    AttentionSide,
    attention_cost,
    attention_side,
    join_experts,
    stretched,
    with_host_and_hops,
    with_prefill,
)
from disagg_sim.physics.roofline import AnySums, Sums, at_columns, chosen_sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, alike_rows, tabulate
from disagg_sim.physics.work import Numeric, Tokens
from disagg_sim.techniques.speculation.physics import joining, of_drafter


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill tokens of a step, beside its decodes."""

    tokens: Numeric  # new tokens over all DP ranks [token]
    #: Length of the prompts that they are cut from; a rank whose share is larger has several prompts. A number, or of
    #: shape (1, columns), as ``past``. [token]
    isl: Numeric
    ranks: Numeric | None = None  # DP ranks with an even share each, of prompts of their own; None = all [1]
    past: Numeric = 0.0  # cached tokens of each prompt; the others are cut into chunks [token]

    @property
    def new(self) -> Numeric:
        """Tokens of a prompt that are not cached. [token]"""
        return self.isl - self.past


def chunk_share(chunk_tokens: Numeric, dp: Numeric) -> Numeric:
    """Prefill tokens of the fullest DP rank in a micro-batch: an even share of ``chunk_tokens``, at least 1. [token]"""
    share = chunk_tokens / dp
    return np.where(share > 0, np.maximum(share, 1.0), 0.0)


class MixedStep(NamedTuple):
    """One step of B decodes and a chunk of prefill."""

    time: Numeric  # [s]
    sums: AnySums  # of the whole pass; the largest names its bound [s]

    def columns(self, first: int, count: int) -> MixedStep:
        """Take ``count`` columns of a grid, from column ``first`` on."""
        place = np.arange(first, first + count)
        return MixedStep(np.take(self.time, place, axis=1), at_columns(self.sums, place))


def mixed_step(
    at: Setup,
    mapping: Sharding,
    *,
    batch: Numeric,
    context: Numeric,
    chunk: Chunk,
    mla_form: str = "auto",
    rank_batch: Numeric | None = None,
) -> MixedStep:
    """Time one step of ``batch`` decodes at mean length ``context`` and a chunk of prefill.

    Both counts are over all DP ranks, and each is zero everywhere or positive everywhere. Without a chunk this is a
    decode step, without decodes a step of prefill alone. The micro-batches of a pipeline take successive pieces of a
    rank's share. Kernels and expert imbalance are those of the phase with more tokens. With k draft tokens a sequence
    brings 1 + k tokens; the first draft pass takes the chunk, too, the others decodes alone.

    The time is the mean over the chunks of a prompt: it is taken at their mean past, ``C + (ISL-C-S)/2``
    for pieces of S tokens of a prompt that has C cached. Scores, cache traffic and re-projection are affine in the
    past, so this is exact but for the larger of compute and memory time, and for the choice between kernels, which
    is made once a prompt. ``mla_form`` is the form of the chunk (``naive`` projects the past up again,
    ``absorbed`` works in latent space, ``cached`` reads keys and values that it kept); decodes are absorbed.
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
        Form of the chunk; ``auto`` is the faster of ``naive`` and ``absorbed``.
    rank_batch
        As in ``decode_step``; ``context`` is then the mean on the fullest rank. [request]

    Returns
    -------
    MixedStep
        Arrays of shape (rows, batches), or numbers. [s]

    Examples
    --------
    A chunk of 2048 tokens makes a step of 64 decodes 14 times as long:

    >>> from disagg_sim.physics.setup import setup
    >>> at, eight = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal"), Sharding(tp_attn=8, tp_ffn=8)
    >>> chunks = [Chunk(tokens, isl=8192) for tokens in (0.0, 2048.0)]
    >>> steps = [mixed_step(at, eight, batch=64.0, context=1000.0, chunk=chunk) for chunk in chunks]
    >>> [f"{1e3 * step.time:.1f} ms" for step in steps]
    ['2.8 ms', '39.5 ms']
    """
    (step,) = mixed_step_by_form(
        at, mapping, batch=batch, context=context, chunk=chunk, forms=(mla_form,), rank_batch=rank_batch
    )
    return step


def mixed_step_by_form(
    at: Setup,
    mapping: Sharding,
    *,
    batch: Numeric,
    context: Numeric,
    chunk: Chunk,
    forms: tuple[str, ...] = ("auto",),
    decode_form: str = "auto",
    rank_batch: Numeric | None,
) -> list[MixedStep]:
    """Time the same step as ``mixed_step`` under several forms of MLA of its chunk, and one of its decodes."""
    pp, dp, drafts = mapping.pp, mapping.dp_attn, at.drafts(mapping)
    ranks = dp if chunk.ranks is None else chunk.ranks
    microbatches = np.minimum(pp, np.maximum(batch, 1.0))
    mean, tokens = batch / microbatches, chunk.tokens / microbatches
    most = np.ceil(mean)  # sequences of the fullest micro-batch
    even = np.ceil(most / dp)  # least sequences of its fullest rank, however requests are routed
    load = Load(
        sequences=even if rank_batch is None else np.maximum(rank_batch / microbatches, even),
        queries=1.0 + drafts,
        share=chunk_share(tokens, ranks),
        decodes=most,
        chunk=tokens,
        alike=alike_rows((pp, dp, drafts), batch, chunk.tokens, ranks),
        form=decode_form,
    )

    # decodes return to the first stage
    hops = np.where(np.asarray(pp) > 1, pp, 0.0) if load.has_decodes else pp - 1
    hop, decodes = hop_cost(load.tokens, mapping.gpus, at) * hops, mean if load.has_decodes else 0.0
    host, found = host_time(at, mapping, decodes), []
    for times in _layers(at, mapping, load, context, chunk, forms):
        stage, whole = slowest_stage(at, pp, times), all_stages(at.model, times)
        # steps with prefill run outside CUDA graphs
        time = step_time(at, mapping, microbatches, stage, whole, decodes=decodes, graphs=not load.has_prefill)
        time = time + hop.time
        time = at.lengthened(time, batch) if load.has_decodes else time
        found.append(MixedStep(time, with_host_and_hops(times.sums, hop, host)))
    return found


class Load(NamedTuple):
    """Tokens and sequences of the fullest micro-batch of a step."""

    sequences: Numeric  # in decode on the fullest rank, at least an even share [1]
    queries: Numeric  # new tokens of each [token]
    share: Numeric  # prefill tokens of the fullest rank [token]
    decodes: Numeric  # sequences in decode, over all DP ranks [1]
    chunk: Numeric  # prefill tokens, over all DP ranks [token]
    alike: tuple[Any, Any] | None  # rows of a grid with equal counts
    form: str  # of MLA, of decodes

    @property
    def has_decodes(self) -> bool:
        """Whether there are decodes."""
        return bool(np.any(np.asarray(self.decodes) > 0))

    @property
    def has_prefill(self) -> bool:
        """Whether there are prefill tokens."""
        return bool(np.any(np.asarray(self.chunk) > 0))

    @property
    def without_chunk(self) -> Load:
        """Decodes alone."""
        return self._replace(share=0.0, chunk=0.0)

    @property
    def tokens(self) -> Numeric:
        """New tokens of the fullest rank. [token]"""
        return self.sequences * self.queries + self.share


def _layers(
    at: Setup, mapping: Sharding, load: Load, context: Numeric, prompts: Chunk, forms: tuple[str, ...]
) -> list[LayerTimes]:
    """Time the layers of a step under each form, with the kernels of the phase that has more tokens at each point.

    With an engine: the decodes alone in decode kernels, plus ``prefill_stretch`` times the time that prefill adds. So a
    step with prefill is never faster than its decodes alone, though its exchange of experts may be.
    """
    prefill_leads = np.asarray(load.chunk > load.decodes * load.queries)
    same_kernels = not at.model.is_moe and at.profile.all_reduce_hidden_fraction == 0.0
    if np.all(prefill_leads):
        phases: tuple[str, ...] = ("prefill",)
    else:
        phases = ("decode",) if same_kernels or not np.any(prefill_leads) else ("decode", "prefill")

    def of_leading_phase(of_phases: Sequence[LayerTimes]) -> LayerTimes:
        """Take at each point the times of the phase with more tokens."""
        if len(of_phases) == 1:
            return of_phases[0]
        decode, prefill = of_phases
        return LayerTimes(
            tuple(np.where(prefill_leads, *both) for both in zip(prefill.layers, decode.layers, strict=True)),
            decode.scores,
            decode.embedding,
            np.where(prefill_leads, prefill.head, decode.head),
            chosen_sums(prefill_leads, prefill.sums, decode.sums),
        )

    of_phases = drafted_layers(phases, at, mapping, load, context, prompts, forms)
    found = [of_leading_phase(of_form) for of_form in zip(*of_phases, strict=True)]
    if at.overheads is None or not load.has_prefill:
        return found
    stretch = prefill_stretch(at)
    if not load.has_decodes:
        return [stretched(times, stretch) for times in found]
    kernels = tuple(dict.fromkeys(("decode", *phases)))
    alone = drafted_layers(kernels, at, mapping, load.without_chunk, context, Chunk(0.0, 1.0), ("auto",), scored=False)
    decodes = {phase: times for phase, (times,) in zip(kernels, alone, strict=True)}
    in_pass = of_leading_phase([decodes[phase] for phase in phases])
    mixed: list[LayerTimes] = []
    for times in found:
        if mixed and at.speculation is None:  # forms differ only in scores and sums
            mixed.append(mixed[0]._replace(scores=times.scores, sums=times.sums))
        else:
            mixed.append(with_prefill(decodes["decode"], in_pass, times, stretch))
    return mixed


def drafted_layers(
    phases: Sequence[str],
    at: Setup,
    mapping: Sharding,
    load: Load,
    context: Numeric,
    prompts: Chunk,
    forms: tuple[str, ...],
    *,
    scored: bool = True,
) -> list[list[LayerTimes]]:
    """Time the layers of a step, with its draft passes in the head, for the kernels of each phase and each form.

    Forms of MLA differ only in ``scores`` and ``sums``, and with draft passes in ``head``. ``scored=False`` leaves
    scores and values out. Without a chunk, which the drafter caches, a row without drafts has no such pass.
    """
    times = _one_pass(phases, at, mapping, load, context, prompts, forms, scored=scored)
    drafting: Numeric = 1.0 if load.has_prefill else np.where(np.asarray(load.queries) > 1, 1.0, 0.0)
    if at.speculation is None or not np.any(drafting):
        return times
    own = of_drafter(at)

    def draft(part: Load, *, first: bool) -> list[list[tuple[Numeric, AnySums]]]:
        """Time a draft pass, which emits one token of each sequence and each prompt."""
        layers = _one_pass(phases, own, mapping, part, context, prompts, forms, emits_all=False)
        joined = total_cost(joining(at, mapping.tp_attn, part.tokens, first=first), at)
        return [[(all_stages(own.model, one) + joined.time, one.sums.plus(joined.sums)) for one in of] for of in layers]

    passes = draft(load, first=True)
    if load.has_decodes and np.any(np.asarray(load.queries) > 1):
        later = draft(load.without_chunk._replace(queries=1.0), first=False)
        more = np.maximum(load.queries - 2.0, 0.0)
        passes = [
            [
                (time + more * again, sums.plus(others, more))
                for (time, sums), (again, others) in zip(*of_phase, strict=True)
            ]
            for of_phase in zip(passes, later, strict=True)
        ]
    return [
        [
            one._replace(head=one.head + drafting * time, sums=one.sums.plus(sums, drafting))
            for one, (time, sums) in zip(*of_phase, strict=True)
        ]
        for of_phase in zip(times, passes, strict=True)
    ]


def _one_pass(
    phases: Sequence[str],
    at: Setup,
    mapping: Sharding,
    load: Load,
    context: Numeric,
    prompts: Chunk,
    forms: tuple[str, ...],
    *,
    emits_all: bool = True,
    scored: bool = True,
) -> list[list[LayerTimes]]:
    """Time the layers of one pass in the kernels of each phase; decodes emit all their new tokens, or the last one."""
    dcp, _ = mapping.shares
    degrees = mapping.tp_attn, dcp, load.queries
    pairs, new = DistinctCounts(load.sequences, load.share, alike=load.alike), prompts.new
    apart = scored and load.has_prefill
    core = scored and not apart  # decodes alone: scores are timed with all else
    whole = partial(_linear, at, form=load.form, emits_all=emits_all, core=core)
    # phases differ only in the share of the all-reduces that they hide
    hides = {phase: phase if at.profile.all_reduce_hidden_fraction else "decode" for phase in phases}
    linear = {
        each: tabulate(partial(whole, each), degrees, pairs, new, *([context] if core else []))
        for each in dict.fromkeys(hides.values())
    }
    scores: Any = ()
    if apart:
        scores = tabulate(partial(_cores, at, forms, load.form), degrees, pairs, new, prompts.past, context)
    rank = DistinctCounts(load.tokens, alike=load.alike)
    total = DistinctCounts(load.decodes * load.queries + load.chunk, alike=load.alike)
    of_phases = [
        join_experts(at, mapping, linear[each], phase=phase, rank=rank, total=total) for phase, each in hides.items()
    ]
    if not apart:
        return [[times] * len(forms) for times in of_phases]
    return [[times._replace(scores=each, sums=times.sums.plus(sums)) for each, sums in scores] for times in of_phases]


def _linear(
    at: Setup,
    phase: str,
    tp: Numeric,
    dcp: Numeric,
    rows: Numeric,
    sequences: Numeric,
    share: Numeric,
    new: Numeric,
    context: Numeric = 0.0,
    *,
    form: str,
    emits_all: bool,
    core: bool,
) -> AttentionSide:
    """Time the work of the attention ranks in a step, scores and values where ``core`` is true. [s]"""
    some, piece = _prompts(share, new)
    emitted = sequences * (rows if emits_all else 1.0) + some
    tokens = Tokens(prompts=some, new=piece, decodes=sequences, context=context, queries=rows, emitted=emitted, dcp=dcp)
    return attention_side(at, tp, tokens, form, phase, core=core)


def _cores(
    at: Setup, forms: tuple[str, ...], decode_form: str, *arguments: Numeric
) -> tuple[tuple[tuple[Numeric, ...], Sums], ...]:
    """Time scores and values of one layer of each kind, and sum them over all layers, under each form of the chunk.

    The decodes of the step are included; they are the same under all forms.
    """
    tp, dcp, rows, sequences, share, new, past, context = arguments
    some, piece = _prompts(share, new)
    latent = past * (piece / new)  # of the new/piece pieces of a prompt, only the first up-projects its prefix
    chunk = Tokens(prompts=some, new=piece, past=past + (new - piece) / 2, latent=latent, dcp=dcp)
    running = Tokens(decodes=sequences, context=context, queries=rows, dcp=dcp)
    kinds = layers_of(at.model)
    blocks = dict.fromkeys(layer.attention for layer, _ in kinds)
    decodes = {block: attention_cost(block, at, tp, running, decode_form) for block in blocks}
    found = []
    for form in forms:
        costs = {block: attention_cost(block, at, tp, chunk, form) + decodes[block] for block in blocks}
        sums = Sums()
        for layer, count in kinds:
            sums = sums.plus(costs[layer.attention].sums, count)
        found.append((tuple(costs[layer.attention].time for layer, _ in kinds), sums))
    return tuple(found)


def _prompts(share: Numeric, new: Numeric) -> tuple[Numeric, Numeric]:
    """Find how many prompts a rank's share is cut from, 0 without a share, and the tokens of each."""
    return np.where(share > 0, np.maximum(share / new, 1.0), 0.0), np.minimum(share, new)
