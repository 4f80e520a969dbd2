"""Plant small faults, one at a time, and tell which of them the tests do not catch.

    python tests/planted/run.py --count 60 --seed 1

All tests are imported once. For each fault a fork of the process changes the code of a function in memory and runs
tests until one fails that passes in a fork without the fault: the examples of its module and files that name it or what
it stands in; then those of its room, and all others, but for ``--near``. What none catches is open: it changes nothing,
or no test sees it. Where the fault is in compiled code, this runs uncompiled. It runs on request alone.
"""

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib import import_module
from importlib.machinery import SourceFileLoader
from inspect import unwrap
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the package of this tree, whatever is installed
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from faults import Fault, chosen, room_of

ROOT = Path(__file__).parents[2]
#: Test folders and files that are run next for a fault in a room; the others follow.
OF_ROOM = {
    "physics": (
        "test_baselines.py",
        "test_certainty_baselines.py",
        "physics",
        "published",
        "search",
        "serving",
        "certainty",
    ),
    "search": ("test_baselines.py", "search", "serving", "sweep"),
    "serving": ("test_baselines.py", "test_certainty_baselines.py", "serving", "sweep", "certainty"),
    "simulation": ("test_simulation_baselines.py", "simulation", "scenario", "lab/studies"),
    "kernel": ("simulation/test_reference.py",),  # it holds without the compiler, too
    "workload": ("workload", "search", "scenario", "simulation"),
    "planning": ("test_evaluate_baselines.py", "planning", "test_screen_baselines.py", "test_plan_baselines.py"),
    "certainty": ("test_certainty_baselines.py", "test_explain_baselines.py", "certainty", "test_baselines.py"),
}
#: Files that are nearest to a fault, at most, and what a file is worth that is named after its module or folder, says
#: the name of a function or class it stands in, imports the module, or does any of these in its room.
NEAREST, NAMED, SAYS, IMPORTS, BESIDE = 8, 3, 2, 1, 3
#: Not run: they judge texts and tools, not numbers; each takes minutes, and none has caught what the others had not.
LEFT_OUT = {"fuzz", "test_pages.py", "test_notebooks.py", "test_docs_numbers.py", "planted", "test_architecture.py"}
#: CPU time after which a run hangs, which CI would see, too. [s]
HANGS_S = 600
HANGS = "hangs"
#: Of numbers that wrap around, which machine code does in silence.
WRAPS = "ignore:overflow encountered:RuntimeWarning"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a fault."""

    fault: str
    outcome: str  # "caught" or "open"
    by: str  # the test that failed
    seconds: float


@dataclass(frozen=True)
class Planter:
    """Part of a test run that plants faults in place of running all tests once."""

    faults: dict[int, Fault]
    near: bool
    imported: bool  # the fault was there when its module was imported
    out: Path
    failing: set[str] = field(default_factory=set)  # tests that fail in a fork without a fault

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Plant, run, tell; what shows only where a module is imported is planted in another process."""
        left = []
        for number, fault in self.faults.items():
            if self.imported or _changed(fault) is not None:
                verdict = self._judged(fault, session)
                print(f"{verdict.outcome:16}{verdict.seconds:6.0f} s  {verdict.fault}  [{verdict.by}]", flush=True)
                with self.out.open("a") as lines:
                    lines.write(json.dumps(asdict(verdict)) + "\n")
            else:
                left.append(number)
        for number in left:
            _again([number], "--imported", out=self.out)
        return True

    def _judged(self, fault: Fault, session: pytest.Session) -> Verdict:
        begun, nearest, further = time.monotonic(), *_ordered(fault, session.items)
        by = self._caught_by(fault, session, nearest if self.near else [*nearest, *further])
        return Verdict(str(fault), "caught" if by else "open", by, time.monotonic() - begun)

    def _caught_by(self, fault: Fault, session: pytest.Session, items: list[pytest.Item]) -> str:
        """The first test that a fault alone lets fail; empty where there is none."""
        while True:
            items = [item for item in items if item.nodeid not in self.failing]
            by = _in_fork(partial(_first_failure, session, items), None if self.imported else fault)
            if by is None:
                return HANGS
            place = next((place for place, item in enumerate(items) if item.nodeid == by), None)
            if place is None or self.imported or not _in_fork(partial(_first_failure, session, items[place:][:1])):
                return by
            self.failing.add(by)
            items = items[place:]


def main() -> int:
    """Plant, run, tell."""
    parser = argparse.ArgumentParser(description="Plant small faults and tell which of them the tests miss.")
    parser.add_argument("--count", type=int, default=60, help="faults to plant")
    parser.add_argument("--seed", type=int, default=0, help="another choice of faults")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the faults to plant, from 0")
    parser.add_argument("--within", default="", help="folder or file of the package that the faults are in")
    parser.add_argument("--near", action="store_true", help="run the nearest tests alone")
    parser.add_argument("--out", type=Path, help="lines of JSON, one a fault")
    parser.add_argument("--imported", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    drawn = dict(enumerate(chosen(ROOT / "disagg_sim", asked.count, asked.seed, asked.within)))
    out = asked.out or Path(tempfile.mkstemp(suffix=".jsonl")[1])
    planted = {number: drawn[number] for number in asked.only or drawn}
    uncompiled = [number for number, fault in planted.items() if _compiled(fault)]
    if uncompiled and "NUMBA_DISABLE_JIT" not in os.environ:
        _again(uncompiled, out=out, NUMBA_DISABLE_JIT="1")
        planted = {number: fault for number, fault in planted.items() if number not in uncompiled}
    if asked.imported:
        _import_with(*planted.values())
    os.chdir(ROOT)
    places = [f"disagg_sim/{fault.path}" for fault in planted.values()]
    files = sorted(place for place in Path("tests").rglob("test_*.py") if not {*place.parts} & LEFT_OUT)
    if asked.near:
        files = sorted({place for fault in planted.values() for place in nearest_files(fault, files)})
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not long and not rare"]
    options += ["-W", WRAPS] if "NUMBA_DISABLE_JIT" in os.environ else []
    options += ["--assert=plain"] if asked.imported else []  # pytest reads what it rewrites by itself
    if planted:
        planter = Planter(planted, asked.near, asked.imported, out)
        pytest.main([*options, *dict.fromkeys(places), *map(str, files)], plugins=[planter])
    found = Counter(json.loads(line)["outcome"] for line in out.read_text().splitlines())
    print(f"{found.total()} faults, {found['caught']} are caught")
    return 1 if found["open"] else 0


def _compiled(fault: Fault) -> bool:
    text = (ROOT / "disagg_sim" / fault.path).read_text()
    return bool(re.search(r"kernel\.compiled import .*\b(entry|inner|inlined)\b", text))


def _again(numbers: list[int], *more: str, out: Path, **variables: str) -> None:
    """Run this again for some faults, in a process of its own."""
    given = [each for each in sys.argv[1:] if each not in more]
    command = [sys.executable, __file__, *given, "--out", str(out), *more, "--only", *map(str, numbers)]
    subprocess.run(command, env={**os.environ, **variables}, check=False)


def _import_with(fault: Fault) -> None:
    """Let the import of a module find a fault in it."""
    path, read = str(ROOT / "disagg_sim" / fault.path), SourceFileLoader.get_code

    def get_code(loader: Any, name: str) -> Any:
        if loader.path != path:
            return read(loader, name)
        return compile(fault.planted(Path(path).read_text()), path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code


def _changed(fault: Fault) -> tuple[FunctionType, CodeType] | None:
    """The function that a fault stands in and its code with it; None where it is in none of an imported module."""
    path = ROOT / "disagg_sim" / fault.path
    found: Any = import_module(".".join(("disagg_sim", *fault.path.with_suffix("").parts)))
    code = compile(fault.planted(path.read_text()), str(path), "exec", dont_inherit=True)
    for name in fault.function.split("."):
        inside = [each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name]
        inside = [each for each in inside if each.co_firstlineno <= fault.line]
        if not inside or name not in vars(found):
            return None
        code, found = inside[-1], vars(found)[name]
        if isinstance(found, property | cached_property):
            found = found.fget if isinstance(found, property) else found.func
        found = unwrap(found)
        if isinstance(found, FunctionType):
            return None if found.__code__ == code else (found, code)
    return None


def _in_fork(call: Callable[[], Any], fault: Fault | None = None) -> Any:
    """What a call returns in a fork of this process, under a fault; None where it fails or hangs."""
    ours, its = os.pipe()
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_CPU, (HANGS_S, HANGS_S))
        signal.alarm(10 * HANGS_S)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1), os.dup2(silence, 2)
        try:
            if fault is not None and (changed := _changed(fault)):
                changed[0].__code__ = changed[1]
            os.write(its, json.dumps(call()).encode())
        finally:
            os._exit(0)
    os.close(its)
    with os.fdopen(ours) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else None


def _first_failure(session: pytest.Session, items: list[pytest.Item]) -> str:
    """The first of some tests that fails; empty where none does."""
    failed: list[str] = []

    class Listener:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    session.config.pluginmanager.register(Listener())
    for item, after in pairwise([*items, None]):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if failed:
            break
    session._setupstate.teardown_exact(None)
    return failed[0] if failed else ""


def _ordered(fault: Fault, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests nearest to a fault, the nearest first; those of its room, then all others."""
    of_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_file.setdefault(item.nodeid.split("::")[0], []).append(item)
    own, tests = f"disagg_sim/{fault.path}", [Path(name) for name in of_file if name.startswith("tests/")]
    nearest = dict.fromkeys([own, *map(str, nearest_files(fault, tests))])
    folders = [Path("tests", name) for name in OF_ROOM[room_of(fault.path)]]
    if fault.path.parts[0] == "techniques":
        folders.insert(0, Path("tests", *fault.path.parts[:2]))
    beside = {str(place): None for name in folders for place in tests if place.is_relative_to(name)}
    further = dict.fromkeys([*beside, *sorted(map(str, tests))])
    steps = list(nearest), [name for name in further if name not in nearest]
    near, others = ([item for name in step for item in of_file.get(name, [])] for step in steps)
    return near, others


def nearest_files(fault: Fault, files: list[Path]) -> list[Path]:
    """The files of tests that most likely catch a fault, the nearest first; then the baselines of its room."""
    worth = {place: _nearness(fault, place) for place in files}
    ranked = sorted((place for place in files if worth[place]), key=lambda place: -worth[place])
    broad = Path("tests", OF_ROOM["kernel" if _compiled(fault) else room_of(fault.path)][0])
    return list(dict.fromkeys([*ranked[:NEAREST], *(place for place in files if place == broad)]))


def _nearness(fault: Fault, place: Path) -> int:
    """How near a file of tests is to a fault, by what it is called, says and imports."""
    text, module = (ROOT / place).read_text(), fault.path.with_suffix("")
    package, name = ".".join(("disagg_sim", *module.parts[:-1])), module.name
    named = any(f"_{part.strip('_')}_" in f"{place.stem}_" for part in module.parts[1:])
    imports = rf"{package}\.{name}\b|from {package} import .*\b{name}\b"
    words = {word for word in fault.function.split(".") if len(word.strip("_")) > 2}
    worth = NAMED * named + IMPORTS * bool(re.search(imports, text))
    worth += SAYS * sum(bool(re.search(rf"\b{word}\b", text, re.IGNORECASE)) for word in words)
    beside = fault.path.parts[1] if fault.path.parts[0] == "techniques" else fault.path.parts[0]
    return worth and worth + BESIDE * (beside in place.parts)


if __name__ == "__main__":
    sys.exit(main())
