"""Hold benchmarks to a committed baseline, as ratios to a loop of fixed work that runs beside each.

A benchmark's time is the least CPU time of its rounds. Its ratio divides that by the least CPU time of ``fixed_work``
just before and after it: a slower machine, or one that others use, slows both. ``baseline.json`` has the ratios of the
commit that recorded it (``pytest benchmarks --update-baseline``, of all or of some). The run fails where a ratio is
more than ``TOLERANCE`` times its baseline.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

#: Scripts are no tests: importing one may start it.
collect_ignore_glob = ["[!t]*.py"]
BASELINE = Path(__file__).parent / "baseline.json"
#: Ratio over its baseline from which a benchmark has grown slower. Repeated runs on two cores with little other work
#: were within 0.7 to 1.3; with ten other processes one of 51 was at 1.5. [1]
TOLERANCE = 1.4
#: Ratio over its baseline below which the baseline is out of date. [1]
FASTER = 0.7

calibrations = pytest.StashKey[dict[str, float]]()  # CPU time of the fixed work beside each benchmark [s]


def fixed_work() -> None:
    """A loop of Python and passes of numpy over arrays that fit a cache, as the package does: 30 ms."""
    total = 0
    for number in range(400_000):
        total += number & 7
    values = np.linspace(1.0, 2.0, 32_768)
    for _ in range(100):
        values = np.sqrt(values * values + 1e-3) / 1.0005
        np.sort(values[::16])


def calibrated(rounds: int = 5) -> float:
    """Least CPU time of the fixed work. [s]"""
    spent = []
    for _ in range(rounds):
        begun = time.process_time()
        fixed_work()
        spent.append(time.process_time() - begun)
    return min(spent)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-baseline", action="store_true", help="record benchmarks/baseline.json anew")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[calibrations] = {}
    config.option.benchmark_timer = "time.process_time"  # the clock of a shared machine counts the others, too
    config.option.benchmark_quiet = True  # the tables of the modules and the one below say it all


@pytest.fixture(autouse=True)
def beside(request: pytest.FixtureRequest) -> Iterator[None]:
    """The fixed work before and after each test."""
    before = calibrated()
    yield
    request.config.stash[calibrations][request.node.nodeid] = min(before, calibrated())


def ratios(config: pytest.Config) -> dict[str, tuple[float, float]]:
    """CPU seconds of each benchmark that ran, and their ratio to the fixed work. [s], [1]"""
    session, beside = config._benchmarksession, config.stash[calibrations]  # type: ignore[attr-defined]
    done = [(each.fullname, each.stats.min) for each in session.benchmarks if each]
    return {name.removeprefix("benchmarks/"): (spent, spent / beside[name]) for name, spent in done}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Exit with 1 where a benchmark has grown slower."""
    config = session.config
    found = ratios(config)
    known = json.loads(BASELINE.read_text())
    if config.getoption("--update-baseline"):
        known |= {name: round(ratio, 3) for name, (_, ratio) in found.items()}
        BASELINE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    if exitstatus == 0 and any(ratio > TOLERANCE * known.get(name, np.inf) for name, (_, ratio) in found.items()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of ratios."""
    known = json.loads(BASELINE.read_text())
    write = terminalreporter.write_line
    write(f"\n{'benchmark':<78}{'CPU s':>9}{'ratio':>9}{'baseline':>9}{'change':>8}")
    for name, (spent, ratio) in ratios(config).items():
        before = known.get(name, 0.0)
        change = ratio / before if before else np.nan
        verdict = (
            "new" if name not in known else "SLOWER" if change > TOLERANCE else "faster" if change < FASTER else ""
        )
        write(f"{name:<78}{spent:>9.3f}{ratio:>9.2f}{before:>9.2f}{change:>8.2f} {verdict}")
    write(
        f"ratio: least CPU time over that of a fixed loop in the same run; SLOWER: over {TOLERANCE} times the baseline"
    )
