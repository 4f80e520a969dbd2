"""Score grids: rows are mappings (and CPP chunk sizes), columns are batch sizes.

Grids are scored in blocks of rows that stay in cache; an infeasible point keeps its place, with its status and the
bytes that it lacks. Lengths are a distribution (``workload.lengths``); constant lengths are one point of it:

* **Prefill.** The request rate is b/E[t], t the busy time of a pass, integrated over the distribution of ISL.
  Attention is convex in the length, so E[t] is at least t(E[ISL]). All prompts of a pass have the same length, as
  if a scheduler grouped prompts by length. That is exact for one prompt per pass; for several it has the mean of
  independent lengths wherever a pass is affine in its tokens and in its attention pairs (within 0.7 % for 2-16
  prompts of a TP instance). With DP attention no rank waits for longer prompts of other ranks: without the grouping,
  8 ranks with one prompt each would wait for 3.1 mean lengths under the log-normal distribution.
* **FTL** is the mean over requests, or a quantile; limits act on the chosen one. As the prompts of a pass have one
  length, the quantile is on the safe side: the 0.9 quantile lies 10-20 % above that of 2-4 prompts of independent
  lengths per pass.
* **Prefill memory** holds prompts of independent lengths: the mean of their sum plus 2 standard deviations of it
  (``resident_deviations`` of the profile), both in the cache and in the live activations.
* **Decode** runs at the length-biased mean context, holds length-biased residents and completes
  B/(TTL*(E[OSL] - 1)) requests/s.

The mean request must lie within the context limit of the model; requests of the tail beyond it count as if there were
no limit. Source: physics page, sections 2-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import Mapping
from disagg_sim.physics.blocks import check_form, chunk_forms
from disagg_sim.physics.drafting import check_context
from disagg_sim.physics.memory import decode_bytes, prefill_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import PrefillPass
from disagg_sim.physics.passes.prompts import PromptPasses, form_of_whole
from disagg_sim.physics.roofline import chosen_sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import Lookups, evaluate, side_by_side
from disagg_sim.search.axes import CHUNK_TOKENS, batch_axis, with_chunks
from disagg_sim.search.blocks import BLOCK_POINTS, bound_codes, given_sizes, row_blocks
from disagg_sim.search.drafts import Drafted, draft_choices, drafting
from disagg_sim.search.mappings import mappings_for, without_pcp
from disagg_sim.search.phase_grid import PhaseGrid, form_code
from disagg_sim.search.prefixes import TimedPrompts, one_of, taken_up, uneven_passes
from disagg_sim.workload.lengths import Lengths


def decode_grid(
    at: Setup,
    mappings: Mapping | list[Mapping],
    lengths: Lengths,
    *,
    batch: Any = None,
    mla_form: str = "auto",
    allow_long_context: bool = False,
) -> PhaseGrid:
    """Score every decode configuration of ``mappings`` at every batch size.

    With speculation every point takes the number of draft tokens of the lowest TTL that fits: at one batch that is also
    the one of the highest throughput. A point without drafts holds no drafter.

    Parameters
    ----------
    at : Setup
        Model, system, recipe, profile and engine, from ``setup``.
    mappings : Mapping or list of Mapping
        From ``enumerate_mappings``, or made by hand.
    lengths : Lengths
        Of the requests, from ``lengths``.
    batch : array_like of int, optional
        Batch sizes of an instance; by default four a doubling up to the memory limit. [request]
    mla_form : {"auto", "naive", "absorbed", "cached"}
        Form of MLA; "auto" is absorbed.
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
    >>> decode_grid(at, Mapping(), lengths(2048, 256), batch=[1, 64]).latency.shape
    (1, 2)
    """
    lengths = taken_up(at, lengths)
    table, sizes = _axes(at, mappings, lengths, "decode", batch, mla_form, allow_long_context)
    axis = sizes[None, :].astype(float)
    shape = (len(table), sizes.size)
    ttl, memory = np.empty(shape), np.empty(shape)
    micro, bound = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
    drafts = np.zeros(shape, dtype=np.int8)
    for rows in row_blocks(*shape):
        best: Drafted | None = None
        for tried in draft_choices(at):
            own, mapping = drafting(at, table[rows].for_grid(), tried)
            load = lengths.on_ranks(axis, mapping.dp_attn)
            step = decode_step(own, mapping, batch=axis, context=load.context, mla_form=mla_form, rank_batch=load.batch)
            seats = load.seats(axis, mapping.dp_attn)
            held = decode_bytes(own, mapping, seats, cached=lengths.resident, mla_form=mla_form)
            found = Drafted(step.ttl, held, step.microbatches, bound_codes(step.sums), np.int8(tried))
            best = found if best is None else best.or_faster(found, at.memory_limit)
        assert best is not None
        ttl[rows], memory[rows], micro[rows], bound[rows], drafts[rows] = best
    return PhaseGrid(
        phase="decode",
        setup=at,
        mappings=table,
        lengths=lengths,
        batch=sizes,
        latency=ttl,
        request_rate=lengths.request_rate(axis, ttl),
        memory_bytes=memory,
        microbatches=micro,
        bound=bound,
        mla_form=np.full(shape, form_code(at, "absorbed" if mla_form == "auto" else mla_form)),
        drafts=drafts,
    )


def prefill_grid(
    at: Setup,
    mappings: Mapping | list[Mapping],
    lengths: Lengths,
    *,
    batch: Any = None,
    chunk_tokens: Any = None,
    mla_form: str = "auto",
    ftl_quantile: float | None = None,
    allow_long_context: bool = False,
) -> PhaseGrid:
    """Score every prefill configuration: each mapping unchunked and, with a pipeline, at every CPP chunk size.

    Where MLA's form is free, chunked rows keep up-projected keys and values (``cached``) wherever that
    is faster and fits. A length distribution takes about ten times the work of constant lengths.

    Parameters
    ----------
    at, mappings, lengths, allow_long_context
        As in ``decode_grid``; output lengths count towards the context limit only.
    batch : array_like of int, optional
        Prompts of a pass of an instance; by default four a doubling up to the memory limit. [request]
    chunk_tokens : array_like of int, optional
        Chunk sizes of CPP to try beside 0 (unchunked), where pp > 1 and below the longest prompt; by default
        ``CHUNK_TOKENS``. [token]
    mla_form : {"auto", "naive", "absorbed", "cached"}
        Form of MLA; "auto" takes the fastest that fits.
    ftl_quantile : float, optional
        Make the FTL that of the prompt which a share of this size, above 0 and below 1, does not exceed;
        by default the mean over requests. [1]

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
    >>> prefill_grid(at, Mapping(pp=2), lengths(2048, 256), chunk_tokens=[512]).mappings.chunk_tokens.tolist()
    [0, 512]
    """
    lengths = taken_up(at, lengths)
    table, sizes = _axes(at, mappings, lengths, "prefill", batch, mla_form, allow_long_context)
    table = with_chunks(table, lengths.longest_timed, CHUNK_TOKENS if chunk_tokens is None else chunk_tokens)
    counted = None if ftl_quantile is None else lengths.prompt_quantile(ftl_quantile)
    axis = sizes[None, :].astype(float)
    shape = (len(table), sizes.size)
    ftl, busy, memory = np.empty(shape), np.empty(shape), np.empty(shape)
    load = np.zeros(shape) if lengths.cached is not None and lengths.cached.reuse.below else None
    micro, bound = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
    forms = np.empty(shape, dtype=np.int8)
    for several in _small_together(_timed_blocks(lengths, counted, table.chunk_tokens, sizes.size), sizes.size):
        asked = [_score(at, timed, lengths, table[rows].for_grid(), axis, mla_form) for rows, timed in several]
        for (rows, _), (done, held, form) in zip(several, evaluate(side_by_side(asked)), strict=True):
            memory[rows], forms[rows] = held, form
            ftl[rows], busy[rows] = done.ftl + done.load, done.busy
            if load is not None:
                load[rows] = done.load
            bound[rows] = bound_codes(done.sums)
    chunk, mapping = table.chunk_tokens[:, None], table.for_grid()
    of_chunks = np.ceil(lengths.mean_new / np.minimum(np.maximum(chunk, 1), lengths.mean_new))
    micro[:] = np.where(chunk > 0, of_chunks, np.minimum(mapping.pp, np.ceil(axis / mapping.dp_attn)))
    return PhaseGrid(
        phase="prefill",
        setup=at,
        mappings=table,
        lengths=lengths,
        batch=sizes,
        latency=ftl,
        request_rate=axis / (busy if load is None else np.maximum(busy, load)),
        memory_bytes=memory,
        microbatches=micro,
        bound=bound,
        mla_form=forms,
        drafts=np.zeros(shape, dtype=np.int8),
        busy=None if load is None else busy,
        load=load,
        ftl_quantile=ftl_quantile,
    )


def _axes(
    at: Setup,
    mappings: Mapping | list[Mapping],
    lengths: Lengths,
    phase: str,
    batch: Any,
    mla_form: str,
    allow_long_context: bool,
) -> tuple[Mapping, Ints]:
    """Check and return the mappings and batch sizes of a grid; ``InputError`` for faults common to both kinds."""
    table = mappings_for(at, mappings)
    table = without_pcp(table) if phase == "decode" else table
    check_context(at, lengths.mean_isl, lengths.mean_osl, allow_long=allow_long_context)
    check_form(mla_form)
    return table, batch_axis(at, table, lengths, phase=phase) if batch is None else given_sizes("batch", batch)


def _timed_blocks(
    lengths: Lengths, counted: tuple[float, float] | None, chunks: Ints, columns: int
) -> Iterator[tuple[Ints, TimedPrompts]]:
    """Rows to score at once and the prompts to time them at: rows of one chunk size, of all where one prompt does."""
    kinds = np.minimum(chunks, 1) if lengths.constant or lengths.few else chunks
    for size in np.unique(kinds).tolist():
        timed, alike = TimedPrompts(lengths.prompt_nodes(size), counted), np.flatnonzero(kinds == size)
        for block in row_blocks(alike.size, columns):
            yield alike[block], timed


def _small_together(
    blocks: Iterator[tuple[Ints, TimedPrompts]], columns: int
) -> Iterator[list[tuple[Ints, TimedPrompts]]]:
    """Blocks that ask for their tables together: as many as stay in cache, as each of them does."""
    held: list[tuple[Ints, TimedPrompts]] = []
    for block in blocks:
        if held and sum(len(rows) for rows, _ in (*held, block)) * columns > 2 * BLOCK_POINTS:
            yield held
            held = []
        held.append(block)
    if held:
        yield held


#: Passes, bytes and code of the form of the points of some rows.
Scored = tuple[PrefillPass, Any, Any]


def _score(at: Setup, timed: TimedPrompts, lengths: Lengths, mapping: Mapping, axis: Any, form: str) -> Lookups[Scored]:
    """Expected pass, bytes and code of the form of one block of rows, all chunked or none."""
    chunk = mapping.chunk_tokens
    whole = not chunk[0, 0]
    forms = (form_of_whole(form, reused=lengths.cached is not None),) if whole else chunk_forms(at.model, form)
    passes = yield from timed.expected(PromptPasses(at, mapping, axis, chunk, forms), at.system)
    held = [
        prefill_bytes(at, mapping, axis, prompt=lengths.prompt, chunk_tokens=chunk, mla_form=each) for each in forms
    ]
    if (uneven := uneven_passes(at, lengths, mapping, axis, chunk, forms)) is not None:
        slower = [one_of(*both, mapping.dp_attn) for both in zip(passes, uneven, strict=True)]
        if timed.counted is not None:
            slower = [done._replace(ftl=even.ftl) for done, even in zip(slower, passes, strict=True)]
        passes = slower
    first, *others = zip(passes, held, (form_code(at, each) for each in forms), strict=True)
    return best_form(at, first, others[0]) if others else first


def best_form(at: Setup, best: Scored, other: Scored) -> Scored:
    """Passes, bytes and forms of CPP: those of the ``other`` form of MLA wherever it is faster and fits.

    Parameters
    ----------
    at
        Setup, whose memory limit counts.
    best, other
        The same points in two forms.

    Returns
    -------
    PrefillPass, ndarray, ndarray
        Point by point one of the two. [s], [B], index into ``CHOSEN_FORMS``

    Examples
    --------
    >>> from disagg_sim.physics.roofline import Sums
    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal")
    >>> times = (np.array([2.0, 2.0]), np.array([1.0, 1.0]))
    >>> plain, cached = ((PrefillPass(time, time, Sums()), held, 0) for time, held in zip(times, (9e9, [9e9, 9e12])))
    >>> best_form(at, plain, (cached[0], np.array(cached[1]), 1))[0].busy.tolist()
    [1.0, 2.0]
    """
    (old, memory, code), (scored, held, cached) = best, other
    take = (held <= at.memory_limit) & (scored.busy < old.busy)
    sums = chosen_sums(take, scored.sums, old.sums)
    ftl, busy, load = (np.where(take, getattr(scored, name), getattr(old, name)) for name in ("ftl", "busy", "load"))
    return PrefillPass(ftl, busy, sums, load), np.where(take, held, memory), np.where(take, cached, code)
