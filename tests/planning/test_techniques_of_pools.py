"""Users, spares, least power and traces with encode, attention and feed-forward pools: by hand, and as simulated."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.planning.assurance import OwnTimes, assurance
from disagg_sim.planning.energy import drawn
from disagg_sim.planning.flips import flips
from disagg_sim.planning.prove import deployed, prove
from disagg_sim.planning.question import PlanOptions, Size
from disagg_sim.planning.replayed import policy_of, requests_of, run_options
from disagg_sim.report.plan import PlanExtras, plan_json, proof_lines
from disagg_sim.serving.pool_names import Images
from disagg_sim.techniques.availability.law import Blast

WHOLE, SPLIT = ("encode", "prefill", "decode"), ("encode", "prefill", "attention", "ffn")
MODEL, SYSTEM, LENGTHS = "qwen3_5_35b_a3b", "gb200_nvl72", ds.lengths(4096, 256)
GPU_MTBF, RESTART = 40 * 3600.0, 1800.0


def asked(pools, size, lengths=LENGTHS, options=PlanOptions(), ffn_system=None, system=SYSTEM, **limits):  # noqa: B008
    images = Images(images=2, height=1120, width=1120) if "encode" in pools else None
    options = replace(options, pools=pools, images=images, ffn_system=ffn_system, users=size.users)
    return ds.plan(MODEL, system, lengths, rate=size.rate, gpus=size.gpus, options=options, **limits)


@pytest.mark.parametrize("pools", [WHOLE, SPLIT])
def test_so_many_users_are_in_flight_in_a_simulation_at_the_planned_rate(pools):
    """Little's law over the whole request: encoding, prefill, hand-over and decode."""
    pytest.importorskip("numba")
    found = asked(pools, Size(users=200), ttft=1.0, tpot=0.03)
    design = found.best
    assert design.in_flight == pytest.approx(200, rel=1e-4)
    trace, begin = requests_of(found, design, 2)
    table = ds.simulate(deployed(design), trace, policy_of(design), options=run_options(design, None)).frame()
    table = table[table["arrival_s"] >= begin]
    assert design.rate * (table["finish_s"] - table["arrival_s"]).mean() == pytest.approx(200, rel=0.06)
    fewer = asked(pools, Size(users=100), ttft=1.0, tpot=0.03).best
    assert fewer.rate < design.rate
    assert fewer.gpus < design.gpus


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """GPUs alone fail: each takes its instance along, and instances fail independently."""
    path = tmp_path_factory.mktemp("failures") / "gpus.yaml"
    path.write_text(
        f"title: GPUs\ngpu_mtbf: {GPU_MTBF / 3600:g} h\nnode_mtbf: null\ngpus_per_node: 4\ndomain_mtbf: null\n"
        f"link_mtbf: null\nrestart: {RESTART / 60:g} min\nsources:\n"
        "  {gpu_mtbf: by hand, gpus_per_node: by hand, restart: by hand}\n"
    )
    return str(path)


def of_time(gpus, instances, spares):
    """Share of the time in which at least so many instances of ``gpus`` GPUs serve."""
    up, count = 1.0 / (1.0 + gpus * RESTART / GPU_MTBF), instances + spares
    return sum(math.comb(count, k) * up**k * (1 - up) ** (count - k) for k in range(instances, count + 1))


@pytest.mark.parametrize("pools", [WHOLE, SPLIT])
def test_spares_of_three_pools_are_the_cheapest_that_reach_the_target(pools, failures):
    """Of binomial shares by hand, over all counts up to six a pool; halves of a decode instance fail together."""
    options = PlanOptions(availability=0.999, failures=failures)
    found = asked(pools, Size(rate=300.0), options=options)
    design, spares = found.best, found.best.spares
    sizes = [(int(pool.mapping.gpus), pool.instances) for pool in design.pools]
    assert [pool.role for pool in design.pools] == ["encode", "prefill", "decode"]
    assert spares.availability == pytest.approx(
        math.prod(of_time(*size, count) for size, count in zip(sizes, spares.counts, strict=True)), rel=1e-9
    )
    able = [
        sum(count * gpus for count, (gpus, _) in zip(counts, sizes, strict=True))
        for counts in product(range(7), repeat=3)
        if math.prod(of_time(*size, count) for size, count in zip(sizes, counts, strict=True)) >= 0.999
    ]
    assert sum(pool.spares * int(pool.mapping.gpus) for pool in design.pools) == min(able) > 0
    assert sum(part.gpus for pool in design.pools for part in pool.halves) == design.gpus
    assert deployed(design).encode.instances == design.pools[0].instances + design.pools[0].spares


def test_the_spares_of_all_pools_are_away_in_one_simulation(failures):
    """Encoders do not fail in it: theirs are not there. Text and JSON name every pool."""
    pytest.importorskip("numba")
    found = asked(WHOLE, Size(rate=40.0), options=PlanOptions(availability=0.999, failures=failures))
    proof = prove(found, adapt=False)
    assert proof.failing.failed == proof.design.spares.counts
    assert proof.failing.failed[0] > 0
    assert proof.failing.run.ttft["p99"] >= proof.final.ttft["p99"]
    said = " + ".join(f"{pool.spares} {pool.role}" for pool in found.best.pools)
    assert proof_lines(found, proof)[-1].startswith(f"with {said} instances failed at once")
    told = plan_json(found, PlanExtras(proof=proof))["simulated"]["failing"]
    assert len(told["failed"]) == len(told["run"]["counts"]) == 3


def test_an_instance_on_two_systems_fails_with_either():
    one = Blast(own=1.0, per_node=4, node=0.5, per_domain=1, domain=0.0, restart=60.0)
    other = Blast(own=2.0, per_node=1, node=0.25, per_domain=8, domain=0.1, restart=60.0)
    both = one.beside(other)
    assert (both.own, both.node, both.domain, both.rate) == (3.0, 0.75, 0.1, 3.85)
    assert both.most_down == 8


@pytest.mark.parametrize("pools", [WHOLE, SPLIT])
def test_least_power_is_what_all_pools_draw_and_less_than_that_of_the_fewest_gpus(pools):
    thrifty = asked(pools, Size(rate=100.0), options=PlanOptions(objective="joule"))
    fewest = asked(pools, Size(rate=100.0))
    own, other = drawn(thrifty.best), drawn(fewest.best)
    assert thrifty.best.cost == pytest.approx(own.watts)
    assert own.watts < other.watts
    assert thrifty.best.gpus >= fewest.best.gpus
    assert thrifty.best.ttft["p90"] <= 2.0


def test_other_answers_are_looked_for_without_joules_where_only_one_is_possible(monkeypatch):
    """One system and no instances of both phases: a change matters where nothing serves, whatever pools draw."""
    asks = (PlanOptions(objective=each) for each in ("joule", "gpus"))
    plans = [asked(WHOLE, Size(rate=40.0), options=each, tpot=0.004) for each in asks]
    monkeypatch.setattr("disagg_sim.planning.flips._verified", lambda plan, found, now: next(iter(found)))
    monkeypatch.delattr("disagg_sim.planning.sizing.watts_of_pools")
    thrifty, fewest = ([(each.axis, each.factor, each.mode) for each in flips(plan)] for plan in plans)
    assert thrifty == fewest
    assert ("tpot", 0.8, None) in thrifty


def test_encoding_that_takes_longer_leaves_less_of_ttft_and_serves_less():
    """Passes as forecast: 1.5 times the time of encoding is a limit tighter by half of it, and 10 times the end."""
    found = asked(WHOLE, Size(rate=40.0), ttft=0.4)
    best = found.best
    encode, slower = best.pools[0], np.array([1.0, 1.5, 10.0])
    one = np.ones(3)
    kept = OwnTimes(prefill=one, step=one, throughput=one, beside=0.0 * one, encoding=slower).kept(best)[0] * best.rate
    most = encode.instances / encode.choice.step.each_s
    for place, factor in enumerate(slower[:2]):
        tighter = best.keeping(0.4 - (factor - 1.0) * encode.choice.alone_s, math.inf)
        assert kept[place] == pytest.approx(min(tighter, most / factor))
    assert kept[2] == pytest.approx(most / 10.0)
    sure = assurance(found)
    assert sure.encoding == pytest.approx((math.exp(-0.3 * 1.28), math.exp(0.3 * 1.28)), rel=0.05)
