"""Step functions of points, against looking at every point."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.search.pareto import area, best_from, hypervolume, pareto_mask

points = st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.1, 50)), min_size=1, max_size=10).map(
    lambda pairs: np.array(pairs).T
)


@given(points, st.floats(0, 60))
def test_the_best_from_a_place_on_is_the_largest_of_those_that_reach_it(xy, at):
    reaching = [y for x, y in xy.T if x >= at]
    assert best_from(*xy, at) == max(reaching, default=0.0)


@given(points)
def test_beaten_points_change_no_area(xy):
    front = xy[:, pareto_mask(*xy)]
    assert hypervolume(*front) == pytest.approx(hypervolume(*xy), rel=1e-12)


@given(points, st.floats(0.1, 30), st.floats(0, 30), st.floats(0, 1), st.sampled_from(["linear", "log"]))
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
