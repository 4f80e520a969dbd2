"""Score the grids of blocks; rows that a block of equal setups and lengths has had scored are taken from there.

Cases that differ in limits, costs or matching alone score the same grids. Of two that differ in their mappings,
such as with and without stages of one GPU, the one has the rows of the other. Small grids of cases that differ in their
lengths are scored together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import MAPPING_COLUMNS, Sharding
from disagg_sim.search.axes import CHUNK_TOKENS, with_chunks
from disagg_sim.search.blocks import BLOCK_POINTS
from disagg_sim.search.grid import decode_grids, prefill_grids
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.sweep.cases import setup_case
from disagg_sim.sweep.plan import PREFILL, Block

#: Grids whose rows further blocks may take: those of both phases of a case or two. [1]
KEPT_GRIDS = 16
#: Blocks whose grids are scored together: with more of them numpy's overhead falls little further. [1]
MOST_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class _Asked:
    """What decides the times and bytes of a block."""

    digest: str
    phase: str
    mappings: Sharding
    batch: bytes


_kept: OrderedDict[_Asked, PhaseGrid] = OrderedDict()
_ahead: dict[_Asked, PhaseGrid] = {}  # scored for the blocks of one task, which have not come to them yet


def scored(block: Block) -> PhaseGrid:
    """The grid of a block of prefill or decode."""
    asked = _asked(block)
    grid = _ahead.pop(asked, None) or _known(block) or _new([block])[0]
    _kept[asked] = grid
    _kept.move_to_end(asked)
    while len(_kept) > KEPT_GRIDS:
        _kept.popitem(last=False)
    return grid


def groups(blocks: Iterable[Block], most: int) -> list[list[Block]]:
    """Divide blocks into those that one task computes: small ones of cases that differ in their lengths.

    The result is in the order of the first block of each.
    """
    found: list[list[Block]] = []
    open_groups: dict[Hashable, list[Block]] = {}
    for block in blocks:
        with_others = block.batch is not None and block.points <= BLOCK_POINTS
        kind = (block.key.table, setup_case(block.case), block.mappings) if with_others else None
        group = open_groups.get(kind)
        if kind is None or group is None or len(group) >= most:
            group = []
            found.append(group)
            open_groups[kind] = group
        group.append(block)
    return found


def score_group(blocks: Sequence[Block]) -> None:
    """Score the grids of a group at once, for ``scored`` to give."""
    _ahead.clear()
    if len(blocks) > 1:
        asked = {_asked(block): block for block in blocks}
        _ahead.update((key, grid) for key, block in asked.items() if (grid := _known(block)) is not None)
        others = [key for key in asked if key not in _ahead]
        _ahead.update(zip(others, _new([asked[key] for key in others]) if others else (), strict=True))


def _asked(block: Block) -> _Asked:
    assert block.batch is not None
    return _Asked(block.scored_as, block.key.table, block.mappings, block.batch.tobytes())


def _known(block: Block) -> PhaseGrid | None:
    """The grid of a block that was scored before, by itself or as rows of others; None if it was not."""
    asked = _asked(block)
    if (grid := _kept.get(asked)) is not None:
        return grid
    assert block.batch is not None
    alike = [each for key, each in _kept.items() if (key.digest, key.phase) == (asked.digest, asked.phase)]
    return _rows_of(alike, block.mappings, block.batch)


def _new(blocks: Sequence[Block]) -> list[PhaseGrid]:
    """Grids of blocks of one group."""
    case, mappings = blocks[0].case, blocks[0].mappings
    lengths, batches = [block.case.lengths for block in blocks], [block.batch for block in blocks]
    if blocks[0].key.table != PREFILL:
        return decode_grids(case.decode_setup, mappings, lengths, batches=batches, allow_long_context=True)
    return prefill_grids(
        case.prefill_setup,
        mappings,
        lengths,
        batches=batches,
        mla_form=case.mla_form,
        allow_long_context=True,  # lengths that the sweep did not allow were refused when it was read
    )


def _rows_of(grids: Sequence[PhaseGrid], mappings: Sharding, batch: Ints) -> PhaseGrid | None:
    """The grid of mappings and batches from the rows of others; None where they lack one of them."""
    grids = [grid for grid in grids if np.array_equal(grid.batch[: batch.size], batch)]
    if not grids:
        return None
    first = grids[0]
    table = with_chunks(mappings, first.lengths.longest_timed, CHUNK_TOKENS if first.phase == PREFILL else ())
    places = {key: place for place, key in enumerate(key for grid in grids for key in _keys(grid.mappings))}
    rows = np.array([places.get(key, -1) for key in _keys(table)], dtype=np.intp)
    return PhaseGrid.joined(grids, rows, table, batch.size) if np.all(rows >= 0) else None


def _keys(table: Sharding) -> list[tuple[int, ...]]:
    """What tells one row from another."""
    columns = (np.broadcast_to(getattr(table, name), len(table)).tolist() for name in MAPPING_COLUMNS)
    return list(zip(*columns, strict=True))
