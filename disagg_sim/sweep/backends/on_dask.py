"""Run tasks on workers of Dask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from disagg_sim.errors import DisaggSimError, InputError, quoted
from disagg_sim.extras import extra
from disagg_sim.sweep.backends.workers import ATTEMPTS, Call, Engine, TaskOutcome, Workers

#: How long a scheduler may take to answer. [s]
ANSWER_WITHIN = 10.0


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
