"""Several models in one cluster, each on its own instances, and one model on unlike GPUs."""

import functools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, UnknownNameError
from disagg_sim.launch.workers import workers_of
from disagg_sim.simulation.deployment import PARTS, largest_choice
from disagg_sim.simulation.engine import Engine, SideBySide
from disagg_sim.simulation.instance_variants import placed, setup_of
from disagg_sim.simulation.instances import GpuBudget
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.metrics import MODEL, ServiceClass
from disagg_sim.simulation.policies.registry import policies, policy_named
from disagg_sim.simulation.run import serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.availability.play import FailureEvent, Failures
from disagg_sim.workload.request_columns import Labels, Sessions
from disagg_sim.workload.scaling import with_models
from disagg_sim.workload.trace import Trace
from tests.simulation.sites import PLAIN, site

SMALL, LARGE = "llama_3_1_8b", "llama_3_1_70b"
#: Model -> its system, and its mapping.
KINDS = {SMALL: ("h100_sxm", ds.Sharding()), LARGE: ("h200_sxm", ds.Sharding(tp_attn=2, tp_ffn=2))}


@functools.lru_cache
def on(model, system):
    return ds.setup(model, system, "fp8")


def pool(models=(SMALL, LARGE), count=2, **gpus):
    """So many instances of each part and model; under all policies."""

    def part(instances):
        return tuple(
            ds.Replicas(mapping=mapping, instances=instances, setup=on(model, system))
            for model, (system, mapping) in KINDS.items()
            if model in models
        )

    each = {"prefill": part(count), "decode": part(count), "colocated": part(2 * count), "pairs": part(2 * count)}
    total = sum(2 * count * KINDS[model][1].gpus for model in models)
    return ds.ServedDeployment(name="pool", gpus=gpus.get("gpus", total), **each)


def mixed(requests=300, rate=20.0, share=0.6, seed=0):
    """Poisson arrivals of both models, with lengths of their own."""
    rng = np.random.default_rng(seed)
    return Trace(
        arrival=np.cumsum(rng.exponential(1 / rate, requests)),
        input_tokens=rng.integers(50, 2000, requests),
        output_tokens=rng.integers(1, 200, requests),
        models=Labels(names=(SMALL, LARGE), number=(rng.random(requests) > share).astype(int)),
    )


@pytest.mark.parametrize("policy", sorted(policies()))
def test_two_models_in_one_cluster_are_two_clusters(policy):
    """Nothing is shared, so each request has the very times that it has where the other model is not there."""
    trace = mixed()
    both = ds.simulate(pool(), trace, policy).records
    for place, model in enumerate((SMALL, LARGE)):
        rows = np.flatnonzero(trace.models.number == place)
        alone = ds.simulate(pool([model]), replace(trace.take(rows), models=None), policy).records
        ours = np.flatnonzero(both.models.instance == place)
        one, several = alone.frame(), both.frame().drop(columns="model").iloc[rows].reset_index(drop=True)
        own = {
            "request": rows,
            **{f"{phase}_instance": ours[one[f"{phase}_instance"]] for phase in ("prefill", "decode")},
        }
        pd.testing.assert_frame_equal(several, one.assign(**own), check_exact=True)
        for name in ("busy_s", "decode_steps", "decode_tokens", "prefill_tokens", "flops", "flips"):
            assert np.array_equal(getattr(both.instances, name)[ours], getattr(alone.instances, name)), name
        told = [(each.time_s, each.kind, each.instance) for each in both.decisions if each.instance in ours]
        assert told == [(each.time_s, each.kind, ours[each.instance]) for each in alone.decisions]


def test_what_a_model_tells_first_is_heard_first():
    """Sources tell at 1, 4 and 2, 4, 4 s: one by one in time, at one time the first source first."""

    class Tells:
        def __init__(self, name, times):
            self.name, self.times = name, list(times)

        def advance(self, until):
            return self.times[0] if self.times and self.times[0] <= until else np.inf

        def deliver(self):
            heard.append((self.name, self.times.pop(0)))

    heard = []
    engine = Engine()
    engine.attach(Tells("a", [1.0, 4.0]))
    engine.attach(Tells("b", [2.0, 4.0, 4.0]))
    engine.at(3.0, 1, lambda: heard.append(("event", 3.0)))
    engine.run()
    assert heard == [("a", 1.0), ("b", 2.0), ("event", 3.0), ("a", 4.0), ("b", 4.0), ("b", 4.0)]
    assert SideBySide([Tells("a", [])]).advance(5.0) == np.inf


def test_models_are_drawn_for_sessions_as_a_whole():
    trace = replace(mixed(400), sessions=Sessions(session=np.arange(400) // 4, think_s=np.zeros(400)))
    number = with_models(trace, {SMALL: 1, LARGE: 1}, seed=3).models.number
    assert all(len(set(each)) == 1 for each in number.reshape(-1, 4).tolist())


def test_models_take_their_gpus_from_one_budget():
    """One GPU is free, and both autoscalers want it: no more are ever held than there are."""
    names = (SMALL, "qwen2_5_7b")
    each = tuple(ds.Replicas(mapping=ds.Sharding(), instances=1, setup=on(name, "h100_sxm")) for name in names)
    parts = ds.ServedDeployment(name="pool", gpus=5, prefill=each, decode=each)
    trace = mixed(1500, rate=120.0)
    trace = replace(trace, models=Labels(names=names, number=trace.models.number))
    rest = {"slo": ds.Slo(ttft=0.3, tpot=0.02), "options": RunOptions(start_up_s=1.0, sample_s=0.5)}
    result = ds.simulate(parts, trace, policy_named("dynamo_load", period_s=1.0), **rest)
    assert result.samples()["gpus"].max() == 5
    assert (result.decisions()["kind"] == "start").any()
    apart = ds.simulate(
        replace(parts, prefill=each[:1], decode=each[:1], gpus=3),
        replace(trace.take(np.flatnonzero(trace.models.number == 0)), models=None),
        policy_named("dynamo_load", period_s=1.0),
        **rest,
    )
    assert apart.samples()["gpus"].max() == 3


def test_a_node_that_fails_takes_the_instances_of_all_models_on_it():
    """8 GPUs a node: two instances of the small model and three of the large one are on the first."""
    names = (SMALL, LARGE)
    each = tuple(
        ds.Replicas(mapping=KINDS[name][1], instances=count, setup=on(name, "h100_sxm"))
        for name, count in zip(names, (2, 4), strict=True)
    )
    parts = ds.ServedDeployment(name="pool", gpus=10, colocated=each)
    failures = Failures(events=(FailureEvent(at_s=1.0, kind="node", number=0),), restart_s=5.0)
    result = ds.simulate(parts, mixed(200), "vllm", options=RunOptions(failures=failures))
    (failure,) = result.records.failures
    assert failure.instances == (0, 1, 2, 3, 4)
    assert sorted(result.decisions()["instance"].tolist()) == [0, 1, 2, 3, 4]
    assert result.summary().failed == failure.lost > 0
    assert result.summary().completed + failure.lost == 200


def test_a_node_holds_gpus_of_one_system():
    """Two H100 and four H200 GPUs: nodes 0 and 1; the second takes the large model alone."""
    failures = Failures(events=(FailureEvent(at_s=1.0, kind="node", number=1),), restart_s=5.0)
    result = ds.simulate(pool(count=1), mixed(100), "vllm", options=RunOptions(failures=failures))
    (failure,) = result.records.failures
    assert set(result.records.models.instance[list(failure.instances)]) == {1}


def test_limits_of_a_model_judge_its_requests_and_steer_its_policy():
    """Prompts that an H100 needs more than 5 ms for are late, and so is every request of that model."""
    trace = mixed(100)
    slow = ServiceClass(name=LARGE, slo=ds.Slo(ttft=20.0, tpot=0.2), of=MODEL)
    fast = ServiceClass(name=SMALL, slo=ds.Slo(ttft=10.0, tpot=1e-2), of=MODEL)
    result = ds.simulate(
        pool(), trace, "vllm", slo=ds.Slo(ttft=10.0, tpot=0.1), options=RunOptions(classes=(slow, fast))
    )
    rows = result.models().set_index("model")
    assert rows.loc[LARGE, ["slo_ttft_s", "slo_tpot_s"]].tolist() == [20.0, 0.2]
    assert rows.loc[SMALL, "slo_tpot_s"] == 1e-2
    whole = rows.loc[[SMALL, LARGE]]
    share = (whole["slo_attainment"] * whole["requests"]).sum() / 100
    assert result.summary().slo_attainment == pytest.approx(share)


def test_metrics_of_each_model_and_of_all():
    """Tokens per second and GPU: of each over its own GPUs, of the whole over all."""
    result = ds.simulate(pool(), mixed(), "vllm")
    rows = result.models().set_index("model")
    assert rows.index.tolist() == [SMALL, LARGE, "all"]
    assert rows["gpus"].tolist() == pytest.approx([4.0, 8.0, 12.0])
    tokens = rows["throughput_tokens_per_s_per_gpu"] * rows["gpus"]
    assert tokens[SMALL] + tokens[LARGE] == pytest.approx(tokens["all"])
    summary = result.summary()
    assert tokens["all"] == pytest.approx(summary.throughput_tokens_per_s)
    assert rows.loc["all", "requests"] == summary.requests == rows["requests"].iloc[:2].sum()
    assert rows.loc["all", "ttft_p90_s"] == pytest.approx(summary.ttft_p90_s)


def test_what_cannot_be_is_told_in_one_line():
    trace = mixed(20)
    with pytest.raises(UnknownNameError, match=r"asks for model 'llama_3_1_8', did you mean 'llama_3_1_8b'\?"):
        ds.simulate(pool(), replace(trace, models=Labels(names=("llama_3_1_8", LARGE), number=[0] * 20)), "vllm")
    with pytest.raises(InputError, match="does not say which model its requests ask for, and deployment 'pool'"):
        ds.simulate(pool(), replace(trace, models=None), "vllm")
    with pytest.raises(InputError, match=f"never asks for {LARGE}, which deployment 'pool' serves"):
        ds.simulate(pool(), replace(trace, models=Labels(names=(SMALL,), number=[0] * 20)), "vllm")
    here = pool()
    with pytest.raises(InputError, match=f"{LARGE} in pool' has no prefill and no decode instances, which policy"):
        ds.simulate(replace(here, prefill=here.prefill[:1], decode=here.decode[:1]), trace, "arrow")
    turns = Sessions(session=np.zeros(20, int), think_s=np.zeros(20))
    with pytest.raises(InputError, match="a session that asks for several models"):
        ds.simulate(pool(), replace(trace, sessions=turns), "vllm")


ONE = Sharding()


@functools.lru_cache
def llama_on(system, precision="fp8"):
    return ds.setup("llama_3_1_8b", system, precision)


def parts(**systems):
    """One GPU an instance, of (system, count) by part."""
    made = {
        part: tuple(ds.Replicas(mapping=ONE, instances=count, setup=llama_on(system)) for system, count in entries)
        for part, entries in systems.items()
    }
    held = {part: sum(count for _, count in systems.get(part, ())) for part in PARTS}
    gpus = largest_choice(held)
    return ds.ServedDeployment(name="mixed", gpus=gpus, **made)


def poisson(rate, requests, inputs=1000, outputs=50, seed=1):
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests))
    return ds.Trace(arrival=arrival, input_tokens=np.full(requests, inputs), output_tokens=np.full(requests, outputs))


def test_one_setup_given_to_each_instance_is_that_of_the_deployment():
    at = llama_on("h100_sxm")
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
        setup=llama_on("h100_sxm"),
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
        setup=llama_on("h100_sxm"),
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
    inside = LinkSpec().wire(llama_on("h200_sxm"), 4)
    across = LinkSpec().wire(llama_on("h200_sxm"), math.inf)
    assert across.bandwidth < inside.bandwidth
    trace = poisson(1.0, 5)
    moved = ds.simulate(served, trace, "disaggregated").frame()
    alike = ds.simulate(parts(prefill=[("h200_sxm", 2)], decode=[("h200_sxm", 2)]), trace, "disaggregated").frame()
    assert (moved["transfer_s"] > alike["transfer_s"]).all()


def test_a_plan_with_pools_on_unlike_systems_is_served_as_planned():
    """Prefill on H100, decode on H200: each pool with the times of its own system."""
    lengths = ds.lengths(1000, 50)
    here, there = llama_on("h100_sxm"), llama_on("h200_sxm")
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
            return setup_of(mapping, llama_on("h100_sxm"))

    budget = GpuBudget(served)
    here, there = placed(ONE, llama_on("h100_sxm")), placed(ONE, llama_on("h200_sxm"))
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


def test_each_pool_is_launched_on_its_own_system():
    served = parts(prefill=[("h100_sxm", 2)], decode=[("h200_sxm", 1)])
    assert [(each.role, each.setup.system.name) for each in workers_of(served)] == [
        ("prefill", "h100_sxm"),
        ("decode", "h200_sxm"),
    ]
