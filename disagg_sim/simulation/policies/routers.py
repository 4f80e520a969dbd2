"""Routers that know what instances remember of a prompt, by the cost functions that Dynamo and llm-d publish.

``prefix``
    The instance that has computed its queue and what it does not remember of the prompt first; of equals the one with
    the fewest requests for its seats. What decodes take of the steps of co-located instances does not enter.
``dynamo_kv``
    NVIDIA Dynamo 1.2 to 1.5 ("Routing Concepts" and "Configuration and Tuning" of its documentation, ``lib/kv-router``
    of ai-dynamo/dynamo): the least ``max(queued + prompt - credit * cached, 0) + active + prompt``, in blocks there, in
    tokens here. Equal costs are drawn. With ``router_temperature`` above 0 the worker is drawn by a softmax of the
    costs over their range. Prefill workers are compared without the active blocks, decode workers by these alone
    ("Disaggregated Serving": ``track_active_blocks``, ``overlap_score_credit`` and ``track_prefill_tokens`` are off).
    Capacities of workers do not enter.
``llm_d``
    llm-d (``default-plugins.yaml`` in the chart of llm-d/llm-d-router at 00bacf3, of 2026): the largest weighted sum of
    the share of the prompt that is cached (``prefix-cache-scorer``, 3), the place of the waiting requests between the
    longest queue (0) and the shortest (1; ``queue-scorer``, 2), and the share of the KV memory that is free
    (``kv-cache-utilization-scorer``, 2); equal sums are drawn. Disaggregated (``deploy/config/pd-epp-config.yaml`` of
    the same repository): prefix 2, queue 1, and the decode instance is chosen at arrival. Queues and memory are read
    every 50 ms (``refresh-metrics-interval``). Later guides of llm-d filter by prefix and score by tokens in flight
    (``prefix-cache-affinity-filter``, ``token-load-scorer``); these are not here.

Where we differ: routers see what is cached as it is, not by events or by a guess, and look at whole prompts. Active
tokens are those of prompts and outputs, of each request by itself: in Dynamo outputs count with
``--router-track-output-blocks``, and blocks that requests share count once unless ``--no-router-assume-kv-reuse``. A
prompt in progress counts with what is left of it, in Dynamo with all of it until its first token. Every prompt is
disaggregated: llm-d computes one on the decode instance of which that lacks fewer than 16 tokens. Dynamo compares
attention ranks, here instances are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.instances import Index
from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.options import option
from disagg_sim.simulation.policies.loads import (
    NOBODY,
    InTurn,
    RequestChoice,
    fewest_requests,
    least_decode,
    shortest_queue,
)
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.view import ClusterView

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


#: Routers of prefill and decode instances; those of co-located ones.
ROUTERS = ("least", "prefix", "dynamo_kv", "llm_d")
WHOLE_ROUTERS = (*ROUTERS, "round_robin")
#: Time between two looks of llm-d's router at the metrics of an instance. [s]
LOOK_S = 0.05


def router_option(choices: tuple[str, ...]) -> str:
    """Who chooses the instance."""
    return option(
        "least",
        "who chooses an instance: least load, least to compute beside what is cached, or the router of a system",
        choices=choices,
    )


def temperature_option() -> float:
    """Of ``dynamo_kv``. [1]"""
    return option(0.0, "dynamo_kv: softmax over the costs, by their range; 0: the least cost", low=0.0, high=1e6)


def credit_option() -> float:
    """Of ``dynamo_kv``. [1]"""
    return option(1.0, "dynamo_kv: share of the cached tokens that lowers the cost", low=0.0, high=1.0)


def prefix_weight_option(default: float, others: str) -> float:
    """Of ``llm_d``. [1]"""
    return option(
        default, f"llm_d: weight of the share of the prompt that is cached, beside {others}", low=0.0, high=1e6
    )


class RouterChoices(NamedTuple):
    """Choices of a router."""

    whole: RequestChoice  # for all of a request
    prefill: RequestChoice  # for its prompt
    decode: RequestChoice  # for the rest, when its prompt is computed


def least_to_compute(view: ClusterView, among: Index, request: int) -> int:
    """See ``Choice``: the least to compute (``prefix``), the first of several."""
    cached, prompt = view.cached_everywhere(request), view.input_tokens[request]
    instance: int = least_new(view.inst, among, cached, prompt, view.prefill_rate, view.seats)
    return instance


@dataclass(frozen=True, slots=True)
class DynamoChoice:
    """Choice of Dynamo's router."""

    weights: CostWeights
    draws: Draws

    def __call__(self, view: ClusterView, among: Index, request: int) -> int:
        """See ``Choice``."""
        if self.weights.decode:
            view.refresh()
        cached = view.cached_everywhere(request)
        instance: int = dynamo(view.inst, among, cached, view.input_tokens[request], self.weights, self.draws())
        return instance


class LlmD:
    """Router of llm-d, the endpoint picker."""

    def __init__(self, site: Site, *, whole: ScorerWeights, split: ScorerWeights) -> None:
        self._whole, self._split = whole, split
        self._draws = Draws(site)
        self._until, self._seen = -np.inf, 0
        self._waiting: Ints = np.zeros(0, np.int64)
        self._used: Floats = np.zeros(0)
        self._chosen: dict[int, int] = {}  # decode instances of requests in prefill

    def whole(self, view: ClusterView, among: Index, request: int) -> int:
        """See ``Choice``."""
        return self._best(view, among, request, self._whole)

    def prefill(self, view: ClusterView, among: Index, request: int) -> int:
        """See ``Choice``; the decode instance is chosen first."""
        self._chosen[request] = self._best(view, view.decode, request, self._split)
        return self._best(view, among, request, self._split)

    def decode(self, view: ClusterView, among: Index, request: int) -> int:
        """See ``Choice``; chosen anew only where the instance no longer serves."""
        instance = self._chosen.pop(request, NOBODY)
        return instance if instance in among else self._best(view, among, request, self._split)

    def _best(self, view: ClusterView, among: Index, request: int, scores: ScorerWeights) -> int:
        if view.now >= self._until or self._seen < len(view.states):
            self._look(view)
        cached, prompt = view.cached_everywhere(request), view.input_tokens[request]
        instance: int = llm_d(among, self._waiting, self._used, cached, prompt, scores, self._draws())
        return instance

    def _look(self, view: ClusterView) -> None:
        """Read queues and memory; what is in prefill does not wait."""
        view.refresh()
        own = view.inst[: view.queued_requests.size]  # rows of attention ranks follow those of instances
        before = np.append(0, np.cumsum(view.inst["admitted"]))
        admitted = before[own["rank_at"] + own["ranks"]] - before[own["rank_at"]]
        self._waiting = view.queued_requests + own["loading_requests"] - admitted
        self._used = 1.0 - view.free_blocks / view.total_blocks
        self._until, self._seen = view.now + LOOK_S, len(view.states)


def choices_of(router: str, site: Site, *, temperature: float, credit: float, weight: float) -> RouterChoices:
    """Make the choices of the router that a policy asks for, with its softmax, credit of caches and weight of them."""
    if router == "least":
        return RouterChoices(fewest_requests, shortest_queue, least_decode)
    if router == "round_robin":
        return RouterChoices(InTurn(), InTurn(), InTurn())
    if router == "prefix":
        return RouterChoices(least_to_compute, least_to_compute, least_decode)
    if router == "dynamo_kv":
        draws = Draws(site)
        weights = (1.0, 1.0, credit), (1.0, 0.0, credit), (0.0, 1.0, 0.0)
        whole, prefill, decode = (DynamoChoice(CostWeights(*each, temperature), draws) for each in weights)
        return RouterChoices(whole, prefill, decode)
    picker = LlmD(site, whole=ScorerWeights(weight, 2.0, 2.0), split=ScorerWeights(weight, 1.0, 0.0))
    return RouterChoices(picker.whole, picker.prefill, picker.decode)
