"""Score the grids of blocks; rows that a block of equal setups and lengths has had scored are taken from there.

Cases that differ in limits, costs, matching or drift alone score the same grids. Of two that differ in their mappings,
such as with and without stages of one GPU, the one has the rows of the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import MAPPING_COLUMNS, Mapping
from disagg_sim.search.aging import aged
from disagg_sim.search.axes import CHUNK_TOKENS, with_chunks
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.sweep.plan import PREFILL, Block

#: Grids whose rows further blocks may take: those of both phases of a case or two. [1]
KEPT_GRIDS = 16


@dataclass(frozen=True, slots=True)
class _Asked:
    """What decides the times and bytes of a block."""

    digest: str
    phase: str
    mappings: Mapping
    batch: bytes


_kept: OrderedDict[_Asked, PhaseGrid] = OrderedDict()


def scored(block: Block) -> PhaseGrid:
    """The grid of a block of prefill or decode."""
    assert block.batch is not None
    asked = _Asked(block.scored_as, block.key.table, block.mappings, block.batch.tobytes())
    grid = _kept.pop(asked, None)
    if grid is None:
        alike = [each for key, each in _kept.items() if (key.digest, key.phase) == (asked.digest, asked.phase)]
        grid = _rows_of(alike, block.mappings, block.batch) or _new(block)
    _kept[asked] = grid
    while len(_kept) > KEPT_GRIDS:
        _kept.popitem(last=False)
    return grid if block.case.served.drift is None else aged(grid, block.case.served.drift)


def _new(block: Block) -> PhaseGrid:
    case = block.case
    if block.key.table != PREFILL:
        return decode_grid(case.decode_setup, block.mappings, case.lengths, batch=block.batch, allow_long_context=True)
    return prefill_grid(
        case.prefill_setup,
        block.mappings,
        case.lengths,
        batch=block.batch,
        mla_form=case.mla_form,
        allow_long_context=True,  # lengths that the sweep did not allow were refused when it was read
    )


def _rows_of(grids: Sequence[PhaseGrid], mappings: Mapping, batch: Ints) -> PhaseGrid | None:
    """The grid of mappings and batches from the rows of others; None where they lack one of them."""
    grids = [grid for grid in grids if np.array_equal(grid.batch[: batch.size], batch)]
    if not grids:
        return None
    first = grids[0]
    table = with_chunks(mappings, first.lengths.longest_timed, CHUNK_TOKENS if first.phase == PREFILL else ())
    places = {key: place for place, key in enumerate(key for grid in grids for key in _keys(grid.mappings))}
    rows = np.array([places.get(key, -1) for key in _keys(table)], dtype=np.intp)
    return PhaseGrid.joined(grids, rows, table, batch.size) if np.all(rows >= 0) else None


def _keys(table: Mapping) -> list[tuple[int, ...]]:
    """What tells one row from another."""
    columns = (np.broadcast_to(getattr(table, name), len(table)).tolist() for name in MAPPING_COLUMNS)
    return list(zip(*columns, strict=True))
