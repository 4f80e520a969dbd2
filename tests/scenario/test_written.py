"""From a plan to a scenario and back: the file runs to the records of the simulation that it was written from."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import disagg_sim as ds
from disagg_sim.errors import DisaggSimError, InputError
from disagg_sim.facts.model import ModelSpec
from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import require_no_faults, run_scenario
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.simulation.admission import PredictedTtft
from disagg_sim.simulation.classes import ServiceClass
from disagg_sim.simulation.failures import FailureEvent, Failures
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.metrics import Summary
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.classes import with_classes
from disagg_sim.workload.synthetic import session_trace

#: Name -> model, system, recipe, largest instance [GPU], prompt and output [token] or a law, budget [GPU], and more.
PLANS: dict[str, tuple[str, str, str, int, Any, int, dict[str, Any]]] = {
    "small": ("llama_3_1_8b", "h100_sxm", "fp8", 2, (1024, 128), 6, {}),
    "mixed": ("llama_3_1_70b", "h100_sxm", "fp8", 8, (2048, 256), 24, {"options": ds.MatchOptions(mixing_gain=0.0)}),
    "chunked pipeline": ("llama_3_1_70b", "h100_sxm", "fp8", 16, (16_384, 256), 64, {}),
    "mla": ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", 32, (4096, 512), 96, {}),
    "experts": ("qwen3_235b_a22b", "h200_sxm", "fp8", 16, (4096, 512), 64, {}),
    "windows": ("gpt_oss_120b", "h100_sxm", "bf16", 8, (4096, 256), 32, {"options": ds.MatchOptions(mixing_gain=0.0)}),
    "law of lengths": ("llama_3_1_8b", "a100_sxm_80gb", "bf16", 4, "log_normal_4096_512", 16, {}),
}
LAW = ds.load_traffic("log_normal_4096_512").cases[0]


@cache
def planned(name: str) -> ds.SimulationResult:
    """The plan, simulated on 400 requests at three quarters of its rate."""
    model, system, precision, most, lengths, budget, more = PLANS[name]
    at = ds.setup(model, system, precision)
    mappings = ds.enumerate_mappings(at, max_gpus=most)
    if name == "mla":  # attention DP with EP, whatever else is faster
        mappings = mappings[(mappings.dp_attn > 1) & (mappings.ep > 1)]
    limits: dict[str, Any] = {"ftl_limit": 4.0, "ttl_limit": 0.05, "gpu_budget": budget, **more}
    drawn = LAW if isinstance(lengths, str) else lengths
    law = ds.lengths(LAW) if isinstance(lengths, str) else ds.lengths(*lengths)
    first = mappings[mappings.pp > 2] if name == "chunked pipeline" else mappings
    prefill, decode = ds.prefill_grid(at, first, law), ds.decode_grid(at, mappings, law)
    plan = ds.plan_pools([prefill, decode], **limits)
    assert plan.deployment is not None, plan.message
    trace = ds.synthetic_trace(rate=0.75 * plan.request_rate, lengths=drawn, requests=400, seed=5)
    return ds.simulate(plan.deployment, trace, slo=ds.Slo(ttft=60.0, tpot=1.0))


@pytest.fixture(scope="module")
def small():
    return planned("small")


class Silent:
    """Hears nothing."""

    def note(self, text): ...

    def warn(self, text): ...

    def start(self, points): ...

    def advance(self, points): ...

    def finish(self): ...


def ran(path: Path, out: Path):
    """Tables of a scenario file with one run."""
    plan = plan_scenario(load_scenario(str(path)))
    result = run_scenario(plan, out, jobs=1, listener=Silent())
    require_no_faults(result)
    (only,) = plan.runs
    return result, only


@pytest.mark.parametrize("name", PLANS)
def test_a_written_plan_runs_as_it_was_simulated(name, tmp_path):
    """Every request is served where and when it was, but for the last bit of an arrival; so are the sums of the run.

    An arrival is written from the first one on: adding the first again may miss its last bit.
    """
    result = planned(name)
    again, run = ran(ds.write_scenario(result, tmp_path / "plan.yaml"), tmp_path / "out")
    before, after = result.frame(), again.requests(run)
    assert len(after) == 400
    for column in before:
        left, right = before[column].to_numpy(), after[column].to_numpy()
        if left.dtype.kind == "f":
            assert right == pytest.approx(left, rel=1e-12, abs=1e-12, nan_ok=True), column
        else:
            assert np.array_equal(left, right), column
    row, measured = result.summary(), {"wall_s", "requests_per_cpu_s", "trace"}
    for field in set(Summary.__dataclass_fields__) - measured:
        if isinstance(getattr(row, field), str):
            assert again.summary[field].iloc[0] == getattr(row, field), field
        else:
            assert again.summary[field].iloc[0] == pytest.approx(getattr(row, field), rel=1e-11, nan_ok=True), field


def test_a_trace_that_begins_at_0_gives_the_same_bits(small, tmp_path):
    even = replace(small.trace, arrival=small.trace.arrival - small.trace.arrival[0])
    result = ds.simulate(small.plan.deployment, even, slo=small.slo)
    path = ds.write_scenario(result, tmp_path / "plan.yaml")
    assert "start_s" not in path.read_text()
    again, run = ran(path, tmp_path / "out")
    pd.testing.assert_frame_equal(again.requests(run), result.frame(), check_exact=True, check_dtype=False)


def test_the_plans_of_this_file_have_what_they_stand_for():
    """Mixed pools, chunks in pipelines, and degrees of every kind are among them."""
    found = {name: planned(name).deployment for name in ("mixed", "chunked pipeline", "mla", "experts")}
    assert max(len(part) for part in (found["mixed"].prefill, found["mixed"].decode)) > 1
    assert any(each.mapping.chunk_tokens and each.mapping.pp > 1 for each in found["chunked pipeline"].prefill)
    mappings = [each.mapping for name in ("mla", "experts") for each in (*found[name].prefill, *found[name].decode)]
    assert {max(getattr(each, degree) for each in mappings) > 1 for degree in ("dp_attn", "ep")} == {True}


def test_the_file_is_one_that_a_person_reads(small, tmp_path):
    text = ds.write_scenario(small, tmp_path / "my_plan.yaml").read_text()
    heading, planned_for, *rest = text.splitlines()
    assert heading == "# As simulated: disagg-sim simulate my_plan.yaml --out DIR gives the same requests."
    assert planned_for.startswith("# Planned for 1024/128 tokens: ")
    assert rest[:3] == ["name: my_plan", "model: llama_3_1_8b", "system: h100_sxm"]
    assert rest[3:5] == ["precision: fp8", "profile: measured"]
    document = yaml.safe_load(text)
    (part,) = document["deployments"]["planned"]["decode"]
    ((pool, count),) = small.plan.deployment.decode.members
    assert part["batch"] == pool.batch
    assert part["instances"] == count
    assert document["policies"] == ["disaggregated"]
    assert document["slo"] == {"ttft_s": 60.0, "tpot_s": 1.0}
    assert (tmp_path / "my_plan.csv").read_text().splitlines()[:2] == [
        "arrival_s,input_tokens,output_tokens",
        "0.0,1024,128",
    ]


def test_options_seed_and_parts_by_hand_are_kept(small, tmp_path):
    parts = ds.ServedDeployment(
        name="by_hand",
        gpus=5,
        colocated=(ds.Replicas(mapping=ds.Sharding(tp_attn=2, tp_ffn=2), instances=2, batch=7),),
        setup=ds.setup("llama_3_1_8b", "h100_sxm", "bf16", "ideal"),
    )
    result = ds.simulate(
        parts,
        small.trace,
        policy_named("vllm", token_budget=1000, chunked=False),
        seed=9,
        rate_scale=0.5,
        options=RunOptions(sample_s=2.5, concurrency=12, admission=PredictedTtft(share=0.7)),
    )
    path = ds.write_scenario(result, tmp_path / "by_hand.yaml")
    document = yaml.safe_load(path.read_text())
    assert document["policies"] == [{"kind": "vllm", "token_budget": 1000, "chunked": False}]
    assert document["run"] == {"sample_s": 2.5, "concurrency": 12}
    assert document["admission"] == {"kind": "predicted_ttft", "share": 0.7}
    assert (document["seed"], document["profile"]) == (9, "ideal")
    assert document["deployments"] == {"by_hand": {"gpus": 5, "colocated": [{"tp": 2, "instances": 2, "batch": 7}]}}
    again, run = ran(path, tmp_path / "out")
    assert np.array_equal(again.requests(run)["finish_s"], result.frame()["finish_s"])


def test_failures_are_written_and_read_back(small, tmp_path):
    events = (
        FailureEvent(at_s=2.0, kind="instance", number=0),
        FailureEvent(at_s=3.0, kind="link", number=1, lasts_s=5.0, share=0.25),
    )
    failures = Failures(events=events, restart_s=math.inf, gpu_mtbf_s=1e4, migration_limit=2)
    options = RunOptions(sample_s=2.5, failures=failures)
    result = ds.simulate(small.deployment, small.trace, "disaggregated", options=options)
    assert result.records.failures
    path = ds.write_scenario(result, tmp_path / "failing.yaml")
    again, run = ran(path, tmp_path / "out")
    for column in ("finish_s", "migrations", "status"):
        pd.testing.assert_series_equal(again.requests(run)[column], result.frame()[column])
    assert again.summary["migrated"][0] == result.summary().migrated
    assert set(again.decisions["kind"]) == {"failure"}


def test_files_that_are_there_stay_unless_they_may_go(small, tmp_path):
    path = ds.write_scenario(small, tmp_path / "plan.yaml")
    with pytest.raises(InputError, match=r"plan\.yaml is there already; give another path, or overwrite=True"):
        ds.write_scenario(small, path)
    (tmp_path / "other.csv").write_text("mine")
    with pytest.raises(InputError, match=r"other\.csv is there already"):
        ds.write_scenario(small, tmp_path / "other.yaml")
    assert (tmp_path / "other.csv").read_text() == "mine"
    assert ds.write_scenario(small, path, overwrite=True) == path
    with pytest.raises(InputError, match=r"plan\.txt: a scenario is a YAML file"):
        ds.write_scenario(small, tmp_path / "plan.txt")


class Mine:
    """A system that nobody ships."""

    needs = ("prefill", "decode")


def with_prefix(trace: ds.Trace) -> ds.Trace:
    from disagg_sim.workload.request_columns import PrefixBlocks

    offsets = np.zeros(len(trace) + 1, np.int64)
    return replace(trace, prefix=PrefixBlocks(offsets=offsets, ids=np.zeros(0, np.int64), block_tokens=512))


def another(model: ModelSpec) -> ModelSpec:
    return replace(model, vocab=model.vocab + 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (lambda it: {"policy": Mine()}, "policy 'Mine' is not shipped"),
        (lambda it: {"trace": with_prefix(it.trace)}, "has block ids, which a CSV file cannot hold"),
        (lambda it: {"options": RunOptions(link=LinkSpec(bandwidth=1e9))}, "no key for a network of one's own"),
        (lambda it: {"setup": replace(it.setup, model=another(it.setup.model))}, "model reads back differently"),
    ],
)
def test_what_a_scenario_cannot_say_is_refused_in_one_line(small, tmp_path, changes, said):
    with pytest.raises(DisaggSimError, match=said) as caught:
        ds.write_scenario(replace(small, **changes(small)), tmp_path / "plan.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wide",
    [ds.Sharding(dp_attn=12, ep=12, redundant_slots=8), ds.Sharding(tp_attn=4, dp_attn=2, ep=8, dcp=4)],
    ids=["redundant slots", "shared cache"],
)
def test_degrees_are_written_and_read_back(tmp_path, wide):
    parts = ds.ServedDeployment(
        name="wide",
        gpus=wide.gpus,
        colocated=(ds.Replicas(mapping=wide, instances=1),),
        setup=ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"),
    )
    trace = ds.synthetic_trace(rate=1.0, lengths=(512, 16), requests=5, seed=1)
    path = ds.write_scenario(ds.simulate(parts, trace, policy_named("vllm")), tmp_path / "wide.yaml")
    (part,) = load_scenario(str(path)).deployments
    assert part.colocated[0].mapping == wide


def test_sessions_and_classes_are_written_and_read_back(small, tmp_path):
    agents = session_trace(ds.load_traffic("coding_agent"), rate=0.5, sessions=4, seed=1)
    trace = with_classes(replace(agents, prefix=None), {"chat": 1, "batch": 1}, seed=2)
    parts = ds.ServedDeployment(
        name="one", gpus=1, colocated=(ds.Replicas(mapping=ds.Sharding(), instances=1),), setup=small.setup
    )
    batch = ServiceClass(name="batch", slo=ds.Slo(ttft=60.0, tpot=1.0), priority=-1)
    result = ds.simulate(parts, trace, "vllm", options=RunOptions(classes=(batch,)))
    path = ds.write_scenario(result, tmp_path / "turns.yaml")
    again, run = ran(path, tmp_path / "out")
    rows = again.requests(run)
    assert np.allclose(rows["finish_s"], result.frame()["finish_s"], rtol=1e-12)
    assert rows["class"].tolist() == result.frame()["class"].tolist()
    assert again.classes["slo_attainment"].tolist() == result.classes()["slo_attainment"].tolist()
