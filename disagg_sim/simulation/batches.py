"""Hold the prompts that wait for a policy to form prefill batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from disagg_sim.simulation.engine import NORMAL, Engine
from disagg_sim.simulation.policy import BatchForming
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Batch


class Refuse(Protocol):
    """Stop the run over the answer of a method of the policy."""

    def __call__(self, wish: object, why: str, asked: object = None) -> NoReturn:
        """Raise ``PolicyError``."""
        ...


#: A segment that waits: context, prompt, generate, until, then [token], time of the last token [s].
Waiting = tuple[int, int, int, int, int, float]
Submit = Callable[[int, Sequence[tuple[int, Waiting]]], None]


class Batches:
    """Queues of waiting prompts by instance; asks the policy when an instance is free and prompts wait."""

    def __init__(
        self, forming: BatchForming | None, *, view: ClusterView, engine: Engine, submit: Submit, refuse: Refuse
    ) -> None:
        self.forming = forming
        self._view, self._engine, self._submit, self._refuse = view, engine, submit, refuse
        self._queues: dict[int, dict[int, Waiting]] = {}  # instance -> request -> segment, oldest first
        self._running: dict[int, int] = {}  # prompts of the batch in progress [1]
        self._wake: dict[int, float] = {}  # when it is asked again [s]

    @property
    def waiting(self) -> int:
        """Prompts that wait at all instances. [request]"""
        return sum(len(queue) for queue in self._queues.values())

    def wait(self, instance: int, request: int, segment: Waiting) -> None:
        """A prompt has come to an instance."""
        self._queues.setdefault(instance, {})[request] = segment
        self.ask(instance)

    def ended(self, instance: int) -> None:
        """A prompt of a batch has left its instance."""
        running = self._running.get(instance, 0)
        if running:
            self._running[instance] = running - 1
            self.ask(instance)

    def abandon(self, instance: int) -> list[int]:
        """Drop the queued prompts of an instance and return their requests."""
        self._running[instance] = 0
        return list(self._queues.pop(instance, {}))

    def ask(self, instance: int) -> None:
        """Let the policy form a batch if the instance is free."""
        queue = self._queues.get(instance)
        if not queue or self._running.get(instance, 0) or self.forming is None:
            return
        batch = self.forming.form(self._view, instance, tuple(queue))
        if type(batch) is not Batch or not isinstance(batch.requests, tuple | list):
            why = f"what to do on instance {instance} has to be a Batch of a tuple of requests"
            self._refuse(batch, why, self.forming.form)
        if not queue.keys() >= set(batch.requests) or len(set(batch.requests)) < len(batch.requests):
            wish = f"batch {batch.requests} on instance {instance}"
            self._refuse(wish, f"the prompts that wait there are {list(queue)}", self.forming.form)
        if batch.requests:
            self._running[instance] = len(batch.requests)
            self._submit(instance, [(request, queue.pop(request)) for request in batch.requests])
        elif batch.wake_s < math.inf:
            self._wake[instance] = batch.wake_s
            self._engine.at(max(batch.wake_s, self._engine.now), NORMAL, self._woken, instance, batch.wake_s)

    def _woken(self, instance: int, wake_s: float) -> None:
        if self._wake.get(instance) == wake_s:
            del self._wake[instance]
            self.ask(instance)
