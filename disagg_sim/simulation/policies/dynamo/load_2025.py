"""NVIDIA Dynamo's load planner of 2025, with which the paper DOPD compares: thresholds on means between two decisions.

After its public source of that year. Every ``look_s`` it notes how many prompts wait for prefill, in all, and how full
the KV memory of each decode worker is, where a request that waits there counts as ``PER_WAITING`` of the memory. At a
decision it compares the means, in this order: fewer prefill workers, fewer decode workers, more prefill, more decode.
A pool changes by one worker at most. A start blocks the planner until the worker serves, and a decision is left out if
workers have come or gone meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from disagg_sim.simulation.policies.pools import Pools, Sizes
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Wish

#: Prompts in the queue below which a prefill worker stops, and above which one starts. [request]
FEW_PROMPTS, MANY_PROMPTS = 0.2, 5.0
#: Use of KV memory below which a decode worker stops, and above which one starts. [1]
LOW_USE, HIGH_USE = 0.5, 0.9
#: Use of KV memory by which each waiting request is estimated. [1]
PER_WAITING = 0.02
#: Decisions ahead to which the growth of the queue is projected, and for which a new decode worker is kept. [1]
AHEAD = 3


class Look(NamedTuple):
    """What the planner notes at one time."""

    prompts: int  # that wait for prefill [request]
    use: float  # of KV memory, mean of the decode workers [1]
    workers: Sizes


class Planner2025:
    """Both pools by their means since the last decision, ``between_s`` [s] before."""

    def __init__(self, site: Site, *, look_s: float, between_s: float, least: int, drain: bool) -> None:
        self.period_s, self._between_s, self._least = look_s, between_s, least
        self._pools = Pools(site, drain=drain)
        self._looks: list[Look] = []
        self._due = between_s
        self._grace = 0  # decisions for which no decode worker stops [1]
        self._wanted: Sizes | None = None  # blocks the planner until it is there

    def resize(self, view: ClusterView) -> Sequence[Wish]:
        """See ``Autoscaler``."""
        if self._wanted is not None:
            if self._pools.there(view) != self._wanted:
                return self._pools.steps(view, self._wanted, f"to {self._wanted.words}, decided before")
            if not self._pools.starting(view):
                self._wanted, self._due = None, view.now + self._between_s
            return ()
        self._looks.append(_look(view))
        if view.now < self._due:
            return ()
        looks, self._looks, self._due = self._looks, [], view.now + self._between_s
        if not view.prefill.size or not view.decode.size or len({look.workers for look in looks}) > 1:
            return ()
        prompts = [look.prompts for look in looks]
        queue, use = float(np.mean(prompts)), float(np.mean([look.use for look in looks]))
        there = looks[-1].workers
        wanted = self._decide(view, there, prompts, queue, use)
        if wanted == there:
            return ()
        self._wanted = wanted
        reason = f"{queue:.3g} prompts wait, {use:.0%} of KV memory: {there.words} to {wanted.words}"
        return self._pools.steps(view, wanted, reason)

    def _decide(self, view: ClusterView, there: Sizes, prompts: list[int], queue: float, use: float) -> Sizes:
        prefill, decode = there
        if queue < FEW_PROMPTS:
            prefill = max(prefill - 1, self._least)
        if use < LOW_USE and not self._grace:
            decode = max(decode - 1, self._least)
        self._grace = max(self._grace - 1, 0)
        grown = prompts[-1] + AHEAD * (prompts[-1] - prompts[0])
        if queue > MANY_PROMPTS and grown > MANY_PROMPTS and self._fits(view, Sizes(prefill + 1, decode)):
            prefill += 1
        if use > HIGH_USE and self._fits(view, Sizes(prefill, decode + 1)):
            decode += 1
            self._grace = AHEAD
        return Sizes(prefill, decode)

    def _fits(self, view: ClusterView, wanted: Sizes) -> bool:
        """Whether there are GPUs enough."""
        return self._pools.within(view, wanted) == wanted


def _look(view: ClusterView) -> Look:
    """Prompts that wait for prefill anywhere, and the use of KV memory with what waits in decode."""
    workers, decode = Sizes(int(view.prefill.size), int(view.decode.size)), view.decode
    used = 1.0 - view.free_blocks[decode] / view.total_blocks[decode] + PER_WAITING * view.queued_requests[decode]
    return Look(view.shared_requests, float(used.mean()) if decode.size else 0.0, workers)
