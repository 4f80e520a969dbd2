"""The same results from every backend, whichever workers die meanwhile."""

import math
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from disagg_sim.cli.main import run
from disagg_sim.errors import DisaggSimError, InputError
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.backends.workers import ATTEMPTS, Workers

LOCAL = (Workers(1), Workers(2))


def refuse(number: int) -> int:
    raise InputError(f"not {number}")


def stumble(number: int) -> int:
    """Fail as a fault of the package does, at 7."""
    if number == 7:
        raise ZeroDivisionError("seven")
    return number


def die_at_seven(number: int) -> int:
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_once(path: Path) -> str:
    """Kill the own process at the first attempt."""
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return path.name


def listens(_: int) -> bool:
    """Whether this process or its parent has a socket that waits for connections."""
    held = set()
    for pid in (os.getpid(), os.getppid()):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the directory itself, which is read
                held.add(os.readlink(path))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return any(row[3] == "0A" and f"socket:[{row[9]}]" in held for row in rows)


@pytest.mark.parametrize("where", LOCAL)
def test_every_task_is_done_once(where):
    assert sorted(run_tasks(math.factorial, range(12), jobs=where)) == [math.factorial(n) for n in range(12)]


def test_one_process_keeps_the_order():
    assert list(run_tasks(abs, [3, -1, 2], jobs=1)) == [3, 1, 2]


@pytest.mark.parametrize("where", LOCAL)
def test_an_expected_failure_comes_through(where):
    with pytest.raises(InputError, match="not 7"):
        list(run_tasks(refuse, [7, 7], jobs=where, given_up=lambda *_: None))


@pytest.mark.parametrize("where", LOCAL)
def test_a_task_that_fails_again_and_again_is_given_up_and_the_others_are_done(where):
    told: list[tuple[int, str]] = []
    done = sorted(run_tasks(stumble, range(5, 10), jobs=where, given_up=lambda *task: told.append(task)))
    assert done == [5, 6, 8, 9]
    assert told == [(7, "ZeroDivisionError: seven")]


@pytest.mark.parametrize("where", LOCAL)
def test_a_fault_keeps_its_traceback_where_nobody_hears_of_it(where):
    with pytest.raises(ZeroDivisionError, match="seven") as caught:
        list(run_tasks(stumble, range(5, 10), jobs=where))
    frames = "".join(str(entry.name) for entry in caught.traceback) + "".join(getattr(caught.value, "__notes__", []))
    assert "stumble" in frames


def test_who_kills_its_worker_is_found_and_the_others_are_done():
    told: list[tuple[int, str]] = []
    done = sorted(run_tasks(die_at_seven, range(5, 12), jobs=2, given_up=lambda *task: told.append(task)))
    assert done == [5, 6, 8, 9, 10, 11]
    assert told == [(7, "its worker process was killed (out of memory?)")]


@pytest.mark.long
def test_a_killed_worker_is_an_expected_failure_where_nobody_hears_of_it():
    with pytest.raises(DisaggSimError, match=f"killed .*, {ATTEMPTS} times; go on with fewer --jobs"):
        list(run_tasks(die_at_seven, [7, 7, 7], jobs=2))


@pytest.mark.long
def test_a_task_whose_worker_was_killed_once_is_done_in_another(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    assert sorted(run_tasks(die_once, paths, jobs=2)) == ["a", "b", "c"]


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_no_cluster_is_started_whose_ports_anybody_could_use(backend, tmp_path, capsys):
    """A cluster of one's own would listen on eight ports without a password, that of Ray on every network."""
    assert run(["sweep", "smoke", "--out", str(tmp_path / "out"), "--backend", backend, "--jobs", "2"]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"error: backend {backend}: needs the --address of a cluster that runs; "
        "on this machine leave it out: the workers of --jobs are processes that open no port\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="finds ports by /proc")
def test_local_workers_open_no_port():
    assert not any(run_tasks(listens, range(4), jobs=2))
