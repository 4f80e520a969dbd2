"""What the GPUs of a plan draw, and plans of fewest joules per output token."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

import disagg_sim as ds
from disagg_sim.domain import ServingMode
from disagg_sim.facts.load import load_power
from disagg_sim.physics import power
from disagg_sim.planning.counts import least
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.energy import added_up, drawn

LENGTHS, RATE = ds.lengths(4096, 512), 20.0


def planned(objective="joule", **asked):
    options = ds.PlanOptions(objective=objective, **asked.pop("options", {}))
    return ds.plan("llama_3_1_70b", "h100_sxm", LENGTHS, **(asked or {"rate": RATE}), options=options)


@pytest.fixture(scope="module")
def plan():
    return planned()


def pools_of(role, choices):
    """Every configuration with the fewest instances that hold, however many GPUs these have."""
    for choice in choices:
        instances = least(choice, RATE, 10_000) if choice.most > 0 else None
        if instances:
            yield PlannedPool(role=role, choice=choice, instances=instances, rate=RATE)


def designs_of(case):
    """Every deployment of one pool or two."""
    alone = [(pool,) for pool in pools_of("colocated", case.colocated)]
    inside, across = (
        list(product(pools_of("prefill", senders), pools_of("decode", takers)))
        for senders, takers in (case.inside, case.across)
    )
    near = [pair for pair in inside if sum(pool.gpus for pool in pair) <= case.at.system.nvlink_domain]
    for pools in (*alone, *near, *across):
        mode = ServingMode.COLOCATED if len(pools) == 1 else ServingMode.DISAGGREGATED
        yield Design(mode=mode, pools=pools, rate=RATE, cost=0.0, work=case.work)


def test_no_deployment_of_any_size_draws_less(plan):
    """Energies of pools add up, so one design a pool is timed alone, not each of the thousands of pairs."""
    watts = {}

    def of(design):
        for pool in design.pools:
            if pool not in watts:
                watts[pool] = drawn(replace(design, pools=(pool,))).watts
        return sum(watts[pool] for pool in design.pools)

    modes = {}
    for design in designs_of(plan.cases[0]):
        modes[design.mode] = min(modes.get(design.mode, math.inf), of(design))
    assert plan.best.cost == pytest.approx(modes.pop(plan.best.mode))
    assert plan.other.cost == pytest.approx(modes.popitem()[1])
    assert plan.gain == pytest.approx(plan.other.cost / plan.best.cost)


def test_the_fewest_gpus_of_two_systems_are_counted_not_weighed_by_their_power():
    """They are three B200, not five H100."""
    asked = "llama_3_1_8b", "h100_sxm,b200_sxm", ds.lengths(2048, 256)
    by_joule, by_gpus = (
        ds.plan(*asked, rate=90.0, options=ds.PlanOptions(objective=objective)) for objective in ("joule", "gpus")
    )
    assert by_joule.fewest.gpus == by_gpus.best.gpus


def test_a_pair_of_pools_may_take_all_gpus_that_are_given():
    plan = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), gpus=2, options=ds.PlanOptions(objective="joule"))
    pairs = [each for each in (plan.best, plan.other) if each and each.mode == ServingMode.DISAGGREGATED]
    assert [each.gpus for each in pairs] == [2]


def test_spare_instances_cost_what_waiting_gpus_draw():
    best = planned(options={"availability": 0.999999}).best
    assert any(pool.spares for pool in best.pools)
    plain = replace(best, pools=tuple(replace(pool, spares=0) for pool in best.pools))
    idle = (best.gpus - plain.gpus) * 700 * load_power("h100_sxm").idle
    assert best.cost == pytest.approx(drawn(plain).watts + idle)


SHORT = ds.lengths(2048, 256)


@pytest.fixture(scope="module")
def sixty():
    return ds.plan("llama_3_1_8b", "h200_sxm", SHORT, tpot="20 ms", rate=40)


@pytest.fixture
def designs(sixty):
    assert sixty.best is not None
    assert sixty.other is not None
    return sixty.best, sixty.other


def test_gpus_whose_kernels_draw_nothing_draw_idle_power(designs, monkeypatch):
    spec = load_power("h200_sxm")
    nothing = {"base": 0.0, "compute": 0.0, "memory": 0.0}
    quiet = replace(spec, laws=tuple(replace(law, **nothing) for law in spec.laws))
    monkeypatch.setattr(power, "load_power", lambda _: quiet)
    for design in designs:
        assert drawn(design).watts == pytest.approx(design.gpus * 700 * spec.idle)


def test_a_prompt_keeps_one_attention_rank_at_work_and_not_all():
    """Eight ranks compute a prompt each at once: no GPU draws more than its TDP, however many ranks there are."""
    ranks = {"colocated": ds.Replicas(mapping=ds.Sharding(dp_attn=8, ep=8), instances=4)}
    design = ds.evaluate("deepseek_r1", "h200_sxm", ranks, ds.lengths(1024, 1024), rate=20).design
    assert drawn(design).watts < design.gpus * design.pools[0].setup.system.tdp


def test_pools_on_several_nodes_need_the_network_between_them():
    """Two pools of a node each are 16 GPUs of one deployment, which draws for its network as one pool of 16 does."""
    at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    idle = power.power_at(at).idle
    one, two = added_up([(at, 16, 16 * idle)]), added_up([(at, 8, 8 * idle)] * 2)
    assert two == one
    assert two.facility > 2 * added_up([(at, 8, 8 * idle)]).facility
