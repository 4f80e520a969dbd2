"""Evaluate a function once per distinct (degrees, tokens) pair and gather the results.

A grid of mappings x batches repeats itself: an operator reads one or two sharding degrees and a
token count, and both take few distinct values. The gathered result equals direct evaluation, since it
IS direct evaluation at the same arguments.

A pass asks for several such tables. A function that asks is a generator (``Lookups``): it yields what it asks for and
is sent the answers, so that ``side_by_side`` can bring together what many grids, forms or chunk sizes ask of
one function. ``evaluate`` runs a generator to its end and calls each function once for all that ask it at the same
time: a call takes hundreds of operations on arrays, of which most grids would fill only small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from disagg_sim.physics.distinct import distinct, distinct_rows, equal_rows
from disagg_sim.physics.roofline import GridSums, Points, Sums
from disagg_sim.physics.work import Numeric

#: Share of all pairs of degrees and tokens from which on all are computed, as rows and columns that broadcast. [1]
DENSE = 0.5

T = TypeVar("T")
Result = TypeVar("Result", bound=tuple[Any, ...])


def is_one(degree: Numeric) -> bool:
    """Whether a degree is the number 1, which changes nothing; a column of ones is no number."""
    return np.ndim(degree) == 0 and degree == 1.0


def is_column(numbers: Numeric, tokens: Numeric) -> bool:
    """Whether each row of a grid of several batches has one of the numbers at all of them."""
    return np.ndim(numbers) == 2 and np.shape(numbers)[1] == 1 and np.shape(tokens)[1] > 1


class DistinctCounts:
    """The distinct values of a token count of shape (rows, batches), and their positions.

    With ``row`` the count is given at distinct rows alone, and ``row`` is the place of every row of the grid in these.
    With ``alike`` it is known which rows have the same counts (``distinct.alike_rows``).
    """

    def __init__(self, tokens: Numeric, row: Any = None, *, alike: tuple[Any, Any] | None = None) -> None:
        self.tokens, self.row, self.alike = tokens, row, alike
        self.gathers = np.ndim(tokens) == 2
        if self.gathers:
            self._few = np.asarray(tokens)
            if row is None:
                first, self.row = equal_rows(np.ascontiguousarray(self._few)) if alike is None else alike
                self._few = self._few[first]

    @cached_property
    def _distinct(self) -> tuple[Any, Any]:
        """Found where it is asked for: of dense models the tokens of all ranks are not."""
        return distinct(self._few)

    @property
    def distinct(self) -> Any:
        """Values, rising, of shape (levels,). [token]"""
        return self._distinct[0]

    @property
    def position(self) -> Any:
        """Places in them, of shape (distinct rows, batches)."""
        return self._distinct[1]

    @property
    def arguments(self) -> tuple[Numeric, ...]:
        """Token counts as they were given. [token]"""
        return (self.tokens,)

    @property
    def counts(self) -> tuple[Any, ...]:
        """Token counts of every level, of shape (levels,). [token]"""
        return (self.distinct,)

    def times(self, factor: Numeric) -> DistinctCounts:
        """Levels of so many times the tokens; itself where the factor is the number 1."""
        return self if np.ndim(factor) == 0 and factor == 1 else DistinctCounts(self.tokens * factor, alike=self.alike)


class DistinctPairs:
    """The distinct combinations of token counts, each a number or of shape (rows, batches); else as
    ``DistinctCounts``.
    """

    def __init__(self, *arguments: Numeric, row: Any = None) -> None:
        self.arguments = arguments
        self.gathers = any(np.ndim(each) == 2 for each in arguments)
        if self.gathers:
            each = [DistinctCounts(both, row) for both in np.broadcast_arrays(*arguments)]
            places = [levels.position if row is not None else levels.position[levels.row] for levels in each]
            sizes = [levels.distinct.size for levels in each]
            together = DistinctCounts(np.ravel_multi_index(places, sizes), row)
            found = np.unravel_index(together.distinct, sizes)
            self.counts = tuple(levels.distinct[place] for levels, place in zip(each, found, strict=True))
            self.row, self.position = together.row, together.position


@dataclass(frozen=True, eq=False, slots=True)
class Lookup:
    """What a grid asks of a function: its distinct degrees and tokens, and where each point finds its own."""

    function: Callable[..., Any]
    degrees: tuple[Numeric, ...]  # columns of shape (distinct,), or the number 1
    tokens: tuple[Any, ...]  # counts, each of shape (levels,) [token]
    row: Any  # (rows,) place in the degrees
    level_row: Any  # (rows,) place in the positions
    position: Any  # (distinct rows, batches) place in the levels

    @property
    def shape(self) -> tuple[int, int]:
        """Of the table: (distinct degrees, levels)."""
        rows = next((degree.size for degree in self.degrees if np.ndim(degree)), 1)
        return rows, self.tokens[0].size

    @property
    def joins(self) -> Hashable:
        """Lookups with the same are answered by one call."""
        return self.function, tuple(np.ndim(degree) for degree in self.degrees)

    def spread(self, answer: _Answer) -> Any:
        """The table laid out over the grid; its sums where they are asked for."""
        index = self._index(answer, None)

        def sums_of(table: Sums, places: Any) -> Sums:
            return Sums(*(answer.take(part, places) for part in table))

        def lay(table: Any) -> Any:
            if isinstance(table, Sums):
                return GridSums(lambda points: sums_of(table, self._index(answer, points)))
            if isinstance(table, tuple):
                parts = [lay(part) for part in table]
                return type(table)(*parts) if hasattr(table, "_fields") else tuple(parts)
            return answer.take(table, index)

        return lay(answer.table)

    def _index(self, answer: _Answer, points: Points) -> Any:
        """Place of points of the grid in the table."""
        first, places = self.row * self.tokens[0].size, answer.places
        if points is None:
            index = first[:, None] + self.position[self.level_row]
        else:
            rows, columns = points
            index = first[rows] + self.position[self.level_row[rows], columns]
        return index if places is None else places.take(index)


class _Answer(NamedTuple):
    """A table, and where in it that of one lookup is."""

    table: Any
    shape: tuple[int, ...]
    places: Any = None  # of its (distinct degrees, levels) in the table, one row after the other; None = as they are

    def take(self, values: Any, index: Any) -> Any:
        """An array of the table at places of it; a number is the same at all."""
        if np.ndim(values) == 0:
            return values
        return (values if np.shape(values) == self.shape else np.broadcast_to(values, self.shape)).ravel().take(index)


#: A function that asks for tables, and returns T.
Lookups = Generator[list[Lookup], list[_Answer], T]


def look_up(
    function: Callable[..., Result], degrees: tuple[Numeric, ...], levels: DistinctCounts | DistinctPairs
) -> Lookups[Result]:
    """Ask for ``function(*degrees, tokens)`` at every point, computed once per distinct point.

    ``degrees`` have shape (rows, 1), or are the number 1, which the function gets as it is; the function must broadcast
    and return a tuple, nested if it likes, of arrays. Scalar input is handed through. Functions that are equal are
    called together: one that depends on more than its arguments is a frozen dataclass with ``__call__``.
    """
    if not levels.gathers:
        return function(*degrees, *levels.arguments)
    rows = levels.row.size
    columns = [degree if is_one(degree) else np.broadcast_to(degree, (rows, 1))[:, 0] for degree in degrees]
    first, row = distinct_rows([column for column in columns if np.ndim(column)], rows)
    distinct = tuple(column[first] if np.ndim(column) else column for column in columns)
    lookup = Lookup(function, distinct, levels.counts, row, levels.row, levels.position)
    (answer,) = yield [lookup]
    found: Result = lookup.spread(answer)
    return found


@dataclass(frozen=True, slots=True)
class Partial(Generic[Result]):
    """A function whose last argument is given."""

    function: Callable[..., Result]
    last: Numeric

    def __call__(self, *arguments: Numeric) -> Result:
        """The function at the other arguments."""
        return self.function(*arguments, self.last)


@dataclass(frozen=True, slots=True)
class SwapArguments(Generic[Result]):
    """A function whose last argument rows have by themselves, as they have their degrees; its tokens stand behind."""

    function: Callable[..., Result]

    def __call__(self, *arguments: Numeric) -> Result:
        """The function with the last two arguments the other way round."""
        *degrees, own, tokens = arguments
        return self.function(*degrees, tokens, own)


def look_up_at(
    function: Callable[..., Result], degrees: tuple[Numeric, ...], levels: DistinctCounts, context: Numeric
) -> Lookups[Result]:
    """Ask for ``function(*degrees, tokens, context)``, the context a number, of shape (rows, 1) or (rows, batches)."""
    if levels.gathers and is_column(context, levels.tokens):
        return (yield from look_up(SwapArguments(function), (*degrees, context), levels))
    if levels.gathers and np.ndim(context) == 2:
        return (yield from look_up(function, degrees, DistinctPairs(levels.tokens, context)))
    return (yield from look_up(Partial(function, context), degrees, levels))


def side_by_side(parts: Sequence[Lookups[T]]) -> Lookups[list[T]]:
    """Run functions that ask for tables in step with each other, so that what they ask at the same time is joined.

    Returns what each of them returns, in their order.
    """
    results: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(parts)))
    while answers:
        asked: dict[int, list[Lookup]] = {}
        for index, answer in answers.items():
            try:
                asked[index] = parts[index].send(answer)
            except StopIteration as done:
                results[index] = done.value
        if not asked:
            break
        found = iter((yield [lookup for lookups in asked.values() for lookup in lookups]))
        answers = {index: [next(found) for _ in lookups] for index, lookups in asked.items()}
    return [results[index] for index in range(len(parts))]


def evaluate(asking: Lookups[T]) -> T:
    """Run a function that asks for tables to its end, calling each table's function once for all that ask it together.

    >>> def squares(tokens):
    ...     return (yield from look_up(lambda count: (count**2,), (), DistinctCounts(np.array(tokens))))
    >>> evaluate(squares([[1, 2, 2]]))
    (array([[1, 4, 4]]),)
    """
    answers: Any = None
    while True:
        try:
            lookups = asking.send(answers)
        except StopIteration as done:
            result: T = done.value
            return result
        answers = _answers(lookups)


def tabulate(function: Callable[..., Result], degrees: tuple[Numeric, ...], levels: DistinctCounts) -> Result:
    """``function(*degrees, tokens)`` at every point, as ``look_up`` asks for it."""
    return evaluate(look_up(function, degrees, levels))


def _answers(lookups: list[Lookup]) -> list[_Answer]:
    """Tables of lookups, in their order: one call for all that join."""
    joined: dict[Hashable, list[int]] = {}
    for place, lookup in enumerate(lookups):
        joined.setdefault(lookup.joins, []).append(place)
    found: dict[int, _Answer] = {}
    for places in joined.values():
        alike = [lookups[place] for place in places]
        answers = [_alone(alike[0])] if len(alike) == 1 else _joined_tables(alike)
        found |= zip(places, answers, strict=True)
    return [found[place] for place in range(len(lookups))]


def _joined_tables(lookups: list[Lookup]) -> list[_Answer]:
    """Tables of lookups that join: the function at every pair of degrees and tokens that a point of a grid needs."""
    columns = [[column for column in lookup.degrees if np.ndim(column)] for lookup in lookups]
    degrees = [np.concatenate(each) for each in zip(*columns, strict=True)]
    tokens = [np.concatenate(each) for each in zip(*(lookup.tokens for lookup in lookups), strict=True)]
    first, row = distinct_rows(degrees, sum(lookup.shape[0] for lookup in lookups))
    first_level, level = _distinct_levels(tokens)
    needed = np.zeros((first.size, first_level.size), dtype=bool)
    rows = np.split(row, np.cumsum([lookup.shape[0] for lookup in lookups])[:-1])
    levels = np.split(level, np.cumsum([lookup.shape[1] for lookup in lookups])[:-1])
    for lookup, own, at in zip(lookups, rows, levels, strict=True):
        _, once = np.unique(lookup.row * len(lookup.position) + lookup.level_row, return_index=True)
        needed[own[lookup.row[once]][:, None], at[lookup.position[lookup.level_row[once]]]] = True
    degrees, tokens = [column[first] for column in degrees], [count[first_level] for count in tokens]
    if np.count_nonzero(needed) > DENSE * needed.size:
        varied = (column[:, None] for column in degrees)
        shape, places = needed.shape, np.arange(needed.size).reshape(needed.shape)
        counts = [count[None, :] for count in tokens]
    else:
        chosen = np.flatnonzero(needed)
        shape, places = (chosen.size,), np.zeros(needed.shape, dtype=np.intp)
        places.ravel()[chosen] = np.arange(chosen.size)
        of_row, of_level = np.divmod(chosen, first_level.size)
        varied, counts = (column[of_row] for column in degrees), [count[of_level] for count in tokens]
    arguments = [next(varied) if np.ndim(degree) else degree for degree in lookups[0].degrees]
    table = lookups[0].function(*arguments, *counts)
    return [_Answer(table, shape, places[own[:, None], at].ravel()) for own, at in zip(rows, levels, strict=True)]


def _distinct_levels(tokens: list[Any]) -> tuple[Any, Any]:
    """First position of every distinct combination of token counts, and the number of the combination at each."""
    combined: Any = np.zeros(tokens[0].size, dtype=np.intp)
    for count in tokens:
        values, place = distinct(count)
        combined = combined * values.size + place
    values, number = distinct(combined)
    first = np.empty(values.size, dtype=np.intp)
    first[number[::-1]] = np.arange(number.size)[::-1]
    return first, number


def _alone(lookup: Lookup) -> _Answer:
    """The table of one lookup, of shape (distinct degrees, levels)."""
    degrees = (degree[:, None] if np.ndim(degree) else degree for degree in lookup.degrees)
    return _Answer(lookup.function(*degrees, *(count[None, :] for count in lookup.tokens)), lookup.shape)
