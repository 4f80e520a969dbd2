"""Limits of runs, so that none hangs or takes all memory, and of the parts of a deployment."""

import math
import time
import tracemalloc
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from sites import ONE as ONE_GPU
from sites import SIMPLE, deployment, served, site, small_setup, trace

from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InputError, PolicyError
from disagg_sim.physics.setup import setup
from disagg_sim.simulation import cluster
from disagg_sim.simulation import run as whole_run
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, Mode
from disagg_sim.simulation.physical_site import kv_blocks, tables_of
from disagg_sim.simulation.policies.loads import ByRole, Whole, fewest_requests
from disagg_sim.simulation.policies.registry import policies, policy_named
from disagg_sim.simulation.policy import Parts
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import ROLE_OF
from disagg_sim.simulation.wishes import Limits, Role
from disagg_sim.units import MB
from disagg_sim.workload.synthetic import log_normal, synthetic_trace
from disagg_sim.workload.trace import Trace

ONE = deployment(colocated=1)
TEN = [(float(i), 100, 10) for i in range(10)]
YEARS = 3e8  # a pause of ten years [s]


@dataclass(frozen=True)
class Watchful:
    """A policy of a user that looks every ``period_s`` and does nothing."""

    needs: ClassVar[tuple[str, ...]] = ("colocated",)
    period_s: float = 1.0

    def build(self, site):
        class Roles:
            period_s = self.period_s

            def flips(self, view):
                return ()

        limits = Limits()
        return Parts(
            start=site.instances(("colocated", Role.BOTH)),
            routing=Whole(fewest_requests),
            steps=ByRole(prefill=limits, decode=limits),
            roles=Roles(),
        )


@pytest.mark.parametrize("period", [1e-7, float("nan")])
def test_a_period_of_any_policy_is_a_millisecond_at_least(period):
    with pytest.raises(PolicyError, match=r"look every .* is impossible: allowed: from 0.001 s"):
        served(TEN, Watchful(period_s=period), ONE, table=SIMPLE)


def test_a_trace_of_years_has_no_more_samples_than_memory_holds():
    said = r"sample_s 10: trace trace lasts 3e\+08 s, 30,000,000 samples; allowed: up to 1,000,000 .* from 300 s"
    with pytest.raises(InputError, match=said):
        RunOptions().check_samples(trace([*TEN, (YEARS, 100, 10)]))


def test_a_trace_of_years_has_no_more_looks_than_patience():
    said = r"lasts 3e\+08 s, 300,000,000 looks; allowed: up to 10,000,000 looks, every 30 s"
    with pytest.raises(PolicyError, match=said):
        served([*TEN, (YEARS, 100, 10)], Watchful(), ONE, table=SIMPLE, options=RunOptions(sample_s=1e6))


@pytest.mark.parametrize("options", [RunOptions(sample_s=1e6), RunOptions(sample_s=1.0, until_s=100.0)])
def test_a_pause_of_years_costs_nothing_where_nobody_looks(options):
    """An instance that is idle has no step, so the clock jumps; and what lies beyond the cut does not count."""
    requests, begun = [*TEN, (YEARS, 100, 10)], time.monotonic()
    options.check_samples(trace(requests))
    result = served(requests, policy_named("vllm"), ONE, table=SIMPLE, options=options)
    assert time.monotonic() - begun < 60  # the first run compiles
    assert (result.requests.status == Outcome.COMPLETED).sum() == (11 if options.until_s > YEARS else 10)


def test_a_run_that_outlasts_its_trace_thins_its_samples(monkeypatch):
    """Of every full lot each second sample stays; the times stay even."""
    monkeypatch.setattr(whole_run, "MOST_SAMPLES", 8)
    result = served([(0.0, 100, 400)], policy_named("vllm"), ONE, table=SIMPLE, options=RunOptions(sample_s=0.1))
    times = result.samples.time_s
    assert 4 <= times.size <= 9
    assert result.requests.finish_s[0] == pytest.approx(times[-1], abs=1.0)
    assert np.ptp(np.diff(times)) == pytest.approx(0.0, abs=1e-9)


def test_a_policy_that_looks_on_and_on_is_stopped_with_what_there_is(monkeypatch):
    """One long answer in a closed loop, whose end nobody knows before."""
    monkeypatch.setattr(cluster, "MOST_LOOKS", 100)
    requests, options = [(0.0, 100, 5), (0.0, 100, 10_000)], RunOptions(concurrency=2)
    with pytest.raises(PolicyError, match="a run has 100 looks at most") as error:
        served(requests, Watchful(period_s=0.1), ONE, table=SIMPLE, options=options)
    assert error.value.so_far.requests.status.tolist() == [Outcome.COMPLETED, Outcome.UNFINISHED]


def test_a_closed_loop_of_more_places_than_requests_holds_them_all():
    begun = time.monotonic()
    result = served(TEN, policy_named("vllm"), ONE, table=SIMPLE, options=RunOptions(concurrency=10**9))
    assert (result.requests.status == Outcome.COMPLETED).all()
    assert result.requests.arrival_s.tolist() == [0.0] * 10
    assert time.monotonic() - begun < 60


# --- requests beyond the context of the model ----------------------------------------------------------------------

DEPLOYMENT = deployment(prefill=2, decode=2, colocated=4)
CONTEXT = small_setup().model.max_context
EASY = Slo(ttft=60.0, tpot=1.0)


def with_one_more(lengths, place):
    """Twenty requests, and the same with one of these lengths among them; rows of the former in the latter."""
    some = synthetic_trace(rate=4.0, requests=20, lengths=(log_normal(700, 1.0), log_normal(40, 1.0)), seed=3)
    rows = np.arange(20)
    more = Trace(
        arrival=np.insert(some.arrival, place, some.arrival[min(place, 19)]),
        input_tokens=np.insert(some.input_tokens, place, lengths[0]),
        output_tokens=np.insert(some.output_tokens, place, lengths[1]),
    )
    return some, more, np.where(rows < place, rows, rows + 1)


@pytest.mark.parametrize("policy", sorted(policies()))
def test_a_request_beyond_the_context_is_rejected_at_no_cost_to_the_others(policy):
    """A row of 10^9 tokens took all memory for step times of its length, and moved the mean that policies plan by."""
    place = 20 if policy == "dynaserve" else 10  # which draws its predictions in the order of the trace
    some, more, others = with_one_more((10**9, 5), place)
    slo, at = Slo(ttft=2.0, tpot=0.1), small_setup()
    alone = run(some, DEPLOYMENT, policy, at=at, slo=slo).requests
    tracemalloc.start()
    beside = run(more, DEPLOYMENT, policy, at=at, slo=slo).requests
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * MB
    assert beside.status[place] == Outcome.REJECTED
    for name in ("status", "arrival_s", "first_token_s", "finish_s", "prefill_instance", "decode_instance"):
        np.testing.assert_array_equal(getattr(beside, name)[others], getattr(alone, name), err_msg=name)


@pytest.mark.parametrize(
    ("lengths", "outcome"),
    [((CONTEXT - 1, 1), Outcome.COMPLETED), ((CONTEXT, 1), Outcome.REJECTED), ((1, CONTEXT), Outcome.REJECTED)],
)
def test_a_request_may_fill_the_context(lengths, outcome):
    result = run(trace([(0.0, *lengths), (0.0, 10, 2)]), DEPLOYMENT, "vllm", at=small_setup(), slo=EASY)
    assert result.requests.status.tolist() == [outcome, Outcome.COMPLETED]


def test_step_tables_end_where_the_memory_of_an_instance_does():
    """Ten million tokens fit the context of the model, and not one GPU: its table holds no more than the GPU does."""
    wide = setup("llama_4_scout", "b200_sxm", "nvfp4_fp8kv", "ideal")
    assert wide.model.max_context > 10**7
    tables = tables_of(wide, 10**7 + 100, 10**7)
    small, large = (tables(Sharding(tp_attn=tp, tp_ffn=tp), 8) for tp in (1, 8))
    held = kv_blocks(wide, Sharding(), max_sequences=1, max_tokens=1) * BLOCK_TOKENS
    assert held < 10**7
    assert farthest(small) <= 2 * held
    assert farthest(large) >= 10**7


def farthest(table):
    """Longest context that a table holds. [token]"""
    at, knots = (int(table.head[name][0]) for name in ("knots_at", "knots"))
    return table.values[at : at + knots].max()


EVERY_SYSTEM = pytest.mark.parametrize("name", sorted(policies()))

PROMPT = 1000.0  # mean of the traffic that the sites of these tests expect [token]


def of_parts(names, mapping=ONE_GPU, **limits):
    """Two instances of every part that a policy takes, all with these limits."""
    parts = {part: (Replicas(mapping=mapping, instances=2, **limits),) for part in names}
    return ServedDeployment(name="limited", gpus=2 * mapping.gpus * len(names), **parts)


def limits_of(policy, mapping=ONE_GPU, **limits):
    """Step limits of each part, in the role that its instances have when they start."""
    parts = policy.build(site(Engine(0), of_parts(policy.needs, mapping, **limits), table=SIMPLE))
    return {part: parts.steps.limits(mapping, ROLE_OF[part]) for part in policy.needs}


@pytest.mark.parametrize("mapping", [ONE_GPU, Sharding(dp_attn=8, ep=8)], ids=["one rank", "eight ranks"])
@EVERY_SYSTEM
def test_a_part_goes_before_the_options_of_the_policy_which_count_for_each_rank(name, mapping):
    """A decode instance of ``disaggregated`` has the 2,048 tokens a rank of its scheduler: the option is of prefill."""
    policy, ranks = policy_named(name, token_budget=512, max_sequences=40), int(mapping.dp_attn)
    usual, found = limits_of(policy, mapping), limits_of(policy, mapping, batch=7, token_budget=900)
    for part, each in usual.items():
        assert each.token_budget == ranks * (2048 if (name, part) == ("disaggregated", "decode") else 512)
        assert each.max_sequences == 40 * ranks or part == "prefill"
    prefill = found.pop("prefill", None)
    assert {(each.token_budget, each.max_sequences) for each in found.values()} == {(900, 7)}
    if name == "disaggregated":
        assert (prefill.mode, prefill.max_prompts, prefill.token_budget) == (Mode.PREFILL_FIRST, 7, 900)
    elif prefill:  # passes of whole prompts are not what it does
        assert prefill == usual["prefill"]


@EVERY_SYSTEM
def test_a_budget_alone_leaves_the_batch_to_the_policy_and_a_batch_has_the_budget_that_it_needs(name):
    """Seven prompts of 1,000 tokens; 3,000 sequences need a token each, whatever the budget of the policy."""
    policy = policy_named(name)
    usual = limits_of(policy)
    for part, found in limits_of(policy, token_budget=900).items():
        assert found == replace(usual[part], token_budget=900)
    if name == "disaggregated":
        assert limits_of(policy, batch=7)["prefill"].token_budget == math.ceil(7 * PROMPT)
    for part, found in limits_of(policy, batch=3000).items():
        assert found.token_budget >= 3000 or part == "prefill"


@EVERY_SYSTEM
def test_no_more_requests_run_together_than_a_part_allows(name):
    """Forty requests at once on two instances of every part, of at most three sequences each."""
    policy = policy_named(name)
    parts = {
        part: (Replicas(mapping=ONE_GPU, instances=2, batch=3 if part != "prefill" else None),) for part in policy.needs
    }
    deployment = ServedDeployment(name="limited", gpus=2 * len(parts), **parts)
    requests = [(0.0, 200, 60)] * 40
    result = served(requests, policy, deployment, table=SIMPLE, options=RunOptions(sample_s=0.01))
    assert (result.requests.status == Outcome.COMPLETED).all()
    flips = sum(decision.kind == "flip" for decision in result.decisions)
    most = 3 * 2 if not flips else 3 * 4  # an instance that flips decodes what it has
    assert 0 < result.samples.running.max() <= most


def test_disaggregated_prefills_whole_prompts_of_a_batch():
    """The first of 200 tokens starts alone: 10 + 20 ms; the others share a pass: 10 + 40 ms more.

    In chunks of 250 tokens the second would be done after 10 + 25 ms more, before the third.
    """
    deployment = ServedDeployment(
        name="limited",
        gpus=2,
        prefill=(Replicas(mapping=ONE_GPU, instances=1, batch=2, token_budget=400),),
        decode=(Replicas(mapping=ONE_GPU, instances=1),),
    )
    policy = policy_named("disaggregated", token_budget=250)
    found = served([(0.0, 200, 1)] * 3, policy, deployment, table=SIMPLE).requests
    assert found.first_token_s.tolist() == pytest.approx([0.030, 0.080, 0.080])


def test_the_budget_of_prefill_does_not_bind_decode():
    """A budget of one token: passes of one prompt, 10 + 1 ms each. Long answers outlast them: ten decode at once."""
    policy = policy_named("disaggregated", prefill="whole", token_budget=1)
    options = RunOptions(first_token="prefill", sample_s=0.01)
    result = served([(0.0, 10, 200)] * 10, policy, of_parts(policy.needs), table=SIMPLE, options=options)
    assert sorted(result.requests.first_token_s) == pytest.approx([0.011 * (1 + n // 2) for n in range(10)])
    assert result.samples.running.max() == 10


def test_entries_of_one_part_batch_each_in_its_own_way():
    two = Sharding(tp_attn=2, tp_ffn=2)
    deployment = ServedDeployment(
        name="mixed",
        gpus=4,
        prefill=(Replicas(mapping=ONE_GPU, instances=1),),
        decode=(Replicas(mapping=ONE_GPU, instances=1, batch=5), Replicas(mapping=two, instances=1, batch=9)),
    )
    steps = policy_named("disaggregated").build(site(Engine(0), deployment, table=SIMPLE)).steps
    assert steps.limits(ONE_GPU, Role.DECODE).max_sequences == 5
    assert steps.limits(two, Role.DECODE).max_sequences == 9
    assert steps.limits(ONE_GPU, Role.PREFILL).max_prompts > 9
