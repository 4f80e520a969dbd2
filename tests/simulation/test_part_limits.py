"""Step limits of the parts of a deployment: they hold under every policy, before its own options."""

import math
from dataclasses import replace

import pytest
from sites import ONE, SIMPLE, served, site

from disagg_sim.domain import Sharding
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.policies.registry import policies, policy_named
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import ROLE_OF
from disagg_sim.simulation.wishes import Role

EVERY_SYSTEM = pytest.mark.parametrize("name", sorted(policies()))
PROMPT = 1000.0  # mean of the traffic that the sites of these tests expect [token]


def of_parts(names, mapping=ONE, **limits):
    """Two instances of every part that a policy takes, all with these limits."""
    parts = {part: (Replicas(mapping=mapping, instances=2, **limits),) for part in names}
    return ServedDeployment(name="limited", gpus=2 * mapping.gpus * len(names), **parts)


def limits_of(policy, mapping=ONE, **limits):
    """Step limits of each part, in the role that its instances have when they start."""
    parts = policy.build(site(Engine(0), of_parts(policy.needs, mapping, **limits), table=SIMPLE))
    return {part: parts.steps.limits(mapping, ROLE_OF[part]) for part in policy.needs}


@pytest.mark.parametrize("mapping", [ONE, Sharding(dp_attn=8, ep=8)], ids=["one rank", "eight ranks"])
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
        part: (Replicas(mapping=ONE, instances=2, batch=3 if part != "prefill" else None),) for part in policy.needs
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
        prefill=(Replicas(mapping=ONE, instances=1, batch=2, token_budget=400),),
        decode=(Replicas(mapping=ONE, instances=1),),
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
        prefill=(Replicas(mapping=ONE, instances=1),),
        decode=(Replicas(mapping=ONE, instances=1, batch=5), Replicas(mapping=two, instances=1, batch=9)),
    )
    steps = policy_named("disaggregated").build(site(Engine(0), deployment, table=SIMPLE)).steps
    assert steps.limits(ONE, Role.DECODE).max_sequences == 5
    assert steps.limits(two, Role.DECODE).max_sequences == 9
    assert steps.limits(ONE, Role.PREFILL).max_prompts > 9
