"""What others could do to a machine by files that are emitted: no text runs as code, nothing listens unasked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.errors import InputError, SpecError
from disagg_sim.facts.launcher import checkpoint_name
from disagg_sim.facts.load import load_checkpoints, load_launcher
from disagg_sim.facts.yaml_files import shipped_root
from disagg_sim.launch.engines import ENGINES
from disagg_sim.launch.manifests import dynamo_manifest, llm_d_manifests
from disagg_sim.launch.scripts import scripts_of
from disagg_sim.launch.workers import Weights
from tests.launch.deployments import CASES, PAIRS, tp, workers
from tests.launch.test_launch_options import OUTSIDE, containers

#: Words that a shell takes for more than text; each would leave a file named ``owned``, or end its quotes.
WORDS = (
    *("$(touch owned)", "`touch owned`", "; touch owned;", "' ; touch owned #", '" ; touch owned #', "}; touch owned"),
    *("\n touch owned \n", "|| touch owned", "${IFS}", "\\", "'", '"', "&", "*", "~", "--model", " ", "é", "a/model"),
)
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map("".join)
SLOW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


ONE = workers("colocated", ds.setup("llama_3_1_8b", "h100_sxm", "fp8", engine="vllm"), tp(1))
DRAFTING = ds.setup("kimi_k2_5", "h200_sxm", "fp8", speculation="kimi_k2_5_eagle3_thinking")


def started(
    files: dict[str, str], name: str, programs: Path, where: Path, **outside: str
) -> subprocess.CompletedProcess:
    for each, text in files.items():
        (where / each).write_text(text)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **OUTSIDE, **outside}
    return subprocess.run(
        ["bash", str(where / name)], cwd=where, capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize("engine", ENGINES)
@SLOW
@given(name=TEXTS, drafter=TEXTS, version=TEXTS)
def test_every_text_of_a_script_is_told_as_it_is_and_runs_nothing(engine, name, drafter, version, programs, tmp_path):
    """Whatever the schema lets through: here the names come in without it."""
    mapping = ds.Sharding(tp_attn=8, tp_ffn=8, draft_tokens=2)
    pool = [workers("colocated", DRAFTING, mapping, batch=8)]
    own = Weights(checkpoint=name, drafter=Weights(checkpoint=drafter))
    files = scripts_of(engine, pool, [own], version.replace("\n", " "))
    ran = started(files, "colocated.sh", programs, tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert name in told
    if engine == "trtllm":
        assert yaml.safe_load(files["colocated.yaml"])["speculative_config"]["speculative_model"] == drafter
    elif engine == "sglang":
        assert told[told.index("--speculative-draft-model-path") + 1] == drafter
    else:
        assert json.loads(told[told.index("--speculative-config") + 1])["model"] == drafter
    assert not (tmp_path / "owned").exists()


@SLOW
@given(name=TEXTS)
def test_every_text_of_a_manifest_is_told_as_it_is(name):
    pool = CASES["one_pool"][0]()[0]
    pairs = [(pool, Weights(checkpoint=name))]
    made = [dynamo_manifest("vllm", pairs, load_launcher("dynamo"))]
    made += llm_d_manifests(pairs, load_launcher("llm_d"), "image:1").values()
    told = [each["args"] for text in made for each in containers(yaml.safe_load(text)) if "args" in each]
    assert told
    assert all(name in args for args in told)


@given(text=st.one_of(TEXTS, st.text(max_size=20)))
def test_a_name_with_signs_of_a_shell_is_refused_in_one_line(text):
    odd = (
        not text
        or not text.isascii()
        or text.startswith(("-", " "))
        or any(sign in text for sign in "$`;'\"\n\\&*|<>(){}!?#[]")
    )
    try:
        checkpoint_name(text)
    except ValueError:
        if text:
            with pytest.raises(InputError, match="is no name of a checkpoint; allowed") as refused:
                ds.launch([ONE], engine="vllm", checkpoint=text)
            assert "\n" not in str(refused.value)
    else:
        assert not odd


def test_every_published_checkpoint_has_such_a_name():
    for kinds in load_checkpoints().models.values():
        assert all(checkpoint_name(name) == name for name in kinds.values())


def test_a_file_of_ones_own_with_such_a_name_is_refused(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text('title: mine\nmodels: {llama_3_1_8b: {bf16: "a/$(touch owned)"}}\nsource: me\n')
    with pytest.raises(SpecError, match=r"mine.yaml: models.llama_3_1_8b.bf16: .* is no name of a checkpoint"):
        load_checkpoints(mine)


def test_a_model_of_ones_own_under_a_shipped_name_is_told(tmp_path):
    shipped, mine = shipped_root() / "models" / "llama_3_1_8b.yaml", tmp_path / "llama_3_1_8b.yaml"
    for text in (shipped.read_text(), shipped.read_text().replace("count: 32", "count: 16")):
        mine.write_text(text)
        made = ds.launch([workers("colocated", ds.setup(mine, "h100_sxm", "fp8"), tp(1))], engine="vllm")
        assert any("shipped, from which yours differs" in note for note in made.notes) == ("count: 16" in text)


def test_workers_have_names_that_pods_may_have():
    for name in ("Prefill", "a b", "a;b", "-a", "a" * 64, "../a"):
        with pytest.raises(InputError, match="of workers; allowed"):
            workers("decode", ds.setup("llama_3_1_8b", "h100_sxm", "fp8"), tp(1), name=name)
    with pytest.raises(InputError, match="name router of workers: files and manifests have it already"):
        workers("decode", ds.setup("llama_3_1_8b", "h100_sxm", "fp8"), tp(1), name="router")
    with pytest.raises(InputError, match="role 'decod' is unknown, did you mean 'decode'"):
        workers("decod", ds.setup("llama_3_1_8b", "h100_sxm", "fp8"), tp(1))


#: Several nodes, and one pool on one.
SCRIPTS = [(case, engine) for case in ("dep", "one_pool") for engine in ENGINES]


def host_of(ran: subprocess.CompletedProcess) -> str:
    """The address that a program is told to listen on."""
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    if "--host" in told:
        return told[told.index("--host") + 1]
    config = Path(told[told.index("--config") + 1])
    address: str = yaml.safe_load(config.read_text())["hostname"]
    config.unlink()
    return address


@pytest.mark.parametrize(("case", "engine"), SCRIPTS)
def test_nothing_listens_on_all_addresses_unless_it_is_asked_to(case, engine, programs, tmp_path):
    pools = CASES[case][0]()
    files = ds.launch(pools, engine=engine).files
    assert not any("0.0.0.0" in text for text in files.values())
    small = sum(each.gpus * each.instances for each in pools) <= 8
    for name in (name for name in files if name.endswith(".sh")):
        assert host_of(started(files, name, programs, tmp_path, ROUTER_HOST="", HOST="10.0.0.2")) == (
            "127.0.0.1" if name == "router.sh" else "10.0.0.2"
        )
        if name != "router.sh":
            bare = started(files, name, programs, tmp_path, HOST="")
            assert (bare.returncode == 0) == small
            assert small or "allowed: address of this node in a private network" in bare.stderr


@pytest.mark.parametrize(("case", "engine"), SCRIPTS)
def test_who_is_reached_by_others_asks_for_a_key_or_is_told_that_the_network_is_private(
    case, engine, programs, tmp_path
):
    files, key = ds.launch(CASES[case][0](), engine=engine).files, "a b'$(touch owned)"
    for name in (name for name in files if name.endswith(".sh")):
        for address in ("0.0.0.0", "127.example.org"):
            there = {"HOST": address, "ROUTER_HOST": address, "TRUSTED_NETWORK": ""}
            bare = started(files, name, programs, tmp_path, **there, API_KEY=" \t")
            assert (bare.returncode, bare.stdout) == (1, "")
            assert "TRUSTED_NETWORK=''; allowed: 1, where nobody else reaches" in bare.stderr
            assert ("API_KEY" in bare.stderr) == (engine == "sglang")
        keyed = started(files, name, programs, tmp_path, **there, API_KEY=key)
        assert (keyed.returncode == 0) == (engine == "sglang"), "vLLM has routes that ask for none"
        assert (key in keyed.stdout) == (engine == "sglang"), "of the others no argument, which all users see"
    assert not (tmp_path / "owned").exists()


def test_modules_of_the_working_directory_are_not_run(tmp_path):
    (tmp_path / "python3").symlink_to(sys.executable)
    for planted in ("sglang.py", "sglang_router.py"):
        (tmp_path / planted).write_text("open('owned', 'w')")
    files = ds.launch(CASES["unequal_tp"][0](), engine="sglang").files
    for name in files:
        assert "No module named" in started(files, name, tmp_path, tmp_path).stderr
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("value", ["a[$(touch owned)]", "--trust-remote-code", "1\n2", "08"])
@pytest.mark.parametrize("engine", ENGINES)
def test_values_from_outside_run_nothing_and_are_no_options(engine, value, programs, tmp_path):
    read = {
        "prefill.sh": ("SLOT", "HOST", "CHECKPOINT"),
        "decode.sh": ("NODE_RANK", "HEAD") if engine != "trtllm" else (),
        "router.sh": ("ROUTER_HOST", "PREFILL_URLS", "DECODE_URLS"),
    }
    files = ds.launch(CASES["dep"][0](), engine=engine).files
    for name, variables in read.items():
        for variable in variables:
            ran = started(files, name, programs, tmp_path, **{variable: value})
            if (variable, value) in (("HEAD", "08"), ("HOST", "08"), ("ROUTER_HOST", "08"), ("CHECKPOINT", "08")):
                continue  # a name, as good as any
            assert (ran.returncode, ran.stdout) == (1, ""), variable
            assert ran.stderr.startswith(f"{variable}=")
            assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "owned").exists()


def test_another_checkpoint_than_the_planned_one_is_told(programs, tmp_path):
    files = ds.launch(CASES["one_pool"][0](), engine="vllm").files
    assert '"Qwen/Qwen3-32B"' in started(files, "colocated.sh", programs, tmp_path, MODEL="mine").stdout
    other = started(files, "colocated.sh", programs, tmp_path, CHECKPOINT="/disk/mine")
    assert '"serve", "/disk/mine"' in other.stdout
    assert other.stderr == "starting CHECKPOINT=/disk/mine in place of Qwen/Qwen3-32B\n"


def test_a_script_without_a_known_checkpoint_asks_for_one(programs, tmp_path):
    at = ds.setup("llama_3_1_70b", "b200_sxm", "nvfp4_fp8kv")
    files = ds.launch([workers("colocated", at, tp(1))], engine="vllm").files
    bare = started(files, "colocated.sh", programs, tmp_path)
    assert (bare.stdout, bare.stderr) == ("", "CHECKPOINT=''; allowed: a name on the hub, or a path\n")
    assert '"serve", "a/model"' in started(files, "colocated.sh", programs, tmp_path, CHECKPOINT="a/model").stdout


@pytest.mark.parametrize(("case", "engine"), [pair for pair in PAIRS if pair[0] in ("dep", "one_pool")])
def test_notes_name_every_port_and_the_private_network(case, engine):
    made = ds.launch(CASES[case][0](), engine=engine)
    (ports,) = [line for line in made.notes if line.startswith("ports: ")]
    named: dict[str, Any] = {
        "8998": ("--disaggregation-bootstrap-port",),
        "5600": ("NIXL_SIDE_CHANNEL", "containerPort: 5600"),
        "29500": ("29500",),
        "8100": ("8100 + SLOT",),
    }
    text = "\n".join(made.files.values())
    for port, signs in named.items():
        assert (port in ports) == any(sign in text for sign in signs) or (
            engine == "dynamo" and port in ("5600", "29500")
        )
    assert any("private network" in line for line in made.notes) == (case == "dep")
