"""docs/security.md: which commands open a connection, what results say of the machine, and what extras bring."""

import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from disagg_sim.extras import EXTRAS

SWEEP = (
    "name: small\nmodels: llama_3_1_8b\nsystems: {h100_sxm: fp8}\ntraffic: [{isl: 1024, osl: 128}]\n"
    "limits: {max_gpus: 1, gpu_cap: 4}\nmodes: [colocated]\n"
)
SCENARIO = """
name: small
model: llama_3_1_8b
system: h100_sxm
precision: fp8
trace: {path: few.csv}
slo: {ttft_s: 1.0, tpot_s: 0.1}
deployments: {one: {gpus: 1, colocated: {tp: 1, instances: 1}}}
policies: [vllm]
"""
COMMANDS = """
plan --model llama_3_1_8b --system h100_sxm --trace HERE/few.csv --rate 4 --emit vllm --out HERE/plan
sweep HERE/small.yaml --out HERE/sweep --jobs 2
explain HERE/sweep --best --figure HERE/best.png
launch HERE/sweep --best --engine sglang --out HERE/start
sensitivity HERE/small.yaml --out HERE/sweep --jobs 1
report sweep
compare HERE/sweep HERE/sweep
specs check HERE/small.yaml
trace stats HERE/few.csv
model import HERE/config.json
"""
SIMULATED = "simulate HERE/scenario.yaml --out HERE/runs --jobs 1"
#: Runs commands, then prints their exit codes and every use of the network that Python was told of.
PROGRAM = """
import json, sys
told = []
names = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
sys.addaudithook(lambda event, args: told.append([event, str(args[1:])]) if event in names else None)
from disagg_sim.cli import plan
from disagg_sim.cli.main import run
plan.changes_of = lambda _: None  # other plans
codes = [run(words) for words in json.loads(sys.argv[1])]
print(json.dumps([codes, told]), file=sys.stderr)
"""


@pytest.mark.long
def test_no_command_connects_anywhere_and_results_say_nothing_of_the_machine(tmp_path):
    """The directory's name stands for paths; Parquet and pictures are searched as bytes."""
    here = tmp_path / "whose_is_this_directory"
    here.mkdir()
    (here / "small.yaml").write_text(SWEEP)
    (here / "scenario.yaml").write_text(SCENARIO)
    rows = "".join(f"{second},{100 + second},20\n" for second in range(40))
    (here / "few.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}
    (here / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | sizes))
    given = {path for path in here.rglob("*") if path.is_file()}
    lines = COMMANDS.split("\n")[1:-1]
    try:
        pytest.importorskip("numba")
        lines.append(SIMULATED)
    except pytest.skip.Exception:  # an installation without the extra
        pass
    commands = [[word.replace("HERE", str(here)) for word in line.split()] for line in lines]
    run = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=here)
    codes, told = json.loads(done.stderr.splitlines()[-1])
    assert dict(zip(lines, codes, strict=True)) == dict.fromkeys(lines, 0), done.stderr
    assert told == []
    own = [here.name, *(name for name in (platform.node(), getpass.getuser()) if len(name) > 5)]
    written = [path for path in here.rglob("*") if path.is_file() and path not in given]
    assert len(written) > 20
    assert [(path, name) for path in written for name in own if name.encode() in path.read_bytes()] == []


#: Runs commands one after the other where no package of an extra can be imported; prints each exit code.
BLOCKED = f"""
import sys
for name in {[package for extra in EXTRAS.values() for package in extra.packages]!r}:
    sys.modules[name] = None
from disagg_sim.cli.main import run
for line in sys.argv[1:]:
    print("exit code", run(line.split()), flush=True)
"""

PLAN = "plan --model llama_3_1_8b --system h100_sxm --isl 2048 --osl 256 --rate 40"


def ran(*lines: str, at: Path) -> tuple[list[int], str, list[str]]:
    """Exit codes, output and lines on standard error of commands in a process without extras."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *lines], cwd=at, capture_output=True, text=True, check=True, timeout=120
    )
    codes = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("exit code ")]
    return codes, done.stdout, done.stderr.splitlines()


def test_what_an_extra_brings_is_one_line_without_it(tmp_path):
    simulation = "simulation needs numba: pip install 'disagg-sim[simulate]'"
    said = {
        f"{PLAN} --simulate": simulation,
        "simulate azure_conv_on_h100 --out out": simulation,
        "reproduce arrow --out out": simulation,
        "specs show policy vllm": simulation,
        "calibrate engine served.csv --engine vllm --out own.yaml": "a fit to measurements needs scipy: pip install "
        "'disagg-sim[calibrate]'",
        "measure --out own.csv --system h200_sxm --device cpu": "timing the kernels of a GPU needs torch: pip install "
        "'disagg-sim[measure]'",
    }
    codes, shown, errors = ran("specs list", *said, at=tmp_path)
    assert codes == [0] + [2] * len(said)
    assert "serving policies are not listed: simulation needs numba" in shown
    assert errors == [f"error: {line}" for line in said.values()]


def test_a_notebook_hears_the_same_line(tmp_path):
    code = BLOCKED + "import disagg_sim as ds; ds.simulate"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("simulation needs numba: pip install 'disagg-sim[simulate]'")
