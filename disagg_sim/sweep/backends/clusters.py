"""Run tasks on workers of a cluster that runs: of Dask, or of Ray."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from disagg_sim.errors import DisaggSimError, InputError, quoted
from disagg_sim.extras import extra
from disagg_sim.sweep.backends.workers import ATTEMPTS, Call, Engine, TaskOutcome, Workers

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
        remote = ray.remote(max_retries=ATTEMPTS - 1)(_called)
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


def _called(call: Call, task: Any) -> TaskOutcome:
    return call(task)
