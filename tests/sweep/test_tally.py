import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.sweep.tally import Removal, Tally, add_up, removal

removals = st.builds(
    Removal,
    phase=st.sampled_from(["prefill", "decode"]),
    reason=st.sampled_from(["a", "b", "c"]),
    count=st.integers(1, 10**6),
    shortfall=st.floats(0, 1e12) | st.just(math.inf),
    unit=st.just("B"),
)
tallies = st.builds(
    Tally,
    computed=st.integers(0, 10**6),
    feasible=st.integers(0, 10**6),
    rows=st.integers(0, 10**6),
    removals=st.lists(removals, max_size=4, unique_by=lambda r: (r.phase, r.reason)).map(tuple),
)


@given(tallies)
def test_a_tally_survives_json(tally):
    assert Tally.from_json(tally.to_json()) == tally


@given(st.lists(tallies, max_size=5), st.integers(0, 5))
def test_adding_up_does_not_depend_on_the_grouping(parts, cut):
    assert add_up([add_up(parts[:cut]), add_up(parts[cut:])]) == add_up(parts)


def test_a_removal_counts_and_finds_the_closest():
    removed = np.array([[True, False], [True, True]])
    excess = np.array([[5.0, -9.0], [2.0, 7.0]])
    assert removal("decode", "why", removed, excess, "B") == (
        Removal(phase="decode", reason="why", count=3, shortfall=2.0, unit="B"),
    )
    assert removal("decode", "why", np.zeros(3, dtype=bool)) == ()
