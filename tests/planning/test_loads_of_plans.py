"""Loads of pasts below HBM in plans: queues of links by hand and against simulation."""

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import Mapping
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.physics.kv_tiers import load_time, tier_of
from disagg_sim.planning.loads import Loads, loaded
from disagg_sim.planning.prove import prove

AT = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")


def cached(*tiers, isl=8192):
    return ds.lengths(isl, 256, cached=Reuse(share=ConstantShare(share=0.9), tiers=tiers))


def test_a_load_takes_the_link_for_its_bytes_and_the_latency_on_top():
    law = cached(("ssd", 0.5), ("hbm", 0.5)).prompt_nodes()
    loads = Loads.of(AT, Mapping(), law)
    time = load_time(AT, Mapping(), batch=1, past=float(law.past[0]), tier=tier_of(AT.system, "ssd"))
    by_tier = dict(zip(loads.tiers, (loads.link + loads.latency).tolist(), strict=True))
    assert by_tier == {"ssd": pytest.approx(float(time)), "hbm": 0.0}
    assert Loads.of(AT, Mapping(), cached(("hbm", 1.0)).prompt_nodes()) is None


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
