"""Time and size prefill points: rows of one chunk size or of all at once, with the faster form of MLA that fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import chunk_forms
from disagg_sim.physics.memory import prefill_bytes
from disagg_sim.physics.passes.prefill import PrefillPass
from disagg_sim.physics.passes.prompts import PromptPasses, form_of_whole
from disagg_sim.physics.residents import CachedTokens
from disagg_sim.physics.setup import Setup
from disagg_sim.search.blocks import GridPoints, StackedCases, bound_codes, row_blocks
from disagg_sim.search.phase_grid import form_code
from disagg_sim.search.prefixes import RowPrompts, TimedPrompts, uneven_passes
from disagg_sim.workload.lengths import Lengths


def prefill_points(
    at: Setup, several: StackedCases, table: Sharding, axis: Any, mla_form: str, quantile: float | None
) -> GridPoints:
    """Time and size the points of one case, or of several plain ones, one after the other.

    Takes ``axis`` (prompts of a pass, (1, batches) [request]) and ``quantile`` (None = the mean). The result has arrays
    of shape (rows, batches).
    """
    shape = (len(table), axis.size)
    ftl, busy, memory = np.empty(shape), np.empty(shape), np.empty(shape)
    below = any(lengths.cached is not None and lengths.cached.reuse.below for lengths in several.cases)
    load = np.zeros(shape) if below else None
    micro, bound = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
    forms = np.empty(shape, dtype=np.int8)
    for block in _timed_blocks(several, quantile, table.chunk_tokens, axis.size):
        rows = block.rows
        done, memory[rows], forms[rows] = _score(at, block, table[rows].for_grid(), axis, mla_form)
        ftl[rows], busy[rows], bound[rows] = done.ftl + done.load, done.busy, bound_codes(done.sums)
        if load is not None:
            load[rows] = done.load
    chunk, mapping, new = table.chunk_tokens[:, None], table.for_grid(), several.number(lambda each: each.mean_new)
    of_chunks = np.ceil(new / np.minimum(np.maximum(chunk, 1), new))
    micro[:] = np.where(chunk > 0, of_chunks, np.minimum(mapping.pp, np.ceil(axis / mapping.dp_attn)))
    return GridPoints(ftl, busy, memory, micro, bound, forms, np.zeros(shape, dtype=np.int8), load)


class _Block(NamedTuple):
    """Rows of prefill that are scored at once."""

    rows: Ints
    timed: TimedPrompts | RowPrompts
    prompt: CachedTokens
    lengths: Lengths | None  # of all rows, which may have pasts and unequal ranks; None = of several plain cases


def _timed_blocks(several: StackedCases, quantile: float | None, chunks: Ints, columns: int) -> Iterator[_Block]:
    """Rows to score at once and the prompts to time them at: rows of one chunk size, of all where one prompt does."""
    if len(several.cases) > 1:
        for rows in (np.flatnonzero(chunks == 0), np.flatnonzero(chunks)):
            if rows.size:
                prompt = several.cached(lambda each: each.prompt, rows)
                yield _Block(rows, RowPrompts(several.number(lambda each: each.longest_timed, rows)), prompt, None)
        return
    (lengths,) = several.cases
    counted = None if quantile is None else lengths.prompt_quantile(quantile)
    kinds = np.minimum(chunks, 1) if lengths.constant or lengths.few else chunks
    for size in np.unique(kinds).tolist():
        timed, alike = TimedPrompts(lengths.prompt_nodes(size), counted), np.flatnonzero(kinds == size)
        for block in row_blocks(alike.size, columns):
            yield _Block(alike[block], timed, lengths.prompt, lengths)


#: Passes, bytes and code of the form of the points of some rows.
Scored = tuple[PrefillPass, Any, Any]


def _score(at: Setup, block: _Block, mapping: Sharding, axis: Any, form: str) -> Scored:
    """Expected pass, bytes and code of the form of one block of rows, all chunked or none."""
    chunk, timed, lengths = mapping.chunk_tokens, block.timed, block.lengths
    whole, reused = not chunk[0, 0], lengths is not None and lengths.cached is not None
    forms = (form_of_whole(form, reused=reused),) if whole else chunk_forms(at.model, form)
    passes = timed.expected(PromptPasses(at, mapping, axis, chunk, forms), at.system)
    held = [prefill_bytes(at, mapping, axis, prompt=block.prompt, chunk_tokens=chunk, mla_form=each) for each in forms]
    uneven = None if lengths is None else uneven_passes(at, lengths, mapping, axis, chunk, forms)
    if uneven is not None and isinstance(timed, TimedPrompts):
        slower = [slow.where(mapping.dp_attn > 1, even) for slow, even in zip(uneven, passes, strict=True)]
        if timed.counted is not None:
            slower = [done._replace(ftl=even.ftl) for done, even in zip(slower, passes, strict=True)]
        passes = slower
    first, *others = zip(passes, held, (form_code(at, each) for each in forms), strict=True)
    return best_form(at, first, others[0]) if others else first


def best_form(at: Setup, best: Scored, other: Scored) -> Scored:
    """Passes, bytes and forms of CPP: those of the ``other`` form of MLA wherever it is faster and fits.

    Returns one of the two, point by point: [s], [B], index into ``CHOSEN_FORMS``.

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
    return scored.where(take, old), np.where(take, held, memory), np.where(take, cached, code)
