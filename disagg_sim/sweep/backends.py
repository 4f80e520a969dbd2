"""Where tasks run: in this process, or in worker processes of joblib. Knows no word of the domain."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from disagg_sim.errors import DisaggSimError

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(function: Callable[[Task], Result], tasks: Sequence[Task], *, jobs: int) -> Iterator[Result]:
    """Results of ``function`` over ``tasks``, each as soon as it is complete.

    Parameters
    ----------
    function : callable
        Importable by name, as workers load it by name.
    tasks : sequence
        Picklable arguments.
    jobs : int
        Processes; 1 runs here, in order. Above 1 the order is that of completion. [1]

    Raises
    ------
    DisaggSimError
        When a worker process was killed; the results so far have been given.
    """
    if jobs == 1 or len(tasks) < 2:
        yield from map(function, tasks)
        return
    from joblib import Parallel, delayed

    parallel = Parallel(n_jobs=min(jobs, len(tasks)), backend="loky", return_as="generator_unordered", batch_size=1)
    with _interrupt_ignored():
        results = parallel(delayed(function)(task) for task in tasks)
    try:
        yield from results
    except BrokenProcessPool:
        raise DisaggSimError("a worker process was killed (out of memory?); go on with fewer --jobs") from None


@contextmanager
def _interrupt_ignored() -> Iterator[None]:
    """Processes started meanwhile ignore Ctrl-C for good, so that only this one answers it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
