"""Groups of instances in a scenario: on unlike GPUs, and of several models."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

import disagg_sim as ds
from disagg_sim.errors import InputError, SpecError
from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import run_scenario
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.workload.scaling import with_models
from disagg_sim.workload.trace import concatenate

SMALL, LARGE = "llama_3_1_8b", "llama_3_1_70b"
SCENARIO = """
name: trial
model: llama_3_1_70b
system: h100_sxm
precision: fp8
trace: {kind: synthetic, lengths: {isl: 500, osl: 20}, rate_per_s: 10, requests: 60,
        models: {Llama-3.1-8B: 0.5, llama_3_1_70b: 0.5}}
slo: {ttft_s: 2.0, tpot_s: 0.15, models: {llama_3_1_8b: {ttft_s: 0.5, tpot_s: 0.05}}}
deployments:
  pool:
    prefill: [{tp: 2}, {model: Llama-3.1-8B}]
    decode: [{tp: 2, system: H200-SXM}, {model: llama_3_1_8b, engine: vllm}]
policies: [disaggregated]
"""


@pytest.fixture
def written(tmp_path):
    """Writes the scenario with some keys changed."""

    def write(**changes) -> str:
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(SCENARIO), **changes}))
        return str(path)

    return write


def faults(path: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_scenario(path)
    return str(caught.value)


def test_a_group_says_what_differs_from_the_scenario(written):
    (pool,) = load_scenario(written()).deployments
    said = [
        (part, at.setup.model.name, at.setup.system.name, at.setup.engine, at.gpus)
        for part in ("prefill", "decode")
        for at in pool.part(part)
    ]
    assert said == [
        ("prefill", LARGE, "h100_sxm", "trtllm", 2),
        ("prefill", SMALL, "h100_sxm", "trtllm", 1),
        ("decode", LARGE, "h200_sxm", "trtllm", 2),
        ("decode", SMALL, "h100_sxm", "vllm", 1),
    ]
    assert pool.gpus == 6
    assert [pool.gpus_on(system) for system in pool.systems] == [4, 2]


def test_groups_that_say_what_the_scenario_says_are_plain_ones(written):
    """The same instances, and so the same digest of their runs: what is stored stays valid."""
    trace = {"kind": "synthetic", "lengths": {"isl": 500, "osl": 20}, "rate_per_s": 10, "requests": 60}
    rest = {"trace": trace, "slo": {"ttft_s": 2.0, "tpot_s": 0.15}, "policies": ["vllm"]}
    plain, said = (
        load_scenario(written(**rest, deployments={"one": {"colocated": [{"tp": 2, **more}]}}))
        for more in ({}, {"system": "h100_sxm", "model": LARGE})
    )
    assert plain.deployments == said.deployments
    runs = [run_of(each) for each in (plain, said)]
    assert runs[0].requests(runs[0].plan.runs[0]).equals(runs[1].requests(runs[1].plan.runs[0]))


def run_of(scenario):
    root = Path(scenario.source).parent / f"out{len(list(Path(scenario.source).parent.iterdir()))}"
    return run_scenario(plan_scenario(scenario), root, jobs=1, listener=Mock())


def test_a_run_has_a_row_of_each_model_and_of_all(written):
    result = run_of(load_scenario(written()))
    rows = result.models
    assert rows["model"].tolist() == [LARGE, SMALL, "all"]
    assert rows["gpus"].tolist() == pytest.approx([4.0, 2.0, 6.0])
    assert rows["requests"].sum() == 120
    assert rows["slo_ttft_s"].tolist()[:2] == [2.0, 0.5]
    held = result.requests(result.plan.runs[0])
    assert sorted(set(held["model"])) == [LARGE, SMALL]
    assert (result.store.root / "models.csv").exists()


def test_another_system_of_a_group_is_another_run(written):
    one = plan_scenario(load_scenario(written()))
    pools = yaml.safe_load(SCENARIO)["deployments"]
    pools["pool"]["decode"][0]["system"] = "h100_sxm"
    other = plan_scenario(load_scenario(written(deployments=pools)))
    assert one.runs[0].digest != other.runs[0].digest
    assert one.runs[0].digest == plan_scenario(load_scenario(written())).runs[0].digest


def test_models_by_class(written):
    trace = yaml.safe_load(SCENARIO)["trace"]
    trace |= {"classes": {"chat": 1, "batch": 1}, "models": {"chat": {SMALL: 1}, "batch": {LARGE: 1}}}
    found = load_scenario(written(trace=trace)).traces[0].load(0)
    asked = np.array(found.models.names)[found.models.number]
    of_class = np.array(found.classes.names)[found.classes.number]
    assert set(asked[of_class == "chat"]) == {SMALL}
    assert set(asked[of_class == "batch"]) == {LARGE}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"models": {"llama_3_1_8": 1}}, "did you mean 'llama_3_1_8b'"),
        ({"models": {SMALL: 1}}, f"trace synthetic never asks for {LARGE}, which deployment 'pool' serves"),
        ({"models": {"qwen2_5_7b": 1}}, "asks for model 'qwen2_5_7b'"),
        ({"models": {"chat": {SMALL: 1}}}, "models by class: shares are given for chat; trace synthetic has the"),
        ({}, "does not say which model its requests ask for"),
    ],
)
def test_faults_of_models_in_a_trace(written, change, told):
    trace = {key: value for key, value in yaml.safe_load(SCENARIO)["trace"].items() if key != "models"}
    assert told in faults(written(trace=trace | change))


def test_faults_of_groups(written):
    pools = yaml.safe_load(SCENARIO)["deployments"]
    pools["pool"]["decode"] = [{"tp": 2, "system": "a100_sxm_80gb"}]
    assert "fp8" in faults(written(deployments=pools))
    pools["pool"]["decode"] = [{"tp": 2}]
    told = f"deployment '{SMALL} in pool' has no decode instances, which policy 'disaggregated' needs"
    assert told in faults(written(deployments=pools))
    pools["pool"]["decode"] = [{"tp": 2, "precision": "bf16"}, {"model": SMALL}]
    assert "hands caches over, and they are stored as prefill on h100_sxm in fp8" in faults(written(deployments=pools))


def test_models_join_with_their_traces():
    one = with_models(ds.synthetic_trace(rate=5.0, lengths=(300, 10), requests=4, seed=1), {SMALL: 1})
    with pytest.raises(InputError, match="traces with models do not join those without"):
        concatenate([one, replace(one, models=None)])


HELD = """
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
        path.write_text(HELD % (key, policy))
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
