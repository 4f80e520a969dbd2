"""Cut grids into blocks of rows, stack small grids of several cases, and name the bound of a point.

A block fits into the CPU's cache. Small grids are scored together, as numpy's overhead would dominate. Values of a
case, such as its mean context, are then a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.errors import InputError, whole_number
from disagg_sim.physics.residents import CachedTokens
from disagg_sim.physics.roofline import AnySums
from disagg_sim.physics.work import Numeric
from disagg_sim.workload.lengths import Lengths

#: Design points scored at once: small enough for the cache, large enough to hide numpy's overhead.
BLOCK_POINTS = 32_768


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Cut rows into blocks of about ``BLOCK_POINTS`` points, which stay in cache.

    >>> [(block.start, block.stop) for block in row_blocks(rows=5, columns=BLOCK_POINTS // 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, BLOCK_POINTS // max(columns, 1))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def bound_codes(sums: AnySums) -> Any:
    """Find the index of the largest of the four sums (order of ``BOUNDS``), of equal ones the first.

    Memory binds the small batch and compute the large one:

    >>> from disagg_sim.domain import BOUNDS
    >>> from disagg_sim.physics.roofline import Sums
    >>> codes = bound_codes(Sums(compute=np.array([1e-3, 9e-3]), memory=2e-3, communication=1e-3, latency=0.0))
    >>> [BOUNDS[code] for code in codes]
    ['memory', 'compute']
    """
    parts = np.broadcast_arrays(*sums)
    best, value = np.zeros(parts[0].shape, dtype=np.int8), parts[0]
    for code, part in enumerate(parts[1:], start=1):
        best = np.where(part > value, np.int8(code), best)
        value = np.maximum(value, part)
    return best


#: Largest number that a search accepts: a larger one is a typing error. [1]
MOST_SIZE = 10**9


def given_sizes(name: str, values: Any, least: int = 1) -> Ints:
    """Return the distinct numbers of an argument in rising order.

    >>> given_sizes("batch", [64, 16, 64]).tolist()
    [16, 64]
    """
    if isinstance(values, np.ndarray) and values.dtype.kind == "i" and values.size:  # as a search made them
        known = np.unique(values)
        if known[0] >= least and known[-1] <= MOST_SIZE:
            return known.astype(np.int64)
    given = np.asarray(values, dtype=object).ravel().tolist()
    if not given:
        raise InputError(f"{name} is empty; allowed: one whole number or more")
    return np.array(sorted({whole_number(name, value, least, most=MOST_SIZE) for value in given}), dtype=np.int64)


def is_constant_uncached(lengths: Lengths) -> bool:
    """Tell whether all prompts have one length and nothing of them is cached, so that one pass gives the time of all.

    >>> import disagg_sim as ds
    >>> [is_constant_uncached(each) for each in (ds.lengths(8192, 1024), ds.lengths(8192, 1024, cached=0.5))]
    [True, False]
    """
    return lengths.constant and lengths.cached is None


def groups_of(rows: Sequence[int], axes: Sequence[Ints], joins: Sequence[bool]) -> Iterator[list[int]]:
    """Group grids to be scored together: as many as fit into cache, with axes that begin the longest of the group."""
    group: list[int] = []
    points = 0
    for place in sorted(range(len(axes)), key=lambda place: -axes[place].size):
        own = axes[place]
        more = rows[place] * axes[group[0]].size if group else 0
        small = more <= BLOCK_POINTS and points <= 2 * BLOCK_POINTS - more and own.size > 1
        fits = all(joins[each] and rows[each] * axes[each].size <= BLOCK_POINTS for each in (*group[:1], place))
        if not (group and small and fits and np.array_equal(axes[group[0]][: own.size], own)):
            if group:
                yield group
            group, points = [], 0
        group.append(place)
        points += rows[place] * axes[group[0]].size
    if group:
        yield group


@dataclass(frozen=True, slots=True, eq=False)
class StackedCases:
    """Lengths of one case or of several, and how many rows each has."""

    cases: Sequence[Lengths]
    rows: tuple[int, ...]  # [1]

    def number(self, of: Callable[[Lengths], float], rows: Ints | None = None) -> Numeric:
        """Find the value of each row's case: a number if all cases agree, else a column of shape (rows, 1)."""
        values = [of(each) for each in self.cases]
        if len(set(values)) == 1:
            return values[0]
        column = np.repeat(np.array(values, dtype=float), self.rows)[:, None]
        return column if rows is None else column[rows]

    def cached(self, of: Callable[[Lengths], CachedTokens], rows: Ints | None = None) -> CachedTokens:
        """Find the resident tokens of a request of each row."""
        if len(self.cases) == 1:
            return of(self.cases[0])
        return CachedTokens(
            mean=self.number(lambda each: of(each).mean, rows),
            deviation=self.number(lambda each: of(each).deviation, rows),
            most=self.number(lambda each: of(each).most, rows),
        )


class GridPoints(NamedTuple):
    """Results of the points of a phase; arrays of shape (rows, batches)."""

    latency: Any  # FTL or TTL [s]
    busy: Any  # from the start of a pass or a step to that of the next [s]
    memory: Any  # on the fullest GPU [B]
    microbatches: Any  # [1]
    bound: Any  # index into ``BOUNDS``
    mla_form: Any  # index into ``CHOSEN_FORMS``
    drafts: Any  # draft tokens of a decode step [token]
    load: Any = None  # of pasts from tiers below HBM, part of the FTL; None where none come from there [s]
    stall: Any = None  # part of ``busy`` of prefill for which the slowest stage waits [s]

    def part(self, rows: slice, batches: int) -> GridPoints:
        """Take some rows, at the first batches."""
        return GridPoints(*(each if each is None else np.ascontiguousarray(each[rows, :batches]) for each in self))
