"""Run tasks in processes of this machine or on a cluster that runs, of Dask or of Ray; again where a worker died."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from joblib import Parallel, delayed
from joblib.externals.loky.backend import resource_tracker as loky_tracker

from disagg_sim.errors import DisaggSimError, InputError, quoted
from disagg_sim.extras import extra, safe_path
from disagg_sim.sweep.backends.workers import ATTEMPTS, CLUSTERS, Call, Engine, TaskOutcome, Workers, attempt, own_code

#: How often a worker looks whether its parent lives. [s]
WATCH_INTERVAL = 0.5
KILLED = "its worker process was killed (out of memory?)"


@contextmanager
def in_processes(jobs: int) -> Iterator[Engine]:
    """Attempt tasks in worker processes of this machine.

    A process that dies takes all processes of the pool with it, and nothing says whose task it was. So after a death
    tasks go in groups of ``jobs``, and those of a group with a death one by one: who is alone is to blame.
    """
    wary = False

    def engine(call: Call, tasks: Mapping[int, Any]) -> Iterator[tuple[int, TaskOutcome]]:
        nonlocal wary
        size = jobs if wary else len(tasks)
        numbers = list(tasks)
        for group in (numbers[at : at + size] for at in range(0, len(numbers), size)):
            found = set()
            try:
                for number, outcome in _in_one_pool(call, {number: tasks[number] for number in group}, jobs):
                    found.add(number)
                    yield number, outcome
            except BrokenProcessPool:
                if not wary:
                    wary = True
                    return  # what is left is asked for again
                for number in set(group) - found:
                    yield from _alone(call, number, tasks[number], jobs)

    with safe_path():
        yield engine


def _alone(call: Call, number: int, task: Any, jobs: int) -> Iterator[tuple[int, TaskOutcome]]:
    try:
        yield from _in_one_pool(call, {number: task}, jobs)
    except BrokenProcessPool:
        yield number, TaskOutcome(lost=KILLED)


def _in_one_pool(call: Call, tasks: Mapping[int, Any], jobs: int) -> Iterator[tuple[int, TaskOutcome]]:
    """Outcomes of tasks that share a pool of processes."""
    watching: dict[str, Any] = {"initializer": _end_with, "initargs": (os.getpid(),)}  # those without a task, too
    parallel = Parallel(n_jobs=jobs, backend="loky", return_as="generator_unordered", batch_size=1, **watching)
    for tracker in (resource_tracker, loky_tracker):
        tracker.ensure_running()  # started later, it would let Ctrl-C through to the workers
    # a worker of long sweeps that has grown is replaced, and its tasks go to the next: no news to a user
    warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given", category=UserWarning)
    with _interrupt_deferred():
        found = parallel(delayed(_work)(call, number, task) for number, task in tasks.items())
    yield from found


def _work(call: Call, number: int, task: Any) -> tuple[int, TaskOutcome]:
    """Attempt a task in a worker process."""
    return number, call(task)


def _end_with(parent: int) -> None:
    """End this process soon after its parent is gone: killed, it could not tell its workers."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Hold Ctrl-C back: processes started meanwhile never see it, this one answers it when the time is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    jobs: int | Workers,
    given_up: Callable[[Task, str], None] | None = None,
) -> Iterator[Result]:
    """Give the results of a function, importable by name, over tasks, each as soon as it is complete.

    A task whose worker process died is tried again in another one, and so is one that raised what the package does not
    expect, where ``given_up`` is there to hear of it after ``ATTEMPTS`` times; the others go on.
    """
    where = jobs if isinstance(jobs, Workers) else Workers(jobs)
    left, failures = dict(enumerate(tasks)), Counter[int]()
    if not left:
        return
    with _engine(where, len(left)) as engine:
        while left:
            call = partial(attempt, function, code=own_code() if where.address else "")
            for number, outcome in engine(call, dict(left)):
                if outcome.error is None and not outcome.lost:
                    del left[number]
                    yield outcome.value
                    continue
                if outcome.error is not None and (given_up is None or isinstance(outcome.error, DisaggSimError)):
                    raise outcome.error
                failures[number] += ATTEMPTS if outcome.final else 1
                if failures[number] >= ATTEMPTS:
                    why = outcome.lost or f"{type(outcome.error).__name__}: {outcome.error}"
                    if given_up is None:
                        raise DisaggSimError(f"{why}, {ATTEMPTS} times; go on with fewer --jobs")
                    given_up(left.pop(number), why)


@contextmanager
def staying(jobs: int | Workers) -> Iterator[Workers]:
    """Keep a cluster, once it is asked for, for all tasks that follow; processes of this machine stay by themselves."""
    where = jobs if isinstance(jobs, Workers) else Workers(jobs)
    if where.backend not in CLUSTERS or where.engine is not None:
        yield where
        return
    with ExitStack() as held:

        @cache
        def cluster() -> Engine:
            return held.enter_context(_engine(where, tasks=2))

        def engine(call: Call, tasks: Mapping[int, Any]) -> Iterator[tuple[int, TaskOutcome]]:
            return cluster()(call, tasks)

        yield replace(where, engine=engine)


def _engine(where: Workers, tasks: int) -> AbstractContextManager[Engine]:
    if where.engine is not None:
        return nullcontext(where.engine)
    if where.backend in CLUSTERS:
        return on_dask(where) if where.backend == "dask" else on_ray(where)
    if where.backend == "serial" or where.jobs == 1 or tasks < 2:
        return nullcontext(lambda call, tasks: ((number, call(task)) for number, task in tasks.items()))
    return in_processes(where.jobs)


#: How long a scheduler or a cluster may take to answer. [s]
ANSWER_WITHIN = 10.0
#: Tasks that are handed to a CPU of the cluster at a time: one runs, the others wait there. [1]
IN_FLIGHT = 4


@contextmanager
def on_dask(where: Workers) -> Iterator[Engine]:
    """Attempt tasks on the workers of a scheduler that runs.

    Dask itself tries a task whose worker died on other workers.
    """
    with extra("dask"):
        import dask
        from distributed import Client, as_completed
        from distributed.protocol.pickle import dumps
    settings = {
        "distributed.scheduler.allowed-failures": ATTEMPTS - 1,
        "distributed.logging.distributed": "critical",  # a death of a worker is told by its outcome
    }
    with dask.config.set(settings), ExitStack() as opened:
        try:
            client = opened.enter_context(Client(where.address, timeout=ANSWER_WITHIN))
        except (OSError, ValueError):
            said = f"no scheduler of Dask answers within {ANSWER_WITHIN:.0f} s"
            raise InputError(f"address {quoted(where.address)}: {said}") from None

        def called(data: bytes) -> Any:  # names nothing of this package: a scheduler without it passes it on
            from distributed.protocol.pickle import loads

            from disagg_sim.sweep.backends.workers import TaskOutcome, unlike

            try:
                call, task = loads(data)
            except Exception:  # no such class or function
                return TaskOutcome(error=unlike())
            return call(task)

        def engine(call: Call, tasks: Mapping[int, Any]) -> Iterator[tuple[int, TaskOutcome]]:
            sent = ((number, dumps((call, task))) for number, task in tasks.items())
            numbers = {client.submit(called, data, pure=False): number for number, data in sent}
            try:
                for future in as_completed(list(numbers)):
                    number = numbers.pop(future)
                    if future.status == "finished":
                        yield number, future.result()
                        continue
                    died = future.exception() if future.status == "error" else future.status
                    if isinstance(died, ImportError):
                        raise DisaggSimError(f"a worker of Dask: {died}; install disagg-sim[dask] on all machines")
                    said = str(died).partition("\n")[0]
                    yield number, TaskOutcome(lost=f"the workers of Dask that ran it died ({said})", final=True)
            finally:
                client.cancel(list(numbers))

        yield engine


@contextmanager
def on_ray(where: Workers) -> Iterator[Engine]:
    """As ``on_dask``, on a running cluster of Ray; ``where.address`` is that of its head."""
    with extra("ray"):
        import ray
    try:
        # Ray itself would wait for minutes
        host, _, port = where.address.removeprefix("ray://").rpartition(":")
        socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN).close()
    except (OSError, ValueError):
        raise InputError(f"address {quoted(where.address)}: no cluster of Ray answers there") from None
    try:
        ray.init(address=where.address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError) as error:
        why = f"{str(error).partition(chr(10))[0]}; one that asks for a token needs RAY_AUTH_MODE=token"
        raise InputError(f"address {quoted(where.address)}: the cluster of Ray refuses: {why}") from None
    try:
        remote = ray.remote(max_retries=ATTEMPTS - 1)(lambda call, task: call(task))
        room = max(1, int(ray.cluster_resources().get("CPU", 1))) * IN_FLIGHT

        def engine(call: Call, tasks: Mapping[int, Any]) -> Iterator[tuple[int, TaskOutcome]]:
            waiting, numbers = iter(tasks.items()), dict[Any, int]()
            while True:
                for number, task in islice(waiting, room - len(numbers)):
                    numbers[remote.remote(call, task)] = number
                if not numbers:
                    return
                for done in ray.wait(list(numbers))[0]:
                    number = numbers.pop(done)
                    try:
                        outcome = ray.get(done)
                    except ray.exceptions.RayError as error:
                        said = str(error).partition("\n")[0]
                        outcome = TaskOutcome(lost=f"the workers of Ray that ran it died ({said})", final=True)
                    yield number, outcome

        yield engine
    finally:
        ray.shutdown()
