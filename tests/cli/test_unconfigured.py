"""What lies in the working directory is neither configuration nor code to what a command imports and starts."""

import subprocess
import sys
from pathlib import Path

from disagg_sim.facts.yaml_files import find_document, shipped_root

SWEEP = """name: small
models: llama_3_1_8b
systems: {h100_sxm: fp8}
traffic: [{isl: 1024, osl: 128}]
limits: {max_gpus: 2, gpu_cap: 4}
modes: [colocated, disaggregated]
"""
#: Like the console script: without the working directory among the places of modules.
RUN = "import sys; sys.path.remove(''); from disagg_sim.cli.main import run; sys.exit(run(sys.argv[1:]))"
COMPILED = "import disagg_sim.simulation.kernel.compiled, numba; numba.core.config.reload_config()"


def ran(folder: Path, code: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_configuration_of_the_working_directory_is_read(tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: [\n")
    words = ("--model", "llama_3_1_8b", "--system", "h100_sxm", "--precision", "fp8", "--figure", "parts.svg")
    ran(tmp_path, RUN.replace("from", f"{COMPILED}; from"), "explain", *words)
    assert (tmp_path / "parts.svg").stat().st_size


def test_workers_take_no_modules_of_the_working_directory(tmp_path):
    for name in ("joblib", "multiprocessing", "numpy"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n")
    (tmp_path / "small.yaml").write_text(SWEEP)
    ran(tmp_path, RUN, "sweep", "small.yaml", "--out", "out", "--jobs", "2")
    assert not (tmp_path / "ran").exists()


def test_the_name_of_a_shipped_file_means_none_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datacenter_day").write_text("policy_file: mine.py\n")
    assert find_document("scenario", "datacenter_day").is_relative_to(shipped_root())
    assert find_document("scenario", "./datacenter_day") == Path("datacenter_day")
