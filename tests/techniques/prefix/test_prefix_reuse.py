"""Prefix reuse in the serving modes: rates, memory, hand-over, and rows that are timed again."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.certainty.rows import Origin
from disagg_sim.facts.hardware import KvTier
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.physics.cache_tiers import break_even_bandwidth

MAPPINGS = [ds.Sharding(tp_attn=8, tp_ffn=8), ds.Sharding(tp_attn=4, tp_ffn=4, pp=2)]


@pytest.fixture(scope="module")
def at():
    return ds.setup("llama_3_1_70b", "h200_sxm", "fp8")


def grids(at, found):
    prefill = ds.prefill_grid(at, MAPPINGS, found, batch=[1, 4], chunk_tokens=[256])
    return prefill, ds.decode_grid(at, MAPPINGS, found, batch=[16, 64])


def test_what_decode_holds_takes_no_link(at):
    reuse = Reuse(share=ConstantShare(share=0.9), in_decode=1.0)
    all_sent, rest_sent = (grids(at, ds.lengths(32_768, 512, cached=each))[1] for each in (0.9, reuse))
    assert rest_sent.kv_bytes_per_request / all_sent.kv_bytes_per_request == pytest.approx(3280 / 32_768)
    assert (rest_sent.latency == all_sent.latency).all()


def test_states_are_taken_up_at_checkpoints():
    """Qwen3-Next saves recurrent states at the ends of blocks of the cache; Llama goes on at any of its blocks."""
    hybrid = ds.setup("qwen3_next_80b_a3b", "h200_sxm", "fp8")
    found = ds.lengths(32_768, 512, cached=0.9)
    grid = ds.prefill_grid(hybrid, ds.Sharding(tp_attn=2, ep=2), found, batch=[1])
    assert 0 < grid.lengths.cached.mean_past < found.cached.mean_past


EIGHT = ds.Sharding(tp_attn=8, tp_ffn=8)


def of_tier(share=0.9, **tiers):
    return Reuse(share=ConstantShare(share=share), tiers=tuple(tiers.items()))


def test_a_past_in_dram_is_loaded_before_the_pass(at):
    """29,488 tokens of 163,840 B are 4.83 GB; each of 8 GPUs loads an eighth at 50 GB/s, 12 ms."""
    grids = [
        ds.prefill_grid(at, EIGHT, ds.lengths(32_768, 512, cached=reuse), batch=[1, 2])
        for reuse in (of_tier(), of_tier(hbm=1.0), of_tier(dram=1.0), of_tier(hbm=0.5, dram=0.5))
    ]
    plain, hbm, dram, mixed = (grid.latency[0] for grid in grids)
    load = 20e-6 + np.array([1, 2]) * 29_488 * 163_840 / 8 / 50e9
    assert (plain == hbm).all()
    assert dram - plain == pytest.approx(load, rel=1e-9)
    assert mixed - plain == pytest.approx(load / 2, rel=1e-9)
    assert (grids[2].request_rate == grids[0].request_rate).all()  # the next pasts are loaded during a pass


def test_a_slow_tier_feeds_no_more_than_it_loads(at):
    """At a tenth of a GB/s prompts are computed again; between, the rate is that of the link."""
    slow = ds.setup("llama_3_1_70b", replace(at.system, kv_tiers={"ssd": KvTier(bandwidth=4e9, latency_s=0.0)}), "fp8")
    slower = ds.setup(
        "llama_3_1_70b", replace(at.system, kv_tiers={"ssd": KvTier(bandwidth=1e8, latency_s=0.0)}), "fp8"
    )
    found, cold = ds.lengths(32_768, 512, cached=of_tier(ssd=1.0)), ds.lengths(32_768, 512)
    fed, again, whole = (
        ds.prefill_grid(each, EIGHT, law, batch=[1]) for each, law in ((slow, found), (slower, found), (at, cold))
    )
    hit = ds.prefill_grid(at, EIGHT, ds.lengths(32_768, 512, cached=0.9), batch=[1])
    assert fed.latency[0, 0] < whole.latency[0, 0]
    assert fed.request_rate[0, 0] == pytest.approx(
        min(hit.request_rate[0, 0], 1 / (29_488 * 163_840 / 8 / 4e9)), rel=1e-6
    )
    assert (again.latency == whole.latency).all()
    assert (again.request_rate == whole.request_rate).all()


def test_loading_wins_above_the_break_even_bandwidth(at):
    """R* of the instance falls with the prefix, as attention is quadratic in it."""
    rates = []
    for past in (8192, 65_536):
        whole = ds.prefill_grid(at, EIGHT, ds.lengths(past, 64), batch=[1]).latency[0, 0]
        rates.append(break_even_bandwidth(at, past, whole))
    assert rates[1] < rates[0]
    assert 1e9 < rates[1] < 8 * 5e9  # a drive a GPU is enough, one link of PCIe by far


def test_the_load_is_a_part_of_the_first_token(at):
    found = ds.lengths(16_384, 512, cached=of_tier(ssd=1.0))
    points = ds.disaggregated(*grids(at, found)).head(1)
    parts = ds.breakdown(points, origin=Origin(lengths=found)).latency(points.index[0], "ftl")
    assert parts["seconds"].sum() == pytest.approx(points["ftl_s"].iloc[0], rel=1e-9)
    assert "load of the past" in set(parts["operator"])
