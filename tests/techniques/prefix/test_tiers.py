"""What a plan says of the tiers that its prompts lie in."""

import math
from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.certainty.rows import designs_of
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.techniques.prefix.plan import tier_uses, tiers_of_designs

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
