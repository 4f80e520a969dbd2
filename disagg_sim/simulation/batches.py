"""Queue prompts for policies that form prefill batches: one queue an instance, and one that all instances share."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, islice

from disagg_sim.simulation.engine import NORMAL
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.policy import BatchForming
from disagg_sim.simulation.view import ClusterState, Waiting
from disagg_sim.simulation.wishes import Batch, Role, State

MANUAL, READY, DECODE = Mode.MANUAL, State.READY, Role.DECODE  # an enum's members are slow to look up
#: Oldest prompts that a policy may choose from, so that its time does not grow with the queue. [1]
MOST_OFFERED = 256
EMPTY: OrderedDict[int, Waiting] = OrderedDict()

Submit = Callable[[int, Sequence[tuple[int, Waiting]]], None]


class Batches:
    """Queues of waiting prompts; asks the policy which of them an instance takes."""

    def __init__(self, forming: BatchForming | None, state: ClusterState, submit: Submit) -> None:
        self.forming, self._submit = forming, submit
        self._view, self._engine, self._roster, self._shared = state.view, state.engine, state.roster, state.shared
        self._queues: dict[int, OrderedDict[int, Waiting]] = {}  # instance -> request -> segment, oldest first
        self._running: dict[int, set[int]] = {}  # requests that an instance took and that have not left it
        self.wakes: dict[int, float] = {}  # when an instance is asked again [s]
        #: Instances that may take from the shared queue at once, longest idle first.
        self._takers: dict[int, None] = dict.fromkeys(state.roster.prefill.tolist())

    @property
    def waiting(self) -> int:
        """Prompts that wait, for an instance or for any. [request]"""
        return len(self._shared.segments) + sum(len(queue) for queue in self._queues.values())

    def wait(self, instance: int, request: int, segment: Waiting) -> None:
        """Add a prompt to the queue of an instance."""
        self._queues.setdefault(instance, OrderedDict())[request] = segment
        self.ask(instance)

    def share(self, request: int, segment: Waiting) -> None:
        """Add a prompt to the shared queue, and offer it to idle instances."""
        shared = self._shared
        shared.add(request, segment)
        for instance in list(self._takers):
            self.ask(instance)
            if request not in shared.segments:
                break

    def ended(self, instance: int, request: int) -> None:
        """Note that a segment has left its instance, and offer the instance further prompts."""
        running = self._running.get(instance)
        if running and request in running:
            running.remove(request)
            self.ask(instance)
        elif self._shared.segments:
            self.ask(instance)

    def abandon(self, instance: int) -> list[int]:
        """Drop the queued prompts of an instance and return their requests."""
        self._running.pop(instance, None)
        return list(self._queues.pop(instance, {}))

    def ask(self, instance: int) -> None:
        """Ask the policy what an instance takes, if it may take anything now."""
        if self.forming is None:
            return
        manual = self._roster.mode[instance] == MANUAL
        while not (manual and self._running.get(instance)):
            serves = self._roster.state[instance] == READY and self._roster.role[instance] != DECODE
            own: dict[int, Waiting] = self._queues.get(instance, EMPTY)
            shared = self._shared.segments if serves else EMPTY
            if not own and not shared:
                self._note_taker(instance, serves)
                return
            batch = self._formed(instance, own, shared)
            if not batch.requests:
                self._note_taker(instance, serves and not self._running.get(instance))
                if batch.wake_s < math.inf:
                    self.wakes[instance] = batch.wake_s
                    self._engine.at(max(batch.wake_s, self._engine.now), NORMAL, self._woken, instance, batch.wake_s)
                return
            self._takers.pop(instance, None)
            self._begin(instance, batch, own)

    def _note_taker(self, instance: int, wants: bool) -> None:
        """Note whether an instance is asked when a prompt joins the shared queue."""
        if wants:
            self._takers.setdefault(instance)
        else:
            self._takers.pop(instance, None)

    def _formed(self, instance: int, own: dict[int, Waiting], shared: dict[int, Waiting]) -> Batch:
        """Ask the policy for the batch of an instance, and check it."""
        assert self.forming is not None
        waiting = tuple(islice(chain(own, shared), MOST_OFFERED))
        batch = self.forming.form(self._view, instance, waiting)
        refuse = self._roster.refuse
        if type(batch) is not Batch or not isinstance(batch.requests, tuple | list):
            why = f"what to do on instance {instance} has to be a Batch of a tuple of requests"
            refuse(batch, why, self.forming.form)
        if not set(waiting) >= set(batch.requests) or len(set(batch.requests)) < len(batch.requests):
            wish = f"batch {batch.requests} on instance {instance}"
            refuse(wish, f"the prompts that wait there are {list(waiting)}", self.forming.form)
        return batch

    def _begin(self, instance: int, batch: Batch, own: dict[int, Waiting]) -> None:
        self._running.setdefault(instance, set()).update(batch.requests)
        taken = []
        for request in batch.requests:
            if request in own:
                taken.append((request, own.pop(request)))
            else:
                taken.append((request, self._shared.take(request)))
                self._roster.coming[instance] += 1
        self._submit(instance, taken)

    def _woken(self, instance: int, wake_s: float) -> None:
        if self.wakes.get(instance) == wake_s:
            del self.wakes[instance]
            self.ask(instance)
