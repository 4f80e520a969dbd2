"""What policies see cannot be written, and a policy that tries is told; plans that are replayed."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from sites import SIMPLE, deployment, served

import disagg_sim as ds
from disagg_sim.errors import InputError, PolicyError
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Leg

POOLS = deployment(prefill=2, decode=2)
REQUESTS = [(0.1 * k, 100, 5) for k in range(5)]
#: Public names of a view; what it has beside them are questions, which change nothing.
QUESTIONS = {"cached_everywhere", "cached_tokens", "refresh", "starting", "table", "waiting_prompts", "window"}


class Looking:
    """Least load, and something else before every placement."""

    needs = ("prefill", "decode")

    def __init__(self, look):
        self.look = look

    def build(self, site):
        parts = policy_named("least_load").build(site)
        self.routing = parts.routing
        return replace(parts, routing=self)

    def place(self, view, request):
        self.look(view)
        return self.routing.place(view, request)

    def proceed(self, view, request, origin):
        return Leg(int(view.decode[0]))


@pytest.fixture(scope="module")
def names():
    """Of all that a view shows."""
    shown = []
    served(REQUESTS, Looking(lambda view: shown.append(set(dir(view)) | set(view.__dict__))), POOLS, table=SIMPLE)
    return sorted(name for name in shown[0] - QUESTIONS if not name.startswith("_"))


def test_all_of_the_view_is_looked_at_here(names):
    assert {"now", "order", "prefill", "queued_requests", "inst", "kernel", "site", "shared_requests"} <= set(names)
    assert set(dir(ClusterView)) >= QUESTIONS


def test_no_attribute_can_be_set_or_deleted(names):
    for name, done in product([*names, *sorted(QUESTIONS), "something_new"], ("written", "deleted")):

        def look(view, name=name, done=done):
            setattr(view, name, 0) if done == "written" else delattr(view, name)

        with pytest.raises(PolicyError, match=f"{name} of the view cannot be {done}: a policy reads it and returns"):
            served(REQUESTS, Looking(look), POOLS, table=SIMPLE)


def writable(found):
    """What of an attribute takes another value in its first place."""
    parts = [part for part in found if isinstance(part, np.ndarray)] if isinstance(found, tuple) else [found]
    for part in parts or [found]:
        try:
            part[0] = part[0]
        except (TypeError, ValueError):  # numpy, memory views and tuples say it in their own words
            continue
        yield part


def test_no_element_can_be_set(names):
    taken = []

    def look(view):
        taken.extend(name for name in names for _ in writable(getattr(view, name)))

    served(REQUESTS, Looking(look), POOLS, table=SIMPLE)
    assert not taken


def test_step_tables_cannot_be_written_either():
    found = []
    served(REQUESTS, Looking(lambda view: found.append(view.table(0))), POOLS, table=SIMPLE)
    assert not found[0].values.flags.writeable
    assert not found[0].head.flags.writeable


def test_a_policy_that_writes_is_told_with_its_line():
    def corrupt(view):
        view.running_tokens[0] = 10**9

    with pytest.raises(PolicyError, match=r"(?s)policy 'Looking' at 0 s.*read-only.*test_view.py:\d+, in corrupt"):
        served(REQUESTS, Looking(corrupt), POOLS, table=SIMPLE)


def test_the_view_shows_what_the_cluster_writes():
    seen = []

    def look(view):
        seen.append((view.arrived, view.order, view.arrival_s[view.order[-1]], int(view.queued_prompt_tokens.sum())))

    served([(0.0, 100, 5), (0.001, 200, 5)], Looking(look), POOLS, table=SIMPLE)
    assert seen == [(1, (0,), 0.0, 0), (2, (0, 1), 0.001, 100)]


LENGTHS = (1024, 256)


@pytest.fixture(scope="module")
def plan():
    model, system = ds.load_model("llama_3_1_8b"), ds.load_system("h100_sxm")
    at, lengths = ds.setup(model, system, "fp8"), ds.lengths(*LENGTHS)
    mappings = ds.enumerate_mappings(at, max_gpus=2)
    mappings = mappings[mappings.pp == 1]
    prefill = ds.prefill_grid(at, mappings, lengths)
    decode = ds.decode_grid(at, mappings, lengths, batch=[8, 16, 32])
    found = ds.plan_pools([prefill, decode], ftl_limit=0.1, ttl_limit=0.01, gpu_budget=6)
    assert found.deployment is not None
    return found


@pytest.fixture(scope="module")
def replayed(plan):
    trace = ds.synthetic_trace(rate=0.5 * plan.request_rate, lengths=LENGTHS, requests=800, seed=3)
    return ds.simulate(plan.deployment, trace, slo=ds.Slo(ttft=1.0, tpot=0.02))


def test_a_full_queue_of_the_planned_lengths_gives_the_planned_throughput(plan, replayed):
    loss = replayed.loss().set_index("step")
    assert loss.loc["planned", "tokens_per_s_per_gpu"] == pytest.approx(plan.tokens_per_s_per_gpu)
    assert loss.loc["full queue, planned lengths", "share_of_plan"] == pytest.approx(1.0, abs=0.02)
    assert loss.loc["arrivals of the trace", "share_of_plan"] == pytest.approx(0.5, abs=0.05)
    assert loss["share_of_plan"].iloc[-1] <= loss["share_of_plan"].iloc[-2]
    assert re.match(r"the trace offers .* tokens/s/GPU, \d+% of the plan", loss["because"].iloc[3])


def test_the_planned_batches_are_kept(plan, replayed):
    decode = plan.deployment.decode
    largest = sum(instance.batch * count for instance, count in decode.members)
    assert replayed.samples()["running"].max() <= largest
    assert replayed.deployment.gpus == plan.total_gpus


def test_a_result_shows_itself_and_answers_for_another_slo(replayed):
    row = replayed.summary()
    assert (row.policy, row.deployment, row.requests) == ("disaggregated", "planned", 800)
    assert replayed.summary(ds.Slo(ttft=1e-6, tpot=1.0)).slo_attainment == 0.0
    assert len(replayed.frame()) == 800
    html = replayed._repr_html_()
    assert "disaggregated on planned under synthetic" in html
    assert re.search(r"inside the SLO</td><td[^>]*>100.0% of all requests", html)
    assert "TTFT 1 s, TPOT 20 ms" in html


def test_the_capacity_lies_between_a_rate_that_holds_and_one_that_does_not(plan, replayed):
    found = replayed.capacity()
    assert 1.0 < found.rate_scale < found.above < 8.0  # it offers half of the plan, and ends before a queue is long
    inside = {row.rate_scale: row.slo_attainment for row in found.runs}
    assert inside[found.rate_scale] >= 0.9 > inside[found.above]
    assert found.requests_per_s == pytest.approx(found.rate_scale * replayed.trace.rate)
    assert "Capacity: " in found._repr_html_()


def test_parts_by_hand_must_say_what_they_serve():
    parts = ds.ServedDeployment(name="one", gpus=1, colocated=(ds.Replicas(mapping=ds.Sharding(), instances=1),))
    known = replace(parts, setup=ds.setup("llama_3_1_8b", "h100_sxm", "fp8"))
    trace = ds.Trace(arrival=[0.0, 1.0], input_tokens=[100, 200], output_tokens=[5, 1])
    with pytest.raises(InputError, match="'one' does not say what it serves: give it setup="):
        ds.simulate(parts, trace, policy="vllm")
    result = ds.simulate(known, trace, policy="vllm", rate_scale=2.0)
    assert result.frame()["arrival_s"].tolist() == [0.0, 0.5]
    assert "one: 1 GPU" in parts._repr_html_()
    with pytest.raises(InputError, match="did not plan"):
        result.loss()


def test_rates_by_requests_leave_time_alone_in_a_search_too(plan):
    trace = ds.synthetic_trace(rate=20.0, lengths=LENGTHS, requests=400)
    result = ds.simulate(plan.deployment, trace, rate_scale=0.5, scale_by="requests", slo=ds.Slo(ttft=0.5, tpot=0.02))
    assert len(result.trace) == 200
    assert result.trace.duration == pytest.approx(trace.duration, rel=0.05)
    for row in result.capacity().runs:
        assert row.requests == pytest.approx(200 * row.rate_scale, abs=1)
        assert row.duration_s > 0.9 * trace.duration
