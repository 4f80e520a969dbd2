from unittest.mock import patch

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.search import pareto
from disagg_sim.search.pareto import pareto_front, pareto_mask

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


@given(points)
def test_first_of_equal_points_is_kept(pairs):
    x, y = np.array(pairs + pairs, dtype=float).reshape(-1, 2).T
    assert not pareto_mask(x, y)[len(pairs) :].any()


def test_hand_made_front():
    x = [1.0, 2.0, 3.0, 3.0, 4.0, 2.5]
    y = [5.0, 4.0, 4.0, 2.0, 1.0, 3.0]
    assert pareto_mask(x, y).tolist() == [True, False, True, False, True, False]


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
