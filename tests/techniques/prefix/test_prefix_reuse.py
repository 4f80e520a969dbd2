"""Prefix reuse in the serving modes, rows that are timed again, and what a plan says of its tiers."""

import math
from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.facts.hardware import KvTier
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.physics.cache_tiers import break_even_bandwidth
from disagg_sim.techniques.prefix.plan import tier_uses, tiers_of_designs

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


def test_the_slowest_of_unlike_ranks_computes_again_what_a_slow_tier_holds():
    """Through a link of 10 kB/s all ranks take as long as without a cache, through one of 1 PB/s as with it in HBM.
    At 1.8 GB/s two ranks compute again, and four do not."""
    four, two = ([ds.Sharding(dp_attn=ranks, ep=ranks)] for ranks in (4, 2))
    uneven, tiered = {"rank_imbalance": "random"}, {"cached": of_tier(ssd=1.0)}

    def first(bandwidth, table=four, **cached):
        plain = ds.load_system("h200_sxm")
        system = replace(plain, kv_tiers={"ssd": KvTier(bandwidth=bandwidth, latency_s=0.0)})
        law = ds.lengths("log_normal_4096_512", **uneven, **cached)
        grid = ds.prefill_grid(ds.setup("qwen3_30b_a3b", system, "fp8"), table, law, batch=[4, 16, 64])
        return np.stack([grid.latency, grid.request_rate])

    whole, held = first(1e15), first(1e15, cached=0.9)
    np.testing.assert_allclose(first(1e4, **tiered), whole, rtol=1e-9)
    np.testing.assert_allclose(first(1e15, **tiered), held, rtol=1e-4)
    assert (held[0] < 0.5 * whole[0]).all()
    each = [first(1.8e9, table, **tiered) for table in (four, two)]
    np.testing.assert_allclose(first(1.8e9, four + two, **tiered), np.concatenate(each, axis=1), rtol=1e-12)
    assert (each[0][0] < 0.8 * whole[0]).all()
    np.testing.assert_allclose(each[1], first(1e4, two, **tiered), rtol=1e-12)


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


TIERS = (("dram", 0.25), ("hbm", 0.5), ("remote", 0.25))


def planned(tiers, **options):
    lengths = ds.lengths(8192, 256, cached=Reuse(share=ConstantShare(share=0.75), tiers=tiers))
    return ds.plan("llama_3_1_8b", "h200_sxm", lengths, rate=20, options=ds.PlanOptions(**options))


@pytest.fixture(scope="module")
def plan():
    return planned(TIERS)


def test_what_the_tiers_have_is_what_is_cached(plan):
    """Three quarters of 8,192 tokens are whole blocks of 16."""
    uses = tier_uses(plan.best)
    assert sum(each.share for each in uses) == pytest.approx(0.75)
    assert {each.name: each.share for each in uses}["hbm"] == pytest.approx(0.375)


def test_times_and_rooms_by_hand(plan):
    """65,536 B a token in fp8: 6,144 tokens at 50 GB/s and 20 us; 250 GB of each GPU hold 3.8 million tokens."""
    uses = {each.name: each for each in tier_uses(plan.best)}
    gpus = int(plan.best.pools[0].mapping.gpus)
    dram = uses["dram"]
    assert dram.load == pytest.approx(20e-6 + 6144 * 65_536 / gpus / 50e9)
    assert dram.holds == pytest.approx(gpus * 250e9 / 65_536)
    assert uses["hbm"].load == 0.0
    assert math.isinf(uses["remote"].holds)  # no capacity is stated
    assert all(each.loads for each in uses.values())


def test_hbm_that_is_set_aside_is_the_room_of_its_tier():
    best = planned((("hbm", 1.0),), set_aside=10e9).best
    (hbm,) = tier_uses(best)
    assert hbm.holds == pytest.approx(int(best.pools[0].mapping.gpus) * 10e9 / 65_536)


def test_a_shared_tier_has_the_room_of_all_instances_that_prefill():
    """1 TB for each, whose tokens have 65,536 B; those that decode alone store nothing."""
    plain = ds.load_system("h200_sxm")
    lengths = ds.lengths(8192, 256, cached=Reuse(share=ConstantShare(share=0.75), tiers=(("remote", 1.0),)))
    remote = replace(plain.kv_tiers["remote"], capacity=1e12)
    at = ds.setup("llama_3_1_8b", replace(plain, kv_tiers={"remote": remote}), "fp8")
    grids = (make(at, ds.Sharding(), lengths, batch=[1]) for make in (ds.prefill_grid, ds.decode_grid))
    points = ds.disaggregated(*grids)
    (one,) = designs_of(points, ds.Origin(lengths=lengths, systems={"h200_sxm": at.system}))
    assert one.prefill_instances[0] != one.instances[0]
    (told,) = tiers_of_designs(one)
    assert told.holds == pytest.approx(int(one.prefill_instances[0]) * 1e12 / 65_536)
