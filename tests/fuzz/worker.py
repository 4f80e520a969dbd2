"""Runs spoilt inputs one after the other in one process, judges each, and prints a JSON line for it.

``python tests/fuzz/worker.py FIRST COUNT [DIR]`` runs the seeds FIRST, FIRST+1, ...; with one seed and a directory the
files stay there to be looked at.
"""

import faulthandler
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from inputs import FILES, Spoilt, spoil_store, spoilt
from spoiling import CANARY

from disagg_sim.cli.main import run
from disagg_sim.facts.yaml_files import PATH_VARIABLE

LIMIT_S = 20.0  # of one command, in CPU time of its process: a busy machine is no fault of it [s]
WALL_S = 120.0  # of one command by the clock, for one that waits, or whose workers compute [s]
STUCK_S = 240.0  # until a process that answers no alarm is ended [s]
MEMORY = 4 * 2**30  # that the process, or a worker process of it, may hold in memory at its peak [B]
#: Address space beyond what is used: it saves the machine, and leaves room to see that ``MEMORY`` is passed. [B]
FENCE = 4 * MEMORY
LINE, TEXT = 1200, 20_000  # longest line and text of an error [character]
#: Lines that may stand on standard error: an error and its further faults, warnings, and how far a run is.
TOLD = re.compile(
    r"error: | +- |\S+: (line \d|no such file$)|(\S+: )?(warning|note): |\S+: dropped \d+ of \d+ rows "
    r"|[\d,]+ (of [\d,]+ )?(stored )?(blocks|runs|design points|requests|kernels|experiments) "
    r"|compiling the kernel \(once|\S+: (arrivals count from |no arrival times |\d+ (requests at|sessions:) |columns? )"
)
WARNED = re.compile(r"\w*Warning: |Traceback")


class Late(BaseException):
    """An alarm: no ``except Exception`` may swallow it."""


def _late(signal_number: int, _: Any) -> None:
    cpu = signal_number == signal.SIGPROF
    raise Late(f"ran for more than {LIMIT_S:g} s of CPU time" if cpu else f"did not end in {WALL_S:g} s")


@contextmanager
def alarms() -> Iterator[None]:
    """Raise ``Late`` inside after ``LIMIT_S`` of CPU time, or ``WALL_S`` by the clock."""
    timers = {signal.SIGPROF: (signal.ITIMER_PROF, LIMIT_S), signal.SIGALRM: (signal.ITIMER_REAL, WALL_S)}
    before = {number: signal.signal(number, _late) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def peak() -> int:
    """Most memory that this process, or a worker process that has ended, ever held. [B]"""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def end_workers() -> None:
    """End the worker processes, where there are any: their memory is known then, and none stays in this directory."""
    if "joblib" in sys.modules:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=True)


def judged(said: Spoilt, arguments: list[str], where: Path) -> tuple[list[str], dict[str, Any]]:
    """Run one command in ``where``; what is wrong with how it went, and what it said."""
    out, err = io.StringIO(), io.StringIO()
    faults, code = [], -1
    begun, held = time.process_time(), peak()
    try:
        with alarms(), redirect_stdout(out), redirect_stderr(err):
            code = run(arguments)
    except Late as late:
        faults.append(str(late))
    except SystemExit as end:
        faults.append(f"SystemExit({end.code}) left run()")
    except BaseException:
        faults.append("traceback: " + "".join(traceback.format_exc()[-1500:]))
    end_workers()
    if held <= MEMORY < peak():
        faults.append(f"held {peak() / 2**30:.1f} GiB of memory")
    text = err.getvalue()
    allowed = {0, 1, 2} if "check" in arguments[:1] else {0, 2}
    if not faults and code not in allowed:
        faults.append(f"exit code {code}")
    faults += _of_text(code, text)
    if code == 0 and "sweep" in arguments[:1] and (where / "out" / "frontier.csv").exists():
        table = (where / "out" / "frontier.csv").read_text(encoding="utf-8")
        if re.search(r",(nan|inf|-inf|),", table.partition("\n")[2]) and ",," in table:
            faults.append("frontier.csv has an empty cell, a NaN or an infinity")
    for root in (where, Path.cwd()):
        if (root / CANARY).exists():
            faults.append("code of the input was run")
    took = round(time.process_time() - begun, 2)
    return faults, {"arguments": arguments, "code": code, "stderr": text[:1500], "seconds": took, "peak": peak()}


def _of_text(code: int, text: str) -> list[str]:
    """What is wrong with the text on standard error."""
    faults = []
    lines = text.splitlines()
    if WARNED.search(text):
        faults.append("a Python warning or a traceback in the text")
    if code == 2 and sum(line.startswith("error: ") for line in lines) != 1:
        faults.append(f"{sum(line.startswith('error: ') for line in lines)} lines begin with 'error: '")
    faults += [f"a line that says not what it is: {line[:100]!r}" for line in lines if not TOLD.match(line)][:1]
    if len(text) > TEXT or any(len(line) > LINE for line in lines):
        faults.append(f"{len(text)} characters, longest line {max(map(len, lines))}")
    if any(ord(char) < 32 and char != "\n" for char in text):
        faults.append("control characters in the text")
    return faults


def laid_out(said: Spoilt, where: Path, stores: Path, rng: Random) -> None:
    """Write the files of an input and copy the results that it needs."""
    for name, data in said.files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(data)
    for name in said.stores:
        shutil.copytree(stores / ("runs" if name == "runs" else "results"), where / name)
    if said.kind in ("results", "runs"):
        spoil_store(where / rng.choice(said.stores), rng)


def make_stores(root: Path) -> None:
    """One finished sweep and one finished scenario; another one, so that no input waits for machine code."""
    for name in ("s.yaml", "sc.yaml", "sy.yaml", "trace.csv"):
        (root / name).write_bytes(FILES[name])
    os.chdir(root)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert run(["sweep", "s.yaml", "--out", "results", "--jobs", "1"]) == 0
        assert run(["simulate", "sc.yaml", "--out", "runs", "--jobs", "1"]) == 0
        assert run(["simulate", "sy.yaml", "--out", "others", "--jobs", "1"]) == 0


def main(first: int, count: int, keep: Path | None) -> None:
    """Judge ``count`` seeds from ``first`` on."""
    warnings.simplefilter("default", RuntimeWarning)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        make_stores(root)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + FENCE, resource.RLIM_INFINITY))
        for seed in range(first, first + count):
            os.environ.pop(PATH_VARIABLE, None)
            said = spoilt(seed)
            where = keep or root / str(seed)
            where.mkdir(parents=True, exist_ok=True)
            laid_out(said, where, root, Random(seed))
            os.chdir(where)
            if said.specs:
                os.environ[PATH_VARIABLE] = str(where)
            print(json.dumps({"begun": seed}), file=sys.__stdout__, flush=True)
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
            for arguments in (said.arguments, *said.then):
                faults, shown = judged(said, arguments, where)
                line = {"seed": seed, "kind": said.kind, "faults": faults, **shown}
                print(json.dumps(line), file=sys.__stdout__, flush=True)
            faulthandler.cancel_dump_traceback_later()
            os.chdir(root)
            if keep is None:
                shutil.rmtree(where, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]).resolve() if len(sys.argv) > 3 else None)
