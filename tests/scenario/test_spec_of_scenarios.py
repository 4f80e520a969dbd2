"""The form of a scenario: what it crosses, and every fault of a file at once."""

import time
from pathlib import Path

import pytest
import yaml
from fault_tables import faults_of

from disagg_sim.domain import Sharding
from disagg_sim.errors import SpecError
from disagg_sim.physics.setup import setup
from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.simulation.admission import Busy, PredictedTtft
from disagg_sim.simulation.deployment import Replicas
from disagg_sim.simulation.policy import POLICIES

TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},{100 + i},{10 + i}\n" for i in range(20))
SCENARIO = """
name: trial
model: llama_3_1_8b
system: h100_sxm
precision: fp8
trace: {path: short.csv, rate_scale: [1.0, 2.0]}
slo: {ttft_s: 2.0, tpot_s: 0.15}
deployments:
  four: {gpus: 4, prefill: {instances: 2}, decode: {tp: 2, instances: 1}, colocated: {instances: 4}}
policies: [vllm, disaggregated]
"""


def colocated(part) -> dict:
    """Changes to a scenario: one deployment of that part alone."""
    return {"deployments": {"one": {"colocated": part}}, "policies": ["vllm"]}


@pytest.fixture
def written(tmp_path):
    """Writes a scenario with some keys changed, beside its trace."""
    (tmp_path / "short.csv").write_text(TRACE)

    def write(**changes) -> str:
        document = {**yaml.safe_load(SCENARIO), **changes}
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in document.items() if value is not None}))
        return str(path)

    return write


def faults(path: str, **options) -> str:
    with pytest.raises(SpecError) as caught:
        load_scenario(path, **options)
    return str(caught.value)


def test_a_scenario_crosses_its_axes(written):
    scenario = load_scenario(written())
    (deployment,) = scenario.deployments
    assert deployment.decode[0].mapping == Sharding(tp_attn=2, tp_ffn=2)
    plan = plan_scenario(scenario)
    assert [run.name for run in plan.runs] == [
        "four/vllm-short-x1",
        "four/disaggregated-short-x1",
        "four/vllm-short-x2",
        "four/disaggregated-short-x2",
    ]
    assert not plan.searches
    assert len({run.digest for run in plan.runs}) == 4


def test_a_path_is_relative_to_the_file_and_an_option_to_the_working_directory(written, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "other.csv").write_text(TRACE.replace("\n1,", "\n0.5,"))
    monkeypatch.chdir(elsewhere)
    assert load_scenario(written()).traces[0].name == "short"
    replaced = load_scenario(written(), trace="other.csv")
    assert [(source.name, source.rate_scales) for source in replaced.traces] == [("other", (1.0, 2.0))]
    assert len(replaced.traces[0].load(0)) == 20


def test_a_replaced_trace_need_not_be_there(written, tmp_path):
    path = written(trace={"path": "nowhere.csv"})
    assert "nowhere.csv" in faults(path)
    assert load_scenario(path, trace=str(tmp_path / "short.csv")).traces[0].name == "short"


def test_a_trace_that_is_not_there_is_a_fault_of_the_option(written):
    assert faults(written(), trace="gone.csv").startswith("--trace: gone.csv")


def test_a_digest_follows_the_trace_and_the_options_and_no_path(written, tmp_path):
    before = plan_scenario(load_scenario(written())).runs[0].digest
    (tmp_path / "moved.csv").write_text(TRACE)
    moved = {"path": "moved.csv", "name": "short", "rate_scale": [1.0, 2.0]}
    assert plan_scenario(load_scenario(written(trace=moved))).runs[0].digest == before
    assert plan_scenario(load_scenario(written(), seed=1)).runs[0].digest != before
    assert plan_scenario(load_scenario(written(slo={"ttft_s": 1.0, "tpot_s": 0.15}))).runs[0].digest != before
    options = [{"kind": "vllm", "token_budget": 512}]
    assert plan_scenario(load_scenario(written(policies=options))).runs[0].digest != before
    (tmp_path / "moved.csv").write_text(TRACE.replace("19,119", "19,120"))
    assert plan_scenario(load_scenario(written(trace=moved))).runs[0].digest != before


def test_a_synthetic_trace_is_drawn_from_the_seed(written):
    trace = {"kind": "synthetic", "lengths": "azure_2023_conversation", "rate_per_s": 5.0, "requests": 50, "cv": 2.0}
    source = load_scenario(written(trace=trace)).traces[0]
    assert len(source.load(1)) == 50
    assert source.load(1).input_tokens.tolist() == source.load(1).input_tokens.tolist()
    assert source.load(1).input_tokens.tolist() != source.load(2).input_tokens.tolist()


def test_a_part_says_how_it_batches(written):
    prefill = [{"pp": 2, "batch": 5, "token_budget": 10240, "chunk_tokens": 1024}, {"tp": 2}]
    deployments = {"planned": {"prefill": prefill, "decode": {"tp": 2, "batch": 128}}}
    scenario = load_scenario(written(deployments=deployments, policies=["disaggregated"]))
    (deployment,) = scenario.deployments
    assert deployment.prefill == (
        Replicas(mapping=Sharding(pp=2, chunk_tokens=1024), instances=1, batch=5, token_budget=10240),
        Replicas(mapping=Sharding(tp_attn=2, tp_ffn=2), instances=1),
    )
    assert deployment.decode == (Replicas(mapping=Sharding(tp_attn=2, tp_ffn=2), instances=1, batch=128),)
    before = plan_scenario(scenario).runs[0].digest
    deployments["planned"]["decode"]["batch"] = 64
    other = load_scenario(written(deployments=deployments, policies=["disaggregated"]))
    assert plan_scenario(other).runs[0].digest != before


@pytest.mark.parametrize("model", ["llama_3_1_70b", "deepseek_r1", "gpt_oss_120b"])
@pytest.mark.parametrize("system", ["h100_sxm", "gb200_nvl72"])
def test_every_mapping_of_a_search_can_be_written(model, system):
    """tp, dp, ep and pp say all: a stage has tp x dp GPUs, over which experts have tp x dp / ep shards each."""
    table = enumerate_mappings(setup(model, system, "bf16"), max_gpus=128)
    assert len(table) > 10
    assert (table.tp_attn * table.dp_attn == table.tp_ffn * table.ep).all()


def test_all_faults_are_told_at_once(written):
    said = faults(
        written(
            modell="x",
            system="h100_smx",
            precision=None,
            slo={"ttft_s": "2 s"},
            policies=["vlm", "vllm"],
            trace={"path": "gone.csv", "rate_scal": 1.0, "rate": 3.0},
            captured=8,
            deployments={"four": {"gpus": 4, "prefil": {"tp": 2}, "decode": {"tp": 0}}},
            seed=-1,
        )
    )
    for part in (
        "unknown key 'modell', did you mean 'model'?",
        "unknown system 'h100_smx', did you mean 'h100_sxm'?",
        "missing key 'precision'",
        "slo.ttft_s: '2 s' is not a plain number; the key counts in s: write 2",
        "slo: missing key 'tpot_s'",
        "unknown policy 'vlm', did you mean 'vllm'?",
        "trace: unknown key 'rate_scal', did you mean 'rate_scale'?",
        "trace: unknown key 'rate', did you mean 'rate_per_s'?",
        "unknown key 'captured'; allowed: name, model,",
        "deployments.four: unknown key 'prefil', did you mean 'prefill'?",
        "deployments.four.decode.tp: 0 is out of range",
        "seed: -1 is out of range",
    ):
        assert part in said


#: Keys in place of those of ``SCENARIO`` :: what is said of them.
FAULTS = faults_of(r"""
deployments: {one: {gpus: 4, colocated: {instances: 4}}}
  'one' has no prefill and no decode instances, which policy 'disaggregated' needs; it has colocated
deployments: {one: {gpus: 3, colocated: {instances: 4}}}, policies: [vllm]
  the instances of policy 'vllm' take 4 GPUs (colocated 4 x 1), 1 more than its 3
deployments: {a/b: {colocated: {}}}, policies: [vllm] :: 'a/b' is no plain name
deployments: {one: {colocated: {batch: 64, token_budget: 63}}}, policies: [vllm]
  deployments.one.colocated: token_budget 63 is below batch 64; allowed: from the batch up
deployments: {one: {colocated: {chunk_tokens: 512}}}, policies: [vllm]
  colocated.chunk_tokens: 512 cuts the prompts of a pass for the stages of a pipeline; allowed: with pp above 1, in
deployments: {one: {colocated: [{batch: 8}, {tp: 2}, {batch: 9}]}}, policies: [vllm]
  deployment 'one': two entries of colocated have one mapping and batch differently (batch 8 and 9,
deployments: {one: {colocated: {hold_steps: soon}}}, policies: [vllm] :: hold_steps: 'soon' is
deployments: {one: {prefill: {}, decode: {ffn: {gpus: 3}}}}, policies: [disaggregated] :: 3
deployments: {one: {prefill: {}, decode: {ffn: {gpus: 4, microbatches: 0}}}}, policies: [disaggregated] :: microbatches
deployments: {one: {encode: {images: 2, height: 9}, prefill: {}, decode: {}}}, policies: [disaggregated] :: width
deployments: {one: {encode: {height: 9, width: 9, cached: 1.0}, prefill: {}, decode: {}}}, policies: [disaggregated]
  cached
model: llama_3_1_405b :: llama_3_1_405b in fp8 does not fit on 1 x h100_sxm
name: "two\nlines" :: name: 'two\nlines' is not a name; allowed: one line of up to 200 characters
policies: [{kind: vllm, token_budget: 0.5}]
  policies[0].token_budget: 0.5 is out of range; allowed: whole numbers from 0 to 16777216 token
policies: [{kind: arrow, monitor_s: 1.0e-9}] :: policies[0].monitor_s: 1e-09 is out of range; allowed: from 0.001 s
policies: [{kind: dynamo_load, queue: instances, mode: v2025}] :: queue
policies: [{kind: vllm, admission: {kind: predicted_ttft, shar: 1}}]
  policies[0].admission: unknown key 'shar', did you mean 'share'?
policies: [vllm, vllm] :: policies: vllm stands there 2 times
policies: mine.py :: policies: 'mine.py' is a file, not the name of a policy; name files under policy_file
admission: bussy :: admission: 'bussy' is unknown, did you mean 'busy'?; allowed: busy, predicted_ttft
run: {start_up_s: -1} :: run.start_up_s: -1 is out of range; allowed: from 0 to 1000000000 s
run: {failures: {gpu_mtbf_s: 5.0e+6}} :: run.failures: restart_s is missing: how long a failed gpu is
run: {failures: {events: [{at_s: 1, nod: 0}]}} :: run.failures.events[0]: unknown key 'nod', did you mean 'node'?
run: {failures: {events: [{at_s: 1, link: 0, share: 7}], link_down_s: 5}}
  run.failures.events[0].share: 7 is out of range; allowed: from 0 to 1
run: {prefix_cache: true, tiers: dran} :: run.tiers: h100_sxm has no tier 'dran', did you mean 'dram'?
run: {prefix_cache: true, tiers: [dram, dram]} :: dram, dram: one stands there twice
run: {prefix_cache: true, tiers: hbm} :: hbm is above them all; allowed: dram
run: {tiers: [dram]} :: tiers dram below instances that remember nothing; allowed: beside
trace: {path: short.csv, scale_by: requests, rate_scale: 0.001}
  rate 0.001 leaves none of the 20 requests of trace short
trace: {path: short.csv, shift_s: -1} :: trace.shift_s: -1 is out of range; allowed: from 0 to 1e+09 s
trace: {path: short.csv, columns: {arrival: arrival}} :: no column 'arrival', did you mean 'arrival_s'?
trace: {path: short.csv, columns: ts} :: trace.columns: 'ts' is not 'key: value' lines
trace: {kind: synthetic, lengths: azure_2023_cod, rate_per_s: 1, requests: 5} :: did you mean
trace: {kind: synthetic, lengths: {isl: 5, osl: 5}, rate_per_s: 1}
  a synthetic trace has either 'requests' or 'duration_s'
trace: {kind: synthetic, requests: 9, rate_per_s: 1, lengths: {isl: 9, osl: 9, cached: 0.5}}
  trace.lengths: unknown key 'cached'; it is a key of deployments.encode; allowed: isl, osl
trace: {kind: synthetic, lengths: {isl: 9, osl: 9}, rate_per_s: 1.0, requests: 1000000000}
  1,000,000,000 requests are too many; allowed: up to 10,000,000
trace: {kind: synthetic, lengths: {isl: 9, osl: 9}, rate_per_s: 1.0e-6, requests: 50, rate_scale: 1.0e-6}
  allowed: up to 1e+09 s
trace: {kind: synthetic, lengths: {isl: 9, osl: 9}, rate_per_s: 1, requests: 9, bursts: {contrast: 2, share: 0.2, length_s: 1.0e-9}}
  bursts in
trace: {kind: sessions, traffic: coding_agent, sessions: 9, sessions_per_s: 1, rate_per_s: 1}
  trace: unknown key 'rate_per_s', did you mean 'rate_scale'?; it is a key of another kind of trace;
trace: {kind: sessions, traffic: azure_2023_code, sessions: 8, sessions_per_s: 0.05}
  traffic azure_2023_code has no sessions
trace: {kind: sessions, traffic: coding_agent, sessions_per_s: 0.05}
  a synthetic trace has either 'sessions' or 'duration_s'
""")  # noqa: E501
MANY = [
    ({"policies": ["y" * 10**5]}, ["policies[0]: unknown policy 'yyy"]),
    ({"seed": 10**40}, [f"seed: 1{'0' * 40} is out of range; allowed: from 0 to 4294967296"]),
    ({"trace": {"path": "short.csv", "name": "x" * 81}}, ["is no plain name; allowed: letters, digits, '_', '.' "]),
    (
        {"trace": {"path": "short.csv", "rate_scale": [1 + 1e-3 * each for each in range(60000)]}},
        ["deployments x rates x policies: 120000 combinations; allowed: up to 100000"],
    ),
]


@pytest.mark.parametrize(("changes", "parts"), FAULTS + MANY, ids=[str(changes)[:60] for changes, _ in FAULTS + MANY])
def test_a_fault_is_one_line_that_names_it(written, changes, parts):
    keys, begun = yaml.safe_load(f"{{{changes}}}") if isinstance(changes, str) else changes, time.monotonic()
    (line,) = faults(written(**keys)).splitlines()
    assert parts[0] in line
    assert len(line) < 1000
    assert time.monotonic() - begun < 10  # no count takes the memory


def test_a_faulty_line_of_a_trace_is_named(written, tmp_path):
    (tmp_path / "short.csv").write_text(TRACE.replace("7,107,17", "7,many,17"))
    assert "short.csv, line 9" in faults(written()).replace(":9", ", line 9")


def test_shipped_scenarios_are_sound():
    for path in (Path(__file__).parents[2] / "scenarios").glob("*.yaml"):
        scenario = load_scenario(path.stem)
        assert scenario.name == path.stem
        assert plan_scenario(scenario).runs


MINE = """
from dataclasses import dataclass
from disagg_sim.simulation.policies.fixed import Vllm
from disagg_sim.simulation.policy import register

@register("small_chunks")
@dataclass(frozen=True, slots=True, kw_only=True)
class SmallChunks(Vllm):
    token_budget: int = 256
"""


def test_a_system_of_the_users_own_comes_from_a_file_beside_the_scenario(written, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    scenario = load_scenario(written(policy_file="mine.py", policies=["vllm", "small_chunks"]))
    assert [choice.parts for choice in scenario.policies] == [("colocated",)] * 2
    assert plan_scenario(scenario).runs[1].name == "four/small_chunks-short-x1"
    del POLICIES["small_chunks"]


def test_a_policy_file_that_is_none_is_named_with_its_line(written, tmp_path):
    (tmp_path / "broken.py").write_text("import os\nclass Half(\n")
    assert "broken.py: line 2: '(' was never closed" in faults(written(policy_file=["broken.py"]))
    assert "gone.py: no such file" in faults(written(policy_file=["gone.py"]))


def test_admission_is_a_key_of_the_scenario_and_of_a_policy(written):
    changes = {
        "admission": {"kind": "busy", "prefill_tokens": 5000},
        "policies": ["vllm", {"kind": "vllm", "label": "sheds", "admission": "predicted_ttft", "token_budget": 512}],
    }
    found = load_scenario(written(**changes))
    assert found.run.admission == Busy(prefill_tokens=5000)
    assert [choice.admission for choice in found.policies] == [None, PredictedTtft()]
    assert found.policies[1].options == (("token_budget", 512),)
