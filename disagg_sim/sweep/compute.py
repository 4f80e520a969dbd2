"""Compute one block: score a slice of mappings, match it if there are two pools, write it.

Runs in a worker; writes its own file.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, reduce

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.certainty.energy import COLUMNS_PER, JOULE, MATCHED_PER, with_energy
from disagg_sim.certainty.rows import ASSUMED
from disagg_sim.domain import BOUNDS, Mode
from disagg_sim.errors import StoreError
from disagg_sim.facts.yaml_files import shown
from disagg_sim.search.grid import CHOSEN_FORMS, PhaseGrid, decode_grid, prefill_grid
from disagg_sim.serving.candidates import PrefillCandidates, kv_rate_per_gpu, prefill_candidates
from disagg_sim.serving.colocated import search_colocated
from disagg_sim.serving.costs import with_cost
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.piggyback import search_piggyback
from disagg_sim.serving.points import COLUMNS, NO_SPECULATION, Column, empty_table
from disagg_sim.sweep.cases import Case, axis_columns, origin_of
from disagg_sim.sweep.inputs import Source
from disagg_sim.sweep.plan import POOLS, PREFILL, Block, ModePlan
from disagg_sim.sweep.pools import pools_of_case
from disagg_sim.sweep.spec import Limits
from disagg_sim.sweep.store import Key, Store
from disagg_sim.units import GB

SHARED = "prefill and decode"  # phase of the points of a co-located mode
OUT_OF_MEMORY = "out of memory"
ABOVE_FTL = "above the FTL limit"
ABOVE_TTL = "above the TTL limit"
ABOVE_NIC = "above the NIC limit"
NO_MATCH = "no match within gpu_cap"
NO_BALANCE = "no match within gpu_cap and tolerance"
NO_RATIO = "no match at the fixed ratio within gpu_cap"
NO_PREFILL = "no prefill configuration within the limits to match with"
OWN_ENGINE = "default"  # in the engine columns: none; no word that reads back as empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Design points that one reason removed."""

    phase: str  # "prefill" or "decode"
    reason: str
    count: int  # design points [1]
    shortfall: float  # by how much the closest of them misses; inf where that has no meaning [unit]
    unit: str  # "B", "s", "B/s" or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of one block, or of many added up."""

    computed: int = 0  # design points whose time and memory were computed [1]
    feasible: int = 0  # of them, those that fit in memory [1]
    rows: int = 0  # stored rows: prefill candidates, or matched decode points [1]
    removals: tuple[Removal, ...] = ()

    def to_json(self) -> str:
        """As a text that Python's ``json`` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Tally:
        """Back from ``to_json``."""
        values = json.loads(text)
        return cls(**{**values, "removals": tuple(Removal(**removal) for removal in values["removals"])})


def removal(
    phase: str, reason: str, removed: NDArray[np.bool_], excess: NDArray[np.float64] | None = None, unit: str = ""
) -> tuple[Removal, ...]:
    """Count the points in ``removed``; empty if there are none.

    Parameters
    ----------
    removed : bool array
        Which points the reason removes.
    excess : array, optional
        By how much each point misses. [unit]
    """
    if not removed.any():
        return ()
    closest = math.inf if excess is None else float(np.min(excess, where=removed, initial=np.inf))
    return (Removal(phase=phase, reason=reason, count=int(removed.sum()), shortfall=closest, unit=unit),)


def add_up(tallies: Iterable[Tally]) -> Tally:
    """Sum of counts; of each reason the sum of counts and the closest shortfall."""
    held = tuple(tallies)
    merged: dict[tuple[str, str], Removal] = {}
    for item in (item for tally in held for item in tally.removals):
        known = merged.get((item.phase, item.reason))
        merged[item.phase, item.reason] = (
            item
            if known is None
            else Removal(
                phase=item.phase,
                reason=item.reason,
                count=item.count + known.count,
                shortfall=min(item.shortfall, known.shortfall),
                unit=item.unit,
            )
        )
    return Tally(
        computed=sum(t.computed for t in held),
        feasible=sum(t.feasible for t in held),
        rows=sum(t.rows for t in held),
        removals=tuple(merged.values()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class BlockTask:
    """A block and the store that takes it."""

    store: Store
    block: Block
    sources: tuple[Source, ...]  # spec files, as they were when the block was planned


@dataclass(frozen=True, slots=True)
class Done:
    """A block that is now in the store."""

    key: Key
    points: int  # design points [1]
    seconds: float  # spent on it by one process [s]


def compute_block(task: BlockTask) -> Done:
    """Compute one block and write it, with its tally, into the store.

    Raises
    ------
    StoreError
        When a spec file was written since the block was planned: its digest would be that of the old content.
    """
    begun = time.perf_counter()
    store, block = task.store, task.block
    header = ""
    if block.key.table == PREFILL:
        frame, tally, header = _prefill(block)
    elif block.key.table == POOLS:
        frame, points = pools_of_case(block)
        tally = Tally(computed=points, rows=len(frame))
    elif block.mode == Mode.DISAGGREGATED:
        frame, tally = _decode(store, block)
    else:
        frame, tally = _shared(block)
    for source in task.sources:
        if not source.is_as_it_was:
            raise StoreError(f"{shown(source.path)}: changed while the sweep ran; start the same command again")
    store.write(block.key, frame, tally.to_json(), header)
    return Done(block.key, block.points, time.perf_counter() - begun)


def _finite(limit: float) -> float | None:
    return None if math.isinf(limit) else limit


def _prefill(block: Block) -> tuple[pd.DataFrame, Tally, str]:
    """The candidates of a block, their tally and what has no column."""
    case = block.case
    grid = prefill_grid(
        case.prefill_setup,
        block.mappings,
        case.lengths,
        batch=block.batch,
        mla_form=case.mla_form,
        allow_long_context=True,  # lengths that the sweep did not allow were refused when it was read
    )
    kept = prefill_candidates(grid, ftl_limit=case.limits.ftl_s, nic_limit=_finite(case.limits.nic_limit))
    tally = Tally(
        computed=grid.status.size,
        feasible=int(grid.feasible.sum()),
        rows=kept.batch.size,
        removals=_limits(grid, ABOVE_FTL, case.limits.ftl_s, case.limits.nic_limit),
    )
    return kept.to_frame(), tally, kept.header()


def _decode(store: Store, block: Block) -> tuple[pd.DataFrame, Tally]:
    case, limits = block.case, block.case.limits
    grid = decode_grid(case.decode_setup, block.mappings, case.lengths, batch=block.batch, allow_long_context=True)
    removals = _limits(grid, ABOVE_TTL, limits.ttl_s, limits.nic_limit)
    candidates = _candidates(store, block.candidates)
    left = int(grid.feasible.sum()) - sum(r.count for r in removals if r.reason != OUT_OF_MEMORY)
    if candidates.batch.size == 0:
        frame, reason = empty_table(_columns(case)), NO_PREFILL
    else:
        frame = disaggregated(
            candidates,
            grid,
            ftl_limit=limits.ftl_s,
            ttl_limit=_finite(limits.ttl_s),
            gpu_cap=limits.gpu_cap,
            matching=case.ctx_gen_ratio or case.matching,
            nic_limit=_finite(limits.nic_limit),
            per=dict(case.prices) or MATCHED_PER.get(case.per, case.per),
        )
        frame = _with_energy(frame, case)
        reason = NO_MATCH if case.matching == "exact" else NO_BALANCE
        reason = reason if case.ctx_gen_ratio is None else NO_RATIO
    if left > len(frame):
        unmatched = Removal(phase="decode", reason=reason, count=left - len(frame), shortfall=math.inf, unit="")
        removals = (*removals, unmatched)
    tally = Tally(computed=grid.status.size, feasible=int(grid.feasible.sum()), rows=len(frame), removals=removals)
    return _typed(frame, block), tally


def _shared(block: Block) -> tuple[pd.DataFrame, Tally]:
    """Points of a co-located mode."""
    case, limits = block.case, block.case.limits
    search = search_colocated if block.mode == Mode.COLOCATED else search_piggyback
    found = search(case.shared, block.mappings)
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
    return _typed(_with_energy(frame, case), block), tally


def _with_energy(frame: pd.DataFrame, case: Case) -> pd.DataFrame:
    """The points with what they draw, where throughput is counted over it."""
    if case.per != JOULE:
        return frame
    if not len(frame):
        return empty_table(_columns(case))
    assumed = {name: value for name, value in axis_columns(case).items() if name in ASSUMED}
    return with_energy(frame.assign(**assumed), origin=replace(origin_of(case), exact=False))


def _limits(grid: PhaseGrid, too_slow: str, latency_limit: float, nic_limit: float) -> tuple[Removal, ...]:
    """What memory, latency and NIC limits remove, in this order; a point is counted once."""
    fits = grid.feasible
    fast = fits & (grid.latency <= latency_limit)
    rate = kv_rate_per_gpu(grid)
    return (
        *removal(grid.phase, OUT_OF_MEMORY, ~fits, grid.memory_bytes - grid.memory_limit, "B"),
        *removal(grid.phase, too_slow, fits & ~fast, grid.latency - latency_limit, "s"),
        *removal(grid.phase, ABOVE_NIC, fast & (rate > nic_limit), rate - nic_limit, "B/s"),
    )


@lru_cache(maxsize=2)
def _candidates(store: Store, keys: tuple[Key, ...]) -> PrefillCandidates:
    """The candidates of all prefill blocks of a case, merged."""
    found = (PrefillCandidates.from_frame(store.read(key), store.header(key)) for key in keys)
    return reduce(PrefillCandidates.merge, found)


def _columns(case: Case) -> list[Column]:
    return [*COLUMNS, *COLUMNS_PER[case.per]]


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
        "matching": case.matching if block.mode == Mode.DISAGGREGATED else "none",
        "prefill_system": pools.prefill_system,
        "prefill_precision": pools.prefill_precision,
        "prefill_profile": case.profile,
        "prefill_engine": prefill_engine,
        "speculation": case.speculation or NO_SPECULATION,
    }
    words = {name: pd.Categorical([value] * len(frame), categories=[value]) for name, value in constant.items()}
    bound = frame["decode_bound"].astype(pd.CategoricalDtype(list(BOUNDS)))
    form = frame["prefill_mla_form"].astype(pd.CategoricalDtype(list(CHOSEN_FORMS)))
    columns = ["case", *(column.name for column in _columns(case))]
    return frame.assign(**words, decode_bound=bound, prefill_mla_form=form)[columns]


def verdict(case: Case, plan: ModePlan, prefill: Tally, points: Tally) -> str:
    """One clause that names what binds, for a mode of a case whose frontier is empty.

    Parameters
    ----------
    prefill, points : Tally
        What prefill removed, and what decode (or the co-located instances) removed.
    """
    if plan.mode != Mode.DISAGGREGATED:
        return _of_instances(case, plan, points)
    for name, phase, tally in ((case.prefill_system.name, "prefill", prefill), (case.system, "decode", points)):
        if not tally.computed:
            return _no_mapping(case, name, plan)
        if not tally.feasible:
            return _fits_nowhere(case, name, phase, tally)
    if not prefill.rows:
        return _no_prefill(case, prefill)
    if _has(points, ABOVE_TTL) and not _has(points, ABOVE_NIC) and points.rows == 0:
        left = points.feasible - sum(r.count for r in points.removals if r.reason == ABOVE_TTL)
        if not left:
            return _too_slow("decode configuration", "TTL", case.limits.ttl_s, _closest(points, ABOVE_TTL))
    reasons = ", ".join(f"{r.reason} ({r.count})" for r in points.removals)
    return f"no decode point has a match; decode points removed: {reasons}; gpu_cap is {case.limits.gpu_cap}"


def detail(item: Removal, limits: Limits) -> str:
    """By how much the closest of the removed points misses; its shortfall is finite."""
    if item.reason == OUT_OF_MEMORY:
        return f"the closest lacks {item.shortfall / GB:.3g} GB per GPU"
    if item.reason == ABOVE_NIC:
        needed, allowed = _told_apart((limits.nic_limit + item.shortfall) / GB, limits.nic_limit / GB)
        return f"the closest needs {needed} GB/s, limit {allowed} GB/s"
    limit = limits.ftl_s if item.reason == ABOVE_FTL else limits.ttl_s
    taken, allowed = _told_apart(limit + item.shortfall, limit)
    return f"the closest takes {taken} s, limit {allowed} s"


def is_partial(item: Removal) -> bool:
    """Whether the shortfall is of the blocks alone in which nothing passes, so not always that of the closest point."""
    return item.phase == SHARED and item.reason != OUT_OF_MEMORY


def _of_instances(case: Case, plan: ModePlan, points: Tally) -> str:
    """What binds co-located instances."""
    if not points.computed:
        return _no_mapping(case, case.system, plan)
    if not points.feasible:
        return _fits_nowhere(case, case.system, plan.mode, points)
    if points.feasible == sum(r.count for r in points.removals if r.reason == ABOVE_FTL):
        return _too_slow(f"{plan.mode} configuration", "FTL", case.limits.ftl_s, _closest(points, ABOVE_FTL))
    over = _closest(points, ABOVE_TTL)
    return _too_slow(f"{plan.mode} configuration within the FTL limit", "TTL", case.limits.ttl_s, over)


def _no_mapping(case: Case, system: str, plan: ModePlan) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in plan.refused)
    return f"{case.model} has no allowed mapping on {system}: {reasons}"


def _fits_nowhere(case: Case, system: str, phase: str, tally: Tally) -> str:
    short = _closest(tally, OUT_OF_MEMORY) / GB
    return f"{case.model} fits on no allowed mapping of {system} ({phase}): the closest lacks {short:.1f} GB per GPU"


def _no_prefill(case: Case, prefill: Tally) -> str:
    if (over := _closest(prefill, ABOVE_FTL)) < math.inf and not _has(prefill, ABOVE_NIC):
        return _too_slow("prefill configuration", "FTL", case.limits.ftl_s, over)
    least, limit = _told_apart((case.limits.nic_limit + _closest(prefill, ABOVE_NIC)) / GB, case.limits.nic_limit / GB)
    return f"no prefill configuration stays below {limit} GB/s of KV egress; the least is {least} GB/s"


def _too_slow(what: str, latency: str, limit: float, over: float) -> str:
    best, allowed = _told_apart(limit + over, limit)
    return f"no {what} meets the {latency} limit of {allowed} s; the best {latency} is {best} s"


def _told_apart(value: float, limit: float) -> tuple[str, str]:
    """Format value and limit with just enough digits to show that the value is larger."""
    texts = [(f"{value:.{digits}g}", f"{limit:.{max(digits, 6)}g}") for digits in range(4, 18)]
    return next((pair for pair in texts if float(pair[0]) > float(pair[1])), texts[0])


def _has(tally: Tally, reason: str) -> bool:
    return any(item.reason == reason for item in tally.removals)


def _closest(tally: Tally, reason: str) -> float:
    return min((item.shortfall for item in tally.removals if item.reason == reason), default=math.inf)
