"""Options of the whole test run."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

# Small matrices, and other test processes on the other cores: threads that share one wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from disagg_sim.cli.main import run
from disagg_sim.facts.yaml_files import PATH_VARIABLE
from disagg_sim.laboratory import import_lab
from disagg_sim.sweep.backends import run as backend
from disagg_sim.sweep.backends.workers import Engine

settings.register_profile("patient", deadline=None)  # an example may take longer than 200 ms on a busy machine
settings.load_profile("patient")

import_lab("")  # tests import its modules: those beside the package

#: Fits of the first calibration, plain forms, which examples worked out by hand use: they check equations, not fits.
SEED_FITS = Path(__file__).parent / "published" / "seed_fits"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-baselines", action="store_true", help="record tests/baselines/ anew; review the diff")


def pytest_configure() -> None:
    """Hear Ctrl-C, which some tests send: a run that a script starts in the background ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all is collected: nothing of it is garbage


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep thousands of tests and their modules out of later collections of garbage, a fifth of the CPU time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def one_core():
    """Let commands that name no number of jobs run in this process: other test processes have the other cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
        yield


@pytest.fixture
def update_baselines(request):
    return bool(request.config.getoption("--update-baselines"))


@pytest.fixture(scope="session")
def swept(one_core):
    """Run a sweep from its text, without pictures, into a directory; give the directory."""

    def computed(text: str, out: Path) -> Path:
        file = out.with_suffix(".yaml")
        file.write_text(text)
        assert run(["sweep", str(file), "--out", str(out)]) == 0
        return out

    return computed


@pytest.fixture
def in_one_process(monkeypatch):
    """Run tasks of sweeps and scenarios here, however many jobs are asked for: all is imported, searches are kept."""

    @contextmanager
    def here(jobs: int) -> Iterator[Engine]:
        yield lambda call, tasks: ((number, call(task)) for number, task in tasks.items())

    monkeypatch.setattr(backend, "in_processes", here)


@pytest.fixture
def without_changes(monkeypatch):
    """Plans of the command that do not look for what would change them, which takes longer than they do."""
    from disagg_sim.planning.flips import Changes

    nothing = Changes(flips=(), limits=(), aside=None)
    monkeypatch.setattr("disagg_sim.cli.plan.changes_of", lambda _: nothing)


@pytest.fixture
def seed_fits(monkeypatch):
    """Efficiency files of the first calibration in place of the shipped ones."""
    monkeypatch.setenv(PATH_VARIABLE, str(SEED_FITS))


@pytest.fixture(scope="module")
def seed_fits_throughout():
    """The same for all of a module, its own fixtures of that scope included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PATH_VARIABLE, str(SEED_FITS))
        yield
