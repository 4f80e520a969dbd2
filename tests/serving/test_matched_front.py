"""The frontier of matched points, found without a row for each: that of all points, and that of the integer program."""

from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_grid, match

from disagg_sim.errors import InputError
from disagg_sim.search.pareto import best_from
from disagg_sim.serving.disaggregated import Rules
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT, pareto_front
from disagg_sim.serving.pool_program import MatchOptions
from disagg_sim.serving.pools import plan_pools

LOOSE = 1e9  # an FTL limit that nothing misses [s]
#: Few values, so that points tie in latency, rate and both.
gpus = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
rates = st.one_of(st.floats(0.02, 20), st.sampled_from([0.1, 0.2, 0.3, 1.0, 1.5, 2.0]))
prefills = st.lists(st.tuples(gpus, rates), min_size=1, max_size=5)
decodes = st.lists(st.tuples(gpus, st.tuples(rates, rates), st.tuples(rates, rates)), min_size=1, max_size=12)


def grids(prefill, decode):
    gp, p = zip(*prefill, strict=True)
    gd, r, ttl = zip(*decode, strict=True)
    return make_grid("prefill", gp, p), make_grid("decode", gd, r, latency=np.array(ttl) / 100)


@settings(max_examples=40)
@given(
    prefills,
    decodes,
    st.integers(2, 64),
    st.sampled_from(["exact", "paper", Fraction(1, 2)]),
    st.sampled_from(["gpu", {"toy_gpu": 3.0}]),
    st.integers(1, 6),
)
def test_the_frontier_alone_is_that_of_all_points(prefill, decode, cap, matching, per, block):
    rules = {"ftl_limit": LOOSE, "gpu_cap": cap, "matching": matching, "per": per, "ttl_limit": 0.1}
    both = grids(prefill, decode)
    every = match(*both, **rules)
    with patch("disagg_sim.search.blocks.BLOCK_POINTS", block):  # each block sees what the earlier ones left
        front = match(*both, **rules, keep="frontier")
    column = THROUGHPUT if per == "gpu" else "tokens_per_usd"
    pd.testing.assert_frame_equal(front, pareto_front(every, throughput=column), check_exact=True)


@settings(max_examples=15)
@given(prefills, decodes, st.integers(2, 10), st.sampled_from([0.002, 0.01, 0.1]))
def test_at_any_ttl_limit_it_is_the_best_that_the_integer_program_finds_within_the_cap(prefill, decode, cap, ttl_limit):
    """Throughput per GPU of the best budget up to the cap, a configuration a pool and links that bind nothing."""
    both = grids(prefill, decode)
    front = match(*both, ftl_limit=LOOSE, gpu_cap=cap, keep="frontier")
    alone = MatchOptions(max_configurations_per_pool=1, kv_link_limit=1e30)
    plans = [
        plan_pools(both, ftl_limit=LOOSE, ttl_limit=ttl_limit, gpu_budget=budget, options=alone)
        for budget in range(2, cap + 1)
    ]
    found = float(best_from(front[INTERACTIVITY], front[THROUGHPUT], 1 / ttl_limit))
    assert found == pytest.approx(max(plan.tokens_per_s_per_gpu for plan in plans), rel=1e-8)


def test_what_may_be_kept_is_said():
    with pytest.raises(InputError, match=r"keep 'front' is unknown, did you mean 'frontier'\?"):
        Rules(keep="front")
