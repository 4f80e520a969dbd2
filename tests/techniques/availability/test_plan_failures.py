"""Plans with spares are simulated with as many instances failed at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.planning.prove import prove
from disagg_sim.planning.question import PlanOptions

ASKED = {"ttft": "1 s", "tpot": "20 ms", "rate": 40}


@pytest.fixture(scope="module")
def plan():
    options = PlanOptions(availability=0.999999)
    return ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), **ASKED, options=options)


@pytest.mark.parametrize("pools", [1, 2])
def test_the_limits_hold_while_all_spares_are_needed(plan, pools):
    """What serves then is what the load needs: TPOT is that of the run without spares, and no request is lost."""
    design = next(each for each in (plan.best, plan.other) if len(each.pools) == pools)
    proof = prove(plan, design, adapt=False)
    assert proof.failing.failed == tuple(pool.spares for pool in design.pools) == (8,) * pools
    assert proof.proven
    assert proof.failing.run.lost == 0
    assert proof.failing.run.tpot["p90"] == pytest.approx(proof.final.tpot["p90"], rel=0.1)


def test_requests_of_failed_instances_begin_again_and_are_told(plan):
    """Of co-located instances 8 of 11 fail, with that share of the 3 s x 40/s in flight, Poisson's spread aside."""
    proof = prove(plan, plan.best, adapt=False)
    (pool,) = plan.best.pools
    share = pool.spares / (pool.instances + pool.spares)
    in_flight = 40 * (proof.final.ttft["p50"] + 255 * proof.final.tpot["p50"])
    assert 0.3 * share * in_flight < proof.failing.moved < 1.2 * share * in_flight


def test_without_spares_nothing_fails(plan):
    bare = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), **ASKED)
    proof = prove(bare, adapt=False)
    assert proof.failing is None


def test_a_pool_that_was_sized_too_small_misses_with_its_spares_failed(plan):
    """A third of the instances that the load needs: neither alone nor with the spares away."""
    small = replace(plan.best, pools=(replace(plan.best.pools[0], instances=1),))
    proof = prove(plan, small, adapt=False)
    assert not proof.final.holds
    assert not proof.failing.run.holds
