"""Time chunked pipelined prefill (CPP): chunks of a prompt follow each other through the pipeline stages.

Physics page, section 7 (CPP). In CPP the micro-batches of the pipeline are the chunks of one
prompt, so stages work on different chunks of the same prompt at once.

Past 400 lines: the chunks of a table and their time are one idea.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.blocks.base import AttentionBlock, Layer
from disagg_sim.physics.cost import hop_cost, total_cost
from disagg_sim.physics.passes.engine_time import (
    LayerTimes,
    all_stages,
    host_time,
    launch_time,
    prefill_host,
    prefill_stretch,
    stage_table,
)
from disagg_sim.physics.passes.layers import (
    AttentionSide,
    attention_cost,
    attention_side,
    join_experts,
    stretched,
    with_host_and_hops,
)
from disagg_sim.physics.passes.prefill import PrefillPass, PromptLoad
from disagg_sim.physics.roofline import AnySums, Sums, added
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, alike_rows, distinct, is_one, tabulate
from disagg_sim.physics.work import Numeric, Tokens, head


class ChunkLoad(NamedTuple):
    """Chunks of CPP that the slowest ranks of a pass make of equal prompts, and prompts that stand for their scores."""

    prompts: Numeric  # of the rank with the most tokens [1]
    chunks: Numeric  # of each of them, the mean [1]
    size: Numeric  # tokens of one in all chunks but the last, the mean [token]
    last: Numeric  # in the last one [token]
    scored: PromptLoad  # whose scores and values are those of the slowest ranks

    @property
    def new(self) -> Numeric:
        """Tokens of a prompt. [token]"""
        return (self.chunks - 1.0) * self.size + self.last


def chunked_prefill_pass(
    at: Setup,
    mapping: Sharding,
    *,
    batch: Numeric,
    isl: Numeric,
    chunk_tokens: Numeric,
    past: Numeric = 0.0,
    mla_form: str = "auto",
    slowest: ChunkLoad | None = None,
) -> PrefillPass:
    """Time chunked pipelined prefill (CPP) of a batch of prompts.

    FTL is host + critical path + (p-1)*hop, with equal stages ``sum(t_i) + (p-1)*max(t_i)``.

    A chunk takes ``chunk_tokens`` of each of the prompts of a rank. Attention re-reads the tokens
    before the chunk; MLA projects them up again (``naive``), works in latent space (``absorbed``) or reads
    keys and values that it kept (``cached``). The head runs after every chunk: engines sample of part of a prompt,
    too. Without an engine host time counts once, since the chunks in flight hide the rest; with one, once a chunk. In a
    full queue an instance starts a pass every ``busy + stall`` seconds: host time with ``sum(t_i)`` of the slowest
    stage, and what that stage waits (``stalled``).
    Source: physics page, section 7 (CPP).

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance; its degrees are numbers or of shape (rows, 1). [1]
    batch
        Prompts of a pass over all DP ranks, a number or of shape (1, batches). [request]
    isl
        Length of each prompt. [token]
    chunk_tokens
        Tokens of a prompt in a chunk, at least 1; broadcasts with the degrees. [token]
    past
        Tokens of each prompt that are cached; the others are cut into chunks. A prefix cache holds
        latents, so the form ``cached`` up-projects it with the first chunk. [token]
    mla_form
        ``auto`` (the faster of ``naive`` and ``absorbed``), or the form to time; ignored without MLA.
    slowest
        Chunks of the slowest ranks, of shape (rows, batches); ``isl`` and ``past`` are then the means. None = all
        ranks have an even share of the prompts, rounded up, of length ``isl``.

    Returns
    -------
    PrefillPass
        Arrays of shape (rows, batches), or numbers. [s]

    Examples
    --------
    One prompt cannot fill four stages. In 16 chunks it takes (16 + 3)/16 of a stage's time instead of four times that,
    hops aside:

    >>> from disagg_sim.physics.passes.prefill import prefill_pass
    >>> from disagg_sim.physics.setup import setup
    >>> at, four = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal"), Sharding(tp_attn=8, tp_ffn=8, pp=4)
    >>> whole = prefill_pass(at, four, batch=1, isl=8192)
    >>> chunks = chunked_prefill_pass(at, four, batch=1, isl=8192, chunk_tokens=512)
    >>> [f"{one.ftl / one.busy:.1f}" for one in (whole, chunks)]
    ['4.2', '1.2']
    """
    (done,) = chunked_passes(
        at, mapping, batch=batch, isl=isl, chunk_tokens=chunk_tokens, past=past, forms=(mla_form,), slowest=slowest
    )
    return done


def chunked_passes(
    at: Setup,
    mapping: Sharding,
    *,
    batch: Numeric,
    isl: Numeric,
    chunk_tokens: Numeric,
    past: Numeric,
    forms: tuple[str, ...],
    slowest: ChunkLoad | None = None,
) -> list[PrefillPass]:
    """Time the same passes as ``chunked_prefill_pass`` under several forms of MLA: they differ in scores and values."""
    at, own, pp, new = at.with_draft_layers, at.draft_model, mapping.pp, 1.0 * (isl - past)
    prompts = np.ceil(batch / mapping.dp_attn)
    plan, (dcp, pcp) = chunk_plan(new, chunk_tokens), mapping.shares
    alike = None if slowest is not None else alike_rows((mapping.dp_attn, pcp, chunk_tokens, new), batch)
    levels = DistinctCounts(prompts, alike=None if slowest is not None else alike_rows((mapping.dp_attn,), batch))
    if slowest is not None:
        prompts = slowest.prompts
        plan = ChunkPlan(slowest.chunks, slowest.size, slowest.last)

    def linear(of: Setup, size: Numeric) -> Any:
        def attention(tp: Numeric, pcp: Numeric, sequences: Numeric, new: Numeric) -> AttentionSide:
            """Without scores, values and the head, which runs once a pass."""
            return attention_side(of, tp, Tokens(prompts=sequences, new=new, pcp=pcp), "auto", "prefill", core=False)

        if slowest is None:
            side = tabulate(attention, (mapping.tp_attn, pcp), levels, size)
            total = np.minimum(prompts * mapping.dp_attn, batch) * size
        else:
            side = tabulate(attention, (mapping.tp_attn, pcp), DistinctCounts(prompts, size))
            total = batch * new * (size / slowest.new)
        rank, every = DistinctCounts(prompts * size / pcp, alike=alike), DistinctCounts(total, alike=alike)
        return join_experts(of, mapping, side, phase="prefill", rank=rank, total=every)

    shards = mapping.tp_attn, dcp, pcp, chunk_tokens

    def scores(of: Setup, form: str) -> ChunkCores:
        def cores(*arguments: Any) -> ChunkCores:
            tp, dcp, pcp, chunk_tokens, prompts, new, past, most = arguments
            return chunk_cores(of, form, chunk_plan(new, chunk_tokens), (tp, dcp, pcp, prompts, past), most)

        if slowest is None:
            most = most_chunks(new, plan.chunks) if np.ndim(new) else None
            return tabulate(cores, shards, levels, new, past, most)
        some, length, cached = slowest.scored
        return tabulate(cores, shards, DistinctCounts(some, length, past if cached is None else cached), None)

    before = plan.chunks - 1

    def chunks(of: Setup, of_forms: tuple[str, ...]) -> tuple[_Chunks, list[ChunkCores]]:
        """Time everything but scores and values, then scores and values under every form of MLA."""

        def at_end(tp: Numeric, sequences: Numeric) -> tuple[Numeric, Sums]:
            cost = total_cost([head(of.model, of.precision, tp, sequences)], of)
            return cost.time, cost.sums

        head_time, head_sums = tabulate(at_end, (mapping.tp_attn,), levels)
        full = linear(of, plan.size)
        final = linear(of, plan.last) if np.any(plan.last != plan.size) else full
        full, final = (each._replace(head=head_time, sums=each.sums.plus(head_sums)) for each in (full, final))
        sums = full.sums.plus(full.sums, before - 1).plus(final.sums)
        full, final = (stretched(times, prefill_stretch(of)) for times in (full, final))
        return _Chunks(before, full, final, sums), [scores(of, form) for form in of_forms]

    parts, cores = chunks(at, forms)
    drafted = _NO_DRAFT
    if own is not None:
        own_parts, (own_cores,) = chunks(own, ("auto",))
        drafted = _drafted(own.model, own_parts, own_cores)
        parts = parts._replace(sums=parts.sums.plus(drafted.sums))
    hop = hop_cost(prompts * plan.size / pcp, mapping.gpus, at) * (pp - 1)
    host, host_once = prefill_host(at, mapping, plan.chunks), host_time(at, mapping, 0.0)
    found = []
    for attention in cores:
        busy, path, rise, lacks = _stage_times(at, mapping, parts, attention, drafted)
        sums = with_host_and_hops(parts.sums.plus(attention.sums), hop, host_once)
        stall = rise * stalled(before + plan.last / plan.size, pp) - lacks * np.minimum(plan.chunks, pp) / pp
        found.append(PrefillPass(path + host + hop.time, busy + host, sums, stall=np.maximum(stall, 0.0)))
    return found


class _Chunks(NamedTuple):
    """Times of all chunks of a pass, without scores and values."""

    before: Numeric  # chunks before the last [1]
    full: LayerTimes  # of one of them, with the head [s]
    final: LayerTimes  # of the last, with the head [s]
    sums: AnySums  # of all [s]


class _Drafted(NamedTuple):
    """Passes of a draft model behind the chunks on the last stage. [s]"""

    whole: Numeric  # behind all chunks
    full: Numeric  # behind the last chunk of full size
    last: Numeric  # behind the last chunk
    sums: AnySums


_NO_DRAFT = _Drafted(0.0, 0.0, 0.0, Sums())


def _drafted(model: ModelSpec, parts: _Chunks, attention: ChunkCores) -> _Drafted:
    """Add up the layers of a draft model, chunk by chunk."""

    def through(times: LayerTimes, scores: tuple[Numeric, ...]) -> Numeric:
        return all_stages(model, times._replace(scores=scores))

    none = tuple(0.0 for _ in attention.whole)
    linear = parts.before * through(parts.full, none) + through(parts.final, none)
    scores = sum(each * count for each, count in zip(attention.whole, model.kind_counts, strict=True))
    return _Drafted(
        whole=linear + scores,
        full=through(parts.full, attention.full),
        last=through(parts.final, attention.last),
        sums=parts.sums.plus(attention.sums),
    )


def stalled(chunks: Numeric, stages: Numeric) -> Numeric:
    r"""Find how long a prompt in chunks stalls a full pipeline, over what each takes longer than the one before. [1]

    A chunk enters a pipeline of p stages when the p-th before it has left. So the last chunk of a prompt, which takes
    the longest, holds the p - 1 after it up as if they took as long. Stage times that rise by :math:`\delta` from each
    of n chunks to the next keep a stage for

    .. math:: \sum_i t_i + \delta\,(m - 1)\left(n - \frac{m}{2}\right), \qquad m = \min(n, p)

    (the largest mean cycle of the starts; at n up to p it is n times the last chunk). Where the last of n chunks lacks
    a part l of its tokens, the next prompt fills it, and a prompt stalls like n - 1 chunks, weighted by
    :math:`\min(0.5 + l, 1)`, and n, weighted by the rest. These weights were chosen: of 21 streams of R1 and Llama 70B
    all are met within 7.2 %. Prompts of unlike lengths stall each by its own. Where the head makes the last stage the
    slowest, the others take s less in all, the p-th chunk before has left sooner, and a prompt stalls by
    :math:`s\,m/p` less (``chunked_passes``). Stages with fewer layers earn nothing: with them streams of R1 would be 3
    to 7 % faster than simulated.

    Two and eight chunks in four stages, and a prompt of a chunk and a half:

    >>> [float(stalled(chunks, 4)) for chunks in (2.0, 8.0, 1.5)]
    [1.0, 18.0, 0.0]
    """
    most = np.ceil(chunks)
    lacks = most - chunks
    whole = np.where(lacks <= WHOLE_CHUNK, 1.0, np.maximum(0.5 - lacks, 0.0))
    found: Numeric = 0.0
    for number, part in ((most - 1.0, 1.0 - whole), (most, whole)):
        least = np.minimum(number, stages)
        found = found + part * np.maximum(least - 1.0, 0.0) * (number - least / 2.0)
    return found


def _stage_times(
    at: Setup, mapping: Sharding, parts: _Chunks, attention: ChunkCores, drafted: _Drafted
) -> tuple[Numeric, Numeric, Numeric, Numeric]:
    """Find ``sum(t_i)`` of the slowest stage, the critical path, both with stretched times and without host, what each
    chunk takes longer than the one before, and what others take less than the last stage by its head, in all. [s]

    The path takes all chunks through one stage and one chunk, of full size or the last, through all
    the others: ``max_s(sum_i t_si + max_i sum_{r != s} t_ri)``. With equal stages that is
    ``sum(t_i) + (p-1)*max(t_i)``.
    """
    model, pp, (before, full, final, _) = at.model, mapping.pp, parts
    table, launch = stage_table(at, pp), launch_time(at, mapping)
    kinds = range(len(model.kinds))
    summed = [before * full.layers[i] + final.layers[i] + attention.whole[i] for i in kinds]
    one_full = [full.layers[i] + attention.full[i] for i in kinds]
    one_last = [final.layers[i] + attention.last[i] for i in kinds]
    counts_of_all = model.kind_counts
    every_full = full.embedding + full.head + sum(one_full[i] * counts_of_all[i] for i in kinds) + drafted.full
    every_last = final.embedding + final.head + sum(one_last[i] * counts_of_all[i] for i in kinds) + drafted.last
    busy: list[Numeric] = []
    path: list[Numeric] = []
    rise: list[Numeric] = []
    slowest: Numeric = 0.0
    bare: Numeric = 0.0  # without the head
    heads = before * full.head + final.head
    embeddings, end = before * full.embedding + final.embedding, final.head + drafted.last
    alike: dict[int, list[int]] = {}  # kinds of layers of the same attention, which is timed once
    for i in kinds:
        alike.setdefault(id(attention.first[i]), []).append(i)
    climbs = [
        (kinds_of, attention.further[one] - attention.first[one], attention.further[one] - attention.full[one])
        for kinds_of in alike.values()
        for one in kinds_of[:1]
    ]
    for counts, first, last in zip(table.layers, table.first, table.last, strict=True):
        here = added(added(0.0, embeddings, first), heads + drafted.whole, last)
        here_full = added(added(0.0, full.embedding, first), full.head + drafted.full, last)
        here_last = added(added(0.0, final.embedding, first), end, last)
        for i in kinds:
            here = added(here, summed[i], counts[i])
            here_full = added(here_full, one_full[i], counts[i])
            here_last = added(here_last, one_last[i], counts[i])
        elsewhere = np.maximum(np.where(before > 0, every_full - here_full, 0.0), every_last - here_last)
        slowest = np.maximum(slowest, here_full)
        bare = np.maximum(bare, added(here_full, -full.head, last))
        here = np.maximum(here, (before + 1.0) * launch)
        busy.append(here)
        path.append(here + np.maximum(elsewhere, (pp - 1) * launch))
        climb, above_launch = 0.0, here_full - launch
        for kinds_of, more, beyond in climbs:
            layers = sum(counts[i] for i in kinds_of)
            climb, above_launch = added(climb, more, layers), added(above_launch, beyond, layers)
        rise.append(np.minimum(climb, above_launch))
    risen = np.maximum(reduce(np.maximum, rise), 0.0) / np.maximum(before, 1.0)
    lacks = (pp - 1.0) * (slowest - bare)
    return reduce(np.maximum, busy), reduce(np.maximum, path), risen, lacks


class ChunkCores(NamedTuple):
    """Scores and values of all chunks of one layer of each kind. [s]"""

    whole: tuple[Numeric, ...]  # summed over the chunks
    full: tuple[Numeric, ...]  # of the last chunk of full size
    last: tuple[Numeric, ...]  # of the last chunk
    sums: Sums  # of every chunk and layer
    first: tuple[Numeric, ...] = ()  # of a first chunk of full size
    further: tuple[Numeric, ...] = ()  # of one of full size in the place of the last


def chunk_cores(at: Setup, form: str, plan: ChunkPlan, others: tuple[Numeric, ...], most: Numeric | None) -> ChunkCores:
    """Time scores and values of all chunks, in blocks of rows; ``others`` and ``most`` as in ``Chunks``. [s]"""
    first, even = _full_chunk(at, form, plan, others, 0.0), not np.any(plan.last != plan.size)

    def with_ends(cores: ChunkCores) -> ChunkCores:
        further = cores.last if even else _full_chunk(at, form, plan, others, plan.chunks - 1.0)
        return cores._replace(first=first, further=further)

    if at.rates.adjust is not None or max(map(np.ndim, (*plan, *others))) < 2:
        return with_ends(_padded_cores(at, form, plan, others))
    chunks = Chunks(plan, others, most)
    found = [_cores_of(at, form, chunks, rows) for rows in chunks.blocks()]

    def joined(of_each: Iterable[tuple[Numeric, ...]]) -> tuple[Numeric, ...]:
        return tuple(chunks.joined(parts) for parts in zip(*of_each, strict=True))

    whole, full, last = (joined(getattr(each, name) for each in found) for name in ("whole", "full", "last"))
    sums = Sums(*joined(each.sums for each in found))
    return with_ends(ChunkCores(whole, full, last, sums))


def _full_chunk(
    at: Setup, form: str, plan: ChunkPlan, others: tuple[Numeric, ...], before: Numeric
) -> tuple[Numeric, ...]:
    """Time attention of a chunk of full size after some others, of one layer of each kind. [s]"""
    tp, dcp, pcp, prompts, prefix = others
    tokens = Tokens(prompts=prompts, new=plan.size, past=prefix + before * plan.size, dcp=dcp, pcp=pcp)
    kinds = [layer.attention for layer, _ in layers_of(at.model)]
    times = {block: attention_cost(block, at, tp, tokens, form).time for block in dict.fromkeys(kinds)}
    return tuple(times[block] for block in kinds)


def _cores_of(at: Setup, form: str, chunks: Chunks, rows: slice) -> ChunkCores:
    """Time attention of the chunks of some rows."""
    here = chunks.of(rows)
    kinds, found = layers_of(at.model), {}
    for block in dict.fromkeys(layer.attention for layer, _ in kinds):
        cost = attention_cost(block, at, here.tp, here.tokens, form)
        chosen = [here.at(cost.time, where) for where in (here.full, here.last)]
        found[block] = here.summed(cost.time), *chosen, Sums(*map(here.summed, cost.sums))
    return _of_layers(kinds, found)


def _padded_cores(at: Setup, form: str, plan: ChunkPlan, others: tuple[Numeric, ...]) -> ChunkCores:
    """Compute ``chunk_cores`` of few designs, or with ``Rates.adjust``: the chunks are a last axis, padded."""
    tp, dcp, pcp, prompts, prefix = (each if is_one(each) else np.asarray(each)[..., None] for each in others)
    plan = ChunkPlan(*(np.asarray(x)[..., None] for x in plan))
    step = np.arange(int(np.max(plan.chunks)), dtype=float)
    live = step < plan.chunks
    last = (plan.chunks - 1).astype(int)
    tokens = Tokens(
        prompts=prompts,
        new=np.where(step < plan.chunks - 1, plan.size, plan.last),
        past=prefix + np.minimum(step, plan.chunks - 1) * plan.size,
        latent=np.where(step == 0, prefix, 0.0),
        dcp=dcp,
        pcp=pcp,
    )
    kinds, found = layers_of(at.model), {}
    for block in dict.fromkeys(layer.attention for layer, _ in kinds):
        cost = attention_cost(block, at, tp, tokens, form)
        shape = np.broadcast_shapes(np.shape(cost.time), live.shape)
        every, chosen = np.broadcast_to(cost.time, shape), []
        for where in (np.maximum(last - 1, 0), last):
            index = np.broadcast_to(where, (*shape[:-1], 1))
            chosen.append(np.take_along_axis(every, index, axis=-1)[..., 0])
        sums = Sums(*(np.sum(part * live, axis=-1) for part in cost.sums))
        found[block] = np.sum(every * live, axis=-1), *chosen, sums
    return _of_layers(kinds, found)


def _of_layers(kinds: list[tuple[Layer, int]], found: dict[AttentionBlock[Any], tuple[Any, ...]]) -> ChunkCores:
    """Collect attention of all layers from the times and sums of each kind of attention."""
    whole, full, last = ([found[layer.attention][place] for layer, _ in kinds] for place in range(3))
    sums = Sums()
    for layer, count in kinds:
        sums = sums.plus(found[layer.attention][3], count)
    return ChunkCores(tuple(whole), tuple(full), tuple(last), sums)


#: Part of a chunk that a last one may lack to count as whole. [1]
WHOLE_CHUNK = 0.01
#: Numbers in a block of rows (measured): few enough for the CPU's cache, many enough to hide numpy's overhead. [1]
BLOCK_CHUNKS = 2**16


class ChunkPlan(NamedTuple):
    """How a prompt is cut: equal chunks and a last one that may be shorter."""

    chunks: Numeric  # [1]
    size: Numeric  # of all chunks but the last [token]
    last: Numeric  # [token]


def chunk_plan(isl: Numeric, chunk_tokens: Numeric) -> ChunkPlan:
    """Cut ``isl`` tokens into chunks of ``chunk_tokens``."""
    size = np.minimum(chunk_tokens, isl)
    chunks = np.ceil(isl / size)
    return ChunkPlan(chunks, size, isl - (chunks - 1) * size)


def most_chunks(new: Numeric, chunks: Numeric) -> Numeric:
    """Find for each prompt the most chunks that any prompt of the same length is cut into.

    >>> most_chunks(np.array([[1024.0], [2048.0], [1024.0]]), np.array([[2.0], [4.0], [1.0]])).tolist()
    [[2.0], [4.0], [2.0]]
    """
    values, place = distinct(np.broadcast_to(new, np.shape(chunks)))
    most = np.zeros(values.size)
    np.maximum.at(most, place, chunks)
    return most[place]


class Chunks:
    """Lay out the chunks of the prompts of a table, row after row.

    A row has one set of degrees where prompts are the same for all batches, else it is one point of the table. Takes
    ``others`` (TP, DCP and PCP degrees, prompts, and tokens of each that are cached [1], [token]) and ``most`` (chunks
    that a row is padded to; None = the most of any row [1]).
    """

    def __init__(self, plan: ChunkPlan, others: Sequence[Numeric], most: Numeric | None = None) -> None:
        shape = np.broadcast_shapes(*map(np.shape, (*plan, *others)))
        by_row = np.ndim(plan.chunks) == 2 and np.shape(plan.chunks)[1] == 1
        self._points = None if by_row else shape
        rows = shape[0] if by_row else int(np.prod(shape))

        def laid(values: Numeric) -> Any:
            """Reshape to a number, one row for all, or (rows, columns)."""
            if np.ndim(values) == 0:
                return values
            if by_row:
                return (
                    values if np.shape(values)[0] == 1 < rows else np.broadcast_to(values, (rows, np.shape(values)[1]))
                )
            return np.broadcast_to(values, shape).reshape(rows, 1)

        self._plan, self._others = ChunkPlan(*map(laid, plan)), [laid(each) for each in others]
        self._columns = shape[1] if by_row else 1
        self._count = np.broadcast_to(self._plan.chunks, (rows, 1))[:, 0].astype(np.intp)
        own = np.max(self._count) if most is None else laid(most)
        self._most = np.broadcast_to(own, (rows, 1))[:, 0].astype(np.intp)

    def blocks(self) -> Iterator[slice]:
        """Yield the blocks of rows that are laid out at once."""
        step = max(1, BLOCK_CHUNKS // (int(self._most.max()) * self._columns))
        yield from (slice(at, at + step) for at in range(0, self._most.size, step))

    def of(self, rows: slice) -> ChunkRows:
        """Lay out the chunks of some rows."""

        def of_rows(values: Any) -> Any:
            return values[rows] if np.ndim(values) and len(values) == self._count.size else values

        count = self._count[rows]
        first = np.cumsum(count) - count
        row = np.repeat(np.arange(count.size), count)
        step = (np.arange(row.size) - first[row])[:, None]

        def of_chunks(values: Any) -> Any:
            mine = of_rows(values)
            return mine[row] if np.ndim(mine) and len(mine) == count.size else mine

        tp, dcp, pcp, prompts, prefix = map(of_chunks, self._others)
        size, last = of_chunks(self._plan.size), of_chunks(self._plan.last)
        tokens = Tokens(
            prompts=prompts,
            new=np.where(step < count[row, None] - 1, size, last),
            past=prefix + step * size,
            latent=np.where(step == 0, prefix, 0.0),
            dcp=dcp,
            pcp=pcp,
        )
        full, last = first + np.maximum(count - 2, 0), first + count - 1
        return ChunkRows(tp, tokens, row, step[:, 0], full, last, self._most[rows])

    def joined(self, parts: Sequence[Any]) -> Any:
        """Join the results of all blocks into an array of the shape of the table."""
        columns = max(part.shape[1] for part in parts)
        found = np.concatenate([np.broadcast_to(part, (len(part), columns)) for part in parts])
        return found if self._points is None else found.reshape(self._points)[()]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """Chunks of some rows, one after the other; arrays of shape (chunks, columns)."""

    tp: Numeric
    tokens: Tokens
    row: Any  # (chunks,) number of its row
    step: Any  # (chunks,) its number in the row
    full: Any  # (rows,) place of the last chunk of full size
    last: Any  # (rows,) place of the last chunk
    most: Any  # (rows,) chunks that the row is padded to before it is added up [1]

    def at(self, values: Numeric, where: Any) -> Any:
        """Take the values of one chunk of each row."""
        return np.broadcast_to(values, (self.row.size, np.shape(values)[-1] if np.ndim(values) else 1))[where]

    def summed(self, values: Numeric) -> Any:
        """Add up the chunks of each row; the result has shape (rows, columns)."""
        columns = np.shape(values)[-1] if np.ndim(values) else 1
        laid = np.zeros((self.last.size, columns, int(self.most.max())), dtype=np.result_type(values, float))
        laid[self.row, :, self.step] = values
        if self.most.min() == self.most.max():
            return laid.sum(axis=-1)
        found = np.empty(laid.shape[:-1], dtype=laid.dtype)
        for most in np.unique(self.most).tolist():
            rows = self.most == most
            found[rows] = laid[rows, :, :most].sum(axis=-1)
        return found
