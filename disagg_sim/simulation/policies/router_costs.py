"""Compare instances by the costs of ``routers``, over what they remember of a prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.site import Site

#: Draws that are made at once.
DRAWS = 1024


class CostWeights(NamedTuple):
    """Of a cost of ``dynamo_kv``. [1]"""

    prefill: float
    decode: float
    credit: float
    temperature: float


class ScorerWeights(NamedTuple):
    """Weights of the scorers of ``llm_d``. [1]"""

    prefix: float
    queue: float
    memory: float


@inner
def _drawn(among: Any, cost: Any, temperature: float, draw: float) -> Any:
    """One of ``among``: of those of least cost, or by a softmax; ``draw`` is in [0, 1)."""
    low, high = cost.min(), cost.max()
    share = np.empty(cost.size)
    for place in range(cost.size):
        if temperature > 0 and high > low:
            share[place] = np.exp((low - cost[place]) / ((high - low) * temperature))
        else:
            share[place] = 1.0 if cost[place] == low or temperature > 0 else 0.0
    left = draw * share.sum()
    last = 0
    for place in range(cost.size):
        if share[place] > 0:
            last = place
            left -= share[place]
            if left < 0:
                break
    return among[last]


@entry
def least_new(inst: Any, among: Any, cached: Any, prompt: int, rate: Any, seats: Any) -> Any:
    """The instance of ``among`` that has computed its queue and the prompt first, then that with the fewest requests.

    Over what each prefills and seats; ``cached`` of all instances. [token]
    """
    best, soonest, fewest = among[0], np.inf, np.inf
    for each in among:
        one = inst[each]
        work = (one.queued_prompt_tokens + one.loading_prompt_tokens + max(prompt - cached[each], 1)) / rate[each]
        held = (one.queued_requests + one.loading_requests + one.running_requests + 1) / seats[each]
        if work < soonest or (work == soonest and held < fewest):
            best, soonest, fewest = each, work, held
    return best


@entry
def dynamo(inst: Any, among: Any, cached: Any, prompt: int, weights: Any, draw: float) -> Any:
    """The instance of ``among`` of least cost; ``cached`` of all instances. [token]"""
    prefill, decode, credit, temperature = weights
    cost = np.empty(among.size)
    for place in range(among.size):
        one = inst[among[place]]
        queued = one.queued_prompt_tokens + one.loading_prompt_tokens
        new = queued + prompt - credit * cached[among[place]]
        active = one.running_tokens + queued + one.queued_context_tokens + one.coming_tokens
        cost[place] = prefill * max(new, 0.0) + decode * (active + prompt)
    return _drawn(among, cost, temperature, draw)


@entry
def llm_d(among: Any, waiting: Any, used: Any, cached: Any, prompt: int, scores: Any, draw: float) -> Any:
    """The instance of ``among`` of the largest score; ``waiting``, ``used`` and ``cached`` of all instances."""
    prefix, queue, memory = scores
    least_waiting, most_waiting = waiting[among[0]], waiting[among[0]]
    for each in among:
        least_waiting, most_waiting = min(least_waiting, waiting[each]), max(most_waiting, waiting[each])
    cost = np.empty(among.size)
    for place in range(among.size):
        each = among[place]
        short = 1.0
        if most_waiting > least_waiting:
            short = (most_waiting - waiting[each]) / (most_waiting - least_waiting)
        cost[place] = -(prefix * min(cached[each], prompt) / prompt + queue * short + memory * (1.0 - used[each]))
    return _drawn(among, cost, 0.0, draw)


class Draws:
    """Uniform draws in [0, 1), one by one."""

    def __init__(self, site: Site) -> None:
        self._rng, self._left = site.rng("router"), list[float]()

    def __call__(self) -> float:
        """The next."""
        if not self._left:
            self._left = self._rng.random(DRAWS).tolist()
        return self._left.pop()
