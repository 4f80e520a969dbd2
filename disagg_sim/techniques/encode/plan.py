"""Queue requests for the GPUs that encode their images, before prefill.

The GPUs of an encode pool have one queue (``encode.play``), and TTFT is the sum of the time to leave them and
of the time from there to the first token, the two taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.counts import QuickBound
from disagg_sim.planning.leaving_order import StageTimes
from disagg_sim.planning.limits import Demand
from disagg_sim.planning.loads import Loads
from disagg_sim.planning.queueing import Delay, mean_wait, share_that_waits
from disagg_sim.techniques.encode.physics import EncodeStep

#: Waits at which the queue of an encode pool is taken, middles of equal shares of those that wait. [1]
WAITS = -np.log(1.0 - (np.arange(12) + 0.5) / 12)
#: Steps by which the GPUs of an encode pool that are tried grow, over the fewest that keep up, but by one at least. [1]
STEP = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodeChoice(QuickBound):
    """GPUs that encode one request at a time, behind one queue; each of them is an instance."""

    step: EncodeStep
    work: Demand
    memory: float = math.nan  # on its GPU; not counted: towers are small [B]
    bound: str = "compute"  # one of ``domain.BOUNDS``: all of it is timed at the rates of GEMMs

    @property
    def at(self) -> Setup:
        """Model, system, recipe and engine."""
        return self.step.setup

    @property
    def mapping(self) -> Sharding:
        """One GPU."""
        return Sharding()

    @property
    def alone_s(self) -> float:
        """Time until the embeddings of a request that meets no other are with prefill. [s]"""
        return self.step.each_s + self.step.transfer

    @property
    def most(self) -> float:
        """Rate of a GPU that always encodes, less the headroom. [request/s]"""
        return 1.0 / (self.step.each_s * self.work.spare)

    def holds(self, rate: float, instances: int) -> bool:
        """Whether so many GPUs keep up; what the queue takes of TTFT is counted with the prefill pool behind it."""
        return self.work.sized(rate) * self.step.each_s < instances

    def delay(self, rate: float, gpus: int) -> Delay:
        """Arrival until the embeddings are with prefill: equal times at ``gpus`` servers of one queue."""
        used, own = rate * self.step.each_s / gpus, np.array([self.alone_s])
        share = share_that_waits(gpus, used)
        wait = mean_wait(gpus, used, self.step.each_s, self.work.dispersion / 2)
        return Delay(own, np.array([1.0 - share]), own, np.array([share]), wait)

    def counts(self, rate: float) -> Iterator[int]:
        """Numbers of GPUs worth trying at a rate, ascending, until nearly nobody waits. [1]"""
        sized = self.work.sized(rate)
        fewest = math.floor(sized * self.step.each_s) + 1
        for gpus in count(fewest, max(math.floor(fewest * STEP), 1)):
            yield gpus
            if share_that_waits(gpus, sized * self.step.each_s / gpus) < (1.0 - self.work.ttft.share) / 10:
                return


class PromptTimes(NamedTuple):
    """Prompts of a prefill pool by length, and by what they met before it."""

    ftl: Floats  # (prompts, batches) time of a pass until its first tokens [s]
    weights: Floats  # (prompts,) probabilities [1]
    loads: Loads | None  # of pasts from tiers below HBM
    stages: StageTimes | None  # of a pipeline


class Encoding(NamedTuple):
    """An encode pool before prefill."""

    choice: EncodeChoice
    gpus: int  # [1]

    def before(self, rate: float, prompts: PromptTimes) -> PromptTimes:
        """The prompts with the time from the arrival until the embeddings are with prefill, at a rate [request/s]."""
        found, (ftl, weights, loads, stages) = self.choice.delay(rate, self.gpus), prompts
        added = np.concatenate([found.calm, found.held[0] + found.wait * WAITS])
        shares = np.concatenate([found.calm_share, np.full(WAITS.size, found.held_share[0] / WAITS.size)])
        ftl = (ftl[:, None, :] + added[None, :, None]).reshape(-1, ftl.shape[1])
        weights = np.outer(weights, shares).ravel()
        if loads is not None:
            link, latency = (np.repeat(each, added.size) for each in (loads.link, loads.latency))
            tiers = tuple(name for name in loads.tiers for _ in added)
            loads = replace(loads, link=link, latency=latency, tiers=tiers, weights=weights)
        if stages is not None:
            stages = StageTimes(*(np.repeat(each, added.size, axis=0) for each in stages))
        return PromptTimes(ftl, weights, loads, stages)
