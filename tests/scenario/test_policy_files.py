"""Policy files: what is refused of them, and that a check runs nothing."""

import os

import pytest
import yaml

from disagg_sim.cli.main import run
from disagg_sim.errors import SpecError
from disagg_sim.scenario.options import MOST_BYTES, load_policies
from disagg_sim.scenario.spec import check_scenario
from disagg_sim.simulation.policy import POLICIES

TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},{100 + i},{10 + i}\n" for i in range(20))
SCENARIO = {
    "name": "trial",
    "model": "llama_3_1_8b",
    "system": "h100_sxm",
    "precision": "fp8",
    "trace": {"path": "short.csv"},
    "slo": {"ttft_s": 2.0, "tpot_s": 0.15},
    "policy_file": "mine.py",
    "deployments": {"four": {"gpus": 4, "prefill": {"instances": 2}, "decode": {"instances": 2}}},
}


@pytest.fixture
def written(tmp_path):
    """Writes a policy file and a scenario that names it, in a directory that ends with nothing else in it."""
    (tmp_path / "short.csv").write_text(TRACE)

    def write(text: str, *kinds: object) -> str:
        (tmp_path / "mine.py").write_text(text)
        (tmp_path / "trial.yaml").write_text(yaml.safe_dump({**SCENARIO, "policies": [*kinds] or ["disaggregated"]}))
        return str(tmp_path / "trial.yaml")

    yield write
    assert {path.name for path in tmp_path.iterdir()} == {"short.csv", "mine.py", "trial.yaml"}
    assert "plain" not in POLICIES


def faults(path: str) -> str:
    with pytest.raises(SpecError) as caught:
        check_scenario(path)
    return str(caught.value)


@pytest.mark.parametrize("line", ["open('ran', 'w')", "import sys; sys.exit()", "1 / 0", "while True: pass"])
@pytest.mark.parametrize("policy", ["disaggregated", {"kind": "plain", "any": 1}])
def test_a_check_runs_nothing(written, line, policy, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert check_scenario(written(f"{line}\n", policy)) == (
        "mine.py: not run; simulate checks its policies and their options",
    )


def test_the_command_says_what_was_not_checked(written, capsys):
    assert run(["specs", "check", written("", "plain")]) == 0
    table, note = capsys.readouterr().out.splitlines()
    assert table.startswith("ok  scenario  ")
    assert "mine.py: not run; simulate checks its policies and their options" in note


def test_a_file_that_is_too_large_is_one_line(written):
    assert "mine.py: cannot be read: larger than 1 MB" in faults(written("#" * MOST_BYTES + "\n"))


def test_what_python_would_not_import_is_refused_by_the_check_too(written, tmp_path):
    """A pipe would never end."""
    path = written("")
    (tmp_path / "mine.py").unlink()
    os.mkfifo(tmp_path / "mine.py")
    (tmp_path / "mine.txt").write_text("")
    assert "mine.py: no such file, or not a Python file" in faults(path)
    for name in ("mine.txt", "mine.py"):
        with pytest.raises(SpecError, match=f"{name}: no such file, or not a Python file"):
            load_policies(str(tmp_path / name))
    (tmp_path / "mine.txt").unlink()


def test_a_file_written_since_it_was_imported_is_told_and_not_run_as_it_was(tmp_path):
    """A worker of a cluster lives through many runs."""
    path = tmp_path / "kept.py"
    path.write_text("answer = 1\n")
    load_policies(str(path))
    load_policies(str(path))
    path.write_text("answer = 2\n")
    with pytest.raises(SpecError, match=r"kept\.py: written since this process imported it; start the process"):
        load_policies(str(path))
