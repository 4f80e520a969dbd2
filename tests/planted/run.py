"""Plant small faults, one at a time, and tell which of them the tests do not catch.

    python tests/planted/run.py --count 60 --jobs 2

The tests nearest to the fault run first. Where none fails, results are compared: frontiers of several models, systems,
modes and recipes, a simulation of every policy and statistics of traces (``results.py``). A fault that changes none of
them is none; for any other all further tests run. The share of the others that a test catches is printed. It takes half
a minute a fault and more, and runs on request alone.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from faults import Fault, chosen, room_of
from shared_data import lend

ROOT = Path(__file__).parents[2]
#: Time after which a test run or a result hangs, which CI would see, too. [s]
HANGS_S = 900.0
HANGS = "hangs"
#: Test folders that are run first for a fault in a room; the others follow.
NEAREST = {
    "physics": ("physics", "published", "test_baselines.py", "search", "serving", "certainty"),
    "search": ("search", "test_baselines.py", "serving", "sweep"),
    "serving": ("serving", "test_baselines.py", "sweep", "certainty"),
    "simulation": ("simulation", "scenario", "lab/studies"),
    "workload": ("workload", "search", "scenario", "simulation"),
    "planning": ("planning", "test_plan_baselines.py", "test_screen_baselines.py", "test_evaluate_baselines.py"),
    "certainty": ("certainty", "test_certainty_baselines.py", "test_explain_baselines.py", "test_baselines.py"),
}
#: Not run: they judge texts and tools, not numbers; each takes minutes, and none has caught what the others had not.
LEFT_OUT = ("fuzz", "test_pages.py", "test_notebooks.py", "test_docs_numbers.py", "planted", "test_architecture.py")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a fault."""

    fault: str
    outcome: str  # "caught", "missed", "changes nothing", or "unstable": by a test that fails without it, too
    by: str  # the test that failed, or the result that differs
    seconds: float


def main() -> int:
    """Plant, run, tell."""
    parser = argparse.ArgumentParser(description="Plant small faults and tell which of them the tests miss.")
    parser.add_argument("--count", type=int, default=60, help="faults to plant")
    parser.add_argument("--seed", type=int, default=0, help="another choice of faults")
    parser.add_argument("--jobs", type=int, default=1, help="checkouts that are tested side by side")
    parser.add_argument("--first", type=int, default=0, help="faults to skip")
    parser.add_argument("--out", type=Path, help="lines of JSON, one a fault")
    asked = parser.parse_args()
    planted = chosen(ROOT / "disagg_sim", asked.count, asked.seed)[asked.first :]
    with tempfile.TemporaryDirectory() as scratch:
        free: Queue[Path] = Queue()
        for number in range(asked.jobs):
            free.put(_checkout(Path(scratch) / str(number) / ROOT.name))
        sound = _results(free.queue[0])
        assert sound, "the results of the sound package could not be computed"

        def judged(fault: Fault) -> Verdict:
            checkout = free.get()
            try:
                return _judge(fault, checkout, sound)
            finally:
                free.put(checkout)

        verdicts = []
        with ThreadPoolExecutor(asked.jobs) as pool:
            for verdict in pool.map(judged, planted):
                verdicts.append(verdict)
                print(f"{verdict.outcome:16}{verdict.seconds:6.0f} s  {verdict.fault}  [{verdict.by}]", flush=True)
                if asked.out:
                    with asked.out.open("a") as lines:
                        lines.write(json.dumps({name: getattr(verdict, name) for name in Verdict.__slots__}) + "\n")
    missed = [verdict for verdict in verdicts if verdict.outcome == "missed"]
    caught = sum(verdict.outcome == "caught" for verdict in verdicts)
    counted = caught + len(missed)
    share = caught / max(counted, 1)
    print(f"{len(verdicts)} faults, {counted} change a result, {caught} of these are caught: {share:.1%}")
    return 1 if missed else 0


def _checkout(where: Path) -> Path:
    """A copy of the files that git tracks, with the measured data beside it where there are any."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, where / name)
    lend(where)
    return where


def _judge(fault: Fault, checkout: Path, sound: dict[str, str]) -> Verdict:
    begun, path = time.monotonic(), checkout / "disagg_sim" / fault.path
    kept, stamp = path.read_text(), path.stat()
    path.write_text(fault.planted(kept))
    try:
        near, far = _folders(fault, checkout)
        outcome, by = "caught", _pytest(checkout, near)
        if not by:
            found = _results(checkout)
            changed = [name for name in sound if found.get(name) != sound[name]]
            by = _pytest(checkout, far) if changed else ""
            if not by:
                outcome, by = ("missed", ", ".join(changed)[:200]) if changed else ("changes nothing", "")
    finally:
        path.write_text(kept)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    if outcome == "caught" and by != HANGS and _pytest(checkout, [by]):
        outcome = "unstable"  # the test fails on the sound package, too
    return Verdict(str(fault), outcome, by, time.monotonic() - begun)


def _folders(fault: Fault, checkout: Path) -> tuple[list[str], list[str]]:
    """Tests nearest to a fault, and all others."""
    tests = checkout / "tests"
    of_a_technique = fault.path.parts[:2] if fault.path.parts[0] == "techniques" else ()
    near = [*filter(None, ["/".join(of_a_technique)]), *NEAREST[room_of(fault.path)]]
    near = [name for name in near if (tests / name).exists()]
    names = {place.name for place in tests.iterdir() if place.is_dir() or place.name.startswith("test_")}
    far = sorted(names - {*near, *LEFT_OUT, "__pycache__", "baselines"})
    return [*(f"tests/{name}" for name in near), f"disagg_sim/{fault.path}"], [f"tests/{name}" for name in far]


def _pytest(checkout: Path, places: list[str]) -> str:
    """The first test that fails in some files or folders; empty where none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *places]
    done = _run(command, checkout)
    if done is None:
        return HANGS
    if done.returncode in (0, 5):  # 5: no test there
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split()[1] if lines else places[0]


def _results(checkout: Path) -> dict[str, str]:
    """Digests of results by name; a result that cannot be computed is missing."""
    command = [sys.executable, str(Path(__file__).parent / "results.py")]
    done = _run(command, checkout)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")] if done else []
    return dict(json.loads(lines[-1])) if lines else {}


def _run(command: list[str], checkout: Path) -> subprocess.CompletedProcess[str] | None:
    """Run a command on the package of a checkout; None where it hangs."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            command, cwd=checkout, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
