"""Every option that is written has a source for its version; scripts are run against programs that record.

The programs that a script starts are replaced by one that prints its arguments, so what is checked is what the engine
would be told, after the shell has expanded it.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import disagg_sim as ds
from disagg_sim.facts.load import load_launcher
from disagg_sim.launch.engines import ENGINES
from disagg_sim.launch.expressible import backend_of
from disagg_sim.launch.launch import Launch
from disagg_sim.launch.workers import Weights
from tests.launch.deployments import CASES, CHAT, PAIRS, R1_ON_H200, workers

OUTSIDE = {
    **{"NODE_RANK": "1", "HEAD": "10.0.0.1", "HOST": "10.0.0.2", "SLOT": "1", "TRUSTED_NETWORK": "1"},
    **{"PREFILL_URLS": "http://10.0.0.3:8100 http://10.0.0.3:8101", "DECODE_URLS": "http://10.0.0.4:8100"},
    **{"WORKER_URLS": "http://10.0.0.5:8100 http://10.0.0.6:8100"},
}


def made_of(case: str, engine: str, **options: Any) -> Launch:
    return ds.launch(CASES[case][0](), engine=engine, **options)


def started(made: Launch, name: str, programs: Path, where: Path, **outside: str) -> list[str]:
    """What a script tells the program that it starts."""
    made.write(where)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **OUTSIDE, **outside}
    run = subprocess.run([str(where / name)], capture_output=True, text=True, env=environment, check=True)
    words: list[str] = json.loads(run.stdout)
    return words


def options_in(words: list[str], table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each flag of a command with its value, read as its table says."""
    place = 0
    while place < len(words):
        flag = prefix + words[place]
        if not words[place].startswith("--"):
            place += 1
            continue
        assert flag in table, f"{flag} has no source"
        read = {"int": int, "float": float, "json": json.loads, "text": str}
        if table[flag].takes == "switch":
            yield flag, True
            place += 1
        else:
            yield flag, read[table[flag].takes](words[place + 1])
            place += 2


def leaves(tree: Any, path: str, stop: set[str]) -> Iterator[tuple[str, Any]]:
    """Paths of a document with what stands there; lists do not count, nor what is below ``stop``."""
    if path in stop or not isinstance(tree, dict | list):
        yield path, tree
    elif isinstance(tree, list):
        for each in tree:
            yield from leaves(each, path, stop)
    else:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key, stop)


KINDS = {"switch": bool, "int": int, "float": (int, float), "text": str, "json": dict}


def assert_takes(option, value):
    """An option takes a value of its kind, of its choices where it has some; only a switch is true."""
    assert isinstance(value, KINDS[option.takes]), (option, value)
    assert not isinstance(value, bool) or option.takes == "switch", (option, value)
    assert not option.choices or value in option.choices, (option, value)


@pytest.mark.parametrize(("case", "engine"), [pair for pair in PAIRS if pair[1] in ENGINES])
def test_every_option_of_a_script_is_sourced_and_takes_its_value(case, engine, programs, tmp_path):
    table, made = load_launcher(engine).options, made_of(case, engine)
    for name, text in made.files.items():
        if name.endswith(".yaml"):
            for path, value in leaves(yaml.safe_load(text), "", set()):
                assert_takes(table[path], value)
            continue
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        words = started(made, name, programs, tmp_path)
        router = f"{engine}-router " if name == "router.sh" and engine != "trtllm" else ""
        if "trtllm-llmapi-launch" in words:  # flags before it are Slurm's
            words = words[words.index("trtllm-serve") :]
        for flag, value in options_in(words, table, router):
            assert_takes(table[flag], value)


R1 = ds.setup(*R1_ON_H200, speculation="mtp 0.8 0.6")
RARER = {
    "shared tokens": workers("decode", R1, ds.Sharding(tp_attn=8, ep=8, dcp=8, draft_tokens=2), batch=64),
    "shared prompts": workers("prefill", R1, ds.Sharding(tp_attn=4, ep=8, pcp=2), batch=1),
    "prompts held back": workers("colocated", R1, ds.Sharding(dp_attn=8, ep=8), batch=64, hold_steps=7),
    "copies": workers("decode", R1, ds.Sharding(dp_attn=8, ep=8, redundant_slots=8, draft_tokens=1), batch=64),
    "tiers": workers("prefill", R1, ds.Sharding(dp_attn=8, ep=8), batch=8, tiers=("dram", "ssd"), lengths=CHAT),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pool", RARER.values(), ids=RARER)
def test_options_of_rarer_pools_are_sourced(pool, engine):
    table = load_launcher(engine).options
    settings = ENGINES[engine].settings(pool, Weights(checkpoint="a/model"))
    for path, value in leaves(settings, "", {path for path, option in table.items() if option.takes == "json"}):
        assert path in table, f"{path} has no source"
        assert_takes(table[path], value)


MANIFESTS = [(case, "dynamo", engine) for case, engine in PAIRS if engine in ENGINES]
MANIFESTS += [(case, "llm-d", "vllm") for case in CASES]


@pytest.mark.parametrize(("case", "engine", "backend"), MANIFESTS)
def test_every_field_and_argument_of_a_manifest_is_sourced(case, engine, backend):
    own = load_launcher(engine.replace("-", "_")).options
    table = {**load_launcher(backend).options, **own}
    for name, text in made_of(case, engine, backend=backend).files.items():
        if name == "router.values.yaml":
            continue
        document = yaml.safe_load(text)
        stop = {path for path, option in own.items() if option.takes == "json"}
        for path, value in leaves(document, "", stop):
            assert_takes(own[path], value)
        for container in containers(document):
            for flag, value in options_in(container.get("args", []), table):
                assert_takes(table[flag], value)
                if flag == "--override-engine-args":
                    for path, each in leaves(value, "", set()):
                        assert_takes(table[path], each)


def containers(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, list):
        for each in tree:
            yield from containers(each)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if key == "containers":
                yield from value
            else:
                yield from containers(value)


def test_a_follower_of_two_nodes_is_told_its_place_and_serves_no_clients(programs, tmp_path):
    words = started(made_of("dep", "vllm"), "decode.sh", programs, tmp_path)
    told = dict(options_in(words, load_launcher("vllm").options))
    assert (told["--nnodes"], told["--node-rank"], told["--master-addr"]) == (2, "1", "10.0.0.1")
    assert "--headless" in told
    assert "--headless" not in started(made_of("dep", "vllm"), "decode.sh", programs, tmp_path, NODE_RANK="0")


def test_the_second_instance_of_a_node_has_its_own_gpus_and_ports(programs, tmp_path):
    made = made_of("unequal_tp", "vllm")
    probe = {**made.files, "prefill.sh": made.files["prefill.sh"].replace("exec vllm serve", "env; exec vllm serve")}
    made = Launch(engine="vllm", version="", files=probe, notes=())
    made.write(tmp_path)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **OUTSIDE}
    said = subprocess.run([tmp_path / "prefill.sh"], capture_output=True, text=True, env=environment, check=True).stdout
    assert "CUDA_VISIBLE_DEVICES=2,3\n" in said
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=5602\n" in said
    assert '"--port", "8101"' in said


def test_the_router_of_sglang_finds_the_bootstrap_port_of_each_slot(programs, tmp_path):
    words = started(made_of("unequal_tp", "sglang"), "router.sh", programs, tmp_path)
    assert words[words.index("--prefill") :] == [
        *("--prefill", "http://10.0.0.3:8100", "8998", "--prefill", "http://10.0.0.3:8101", "8999"),
        *("--decode", "http://10.0.0.4:8100"),
    ]


def test_the_router_of_tensorrt_llm_writes_sourced_keys(programs, tmp_path):
    words = started(made_of("dep", "trtllm"), "router.sh", programs, tmp_path)
    written = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
    table = load_launcher("trtllm").options
    for path, value in leaves(written, "", set()):
        assert_takes(table[path], value)
    assert written["context_servers"] == {"num_instances": 2, "urls": OUTSIDE["PREFILL_URLS"].split()}
    Path(words[words.index("--config") + 1]).unlink()


def test_given_nodes_of_tensorrt_llm_are_those_of_its_configuration():
    pool = workers("colocated", R1, ds.Sharding(dp_attn=8, ep=8), batch=64)
    text = ds.launch([pool], engine="dynamo", backend="trtllm", node_gpus=4).files["deployment.yaml"]
    component = yaml.safe_load(text)["spec"]["components"][1]
    (container,) = containers(component)
    config = json.loads(container["args"][-1])
    assert (component["multinode"]["nodeCount"], config["gpus_per_node"]) == (2, 4)


def test_dynamo_takes_the_engine_that_was_planned_for():
    assert [backend_of("dynamo", CASES[case][0]()) for case in ("unequal_tp", "dep", "rack")] == [
        "vllm",
        "sglang",
        "trtllm",
    ]


@pytest.mark.parametrize(
    ("model", "mapping", "alone"),
    [
        ("deepseek_r1", ds.Sharding(dp_attn=8, ep=8), True),
        ("deepseek_r1", ds.Sharding(tp_attn=2, dp_attn=4, ep=8), False),
        ("llama_3_1_8b", ds.Sharding(dp_attn=2, tp_ffn=2), False),
    ],
)
def test_dense_layers_of_ranks_of_one_gpu_are_not_cut_beside_experts(model, mapping, alone):
    pool = workers("colocated", ds.setup(model, "h200_sxm", "fp8"), mapping)
    settings = ENGINES["sglang"].settings(pool, Weights(checkpoint="a/model"))
    assert ("--moe-dense-tp-size" in settings) == alone
