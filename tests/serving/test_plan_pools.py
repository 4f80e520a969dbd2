"""Pools of a program, and pools beyond prefill and decode: limits in which they are two pools, and costs."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from exhaustive import fewest_gpus, most_rate
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.serving.candidates import prefill_candidates
from disagg_sim.serving.integer_program import Choices
from disagg_sim.serving.pairing import best_counts, best_counts_of_pools
from disagg_sim.serving.points import THROUGHPUT
from disagg_sim.serving.pool_frontier import pools_front
from disagg_sim.serving.pool_program import Goal, MatchOptions, fill_pools
from disagg_sim.techniques.encode.physics import EncodeStep
from disagg_sim.techniques.split.search import split_grid

WIDE = [Sharding(dp_attn=n, ep=n) for n in (8, 16)]


@pytest.fixture(scope="module")
def kimi():
    return ds.setup("kimi_k2_5", "gb200_nvl72", "nvfp4_fp8kv", profile="ideal")


@pytest.fixture(scope="module")
def grids(kimi):
    lengths = ds.lengths(8192, 512)
    return ds.prefill_grid(kimi, WIDE, lengths), ds.decode_grid(kimi, WIDE, lengths)


@pytest.fixture(scope="module")
def split(kimi):
    return ds.split_grid(kimi, ds.lengths(8192, 512), max_gpus=24)


def test_no_images_to_encode_leave_two_pools(kimi, grids):
    """An encode pool whose images all lie in its cache but one in a million takes one GPU and no time."""
    step = ds.encode_step(kimi, images=1, height=28, width=28, cached=1 - 1e-6)
    three = ds.plan_pools([step, *grids], ttl_limit=0.03, gpu_budget=65)
    two = ds.plan_pools(grids, ttl_limit=0.03, gpu_budget=64)
    assert three.gpus == {"encode": 1, **two.gpus}
    assert three.request_rate == two.request_rate
    assert three.ftl_s == pytest.approx(two.ftl_s, abs=1e-3)


def test_encoding_takes_its_time_of_the_first_token(kimi, grids):
    """The prefill configuration has what the limit leaves; a limit below encoding alone is refused with the best."""
    step = ds.encode_step(kimi, images=2, height=1120, width=1120)
    plan = ds.plan_pools([step, *grids], ftl_limit=2.0, gpu_budget=100)
    assert step.latency < plan.ftl_s <= 2.0
    pool = next(count for member, count in plan.members if isinstance(member, EncodeStep))
    assert pool == plan.gpus["encode"]
    assert pool * step.request_rate >= plan.request_rate * (1 - 1e-9) > (pool - 1) * step.request_rate
    assert ds.plan_pools([step, *grids], ftl_limit=step.latency, gpu_budget=100).binds == "ftl"


def test_feed_forward_gpus_may_be_cheaper_ones(kimi, grids):
    """The cost counts every GPU at the price of its own system."""
    cheap = replace(kimi, system=replace(kimi.system, name="cheap"))
    lengths = ds.lengths(8192, 512)
    grid = ds.split_grid(kimi, lengths, ffn=cheap, max_gpus=24)
    prices = {"gb200_nvl72": 4.0, "cheap": 1.0}
    plan = ds.plan_pools([grids[0], grid], ttl_limit=0.05, required_rate=50.0, per=prices)
    dear = 4.0 * (plan.gpus["prefill"] + plan.gpus["attention"])
    assert plan.cost == pytest.approx(dear + 1.0 * plan.gpus["ffn"])
    alike = ds.plan_pools([grids[0], grid], ttl_limit=0.05, required_rate=50.0, per={"gb200_nvl72": 4.0, "cheap": 4.0})
    assert alike.cost == pytest.approx(4.0 * alike.total_gpus)
    assert plan.cost <= dear + 4.0 * plan.gpus["ffn"]


def test_a_dense_model_splits_into_groups_of_tensor_parallel_ranks():
    at = ds.setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")
    grid = ds.split_grid(at, ds.lengths(4096, 512), max_gpus=16, microbatches=(1, 2))
    assert (grid.splits.ffn.tp_attn * grid.splits.ffn.dp_attn == grid.ffn_gpus).all()
    assert (grid.gpus <= 16).all()
    assert grid.feasible.any()
    assert np.isfinite(grid.latency).all()


def test_faults_name_what_is_missing(kimi, grids, split):
    prefill, decode = grids
    large = ds.encode_step(kimi, images=6, height=1120, width=1120)
    for pools, said in (
        ([prefill], "no decode pool; give a decode grid or a split grid"),
        ([decode], "no prefill pool"),
        ([large, *grids], "9600 tokens, more than its prompt of 8192"),
    ):
        with pytest.raises(InputError, match=said):
            ds.plan_pools(pools, gpu_budget=64)
    with pytest.raises(InputError, match="isl"):
        ds.plan_pools([ds.prefill_grid(kimi, WIDE, ds.lengths(4096, 512)), split], gpu_budget=64)
    llama = ds.setup("llama_3_1_8b", "gb200_nvl72", "nvfp4_fp8kv", profile="ideal")
    with pytest.raises(InputError, match="differ in model"):
        ds.split_grid(kimi, ds.lengths(4096, 512), ffn=llama)


def test_refusals_name_the_value_that_would_do(kimi, grids, split):
    """Of split instances: the memory of the fuller half, the least step, the least bandwidth of any configuration."""
    prefill, _ = grids
    small = ds.split_grid(kimi, ds.lengths(8192, 512), max_gpus=4)
    found = ds.plan_pools([prefill, small], gpu_budget=64)
    assert (found.binds, found.nearest) == ("memory", np.maximum(small.attention_bytes, small.ffn_bytes).min())
    assert f"lacks {(found.nearest - kimi.memory_limit) / 1e9:.3g} GB per GPU" in found.message
    found = ds.plan_pools([prefill, split], ttl_limit=1e-6, gpu_budget=64)
    assert (found.binds, found.nearest) == ("ttl", split.latency[split.feasible].min())
    limit = 1.01 * found.nearest
    moved = split.request_rate * split.kv_bytes_per_request / split.unique_gpus[:, None]
    least = moved[split.feasible & (split.latency <= limit)].min()
    tight = MatchOptions(kv_link_limit=0.99 * least)
    found = ds.plan_pools([prefill, split], ttl_limit=limit, gpu_budget=64, options=tight)
    assert (found.binds, found.nearest) == ("kv_link", pytest.approx(least))


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


pool = st.tuples(st.integers(1, 6), st.floats(0.1, 5))


def value_of(counts, rates, gpus):
    return min(n * r for n, r in zip(counts, rates, strict=True)) / sum(
        n * g for n, g in zip(counts, gpus, strict=True)
    )


@settings(max_examples=60)
@given(
    st.lists(st.tuples(pool, st.just(1.0) | st.floats(0.5, 9)), min_size=2, max_size=4),
    st.integers(2, 13),
    st.booleans(),
)
def test_no_counts_within_the_cap_serve_more_for_a_cost(priced, cap, alike):
    """GPUs of each pool have a price, or count alike; the cap counts GPUs, and of equal counts the fewest are taken."""
    pools, prices = zip(*priced, strict=True)
    gpus, rates = zip(*pools, strict=True)
    columns = [[np.array([float(value)]) for value in values] for values in (rates, gpus, prices)]
    counts = [int(n[0]) for n in best_counts_of_pools(*columns[:2], cap, None if alike else columns[2])]
    paid = gpus if alike else [size * price for size, price in zip(gpus, prices, strict=True)]
    every = {
        tried: value_of(tried, rates, paid)
        for tried in product(*(range(1, cap // g + 1) for g in gpus))
        if np.dot(tried, gpus) <= cap
    }
    if not every:
        assert counts == [0] * len(pools)
        return
    best = max(every.values())
    assert value_of(counts, rates, paid) == pytest.approx(best, rel=1e-9)
    if alike:
        fewest = min(np.dot(tried, gpus) for tried, value in every.items() if value >= best * (1 - 1e-12))
        assert np.dot(counts, gpus) == fewest


@settings(max_examples=60)
@given(pool, st.lists(pool, min_size=1, max_size=6), st.integers(12, 200))
def test_two_pools_have_the_rate_per_gpu_of_the_walk_down_the_tree(prefill, decode, cap):
    gpus, rate = (np.array(values, dtype=float) for values in zip(*decode, strict=True))
    walked = best_counts(prefill[1], prefill[0], rate, gpus, cap)
    ones = np.ones(rate.size)
    tried = best_counts_of_pools([prefill[1] * ones, rate], [prefill[0] * ones, gpus], cap)
    for row in range(rate.size):
        sides = (prefill[1], rate[row]), (prefill[0], gpus[row])
        one, other = ([float(n[row]) for n in counts] for counts in (walked, tried))
        assert value_of(other, *sides) == pytest.approx(value_of(one, *sides), rel=1e-9)


@pytest.fixture(scope="module")
def qwen():
    at, lengths = ds.setup("qwen3_5_397b_a17b", "gb200_nvl72", "nvfp4_fp8kv"), ds.lengths(8192, 512)
    mappings = ds.enumerate_mappings(at, max_gpus=8)
    return at, lengths, ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)


def test_a_frontier_without_further_pools_is_that_of_two(qwen):
    _, _, prefill, decode = qwen
    front = pools_front(prefill_candidates(prefill, ftl_limit=10.0), [decode], gpu_cap=144)
    two = ds.pareto_front(ds.disaggregated(prefill, decode, ftl_limit=10.0, gpu_cap=144))
    assert front[THROUGHPUT].to_numpy() == pytest.approx(two[THROUGHPUT].to_numpy(), rel=1e-9)
    assert front["ttl_s"].to_numpy() == pytest.approx(two["ttl_s"].to_numpy())
    for phase in ("prefill", "decode"):
        ranks = front[[f"{phase}_{degree}" for degree in ("tp_attn", "dp_attn", "pp")]].prod(axis=1)
        assert (front[f"{phase}_instances"] * ranks == front[f"{phase}_gpus"]).all()
    assert (front[["encode_gpus", "attention_gpus", "ffn_gpus"]] == 0).all(axis=None)


def test_every_row_keeps_up_with_its_rate_within_the_cap(qwen):
    at, lengths, prefill, decode = qwen
    step = ds.encode_step(at, images=2, height=1120, width=1120)
    candidates = prefill_candidates(prefill, ftl_limit=10.0 - step.latency)
    grids = [decode, split_grid(at, lengths, max_gpus=16)]
    front = pools_front(candidates, grids, encode=step, ttl_limit=0.1, gpu_cap=144)
    gpus = front[["encode_gpus", "prefill_gpus", "decode_gpus", "attention_gpus", "ffn_gpus"]]
    assert (gpus.sum(axis=1) == front["total_gpus"]).all()
    assert (front["total_gpus"] <= 144).all()
    assert (front["encode_gpus"] * step.request_rate >= front["request_rate_per_s"] * (1 - 1e-9)).all()
    assert (front["ftl_s"] <= 10.0).all()
    assert ((front["decode_gpus"] > 0) != (front["attention_gpus"] > 0)).all()
    alone = pools_front(candidates, grids[:1], encode=step, ttl_limit=0.1, gpu_cap=144)
    assert front[THROUGHPUT].max() >= alone[THROUGHPUT].max()
