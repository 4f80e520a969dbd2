"""Score grids: rows are mappings (and CPP chunk sizes), columns are batch sizes.

Grids are scored in blocks of rows that fit in cache; an infeasible point keeps its place, with its status and the bytes
that it lacks. Lengths are a distribution (``workload.lengths``):

* **Prefill.** The request rate is b/E[t], with the time t between passes averaged over the distribution of ISL.
  Attention is convex in the length, so E[t] is at least t(E[ISL]). All prompts of a pass have the same length, as
  if a scheduler grouped prompts by length. That is exact for one prompt per pass. For several it has the mean of
  independent lengths where the time is affine in tokens and query-key pairs (within 0.7 % for 2-16 prompts of a TP
  instance). With DP attention no rank waits for longer prompts of other ranks; without the grouping 8 ranks with
  one prompt each would wait for 3.1 mean lengths under the log-normal distribution (``rank_imbalance`` counts that).
* **FTL** is the mean over requests, or a quantile; limits act on it. As the prompts of a pass have one length, the
  quantile is conservative: at 0.9 it is 10-20 % above the quantile of 2-4 prompts of independent lengths.
* **Prefill memory** has room for prompts of independent lengths, cache and live activations: the mean of their sum
  plus 2 standard deviations (``resident_deviations`` of the profile).
* **Decode** has the length-biased mean context and cache, and completes B/(TTL*(E[OSL] - 1)) requests/s.

The mean request must be within the context limit of the model; longer requests count as if there were no limit.
Source: physics page, sections 2-8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import check_form, chunk_forms
from disagg_sim.physics.memory import decode_bytes, prefill_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import PrefillPass, overlaps
from disagg_sim.physics.passes.prompts import PromptPasses, form_of_whole
from disagg_sim.physics.residents import CachedTokens, RankLoad
from disagg_sim.physics.setup import Setup
from disagg_sim.search.axes import CHUNK_TOKENS, Drafted, batch_axis, draft_choices, drafting, with_chunks
from disagg_sim.search.blocks import (
    GridPoints,
    StackedCases,
    bound_codes,
    given_sizes,
    groups_of,
    is_constant_uncached,
    row_blocks,
)
from disagg_sim.search.mappings import mappings_for, without_pcp
from disagg_sim.search.passes import expected_passes
from disagg_sim.search.phase_grid import PhaseGrid, form_code
from disagg_sim.workload.distributions import Prompts
from disagg_sim.workload.lengths import Lengths


def decode_grid(
    at: Setup,
    mappings: Sharding | list[Sharding],
    lengths: Lengths,
    *,
    batch: Any = None,
    mla_form: str = "auto",
    allow_long_context: bool = False,
) -> PhaseGrid:
    """Score every decode configuration of ``mappings`` at every batch size.

    With speculation every point takes the number of draft tokens with the lowest TTL that fits, which at one batch also
    has the highest throughput. A point without draft tokens loads no drafter.

    Parameters
    ----------
    at : Setup
        Model, system, recipe, profile and engine, from ``setup``.
    mappings : Sharding or list of Sharding
        From ``enumerate_mappings``, or made by hand.
    lengths : Lengths
        Of the requests, from ``lengths``.
    batch : array_like of int, optional
        Batch sizes of an instance; by default four per doubling up to the memory limit. [request]
    mla_form : {"auto", "naive", "absorbed", "cached"}
        Form of MLA; "auto" = "absorbed".
    allow_long_context : bool
        Score requests beyond the model's context limit instead of refusing them.

    Returns
    -------
    PhaseGrid
        Latency is the mean TTL [s]; arrays of shape (mappings, batches).

    Raises
    ------
    InputError
        Values out of range, mappings that the model cannot take.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> at = setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> decode_grid(at, Sharding(), lengths(2048, 256), batch=[1, 64]).latency.shape
    (1, 2)
    """
    batches = None if batch is None else [batch]
    (grid,) = decode_grids(
        at, mappings, [lengths], batches=batches, mla_form=mla_form, allow_long_context=allow_long_context
    )
    return grid


def decode_grids(
    at: Setup,
    mappings: Sharding | list[Sharding],
    cases: Sequence[Lengths],
    *,
    batches: Sequence[Any] | None = None,
    mla_form: str = "auto",
    allow_long_context: bool = False,
) -> list[PhaseGrid]:
    """Score ``decode_grid`` for many lengths, small grids in one call; results are equal to the last digit."""
    cases = [lengths.at_checkpoints(at) for lengths in cases]
    table, axes = _axes(at, mappings, cases, "decode", batches, mla_form, allow_long_context)
    joins = [lengths.rank_loads is None for lengths in cases]
    points = partial(_decode_points, at, mla_form=mla_form)
    return _grids("decode", at, [table] * len(cases), cases, axes, joins, points)


def _grids(
    phase: str,
    at: Setup,
    tables: Sequence[Sharding],
    cases: Sequence[Lengths],
    axes: Sequence[Ints],
    joins: Sequence[bool],
    score: Callable[[StackedCases, Sharding, Any], GridPoints],
) -> list[PhaseGrid]:
    """Score grids of cases with their own rows and batches; cases that join are scored in one call."""
    grids: dict[int, PhaseGrid] = {}
    for group in groups_of([len(table) for table in tables], axes, joins):
        several = StackedCases([cases[place] for place in group], tuple(len(tables[place]) for place in group))
        axis, end = axes[group[0]][None, :].astype(float), 0
        points = score(several, Sharding.joined([tables[place] for place in group]), axis)
        for place, rows in zip(group, several.rows, strict=True):
            start, end = end, end + rows
            part, batch = points.part(slice(start, end), axes[place].size), axes[place][None, :].astype(float)
            busy = part.busy if part.load is None else np.maximum(part.busy, part.load)
            grids[place] = PhaseGrid(
                phase=phase,
                setup=at,
                mappings=tables[place],
                lengths=cases[place],
                batch=axes[place],
                latency=part.latency,
                request_rate=batch / busy if phase == "prefill" else cases[place].request_rate(batch, part.latency),
                memory_bytes=part.memory,
                microbatches=part.microbatches,
                bound=part.bound,
                mla_form=part.mla_form,
                drafts=part.drafts,
                stall=part.stall,
            )
    return [grids[place] for place in range(len(cases))]


def _decode_points(at: Setup, several: StackedCases, table: Sharding, axis: Any, mla_form: str) -> GridPoints:
    """Score the rows of all cases, one case after the other: arrays of shape (rows, batches)."""
    cases, shape = several.cases, (len(table), axis.size)
    cached, context = several.cached(lambda lengths: lengths.resident), several.number(lambda lengths: lengths.context)
    ttl, memory = np.empty(shape), np.empty(shape)
    micro, bound = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
    drafts = np.zeros(shape, dtype=np.int8)
    for rows in [slice(None)] if len(cases) > 1 else row_blocks(*shape):
        best: Drafted | None = None
        for tried in draft_choices(at):
            own, mapping = drafting(at, table[rows].for_grid(), tried)
            load = RankLoad(context) if len(cases) > 1 else cases[0].on_ranks(axis, mapping.dp_attn)
            step = decode_step(own, mapping, batch=axis, context=load.context, mla_form=mla_form, rank_batch=load.batch)
            sequences = load.room(axis, mapping.dp_attn)
            size = decode_bytes(own, mapping, sequences, cached=cached, mla_form=mla_form)
            drafted = Drafted(step.ttl, size, step.microbatches, bound_codes(step.sums), np.int8(tried))
            best = drafted if best is None else best.or_faster(drafted, at.memory_limit)
        assert best is not None
        ttl[rows], memory[rows], micro[rows], bound[rows], drafts[rows] = best
    form = np.full(shape, form_code(at, "absorbed" if mla_form == "auto" else mla_form))
    return GridPoints(ttl, ttl, memory, micro, bound, form, drafts)


def prefill_grid(
    at: Setup,
    mappings: Sharding | list[Sharding],
    lengths: Lengths,
    *,
    batch: Any = None,
    chunk_tokens: Any = None,
    mla_form: str = "auto",
    ftl_quantile: float | None = None,
    allow_long_context: bool = False,
) -> PhaseGrid:
    """Score every prefill configuration: each mapping unchunked and, with a pipeline, at every CPP chunk size.

    With ``mla_form`` "auto" chunked rows keep up-projected keys and values ("cached") where that is faster and fits.
    A length distribution takes about ten times as long as constant lengths.

    Parameters
    ----------
    at, mappings, lengths, allow_long_context
        As in ``decode_grid``; output lengths count towards the context limit only.
    batch : array_like of int, optional
        Prompts of a pass; by default four batch sizes per doubling up to the memory limit. [request]
    chunk_tokens : array_like of int, optional
        Chunk sizes of CPP to try, where pp > 1 and below the longest prompt; by default ``CHUNK_TOKENS``. Unchunked
        passes are always scored. [token]
    mla_form : {"auto", "naive", "absorbed", "cached"}
        Form of MLA; "auto" takes the fastest that fits.
    ftl_quantile : float, optional
        Quantile of FTL over requests, between 0 and 1; by default the mean. [1]

    Returns
    -------
    PhaseGrid
        Latency is the FTL [s]; arrays of shape (rows, batches), first all mappings unchunked.

    Raises
    ------
    InputError
        Values out of range, mappings that the model cannot take.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> at = setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> prefill_grid(at, Sharding(pp=2), lengths(2048, 256), chunk_tokens=[512]).mappings.chunk_tokens.tolist()
    [0, 512]
    """
    batches = None if batch is None else [batch]
    more: dict[str, Any] = {"mla_form": mla_form, "ftl_quantile": ftl_quantile}
    more |= {"chunk_tokens": chunk_tokens, "allow_long_context": allow_long_context}
    (grid,) = prefill_grids(at, mappings, [lengths], batches=batches, **more)
    return grid


def prefill_grids(
    at: Setup,
    mappings: Sharding | list[Sharding],
    cases: Sequence[Lengths],
    *,
    batches: Sequence[Any] | None = None,
    chunk_tokens: Any = None,
    mla_form: str = "auto",
    ftl_quantile: float | None = None,
    allow_long_context: bool = False,
) -> list[PhaseGrid]:
    """Score ``prefill_grid`` for many lengths, small grids in one call; results are equal to the last digit."""
    cases = [lengths.at_checkpoints(at) for lengths in cases]
    table, axes = _axes(at, mappings, cases, "prefill", batches, mla_form, allow_long_context)
    sizes = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    tried = given_sizes("chunk_tokens", sizes, least=0).tolist() if np.size(sizes) else []
    alone = overlaps(at, table.for_grid())
    first: dict[Any, int] = {}  # of the cases with equal prompts and batches
    same = [
        first.setdefault((lengths.prompt, axis.tobytes()) if is_constant_uncached(lengths) else place, place)
        for place, (lengths, axis) in enumerate(zip(cases, axes, strict=True))
    ]
    scored = sorted(set(same))
    own = [cases[place] for place in scored]
    below = [tuple(size for size in tried if 0 < size < lengths.longest_timed) for lengths in own]
    tables = {some: with_chunks(table, math.inf, some) for some in set(below)}
    joins = [is_constant_uncached(lengths) and not alone for lengths in own]
    points = partial(prefill_points, at, mla_form=mla_form, quantile=ftl_quantile)
    scores = _grids(
        "prefill", at, [tables[some] for some in below], own, [axes[place] for place in scored], joins, points
    )
    grids = dict(zip(scored, scores, strict=True))
    return [
        replace(grids[place], lengths=cases[number], ftl_quantile=ftl_quantile) for number, place in enumerate(same)
    ]


def _axes(
    at: Setup,
    mappings: Sharding | list[Sharding],
    cases: Sequence[Lengths],
    phase: str,
    batches: Sequence[Any] | None,
    mla_form: str,
    allow_long_context: bool,
) -> tuple[Sharding, list[Ints]]:
    """Check and return mappings and batch sizes of grids of either phase."""
    table = mappings_for(at, mappings)
    table = without_pcp(table) if phase == "decode" else table
    for lengths in cases:
        at.check_context(lengths.mean_isl, lengths.mean_osl, allow_long=allow_long_context)
    check_form(mla_form)
    if batches is None:
        return table, [batch_axis(at, table, lengths, phase=phase) for lengths in cases]
    return table, [given_sizes("batch", batch) for batch in batches]


def prefill_points(
    at: Setup, several: StackedCases, table: Sharding, axis: Any, mla_form: str, quantile: float | None
) -> GridPoints:
    """Time and size the points, (rows, batches), of one case, or of several plain ones, one after the other."""
    shape = (len(table), axis.size)
    ftl, busy, memory, stall = np.empty(shape), np.empty(shape), np.empty(shape), np.zeros(shape)
    below = any(lengths.cached is not None and lengths.cached.reuse.below for lengths in several.cases)
    load = np.zeros(shape) if below else None
    micro, bound = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
    forms = np.empty(shape, dtype=np.int8)
    for block in _blocks(several, quantile, table.chunk_tokens, axis.size):
        rows = block.rows
        done, memory[rows], forms[rows] = _score(at, block, table[rows].for_grid(), axis, mla_form)
        ftl[rows], busy[rows], bound[rows] = done.ftl + done.load, done.interval, bound_codes(done.sums)
        stall[rows] = done.stall
        if load is not None:
            load[rows] = done.load
    chunk, mapping, new = table.chunk_tokens[:, None], table.for_grid(), several.number(lambda each: each.mean_new)
    of_chunks = np.ceil(new / np.minimum(np.maximum(chunk, 1), new))
    micro[:] = np.where(chunk > 0, of_chunks, np.minimum(mapping.pp, np.ceil(axis / mapping.dp_attn)))
    return GridPoints(ftl, busy, memory, micro, bound, forms, np.zeros(shape, dtype=np.int8), load, stall)


class _Block(NamedTuple):
    """Rows of prefill that are scored at once."""

    rows: Ints
    prompts: Prompts | Any  # that stand for all; of several plain cases a column of lengths [token]
    counted: tuple[float, float] | None  # prompt and past whose FTL counts; None = the mean over ``prompts`` [token]
    prompt: CachedTokens
    lengths: Lengths | None  # of all rows, which may have pasts and unequal ranks; None = of several plain cases


def _blocks(several: StackedCases, quantile: float | None, chunks: Ints, columns: int) -> Iterator[_Block]:
    """Rows to score at once and the prompts to time them at: rows of one chunk size, of all where one prompt does."""
    if len(several.cases) > 1:
        for rows in (np.flatnonzero(chunks == 0), np.flatnonzero(chunks)):
            if rows.size:
                prompt = several.cached(lambda each: each.prompt, rows)
                yield _Block(rows, several.number(lambda each: each.longest_timed, rows), None, prompt, None)
        return
    (lengths,) = several.cases
    counted = None if quantile is None else lengths.prompt_quantile(quantile)
    kinds = np.minimum(chunks, 1) if lengths.constant or lengths.few else chunks
    for size in np.unique(kinds).tolist():
        nodes, alike = lengths.prompt_nodes(size), np.flatnonzero(kinds == size)
        for block in row_blocks(alike.size, columns):
            yield _Block(alike[block], nodes, counted, lengths.prompt, lengths)


#: Passes, bytes and code of the form of the points of some rows.
Scored = tuple[PrefillPass, Any, Any]


def _score(at: Setup, block: _Block, mapping: Sharding, axis: Any, form: str) -> Scored:
    """Expected pass, bytes and code of the form of one block of rows, all chunked or none."""
    chunk, lengths = mapping.chunk_tokens, block.lengths
    whole, reused = not chunk[0, 0], lengths is not None and lengths.cached is not None
    forms = (form_of_whole(form, reused=reused),) if whole else chunk_forms(at.model, form)
    held = [prefill_bytes(at, mapping, axis, prompt=block.prompt, chunk_tokens=chunk, mla_form=each) for each in forms]
    timed = PromptPasses(at, mapping, axis, chunk, forms)
    if lengths is None:
        passes = timed.passes(block.prompts, 0.0, None)
    else:
        passes = expected_passes(timed, lengths, block.prompts, block.counted)
    first, *others = zip(passes, held, (form_code(at, each) for each in forms), strict=True)
    return best_form(at, first, others[0]) if others else first


def best_form(at: Setup, best: Scored, other: Scored) -> Scored:
    """Passes, bytes and forms of CPP: those of the ``other`` form of MLA wherever it is faster and fits.

    Returns one of the two, point by point: [s], [B], index into ``CHOSEN_FORMS``.

    >>> from disagg_sim.physics.roofline import Sums
    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal")
    >>> times, held = (np.array([2.0, 2.0, 1.0]), np.ones(3)), np.array([9e9, 9e12, 9e9])
    >>> plain, cached = ((PrefillPass(time, time, Sums()), held, code) for code, time in enumerate(times))
    >>> best_form(at, plain, cached)[2].tolist()
    [1, 0, 0]
    """
    (old, memory, code), (scored, held, cached) = best, other
    take = (held <= at.memory_limit) & (scored.interval < old.interval)
    return scored.where(take, old), np.where(take, held, memory), np.where(take, cached, code)
