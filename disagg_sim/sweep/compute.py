"""Compute blocks: score a slice of mappings, match it if there are two pools or more, write it.

Runs in a worker; writes its own file.
"""

from __future__ import annotations

import math
import platform
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import pandas as pd

from disagg_sim.certainty.energy import COLUMNS_PER, MATCHED_PER, with_energy
from disagg_sim.certainty.error_bars import within_reach
from disagg_sim.domain import BOUNDS, ServingMode, Sharding
from disagg_sim.errors import InfeasibleError, StoreError
from disagg_sim.facts.load import load_failures
from disagg_sim.facts.yaml_files import shown
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.phase_grid import CHOSEN_FORMS, PhaseGrid
from disagg_sim.serving.candidates import PrefillCandidates, kv_rate_per_gpu, prefill_candidates
from disagg_sim.serving.costs import JOULE, with_cost
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.points import COLUMNS, NO_SPECULATION, Column, category, empty_table, one_word, pareto_front
from disagg_sim.serving.pool_frontier import COLUMNS as POOL_COLUMNS
from disagg_sim.serving.pool_frontier import pools_front
from disagg_sim.serving.shared_laws import SHARED_LAWS
from disagg_sim.sweep.cases import Case, assumed_columns, origin_of, throughput_column
from disagg_sim.sweep.digests import SpecFile
from disagg_sim.sweep.grid_cache import score_group, scored
from disagg_sim.sweep.kv_links import classes_of, linked_candidates, merged_candidates, parts_of, takers_of, with_link
from disagg_sim.sweep.plan import FRONTIER, POINTS, POOLS, PREFILL, Block
from disagg_sim.sweep.store import Key, Store
from disagg_sim.sweep.tally import (
    ABOVE_FTL,
    ABOVE_NIC,
    ABOVE_TTL,
    NO_BALANCE,
    NO_MATCH,
    NO_PREFILL,
    NO_RATIO,
    OUT_OF_MEMORY,
    SHARED,
    Removal,
    Tally,
    removal,
)
from disagg_sim.techniques.availability.law_columns import SpareRules, with_spares
from disagg_sim.techniques.encode.physics import encode_step
from disagg_sim.techniques.split.search import SplitGrid, split_grid

#: Prefill blocks whose candidates wait in memory for the decode blocks of their cases. [1]
KEPT_BLOCKS = 64
_made: OrderedDict[Key, PrefillCandidates] = OrderedDict()

OWN_ENGINE = "default"  # in the engine columns: none; no word that reads back as empty


@dataclass(frozen=True, slots=True, eq=False)
class BlockTask:
    """Blocks and the stores that take them; the first has the blocks that they are matched with."""

    stores: tuple[Store, ...]
    blocks: tuple[Block, ...]  # whose grids are scored together
    sources: tuple[SpecFile, ...]  # spec files, as they were when the blocks were planned
    keep: str  # of ``plan.KEEP``


@dataclass(frozen=True, slots=True, eq=False)
class BlockResult:
    """What the tables of a sweep need of a block."""

    tally: Tally
    front: pd.DataFrame  # frontier of its points; the whole table of further pools; nothing of prefill


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """A block that is now in the store."""

    key: Key
    points: int  # design points [1]
    seconds: float  # spent on it by one process [s]
    found: BlockResult


def compute_blocks(task: BlockTask) -> list[StoredBlock]:
    """Compute blocks and write each, with its tally, into its stores."""
    begun = time.perf_counter()
    if len(task.blocks) > 1:
        score_group(task.blocks)
    done = []
    for block in task.blocks:
        found = _compute(task, block)
        ended = time.perf_counter()
        done.append(StoredBlock(block.key, block.points, ended - begun, found))
        begun = ended
    return done


def _compute(task: BlockTask, block: Block) -> BlockResult:
    store, *others = task.stores
    header = ""
    if block.key.table == PREFILL:
        frame, tally, header = _prefill(block)
    elif block.key.table == POOLS:
        frame, points = pools_of_case(block)
        tally = Tally(computed=points, rows=len(frame))
    elif block.mode == ServingMode.DISAGGREGATED:
        frame, tally = _decode(store, block)
    else:
        frame, tally = _shared(block)
    for source in task.sources:
        if not source.is_as_it_was:
            said = "changed while the sweep ran; start the same command again, with one version of it on all machines"
            raise StoreError(f"{shown(source.path)}: {said} (seen on {platform.node()})")
    found = BlockResult(tally, _front(block, frame))
    if task.keep == FRONTIER and block.key.table == POINTS:
        frame = within_reach(frame, throughput=block.case.throughput)
    store.write(block.key, frame, tally.to_json(), header)
    for other in others:
        other.copy(block.key, store)
    return found


def stored_block(store: Store, block: Block) -> BlockResult:
    """What ``compute_blocks`` found of a block that is in the store."""
    tally = Tally.from_json(store.note(block.key))
    frame = pd.DataFrame() if block.key.table == PREFILL else store.read(block.key)
    return BlockResult(tally, _front(block, frame))


def _front(block: Block, frame: pd.DataFrame) -> pd.DataFrame:
    if block.key.table == POINTS and len(frame):
        return pareto_front(frame, throughput=block.case.throughput)
    return frame if block.key.table == POOLS else pd.DataFrame()


def _finite(limit: float) -> float | None:
    return None if math.isinf(limit) else limit


def _prefill(block: Block) -> tuple[pd.DataFrame, Tally, str]:
    """The candidates of a block, their tally and what has no column."""
    case, grid = block.case, scored(block)
    if _links(case):
        return _linked_prefill(block)
    kept = prefill_candidates(grid, ftl_limit=case.limits.ftl_s, nic_limit=_finite(case.limits.nic_limit))
    _made[block.key] = kept
    while len(_made) > KEPT_BLOCKS:
        _made.popitem(last=False)
    removals = _limits(grid, ABOVE_FTL, case.limits.ftl_s, case.limits.nic_limit)
    return kept.to_frame(), _tally(grid, kept.batch.size, removals), kept.header()


def _tally(grid: PhaseGrid, rows: int, removals: tuple[Removal, ...]) -> Tally:
    """Counts of a block of one phase."""
    return Tally(computed=grid.status.size, feasible=int(grid.feasible.sum()), rows=rows, removals=removals)


def _links(case: Case) -> bool:
    """Whether the hand-over of caches counts."""
    return case.served.kv_link is not None and case.served.kv_link.counts


@lru_cache(maxsize=4)
def _takers(case: Case) -> Sharding:
    """A mapping of each class of receivers."""
    return takers_of(case.limits.mappings(case.decode_setup), case.decode_setup)


def _linked_prefill(block: Block) -> tuple[pd.DataFrame, Tally, str]:
    """As ``_prefill``, with candidates for each class of receivers."""
    case, grid, limits = block.case, scored(block), block.case.limits
    assert case.served.kv_link is not None
    kept = linked_candidates(
        case.served.kv_link,
        grid,
        case.decode_setup,
        _takers(case),
        ftl_limit=limits.ftl_s,
        nic_limit=_finite(limits.nic_limit),
    )
    removals = _limits(grid, ABOVE_FTL, limits.ftl_s, limits.nic_limit, kept.least[:, None])
    return kept.frame, _tally(grid, len(kept.frame), removals), kept.header


def _decode(store: Store, block: Block) -> tuple[pd.DataFrame, Tally]:
    case, limits = block.case, block.case.limits
    grid = scored(block)
    removals = _limits(grid, ABOVE_TTL, limits.ttl_s, limits.nic_limit)
    pairs = _pairs(store, block, grid)
    left = int(grid.feasible.sum()) - sum(r.count for r in removals if r.reason != OUT_OF_MEMORY)
    if not pairs:
        frame, reason = empty_table(_columns(case)), NO_PREFILL
    else:
        found = [
            disaggregated(
                candidates,
                part,
                ftl_limit=limits.ftl_s,
                ttl_limit=_finite(limits.ttl_s),
                gpu_cap=limits.gpu_cap,
                matching=case.ctx_gen_ratio or case.matching,
                nic_limit=_finite(limits.nic_limit),
                per=dict(case.prices) or MATCHED_PER.get(case.per, case.per),
            )
            for candidates, part in pairs
        ]
        frame = found[0] if len(found) == 1 else pd.concat(found, ignore_index=True)
        frame = _served(_with_energy(frame, case), case)
        reason = NO_MATCH if case.matching == "exact" else NO_BALANCE
        reason = reason if case.ctx_gen_ratio is None else NO_RATIO
    if left > len(frame):
        unmatched = Removal(phase="decode", reason=reason, count=left - len(frame), shortfall=math.inf, unit="")
        removals = (*removals, unmatched)
    return _typed(frame, block), _tally(grid, len(frame), removals)


def _shared(block: Block) -> tuple[pd.DataFrame, Tally]:
    """Points of a co-located mode."""
    case, limits = block.case, block.case.limits
    found = SHARED_LAWS[block.mode].search(case.shared, block.mappings)
    seen, frame = found.tally, found.points
    lost = (
        (OUT_OF_MEMORY, seen.design_points - seen.feasible, seen.least_shortfall, "B"),
        (ABOVE_FTL, seen.above_ftl_limit, seen.best_ftl_s - limits.ftl_s, "s"),
        (ABOVE_TTL, seen.above_ttl_limit, seen.best_ttl_s - limits.ttl_s, "s"),
    )
    # The best of all is the closest miss where nothing passes; where something does, the miss is not known.
    removals = tuple(
        Removal(phase=SHARED, reason=reason, count=count, shortfall=miss if miss > 0 else math.inf, unit=unit)
        for reason, count, miss, unit in lost
        if count
    )
    tally = Tally(computed=seen.design_points, feasible=seen.feasible, rows=len(frame), removals=removals)
    frame = with_cost(frame, dict(case.prices) or MATCHED_PER.get(case.per, case.per))
    return _typed(_served(_with_energy(frame, case), case), block), tally


def _with_energy(frame: pd.DataFrame, case: Case) -> pd.DataFrame:
    """The points with what they draw, where throughput is counted over it."""
    if case.per != JOULE:
        return frame
    if not len(frame):
        return empty_table(_columns(case))
    return with_energy(frame.assign(**assumed_columns(case)), origin=replace(origin_of(case), exact=False))


def _served(frame: pd.DataFrame, case: Case) -> pd.DataFrame:
    """The points with what the case counts beside steps and passes: hand-overs, and spares."""
    if case.served.kv_link is not None:
        ends = case.prefill_setup, case.decode_setup
        frame = with_link(frame, case.served.kv_link, ends, case.lengths)
    if case.served.availability is None:
        return frame
    failing, per = load_failures(case.served.failures), dict(case.prices) or case.per
    wanted = SpareRules(target=case.served.availability, failing=failing, gpu_cap=case.limits.gpu_cap, per=per)
    return with_spares(frame, wanted, {spec.name: spec for spec in (case.prefill_system, case.decode_system)})


def _limits(
    grid: PhaseGrid, too_slow: str, latency_limit: float, nic_limit: float, after: Any = 0.0
) -> tuple[Removal, ...]:
    """What memory, latency and NIC limits remove, in this order; a point is counted once."""
    fits = grid.feasible
    latency = grid.latency + after
    fast = fits & (latency <= latency_limit)
    rate = kv_rate_per_gpu(grid)
    return (
        *removal(grid.phase, OUT_OF_MEMORY, ~fits, grid.memory_bytes - grid.memory_limit, "B"),
        *removal(grid.phase, too_slow, fits & ~fast, latency - latency_limit, "s"),
        *removal(grid.phase, ABOVE_NIC, fast & (rate > nic_limit), rate - nic_limit, "B/s"),
    )


def _pairs(store: Store, block: Block, grid: PhaseGrid) -> list[tuple[PrefillCandidates, PhaseGrid]]:
    """Candidates and the decode points that they are matched with; where links count, by class of receivers."""
    if not _links(block.case):
        candidates = _candidates(store, block.candidates)
        return [(candidates, grid)] if candidates.batch.size else []
    linked = _linked(store, block.candidates)
    kinds = classes_of(grid.mappings, _takers(block.case), grid.setup)
    return [(linked[place], part) for place, part in parts_of(grid, kinds) if linked[place].batch.size]


@lru_cache(maxsize=8)
def _linked(store: Store, keys: tuple[Key, ...]) -> list[PrefillCandidates]:
    """The candidates of all prefill blocks of a case, by class of receivers."""
    return merged_candidates([(store.read(key), store.header(key)) for key in keys])


@lru_cache(maxsize=8)
def _candidates(store: Store, keys: tuple[Key, ...]) -> PrefillCandidates:
    """The candidates of all prefill blocks of a case, merged; those that this process did not make are read."""
    found = (_made.get(key) or PrefillCandidates.from_frame(store.read(key), store.header(key)) for key in keys)
    return reduce(PrefillCandidates.merge, found)


def _columns(case: Case) -> list[Column]:
    return [*COLUMNS, *COLUMNS_PER[case.per], *case.served.columns(throughput_column(case.per))]


def _typed(frame: pd.DataFrame, block: Block) -> pd.DataFrame:
    """The table with ``case`` in front and the same column types in every block, empty ones too."""
    case, pools = block.case, block.case.pools
    decode_engine, prefill_engine = (name or OWN_ENGINE for name in case.engines)
    constant = {
        "case": case.name,
        "model": case.model,
        "system": pools.system,
        "precision": pools.precision,
        "profile": case.profile,
        "engine": decode_engine,
        "mode": block.mode,
        "matching": case.matching if block.mode == ServingMode.DISAGGREGATED else "none",
        "prefill_system": pools.prefill_system,
        "prefill_precision": pools.prefill_precision,
        "prefill_profile": case.profile,
        "prefill_engine": prefill_engine,
        "speculation": case.speculation or NO_SPECULATION,
    }
    words = one_word(constant, len(frame))
    bound = frame["decode_bound"].astype(category(BOUNDS))
    form = frame["prefill_mla_form"].astype(category(CHOSEN_FORMS))
    columns = ["case", *(column.name for column in _columns(case))]
    return frame.assign(**words, decode_bound=bound, prefill_mla_form=form)[columns]


def pools_of_case(block: Block) -> tuple[pd.DataFrame, int]:
    """Frontier over the pools of a case, with ``case`` in front, and the decode points that were matched.

    Encoding runs on the system of prefill, attention and feed-forward ranks on that of decode.
    """
    case, limits = block.case, block.case.limits
    encode = None if case.images is None else encode_step(case.prefill_setup, **asdict(case.images))
    grid = prefill_grid(
        case.prefill_setup,
        limits.mappings(case.prefill_setup),
        case.lengths,
        mla_form=case.mla_form,
        allow_long_context=True,
    )
    within = limits.ftl_s - (0.0 if encode is None else encode.latency)
    grids: list[PhaseGrid | SplitGrid] = []
    if "decode" in case.pool_names:
        grids.append(decode_grid(case.decode_setup, block.mappings, case.lengths, allow_long_context=True))
    if "attention" in case.pool_names:
        most = limits.max_gpus
        grids.append(split_grid(case.decode_setup, case.lengths, max_gpus=most, allow_long_context=True))
    points = sum(each.latency.size for each in grids)
    front = pd.DataFrame(columns=list(POOL_COLUMNS))
    if within > 0:
        candidates = prefill_candidates(grid, ftl_limit=within, nic_limit=_finite(limits.nic_limit))
        with suppress(InfeasibleError):  # the frontier of two pools says why
            front = pools_front(
                candidates,
                grids,
                encode=encode,
                ttl_limit=limits.ttl_s,
                gpu_cap=limits.gpu_cap,
                per=dict(case.prices) or case.per,
            )
    front.insert(0, "case", case.name)
    return front, points
