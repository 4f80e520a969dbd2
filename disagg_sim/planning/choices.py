"""Choose configurations of instances that are worth sizing: the fastest of each size within the limits.

Grids of all mappings and batches are scored at once; a few of each size go on to be sized with queueing. Put a faster
instance of the same size in the place of a slower one and no pool needs more GPUs.

Past 400 lines: choices of the three kinds of pools share their grids, the views on them and the ladder of pass times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.choices import LEAST_LOAD
from disagg_sim.domain import BOUNDS, SHARDING, Sharding
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prompts import PromptPasses, form_of_whole
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.leaving_order import StageTimes
from disagg_sim.planning.limits import NO_LIMIT, Demand
from disagg_sim.planning.loads import Loads
from disagg_sim.planning.long_prompts import OneByOne
from disagg_sim.planning.mixed_steps import BUDGETS, SIZES, MixedSteps, mixed_bytes, mixed_tables, waits_of
from disagg_sim.planning.pieces import PromptLengths
from disagg_sim.planning.pools import ColocatedChoice, DecodeChoice, PrefillChoice
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.layouts import why_unserved
from disagg_sim.search.passes import slowest_passes
from disagg_sim.search.phase_grid import PhaseGrid, fastest_points
from disagg_sim.serving.step_mixing import token_time
from disagg_sim.workload.distributions import Prompts
from disagg_sim.workload.lengths import Lengths, uneven

#: Most of the TTFT limit that a pass may take; the rest is for the queue. [1]
PASS_SHARE = 0.95
#: Least times of a pass below which the fastest is looked for, over the limit, and two such times over each other: they
#: are the same whatever the limit is, so that a looser one leaves out no pass that a tighter one takes. [1]
SHORT_PASS, PASS_STEP = 0.25, math.sqrt(2.0)
#: The least at the mean lengths, where the limit is one of long prompts. [1]
SHORT_PASS_OF_MEANS = 0.1
#: Share of the memory of a GPU that a pass of prefill, and one sequence in decode, takes at most in a plan; further
#: sequences fill the rest (chosen: forecasts of what servers hold err by up to 2.7 %, and TensorRT-LLM keeps no reserve
#: beside its cache). [1]
FULLEST = 0.97
#: Configurations of one size that are sized, of decode and of both phases. [1]
OF_A_SIZE = 2
#: Batches by whose multiples steps of co-located instances are timed, so that those under other limits are known. [1]
ALIKE_BATCHES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Grids:
    """Scored points of both phases of one case."""

    prefill: PhaseGrid
    decode: PhaseGrid


Axes = tuple[Ints | None, Ints | None]  # chunks [token] and batches [request] of prefill that are scored; None = all
ALL: Axes = (None, None)


def grids_of(
    at: Setup, prefill_at: Setup, mappings: tuple[Sharding, Sharding], work: Demand, axes: Axes = ALL
) -> Grids:
    """Score all mappings (of prefill, of decode); latency is that of prompts at the percentile of the limit [s]."""
    even = work.lengths.rank_loads is None  # else requests of one length say nothing of how long ranks wait
    if even and not work.lengths.constant:  # of all mappings at the mean lengths those worth timing at every length
        rough = replace(work, lengths=work.lengths.at_means())
        mappings, axes = _worth(_scored(at, prefill_at, mappings, rough), rough, alike=prefill_at is at)
    return _scored(at, prefill_at, mappings, work, axes)


def _scored(at: Setup, prefill_at: Setup, mappings: tuple[Sharding, Sharding], work: Demand, axes: Axes = ALL) -> Grids:
    share, prompts = None if work.lengths.constant else work.ttft.share, prompts_of_ranks(work.lengths)
    prefill = prefill_grid(prefill_at, mappings[0], prompts, ftl_quantile=share, chunk_tokens=axes[0], batch=axes[1])
    return Grids(_with_room(prefill), _with_room(decode_grid(at, mappings[1], work.lengths)))


def _with_room(grid: PhaseGrid) -> PhaseGrid:
    """The same without points that would need more than the memory there is if forecasts of it err."""
    needed = grid.memory_bytes if grid.phase == "prefill" else grid.memory_bytes[:, :1]  # decodes take what is left
    lacking = needed - FULLEST * grid.setup.system.hbm_reported
    held = np.where(lacking > 0, np.maximum(grid.memory_bytes, grid.memory_limit + lacking), grid.memory_bytes)
    return replace(grid, memory_bytes=held) if (lacking > 0).any() else grid


def prompts_of_ranks(lengths: Lengths) -> Lengths:
    """Let the DP ranks of a pass of prefill have the prompts that come to them: a pass ends with the longest of all.

    Answers even out over the many sequences of a decode step; a pass has a few prompts, one a rank or none.
    """
    return lengths if lengths.rank_imbalance else uneven(lengths, LEAST_LOAD)


def _worth(grids: Grids, work: Demand, *, alike: bool) -> tuple[tuple[Sharding, Sharding], Axes]:
    """Mappings of prefill and of decode that are among the fastest of their size somewhere, and axes of prefill."""
    alone = grids.prefill.mappings.dp_attn == 1  # the others wait for their longest prompt, which means do not tell
    points = _fastest_passes(grids.prefill, work.ttft.seconds, SHORT_PASS_OF_MEANS, (alone,))
    whole = int(np.count_nonzero(grids.prefill.mappings.chunk_tokens == 0))
    table = grids.prefill.mappings
    degrees = {degrees_of(table, row) for row, _ in points}
    plain = table[np.arange(whole)]
    prefill = [row for row in range(whole) if degrees_of(plain, row) in degrees]
    usable = grids.decode.feasible & (grids.decode.latency <= work.tpot.seconds)
    decode = sorted({row for row, _ in _best_of_sizes(grids.decode, usable)})
    if alike:  # rows beyond those of decode share prompts
        both = (row for row in prefill if row < len(grids.decode.mappings))
        staged = staged_rows(grids, work) if longer_than_steps(work.lengths) else []
        points += [(row, 0) for row, _ in staged]  # their chunks
        shared = {*decode, *both, *_colocated_rows(grids, work)[0], *(row for _, row in staged)}
        decode, prefill = sorted(shared), sorted({*shared, *prefill})
    kept = plain[np.array(prefill, dtype=int)], grids.decode.mappings[np.array(decode, dtype=int)]
    if not points:
        return kept, (np.zeros(1, dtype=np.int64), grids.prefill.batch[:1])
    rows, columns = np.array(points).T
    return kept, (np.unique(table.chunk_tokens[rows]), grids.prefill.batch[: columns.max() + 1])


def degrees_of(table: Sharding, row: int) -> tuple[int, ...]:
    """Sharding of one row of a table of mappings. [1]"""
    return tuple(int(getattr(table, name)[row]) for name in SHARDING)


def pass_times(limit: float, short: float) -> list[float]:
    """Times of a pass below which the fastest are looked for: most of a limit [s], and a ladder below it. [s]"""
    low, high = (math.log(share * limit, PASS_STEP) for share in (short, PASS_SHARE))
    rungs = range(math.ceil(low - 1e-9), math.floor(high) + 1)
    return [PASS_SHARE * limit, *(PASS_STEP**rung for rung in rungs)]


def _fastest_passes(grid: PhaseGrid, limit: float, short: float, among: tuple[Mask, ...] = ()) -> list[tuple[int, int]]:
    """Rows and columns of the fastest prefill points of each size, among all and some rows, within some times."""
    found: dict[tuple[int, int], None] = {}
    host = grid.setup.request_host
    alone = (grid.mappings.dcp == 1)[:, None]  # of prefill pools; instances of both phases may share caches, too
    for view, time in product([*_views(grid), *among], pass_times(limit, short)):
        usable = view[:, None] & alone & grid.feasible & grid.entered & (grid.latency + host <= time)
        rows, columns = fastest_points(grid, grid.request_rate, usable)
        found |= dict.fromkeys(zip(rows.tolist(), columns.tolist(), strict=True))
    return list(found)


@lru_cache(maxsize=8)  # other limits ask for the same
def _views(grid: PhaseGrid) -> list[Mask]:
    """Rows among which the fastest are looked for: those that no option has added; of them those that ran; all."""
    views: list[Mask] = []
    every = np.ones(len(grid.mappings), dtype=bool)
    run = why_unserved(grid.setup, grid.mappings, prefill=grid.phase == "prefill") == ""
    for rows in (plain_rows(grid.mappings), plain_rows(grid.mappings) & run, every):
        if rows.any() and not any(np.array_equal(rows, other) for other in views):
            views.append(rows)
    return views


def plain_rows(mappings: Sharding) -> Mask:
    """Find mappings of a search without further options: no shared tokens, the fewest copies of experts, (rows,)."""
    others = np.stack([getattr(mappings, name) for name in SHARDING if name != "redundant_slots"])
    alike = np.unique(others, axis=1, return_inverse=True)[1].ravel()
    fewest = np.full(alike.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(fewest, alike, mappings.redundant_slots)
    own = np.asarray(mappings.redundant_slots == fewest[alike])
    return np.asarray(own & (mappings.dcp == 1) & (mappings.pcp == 1))


def axes_of(choices: Sequence[PrefillChoice], batch: Ints) -> Axes:
    """Chunks of some choices, and those of the batches that are at most twice theirs."""
    if not choices:
        return ALL
    most = 2 * max(int(each.batch[-1]) for each in choices)
    chunks = np.unique([int(each.mapping.chunk_tokens) for each in choices])
    return chunks, batch[batch <= most]


def prefill_choices(grid: PhaseGrid, work: Demand) -> list[PrefillChoice]:
    """The fastest prefill configurations of each size whose pass leaves room for a queue; links as wide as needed."""
    return prefill_of(grid, work, _fastest_passes(grid, work.ttft.seconds, SHORT_PASS))


def prefill_of(grid: PhaseGrid, work: Demand, points: Sequence[tuple[int, int]]) -> list[PrefillChoice]:
    """Prefill configurations at some rows and columns of a grid."""
    if not points:
        return []
    mappings = {row: grid.mappings[row] for row, _ in points}
    rows, last = sorted(mappings), max(column for _, column in points) + 1
    nodes = work.lengths.prompt_nodes()
    weights, below = nodes.weight, set(nodes.tier) != {HBM}
    load = np.zeros((weights.size, len(rows), last))
    if work.lengths.constant and not below:
        ftl, spread = grid.latency[None, rows, :last], np.zeros((len(rows), last))
        assert grid.stall is not None
        later = ftl - grid.batch[:last] / grid.request_rate[None, rows, :last] + grid.stall[None, rows, :last]
    else:
        ftl, busy, load, later = times_of_passes(grid, np.array(rows), grid.batch[:last].astype(float), nodes)
        mean = np.tensordot(weights, busy, 1)
        spread = np.tensordot(weights, (busy - mean) ** 2, 1) / mean**2
    found = []
    for row, column in points:
        place, sizes, mapping = rows.index(row), slice(column + 1), mappings[row]
        busy = mean[place] if below else grid.batch[:last] / grid.request_rate[row, :last]
        own, after = ftl[:, place, sizes], later[:, place, sizes]
        made = PrefillChoice(
            at=grid.setup,
            mapping=mapping,
            work=work,
            batch=grid.batch[sizes].astype(float),
            busy=busy[sizes],
            ftl=own,
            spread=float(spread[place, column]),
            weights=weights,
            host=grid.setup.request_host,
            link_rate=math.inf,
            memory=float(grid.memory_bytes[row, column]),
            bound=BOUNDS[grid.bound[row, column]],
            stages=StageTimes(own - after, after) if mapping.pp > 1 else None,
            loads=Loads.of(grid.setup, mapping, nodes, load[:, place, 0] > 0) if below else None,
            parts=work.lengths.prompt_parts,
        )
        found.append(made)
    return found


def times_of_passes(grid: PhaseGrid, rows: Ints, batch: Floats, nodes: Prompts) -> Floats:
    """FTL of passes of prompts of each length, time to the next pass, loads before, and what is left of FTL when the
    first stage is free, (4, lengths, rows, batches). [s]
    """
    ftl, busy, load, later = np.empty((4, nodes.isl.size, rows.size, batch.size))
    chunks = grid.mappings.chunk_tokens[rows]
    for deep in (False, True):
        some = np.flatnonzero((chunks > 0) == deep)
        if not some.size:
            continue
        mapping = grid.mappings[rows[some]].for_grid()
        form = "auto" if deep else form_of_whole("auto", reused=grid.lengths.cached is not None)
        timed = PromptPasses(grid.setup, mapping, batch[None, :], mapping.chunk_tokens, (form,))
        for place, (isl, past, _, tier) in enumerate(nodes.each()):
            (done,) = timed.passes(isl, past, grid.setup.system.tier(tier))
            ftl[place, some], busy[place, some], load[place, some] = done.ftl, done.interval, done.load
            later[place, some] = done.ftl - done.busy
        waits = slowest_passes(timed, grid.lengths)
        if waits is not None:  # short prompts wait for the longest of other ranks
            for own, longest in ((ftl, waits[0].ftl), (later, waits[0].ftl - waits[0].busy)):
                own[:, some] = np.where(mapping.dp_attn > 1, np.maximum(own[:, some], longest), own[:, some])
    return np.stack([ftl, busy, load, later])


def decode_choices(grid: PhaseGrid, work: Demand) -> list[DecodeChoice]:
    """The fastest decode configurations of each size within the TPOT limit; links as wide as needed."""
    usable = grid.feasible & (grid.latency <= work.tpot.seconds)
    return [decode_of(grid, work, row, column) for row, column in _best_of_sizes(grid, usable)]


def _best_of_sizes(grid: PhaseGrid, usable: Mask, rate: Floats | None = None) -> Iterator[tuple[int, int]]:
    """Rows and columns of the fastest points of each size; of mappings that differ in copies of experts one."""
    rates = grid.request_rate if rate is None else rate
    degrees = np.stack([getattr(grid.mappings, name) for name in SHARDING if name != "redundant_slots"])
    alike = np.unique(degrees, axis=1, return_inverse=True)[1].ravel()
    found: dict[tuple[int, int], None] = {}
    for view in _views(grid):
        left = usable & view[:, None]
        for _ in range(OF_A_SIZE):
            rows, columns = fastest_points(grid, rates, left)
            found |= dict.fromkeys(zip(rows.tolist(), columns.tolist(), strict=True))
            left[np.isin(alike, alike[rows])] = False
    yield from found


def decode_of(grid: PhaseGrid, work: Demand, row: int, column: int) -> DecodeChoice:
    """The decode configuration at a row and a column of a grid."""
    batch = grid.batch[: column + 1].astype(float)
    at, mapping, step = grid.setup, grid.chosen(row, column), grid.latency[row, : column + 1]
    if at.speculation is not None:  # an instance has one number of drafts, whatever its batch is
        load = work.lengths.on_ranks(batch, mapping.dp_attn)
        step = decode_step(at, mapping, batch=batch, context=load.context, rank_batch=load.batch).ttl
    return DecodeChoice(
        at=at,
        mapping=mapping,
        work=work,
        seats=int(grid.batch[column]),
        batch=batch,
        step=step,
        link_rate=math.inf,
        memory=float(grid.memory_bytes[row, column]),
        memory_seats=int(grid.batch[np.flatnonzero(grid.feasible[row])[-1]]),
        bound=BOUNDS[grid.bound[row, column]],
    )


def colocated_choices(grids: Grids, work: Demand) -> list[ColocatedChoice]:
    """Configurations of both phases worth sizing, which draft where there is a drafter, each with every budget."""
    rows, columns, last = _colocated_rows(grids, work)
    if not rows.size:
        return []
    grid, plain = grids.decode, replace(work, ttft=NO_LIMIT, tpot=NO_LIMIT)
    mappings = grid.chosen(rows, columns)
    wide = min(math.ceil(last / ALIKE_BATCHES) * ALIKE_BATCHES, grid.batch.size)
    tables, memory = _times_and_memory(grid, plain, tuple(rows.tolist()), mappings.for_grid(), wide)
    return [
        each
        for place, row in enumerate(rows.tolist())
        for each in _colocated(grid, work, row, mappings[place], (tables[:, place, :, :last], memory[place, :, :last]))
    ]


@lru_cache(maxsize=8)  # other limits ask for the same
def _times_and_memory(
    grid: PhaseGrid, work: Demand, rows: tuple[int, ...], mappings: Sharding, last: int
) -> tuple[Floats, Floats]:
    """Times of the steps of co-located instances, and their memory under each budget."""
    tables = mixed_tables(grid, work, np.array(rows), mappings, last)
    return tables, mixed_bytes(grid, work, mappings, last)


def _colocated_rows(grids: Grids, work: Demand) -> tuple[Ints, Ints, int]:
    """Fastest rows of each size and their columns, as if prefill stopped decode at the best pass, and the batches that
    they take.

    ``TTL(B) = T_d(B) + B*t_p/(OSL-1)``.
    """
    prefill, decode, gaps = grids.prefill, grids.decode, work.lengths.gaps
    whole = (prefill.mappings.chunk_tokens == 0) & (prefill.mappings.pcp == 1)  # those of decode, in their order
    per_prompt = np.where(prefill.feasible, 1.0 / prefill.request_rate, np.inf)[whole].min(axis=1)
    time = token_time(decode.latency, decode.batch[None, :] * per_prompt[:, None], gaps)
    usable = decode.feasible & (time <= work.tpot.seconds) & np.isfinite(time)
    if longer_than_steps(work.lengths):  # one request at a time waits for no other's prompt
        alone = ((decode.mappings.dp_attn == 1) & (decode.mappings.pp == 1) & np.isfinite(per_prompt))[:, None]
        usable |= decode.feasible & (decode.latency <= work.tpot.seconds) & alone & (decode.batch == 1)[None, :]
    if decode.setup.speculation is not None:
        usable &= decode.drafts > 0
    flat = (decode.mappings.pp == 1)[:, None]
    usable &= flat | ~np.any(usable & flat)  # pieces of prompts leave gaps in a pipeline of decodes: the last resort
    rate = np.where(usable, decode.batch[None, :] / (gaps * time), 0.0)
    best = dict(_best_of_sizes(decode, usable, rate))
    rows, columns = (np.array(list(each), dtype=np.intp) for each in (best.keys(), best.values()))
    return rows, columns, (int(np.flatnonzero(usable[rows].any(axis=0))[-1]) + 1 if best else 0)


def staged_rows(grids: Grids, work: Demand) -> list[tuple[int, int]]:
    """Rows of prefill in chunks (CPP) and of decode of the pipelines that serve a request alone the fastest."""
    prefill, decode = grids.prefill, grids.decode
    seated = (decode.mappings.dp_attn == 1) & decode.feasible[:, 0] & (decode.latency[:, 0] <= work.tpot.seconds)
    if decode.setup.speculation is not None:
        seated &= decode.drafts[:, 0] > 0
    row_of = {
        degrees_of(decode.mappings, row): row for row in np.flatnonzero(seated & (decode.mappings.pp > 1)).tolist()
    }
    cut = (prefill.mappings.chunk_tokens > 0) & (prefill.mappings.pcp == 1) & prefill.feasible[:, 0]
    cut &= prefill.latency[:, 0] <= work.ttft.seconds
    pairs = [(row, row_of.get(degrees_of(prefill.mappings, row), -1)) for row in np.flatnonzero(cut).tolist()]
    rows, places = np.array([pair for pair in pairs if pair[1] >= 0], dtype=np.intp).reshape(-1, 2).T
    taken = prefill.latency[rows, 0] + work.lengths.gaps * decode.latency[places, 0]
    order = np.argsort(taken, kind="stable")
    gpus = decode.mappings.gpus[places][order]
    first = [order[np.flatnonzero(gpus == size)[:OF_A_SIZE]] for size in np.unique(gpus)]
    return [(int(rows[each]), int(places[each])) for of_size in first for each in of_size]


def staged_choices(grids: Grids, work: Demand) -> Iterator[OneByOne]:
    """List pipelines of one attention rank that serve one prompt at a time; none where a step holds a whole prompt."""
    if not longer_than_steps(work.lengths):
        return
    prefill, decode, nodes = grids.prefill, grids.decode, work.lengths.prompt_nodes()
    at, none = decode.setup, np.zeros((0, 1))
    for row, own in staged_rows(grids, work):
        ftl, _, load, _ = times_of_passes(prefill, np.array([row]), np.ones(1), nodes)
        mapping = replace(decode.chosen(own, 0), chunk_tokens=int(prefill.mappings.chunk_tokens[row]))
        steps = MixedSteps(  # no prompt is computed beside a decode
            ranks=1,
            budget=math.ceil(nodes.new.max()),
            prompts=PromptLengths(nodes.new, nodes.past, nodes.weight),
            each=work.lengths.gaps / float(at.accepted_length(mapping.draft_tokens)),
            waits=(0,),
            batch=np.ones(1),
            verified=np.full(1, 1.0 + mapping.draft_tokens),
            step=decode.step[own, :1],
            tokens=np.zeros(0),
            mixed=none,
            single=none,
            longer=none,
        )
        yield OneByOne(
            at=at,
            mapping=mapping,
            work=work,
            steps=steps,
            weights=nodes.weight,
            parts=work.lengths.prompt_parts,
            host=at.request_host,
            memory=float(max(prefill.memory_bytes[row, 0], decode.memory_bytes[own, 0])),
            memory_seats=int(decode.batch[np.flatnonzero(decode.feasible[own])[-1]]),
            bound=BOUNDS[decode.bound[own, 0]],
            passes=at.request_host + (ftl + load)[:, 0, 0],
        )


def longer_than_steps(lengths: Lengths) -> bool:
    """Whether prompts take several of the largest steps: then instances of one request at a time are worth trying."""
    return lengths.mean_new > BUDGETS[-1]


def _colocated(
    grid: PhaseGrid, work: Demand, row: int, mapping: Sharding, scored: tuple[Floats, Floats]
) -> Iterator[ColocatedChoice]:
    """Choices of one row, by the times of its steps and their memory under each budget."""
    tables, held = scored
    at, ranks = grid.setup, int(mapping.dp_attn)
    last = int(np.flatnonzero(grid.feasible[row] & (grid.latency[row] <= work.tpot.seconds))[-1])
    last = min(last, tables.shape[-1] - 1)
    verified = grid.batch[: last + 1] * (1.0 + mapping.draft_tokens)
    longest = float(work.lengths.prompt_nodes().new.max())
    for of_rank, memory in zip(BUDGETS, held[:, : last + 1], strict=True):
        budget = ranks * of_rank
        fits = np.flatnonzero((memory <= at.memory_limit) & (verified <= budget / 2))
        if not fits.size or memory[0] > FULLEST * at.system.hbm_reported:
            continue
        seats = int(fits[-1])
        waits = waits_of(at, work, ranks, float(tables[0, 0, seats]))
        made = colocated_of(grid, work, (row, seats), mapping, tables, budget, float(memory[seats]), waits)
        yield made
        yield from (replace(made, hold_steps=each) for each in waits)
        if budget == BUDGETS[-1] and ranks == mapping.pp == 1 and longer_than_steps(work.lengths):
            yield OneByOne.of(made)
        if budget >= ranks * (longest + verified[-1]):
            break  # a larger one is never full


def colocated_of(
    grid: PhaseGrid,
    work: Demand,
    point: tuple[int, int],
    mapping: Sharding,
    tables: Floats,
    budget: int,
    memory: float,
    waits: Sequence[int],
) -> ColocatedChoice:
    """The configuration of both phases at a row and a column of a grid, by its ``mixed_tables``.

    Takes ``budget`` (of a step, over all ranks [token]), ``memory`` [B] and ``waits`` (decode steps that prompts may be
    held back at most).
    """
    (row, seats), at, lengths = point, grid.setup, work.lengths
    batch, prompts = grid.batch[: seats + 1].astype(float), lengths.prompt_nodes()
    mixed, single, longer = tables[:, :, : seats + 1]
    steps = MixedSteps(
        ranks=int(mapping.dp_attn),
        budget=budget,
        prompts=PromptLengths(prompts.new, prompts.past, prompts.weight),
        each=lengths.gaps / float(at.accepted_length(mapping.draft_tokens)),
        waits=(0, *waits),
        batch=batch,
        verified=batch * (1.0 + mapping.draft_tokens),
        step=mixed[0],
        tokens=np.array(SIZES, dtype=float),
        mixed=mixed,
        single=single,
        longer=longer,
        ahead=at.steps_ahead(mapping),
    )
    return ColocatedChoice(
        at=at,
        mapping=mapping,
        work=work,
        steps=steps,
        weights=prompts.weight,
        parts=lengths.prompt_parts,
        host=at.request_host,
        loads=Loads.of(at, mapping, prompts),
        memory=memory,
        memory_seats=int(grid.batch[np.flatnonzero(grid.feasible[row])[-1]]),
        bound=BOUNDS[grid.bound[row, seats]],
    )
