"""Gather what the blocks of a sweep add up to while they arrive, in any order.

Of each mode the frontier so far is held, and the counts of its blocks: memory does not grow with the number of points,
and the tables do not depend on who computed what, or when.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from disagg_sim.search.pareto import pareto_mask
from disagg_sim.serving.points import INTERACTIVITY
from disagg_sim.sweep.compute import BlockResult
from disagg_sim.sweep.index import Key
from disagg_sim.sweep.plan import POINTS, Block, SweepPlan
from disagg_sim.sweep.tally import Tally, add_up

#: Frontiers of blocks that wait to be merged: one merge costs as much as reading a block. [1]
WAITING = 64


class GatheredFront:
    """The frontier of the blocks of a mode that have arrived.

    Of equal points that of the first block of the plan stays, whatever the order of arrival.
    """

    def __init__(self, throughput: str) -> None:
        self._axes = INTERACTIVITY, throughput
        self._parts: list[pd.DataFrame] = []
        self._numbers: list[np.ndarray] = []

    def add(self, number: int, front: pd.DataFrame) -> None:
        """Take the frontier of block ``number`` of the plan."""
        if len(front):
            self._parts.append(front)
            self._numbers.append(np.full(len(front), number))
        if len(self._parts) > WAITING:
            joint, numbers, kept = self._kept()
            self._parts, self._numbers = [joint.take(kept)], [numbers[kept]]

    def rows(self) -> pd.DataFrame:
        """The frontier, interactivity rising; without columns where no block has a point."""
        if not self._parts:
            return pd.DataFrame()
        joint, _, kept = self._kept()
        rising = np.argsort(joint[self._axes[0]].to_numpy(dtype=float)[kept], kind="stable")
        return joint.take(kept[rising]).reset_index(drop=True)

    def _kept(self) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
        """All parts below one another, the number of the block of each row, and the rows that stay."""
        numbers = np.concatenate(self._numbers)
        order = np.argsort(numbers, kind="stable")
        joint = pd.concat(self._parts, ignore_index=True) if len(self._parts) > 1 else self._parts[0]
        x, y = (joint[axis].to_numpy(dtype=float)[order] for axis in self._axes)
        return joint, numbers, order[pareto_mask(x, y)]


class Gathered:
    """Frontiers and counts of the blocks of a plan that have arrived."""

    def __init__(self, plan: SweepPlan) -> None:
        self._tallies: dict[Key, Tally] = {}
        self._fronts: dict[Key, tuple[int, GatheredFront]] = {}
        self._tables: dict[Key, pd.DataFrame] = {}
        for case in plan.cases:
            for mode in case.modes:
                front = GatheredFront(case.case.throughput)
                self._fronts |= {block.key: (number, front) for number, block in enumerate(mode.points)}

    def add(self, key: Key, found: BlockResult) -> None:
        """Take what was found of a block."""
        self._tallies[key] = found.tally
        if key.table == POINTS:
            number, front = self._fronts[key]
            front.add(number, found.front)
        elif len(found.front):
            self._tables[key] = found.front

    def tally(self, blocks: Sequence[Block]) -> Tally:
        """Counts of blocks that have all arrived, added up in their order."""
        return add_up(self._tallies[block.key] for block in blocks)

    def front(self, blocks: Sequence[Block]) -> pd.DataFrame:
        """Frontier of all blocks of a mode, columns as stored; empty of none."""
        return self._fronts[blocks[0].key][1].rows() if blocks else pd.DataFrame()

    def table(self, blocks: Sequence[Block]) -> pd.DataFrame:
        """The table of the one block of further pools; empty of none."""
        return self._tables.get(blocks[0].key, pd.DataFrame()) if blocks else pd.DataFrame()
