"""Spoilt inputs of every command end in an answer or in one clear error: nothing else is seen, run, or waited for.

``DISAGG_SIM_FUZZ=5000`` takes so many inputs, ``DISAGG_SIM_FUZZ_FIRST=100000`` begins at another seed. A seed that
fails is looked at with ``python tests/fuzz/worker.py SEED 1 DIR``.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import worker
from every_command import LEAVES, command_of
from inputs import KINDS, spoilt
from worker import judged

pytestmark = pytest.mark.long

INPUTS = int(os.environ.get("DISAGG_SIM_FUZZ", "100"))
FIRST = int(os.environ.get("DISAGG_SIM_FUZZ_FIRST", "0"))
WORKERS = 2 if INPUTS > 200 else 1  # each makes results to spoil first
#: Commands that are met by their arguments alone, and why; all others are run to an answer, too.
ARGUMENTS_ALONE = {
    ("reproduce",): "the shortest study takes a minute, and reads traces that are not at hand",
    ("calibrate", "engine"): "its answer needs runs of eight loads on one engine, more than a spoilt file keeps",
    ("calibrate", "uncertainty"): "its answer needs residuals of every operator at once",
    ("mcp",): "it answers a client, and here standard output is none",
    ("measure",): "it times kernels of a GPU by torch, neither of which is at hand",
}
WORKER = Path(__file__).parent / "worker.py"


def _started(first: int, count: int, folder: Path) -> tuple[subprocess.Popen[bytes], Path, Path]:
    out, err = folder / f"{first}.jsonl", folder / f"{first}.err"
    with out.open("wb") as output, err.open("wb") as errors:
        command = [sys.executable, str(WORKER), str(first), str(count)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "dumb", "COLUMNS": "80"}
        return subprocess.Popen(command, stdout=output, stderr=errors, env=env), out, err


def test_spoilt_inputs_end_in_an_answer_or_in_one_clear_error(tmp_path):
    share = -(-INPUTS // WORKERS)
    running = [_started(FIRST + i * share, min(share, INPUTS - i * share), tmp_path) for i in range(WORKERS)]
    told, broken = [], []
    for process, out, err in running:
        code = process.wait()
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        told += [line for line in lines if "code" in line]
        if code:
            broken.append(f"the worker ended with {code} after {lines[-1:]}\n{err.read_text(errors='replace')[-2000:]}")
    faulty = [line for line in told if line["faults"]]
    shown = "\n".join(f"seed {x['seed']}: {x['arguments']}: {x['faults']}\n{x['stderr']}" for x in faulty[:10])
    assert not broken, "\n".join(broken)
    assert not faulty, f"{len(faulty)} of {len(told)} commands\n{shown}"
    assert len({line["seed"] for line in told}) == INPUTS
    if INPUTS >= 100:  # fewer may leave one out
        assert {command_of(line["arguments"]) for line in told} >= {*LEAVES}
        answered = {command_of(line["arguments"]) for line in told if line["code"] in (0, 1)}
        assert not (silent := {*LEAVES} - answered - {*ARGUMENTS_ALONE}), silent
    codes = Counter(line["code"] for line in told)
    print(f"{INPUTS} inputs from {FIRST}: {dict(codes)}, peak {max(line['peak'] for line in told) / 2**30:.2f} GiB")
    assert codes[0] > 0.1 * len(told), "the inputs are so spoilt that none is read to its end"
    assert codes[2] > 0.4 * len(told), "the inputs are hardly spoilt"


def test_equal_seeds_give_equal_inputs_and_all_kinds_are_met():
    made = [spoilt(seed) for seed in range(100)]
    assert made == [spoilt(seed) for seed in range(100)]
    assert len({each.kind.split()[0] for each in made}) >= len(KINDS) - 2


def test_the_judge_sees_what_is_wrong(tmp_path, monkeypatch):
    """A traceback, an endless run, much memory, a silent failure, two errors and code that was run are all told."""

    def verdict(command) -> str:
        monkeypatch.setattr(worker, "run", command)
        return " ".join(judged(spoilt(0), ["specs"], tmp_path)[0])

    def fails(_):
        raise ValueError("a bug")

    def says(text, code=2):
        return lambda _: print(text, file=sys.stderr) or code

    assert "traceback: " in verdict(fails)
    assert "SystemExit" in verdict(lambda _: sys.exit(1))
    assert "exit code 1" in verdict(lambda _: 1)
    assert "0 lines begin with 'error: '" in verdict(lambda _: 2)
    assert "2 lines begin with 'error: '" in verdict(says("error: a\nerror: b"))
    assert "says not what it is" in verdict(says("error: a\nhm"))
    assert "characters" in verdict(says("error: " + "x" * 2000))
    assert "control characters" in verdict(says("error: \x1b[31m"))
    assert not verdict(says("error: a.yaml: what is wrong"))
    monkeypatch.setattr(worker, "LIMIT_S", 0.1)
    assert "0.1 s of CPU time" in verdict(lambda _: [None for _ in count()])
    monkeypatch.setattr(worker, "WALL_S", 0.1)
    assert "did not end in 0.1 s" in verdict(lambda _: time.sleep(60))
    monkeypatch.setattr(worker, "MEMORY", worker.peak())
    assert "GiB of memory" in verdict(lambda _: len(b"x" * worker.peak()) * 0)
    (tmp_path / "canary").touch()
    assert "code of the input was run" in verdict(lambda _: 0)
