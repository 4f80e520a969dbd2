"""Score co-located serving by in-flight batching: a prefill pass stops decode (physics page, section 8)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prompts import PromptPasses, form_of_whole
from disagg_sim.physics.residents import prefilling_in_passes
from disagg_sim.physics.setup import Setup
from disagg_sim.search.axes import CHUNK_TOKENS
from disagg_sim.search.blocks import bound_codes
from disagg_sim.search.passes import expected_passes
from disagg_sim.search.phase_grid import form_code
from disagg_sim.serving.colocation import (
    Chosen,
    ColocatedCase,
    ColocatedPoints,
    Colocation,
    Found,
    Group,
    Options,
    Rows,
    SearchTally,
    choose,
    drafted_groups,
    of_one_depth,
    points_of_search,
    searched,
)
from disagg_sim.serving.pass_columns import PassColumns, hold_steps, pass_columns, pass_sizes
from disagg_sim.serving.step_mixing import longest_gap, token_times
from disagg_sim.workload.lengths import Lengths

DEFAULT = Colocation()


def colocated(
    at: Setup,
    mappings: Sharding | list[Sharding],
    lengths: Lengths,
    *,
    ftl_limit: float = 10.0,
    ttl_limit: float | None = None,
    options: Colocation = DEFAULT,
) -> pd.DataFrame:
    r"""In-flight batching without piggyback: free seats take whole prompts, up to b a pass, and decode waits.

    While all B residents are replaced once, an instance makes OSL-1 decode steps and as many passes as it takes to
    fill the seats as they become free: few together, on whichever ranks they are (``slot_turnover.refill_passes``).
    With t_p of these passes a prompt, and t_own of the pass that a prompt is in,

    .. math:: cycle = (OSL-1)\,T_d(B) + B\,t_p,\quad \overline{TTL} = T_d + \frac{B\,t_p}{OSL-1},\quad
              y = \frac{B \cdot OSL}{G \cdot cycle}

    This mean is of a slot and counts the prefill of its own prompt, too. A request's tokens come after that: while it
    decodes, it sees all other passes of a cycle,

    .. math:: TPOT = T_d + \frac{B\,t_p - t_{own}}{OSL-1}

    The largest gap between two tokens is T_d and a pass of b prompts (more where OSL-1 is less than the passes of a
    cycle, so that several fall between two steps); FTL is t_own, without a queue. Searched are every mapping, its
    batches B, the prompts b that a pass may take and, with a pipeline, whether the pass is cut into chunks (CPP)
    and of what size. Memory holds the residents and b prompts in prefill. Under a law of lengths passes are the mean
    over the law, decode runs at the length-biased context, and the largest gap is made by a pass of prompts that 99 of
    100 do not exceed.

    Parameters
    ----------
    at : Setup
        Model, system, recipe, profile and engine, from ``setup``.
    mappings : Sharding or list of Sharding
        From ``enumerate_mappings``, or made by hand.
    lengths : Lengths
        Of the requests, from ``lengths``.
    ftl_limit, ttl_limit : float
        Largest latencies, inclusive; the FTL limit acts on ``ftl_with_slot_wait_s``. [s]
    options : Colocation
        Batches and prompts that a pass may take, measure of TTL, form of MLA.

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
    >>> points = colocated(at, Sharding(), lengths(2048, 256), options=Colocation(batch=(16, 64)))
    >>> points["decode_batch"].tolist()
    [16, 64]
    """
    case = ColocatedCase(at=at, lengths=lengths, ftl_limit=ftl_limit, ttl_limit=ttl_limit, options=options)
    return search_colocated(case, mappings).require().points


def search_colocated(case: ColocatedCase, mappings: Sharding | list[Sharding]) -> ColocatedPoints:
    """Find the points of ``colocated`` within the limits, none if so it is, and count what was looked at."""
    chosen, tally = searched(_search, case, mappings)
    if (sizes := case.options.prefill_batch) is not None and not chosen:
        raise InputError(f"prefill_batch {list(sizes)} is above every batch; allowed: up to the requests of a batch")
    return points_of_search(case, ServingMode.COLOCATED, chosen, tally)


def count_colocated(case: ColocatedCase, mappings: Sharding) -> int:
    """Count the design points that ``colocated`` scores: (mapping, batch, prompts of a pass, cut). [1]

    Of 64 residents with 256 tokens to go several end together in one step of nine that free a seat, so a pass may need
    room for two prompts; with two residents that hardly ever happens:

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> case = ColocatedCase(at=at, lengths=ds.lengths(2048, 256), ftl_limit=10.0, options=Colocation(batch=(2, 64)))
    >>> count_colocated(case, Sharding())
    3
    """
    found, alike = 0, defaultdict(list)
    for own, group in drafted_groups(case, mappings):
        alike[own, group.drafts].append(group)
    for (own, _), groups in alike.items():
        for group, *options in zip(groups, pass_sizes(own, groups), hold_steps(own, groups), strict=True):
            cuts = sum(len(forms) for _, forms in _cut_sizes(own, group))
            found += len(group.table) * sum(map(int, map(np.count_nonzero, options))) * cuts
    return found


@dataclass(frozen=True, eq=False)
class _Cut:
    """One way to make a pass: whole prompts, or chunks of CPP."""

    chunk_tokens: int  # 0 = whole prompts [token]
    form: str  # of MLA
    time: Floats  # of a pass, the mean over the lengths, (rows, passes) [s]
    long_time: Floats  # of a pass of long prompts, which makes the largest gap, (rows, passes) [s]
    load: Floats | float  # of its cached pasts into HBM, while decode goes on, the mean; 0 where they are there [s]

    def of(self, rows: slice) -> _Cut:
        """Of some of the rows."""
        load = self.load[rows] if isinstance(self.load, np.ndarray) else self.load
        return replace(self, time=self.time[rows], long_time=self.long_time[rows], load=load)

    def form_code(self, at: Setup) -> np.int8:
        """Form of MLA as index into ``CHOSEN_FORMS``."""
        return form_code(at, self.form)


def _cut_sizes(case: ColocatedCase, group: Group) -> list[tuple[int, tuple[str, ...]]]:
    """Chunk tokens (0 = whole prompts) of the cuts of a group, and the forms of MLA of each."""
    chunks = [size for size in CHUNK_TOKENS if group.deep and size < case.lengths.longest_timed]
    whole = form_of_whole(case.options.mla_form, reused=case.lengths.cached is not None)
    return [(0, (whole,)), *((size, case.forms) for size in chunks)]


def _cuts(
    case: ColocatedCase, mapping: Sharding, prompts: tuple[Floats, Floats], size: int, forms: tuple[str, ...]
) -> list[_Cut]:
    """Time the passes of one chunk size: ``prompts`` over all ranks, then those on one rank, of (rows, passes) each."""
    spread, lone = prompts
    parts = [_passes(case, mapping, spread, size, forms)]
    if lone.shape[1]:
        parts.append(_passes(case, mapping, lone, size, forms, lone=True))
    found = []
    for form, *cuts in zip(forms, *parts, strict=True):
        mean, longest = (np.concatenate([np.asarray(cut[i]) for cut in cuts], axis=1) for i in (0, 1))
        loads = [np.broadcast_to(load, np.shape(time)) for time, _, load in cuts]
        past = any(np.any(load) for *_, load in cuts)
        found.append(_Cut(size, form, mean, longest, np.concatenate(loads, axis=1) if past else 0.0))
    return found


def _passes(
    case: ColocatedCase, mapping: Sharding, prompts: Floats, size: int, forms: tuple[str, ...], *, lone: bool = False
) -> list[tuple[Any, Any, Any]]:
    """Passes over the law of lengths, of each form: mean, of long prompts, and load of their pasts.

    The ``prompts`` are spread over the ranks, or all on one, which others wait for.
    """
    at, lengths = case.at, case.lengths
    timed = PromptPasses(at, mapping, prompts, np.full((len(prompts), 1), float(size)), forms, lone=lone)
    nodes = lengths.prompt_nodes(size)
    timed.time_at_once([each[:2] for each in nodes.each()] + [lengths.long_prompt] * (not lengths.constant))
    means = expected_passes(timed, lengths, nodes)
    longest = [each.ftl for each in means]
    if not lengths.constant:
        done = timed.passes(*lengths.long_prompt, at.system.tier(HBM))
        longest = [np.maximum(each.ftl, mean) for each, mean in zip(done, longest, strict=True)]
    return [(mean.ftl, most, mean.load) for mean, most in zip(means, longest, strict=True)]


def _search(case: ColocatedCase, groups: Sequence[Group]) -> Found:
    """Score every (batch, cut, pass size) of the rows of all groups, and keep the best."""
    passes = pass_columns(case, groups)
    depths = of_one_depth(groups)
    timed = [_timed(case, groups, passes, places) for places in depths]
    points, tally = list[tuple[int, Chosen]](), SearchTally()
    for scored in chain(*timed):
        columns = scored.passes.batch_index.size
        for rows in scored.group.blocks(columns * len(scored.cuts)) if columns else ():
            chosen, seen = scored.block(rows)
            points.append((scored.place, chosen))
            tally = tally.plus(seen)
    return points, tally


def _timed(
    case: ColocatedCase, groups: Sequence[Group], passes: Sequence[PassColumns], places: Sequence[int]
) -> list[_Scored]:
    """Time decode steps and passes of the rows of groups of one depth, together, each group at its own prompts."""
    rows = Rows.of(groups, [(place, slice(0, len(groups[place].table))) for place in places])
    mapping, axis = rows.table.for_grid(), rows.batch[None, :].astype(float)
    prompts = np.ones((len(rows.table), max(1, *(passes[place].sizes.size for place in places))))
    lone = np.ones((len(rows.table), max(0, *(passes[place].lone.size for place in places))))
    for place, own in rows.places:
        sizes, alone = passes[place].sizes, passes[place].lone
        prompts[own, : sizes.size] = sizes
        prompts[own, sizes.size :] = sizes[-1] if sizes.size else 1
        lone[own, lone.shape[1] - alone.size :] = alone[::-1]
    load = case.lengths.on_ranks(axis, mapping.dp_attn)
    decode = decode_step(case.at, mapping, batch=axis, context=load.context, rank_batch=load.batch)
    of_sizes = [_cuts(case, mapping, (prompts, lone), *cut) for cut in _cut_sizes(case, groups[places[0]])]
    cuts: list[_Cut] = list(chain(*of_sizes))
    bound = np.broadcast_to(bound_codes(decode.sums), decode.ttl.shape)
    return [
        _Scored(case, groups[place], place, [cut.of(own) for cut in cuts], passes[place], decode.ttl[own], bound[own])
        for place, own in rows.places
    ]


@dataclass(frozen=True, eq=False)
class _Scored:
    """Passes and decode steps of a group, scored apart; columns are (batch, prompts that a pass may take)."""

    case: ColocatedCase
    group: Group
    place: int  # of the group in those of the search
    cuts: list[_Cut]
    passes: PassColumns
    decode_ttl: Floats  # (rows, batches) [s]
    bound: NDArray[np.int8]  # (rows, batches) index into ``BOUNDS``

    def block(self, rows: slice) -> tuple[Chosen, SearchTally]:
        """Join passes and steps of some rows, the cuts one after the other, and choose."""
        case, cuts, batch, passes = self.case, self.cuts, self.group.batch, self.passes
        part, columns = self.group.table[rows], passes.batch_index.size
        index, count = np.tile(passes.batch_index, len(cuts)), np.tile(passes.together, len(cuts))
        step = self.decode_ttl[rows][:, index]
        idle, left = np.tile(passes.idle, len(cuts)), np.tile(passes.left, len(cuts))
        means = [passes.mean(cut.time[rows]) for cut in cuts]
        each, own = (np.concatenate(parts, axis=1) for parts in zip(*means, strict=True))
        often, ftl, fed = np.tile(passes.passes, len(cuts)), own, None
        per_token = batch[index] / case.lengths.gaps * often  # passes
        if any(np.ndim(cut.load) for cut in cuts):
            loads = (np.broadcast_to(cut.load, cut.time.shape)[rows] for cut in cuts)
            load = np.concatenate([passes.mean(of_cut)[1] for of_cut in loads], axis=1)
            ftl, fed = own + load, per_token * load  # loads go on beside decode
        mean, tpot = token_times(step, each, own, batch[index], case.lengths.gaps, idle, left, fed)

        def largest_gap(places: Any) -> Floats:
            long_time = np.concatenate([cut.long_time[rows][:, passes.longest] for cut in cuts], axis=1)
            gap = longest_gap(step[places], long_time[places], per_token[places[1]], self.group.accepted(case))
            return np.asarray(gap)

        options = Options(
            batch_index=index,
            ttl_mean=mean,
            largest_gap=largest_gap,
            tpot=tpot,
            ftl=ftl,
            memory=np.concatenate(
                [held[rows].take(self.passes.sized, axis=1) for held in self._resident_bytes], axis=1
            ),
            group=1.0 / often,
        )
        row, column, tally = choose(case, batch, options)
        batch_place = index[column]
        chosen = Chosen(
            mapping=part[row],
            batch=batch[batch_place],
            prefill_batch=count[column],
            hold_steps=np.tile(passes.hold_steps, len(cuts))[column],
            chunk_tokens=np.array([cut.chunk_tokens for cut in cuts])[column // columns],
            mixed_chunk=np.zeros(row.size),
            mixed_share=np.zeros(row.size),
            **options.at(row, column),
            prefill_rate=1.0 / each[row, column],
            decode_rate=case.lengths.request_rate(batch[batch_place], step[row, column]),
            bound=self.bound[rows][row, batch_place],
            mla_form=np.array([cut.form_code(case.at) for cut in cuts])[column // columns],
        )
        return chosen, tally

    @cached_property
    def _resident_bytes(self) -> list[Floats]:
        """Bytes of all rows under each cut, at the distinct sizes of ``passes.sized``."""
        # whole prompts keep no up-projected past
        kept = [(cut.form if cut.chunk_tokens else "auto", cut.chunk_tokens) for cut in self.cuts]
        return pass_bytes(self.case, self.group, self.passes, kept)


def pass_bytes(case: ColocatedCase, group: Group, passes: PassColumns, cuts: Sequence[tuple[str, int]]) -> list[Floats]:
    """Find bytes on the fullest GPU under each cut (rows, sizes); ``passes.sized`` says the size of a column. [B]"""
    mapping, first = group.mapping.narrowed(), np.unique(passes.sized, return_index=True)[1]
    batch, prompts = (each[first].astype(float)[None, :] for each in (group.batch[passes.batch_index], passes.together))
    prompt, deviations = case.lengths.prompt, case.at.profile.resident_deviations
    chunks = list(dict.fromkeys(chunk for _, chunk in cuts))
    forms = list(dict.fromkeys(form for form, _ in cuts))
    # an axis in front holds the chunks
    prefilling = prefilling_in_passes(mapping, prompts, prompt, np.array(chunks)[:, None, None], deviations)
    shape = len(chunks), len(group.table), first.size
    found = {
        form: np.broadcast_to(each, shape)
        for form, each in zip(forms, case.memory_bytes(mapping, batch, prefilling, forms), strict=True)
    }
    return [found[form][chunks.index(chunk)] for form, chunk in cuts]
