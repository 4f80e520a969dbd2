"""Run tasks on workers of Ray."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from disagg_sim.errors import InputError, quoted
from disagg_sim.extras import extra
from disagg_sim.sweep.backends.workers import ATTEMPTS, Call, Engine, TaskOutcome, Workers

#: How long a cluster may take to answer. [s]
ANSWER_WITHIN = 10.0
#: Tasks that are handed to a CPU of the cluster at a time: one runs, the others wait there. [1]
IN_FLIGHT = 4


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
