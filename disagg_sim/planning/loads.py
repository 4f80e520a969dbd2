"""Queue what prompts load from tiers below HBM: before prefill, over links that take one after the other.

The links of a tier into the attention ranks of an instance are servers of one queue: a prompt takes the one that is
free first, for the bytes of its past over the bandwidth; the latency of the tier comes on top. A share of the prompts
waits (Erlang's C), for an exponential time of the mean of Allen and Cunneen (``planning.queueing``); then it joins the
queue for prefill. Pasts that lie in HBM, or are computed sooner than they are loaded, take no link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.domain import Sharding
from disagg_sim.physics.cache_tiers import load_time
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.queueing import Service, mean_wait, share_that_waits
from disagg_sim.workload.distributions import Prompts

#: Places at which the wait for a link is taken. [1]
_PLACES = (np.arange(8) + 0.5) / 8


class LoadedPrompts(NamedTuple):
    """Prompts by length and by the delay of their load, arrays of shape (values,)."""

    node: Ints  # place among the lengths
    delay: Floats  # until the past is in HBM; inf where a link cannot keep up [s]
    weight: Floats  # probabilities [1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """What the prompts of an instance load."""

    link: Floats  # (lengths,) that a prompt takes a link; 0 where its past is in HBM, or is computed again [s]
    latency: Floats  # (lengths,) on top [s]
    tiers: tuple[str, ...]  # (lengths,) where the past lies
    weights: Floats  # (lengths,) probabilities [1]
    ranks: int  # links of a tier: attention ranks [1]

    @classmethod
    def of(cls, at: Setup, mapping: Sharding, prompts: Prompts, sooner: Mask | None = None) -> Loads | None:
        """Find what prompts load, always or where it is ``sooner``; None where all pasts are in HBM."""
        tiers = [at.system.tier(name) for name in prompts.tier]
        if not any(tiers):
            return None
        latency = np.array([0.0 if tier is None else tier.latency_s for tier in tiers])
        ranks = int(mapping.dp_attn)
        time = [
            float(np.squeeze(load_time(at, mapping, batch=1, past=past, tier=tier)))
            for past, tier in zip(prompts.past.tolist(), tiers, strict=True)
        ]
        link = np.maximum(np.array(time) - latency, 0.0) * (1.0 if sooner is None else sooner)
        if not link.any():
            return None
        return cls(link=link, latency=latency * (link > 0), tiers=prompts.tier, weights=prompts.weight, ranks=ranks)

    def delays(self, rate: float, even: float) -> LoadedPrompts:
        """Find how long loads take with their queues at a rate [request/s]."""
        delay = np.repeat((self.link + self.latency)[:, None], _PLACES.size + 1, axis=1)
        weight = np.zeros_like(delay)
        weight[:, 0] = self.weights
        names = np.array(self.tiers)
        for name in dict.fromkeys(self.tiers):
            own = (names == name) & (self.link > 0)
            if not (share := float(self.weights[own].sum())):
                continue
            mean = float(self.weights[own] @ self.link[own]) / share
            spread = float(self.weights[own] @ (self.link[own] - mean) ** 2) / share / mean**2
            law = Service(mean, spread, even)
            used = rate * share * mean / self.ranks
            waits = share_that_waits(self.ranks, used)
            wait = mean_wait(self.ranks, used, law.mean, (law.arrivals + law.variation) / 2)
            delay[own, 1:] += wait * -np.log1p(-_PLACES)
            weight[own] = self.weights[own, None] * np.append(1.0 - waits, np.full(_PLACES.size, waits / _PLACES.size))
        node = np.repeat(np.arange(self.link.size), _PLACES.size + 1)
        return LoadedPrompts(node, delay.ravel(), weight.ravel())


def loaded(loads: Loads | None, weights: Floats, rate: float, even: float) -> LoadedPrompts:
    """Find how long loads of the prompts of an instance take."""
    if loads is None:
        return LoadedPrompts(np.arange(weights.size), np.zeros(weights.size), weights)
    return loads.delays(rate, even)
