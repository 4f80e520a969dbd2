"""Run tasks on a backend, and a task whose worker died again, elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from disagg_sim.errors import DisaggSimError
from disagg_sim.sweep.backends.workers import ATTEMPTS, CLUSTERS, Call, Engine, TaskOutcome, Workers, attempt, own_code

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    jobs: int | Workers,
    given_up: Callable[[Task, str], None] | None = None,
) -> Iterator[Result]:
    """Give the results of a function over tasks, each as soon as it is complete.

    A task whose worker process died is tried again in another one, and so is one that raised what the package does not
    expect, where ``given_up`` is there to hear of it. Takes ``function`` (importable by name, as workers load it by
    name) and ``given_up`` (told of each task that failed ``ATTEMPTS`` times, and why; the others go on).
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
        from disagg_sim.sweep.backends.clusters import on_dask, on_ray

        return on_dask(where) if where.backend == "dask" else on_ray(where)
    if where.backend == "serial" or where.jobs == 1 or tasks < 2:
        return nullcontext(lambda call, tasks: ((number, call(task)) for number, task in tasks.items()))
    from disagg_sim.sweep.backends.local import in_processes

    return in_processes(where.jobs)
