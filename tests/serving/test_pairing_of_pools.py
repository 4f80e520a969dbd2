"""Counts of three and more pools by enumeration: against every count by brute force, two pools, and the program."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.serving.candidates import prefill_candidates
from disagg_sim.serving.pairing import best_counts, best_counts_of_pools
from disagg_sim.serving.points import THROUGHPUT
from disagg_sim.serving.pool_frontier import pools_front
from disagg_sim.techniques.split.search import split_grid

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
