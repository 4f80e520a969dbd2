"""Loads of pasts below HBM in plans: queues of links by hand and against simulation."""

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.physics.cache_tiers import load_time
from disagg_sim.physics.kv_transfer import KvLayout, KvLoad, hand_over
from disagg_sim.planning.choices import decode_choices, prefill_choices
from disagg_sim.planning.kv_links import cache_of, linked, transfer_between
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.loads import Loads, loaded
from disagg_sim.planning.prove import prove
from disagg_sim.serving.candidates import kv_rate_per_gpu, prefill_candidates
from disagg_sim.simulation.kv_link import Wire

AT = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")


def cached(*tiers, isl=8192):
    return ds.lengths(isl, 256, cached=Reuse(share=ConstantShare(share=0.9), tiers=tiers))


def test_a_load_takes_the_link_for_its_bytes_and_the_latency_on_top():
    law = cached(("ssd", 0.5), ("hbm", 0.5)).prompt_nodes()
    loads = Loads.of(AT, Sharding(), law)
    time = load_time(AT, Sharding(), batch=1, past=float(law.past[0]), tier=AT.system.tier("ssd"))
    by_tier = dict(zip(loads.tiers, (loads.link + loads.latency).tolist(), strict=True))
    assert by_tier == {"ssd": pytest.approx(float(time)), "hbm": 0.0}
    assert Loads.of(AT, Sharding(), cached(("hbm", 1.0)).prompt_nodes()) is None


@pytest.mark.parametrize(("rate", "ranks"), [(0.3, 1), (0.8, 1), (3.0, 4)])
def test_equal_loads_wait_as_in_a_queue_of_links(rate, ranks):
    """M/D/c by hand: with one link the mean wait is rho/(2(1-rho)), in the formula that of M/M/c over two with more."""
    ones = np.ones(1)
    loads = Loads(link=ones, latency=0.0 * ones, tiers=("ssd",), weights=ones, ranks=ranks)
    found = loads.delays(rate, 1.0)
    generator = np.random.default_rng(3)
    arrivals, free, waited = np.cumsum(generator.exponential(1.0 / rate, 40_000)), [0.0] * ranks, []
    for at in arrivals.tolist():
        first = free.index(min(free))
        begin = max(at, free[first])
        free[first] = begin + 1.0
        waited.append(begin - at)
    assert float(found.delay @ found.weight) - 1.0 == pytest.approx(np.mean(waited), rel=0.12)
    late = float(found.weight[found.delay > 1.0 + 0.5].sum())
    assert late == pytest.approx(np.mean(np.array(waited) > 0.5), abs=0.08)


def test_a_link_that_cannot_keep_up_never_serves():
    ones = np.ones(1)
    loads = Loads(link=ones, latency=0.0 * ones, tiers=("ssd",), weights=ones, ranks=1)
    assert np.isinf(loads.delays(1.0, 1.0).delay[1:]).all()
    assert loaded(None, ones, 1.0, 1.0).delay.tolist() == [0.0]


def test_planned_ttft_has_the_queue_of_its_links():
    """Half of the pasts in SSD, 97 ms each over a link that is taken for 39 % of the time."""
    plan = ds.plan("llama_3_1_8b", "h100_sxm", cached(("hbm", 0.5), ("ssd", 0.5)), ttft="1 s", tpot="40 ms", rate=8)
    assert [pool.instances for pool in plan.best.pools] == [1]
    run = prove(plan, plan.best, adapt=False).planned
    for name in ("p50", "p90", "p99"):
        assert plan.best.ttft[name] == pytest.approx(run.ttft[name], rel=0.1)


def test_what_goes_to_a_shared_tier_leaves_by_the_port_of_hand_overs():
    """Llama-3.1-8B: 8,192 tokens, 90 % in blocks of 16 of them cached, so 832 are new, of 65,536 B each."""
    mapping, law = Sharding(tp_attn=2, tp_ffn=2), cached(("remote", 1.0))
    grids = [ds.prefill_grid(AT, mapping, each, batch=[1]) for each in (law, cached(("dram", 1.0)))]
    decode = ds.decode_grid(AT, mapping, law, batch=[8])
    stored, kept = (kv_rate_per_gpu(each) * 2 / each.request_rate for each in grids)
    assert kept.item() == pytest.approx(8192 * 65_536)
    assert stored.item() == pytest.approx((8192 + 832) * 65_536)
    assert (kv_rate_per_gpu(decode) * 2 / decode.request_rate).item() == pytest.approx(8192 * 65_536)
    work = Demand(lengths=law, ttft=Limit(2.0), tpot=Limit(0.05))
    sender, taker = prefill_choices(grids[0], work), decode_choices(decode, work)
    for inside, bytes_out in ((False, (8192 + 832) * 65_536), (True, 8192 * 65_536)):
        wire = Wire(1e9, 0.0, 0.0, inside)
        (sends,), (takes,) = linked(sender[:1], taker[:1], cache_of(decode, grids[0]), wire)
        assert 2e9 / sends.link_rate == pytest.approx(bytes_out)
        assert 2e9 / takes.link_rate == pytest.approx(8192 * 65_536)
        assert transfer_between(sends, takes) == pytest.approx(bytes_out / 2e9, rel=1e-6)


def test_a_limit_of_the_nic_counts_what_goes_to_a_shared_tier():
    """Of a GPU 1.1 times as much leaves as without: the limit that just admits one leaves the other out."""
    both = [ds.prefill_grid(AT, Sharding(), cached((name, 1.0)), batch=[1]) for name in ("remote", "dram")]
    limit = 1.01 * float(kv_rate_per_gpu(both[1]).item())
    admitted = [prefill_candidates(each, ftl_limit=10.0, nic_limit=limit).batch.size for each in both]
    assert admitted == [0, 1]


def test_a_hand_over_across_takes_longer_by_what_is_stored_meanwhile():
    loads = [KvLoad(100.0, 1e9, 8192.0, stored) for stored in (0.0, 5e8)]
    options = {"layout": KvLayout(), "descriptor_s": 0.0, "threads": 1}

    def wire(load, path, *degrees):
        ends = (Sharding(tp_attn=each, tp_ffn=each) for each in degrees)
        return float(hand_over((AT, AT), *ends, load, path=path, **options).wire)

    assert wire(loads[1], "rail", 2, 2) == pytest.approx(1.5 * wire(loads[0], "rail", 2, 2))
    assert wire(loads[1], "domain", 2, 2) == wire(loads[0], "domain", 2, 2)  # NVLink; blocks leave by the NIC
    assert wire(loads[1], "rail", 2, 1) == wire(loads[0], "rail", 2, 1)  # the one that receives takes longest anyway
