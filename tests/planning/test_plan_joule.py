"""Plans of fewest joules per output token."""

import math
from dataclasses import replace
from itertools import product

import pytest

import disagg_sim as ds
from disagg_sim.domain import ServingMode
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_power
from disagg_sim.planning.counts import least
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.energy import drawn

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


def test_a_system_of_unknown_power_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr("disagg_sim.physics.power.load_power", lambda _: None)
    with pytest.raises(InputError, match="the power of 'h100_sxm' is not known: hw_specs/power/ has no file of it"):
        planned()
