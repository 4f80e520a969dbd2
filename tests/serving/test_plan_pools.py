"""Pools beyond prefill and decode: limits in which they are two pools, and what they cost."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.serving.pool_program import MatchOptions
from disagg_sim.techniques.encode.physics import EncodeStep

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
