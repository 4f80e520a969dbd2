from __future__ import annotations

import math
import os
import signal

import pytest

from disagg_sim.errors import DisaggSimError, InputError
from disagg_sim.sweep.backends import run_tasks

pytestmark = pytest.mark.alone


def refuse(number: int) -> int:
    raise InputError(f"not {number}")


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_is_done_once(jobs: int) -> None:
    assert sorted(run_tasks(math.factorial, range(12), jobs=jobs)) == [math.factorial(n) for n in range(12)]


def test_one_process_keeps_the_order() -> None:
    assert list(run_tasks(abs, [3, -1, 2], jobs=1)) == [3, 1, 2]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_expected_failure_comes_through(jobs: int) -> None:
    with pytest.raises(InputError, match="not 7"):
        list(run_tasks(refuse, [7, 7], jobs=jobs))


def test_a_killed_worker_is_an_expected_failure() -> None:
    with pytest.raises(DisaggSimError, match="fewer --jobs"):
        list(run_tasks(die, [1, 2, 3], jobs=2))
