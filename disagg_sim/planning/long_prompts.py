"""Size instances that serve one request at a time: the co-located layout of very long prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.planning.counts import QuickBound
from disagg_sim.planning.pools import ColocatedChoice
from disagg_sim.planning.queueing import Delay, Occupancy, Service, share_that_waits, shortest_queue_delay


@dataclass(frozen=True, kw_only=True, eq=False)
class OneByOne(QuickBound, ColocatedChoice):
    r"""An instance of one attention rank and one slot: a request is prefilled and decoded before the next one starts.

    No prompt delays the tokens of another request, so TPOT is the decode step alone; all waiting is before the first
    token. With a prefill of P the slot is taken for

    .. math:: S = P + (OSL-1)\,T_d(1)

    and c instances are a queue of c servers (``planning.queueing``). P is m T_mix of a prompt in m steps; through a
    pipeline its chunks follow each other (``physics.passes.chunked``), and a token passes all stages.
    Engines: ``max-num-seqs 1``.
    """

    passes: Floats  # (lengths,) prefill of each prompt, host included [s]

    @classmethod
    def of(cls, shared: ColocatedChoice) -> OneByOne:
        """The same instance with one slot; without a pipeline."""
        (held, time), prompts = shared.steps.own, shared.steps.prompts
        longer = shared.steps.worth(1.0, prompts.new, prompts.past) - prompts.new
        alone = shared.host + (np.ceil(prompts.new / held[0]) + longer / held[0]) * time[0]  # beside its own sequence
        if shared.loads is not None:  # one after the other with what they are of
            alone = alone + shared.loads.link + shared.loads.latency
        values = {each.name: getattr(shared, each.name) for each in fields(shared)}
        return cls(**values | {"steps": shared.steps.beside(1.0), "passes": alone})

    @property
    def _step(self) -> float:
        """Time of a token. [s]"""
        return float(self.step[0]) / self._accepted

    @cached_property
    def service(self) -> Service:
        """How long requests take the slot."""
        taken = self.passes + self.work.lengths.gaps * self._step
        mean = float(self.weights @ taken)
        return Service(mean, float(self.weights @ (taken - mean) ** 2) / mean**2, self.work.dispersion)

    @cached_property
    def most(self) -> float:
        """Rate of an instance at the largest load that is planned; 0 where a token alone is too late. [request/s]"""
        return self.work.share / self.service.mean if self._step <= self.work.tpot.seconds else 0.0

    def _delay(self, rate: float, instances: int) -> Delay:
        """Time to the first token of all requests. [s]"""
        used = rate * self.service.mean / instances
        if self.parts is None:
            return shortest_queue_delay(self.passes, self.weights, instances, used, self.service)
        return shortest_queue_delay(self.parts.values(self.passes), self.parts.weights, instances, used, self.service)

    def holds(self, rate: float, instances: int) -> bool:
        """See ``PoolChoice``."""
        sized, ttft = self.work.sized(rate), self.work.ttft
        if self._step > self.work.tpot.seconds or self.work.overloads(sized * self.service.mean / instances):
            return False
        return self._delay(sized, instances).late(ttft.seconds) <= 1.0 - ttft.share

    def tpot(self, rate: float, instances: int, share: float) -> float:  # noqa: ARG002 - the same for all requests
        """TPOT that a share of the requests does not exceed. [s]"""
        return self._step if rate * self.service.mean < instances else math.inf

    def occupied(self, rate: float, instances: int) -> Occupancy:
        """Sequences of an instance over time: one or none."""
        used = min(rate * self.service.mean / instances, 1.0)
        return Occupancy(np.array([0.0, 1.0]), np.array([1.0 - used, used]), share_that_waits(instances, used))
