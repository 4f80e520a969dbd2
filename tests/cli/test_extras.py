"""An installation without extras: what it cannot do is one line that says what to install.

That the main job runs there, ``.ci/run`` shows with the wheel.
"""

import subprocess
import sys
from pathlib import Path

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
