"""Three and more pools: the integer program against exhaustive search, hand-made cases and its limits."""

import numpy as np
import pytest
from exhaustive import fewest_gpus, most_rate
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.errors import InputError
from disagg_sim.serving.integer_program import Choices
from disagg_sim.serving.pool_program import Goal, MatchOptions, fill_pools

MIXED = MatchOptions(mixing_gain=0.0)
NAMES = ("encode", "prefill", "attention and FFN", "decode")


def pools_of(listed):
    """Choices of (gpus, rate) pairs."""
    found = []
    for name, pairs in zip(NAMES, listed, strict=False):
        gpus, rate = zip(*pairs, strict=True)
        found.append(Choices(name, np.array(gpus), np.array(rate)))
    return found


def drawn(rng, pools):
    """Random pools of one to four choices."""
    return [
        list(zip(rng.integers(1, 9, n).tolist(), rng.uniform(0.05, 5, n).tolist(), strict=True))
        for n in rng.integers(1, 5, pools)
    ]


def assert_best(listed, budget):
    rate, gpus = most_rate(listed, budget)
    filled = fill_pools(pools_of(listed), Goal(gpu_budget=budget), MIXED)
    if rate == 0:
        assert (filled.status, filled.binds) == ("infeasible", "gpu_budget")
        assert filled.nearest == sum(min(size for size, _ in pool) for pool in listed) > budget
        return
    assert filled.status == "optimal"
    assert filled.request_rate == pytest.approx(rate, rel=1e-9)
    assert filled.total_gpus == gpus
    assert filled.bound == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_three_and_four_pools_equal_enumeration(seed):
    rng = np.random.default_rng(seed)
    assert_best(drawn(rng, 3 + seed % 2), int(rng.integers(3, 40)))


pairs = st.lists(st.tuples(st.integers(1, 8), st.floats(0.05, 5)), min_size=1, max_size=3)


@settings(max_examples=25)
@given(st.lists(pairs, min_size=3, max_size=4), st.floats(0.1, 8))
def test_fewest_gpus_of_many_pools_are_those_of_each_alone(listed, required):
    filled = fill_pools(pools_of(listed), Goal(required_rate=required), MIXED)
    assert filled.gpus == tuple(fewest_gpus(pool, required, most=1500) for pool in listed)
    assert filled.request_rate >= required * (1 - 2e-9)


def test_a_hand_made_case_of_four_pools():
    """12 requests/s: 2 x 6, 3 x 4, 2 x (2 GPUs, 6), 6 x 2; one GPU less leaves no pool with 12."""
    one = [[(1, 6.0)], [(1, 4.0)], [(2, 6.0)], [(1, 2.0)]]
    filled = fill_pools(pools_of(one), Goal(gpu_budget=15))
    assert filled.gpus == (2, 3, 4, 6)
    assert filled.request_rate == 12.0
    assert "2 encode, 3 prefill, 4 attention and FFN and 6 decode GPUs (proven)" in filled.message
    assert fill_pools(pools_of(one), Goal(gpu_budget=14)).request_rate == 10.0
    assert fill_pools(pools_of(one), Goal(required_rate=10.1)).gpus == (2, 3, 4, 6)


def test_prices_may_differ_from_choice_to_choice_of_a_pool():
    """A rate of 4 costs 4 x 1 with the slow choice and 2 x 3 with the fast one, which a budget of 3 GPUs asks for."""
    slow_or_fast = pools_of([[(1, 4.0)], [(1, 1.0), (1, 2.0)]])
    prices = (5.0, np.array([1.0, 3.0]))
    free = fill_pools(slow_or_fast, Goal(required_rate=4.0, prices=prices))
    assert (free.cost, free.gpus) == (9.0, (1, 4))
    tight = fill_pools(slow_or_fast, Goal(required_rate=4.0, prices=prices, gpu_budget=3))
    assert (tight.cost, tight.gpus) == (11.0, (1, 2))
    none = fill_pools(slow_or_fast, Goal(required_rate=4.0, prices=prices, gpu_budget=2))
    assert (none.binds, none.nearest) == ("required_rate", 2.0)


def test_a_goal_has_a_budget_or_a_rate():
    with pytest.raises(InputError, match="give gpu_budget"):
        fill_pools(pools_of([[(1, 1.0)]]), Goal())
