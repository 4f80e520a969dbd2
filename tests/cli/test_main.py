"""The command line: exit codes, one line for an error, whole help, nothing heavy loaded before it is needed."""

import gc
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from every_command import COMMANDS, LEAVES

from disagg_sim.cli import commands
from disagg_sim.cli.main import run
from disagg_sim.errors import REMOVED
from disagg_sim.scenario.options import FIXED

SWEEP = """
name: trial
models: [llama_3_1_8b]
systems: {h100_sxm: fp8}
traffic: [{isl: 1024, osl: 128}]
limits: {max_gpus: 2}
"""

HEAVY = ("matplotlib", "pandas", "duckdb", "scipy", "pulp", "joblib", "rich", "pydantic")
#: What the package itself does not need before it is used.
LATER = (*HEAVY, "numpy", "numba", "highspy", "yaml", "typer", "statsmodels", "torch", "huggingface_hub")


@pytest.fixture
def sweep_file(tmp_path):
    path = tmp_path / "trial.yaml"
    path.write_text(SWEEP)
    return path


def test_an_unwritable_directory_is_one_line(sweep_file, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for out in (blocked, blocked / "below", Path("/proc/none")):
        assert run(["sweep", str(sweep_file), "--out", str(out)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "cannot write results there" in lines[0]


def test_results_of_another_sweep_are_kept_unless_told_otherwise(sweep_file, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["sweep", str(sweep_file), "--out", str(out), "--jobs", "1"]
    assert run(command) == 0
    held = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    shape = "{isl: 1024, osl: 128}"
    elsewhere, renamed = SWEEP.replace(shape, "{isl: 512, osl: 64}"), SWEEP.replace("trial", "attempt")
    extended = SWEEP.replace(shape, f"{shape}, {{isl: 512, osl: 64}}")
    for text in (elsewhere, renamed):
        sweep_file.write_text(text)
        capsys.readouterr()
        assert run(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "holds the sweep 'trial' (1 cases, the first llama_3_1_8b-h100_sxm-fp8-measured-1024-128" in line
        assert "--overwrite" in line
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == held
    sweep_file.write_text(extended)
    assert run(command) == 0
    assert "2 of 4 blocks already stored" in capsys.readouterr().err
    (out / "manifest.json").unlink()  # as after a run that was killed before its end
    sweep_file.write_text(SWEEP.replace(shape, "{isl: 256, osl: 32}"))
    assert run(command) == 2
    assert "holds an unfinished sweep (2 cases" in capsys.readouterr().err
    assert run([*command, "--overwrite"]) == 0
    assert len(list((out / "points").iterdir())) == 1


def test_a_dry_run_counts_and_writes_nothing(sweep_file, tmp_path, capsys):
    assert run(["sweep", str(sweep_file), "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert "design points in 2 blocks, 1 cases" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "said"), [([], "compare"), (["specs"], "show")])
def test_a_bare_command_shows_its_help(arguments, said, capsys):
    assert run(arguments) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("Usage: disagg-sim")
    assert said in shown.out


@pytest.mark.parametrize(
    ("error", "arguments", "said"),
    [
        (OverflowError("int too large"), ["specs", "list"], "error: a number is too large or too small to be computed"),
        (ZeroDivisionError("by zero"), ["specs", "list", "1e-320"], "error: 'list 1e-320': a number is too large or"),
        (RecursionError("depth"), ["specs", "list"], "error: nested too deeply"),
        (MemoryError(), ["specs", "list"], "error: there is not enough memory for it; --memory refuses such runs"),
        (
            UnicodeEncodeError("ascii", "\u2588", 0, 1, "no"),
            ["specs", "list"],
            "error: a text that cannot be written or read as ascii",
        ),
        (PermissionError(13, "Permission denied", "a.csv"), ["specs", "list"], "error: a.csv: Permission denied"),
    ],
)
def test_what_is_beyond_the_machine_or_its_numbers_is_one_line(monkeypatch, capsys, error, arguments, said):
    def fails(*_):
        raise error

    command = type("Command", (), {"main": staticmethod(lambda **_: fails())})
    monkeypatch.setattr("typer.main.get_command", lambda _: command)
    monkeypatch.setattr("disagg_sim.reading._LAST", [])
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_a_division_by_zero_with_ordinary_numbers_is_a_bug_and_keeps_its_traceback(monkeypatch):
    command = type("Command", (), {"main": staticmethod(lambda **_: 1 / 0)})
    monkeypatch.setattr("typer.main.get_command", lambda _: command)
    with pytest.raises(ZeroDivisionError):
        run(["specs", "list", "model", "1e3"])


def test_a_locale_without_the_character_loses_no_text(tmp_path):
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", "from disagg_sim.cli.main import main; main()", "specs", "check", "größe.yaml"]
    done = subprocess.run(words, env=environment, capture_output=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (2, b"error: gr\\xf6\\xdfe.yaml: no such file\n")


@pytest.mark.parametrize("arguments", [["calibrate", "--help"], ["plan", "-h"]])
def test_help_and_a_wrong_command_load_no_room(arguments):
    """A command is imported when it is called."""
    heavy = {*HEAVY, "numpy", "numba", "disagg_sim.sweep", "disagg_sim.simulation", "lab.calibration"}
    heavy |= {"disagg_sim.facts.schema", "disagg_sim.cli.plan", "disagg_sim.cli.explain"}
    heavy -= {"pydantic"}  # typer itself reads options with it
    script = f"""import sys
from disagg_sim.cli.main import run
run({arguments!r})
print([m for m in {heavy!r} if m in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_importing_the_package_loads_nothing_heavy_and_takes_less_than_half_a_second():
    """CPU seconds, the best of two, as other processes may hold the cores."""
    script = f"""import sys, time
import disagg_sim
print(*[m for m in {LATER!r} if m in sys.modules], time.process_time())"""
    words = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert [len(each) for each in words] == [1, 1], words
    assert min(float(seconds) for (seconds,) in words) < 0.5


def test_a_missing_directory_of_specs_stops_every_command(tmp_path, monkeypatch, capsys):
    """Ignored, it would let a gate test the shipped specs in the place of the user's."""
    monkeypatch.setenv("DISAGG_SIM_PATH", str(tmp_path / "gone"))
    assert run(["check", "a", "--baseline", "b"]) == 2
    assert capsys.readouterr().err == f"error: DISAGG_SIM_PATH: {tmp_path / 'gone'}: no such directory\n"


def test_the_garbage_collector_works_again_once_a_command_is_imported():
    assert gc.isenabled()
    gc.unfreeze()  # what commands of other tests froze, which may die
    commands._imported("trace", "specs")
    assert gc.get_freeze_count() == 0  # in a process of somebody else it never rested
    gc.disable()
    commands._imported("trace", "specs")
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


@pytest.mark.parametrize("words", [["sweep", "--help"], ["plan", "--model", "llama_3_1_8b", "--system", "any"]])
def test_ctrl_c_is_a_line_while_a_command_is_imported(words, monkeypatch, capsys):
    def interrupted(*_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_imported", interrupted)
    assert run(words) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_limit_that_nothing_meets_ends_with_2_and_the_best(sweep_file, tmp_path, capsys):
    sweep_file.write_text(SWEEP.replace("max_gpus: 2", "max_gpus: 2, ftl_s: 1e-5"))
    assert run(["sweep", str(sweep_file), "--out", str(tmp_path / "out"), "--jobs", "1"]) == 2
    assert "the best FTL is" in capsys.readouterr().err.splitlines()[-1]


def test_a_sweep_that_is_interrupted_ends_with_130_and_says_how_to_go_on(sweep_file, tmp_path, capsys):
    with patch("disagg_sim.cli.sweep.run_sweep", side_effect=KeyboardInterrupt):
        assert run(["sweep", str(sweep_file), "--out", str(tmp_path / "out"), "--jobs", "1"]) == 130
    assert "the same command goes on where this one stopped" in capsys.readouterr().err


def shown(words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*words, option]) == 0
    said = capsys.readouterr()
    assert not said.err
    return said.out


def test_help_is_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for words in COMMANDS:
        text = shown(words, "--help", capsys)
        assert shown(words, "-h", capsys) == text
        assert max(map(len, text.splitlines())) <= 80, words
        assert "\u2026" not in text
        assert not re.search(r"^(?!Usage: ).*[\w,]\.\.\.$", text, flags=re.MULTILINE), text  # a line that was cut


def test_the_example_of_a_command_is_one():
    """Its words name the command, and its options are the command's own."""
    for words in LEAVES:
        example = LEAVES[words].epilog.removeprefix("Example: disagg-sim ").split()
        assert tuple(example[: len(words)]) == words
        known = {name for each in LEAVES[words].params for name in each.opts}
        assert {word for word in example if word.startswith("--")} <= known, words


def test_the_page_of_plans_lists_options_that_exist_once():
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    listed = [
        word for row in re.findall(r"^\| (`--.*?) \|", page, re.MULTILINE) for word in re.findall(r"--[\w-]+", row)
    ]
    assert len(listed) > 15
    assert len(listed) == len(set(listed))
    assert set(listed) <= {name for each in LEAVES["plan",].params for name in each.opts}


SHORT_PLAN = ["plan", "--model", "llama_3_1_8b", "--system", "h100_sxm", "--isl", "64", "--osl", "8", "--rate", "1"]


@pytest.mark.parametrize(
    ("option", "asked"),
    [
        ("--popularity-drift", [*SHORT_PLAN, "--popularity-drift", "9"]),
        ("--no-figures", ["sweep", "smoke", "--no-figures"]),
        ("--bucket", ["sweep", "smoke", "--bucket", "s3://a"]),
        ("store compact", ["store", "compact", "results"]),
        ("--tp", ["evaluate", *SHORT_PLAN[1:], "--tp", "4"]),
    ],
)
def test_a_removed_option_is_told(option, asked, capsys):
    assert run(asked) == 2
    assert f"{option} {REMOVED[option]}" in capsys.readouterr().err


def test_a_removed_key_is_told(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("models: [llama_3_1_8b]\npopularity_drift_s: 600\n")
    assert run(["specs", "check", str(file)]) == 2
    assert f"popularity_drift_s {REMOVED['popularity_drift_s']}" in capsys.readouterr().err


def test_a_removed_option_of_a_policy_is_told(tmp_path, capsys):
    file, shipped = tmp_path / "mine.yaml", Path(__file__).parents[2] / "scenarios" / "azure_conv_on_h100.yaml"
    file.write_text(shipped.read_text().replace("[vllm, ", "[{kind: dopd, label: own, correct: false}, "))
    assert run(["specs", "check", str(file)]) == 2
    assert f"correct {FIXED}" in capsys.readouterr().err
