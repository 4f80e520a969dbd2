"""The integer program and the frontier of matched points against exhaustive search, and what they refuse."""

import math
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from exhaustive import all_pools, fewest_gpus, most_rate
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_grid, match

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_model, load_system
from disagg_sim.physics.setup import setup
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.pareto import best_from
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT, pareto_front
from disagg_sim.serving.pool_program import MatchOptions
from disagg_sim.serving.pools import plan_pools
from disagg_sim.serving.step_mixing import mixed_steps, own_step, token_time, token_times
from disagg_sim.workload.lengths import lengths

sizes = st.integers(1, 9)
#: Sums of these that differ do so by more than the 1e-6 to which the solver keeps them.
rates = st.one_of(st.integers(50, 5000).map(lambda thousandths: thousandths / 1000), st.sampled_from([0.1, 0.3, 1.5]))
choices = st.lists(st.tuples(sizes, rates), min_size=1, max_size=5)


def grids(prefill, decode, **common):
    (gp, p), (gd, r) = zip(*prefill, strict=True), zip(*decode, strict=True)
    return make_grid("prefill", gp, p, latency=1.0, **common), make_grid("decode", gd, r, **common)


def assert_consistent(plan, osl=101):
    """The numbers of a plan are those of its own deployment."""
    pools = plan.deployment.prefill, plan.deployment.decode
    assert plan.total_gpus == sum(pool.gpus for pool in pools)
    assert plan.request_rate == min(pool.request_rate_per_s for pool in pools)
    assert plan.tokens_per_s_per_gpu == pytest.approx(plan.request_rate * osl / plan.total_gpus)


def assert_best(plan, prefill, decode, budget):
    rate, gpus = most_rate((prefill, decode), budget)
    if rate == 0:
        assert (plan.status, plan.binds) == ("infeasible", "gpu_budget")
        assert plan.nearest == min(g for g, _ in prefill) + min(g for g, _ in decode) > budget
        return
    assert plan.status == "optimal"
    assert plan.request_rate == pytest.approx(rate, rel=1e-9)
    assert plan.total_gpus == gpus
    assert plan.bound == pytest.approx(rate, rel=1e-6)
    assert plan.gap == pytest.approx(0, abs=1e-9)
    assert_consistent(plan)


@settings(max_examples=150)
@given(choices, choices, st.integers(2, 60))
def test_integer_program_equals_enumeration(prefill, decode, budget):
    assert_best(
        plan_pools(grids(prefill, decode), gpu_budget=budget, options=MatchOptions(mixing_gain=0.0)),
        prefill,
        decode,
        budget,
    )


@settings(max_examples=60)
@given(choices, choices, st.floats(0.1, 8))
def test_fewest_gpus_for_a_rate_equal_enumeration(prefill, decode, required):
    plan = plan_pools(grids(prefill, decode), required_rate=required, options=MatchOptions(mixing_gain=0.0))
    assert plan.status == "optimal"
    assert plan.request_rate >= required * (1 - 2e-9)
    expected = fewest_gpus(prefill, required, most=1500) + fewest_gpus(decode, required, most=1500)
    assert plan.total_gpus == expected
    assert plan.bound == pytest.approx(expected, rel=1e-9)
    assert_consistent(plan)
    within = plan_pools(
        grids(prefill, decode), required_rate=required, gpu_budget=expected, options=MatchOptions(mixing_gain=0.0)
    )
    assert within.total_gpus == expected


@settings(max_examples=50)
@given(
    st.lists(st.tuples(sizes, rates), min_size=1, max_size=3),
    st.lists(st.tuples(sizes, rates), min_size=1, max_size=3),
    st.integers(2, 16),
    st.integers(1, 2),
)
def test_limit_on_distinct_configurations_equals_enumeration(prefill, decode, budget, kinds):
    plan = plan_pools(
        grids(prefill, decode), gpu_budget=budget, options=MatchOptions(max_configurations_per_pool=kinds)
    )
    left, right = (np.array(list(all_pools(side, budget, kinds))) for side in (prefill, decode))
    fits = left[:, None, 0] + right[:, 0] <= budget
    best = np.where(fits, np.minimum(left[:, None, 1], right[:, 1]), 0).max()
    assert plan.request_rate == pytest.approx(best, rel=1e-9)
    if plan.deployment:
        assert max(len(plan.deployment.prefill.members), len(plan.deployment.decode.members)) <= kinds
        free = plan_pools(grids(prefill, decode), gpu_budget=budget, options=MatchOptions(mixing_gain=0.0))
        assert free.request_rate >= plan.request_rate * (1 - 1e-9)


def test_a_mixed_pool_beats_every_single_mapping():
    """On 8 GPUs: prefill 5 + decode 3 GPUs. Prefill of 2 and 3 GPUs gives 1 + 1.6 = 2.6 requests/s; alone 2 or 1.6."""
    both = grids([(2, 1.0), (3, 1.6)], [(3, 2.6)])
    mixed = plan_pools(both, gpu_budget=8)
    assert mixed.request_rate == pytest.approx(2.6)
    assert mixed.tokens_per_s_per_gpu == pytest.approx(2.6 * 101 / 8)
    assert [(i.mapping.gpus, n) for i, n in mixed.deployment.prefill.members] == [(2, 1), (3, 1)]
    alone = plan_pools(both, gpu_budget=8, options=MatchOptions(max_configurations_per_pool=1))
    assert alone.request_rate == pytest.approx(2.0)  # two of 2 GPUs
    assert alone.total_gpus == 7


@pytest.mark.parametrize(("budget", "link"), [(8, 450e9), (64, 50e9)])
def test_a_plan_keeps_to_the_links_of_its_system(budget, link):
    """H100: 450 GB/s of NVLink one way inside 8 GPUs, else a NIC of 50 GB/s.

    A prompt of 100,000 tokens of Llama-8B is 13.1 GB in bf16. A decode GPU serves the requests that its link brings,
    34 a second or 3.8: a plan that asks for more is late when it is simulated.
    """
    model, system = load_model("llama_3_1_8b"), load_system("h100_sxm")
    at, shape = setup(model, system, "bf16"), lengths(100_000, 16)
    prefill, decode = prefill_grid(at, Sharding(), shape), decode_grid(at, Sharding(), shape)
    plan = plan_pools([prefill, decode], ftl_limit=60.0, gpu_budget=budget)
    free = plan_pools(
        [prefill, decode], ftl_limit=60.0, gpu_budget=budget, options=MatchOptions(kv_link_limit=math.inf)
    )
    most = link / (100_000 * 131_072)  # [request/s]
    assert all(instance.request_rate_per_s <= most for instance, _ in plan.deployment.decode.members)
    assert free.request_rate >= plan.request_rate
    if budget == 64:
        assert max(instance.request_rate_per_s for instance, _ in free.deployment.decode.members) > most


@pytest.mark.parametrize(("rate", "mixes"), [(1.04, False), (1.06, True)])
def test_pools_mix_where_that_gains_more_than_a_twentieth(rate, mixes):
    """On 8 GPUs: prefill 3 + decode 5. Prefill of 1 and 2 GPUs gives ``rate``, three of 1 GPU 1 request/s."""
    both = grids([(1, 1 / 3), (2, rate - 1 / 3)], [(5, 2.0)])
    plan = plan_pools(both, gpu_budget=8)
    assert plan.mixes == mixes
    assert plan.request_rate == pytest.approx(rate if mixes else 1.0)
    assert plan.mixing_gain == pytest.approx(rate - 1)
    said = "mixed pools, 6.0% more rate than" if mixes else "mixed pools would have 4.0% more rate"
    assert said in plan.message
    assert plan_pools(both, gpu_budget=8, options=MatchOptions(mixing_gain=0.1)).mixes is False
    assert plan_pools(both, gpu_budget=8, options=MatchOptions(mixing_gain=0.0)).mixes is True


def test_pools_mix_where_nothing_else_is_feasible():
    """1.3 requests/s within 8 GPUs: three GPUs are left for prefill, which 1 + 2 of them reach, 3 x 1 not."""
    both = grids([(1, 1 / 3), (2, 1.0)], [(5, 2.0)])
    plan = plan_pools(both, gpu_budget=8, required_rate=1.3)
    assert (plan.mixes, plan.total_gpus) == (True, 8)


def test_latency_and_kv_link_limits_choose_the_configurations():
    prefill = make_grid("prefill", [2, 2], [4.0, 1.0], latency=[8.0, 2.0], kv_bytes=1e9)  # egress 2, 0.5 GB/s
    decode = make_grid("decode", [2, 2], [2.0, 1.0], latency=[0.05, 0.02], kv_bytes=1e9)  # ingress 1, 0.5 GB/s
    free = plan_pools([prefill, decode], gpu_budget=4)
    assert free.request_rate == 2.0
    assert plan_pools([prefill, decode], gpu_budget=4, ftl_limit=2.0).request_rate == 1.0
    tight = plan_pools([prefill, decode], gpu_budget=4, ttl_limit=0.02)
    assert tight.request_rate == 1.0
    assert tight.deployment.decode.members[0][0].latency_s == 0.02
    assert plan_pools([prefill, decode], gpu_budget=4, options=MatchOptions(kv_link_limit=0.7e9)).request_rate == 1.0


@pytest.mark.parametrize(
    ("limits", "binds", "nearest", "text"),
    [
        ({"ftl_limit": 1.0, "gpu_budget": 8}, "ftl", 2.0, "FTL limit of 1 s; the best FTL is 2 s"),
        ({"ttl_limit": 0.01, "gpu_budget": 8}, "ttl", 0.02, "TTL limit of 0.01 s; the best TTL is 0.02 s"),
        (
            {"options": MatchOptions(kv_link_limit=1e8), "gpu_budget": 8},
            "kv_link",
            5e8,
            "the least bandwidth needed is 5e+08 B/s",
        ),
        (
            {"gpu_budget": 3},
            "gpu_budget",
            4,
            "budget of 3 GPUs is too small; the smallest pair of instances needs 4 GPUs",
        ),
        ({"gpu_budget": 8, "required_rate": 9.0}, "required_rate", 4.0, "the most that fits is 4 requests/s"),
    ],
)
def test_an_infeasible_problem_names_what_binds_and_by_how_much(limits, binds, nearest, text):
    prefill = make_grid("prefill", [2, 2], [4.0, 1.0], latency=[8.0, 2.0], kv_bytes=1e9)
    decode = make_grid("decode", [2, 2], [2.0, 1.0], latency=[0.05, 0.02], kv_bytes=1e9)
    plan = plan_pools([prefill, decode], **limits)
    assert (plan.status, plan.binds, plan.deployment) == ("infeasible", binds, None)
    assert plan.nearest == pytest.approx(nearest)
    assert text in plan.message


def test_memory_that_no_mapping_has_is_named():
    full = make_grid("decode", [2], [1.0], status=[[1]])
    plan = plan_pools([make_grid("prefill", [2], [1.0]), full], gpu_budget=8)
    assert (plan.status, plan.binds) == ("infeasible", "memory")
    assert "no decode mapping fits in memory" in plan.message


def test_a_required_rate_takes_a_budget_to_the_last_gpu():
    """2 requests/s take 2 x 3 + 2 x 2 GPUs; with 9, decode is left 3 GPUs, 1 + 0.25 requests/s."""
    both = grids([(3, 1.0)], [(1, 0.25), (2, 1.0)])
    priced = {"required_rate": 2.0, "per": {"toy_gpu": 1.5}}
    plan = plan_pools(both, **priced, gpu_budget=10)
    assert (plan.total_gpus, plan.cost) == (10, 15.0)
    refused = plan_pools(both, **priced, gpu_budget=9)
    assert refused.binds == "required_rate"
    assert "the most that fits is 1.25 requests/s, and the rate needs 10 GPUs" in refused.message


def test_bundled_cbc_gives_the_same_answer_where_highspy_is_missing(monkeypatch):
    import pulp

    both = grids([(2, 1.0), (3, 1.6), (7, 4.1)], [(3, 2.6), (4, 3.7), (5, 4.4)])
    highs = plan_pools(both, gpu_budget=40)
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    cbc = plan_pools(both, gpu_budget=40)
    assert (cbc.status, cbc.request_rate, cbc.total_gpus) == ("optimal", highs.request_rate, highs.total_gpus)
    assert (cbc.gap, cbc.bound) == (0.0, pytest.approx(highs.request_rate, rel=1e-6))


def test_a_search_cut_short_says_so():
    rng = np.random.default_rng(3)
    prime = np.array([7, 11, 13, 17, 19, 23, 29, 31, 37, 41])
    both = grids(
        *(list(zip(prime.tolist(), (prime * rng.uniform(0.99, 1.01, 10)).tolist(), strict=True)) for _ in "pd")
    )
    plan = plan_pools(both, gpu_budget=500, options=MatchOptions(time_limit=1e-9))
    assert plan.status == "unsolved"
    assert plan.deployment is None
    assert "time limit" in plan.message


def test_a_rate_that_no_deployment_can_serve_is_refused_before_the_solver_sees_it():
    """2 GPUs for 1/s beside 4 GPUs for 1/s: a rate r needs 6 r GPUs, and 10,000,000 are planned at most."""
    both = grids([(2, 1.0), (3, 1.4)], [(4, 1.0), (5, 1.2)])
    assert plan_pools(both, required_rate=1e6).total_gpus == pytest.approx(6e6, rel=0.1)
    with pytest.raises(InputError, match=r"required_rate 1e\+12 needs 6e\+12 GPUs; allowed: what 10,000,000 GPUs"):
        plan_pools(both, required_rate=1e12)


def test_cost_is_unknown_without_prices_and_known_with_them():
    both = grids([(2, 1.0)], [(4, 1.0)])
    assert math.isnan(plan_pools(both, gpu_budget=8).cost)
    assert plan_pools(both, gpu_budget=8, per={"toy_gpu": 3.0}).cost == 3.0 * (2 + 4)


def test_arguments_out_of_range_are_refused():
    prefill, decode = grids([(2, 1.0)], [(4, 1.0)])
    with pytest.raises(InputError, match="give gpu_budget"):
        plan_pools([prefill, decode])
    for faulty in ({"ftl_limit": 0.0}, {"required_rate": -1.0}, {"gpu_budget": 10**30}):
        with pytest.raises(InputError, match=next(iter(faulty))):
            plan_pools([prefill, decode], **({"gpu_budget": 8} | faulty))
    with pytest.raises(InputError, match="no prefill pool; give a prefill grid"):
        plan_pools([decode], gpu_budget=8)


@pytest.mark.parametrize("busy", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_steps_of_ranks_that_have_pieces_apart_from_each_other(busy, ranks):
    """Drawn rank by rank; a step lasts the longer the more ranks have a piece."""
    plain, one, every = 10.0, 14.0, 30.0
    some = (np.random.default_rng(1).random((200_000, ranks)) < busy).sum(axis=1)
    each = (every - one) / max(ranks - 1, 1)
    drawn = np.where(some > 0, (every if ranks == 1 else one) + each * (some - 1), plain)
    shares = mixed_steps(busy, ranks)
    assert shares.alone * one + shares.full * every + shares.plain * plain == pytest.approx(drawn.mean(), rel=2e-3)
    if ranks > 1 and busy:
        own = one + busy * (ranks - 1) * each
        assert own_step(one, every, busy) == pytest.approx(own)


def test_a_step_with_prompts_is_a_step_of_decodes_too_where_they_ride_along():
    """100 steps, 25 of them with prompts of others: 75 x 10 ms and 25 x 40 ms, or 100 x 10 ms and 25 x 40 ms."""
    assert token_time(0.010, 1.0, 100.0, 0.040) == pytest.approx((75 * 0.010 + 1.0) / 100)
    assert token_time(0.010, 1.0, 100.0) == pytest.approx((100 * 0.010 + 1.0) / 100)
    assert token_time(0.010, 5.0, 100.0, 0.040) == pytest.approx(0.050)  # more prompts than steps: they decide


def test_a_request_waits_for_all_prompts_but_its_own():
    assert token_times(0.010, 0.050, 0.050, 4, 100.0, idle=1.0, left=0.0)[1] == token_time(0.010, 3 * 0.050, 100.0)


LOOSE = 1e9  # an FTL limit that nothing misses [s]

#: Few values, so that points tie in latency, rate and both.
gpus = st.sampled_from([1, 2, 3, 4, 6, 8, 16])

tied_rates = st.one_of(st.floats(0.02, 20), st.sampled_from([0.1, 0.2, 0.3, 1.0, 1.5, 2.0]))

prefills = st.lists(st.tuples(gpus, tied_rates), min_size=1, max_size=5)

decodes = st.lists(
    st.tuples(gpus, st.tuples(tied_rates, tied_rates), st.tuples(tied_rates, tied_rates)), min_size=1, max_size=12
)


def front_grids(prefill, decode):
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
    both = front_grids(prefill, decode)
    every = match(*both, **rules)
    with patch("disagg_sim.search.blocks.BLOCK_POINTS", block):  # each block sees what the earlier ones left
        front = match(*both, **rules, keep="frontier")
    column = THROUGHPUT if per == "gpu" else "tokens_per_usd"
    pd.testing.assert_frame_equal(front, pareto_front(every, throughput=column), check_exact=True)


@settings(max_examples=15)
@given(prefills, decodes, st.integers(2, 10), st.sampled_from([0.002, 0.01, 0.1]))
def test_at_any_ttl_limit_it_is_the_best_that_the_integer_program_finds_within_the_cap(prefill, decode, cap, ttl_limit):
    """Throughput per GPU of the best budget up to the cap, a configuration a pool and links that bind nothing."""
    both = front_grids(prefill, decode)
    front = match(*both, ftl_limit=LOOSE, gpu_cap=cap, keep="frontier")
    alone = MatchOptions(max_configurations_per_pool=1, kv_link_limit=1e30)
    plans = [
        plan_pools(both, ftl_limit=LOOSE, ttl_limit=ttl_limit, gpu_budget=budget, options=alone)
        for budget in range(2, cap + 1)
    ]
    found = float(best_from(front[INTERACTIVITY], front[THROUGHPUT], 1 / ttl_limit))
    assert found == pytest.approx(max(plan.tokens_per_s_per_gpu for plan in plans), rel=1e-8)
