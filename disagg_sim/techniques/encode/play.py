r"""An encode pool before prefill: each GPU encodes one request at a time, and requests wait in one queue.

With c GPUs that take the same time s for every request, a request begins when it has come and the one that began c
before it has ended: :math:`b_i = \max(a_i, b_{i-c} + s)`. Its embeddings are with prefill at :math:`b_i + s` and the
transfer, where its life in the simulated instances begins. Source: physics page, section 8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError, check_kinds, whole_number
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.options import FULL
from disagg_sim.techniques.encode.physics import EncodeStep
from disagg_sim.workload.trace import Trace

if TYPE_CHECKING:
    from disagg_sim.simulation.records import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """GPUs that encode the images of every request before its prefill."""

    step: EncodeStep  # of ``ds.encode_step``, of the model that is served
    instances: int  # GPUs [1]

    def __post_init__(self) -> None:
        """``InputError`` for a number of GPUs below 1."""
        check_kinds(self)
        whole_number("instances of encode", self.instances)

    def sent(self, arrival: Floats) -> Floats:
        """Find when the embeddings of requests are with prefill, ascending. [s]"""
        each, count = self.step.each_s, self.instances
        rounds = -(-arrival.size // count)
        turns = np.full(rounds * count, np.inf)
        turns[: arrival.size] = arrival
        before = each * np.arange(rounds)[:, None]
        begun = before + np.maximum.accumulate(turns.reshape(rounds, count) - before, axis=0)
        return np.asarray(begun.ravel()[: arrival.size] + each + self.step.transfer)

    def check(self, trace: Trace, at: Setup, concurrency: int, records: str) -> None:
        """Raise where it cannot stand before prefill."""
        if records != FULL:
            raise InputError(f"encode: needs the records of all requests, not {records!r}; allowed: {FULL!r}")
        if self.step.setup.model.name != at.model.name:
            raise InputError(f"encode: its images are for {self.step.setup.model.name}, and {at.model.name} is served")
        if concurrency or trace.sessions is not None:
            raise InputError("encode: its queue needs the arrivals of a trace; allowed: no concurrency, no sessions")
        if (shortest := int(trace.input_tokens.min())) < self.step.tokens:
            raise InputError(
                f"encode: images are {self.step.tokens} tokens, more than a prompt of {shortest}, which counts them"
            )

    def before(self, trace: Trace) -> Trace:
        """The trace that prefill meets: the same requests, each as its embeddings arrive."""
        return replace(trace, arrival=self.sent(trace.arrival))

    def counted(self, found: RunResult, trace: Trace) -> RunResult:
        """Count the records from the arrivals at the encoders."""
        from disagg_sim.simulation.records import EncodeUse  # plans know encoders, and no records

        own = replace(found.requests, arrival_s=trace.arrival[found.requests.request])
        end, each = found.duration_s, self.step.each_s
        begun = self.sent(trace.arrival) - self.step.transfer - each
        busy = float(np.clip(end - begun, 0.0, each).sum())
        flops = busy / self.step.time * self.step.flops
        use = EncodeUse(gpus=self.instances, held_s=end, busy_s=busy, flops=flops)
        samples = replace(found.samples, gpus=found.samples.gpus + self.instances)
        return replace(found, requests=own, samples=samples, encode=use)
