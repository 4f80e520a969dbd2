"""Score co-located serving by in-flight batching: a prefill pass stops decode (physics page, section 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Mapping, Mode
from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.kv_tiers import tier_of
from disagg_sim.physics.passes.decode import decode_lookups
from disagg_sim.physics.passes.prefill import PrefillPass
from disagg_sim.physics.passes.prompts import PromptPasses, form_of_whole
from disagg_sim.physics.residents import prefilling_in_passes
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import Lookups, evaluate, side_by_side
from disagg_sim.search.blocks import bound_codes
from disagg_sim.search.grid import CHUNK_TOKENS, form_code
from disagg_sim.search.prefixes import uneven_pass
from disagg_sim.serving.colocation import (
    Case,
    Chosen,
    Colocation,
    Found,
    Group,
    Options,
    Tally,
    choose,
    drafted_groups,
    found,
)
from disagg_sim.workload.lengths import Lengths

DEFAULT = Colocation()


def colocated(
    at: Setup,
    mappings: Mapping | list[Mapping],
    lengths: Lengths,
    *,
    ftl_limit: float = 10.0,
    ttl_limit: float | None = None,
    options: Colocation = DEFAULT,
) -> pd.DataFrame:
    r"""In-flight batching without piggyback: whole prompts are prefilled b at a time, and decode waits.

    While all B residents are replaced once, an instance makes OSL-1 decode steps and B/b passes of
    prefill. With t_p = pass time / b per prompt

    .. math:: cycle = (OSL-1)\,T_d(B) + B\,t_p,\quad \overline{TTL} = T_d + \frac{B\,t_p}{OSL-1},\quad
              y = \frac{B \cdot OSL}{G \cdot cycle}

    This mean is of a slot and counts the prefill of its own prompt, too. A request's tokens come after that: while it
    decodes, the others of its attention rank are replaced once, over dp ranks

    .. math:: TPOT = T_d + \frac{(B - dp)\,t_p}{OSL-1}

    whatever b is, unless requests of equal length start and end together, which no engine can rely on.

    The largest gap between two tokens is T_d and one pass (more where B/b exceeds OSL-1, so that several
    passes fall between two steps); FTL is the pass, without a queue. Searched are every mapping, its
    batches B, the prompts b of a pass and, with a pipeline, whether the pass is cut into chunks (CPP)
    and of what size. Memory holds the residents and the prompts in prefill. Under a law of lengths t_p is the mean
    over the law, decode runs at the length-biased context, and the largest gap is made by a pass of prompts that 99 of
    100 do not exceed.

    Parameters
    ----------
    at : Setup
        Model, system, recipe, profile and engine, from ``setup``.
    mappings : Mapping or list of Mapping
        From ``enumerate_mappings``, or made by hand.
    lengths : Lengths
        Of the requests, from ``lengths``.
    ftl_limit, ttl_limit : float
        Largest latencies, inclusive; the FTL limit acts on ``ftl_with_slot_wait_s``. [s]
    options : Colocation
        Batches and prompts of a pass to try, measure of TTL, form of MLA.

    Returns
    -------
    DataFrame
        Columns as ``points.COLUMNS``. One row per (mapping, B) with the b of the lowest TTL; under "p99" every b of a
        (mapping, B) that no other beats in TTL and throughput.

    Raises
    ------
    InfeasibleError
        When nothing fits in memory, or nothing meets the FTL limit.
    InputError
        Values out of range, mappings that the model cannot take.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> at = setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> points = colocated(at, Mapping(), lengths(2048, 256), options=Colocation(batch=(16, 64)))
    >>> points["decode_batch"].tolist()
    [16, 64]
    """
    case = Case(at=at, lengths=lengths, ftl_limit=ftl_limit, ttl_limit=ttl_limit, options=options)
    return search_colocated(case, mappings).require().points


def search_colocated(case: Case, mappings: Mapping | list[Mapping]) -> Found:
    """Find the points of ``colocated`` within the limits, none if so it is, and count what was looked at.

    Parameters
    ----------
    case, mappings
        Setup, lengths, limits and options; mappings to search.

    Returns
    -------
    Found
        Table of points, and a tally of what the limits left out.

    Raises
    ------
    InputError
        Mappings that the model cannot take, none at all, or prompts of a pass above every batch.

    Examples
    --------
    An FTL limit of 1 us leaves nothing, and that is a result:

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> case = Case(at=at, lengths=ds.lengths(2048, 256), ftl_limit=1e-6, options=Colocation(batch=(1, 2)))
    >>> found = search_colocated(case, Mapping())
    >>> len(found.points), found.tally.feasible, found.tally.above_ftl_limit
    (0, 3, 3)
    """
    sizes = None if case.options.prefill_batch is None else np.array(case.options.prefill_batch)
    searches = [_search(own, group, sizes) for own, group in drafted_groups(case, mappings)]
    parts = [part for of_group in evaluate(side_by_side(searches)) for part in of_group]
    if sizes is not None and not parts:
        raise InputError(f"prefill_batch {sizes.tolist()} is above every batch; allowed: up to the requests of a batch")
    return found(case, Mode.COLOCATED, parts)


def count_colocated(case: Case, mappings: Mapping) -> int:
    """Count the design points that ``colocated`` scores: (mapping, batch, prompts of a pass, cut). [1]

    Parameters
    ----------
    case, mappings
        Setup, lengths, limits and options; mappings to search.

    Returns
    -------
    int
        Before any limit acts. [1]

    Examples
    --------
    Batches of 1 and 2 make passes of one prompt and of one or two:

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> case = Case(at=at, lengths=ds.lengths(2048, 256), ftl_limit=10.0, options=Colocation(batch=(1, 2)))
    >>> count_colocated(case, Mapping())
    3
    """
    return sum(
        len(group.table) * int(np.count_nonzero(_pass_sizes(group, None))) * len(_cut_sizes(case, group))
        for _, group in drafted_groups(case, mappings)
    )


@dataclass(frozen=True, eq=False)
class _Cut:
    """One way to make a pass: whole prompts, or chunks of CPP."""

    chunk_tokens: int  # 0 = whole prompts [token]
    form: str  # of MLA
    time: Floats  # of a pass, the mean over the lengths, (rows, passes) [s]
    long_time: Floats  # of a pass of long prompts, which makes the largest gap, (rows, passes) [s]
    load: Floats  # of its cached pasts into HBM, while decode goes on, the mean, (rows, passes) [s]

    @property
    def expanded(self) -> bool:
        """Whether MLA keeps the up-projected past."""
        return bool(self.chunk_tokens) and self.form == "cached"

    def form_code(self, at: Setup) -> np.int8:
        """Form of MLA as index into ``CHOSEN_FORMS``."""
        return form_code(at, self.form)


def _cut_sizes(case: Case, group: Group) -> list[tuple[int, str]]:
    """Chunk tokens (0 = whole prompts) and MLA form of every cut of a group."""
    chunks = [size for size in CHUNK_TOKENS if group.deep and size < case.lengths.longest_timed]
    whole = form_of_whole(case.options.mla_form, reused=case.lengths.cached is not None)
    return [(0, whole), *((size, each) for size in chunks for each in case.forms)]


def _cut(case: Case, group: Group, passes: Ints, size: int, form: str) -> Lookups[_Cut]:
    """Time the passes of one cut at every prompt that stands for the law."""
    at, mapping, prompts = case.at, group.mapping, passes[None, :].astype(float)
    chunk = np.full((len(group.table), 1), float(size))

    timed = PromptPasses(at, mapping, prompts, chunk, form)

    def one(isl: float, past: float, tier: str) -> Lookups[PrefillPass]:
        return timed.lookups(isl, past, tier_of(at.system, tier))

    mean: Any = 0
    load: Any = np.zeros(1)
    for isl, past, weight, tier in case.lengths.prompt_nodes(size).each():
        done = yield from one(isl, past, tier)
        mean, load = mean + weight * done.ftl, load + weight * done.load
    if not size and (waits := uneven_pass(at, case.lengths, mapping, prompts, form)) is not None:
        mean = np.where(mapping.dp_attn > 1, waits.ftl, mean)
    long_time = mean
    if not case.lengths.constant:
        long_time = np.maximum((yield from one(*case.lengths.long_prompt, HBM)).ftl, mean)
    return _Cut(size, form, np.asarray(mean), long_time, np.broadcast_to(load, np.shape(mean)))


def _pass_sizes(group: Group, sizes: Ints | None) -> Ints:
    """Prompts of a pass worth trying, (batches, options), 0 where there are more than residents. [request]

    A pass below one prompt a rank takes as long as one, so the least is one a rank, or all residents.
    """
    batch = group.batch[:, None]
    if sizes is not None:
        return np.where(sizes <= batch, sizes, 0)
    steps = group.dp * 2 ** np.arange(max(int(group.batch[-1]) // group.dp, 1).bit_length())
    return np.where((steps <= batch) | (steps == group.dp), np.minimum(steps, batch), 0)


def _search(case: Case, group: Group, sizes: Ints | None) -> Lookups[list[tuple[Chosen, Tally]]]:
    """Score every (batch, cut, pass size) of the rows of a group, in blocks, and keep the best."""
    at, prompts = case.at, _pass_sizes(group, sizes)
    batch_index, step = np.nonzero(prompts)
    if not batch_index.size:
        return []
    passes, which = np.unique(prompts[batch_index, step], return_inverse=True)
    axis = group.batch[None, :].astype(float)
    load = case.lengths.on_ranks(axis, group.mapping.dp_attn)
    asked: list[Lookups[Any]] = [
        decode_lookups(at, group.mapping, batch=axis, context=load.context, rank_batch=load.batch)
    ]
    asked += [_cut(case, group, passes, size, form) for size, form in _cut_sizes(case, group)]
    decode, *cuts = yield from side_by_side(asked)
    bound = np.broadcast_to(bound_codes(decode.sums), decode.ttl.shape)
    scored = _Scored(case, group, cuts, batch_index, passes[which], which, decode.ttl, bound)
    return [scored.block(rows) for rows in group.blocks(batch_index.size * len(cuts))]


@dataclass(frozen=True, eq=False)
class _Scored:
    """Passes and decode steps of a group, scored apart; columns are (batch, prompts of a pass)."""

    case: Case
    group: Group
    cuts: list[_Cut]
    batch_index: Ints  # (columns,) place in the batch axis
    together: Ints  # (columns,) prompts of a pass [request]
    which: Ints  # (columns,) place of that number in the times of the cuts
    decode_ttl: Floats  # (rows, batches) [s]
    bound: NDArray[np.int8]  # (rows, batches) index into ``BOUNDS``

    def block(self, rows: slice) -> tuple[Chosen, Tally]:
        """Join passes and steps of some rows, the cuts one after the other, and choose."""
        case, cuts, batch = self.case, self.cuts, self.group.batch
        part = self.group.table[rows]
        index, count = np.tile(self.batch_index, len(cuts)), np.tile(self.together, len(cuts))
        step = self.decode_ttl[rows][:, index]
        times, long_times, loads = (
            np.concatenate([getattr(cut, name)[rows][:, self.which] for cut in cuts], axis=1)
            for name in ("time", "long_time", "load")
        )
        memory = np.concatenate(self._memory(part), axis=1)
        passes_per_token = batch[index] / (count * case.lengths.gaps)
        own = np.minimum(count, self.group.dp) / (count * case.lengths.gaps)  # part of a pass, with a prompt a rank
        fed = passes_per_token * loads  # as fast as pasts are loaded, while decode goes on
        accepted = self.group.accepted(case)
        options = Options(
            batch_index=index,
            ttl_mean=np.maximum(step + passes_per_token * times, fed),
            largest_gap=accepted * step + np.ceil(accepted * passes_per_token) * long_times,
            tpot=np.maximum(step + (passes_per_token - own) * times, fed),
            ftl=times + loads,
            memory=memory,
            group=count.astype(float),
        )
        row, column, tally = choose(case, batch, options)
        batch_place, b, time = index[column], count[column], times[row, column]
        chosen = Chosen(
            mapping=part[row],
            batch=batch[batch_place],
            prefill_batch=b,
            group=b.astype(float),
            chunk_tokens=np.array([cut.chunk_tokens for cut in cuts])[column // self.batch_index.size],
            mixed_chunk=np.zeros(row.size),
            mixed_share=np.zeros(row.size),
            ttl_mean=options.ttl_mean[row, column],
            largest_gap=options.largest_gap[row, column],
            tpot=options.tpot[row, column],
            ftl=options.ftl[row, column],
            memory=memory[row, column],
            prefill_rate=b / time,
            decode_rate=case.lengths.request_rate(batch[batch_place], step[row, column]),
            bound=self.bound[rows][row, batch_place],
            mla_form=np.array([cut.form_code(case.at) for cut in cuts])[column // self.batch_index.size],
        )
        return chosen, tally

    def _memory(self, part: Mapping) -> list[Floats]:
        """Bytes of some rows under each cut: residents and prompts are the same, an axis in front holds the chunks."""
        mapping, together = part.for_grid(), self.together.astype(float)[None, :]
        prompt, deviations = self.case.lengths.prompt, self.case.at.profile.resident_deviations
        batch = self.group.batch[self.batch_index].astype(float)[None, :]
        held: dict[int, Floats] = {}
        for expanded in (False, True):
            alike = [place for place, cut in enumerate(self.cuts) if cut.expanded == expanded]
            if not alike:
                continue
            chunks = np.array([self.cuts[place].chunk_tokens for place in alike])[:, None, None]
            prefilling = prefilling_in_passes(mapping, together, prompt, chunks, deviations)
            sizes = self.case.memory_bytes(mapping, batch, prefilling, expanded=expanded)
            shape = len(alike), len(part), self.together.size
            held |= dict(zip(alike, np.broadcast_to(sizes, shape), strict=True))
        return [held[place] for place in range(len(self.cuts))]
