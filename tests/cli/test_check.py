"""``check`` and ``compare``: a planted change of two percent is caught and named, unchanged results pass."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from disagg_sim.cli.main import run
from disagg_sim.facts.yaml_files import find_file

SWEEP = """
name: curves
models: llama_3_1_8b
systems: {h100_sxm: fp8}
traffic: [{isl: 1024, osl: 128}]
limits: {max_gpus: 2, gpu_cap: 32}
"""
FIT = r"(engine: trtllm, .*kind: gqa, cache: fp8, e_memory: )([0-9.]+)(, )"  # of decode attention


def sweep(out: Path) -> Path:
    (out.parent / "curves.yaml").write_text(SWEEP)
    assert run(["sweep", str(out.parent / "curves.yaml"), "--out", str(out), "--jobs", "1"]) == 0
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results to be held against baselines; not to be changed."""
    return sweep(tmp_path_factory.mktemp("curves") / "results")


def planted(root: Path, factor: float, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same sweep with one number of one fitted row times ``factor``."""
    source = find_file("efficiency", "h100_sxm")
    text, count = re.subn(FIT, lambda m: f"{m[1]}{float(m[2]) * factor:.6g}{m[3]}", source.read_text())
    assert count == 1
    directory = root / "specs" / "hw_specs" / "efficiency"
    directory.mkdir(parents=True)
    (directory / source.name).write_text(text)
    monkeypatch.setenv("DISAGG_SIM_PATH", str(root / "specs"))
    return sweep(root / "planted")


def test_unchanged_results_pass(results, tmp_path, capsys):
    again = sweep(tmp_path / "again")
    capsys.readouterr()
    assert run(["check", str(again), "--baseline", str(results)]) == 0
    assert capsys.readouterr().out.startswith("ok: 1 frontier unchanged")
    assert run(["check", str(again), "--baseline", str(results / "frontier.csv")]) == 0


def test_what_differs_in_the_inputs_is_named(results, tmp_path, monkeypatch, capsys):
    """Two values of a spec file, and the version of a library that computed the baseline."""
    source = find_file("hardware", "h100_sxm")
    changed = re.sub(r"(?m)^hbm_bandwidth:.*$", "hbm_bandwidth: 3.0 TB/s", source.read_text())
    (tmp_path / "specs" / "hw_specs").mkdir(parents=True)
    (tmp_path / "specs" / "hw_specs" / source.name).write_text(changed.replace("sm_count: 132", "sm_count: 131"))
    monkeypatch.setenv("DISAGG_SIM_PATH", str(tmp_path / "specs"))
    out, baseline = sweep(tmp_path / "out"), tmp_path / "baseline"
    shutil.copytree(results, baseline)
    manifest = json.loads((baseline / "manifest.json").read_text())
    manifest["versions"]["numpy"] = "1.0"
    (baseline / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert run(["check", str(out), "--baseline", str(baseline), "--json", str(tmp_path / "report.json")]) == 1
    said = capsys.readouterr().out
    assert "inputs: 3 values differ" in said
    assert "  hbm_bandwidth: 3.35 TB/s -> 3.0 TB/s in hw_specs/h100_sxm.yaml" in said
    assert "  sm_count: 132 -> 131 in hw_specs/h100_sxm.yaml" in said
    assert "  numpy: 1.0 -> " in said
    (first, *_) = json.loads((tmp_path / "report.json").read_text())["inputs"]
    assert (first["key"], first["old"], first["new"]) == ("hbm_bandwidth", "3.35 TB/s", "3.0 TB/s")
    (baseline / "manifest.json").unlink()
    assert run(["check", str(out), "--baseline", str(baseline)]) == 1
    assert f"inputs: not compared, as {baseline} has no manifest.json" in capsys.readouterr().out


def test_a_moved_curve_without_a_changed_input_says_so(results, tmp_path, capsys):
    """As another machine, or a library below those whose versions are kept, may cause it."""
    table = pd.read_csv(results / "frontier.csv")
    table["tokens_per_s_per_gpu"] *= 0.9
    text = table.to_csv(index=False)
    (tmp_path / "frontier.csv").write_text(text)
    manifest = json.loads((results / "manifest.json").read_text())
    manifest["tables"]["frontier.csv"] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for baseline in (results, results / "frontier.csv"):
        assert run(["check", str(tmp_path), "--baseline", str(baseline)]) == 1
        assert "inputs: the same specs, options, versions and code on both sides" in capsys.readouterr().out


def test_no_damage_of_the_frontier_passes_the_checksum_of_its_manifest(results, tmp_path, capsys):
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    path, dice = tmp_path / "frontier.csv", random.Random(5)
    whole = path.read_bytes()
    for _ in range(10):
        hurt = bytearray(whole)
        hurt[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        path.write_bytes(hurt)
        assert run(["check", str(tmp_path), "--baseline", str(results)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "not the table that manifest.json was written for" in line
    path.unlink()
    assert run(["check", str(tmp_path), "--baseline", str(results)]) == 2
    assert "holds no frontier.csv" in capsys.readouterr().err


MAIN = "from disagg_sim.cli.main import main; main()"


def process(arguments: list[str], *, before: str = "", output: int | None = subprocess.PIPE) -> tuple[int, str]:
    """Exit code and words on standard error of the console script."""
    command = [sys.executable, "-c", f"{before}\n{MAIN}", *arguments]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def test_a_crash_is_no_moved_curve(results):
    crash = "import disagg_sim.sweep.compare as c\ndef crash(*a, **k): 1 / 0\nc.compare_frontiers = crash"
    code, said = process(["check", str(results), "--baseline", str(results)], before=crash)
    assert code == 3
    assert "ZeroDivisionError" in said
    assert said.splitlines()[-1].startswith("error: a fault of disagg-sim")


def test_a_plan_is_written_where_nobody_reads_its_answer(tmp_path):
    """As in ``plan ... --out DIR | head``: what was computed is not lost."""
    reader, writer = os.pipe()
    os.close(reader)
    question = "plan --model llama_3_1_8b --system h100_sxm --isl 2048 --osl 256 --rate 40"
    briefly = "from disagg_sim.cli import plan\nplan.changes_of = lambda _: None"
    code, said = process([*question.split(), "--out", str(tmp_path)], before=briefly, output=writer)
    os.close(writer)
    assert (code, said) == (3, "error: the output was closed before its end\n")
    assert {each.name for each in tmp_path.iterdir()} == {"plan.json", "plan.txt", "designs.csv"}
    assert "answer" in (tmp_path / "plan.txt").read_text()


def test_a_closed_standard_error_is_no_moved_curve(results):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", MAIN, "check", "gone", "--baseline", str(results)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, check=False)
    os.close(writer)
    assert done.returncode == 3


def test_without_any_standard_output_the_exit_code_is_the_verdict(results):
    command = f'exec "{sys.executable}" -c "{MAIN}" check "{results}" --baseline "{results}" >&-'
    assert subprocess.run(["sh", "-c", command], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_below_the_output_is_no_moved_curve(results):
    with open("/dev/full", "w") as full:
        code, said = process(["check", str(results), "--baseline", str(results)], output=full.fileno())
    assert (code, said) == (3, "error: No space left on device\n")


def test_two_percent_on_one_coefficient_fail_and_the_moved_points_are_named(results, tmp_path, monkeypatch, capsys):
    """What passes ``--allow-better`` is on record, ``check_better``."""
    out = planted(tmp_path, 0.98, monkeypatch)
    capsys.readouterr()
    report = tmp_path / "report.json"
    check = ["check", str(out), "--baseline", str(results)]
    assert run([*check, "--all", "--json", str(report)]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("FAILED: 1 of 1 frontier changed")
    assert "some lost ground" in said
    assert "inputs: 1 value differs\n" in said
    assert re.search(r"\n  \S+\[\d+\]\.e_memory: \S+ -> \S+ in hw_specs/efficiency/h100_sxm.yaml\n", said)
    old, new = (pd.read_csv(path / "frontier.csv") for path in (results, out))
    (front,) = json.loads(report.read_text())["fronts"]
    assert {p["configuration"]["decode_batch"] for p in front["moved"]} == set(old["decode_batch"]) & set(
        new["decode_batch"]
    )
    assert len(front["moved"]) > 5
    for point in front["moved"]:
        at, now = point["baseline"]["tokens_per_s_per_user"], point["results"]["tokens_per_s_per_user"]
        assert at in set(old["tokens_per_s_per_user"])
        assert now < at
        assert f"{at:.5g} -> {now:.5g}" in said
        assert f"batch {point['configuration']['decode_batch']} " in said
    assert run([*check, "--allow-better"]) == 1
    assert run([*check, "--rtol", "0.05"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "{results}", "--baseline", "{empty}"], "holds no frontier.csv"),
        (["check", "{results}", "--baseline", "{results}", "--rtol", "nan"], "rtol nan is out of range"),
        (["check", "{results}", "--baseline", "{results}", "--json", "{empty}"], "is a directory; name a file in it"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said, results, tmp_path, capsys):
    assert run([argument.format(results=results, empty=tmp_path) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]
