"""One model on unlike GPUs: every instance works at its own speed, over its own links, in its own memory."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.launch.workers import workers_of
from disagg_sim.simulation.deployment import PARTS, largest_choice
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.instance_variants import placed, setup_of
from disagg_sim.simulation.instances import GpuBudget
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.policies.registry import policies, policy_named
from disagg_sim.simulation.run import serve
from tests.simulation.sites import PLAIN, site

ONE = Sharding()


@functools.lru_cache
def on(system, precision="fp8"):
    return ds.setup("llama_3_1_8b", system, precision)


def parts(**systems):
    """One GPU an instance, of (system, count) by part."""
    made = {
        part: tuple(ds.Replicas(mapping=ONE, instances=count, setup=on(system)) for system, count in entries)
        for part, entries in systems.items()
    }
    held = {part: sum(count for _, count in systems.get(part, ())) for part in PARTS}
    gpus = largest_choice(held)
    return ds.ServedDeployment(name="mixed", gpus=gpus, **made)


def poisson(rate, requests, inputs=1000, outputs=50, seed=1):
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests))
    return ds.Trace(arrival=arrival, input_tokens=np.full(requests, inputs), output_tokens=np.full(requests, outputs))


def test_one_setup_given_to_each_instance_is_that_of_the_deployment():
    at = on("h100_sxm")
    each = parts(colocated=[("h100_sxm", 2)])
    whole = ds.ServedDeployment(name="mixed", gpus=2, colocated=(ds.Replicas(mapping=ONE, instances=2),), setup=at)
    assert each == whole
    assert each.setup is at
    trace = poisson(20, 300)
    one, other = (ds.simulate(deployment, trace, "vllm").frame() for deployment in (each, whole))
    assert one.equals(other)


@pytest.mark.parametrize("policy", ["vllm", "least_load"])
def test_an_instance_twice_as_fast_gets_twice_the_requests(policy):
    """Prefill alone: 10 and 20 ms a prompt of 1,000 tokens; both keep their queues equally long in time."""
    speed = {"h100_sxm": 2e-5, "h200_sxm": 1e-5}  # [s/token]
    kinds = [("h100_sxm", 1), ("h200_sxm", 1)]
    served = parts(colocated=kinds) if policy == "vllm" else parts(prefill=kinds, decode=[("h200_sxm", 1)])
    engine = Engine(0)
    here = replace(
        site(engine, served, table=StepTable.affine(step=1e-4), blocks=10**5),
        setup=on("h100_sxm"),
        tables=lambda mapping, most: StepTable.affine(step=1e-4, per_token=speed[mapping.at.system.name]),
    )
    trace = poisson(140, 3000, outputs=2)  # of the 150 that they prefill a second
    found = serve(trace, policy, here, engine, PLAIN).requests
    slow, fast = np.bincount(found.prefill_instance, minlength=2)[:2]
    assert fast / slow == pytest.approx(2.0, rel=0.1)


def test_decodes_go_by_the_memory_of_each_kind_where_prefill_has_one():
    """1,000 and 2,000 blocks: as many tokens for each seat on both."""
    blocks = {"h100_sxm": 1000, "h200_sxm": 2000}
    served = parts(prefill=[("h200_sxm", 1)], decode=[("h100_sxm", 1), ("h200_sxm", 1)])
    engine = Engine(0)
    here = replace(
        site(engine, served, table=StepTable.affine(step=0.01)),
        setup=on("h100_sxm"),
        blocks=lambda mapping, limits: blocks[mapping.at.system.name],
    )
    found = serve(poisson(20, 600, inputs=100, outputs=100), "least_load", here, engine, PLAIN).requests
    small, large = np.bincount(found.decode_instance)[1:]
    assert large / small == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("policy", sorted(policies()))
def test_every_policy_serves_on_unlike_gpus(policy):
    """Prefill on H100 and H200 where nothing is started; pools that a policy sizes are on one system each."""
    sized = policy.startswith("dynamo") or policy == "dopd"
    prefill = [("h100_sxm", 2)] if sized else [("h100_sxm", 1), ("h200_sxm", 1)]
    served = parts(prefill=prefill, decode=[("h200_sxm", 2)], colocated=[("h100_sxm", 2), ("h200_sxm", 2)])
    trace = poisson(15, 200)
    result = ds.simulate(served, trace, policy)
    assert result.summary().completed == len(trace)
    assert result.records.requests.output_tokens.sum() == 200 * 50


def test_instances_have_the_memory_and_the_times_of_their_own_gpus():
    """A colocated instance on H200, beside one on H100, is the one that a cluster of H200 would have."""
    mixed = parts(colocated=[("h100_sxm", 1), ("h200_sxm", 1)])
    alone = parts(colocated=[("h200_sxm", 1)])
    trace = poisson(2, 40)
    both, one = (ds.simulate(each, trace, "vllm").records.instances.kv_blocks for each in (mixed, alone))
    assert both[1] == one[0] > both[0]
    second = ds.simulate(mixed, poisson(1e-3, 2), policy_named("vllm", router="round_robin")).frame()
    apart = ds.simulate(alone, poisson(1e-3, 2), "vllm").frame()
    last = slice(1, None)  # the second request goes to the second instance
    for column in ("first_token_s", "finish_s"):
        assert second[column][last].tolist() == apart[column][last].tolist()


def test_caches_cross_between_unlike_systems_over_the_network():
    """Eight GPUs of one system share a domain of NVLink; of two systems, no domain does."""
    served = parts(prefill=[("h100_sxm", 2)], decode=[("h200_sxm", 2)])
    inside = LinkSpec().wire(on("h200_sxm"), 4)
    across = LinkSpec().wire(on("h200_sxm"), math.inf)
    assert across.bandwidth < inside.bandwidth
    trace = poisson(1.0, 5)
    moved = ds.simulate(served, trace, "disaggregated").frame()
    alike = ds.simulate(parts(prefill=[("h200_sxm", 2)], decode=[("h200_sxm", 2)]), trace, "disaggregated").frame()
    assert (moved["transfer_s"] > alike["transfer_s"]).all()


def test_a_plan_with_pools_on_unlike_systems_is_served_as_planned():
    """Prefill on H100, decode on H200: each pool with the times of its own system."""
    lengths = ds.lengths(1000, 50)
    here, there = on("h100_sxm"), on("h200_sxm")
    mappings = ds.enumerate_mappings(here, max_gpus=1)
    prefill, decode = ds.prefill_grid(here, mappings, lengths), ds.decode_grid(there, mappings, lengths)
    plan = ds.plan_pools([prefill, decode], ftl_limit=1.0, ttl_limit=0.02, gpu_budget=8)
    result = ds.simulate(plan.deployment, poisson(5, 100))
    assert result.deployment.systems == ("h100_sxm", "h200_sxm")
    assert result.summary().completed == 100
    assert result.loss()["share_of_plan"][1] == pytest.approx(1.0, abs=0.1)


def test_gpus_of_one_system_are_no_room_for_instances_of_another():
    served = parts(prefill=[("h100_sxm", 2)], decode=[("h200_sxm", 3)])
    assert [served.gpus_on(system) for system in ("h100_sxm", "h200_sxm")] == [2, 3]

    class Holds:
        def __init__(self, mappings, gpus):
            self.mapping, self.gpus, self.state = mappings, gpus, [1] * len(gpus)
            self.site = self

        def setup_of(self, mapping):
            return setup_of(mapping, on("h100_sxm"))

    budget = GpuBudget(served)
    here, there = placed(ONE, on("h100_sxm")), placed(ONE, on("h200_sxm"))
    one, other = Holds([here, there], [1, 1]), Holds([there], [1])
    budget.join(one), budget.join(other)
    assert [budget.total(one, each) for each in (here, there, None)] == [2, 2, 4]
    assert [budget.free(one, each) for each in (here, there, None)] == [1, 1, 2]


def test_flops_count_against_the_peak_of_the_gpus_that_were_held():
    """Equal peaks of H100 and H200; a B200 has 2.27 times as much in fp8, so the mean of both is 1.64 times."""
    trace = poisson(2, 20)
    peak = {
        systems: ds.simulate(parts(colocated=[(each, 1) for each in systems]), trace, "vllm").records.peak_flops
        for systems in [("h100_sxm",), ("h100_sxm", "h200_sxm"), ("b200_sxm",), ("h100_sxm", "b200_sxm")]
    }
    assert peak["h100_sxm", "h200_sxm"] == peak["h100_sxm",]
    assert peak["h100_sxm", "b200_sxm"] == pytest.approx((peak["h100_sxm",] + peak["b200_sxm",]) / 2)


def test_what_cannot_be_is_told_in_one_line():
    with pytest.raises(InputError, match="gpus 9 on h100_sxm and h200_sxm, and its instances take 2; of several"):
        replace(parts(colocated=[("h100_sxm", 1), ("h200_sxm", 1)]), gpus=9)
    plain = ds.Replicas(mapping=ONE, instances=1)
    with pytest.raises(InputError, match="some instances have a setup and others none"):
        ds.ServedDeployment(name="x", gpus=2, colocated=(plain,), prefill=(replace(plain, setup=on("h100_sxm")),))
    pools = {"prefill": "h100_sxm", "decode": "h200_sxm"}
    recipes = {"prefill": "fp8", "decode": "bf16"}
    unlike = {
        part: (ds.Replicas(mapping=ONE, instances=1, setup=on(system, recipes[part])),)
        for part, system in pools.items()
    }
    with pytest.raises(InputError, match=r"policy 'arrow' hands caches over, and they are stored as prefill on h100"):
        ds.simulate(ds.ServedDeployment(name="x", gpus=2, **unlike), poisson(1, 3), "arrow")
    sized = parts(prefill=[("h100_sxm", 1), ("h200_sxm", 1)], decode=[("h200_sxm", 1)])
    with pytest.raises(InputError, match="prefill, which the policy sizes, has GPUs of h100_sxm and h200_sxm"):
        ds.simulate(sized, poisson(1, 3), "dynamo_sla")


def test_each_pool_is_launched_on_its_own_system():
    served = parts(prefill=[("h100_sxm", 2)], decode=[("h200_sxm", 1)])
    assert [(each.role, each.setup.system.name) for each in workers_of(served)] == [
        ("prefill", "h100_sxm"),
        ("decode", "h200_sxm"),
    ]
