"""Pareto fronts and step functions of points, against looking at every point."""

import math
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.search import pareto
from disagg_sim.search.pareto import area, best_from, hypervolume, pareto_front, pareto_mask

small = st.integers(0, 6)
points = st.lists(st.tuples(small, small), max_size=30)


def beaten(pairs, i):
    """Whether a point is dominated, or repeats an earlier one, by comparing it with every other."""
    x, y = pairs[i]
    return any(
        (u >= x and v >= y and (u > x or v > y)) or ((u, v) == (x, y) and j < i) for j, (u, v) in enumerate(pairs)
    )


@given(points)
def test_mask_equals_pairwise_comparison(pairs):
    x, y = np.array(pairs, dtype=float).reshape(-1, 2).T
    assert pareto_mask(x, y).tolist() == [not beaten(pairs, i) for i in range(len(pairs))]


@given(points, st.integers(1, 9), st.integers(1, 9))
def test_a_first_look_at_some_points_changes_nothing(pairs, look, compared):
    x, y = np.array(pairs, dtype=float).reshape(-1, 2).T - 3.0
    whole = pareto_mask(x, y)
    with patch.multiple(pareto, FIRST_LOOK=look, COMPARED=compared):
        assert pareto_mask(x, y).tolist() == whole.tolist()


def test_unknown_values_are_never_on_the_front():
    assert pareto_mask([1.0, np.nan, 2.0, 3.0], [1.0, 9.0, np.nan, 0.5]).tolist() == [True, False, False, True]


def test_infinite_values_are_ordinary_values():
    assert pareto_mask([np.inf, 1.0, -np.inf], [-np.inf, 1.0, np.inf]).all()


def test_each_group_has_its_own_front_in_order_of_first_appearance():
    table = pd.DataFrame(
        {"kind": ["b", "a", "b", "a", "b"], "speed": [2.0, 1.0, 1.0, 2.0, 0.5], "load": [1.0, 9.0, 3.0, 8.0, 2.0]}
    )
    front = pareto_front(table, x="speed", y="load", by=("kind",))
    assert front["kind"].tolist() == ["b", "b", "a", "a"]
    assert front["speed"].tolist() == [1.0, 2.0, 1.0, 2.0]
    assert front["load"].tolist() == [3.0, 1.0, 9.0, 8.0]
    assert pareto_front(table, x="speed", y="load")["load"].tolist() == [9.0, 8.0]


def test_empty_table_has_an_empty_front():
    table = pd.DataFrame({"kind": [], "speed": [], "load": []})
    assert pareto_front(table, x="speed", y="load", by=("kind",)).empty
    assert pareto_front(table, x="speed", y="load").empty
    assert pareto_mask([], []).size == 0


some_points = st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.1, 50)), min_size=1, max_size=10).map(
    lambda pairs: np.array(pairs).T
)


@given(some_points, st.floats(0, 60))
def test_the_best_from_a_place_on_is_the_largest_of_those_that_reach_it(xy, at):
    reaching = [y for x, y in xy.T if x >= at]
    assert best_from(*xy, at) == max(reaching, default=0.0)


@given(some_points)
def test_beaten_points_change_no_area(xy):
    front = xy[:, pareto_mask(*xy)]
    assert hypervolume(*front) == pytest.approx(hypervolume(*xy), rel=1e-12)


@given(some_points, st.floats(0.1, 30), st.floats(0, 30), st.floats(0, 1), st.sampled_from(["linear", "log"]))
def test_areas_add_up_over_parts_of_a_range(xy, low, width, cut, axis):
    high, middle = low + width, low + cut * width
    parts = area(*xy, low=low, high=middle, axis=axis) + area(*xy, low=middle, high=high, axis=axis)
    assert parts == pytest.approx(area(*xy, low=low, high=high, axis=axis), rel=1e-9, abs=1e-9)


def test_a_log_axis_counts_every_doubling_the_same():
    """3 from 2 to 4, then 1 from 4 to 8."""
    assert area([4, 8], [3, 1], low=2, high=8, axis="log") == pytest.approx((3 + 1) * math.log(2))
    assert area([4, 8], [3, 1], low=2, high=8, axis="linear") == pytest.approx(3 * 2 + 1 * 4)


def test_no_points_have_no_area():
    assert hypervolume([], []) == 0
    assert best_from([], [], [1.0]).tolist() == [0]
