"""An installation without extras: the main job runs, and what it cannot do is one line that says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from disagg_sim.extras import EXTRAS

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
SWEEP = """
name: small
models: [llama_3_1_8b]
systems: {h100_sxm: fp8}
traffic: [{isl: 1024, osl: 128}]
limits: {max_gpus: 2}
"""


def ran(*lines: str, at: Path) -> tuple[list[int], str, list[str]]:
    """Exit codes, output and lines on standard error of commands in a process without extras."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *lines], cwd=at, capture_output=True, text=True, check=True, timeout=120
    )
    codes = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("exit code ")]
    return codes, done.stdout, done.stderr.splitlines()


@pytest.mark.long
def test_the_main_job_needs_no_extra(tmp_path):
    (tmp_path / "small.yaml").write_text(SWEEP)
    codes, said, _ = ran(
        PLAN,
        "sweep small.yaml --out small --jobs 1 --no-figures",
        "explain small --best --figure best.png",
        "launch small --best --engine vllm",
        "specs list",
        at=tmp_path,
    )
    assert codes == [0] * 5
    assert (tmp_path / "small" / "summary.md").exists()
    assert (tmp_path / "best.png").exists()
    assert "serving policies are not listed: simulation needs numba" in said


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
    codes, _, errors = ran(*said, at=tmp_path)
    assert codes == [2] * len(said)
    assert errors == [f"error: {line}" for line in said.values()]


def test_a_notebook_hears_the_same_line(tmp_path):
    code = BLOCKED + "import disagg_sim as ds; ds.simulate"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("simulation needs numba: pip install 'disagg-sim[simulate]'")
