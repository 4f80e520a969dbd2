"""Tables of operators: distinct arguments are computed once, and are what every point would have computed alone."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.physics.roofline import GridSums, Sums, chosen_sums, sums_at
from disagg_sim.physics.tabulate import MANY, SMALL, DistinctCounts, distinct, distinct_rows, tabulate


@dataclass(frozen=True)
class Counted:
    """A function of a degree and a token count that remembers its calls."""

    calls: list[int] = field(default_factory=list, compare=False)

    def __call__(self, degree, tokens):
        self.calls.append(np.broadcast(degree, tokens).size)
        return np.sqrt(tokens) / degree, Sums(compute=tokens * degree, memory=0.25 * tokens)


def column(values):
    return np.array(values, dtype=float)[:, None]


DEGREES = st.lists(st.sampled_from([1.0, 2.0, 8.0]), min_size=1, max_size=4)
BATCHES = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(DEGREES, BATCHES)
def test_a_table_is_what_the_function_finds_at_every_point(degrees, batches):
    function, tokens = Counted(), np.ceil(np.array([batches]) / column(degrees))
    time, sums = tabulate(function, (column(degrees),), DistinctCounts(tokens))
    assert len(function.calls) == 1
    assert function.calls[0] <= len(set(degrees)) * len(np.unique(tokens))
    np.testing.assert_array_equal(time, np.sqrt(tokens) / column(degrees))
    np.testing.assert_array_equal(sums.compute, tokens * column(degrees))


@given(DEGREES, BATCHES)
def test_what_a_function_takes_beside_tokens_may_differ_by_row_or_by_point(degrees, batches):
    """A number goes to the function as it is; a column is one more degree; points are one more count."""
    tokens = np.ceil(np.array([batches]) / column(degrees))
    for own in (3.0, column(range(len(degrees))), tokens + np.arange(tokens.shape[1])):
        (found,) = tabulate(lambda d, t, other: (t / d + 100 * other,), (column(degrees),), DistinctCounts(tokens), own)
        np.testing.assert_array_equal(found, tokens / column(degrees) + 100 * own)


def test_pairs_of_counts_are_looked_up_once_each():
    calls = []

    def both(first, second):
        calls.append(first.size)
        return (10 * first + second,)

    first, second = np.array([[1, 1, 2]]), np.array([[3, 3, 4], [3, 4, 4]])
    (found,) = tabulate(both, (), DistinctCounts(first, second))
    assert found.tolist() == [[13, 13, 24], [13, 14, 24]]
    assert calls == [3]


def test_sums_at_points_are_those_of_the_whole_grid():
    function, tokens = Counted(), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    _, sums = tabulate(function, (column([1, 2]),), DistinctCounts(tokens))
    more = chosen_sums(tokens > 2, Sums(latency=1.0).plus(sums, column([1, 3])), sums)
    assert isinstance(more, GridSums)
    np.testing.assert_array_equal(sums.plus(Sums(latency=1.0)).latency, sums.latency + 1.0)
    rows, columns = np.array([0, 1, 1]), np.array([2, 0, 2])
    for whole, few in zip(more, sums_at(more, (rows, columns)), strict=True):
        np.testing.assert_array_equal(np.broadcast_to(whole, tokens.shape)[rows, columns], few)


RANDOM = np.random.default_rng(7)
KINDS = {
    "few": RANDOM.choice([0.5, 3.0, 7.25], (3, 5)),
    "many whole": RANDOM.integers(0, 40, (8, MANY)).astype(float),
    "many whole, counted": RANDOM.integers(0, 40, (2, MANY)),
    "many broken": RANDOM.choice(RANDOM.random(90) * 1e4, (8, MANY)),
    "many large": RANDOM.choice([1.0, 2.0 * SMALL, 3.0], (8, MANY)),
    "none": np.zeros((0, 4)),
}


@pytest.mark.parametrize("numbers", KINDS.values(), ids=KINDS)
def test_values_rise_and_places_find_them(numbers):
    values, place = distinct(numbers)
    expected, inverse = np.unique(numbers, return_inverse=True)
    assert values.dtype == numbers.dtype
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(place, inverse.reshape(numbers.shape))


def test_rows_are_numbered_as_they_come():
    first, place = distinct_rows([np.array([4, 1, 4, 4]), np.array([2, 2, 2, 3])])
    assert first.tolist() == [0, 1, 3]
    assert place.tolist() == [0, 1, 0, 2]
