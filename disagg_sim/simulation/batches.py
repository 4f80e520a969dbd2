"""Hold the prompts that wait for a policy to form prefill batches: those of an instance, and those of any."""

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
#: Prompts that a policy is shown of a queue, the oldest ones: a look costs the same however long the queue is. [1]
SEEN = 256
NOBODY: OrderedDict[int, Waiting] = OrderedDict()  # a queue in which nobody waits

Submit = Callable[[int, Sequence[tuple[int, Waiting]]], None]


class Batches:
    """Queues of waiting prompts, one an instance and one that all share; asks the policy what instances take of
    them.
    """

    def __init__(self, forming: BatchForming | None, state: ClusterState, submit: Submit) -> None:
        self.forming, self._submit = forming, submit
        self._view, self._engine, self._roster, self._shared = state.view, state.engine, state.roster, state.shared
        self._queues: dict[int, OrderedDict[int, Waiting]] = {}  # instance -> request -> segment, oldest first
        self._running: dict[int, set[int]] = {}  # requests that an instance took and that have not left it
        self.wakes: dict[int, float] = {}  # when an instance is asked again [s]
        #: Instances that may take of the shared queue at once, those that have waited longest first.
        self._wanting: dict[int, None] = dict.fromkeys(state.roster.prefill.tolist())

    @property
    def waiting(self) -> int:
        """Prompts that wait, for an instance or for any. [request]"""
        return len(self._shared.segments) + sum(len(queue) for queue in self._queues.values())

    def wait(self, instance: int, request: int, segment: Waiting) -> None:
        """A prompt has come to an instance."""
        self._queues.setdefault(instance, OrderedDict())[request] = segment
        self.ask(instance)

    def share(self, request: int, segment: Waiting) -> None:
        """A prompt has come for whichever instance takes it first."""
        shared = self._shared
        shared.add(request, segment)
        for instance in list(self._wanting):
            self.ask(instance)
            if request not in shared.segments:
                break

    def ended(self, instance: int, request: int) -> None:
        """A segment has left its instance; where it was taken from a queue, there is room for another."""
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
        """Let the policy say what an instance takes, if it may take anything now."""
        if self.forming is None:
            return
        manual = self._roster.mode[instance] == MANUAL
        while not (manual and self._running.get(instance)):
            serves = self._roster.state[instance] == READY and self._roster.role[instance] != DECODE
            own: dict[int, Waiting] = self._queues.get(instance, NOBODY)
            shared = self._shared.segments if serves else NOBODY
            if not own and not shared:
                self._want(instance, serves)
                return
            batch = self._formed(instance, own, shared)
            if not batch.requests:
                self._want(instance, serves and not self._running.get(instance))
                if batch.wake_s < math.inf:
                    self.wakes[instance] = batch.wake_s
                    self._engine.at(max(batch.wake_s, self._engine.now), NORMAL, self._woken, instance, batch.wake_s)
                return
            self._wanting.pop(instance, None)
            self._begin(instance, batch, own)

    def _want(self, instance: int, wants: bool) -> None:
        """Whether an instance is asked when a prompt comes to the shared queue."""
        if wants:
            self._wanting.setdefault(instance)
        else:
            self._wanting.pop(instance, None)

    def _formed(self, instance: int, own: dict[int, Waiting], shared: dict[int, Waiting]) -> Batch:
        """What the policy lets an instance take, checked."""
        assert self.forming is not None
        waiting = tuple(islice(chain(own, shared), SEEN))
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
