"""Co-located parts of a scenario may hold prompts back."""

from unittest.mock import Mock

import pytest

from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import run_scenario
from disagg_sim.scenario.spec import load_scenario

SCENARIO = """
name: trial
model: mixtral_8x7b
system: h100_sxm
precision: fp8
trace: {kind: synthetic, lengths: {isl: 2000, osl: 200}, rate_per_s: 6, requests: 60}
slo: {ttft_s: 2.0, tpot_s: 0.15}
deployments: {pool: {gpus: 4, colocated: [{dp: 4, ep: 4, batch: 64, token_budget: 8192%s}]}}
policies: [%s]
"""


@pytest.fixture
def planned(tmp_path):
    """Plans the scenario with a key of its part, and a policy."""

    def plan(key="", policy="vllm"):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(SCENARIO % (key, policy))
        return plan_scenario(load_scenario(str(path)))

    return plan


def test_a_part_holds_prompts_back_as_the_policy_does(planned, tmp_path):
    plans = planned(), planned(key=", hold_steps: 16"), planned(policy="{kind: vllm, hold_steps: 16}")
    results = [run_scenario(each, tmp_path / f"out{k}", jobs=1, listener=Mock()) for k, each in enumerate(plans)]
    none, part, policy = (each.requests(each.plan.runs[0]) for each in results)
    assert len({each.runs[0].digest for each in plans}) == 3
    assert part.equals(policy)
    wait, free = ((each["first_token_s"] - each["arrival_s"]).mean() for each in (part, none))
    assert wait > free + 0.01
