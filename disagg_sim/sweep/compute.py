"""One block: score a slice of mappings, match it, write it. Runs in a worker; writes its own file."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

from disagg_sim.domain import BOUNDS
from disagg_sim.facts import load
from disagg_sim.search.grid import PhaseGrid, decode_grid, prefill_grid
from disagg_sim.serving.candidates import PrefillCandidates, kv_rate_per_gpu, prefill_candidates
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.points import COLUMNS
from disagg_sim.sweep.plan import PREFILL, Block, Case
from disagg_sim.sweep.store import Key, Store
from disagg_sim.sweep.tally import Removal, Tally, removal

if TYPE_CHECKING:
    import pandas as pd

OUT_OF_MEMORY = "out of memory"
ABOVE_FTL = "above the FTL limit"
ABOVE_TTL = "above the TTL limit"
ABOVE_NIC = "above the NIC limit"
NO_MATCH = "no match within gpu_cap"
NO_BALANCE = "no match within gpu_cap and tolerance"
NO_PREFILL = "no prefill configuration within the limits to match with"


@dataclass(frozen=True, slots=True, eq=False)
class BlockTask:
    """A block and the store that takes it."""

    store: Store
    block: Block


@dataclass(frozen=True, slots=True)
class Done:
    """A block that is now in the store."""

    key: Key
    points: int  # design points [1]


def compute_block(task: BlockTask) -> Done:
    """Compute one block and write it, with its tally, into the store."""
    begun = time.perf_counter()
    store, block = task.store, task.block
    frame, tally = _prefill(block) if block.key.table == PREFILL else _decode(store, block)
    store.write(block.key, frame, replace(tally, seconds=time.perf_counter() - begun).to_json())
    return Done(block.key, block.points)


def _nic_limit(case: Case) -> float | None:
    return None if math.isinf(case.limits.nic_limit) else case.limits.nic_limit


def _prefill(block: Block) -> tuple[pd.DataFrame, Tally]:
    case = block.case
    grid = prefill_grid(
        load.load_model(case.model),
        load.load_system(case.system),
        block.mappings,
        isl=case.isl,
        osl=case.osl,
        precision=case.precision,
        profile=case.profile,
        engine=case.engine or None,
        batch=block.batch,
        allow_long_context=True,  # what the sweep did not allow was refused when it was read
    )
    kept = prefill_candidates(grid, ftl_limit=case.limits.ftl_s, nic_limit=_nic_limit(case))
    tally = Tally(
        computed=grid.status.size,
        feasible=int(grid.feasible.sum()),
        rows=kept.batch.size,
        removals=_limits(grid, ABOVE_FTL, case.limits.ftl_s, case.limits.nic_limit),
    )
    return kept.to_frame(), tally


def _decode(store: Store, block: Block) -> tuple[pd.DataFrame, Tally]:
    case = block.case
    grid = decode_grid(
        load.load_model(case.model),
        load.load_system(case.system),
        block.mappings,
        isl=case.isl,
        osl=case.osl,
        precision=case.precision,
        profile=case.profile,
        engine=case.engine or None,
        batch=block.batch,
        allow_long_context=True,  # what the sweep did not allow was refused when it was read
    )
    removals = _limits(grid, ABOVE_TTL, case.limits.ttl_s, case.limits.nic_limit)
    candidates = _candidates(store, block.candidates)
    left = int(grid.feasible.sum()) - sum(r.count for r in removals if r.reason != OUT_OF_MEMORY)
    if candidates.batch.size == 0:
        frame, reason = _empty_points(), NO_PREFILL
    else:
        frame = disaggregated(
            candidates,
            grid,
            ftl_limit=case.limits.ftl_s,
            ttl_limit=None if math.isinf(case.limits.ttl_s) else case.limits.ttl_s,
            gpu_cap=case.limits.gpu_cap,
            matching=case.matching,
            nic_limit=_nic_limit(case),
        )
        reason = NO_MATCH if case.matching == "exact" else NO_BALANCE
    if left > len(frame):
        unmatched = Removal(phase="decode", reason=reason, count=left - len(frame), shortfall=math.inf, unit="")
        removals = (*removals, unmatched)
    tally = Tally(
        computed=grid.status.size, feasible=int(grid.feasible.sum()), rows=len(frame), removals=removals
    )
    return _typed(frame, case), tally


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
    return reduce(PrefillCandidates.merge, (PrefillCandidates.from_frame(store.read(key)) for key in keys))


def _empty_points() -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({column.name: pd.Series(dtype=column.dtype) for column in COLUMNS})


def _typed(frame: pd.DataFrame, case: Case) -> pd.DataFrame:
    """The table with ``case`` in front and the same column types in every block, empty ones too."""
    import pandas as pd

    constant = {
        "case": case.name, "model": case.model, "system": case.system, "precision": case.precision,
        "profile": case.profile, "engine": case.engine, "mode": case.mode, "matching": case.matching,
    }  # fmt: skip
    constant |= {f"prefill_{name}": constant[name] for name in ("system", "precision", "profile", "engine")}
    words = {name: pd.Categorical([value] * len(frame), categories=[value]) for name, value in constant.items()}
    bound = frame["decode_bound"].astype(pd.CategoricalDtype(list(BOUNDS)))
    typed = frame.assign(**words, decode_bound=bound)[["case", *(column.name for column in COLUMNS)]]
    typed.attrs = {}
    return typed
