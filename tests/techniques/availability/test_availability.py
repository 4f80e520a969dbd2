"""Instances that serve where parts fail, and spares: by hand, limits, and against simulated failures."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.errors import InputError
from disagg_sim.facts.load import list_specs, load_failures, load_system
from disagg_sim.planning.design import Availability
from disagg_sim.report.plan_facts import spares_rows
from disagg_sim.techniques.availability.law import Blast, Need, Spares, blast_of, expected_share, spares_for

DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0
LLAMA, H100, NVL72 = load_failures("llama_3_405b"), load_system("h100_sxm"), load_system("gb200_nvl72")


def alone(a, restart=1.0):
    """An instance that serves a share ``a`` of the time and shares nothing."""
    return Blast(own=(1 / a - 1) / restart, per_node=1, node=0.0, per_domain=1, domain=0.0, restart=restart)


def test_the_parts_of_the_published_failures_add_up_to_one_in_50677_gpu_hours():
    per_gpu = LLAMA.rate("gpu") + LLAMA.rate("link") + LLAMA.rate("node") / LLAMA.gpus_per_node
    assert 1 / per_gpu / HOUR == pytest.approx(50_677, rel=1e-4)
    assert LLAMA.rate("domain") == 0.0


@pytest.mark.parametrize(("gpus", "days"), [(64, 33), (72, 29)])
def test_mtbf_of_an_instance_by_hand(gpus, days):
    """50,677 h / n, all ranks of an EP group together."""
    assert blast_of(LLAMA, H100, gpus, links=True).mtbf / DAY == pytest.approx(days, abs=0.5)


def test_availability_of_32_gpus_with_15_minutes_by_hand():
    blast = blast_of(replace(LLAMA, restart=15 * MINUTE), H100, 32, links=True)
    assert Need(instances=1, cost=1.0, blast=blast).up(0) == pytest.approx(0.99984, abs=1e-5)


@pytest.mark.parametrize(("spares", "share"), [(0, 0.817), (1, 0.980), (2, 0.998)])
def test_ten_spot_instances_by_hand(spares, share):
    assert Need(instances=10, cost=1.0, blast=alone(0.98)).up(spares) == pytest.approx(share, abs=6e-4)


@settings(max_examples=40)
@given(st.integers(1, 30), st.floats(0.5, 0.999))
def test_instances_that_share_nothing_are_binomial(count, a):
    found = alone(a).serving(count)
    by_hand = [math.comb(count, k) * a**k * (1 - a) ** (count - k) for k in range(count + 1)]
    assert found == pytest.approx(by_hand, abs=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 9, 36]), st.floats(0, 0.2))
def test_the_mean_is_that_of_one_instance_whatever_is_shared(count, per_node, per_domain, failing):
    blast = Blast(
        own=failing, per_node=per_node, node=failing / 2, per_domain=per_domain, domain=failing / 3, restart=1.0
    )
    serving = blast.serving(count)
    one = 1 / (1 + failing) / (1 + failing / 2) / (1 + failing / 3)
    assert serving.sum() == pytest.approx(1.0)
    assert (np.arange(count + 1) * serving).sum() == pytest.approx(count * one)


def test_what_is_shared_makes_all_down_together_likelier():
    apart = Blast(own=0.1, per_node=1, node=0.0, per_domain=1, domain=0.0, restart=1.0)
    shared = Blast(own=0.0, per_node=8, node=0.1, per_domain=8, domain=0.0, restart=1.0)
    assert shared.serving(8)[0] == pytest.approx(0.1 / 1.1)
    assert apart.serving(8)[0] == pytest.approx((0.1 / 1.1) ** 8)


def test_links_count_where_an_instance_needs_them():
    near, far = (blast_of(LLAMA, NVL72, 64, links=links).rate for links in (False, True))
    assert far - near == pytest.approx(64 * LLAMA.rate("link"))
    assert blast_of(LLAMA, H100, 16).rate == blast_of(LLAMA, H100, 16, links=True).rate


def test_without_failures_nothing_is_spared():
    never = replace(LLAMA, gpu_mtbf=None, node_mtbf=None, link_mtbf=None)
    need = Need(instances=7, cost=1.0, blast=blast_of(never, H100, 8))
    found = spares_for([need], 0.999999)
    assert (found.counts, found.availability, found.capacity, found.mtbf) == ((0,), 1.0, 1.0, (math.inf,))
    at_once = replace(LLAMA, restart=0.0)
    assert spares_for([Need(instances=7, cost=1.0, blast=blast_of(at_once, H100, 8))], 0.999).counts == (0,)


def test_expected_capacity_lies_below_the_least_of_the_pools():
    pools = [(Need(instances=n, cost=1.0, blast=alone(0.9)), 0) for n in (3, 4)]
    alone_each = [expected_share([each]) for each in pools]
    assert alone_each == pytest.approx([0.9, 0.9])
    assert expected_share(pools) < min(alone_each)
    more = [(need, 2) for need, _ in pools]
    assert expected_share(more) > 0.99


@pytest.mark.parametrize("name", list_specs("failures"))
def test_every_figure_of_failures_has_a_source(name):
    spec = load_failures(name)
    assert spec.restart > 0
    assert any(spec.rate(part) for part in ("gpu", "node", "domain", "link"))


@pytest.fixture(scope="module")
def asked():
    return {"ttft": "1 s", "tpot": "20 ms", "rate": 200}


def test_a_plan_with_spares_is_the_plan_without_and_its_spares(asked):
    lengths, options = ds.lengths(2048, 256), ds.PlanOptions(availability=0.999999)
    plain = ds.plan("llama_3_1_8b", "h100_sxm", lengths, **asked)
    spared = ds.plan("llama_3_1_8b", "h100_sxm", lengths, **asked, options=options)
    assert plain.best.spares is None
    found = spared.best.spares
    assert found.availability >= 0.999999
    assert sum(found.counts) > 0
    extra = sum(n * int(pool.mapping.gpus) for n, pool in zip(found.counts, spared.best.pools, strict=True))
    assert spared.best.gpus == extra + sum(pool.instances * int(pool.mapping.gpus) for pool in spared.best.pools)
    assert spared.best.gpus >= plain.best.gpus
    assert all(pool.replicas.instances == pool.instances + pool.spares for pool in spared.best.pools)


def test_spares_fit_into_the_gpus_that_a_plan_has():
    """All eight stand on one node, which no spare on it can stand in for: six nines would be out of reach."""
    options = ds.PlanOptions(availability=0.99999)
    lengths, limits = ds.lengths(2048, 256), {"ttft": "1 s", "tpot": "20 ms"}
    spared = ds.plan("llama_3_1_8b", "h100_sxm", lengths, **limits, gpus=8, options=options).best
    plain = ds.plan("llama_3_1_8b", "h100_sxm", lengths, **limits, gpus=8).best
    assert spared.gpus <= 8
    assert sum(pool.spares for pool in spared.pools) > 0
    assert spared.rate < plain.rate


def test_one_failure_stops_all_that_share_a_node():
    """Eight instances of a GPU share a node of the published failures, four of 16 a domain of 72 that may fail."""
    assert blast_of(LLAMA, H100, 1).most_down == 8
    assert blast_of(LLAMA, H100, 16).most_down == 1
    assert blast_of(LLAMA, NVL72, 16).most_down == 1  # no failures of racks are published
    racks = replace(LLAMA, domain_mtbf=1e6)
    assert blast_of(racks, NVL72, 16).most_down == 4
    few = Need(instances=2, cost=1.0, blast=blast_of(racks, NVL72, 16))
    assert spares_for([few], 0.5).together == (2,)


def test_links_of_a_pool_fail_where_its_deployment_leaves_the_nvlink_domain():
    """Two instances fit into an NVLink domain of 8; a pool that fills it sends caches over NICs, which fail, too."""
    best = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), rate=40).best
    (one,) = {pool.setup.system.nvlink_domain for pool in best.pools}
    pool = replace(best.pools[0], instances=1, spares=0)
    gpus = int(pool.mapping.gpus)
    small, large = (replace(best, pools=(pool, replace(pool, instances=n))) for n in (1, one // gpus))
    assert small.gpus <= one < large.gpus
    asked = Availability(target=0.9, failing=LLAMA)
    for design, links in ((small, False), (large, True)):
        assert asked.need(design, pool, {"h100_sxm": 1.0}).blast == blast_of(LLAMA, H100, gpus, links=links)
    assert blast_of(LLAMA, H100, gpus, links=True) != blast_of(LLAMA, H100, gpus)


def test_faults_name_the_value():
    with pytest.raises(InputError, match="availability 1.0 is out of range".replace(".", r"\.")):
        Availability(target=1.0, failing=LLAMA)
    with pytest.raises(InputError, match="out of reach"):
        spares_for(
            [Need(instances=1, cost=1.0, blast=Blast(own=0, per_node=1, node=0, per_domain=9999, domain=1, restart=1))],
            0.9,
        )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.3, "30 %"),
        (0.817, "82 %"),
        (0.99, "99 %"),
        (0.99846, "99.8 %"),
        (0.9999515, "99.995 %"),
        (0.9999999557, "more than 99.999 %"),
        (1.0, "more than 99.999 %"),
    ],
)
def test_shares_of_time_are_told_to_what_failure_rates_can_carry(value, text):
    spares = Spares(
        target=0.2, counts=(1,), availability=value, without=value, capacity=value, mtbf=(1e6,), together=(1,)
    )
    (_, told, _), (_, stops, _) = spares_rows(spares, [("decode", 1)], "mine")
    assert told == f"{text} of the time at full capacity with 1 decode spare, {text} without"
    assert stops.endswith(f"expected goodput {text}")
