"""Evaluate functions once per distinct value, row or point of a grid, and gather the results.

A grid of mappings x batches repeats itself: an operator reads one or two sharding degrees and a
token count, and both take few distinct values. The gathered result equals direct evaluation, since it
IS direct evaluation at the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from disagg_sim.physics.roofline import GridSums, Points, Sums
from disagg_sim.physics.work import Numeric

Result = TypeVar("Result", bound=tuple[Any, ...])

#: Elements below which finding the distinct ones saves nothing, those from which on sorting them is not the fastest
#: way, and whole numbers for each of which there may be a mark, as measured. [1]
FEW, MANY, SMALL = 256, 1024, 2**16


def distinct(numbers: Numeric) -> tuple[Any, Any]:
    """Find the distinct values of numbers, and where each element has its own.

    A few are sorted, of many small whole numbers is marked which there are, many others are hashed: what is fastest.
    Returns values, rising, of shape (distinct,), and places in them, of the shape of ``numbers`` [1].
    """
    numbers = np.asarray(numbers)
    flat = numbers.ravel()
    if flat.size < MANY:
        rising = np.sort(flat)
        new = np.ones(rising.size, dtype=bool)
        np.not_equal(rising[1:], rising[:-1], out=new[1:])
        values = rising[new]
        return values, values.searchsorted(flat).reshape(numbers.shape)
    if flat.min() >= 0 and flat.max() < SMALL and np.array_equal(whole := flat.astype(np.intp), flat):
        met = np.bincount(whole) > 0
        return np.flatnonzero(met).astype(numbers.dtype), (np.cumsum(met) - 1)[whole].reshape(numbers.shape)
    code, found = pd.factorize(flat)
    order = np.argsort(found)
    rank = np.empty(order.size, dtype=np.intp)
    rank[order] = np.arange(order.size)
    return found[order], rank[code].reshape(numbers.shape)


def of_distinct(function: Callable[[Any], Any], degree: Numeric) -> Any:
    """Evaluate a function of a degree once for each of its distinct values.

    >>> of_distinct(np.log2, np.array([[8.0, 2.0], [2.0, 8.0]])).tolist()
    [[3.0, 1.0], [1.0, 3.0]]
    """
    if np.size(degree) < FEW:
        return function(np.asarray(degree, dtype=float))
    values, place = distinct(np.asarray(degree, dtype=float))
    found = function(values)
    return tuple(each[place] for each in found) if isinstance(found, tuple) else found[place]


def of_column(function: Callable[[Any], Any], numbers: Numeric) -> Any:
    """Evaluate a function of a column at each of its distinct values as at a number.

    Powers of arrays may differ from those of numbers in their last digit, so a column of what rows of mappings or cases
    have by themselves gets the digits that each row has alone.

    >>> of_column(lambda keys: keys**0.5, np.array([[4.0], [9.0], [4.0]])).tolist()
    [[2.0], [3.0], [2.0]]
    """
    if np.ndim(numbers) != 2 or np.shape(numbers)[0] == 1 or np.shape(numbers)[1] > 1:
        return function(numbers)
    values, place = distinct(numbers)
    return np.array([function(value) for value in values.tolist()])[place]


def equal_rows(rows: Any) -> tuple[Any, Any]:
    """First position of every distinct row of a matrix, and the number of the distinct row at each position.

    Rows that share a degree have the same token counts, so there are few; whole rows compare as bytes.
    """
    return _numbered([row.tobytes() for row in rows])


def distinct_rows(columns: Sequence[Any], rows: int = 0) -> tuple[Any, Any]:
    """First position of every distinct row, and the number of the distinct row at each position; all of no columns.

    The degrees of a grid are asked for again with every table, so what they have is kept.
    """
    if not columns:
        return _numbered([()] * rows)
    return _rows_of_bytes(tuple((column.dtype.str, column.tobytes()) for column in columns))


@lru_cache(maxsize=512)
def _rows_of_bytes(columns: tuple[tuple[str, bytes], ...]) -> tuple[Any, Any]:
    """Those of columns, each with the type of its elements."""
    values = (np.frombuffer(held, dtype=kind).tolist() for kind, held in columns)
    found = _numbered(list(zip(*values, strict=True)))
    for each in found:
        each.setflags(write=False)
    return found


def alike_rows(degrees: Sequence[Numeric], *batches: Numeric) -> tuple[Any, Any] | None:
    """Find the rows of a grid whose token counts are the same, as they share degrees and batches.

    The first position of every distinct row, and the number of the distinct row at each; None without columns.

    >>> first, number = alike_rows([np.array([[8.0], [2.0], [8.0]]), 1.0], np.array([[1.0, 2.0, 4.0]]))
    >>> first.tolist(), number.tolist()
    ([0, 1], [0, 1, 0])
    """
    columns = [degree for degree in degrees if np.ndim(degree) == 2]
    rows = max(map(len, columns), default=1)
    if rows == 1:
        return None
    columns = [column[:, 0] for column in columns if len(column) > 1]
    columns += [equal_rows(batch)[1] for batch in batches if np.ndim(batch) == 2 and len(batch) > 1]
    return distinct_rows(columns)


def _numbered(keys: list[Hashable]) -> tuple[Any, Any]:
    """First position of every distinct key, and the number of the distinct key at each position."""
    number: dict[Hashable, int] = {}
    places = np.array([number.setdefault(key, len(number)) for key in keys], dtype=np.int64)
    first = np.zeros(len(number), dtype=np.int64)
    first[places[::-1]] = np.arange(places.size)[::-1]
    return first, places


def is_one(degree: Numeric) -> bool:
    """Whether a degree is the number 1, which changes nothing; a column of ones is no number."""
    return np.ndim(degree) == 0 and degree == 1.0


class DistinctCounts:
    """The distinct values of a token count of shape (rows, batches), or combinations of several, and their positions.

    With ``alike`` it is known which rows have the same counts (``distinct.alike_rows``).
    """

    def __init__(self, *arguments: Numeric, alike: tuple[Any, Any] | None = None) -> None:
        self.arguments, self.alike = arguments, alike  # counts as they were given [token]
        self.gathers = any(np.ndim(each) == 2 for each in arguments)
        if self.gathers:
            whole = np.broadcast_arrays(*arguments)
            if alike is None:
                rows = [equal_rows(np.ascontiguousarray(each)) for each in whole]
                alike = rows[0] if len(rows) == 1 else distinct_rows([number for _, number in rows])
            first, self.row = alike  # place of every row of the grid in the distinct ones
            self._few = [each[first] for each in whole]

    @cached_property
    def _distinct(self) -> tuple[tuple[Any, ...], Any]:
        """Found where it is asked for: of dense models the tokens of all ranks are not."""
        values, places = zip(*map(distinct, self._few), strict=True)
        if len(values) == 1:
            return values, places[0]
        sizes = [each.size for each in values]
        together, position = distinct(np.ravel_multi_index(places, sizes))
        found = np.unravel_index(together, sizes)
        return tuple(each[place] for each, place in zip(values, found, strict=True)), position

    @property
    def counts(self) -> tuple[Any, ...]:
        """Each token count at every level, of shape (levels,). [token]"""
        return self._distinct[0]

    @property
    def position(self) -> Any:
        """Place of each point in the levels, of shape (distinct rows, batches)."""
        return self._distinct[1]

    def times(self, factor: Numeric) -> DistinctCounts:
        """Levels of so many times the tokens; itself where the factor is the number 1."""
        if np.ndim(factor) == 0 and factor == 1:
            return self
        return DistinctCounts(*(each * factor for each in self.arguments), alike=self.alike)


def tabulate(
    function: Callable[..., Result], degrees: tuple[Numeric, ...], levels: DistinctCounts, *others: Numeric
) -> Result:
    """Evaluate ``function(*degrees, *tokens, *others)`` at every point, (rows, batches), once per distinct point.

    The function broadcasts; ``levels`` of tokens have shape (rows, batches). Of ``others`` it gets numbers as they are,
    columns (rows, 1) and points (rows, batches).
    """
    if not levels.gathers:
        return function(*degrees, *levels.arguments, *others)
    batches = levels.arguments[0]  # a column has one number for all of them
    of_rows = [np.ndim(each) == 2 and np.shape(each)[1] == 1 and np.shape(batches)[1] > 1 for each in others]
    of_points = [np.ndim(each) == 2 and not column for each, column in zip(others, of_rows, strict=True)]
    if any(of_points):
        points = [each for each, own in zip(others, of_points, strict=True) if own]
        alike = levels.alike if all(len(each) == 1 for each in points) else None  # rows may differ in them, too
        levels = DistinctCounts(*levels.arguments, *points, alike=alike)
    rows = levels.row.size
    columns = [degree if is_one(degree) else np.broadcast_to(degree, (rows, 1))[:, 0] for degree in degrees]
    columns += [each[:, 0] for each, own in zip(others, of_rows, strict=True) if own]
    first, row = distinct_rows([column for column in columns if np.ndim(column)], rows)
    distinct = [column[first][:, None] if np.ndim(column) else column for column in columns]
    counts = [count[None, :] for count in levels.counts]
    tokens = len(counts) - sum(of_points)
    rest = iter(distinct[len(degrees) :]), iter(counts[tokens:])
    last = (
        next(rest[0]) if of_row else next(rest[1]) if of_point else each
        for each, of_row, of_point in zip(others, of_rows, of_points, strict=True)
    )
    table = function(*distinct[: len(degrees)], *counts[:tokens], *last)
    shape = first.size, levels.counts[0].size
    start = row * shape[1]

    def places(points: Points) -> Any:
        """Where points of the grid find their own in the table; None = all of them."""
        if points is None:
            return start[:, None] + levels.position[levels.row]
        rows, columns = points
        return start[rows] + levels.position[levels.row[rows], columns]

    def take(values: Any, index: Any) -> Any:
        """A number is the same at all points."""
        if np.ndim(values) == 0:
            return values
        return (values if np.shape(values) == shape else np.broadcast_to(values, shape)).ravel().take(index)

    every = places(None)

    def sums_at(sums: Sums, points: Points) -> Sums:
        index = places(points)
        return Sums(*(take(each, index) for each in sums))

    def spread(part: Any) -> Any:
        if isinstance(part, Sums):  # laid out where they are asked for
            return GridSums(partial(sums_at, part))
        if isinstance(part, tuple):
            parts = [spread(each) for each in part]
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        return take(part, every)

    found: Result = spread(table)
    return found
