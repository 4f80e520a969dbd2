"""The queue of Dynamo's router: prompts are held back while every prefill worker has enough of them.

After the public documentation of 2026: a request goes to the worker with the least load; while the prompt tokens of all
workers exceed ``--router-queue-threshold`` times the tokens of a step, requests wait at the router, first come, first
served, and go to the worker that falls below first. (In Dynamo 0.2 of 2025 the queue was a service of its own, from
which workers took one prompt at a time.)
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg_sim.simulation.options import MOST, option
from disagg_sim.simulation.policies.loads import Handover, least_decode, least_prefill
from disagg_sim.simulation.site import Site, StepLimits
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import SHARED, Batch, Leg, Role


class QueuedHandover(Handover):
    """Routing of Dynamo, and what workers take of the queue."""

    def __init__(self, most_tokens: float) -> None:
        super().__init__(least_prefill, least_decode)
        self._most = most_tokens

    def place(self, view: ClusterView, request: int) -> Leg:
        """See ``Routing``; nobody overtakes those that wait."""
        leg = super().place(view, request)
        if view.shared_requests or view.queued_prompt_tokens[leg.instance] > self._most:
            return Leg(SHARED, leg.until)
        return leg

    def form(self, view: ClusterView, instance: int, waiting: Sequence[int]) -> Batch:
        """See ``BatchForming``: the oldest, until the worker has enough or is full."""
        queued, taken, tokens = int(view.queued_prompt_tokens[instance]), 0, view.input_tokens
        for request in waiting:
            if queued > self._most:
                break
            queued += tokens[request]
            taken += 1
        return Batch(tuple(waiting[:taken]))


def queue_threshold_option() -> float:
    """When the router holds requests back. [1]"""
    return option(
        16.0,
        "steps full of prompt tokens that every worker has to have before the router holds requests back",
        low=0.0,
        high=float(MOST),
    )


def queue_of(queue: str, threshold: float, steps: StepLimits, site: Site) -> QueuedHandover | None:
    """The router's queue, if there is one, in front of workers of that many steps."""
    if queue == "instances":
        return None
    budget = steps.limits(site.deployment.prefill[0].mapping, Role.PREFILL).token_budget
    return QueuedHandover(threshold * budget)
