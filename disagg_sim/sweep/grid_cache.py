"""Score the grids of blocks, those of equal setups and lengths once.

Cases that differ in limits, costs or matching alone score the same grids. Small grids of cases that differ in their
lengths are scored together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from disagg_sim.domain import Sharding
from disagg_sim.search.blocks import BLOCK_POINTS
from disagg_sim.search.grid import decode_grids, prefill_grids
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.sweep.cases import setup_case
from disagg_sim.sweep.plan import PREFILL, Block

#: Grids that further blocks may take, those of a group among them. [1]
KEPT_GRIDS = 16
#: Blocks whose grids are scored together: with more of them numpy's overhead falls little further. [1]
MOST_TOGETHER = 16


#: What decides the times and bytes of a block: digest, phase, mappings, batches.
_Asked = tuple[str, str, Sharding, bytes]

_kept: dict[_Asked, PhaseGrid] = {}  # the newest last


def scored(block: Block) -> PhaseGrid:
    """The grid of a block of prefill or decode."""
    asked = _asked(block)
    if asked not in _kept:
        score_group([block])
    _kept[asked] = found = _kept.pop(asked)
    return found


def groups(blocks: Iterable[Block], most: int) -> list[list[Block]]:
    """Divide blocks, in order, into those that one task computes: small ones of cases that differ in lengths."""
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
    asked = {_asked(block): block for block in blocks}
    new = [key for key in asked if key not in _kept]
    grids = dict(zip(new, _new([asked[key] for key in new]) if new else (), strict=True))
    for key in asked:
        _kept[key] = grids[key] if key in grids else _kept.pop(key)
    while len(_kept) > KEPT_GRIDS:
        del _kept[next(iter(_kept))]


def _asked(block: Block) -> _Asked:
    assert block.batch is not None
    return block.scored_as, block.key.table, block.mappings, block.batch.tobytes()


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
