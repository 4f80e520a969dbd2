"""Plant small faults, one at a time, and tell which of them the tests do not catch.

    python tests/planted/run.py --count 60 --seed 1 --entered entered.json

All tests are imported once. Each file of tests runs in a fork of the process that notes which functions it enters; this
takes as long as the tests and can be kept (``--entered``). For each fault a fork changes the code of its function in
memory and runs the files that enter it, the shortest first, until a test fails that passes in a fork without the fault.
What none catches is open: it changes nothing, or no test sees it; ``not run`` is what no test enters. Where the fault
is in compiled code, this runs uncompiled the files that enter the kernel, but for those that then take minutes. It runs
on request alone.
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
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the package of this tree, whatever is installed
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from faults import Fault, chosen

ROOT = Path(__file__).parents[2]
#: Not run: they judge texts and tools, not numbers; each takes minutes, and none has caught what the others had not.
LEFT_OUT = {"fuzz", "test_pages.py", "test_notebooks.py", "test_docs_numbers.py", "planted", "test_architecture.py"}
#: CPU time after which a run hangs, which CI would see, too. [s]
HANGS_S = 600
HANGS = "hangs"
#: CPU time of a file of tests after which it is left out where nothing is compiled. [s]
LONG_S = 60
#: Of numbers that wrap around, which machine code does in silence.
WRAPS = "ignore:overflow encountered:RuntimeWarning"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a fault."""

    fault: str
    outcome: str  # "caught" or "open"
    by: str  # the test that failed
    seconds: float


class Entered(NamedTuple):
    """What a file of tests does without a fault."""

    seconds: float
    functions: list[str]  # of the package that it enters, each "FILE FUNCTION"
    failed: list[str]  # tests


@dataclass(frozen=True)
class Planter:
    """Part of a test run that plants faults in place of running all tests once."""

    faults: dict[int, Fault]
    imported: bool  # the fault was there when its module was imported
    out: Path
    kept: Path  # what each file of tests enters
    entered: dict[str, Entered] = field(default_factory=dict)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Plant, run, tell; what shows only where a module is imported is planted in another process."""
        of_file: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            of_file.setdefault(item.nodeid.split("::")[0], []).append(item)
        self._note(session, of_file)
        left = []
        for number, fault in self.faults.items():
            if self.imported or _changed(fault) is not None:
                verdict = self._judged(fault, session, of_file)
                print(f"{verdict.outcome:16}{verdict.seconds:6.0f} s  {verdict.fault}  [{verdict.by}]", flush=True)
                with self.out.open("a") as lines:
                    lines.write(json.dumps(asdict(verdict)) + "\n")
            else:
                left.append(number)
        for number in left:
            _again([number], "--imported", out=self.out, kept=self.kept)
        return True

    def _note(self, session: pytest.Session, of_file: dict[str, list[pytest.Item]]) -> None:
        """Note what each file of tests enters, unless that was kept; uncompiled, of those that enter the kernel."""
        kept, seconds = self.kept, HANGS_S
        if "NUMBA_DISABLE_JIT" in os.environ:
            kept, seconds = self.kept.with_suffix(".uncompiled.json"), LONG_S
            near = [name for name, each in _read(self.kept).items() if any("/kernel/" in at for at in each.functions)]
            of_file = {name: of_file[name] for name in near}
        if not (found := _read(kept)):
            told = {name: _in_fork(partial(_enters, session, items), seconds) for name, items in of_file.items()}
            found = {name: Entered(*each) for name, each in told.items() if each is not None}
            kept.write_text(json.dumps(found))
        self.entered.update(found)

    def _judged(self, fault: Fault, session: pytest.Session, of_file: dict[str, list[pytest.Item]]) -> Verdict:
        begun, by = time.monotonic(), ""
        files = self._files(fault)
        for name in files:
            sound = [item for item in of_file.get(name, []) if item.nodeid not in self.entered[name].failed]
            if by := self._caught_by(fault, session, sound):
                break
        outcome = "caught" if by else "open" if files else "not run"
        return Verdict(str(fault), outcome, by, time.monotonic() - begun)

    def _files(self, fault: Fault) -> list[str]:
        """Files of tests that enter the function of a fault, or its module where it is in none, the shortest first."""
        place = f"{fault.path} {fault.function}"
        for whole in (place, str(fault.path)):
            found = [name for name, each in self.entered.items() if any(_within(at, whole) for at in each.functions)]
            if found:
                break
        return sorted(found, key=lambda name: self.entered[name].seconds)

    def _caught_by(self, fault: Fault, session: pytest.Session, items: list[pytest.Item]) -> str:
        """The first test that a fault alone lets fail; empty where there is none."""
        while items:
            by = _in_fork(partial(_first_failure, session, items), HANGS_S, None if self.imported else fault)
            if by is None:
                return HANGS
            place = next((place for place, item in enumerate(items) if item.nodeid == by), None)
            if place is None or self.imported or not _in_fork(partial(_first_failure, session, items[place:][:1])):
                return by
            items = items[place + 1 :]
        return ""


def main() -> int:
    """Plant, run, tell."""
    parser = argparse.ArgumentParser(description="Plant small faults and tell which of them the tests miss.")
    parser.add_argument("--count", type=int, default=60, help="faults to plant")
    parser.add_argument("--seed", type=int, default=0, help="another choice of faults")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the faults to plant, from 0")
    parser.add_argument("--within", default="", help="folder or file of the package that the faults are in")
    parser.add_argument("--entered", type=Path, help="what each file of tests enters, written where it is not there")
    parser.add_argument("--out", type=Path, help="lines of JSON, one a fault")
    parser.add_argument("--imported", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    drawn = dict(enumerate(chosen(ROOT / "disagg_sim", asked.count, asked.seed, asked.within)))
    out = asked.out or Path(tempfile.mkstemp(suffix=".jsonl")[1])
    kept = asked.entered or Path(tempfile.mkstemp(suffix=".json")[1])
    planted = {number: drawn[number] for number in asked.only or drawn}
    uncompiled = [number for number, fault in planted.items() if _compiled(fault)]
    if compiled := "NUMBA_DISABLE_JIT" not in os.environ:
        planted = {number: fault for number, fault in planted.items() if number not in uncompiled}
    if asked.imported:
        _import_with(*planted.values())
    os.chdir(ROOT)
    files = sorted(place for place in Path("tests").rglob("test_*.py") if not {*place.parts} & LEFT_OUT)
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not long and not rare"]
    options += ["-W", WRAPS] if "NUMBA_DISABLE_JIT" in os.environ else []
    options += ["--assert=plain"] if asked.imported else []  # pytest reads what it rewrites by itself
    if planted:
        planter = Planter(planted, asked.imported, out, kept)
        pytest.main([*options, "disagg_sim", *map(str, files)], plugins=[planter])
    if compiled and uncompiled:
        _again(uncompiled, out=out, kept=kept, NUMBA_DISABLE_JIT="1")
    found = Counter(json.loads(line)["outcome"] for line in out.read_text().splitlines())
    print(f"{found.total()} faults, {found['caught']} are caught")
    return 1 if found["open"] + found["not run"] else 0


def _read(kept: Path) -> dict[str, Entered]:
    """What was noted of each file of tests; nothing where there is no file."""
    text = kept.read_text() if kept.exists() else ""
    return {name: Entered(*each) for name, each in json.loads(text or "{}").items()}


def _compiled(fault: Fault) -> bool:
    text = (ROOT / "disagg_sim" / fault.path).read_text()
    return bool(re.search(r"kernel\.compiled import .*\b(entry|inner|inlined)\b", text))


def _again(numbers: list[int], *more: str, out: Path, kept: Path, **variables: str) -> None:
    """Run this again for some faults, in a process of its own."""
    given = [each for each in sys.argv[1:] if each not in more]
    more = ("--out", str(out), "--entered", str(kept), *more)
    command = [sys.executable, __file__, *given, *more, "--only", *map(str, numbers)]
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


def _in_fork(call: Callable[[], Any], seconds: int = HANGS_S, fault: Fault | None = None) -> Any:
    """What a call returns in a fork of this process, under a fault; None where it fails or takes longer."""
    ours, its = os.pipe()
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        signal.alarm(10 * seconds)
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
    failed = _failures(session, items, most=1)
    return failed[0] if failed else ""


def _failures(session: pytest.Session, items: list[pytest.Item], most: int | None = None) -> list[str]:
    """The tests that fail, up to so many."""
    failed: list[str] = []

    class Listener:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    session.config.pluginmanager.register(Listener())
    for item, after in pairwise([*items, None]):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if len(failed) == most:
            break
    session._setupstate.teardown_exact(None)
    return failed


def _enters(session: pytest.Session, items: list[pytest.Item]) -> Entered:
    """Run tests and note which functions of the package they enter."""
    codes: set[CodeType] = set()
    begun = time.monotonic()
    sys.settrace(lambda frame, event, arg: codes.add(frame.f_code))
    failed = _failures(session, items)
    sys.settrace(None)
    seconds, package = time.monotonic() - begun, f"{ROOT / 'disagg_sim'}/"
    named = (f"{code.co_filename} {code.co_qualname.replace('.<locals>', '')}" for code in codes)
    return Entered(seconds, sorted(name.removeprefix(package) for name in named if name.startswith(package)), failed)


def _within(function: str, place: str) -> bool:
    """Whether a function is the one of a place, is within it or in its file."""
    return function.startswith(place) and function[len(place) : len(place) + 1] in ("", ".", " ")


if __name__ == "__main__":
    sys.exit(main())
