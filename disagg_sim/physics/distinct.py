"""Find the distinct values and rows of arrays, of which grids have few, and where each element has its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.physics.work import Numeric

#: Elements below which finding the distinct ones saves nothing, those from which on sorting them is not the fastest
#: way, and whole numbers for each of which there may be a mark, as measured. [1]
FEW, MANY, SMALL = 256, 1024, 2**16


def distinct(numbers: Numeric) -> tuple[Any, Any]:
    """Find the distinct values of numbers, and where each element has its own.

    A few are sorted, of many small whole numbers is marked which there are, many others are hashed: what is fastest.
    Returns values, rising, of shape (distinct,), and places in them, of the shape of ``numbers`` [1].

    >>> values, place = distinct(np.array([[8.0, 2.0], [2.0, 8.0]]))
    >>> values.tolist(), place.tolist()
    ([2.0, 8.0], [[1, 0], [0, 1]])
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

    Takes ``function`` (of an array; returns an array of its shape, or a tuple of them).

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
    have by themselves gets the digits that each row has alone. Takes ``function`` (of a number or an array) and
    ``numbers`` of shape (rows, 1). The result is of the shape of ``numbers``.

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

    Takes ``degrees`` of shape (rows, 1), and ``batches`` of all rows or of each. Returns first position of every
    distinct row, and the number of the distinct row at each position; None without columns.

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
