"""Evaluate a function once per distinct (degrees, tokens) pair and gather the results.

A grid of mappings x batches repeats itself: an operator reads one or two sharding degrees and a
token count, and both take few distinct values. The gathered result equals direct evaluation bit
for bit, since it IS direct evaluation at the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from disagg_sim.physics.work import Numeric

Result = TypeVar("Result", bound=tuple[Any, ...])


def is_one(degree: Numeric) -> bool:
    """Whether a degree is the number 1, which changes nothing; a column of ones is no number."""
    return np.ndim(degree) == 0 and degree == 1.0


class Levels:
    """The distinct values of a token count of shape (rows, batches), and their positions."""

    def __init__(self, tokens: Numeric) -> None:
        self.tokens = tokens
        self.gathers = np.ndim(tokens) == 2
        if self.gathers:
            first, same = _equal_rows(np.ascontiguousarray(tokens))
            few = np.asarray(tokens)[first]
            self.values = np.unique(few)
            self.position = np.searchsorted(self.values, few)[same]

    def times(self, factor: Numeric) -> Levels:
        """Levels of so many times the tokens; itself where the factor is the number 1."""
        return self if np.ndim(factor) == 0 and factor == 1 else Levels(self.tokens * factor)


def tabulate(function: Callable[..., Result], degrees: tuple[Numeric, ...], levels: Levels) -> Result:
    """``function(*degrees, tokens)`` at every point, computed once per distinct point.

    ``degrees`` have shape (rows, 1), or are the number 1, which the function gets as it is; the function must broadcast
    (distinct, 1) with (1, levels) and return a tuple, nested if it likes, of arrays. Scalar input is handed through.
    """
    if not levels.gathers:
        return function(*degrees, levels.tokens)
    rows = max(np.shape(d)[0] if np.ndim(d) else 1 for d in degrees)
    columns = [d if is_one(d) else np.broadcast_to(d, (rows, 1))[:, 0] for d in degrees]
    first, row = _distinct_rows([column for column in columns if np.ndim(column)], rows)
    index = row[:, None] * levels.values.size + levels.position
    shape = (first.size, levels.values.size)
    table = function(*(c[first, None] if np.ndim(c) else c for c in columns), levels.values[None, :])
    result: Result = _spread(table, shape, index)
    return result


def tabulate_pairs(
    function: Callable[..., Result], degrees: tuple[Numeric, ...], first: Numeric, second: Numeric
) -> Result:
    """``function(*degrees, first, second)`` at every point, computed once per distinct (degrees, pair).

    As ``tabulate`` for a function of two token counts, each a number or of shape (rows, batches).
    """
    if np.ndim(first) != 2 and np.ndim(second) != 2:
        return function(*degrees, first, second)
    left, right = (Levels(both) for both in np.broadcast_arrays(first, second))
    pair = left.position * right.values.size + right.position
    levels = Levels(pair)
    column, row = np.divmod(levels.values, right.values.size)

    def of_pair(*arguments: Numeric) -> Result:
        return function(*arguments[:-1], left.values[None, column], right.values[None, row])

    return tabulate(of_pair, degrees, levels)


def _equal_rows(rows: Any) -> tuple[Any, Any]:
    """First position of every distinct row of a matrix, and the number of the distinct row at each position.

    Rows that share a degree have the same token counts, so there are few; whole rows compare as bytes.
    """
    keys = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
    _, first, row = np.unique(keys, return_index=True, return_inverse=True)
    return first, row


def _distinct_rows(columns: list[Any], rows: int) -> tuple[Any, Any]:
    """First position of every distinct row, and the number of the distinct row at each position."""
    key = np.zeros(rows, dtype=np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        key = key * values.size + place
    _, first, row = np.unique(key, return_index=True, return_inverse=True)
    return first, row


def _spread(table: Any, shape: tuple[int, int], index: Any) -> Any:
    """Lay every array of a (nested) tuple out over the grid."""
    if isinstance(table, tuple):
        parts = [_spread(part, shape, index) for part in table]
        return type(table)(*parts) if hasattr(table, "_fields") else tuple(parts)
    return table if np.ndim(table) == 0 else np.broadcast_to(table, shape).ravel().take(index)
