"""Time the layers of a mixed step: decodes and a chunk of prefill in one linear pass, their scores one after the other.

Physics page, sections 7 (Mixed) and 8 (piggyback).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.cost import total_cost
from disagg_sim.physics.distinct import distinct_rows, equal_rows
from disagg_sim.physics.drafting import drafts_of, joining, of_drafter
from disagg_sim.physics.operators import Tokens
from disagg_sim.physics.passes.experts import join_experts
from disagg_sim.physics.passes.layers import AttentionSide, LayerTimes, all_stages, attention_cost, attention_side
from disagg_sim.physics.rank_load import RankLoad
from disagg_sim.physics.roofline import AnySums, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, DistinctPairs, tabulate
from disagg_sim.physics.work import Numeric


@dataclass(frozen=True, slots=True)
class Chunk:
    """The prefill that rides along with the decodes of a step."""

    tokens: Numeric  # new tokens over all DP ranks [token]
    #: Length of the prompts that they are cut from; a share of a rank above it is several prompts. A number, or of
    #: shape (1, columns), as ``past``. [token]
    isl: Numeric
    ranks: Numeric | None = None  # DP ranks that take an even share each, from a prompt of its own; None = all [1]
    past: Numeric = 0.0  # tokens of each prompt whose cache is there already; the others are cut [token]

    @property
    def new(self) -> Numeric:
        """Tokens of a prompt that are computed. [token]"""
        return self.isl - self.past

    def at_columns(self, wanted: Ints | None) -> Chunk:
        """The prompts at some columns of a grid, None = all; its tokens and ranks are those of a ``Load``."""
        if wanted is None or not np.ndim(self.isl):
            return self
        return replace(self, isl=self.isl[:, wanted], past=self.past[:, wanted])


def chunk_share(chunk_tokens: Numeric, dp: Numeric) -> Numeric:
    """Prefill tokens of the fullest DP rank in a micro-batch: an even share of ``chunk_tokens``, at least 1. [token]"""
    share = chunk_tokens / dp
    return np.where(share > 0, np.maximum(share, 1.0), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every micro-batch of a step carries, at the distinct rows of a grid: those of one depth and DP degree."""

    row: Ints | None  # (rows of the grid,) place of each in these; None = they are its rows [1]
    columns: tuple[Ints, Ints] | None  # first column of every batch, and place of each column in these [1]
    dp: Numeric  # [1]
    microbatches: Numeric  # [1]
    decodes: Numeric  # sequences in decode, over all DP ranks, the mean [1]
    chunk: Numeric  # prefill tokens, over all DP ranks [token]
    chunk_ranks: Numeric  # DP ranks that share them [1]
    drafts: Numeric = 0  # of each sequence in decode [token]
    most: Numeric | None = None  # sequences of the fullest rank; None = an even share, rounded up [1]
    uneven: Numeric | None = None  # mean cache on the rank with the most, (rows, batches); None = as on all [token]

    @classmethod
    def of(cls, at: Setup, mapping: Sharding, batch: Numeric, chunk: Chunk, held: RankLoad) -> Load:
        """The load of ``batch`` sequences, ``held`` by the ranks, and a chunk."""
        pp, dp, drafts, row = mapping.pp, mapping.dp_attn, drafts_of(at, mapping), None
        uneven, most = held.context if np.ndim(held.context) == 2 else None, held.batch
        tokens, ranks = chunk.tokens, dp if chunk.ranks is None else chunk.ranks
        if np.ndim(pp) == 2:
            degrees = [np.broadcast_to(each, np.shape(pp))[:, 0] for each in (pp, dp, drafts)]
            varied = [np.asarray(each) for each in (batch, tokens, ranks) if np.ndim(each) == 2]
            first, row = distinct_rows([*degrees, *(equal_rows(each)[1] for each in varied if len(each) > 1)])

            def at_first(values: Any) -> Any:
                return values[first] if np.ndim(values) == 2 and len(values) > 1 else values

            pp, dp, drafts, batch, tokens, ranks, uneven, most = (
                at_first(each) for each in (pp, dp, drafts, batch, tokens, ranks, uneven, most)
            )
        columns: tuple[Ints, Ints] | None = None
        if np.ndim(batch) == 2 and len(batch) == 1:
            values, where, place = np.unique(batch[0], return_index=True, return_inverse=True)
            columns = (where, place) if values.size < place.size else None
        microbatches = np.minimum(pp, np.maximum(batch, 1.0))
        return cls(
            row=row,
            columns=columns,
            dp=dp,
            microbatches=microbatches,
            decodes=batch / microbatches,
            chunk=tokens / microbatches,
            chunk_ranks=ranks,
            drafts=drafts,
            most=None if most is None else most / microbatches,
            uneven=uneven,
        )

    @property
    def joins(self) -> bool:
        """Whether there are decodes."""
        return bool(np.any(np.asarray(self.decodes) > 0))

    @property
    def prefills(self) -> bool:
        """Whether there are prefill tokens."""
        return bool(np.any(np.asarray(self.chunk) > 0))

    @property
    def fullest(self) -> Load:
        """The same for the micro-batch with most sequences."""
        return replace(self, decodes=np.ceil(self.decodes))

    @property
    def without_chunk(self) -> Load:
        """Decodes alone."""
        return replace(self, chunk=0.0)

    @property
    def queries(self) -> Numeric:
        """New tokens of each sequence in decode. [token]"""
        return 1.0 + self.drafts

    @property
    def sequences(self) -> Numeric:
        """In decode, of the fullest rank, which is never below an even share. [1]"""
        even = np.ceil(self.decodes / self.dp)
        return even if self.most is None else np.maximum(self.most, even)

    @property
    def share(self) -> Numeric:
        """Prefill tokens of the fullest rank. [token]"""
        return chunk_share(self.chunk, self.chunk_ranks)

    @property
    def tokens(self) -> Numeric:
        """New tokens of the fullest rank. [token]"""
        return self.sequences * self.queries + self.share

    def at_columns(self, wanted: Ints | None) -> Load:
        """The same at some columns of the grid, None = all."""
        if wanted is None:
            return self
        named = {
            name: getattr(self, name) for name in ("microbatches", "decodes", "chunk", "chunk_ranks", "most", "uneven")
        }
        found = {name: each[:, wanted] for name, each in named.items() if np.ndim(each) == 2 and each.shape[1] > 1}
        return replace(self, columns=None, **found)

    @property
    def distinct_decodes(self) -> Load:
        """Decodes alone, one column for each batch."""
        alone = self.without_chunk
        if self.columns is None:
            return alone
        first, _ = self.columns
        named = ((name, getattr(self, name)) for name in ("microbatches", "decodes", "most", "uneven"))
        found = {name: each[:, first] if np.ndim(each) == 2 else each for name, each in named}
        return replace(alone, columns=None, chunk_ranks=1.0, **found)

    def over_columns(self, times: LayerTimes, wanted: Ints | None) -> LayerTimes:
        """Times of ``distinct_decodes`` at every column, or at the wanted ones; not their scores and sums."""
        place = wanted
        if self.columns is not None:
            place = self.columns[1] if wanted is None else self.columns[1][wanted]
        if place is None:
            return times

        def spread(values: Numeric) -> Numeric:
            return np.take(values, place, axis=1) if np.ndim(values) == 2 and np.shape(values)[1] > 1 else values

        layers = tuple(spread(each) for each in times.layers)
        return times._replace(layers=layers, embedding=spread(times.embedding), head=spread(times.head))

    def over_rows(self, values: Numeric) -> Numeric:
        """Values of the distinct rows at every row of the grid."""
        return values if self.row is None or np.ndim(values) < 2 or len(values) == 1 else values[self.row]


def _linear(
    at: Setup,
    phase: str,
    tp: Numeric,
    dcp: Numeric,
    rows: Numeric,
    sequences: Numeric,
    share: Numeric,
    new: Numeric,
    *,
    emits_all: bool,
) -> AttentionSide:
    """The attention ranks' part of a step without scores and values."""
    some, piece = _prompts(share, new)
    emitted = sequences * (rows if emits_all else 1.0) + some
    tokens = Tokens(prompts=some, new=piece, decodes=sequences, queries=rows, emitted=emitted, dcp=dcp)
    return attention_side(at, tp, tokens, "auto", phase, core=False)


def _cores(
    at: Setup, forms: tuple[str, ...], *arguments: Numeric, prefills: bool
) -> tuple[tuple[tuple[Numeric, ...], Sums], ...]:
    """Scores and values of one layer of each kind, and the sums of all layers, under each form of the chunk's MLA.

    Of the chunk, then of the decodes, which are the same under all forms.
    """
    tp, dcp, rows, sequences, share, new, past, context = arguments
    some, piece = _prompts(share, new) if prefills else (0.0, 0.0)
    latent = past * (piece / new)  # a prompt has as many pieces, of which the first up-projects its prefix
    chunk = Tokens(prompts=some, new=piece, past=past + (new - piece) / 2, latent=latent, dcp=dcp)
    running = Tokens(decodes=sequences, context=context, queries=rows, dcp=dcp)
    kinds = layers_of(at.model)
    blocks = dict.fromkeys(layer.attention for layer, _ in kinds)
    decodes = {block: attention_cost(block, at, tp, running, "auto") for block in blocks}
    found = []
    for form in forms:
        costs = {block: attention_cost(block, at, tp, chunk, form) + decodes[block] for block in blocks}
        sums = Sums()
        for layer, count in kinds:
            sums = sums.plus(costs[layer.attention].sums, count)
        found.append((tuple(costs[layer.attention].time for layer, _ in kinds), sums))
    return tuple(found)


def _prompts(share: Numeric, new: Numeric) -> tuple[Numeric, Numeric]:
    """Prompts that a share of a rank is cut from, none of no share, and the tokens of each."""
    return np.where(share > 0, np.maximum(share / new, 1.0), 0.0), np.minimum(share, new)


#: Times of the layers of a step, of each phase whose kernels run, and of each form of MLA.
OfPhases = list[list[LayerTimes]]


def mixed_layers(
    phases: Sequence[str],
    at: Setup,
    mapping: Sharding,
    load: Load,
    context: Numeric,
    prompts: Chunk,
    forms: tuple[str, ...],
    *,
    scored: bool = True,
) -> OfPhases:
    """Times of the layers of a step in the kernels of phases, its draft passes at the end of the last stage.

    Of each form of MLA; forms differ in ``scores`` and ``sums`` alone, unless draft passes make the head longer.
    Unless they are ``scored`` the scores are left out.
    """
    times = _layers(phases, at, mapping, load, context, prompts, forms, scored=scored)
    if at.speculation is None:
        return times
    own = of_drafter(at)

    def draft(part: Load, *, first: bool) -> list[list[tuple[Numeric, AnySums]]]:
        """A draft pass, of which each sequence and each prompt takes one token further."""
        layers = _layers(phases, own, mapping, part, context, prompts, forms, emits_all=False)
        joined = total_cost(joining(at, mapping.tp_attn, part.over_rows(part.tokens), first=first), at)
        return [[(all_stages(own.model, one) + joined.time, one.sums.plus(joined.sums)) for one in of] for of in layers]

    passes = draft(load, first=True)
    if load.joins and np.any(np.asarray(load.drafts) > 0):
        later = draft(replace(load.without_chunk, drafts=0), first=False)
        more = np.maximum(load.over_rows(load.drafts) - 1.0, 0.0)
        passes = [
            [
                (time + more * again, sums.plus(others, more))
                for (time, sums), (again, others) in zip(*of_phase, strict=True)
            ]
            for of_phase in zip(passes, later, strict=True)
        ]
    return [
        [
            one._replace(head=one.head + time, sums=one.sums.plus(sums))
            for one, (time, sums) in zip(*of_phase, strict=True)
        ]
        for of_phase in zip(times, passes, strict=True)
    ]


def _layers(
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
) -> OfPhases:
    """Times of the layers of one pass; of a sequence in decode all its new tokens are sampled, or the last."""
    dcp, _ = mapping.shares
    degrees = mapping.tp_attn, dcp, load.over_rows(load.queries)
    pairs, new, prefills = DistinctPairs(load.sequences, load.share, row=load.row), prompts.new, load.prefills
    # phases differ in the all-reduces that they hide alone
    hides = {phase: phase if at.profile.all_reduce_hidden_fraction else "decode" for phase in phases}
    linear = {
        each: tabulate(partial(_linear, at, each, emits_all=emits_all), degrees, pairs, new)
        for each in dict.fromkeys(hides.values())
    }
    scores: Any = ()
    if scored:
        cores = partial(_cores, at, forms if prefills else ("auto",), prefills=prefills)
        held = context if load.uneven is None else load.uneven
        scores = tabulate(cores, degrees, pairs, new, prompts.past, held)
    rank, total = (
        DistinctCounts(load.tokens, load.row),
        DistinctCounts(load.decodes * load.queries + load.chunk, load.row),
    )
    of_phases = [
        join_experts(at, mapping, linear[each], phase=phase, rank=rank, total=total) for phase, each in hides.items()
    ]
    if not scored:
        return [[times] * len(forms) for times in of_phases]
    count = 1 if prefills else len(forms)
    return [
        [times._replace(scores=each, sums=times.sums.plus(sums)) for each, sums in scores] * count
        for times in of_phases
    ]
