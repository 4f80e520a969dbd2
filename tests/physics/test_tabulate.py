"""Tables of operators: what many grids ask for is computed once, and is what each would have computed alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.physics.passes.decode import decode_lookups, decode_step
from disagg_sim.physics.roofline import GridSums, Sums, chosen_sums, sums_at
from disagg_sim.physics.setup import setup
from disagg_sim.physics.tabulate import DistinctCounts, DistinctPairs, evaluate, look_up, side_by_side


@dataclass(frozen=True)
class Counted:
    """A function of a degree and a token count that remembers its calls."""

    calls: list[int] = field(default_factory=list, compare=False)

    def __call__(self, degree, tokens):
        self.calls.append(np.broadcast(degree, tokens).size)
        return np.sqrt(tokens) / degree, Sums(compute=tokens * degree, memory=0.25 * tokens)


def column(values):
    return np.array(values, dtype=float)[:, None]


GRIDS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([1.0, 2.0, 8.0]), min_size=1, max_size=4),
        st.lists(st.integers(1, 6), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)


@given(GRIDS)
def test_grids_side_by_side_find_what_each_would_find_alone_in_one_call(grids):
    function = Counted()
    asked = []
    for degrees, batches in grids:
        tokens = np.ceil(np.array([batches]) / column(degrees))
        asked.append(look_up(function, (column(degrees),), DistinctCounts(tokens)))
    found = evaluate(side_by_side(asked))
    assert len(function.calls) == 1
    for (degrees, batches), (time, sums) in zip(grids, found, strict=True):
        tokens = np.ceil(np.array([batches]) / column(degrees))
        np.testing.assert_array_equal(time, np.sqrt(tokens) / column(degrees))
        np.testing.assert_array_equal(sums.compute, tokens * column(degrees))


def test_the_same_table_asked_for_twice_is_computed_once():
    function, tokens = Counted(), np.array([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]])
    asked = [look_up(function, (column([1, 2]),), DistinctCounts(tokens)) for _ in range(2)]
    (one, _), (other, _) = evaluate(side_by_side(asked))
    assert function.calls == [4]  # two degrees x two distinct counts
    np.testing.assert_array_equal(one, other)


def test_pairs_of_counts_are_looked_up_once_each():
    calls = []

    def both(first, second):
        calls.append(first.size)
        return (10 * first + second,)

    first, second = np.array([[1, 1, 2]]), np.array([[3, 3, 4], [3, 4, 4]])
    (found,) = evaluate(look_up(both, (), DistinctPairs(first, second)))
    assert found.tolist() == [[13, 13, 24], [13, 14, 24]]
    assert calls == [3]


def test_sums_at_points_are_those_of_the_whole_grid():
    function, tokens = Counted(), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    _, sums = evaluate(look_up(function, (column([1, 2]),), DistinctCounts(tokens)))
    more = chosen_sums(tokens > 2, Sums(latency=1.0).plus(sums, column([1, 3])), sums)
    assert isinstance(more, GridSums)
    rows, columns = np.array([0, 1, 1]), np.array([2, 0, 2])
    for whole, few in zip(more, sums_at(more, (rows, columns)), strict=True):
        np.testing.assert_array_equal(np.broadcast_to(whole, tokens.shape)[rows, columns], few)


def test_steps_of_two_grids_together_are_those_of_each_alone():
    at = setup("deepseek_r1", "h200_sxm", "fp8")
    grids = [Sharding.stack([Sharding(dp_attn=dp, ep=dp)]).for_grid() for dp in (8, 16)]
    axis = np.array([[1.0, 24.0, 256.0]])
    together = evaluate(side_by_side([decode_lookups(at, each, batch=axis, context=4096.0) for each in grids]))
    for mapping, step in zip(grids, together, strict=True):
        alone = decode_step(at, mapping, batch=axis, context=4096.0)
        np.testing.assert_allclose(step.ttl, alone.ttl, rtol=1e-13)
        np.testing.assert_allclose(step.sums.memory, alone.sums.memory, rtol=1e-13)
