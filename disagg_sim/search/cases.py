"""Lay the grids of several lengths out one after the other, so that they are scored at once.

A small grid fills numpy's operations with few numbers, each of which takes longer to begin than to run. What rows of
mappings depend on beside their degrees, such as the mean context of a case, is then a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import MAPPING_FIELDS, Sharding
from disagg_sim.physics.residents import CachedTokens
from disagg_sim.physics.work import Numeric
from disagg_sim.search.blocks import BLOCK_POINTS
from disagg_sim.workload.lengths import Lengths


def is_constant_uncached(lengths: Lengths) -> bool:
    """Tell whether all prompts have one length and nothing of them is cached, so that one pass gives the time of all.

    >>> import disagg_sim as ds
    >>> [is_constant_uncached(each) for each in (ds.lengths(8192, 1024), ds.lengths(8192, 1024, cached=0.5))]
    [True, False]
    """
    return lengths.constant and lengths.cached is None


def groups_of(rows: Sequence[int], axes: Sequence[Ints], joins: Sequence[bool]) -> Iterator[list[int]]:
    """Group grids that are scored at once: as many as stay in cache, their batches the first of the longest axis.

    Takes ``rows`` and ``axes`` (rows and batch sizes of each grid [1], [request]). Yields places of grids, the one with
    the longest axis first.

    >>> list(groups_of([10, 10, 10], [np.arange(1, 5), np.arange(1, 9), np.array([7])], [True] * 3))
    [[1, 0], [2]]
    """

    held: list[int] = []
    points = 0
    for place in sorted(range(len(axes)), key=lambda place: -axes[place].size):
        own = axes[place]
        more = rows[place] * axes[held[0]].size if held else 0
        small = more <= BLOCK_POINTS and points <= 2 * BLOCK_POINTS - more and own.size > 1
        fits = all(joins[each] and rows[each] * axes[each].size <= BLOCK_POINTS for each in (*held[:1], place))
        if not (held and small and fits and np.array_equal(axes[held[0]][: own.size], own)):
            if held:
                yield held
            held, points = [], 0
        held.append(place)
        points += rows[place] * axes[held[0]].size
    if held:
        yield held


def stacked(tables: Sequence[Sharding]) -> Sharding:
    """Stack the rows of tables of columns, one after the other.

    >>> one, two = (Sharding.stack([Sharding(tp_attn=tp, tp_ffn=tp)]) for tp in (1, 2))
    >>> stacked([one, two, one]).tp_attn.tolist()
    [1, 2, 1]
    """
    if len(tables) == 1:
        return tables[0]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in tables]) for name in MAPPING_FIELDS
    }
    return Sharding(**columns)


@dataclass(frozen=True, slots=True, eq=False)
class StackedCases:
    """Lengths of one case or of several, and how many rows each has."""

    cases: Sequence[Lengths]
    rows: tuple[int, ...]  # [1]

    def number(self, of: Callable[[Lengths], float], rows: Ints | None = None) -> Numeric:
        """Find what each row has of its case.

        Takes ``of`` (a number of a case) and ``rows`` (None = all). Returns the number that all cases have, or a column
        of shape (rows, 1).

        >>> import disagg_sim as ds
        >>> both = StackedCases([ds.lengths(1024, 64), ds.lengths(2048, 64)], (1, 2))
        >>> both.number(lambda each: each.mean_isl).tolist(), both.number(lambda each: each.mean_osl)
        ([[1024.0], [2048.0], [2048.0]], 64.0)
        """
        values = [of(each) for each in self.cases]
        if len(set(values)) == 1:
            return values[0]
        column = np.repeat(np.array(values, dtype=float), self.rows)[:, None]
        return column if rows is None else column[rows]

    def cached(self, of: Callable[[Lengths], CachedTokens], rows: Ints | None = None) -> CachedTokens:
        """What a request of each row holds; of several cases all of it computed."""
        if len(self.cases) == 1:
            return of(self.cases[0])
        return CachedTokens(
            mean=self.number(lambda each: of(each).mean, rows),
            deviation=self.number(lambda each: of(each).deviation, rows),
            most=self.number(lambda each: of(each).most, rows),
        )
