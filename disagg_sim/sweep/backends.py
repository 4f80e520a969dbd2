"""Run tasks in this process or in worker processes of joblib, whatever the tasks are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from joblib import Parallel, delayed
from joblib.externals.loky.backend import resource_tracker

from disagg_sim.errors import DisaggSimError

#: How often a worker looks whether its parent lives. [s]
WATCH_INTERVAL = 0.5

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(function: Callable[[Task], Result], tasks: Sequence[Task], *, jobs: int) -> Iterator[Result]:
    """Give the results of a function over tasks, each as soon as it is complete.

    Parameters
    ----------
    function : callable
        Importable by name, as workers load it by name.
    tasks : sequence
        Picklable arguments.
    jobs : int
        Processes; 1 runs here, in order. Above 1 the order is that of completion. [1]

    Yields
    ------
    Result
        What ``function`` returns, one a task.

    Raises
    ------
    DisaggSimError
        When a worker process was killed; the results so far have been given.

    Examples
    --------
    >>> list(run_tasks(len, ["a", "bc", ""], jobs=1))
    [1, 2, 0]
    """
    if jobs == 1 or len(tasks) < 2:
        yield from map(function, tasks)
        return

    parallel = Parallel(n_jobs=min(jobs, len(tasks)), backend="loky", return_as="generator_unordered", batch_size=1)
    resource_tracker.ensure_running()  # started later, it would let Ctrl-C through to the workers
    with _interrupt_held():
        results = parallel(delayed(_work)(function, task, os.getpid()) for task in tasks)
    try:
        yield from results
    except BrokenProcessPool:
        raise DisaggSimError("a worker process was killed (out of memory?); go on with fewer --jobs") from None


def _work(function: Callable[[Task], Result], task: Task, parent: int) -> Result:
    """Run a task in a worker process that exits when its parent dies."""
    _end_with(parent)
    return function(task)


@cache
def _end_with(parent: int) -> None:
    """End this process soon after its parent is gone: killed, it could not tell its workers."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Hold Ctrl-C back: processes started meanwhile never see it, this one answers it when the time is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
