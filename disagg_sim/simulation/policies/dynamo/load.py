"""NVIDIA Dynamo's load planner: every few seconds it adds or removes one instance of each pool.

The planner follows its public source and issue threads of 2026. ``mode`` selects its rule:

* ``sla``: it adds an instance if the estimates of all workers exceed the SLO. They are those of the next request: TTFT
  from the prompt tokens in the queue and a prompt of the mean length of the last period, at one chunk budget per step;
  ITL from the sequences and the cache that a worker holds and will hold, and one more of mean length. It removes an
  instance if the estimates for N - 1 workers with the load of N stay under ``SENSITIVITY`` times the SLO and the
  decode cache fits.
* ``throughput``, ``latency``: it compares queued prompt tokens over the context length, and the use of KV memory, with
  thresholds. It adds an instance if any worker exceeds its threshold, and removes one if all are below theirs.
* ``v2025``: the planner of 2025, see ``Planner2025``. It ran with ``period_s=180`` and ``queue_threshold=0``.

Requests are held back at the router while all workers have enough prompts (``router``; ``queue: instances`` sends them
on at once). Our choice: the planner counts an equal share of what is held back for each worker.

Known faults are options: ``drain=False`` (a stopped worker loses its requests), ``project=False`` (scaling down uses
the load of N workers, not of the N - 1 that remain, so sizes oscillate); ``RunOptions(start_up_s=0)`` ignores the
start-up time.

After the public documentation of 2026 a request goes to the worker with the least load; while the prompt tokens of all
workers exceed ``--router-queue-threshold`` times the tokens of a step, requests wait at the router, first come, first
served, and go to the worker that falls below first. (In Dynamo 0.2 of 2025 the queue was a service of its own, from
which workers took one prompt at a time.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.options import (
    MOST,
    check_options,
    drain_option,
    least_option,
    max_sequences_option,
    option,
    period_option,
    queue_option,
    token_budget_option,
)
from disagg_sim.simulation.policies.loads import ByRole, Handover, least_decode, least_prefill
from disagg_sim.simulation.policies.pools import Pools, Sizes
from disagg_sim.simulation.policy import Autoscaler, Parts, register
from disagg_sim.simulation.site import AsPlanned, Site, StepLimits
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import SHARED, Batch, Leg, Limits, Role, Wish


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
    """Thresholds on means between two decisions, after the public source of 2025: the planner that DOPD compares with.

    Every ``look_s`` it notes how many prompts wait for prefill, in all, and how full the KV memory of each decode
    worker is, where a request that waits there counts as ``PER_WAITING`` of the memory. At a decision, every
    ``between_s`` [s], it compares the means, in this order: fewer prefill workers, fewer decode workers, more prefill,
    more decode. A pool changes by one worker at most. A start blocks the planner until the worker serves, and a
    decision is left out if workers have come or gone meanwhile.
    """

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


class Thresholds(NamedTuple):
    """Load of a worker above which a pool grows and below which it shrinks. [1]"""

    prefill_up: float  # prompt tokens in wait over the context length, of any worker
    prefill_down: float  # of all
    decode_up: float  # use of KV memory, what waits included, of any worker
    decode_down: float  # of all


THRESHOLDS = {"throughput": Thresholds(1.0, 0.1, 1.0, 0.6), "latency": Thresholds(0.1, 0.0, 0.4, 0.1)}
#: Share of the SLO under which an estimate must stay to scale down. [1]
SENSITIVITY = 0.8
MODES = ("sla", *THRESHOLDS, "v2025")


@register("dynamo_load")
@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoLoad:
    """Add or remove one instance of a pool by its current load, within the GPUs of the deployment."""

    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    mode: str = option(
        "sla",
        "what decides: estimated TTFT and ITL against the SLO, thresholds for throughput or latency, or those of 2025",
        choices=MODES,
    )
    period_s: float = period_option(5.0, "time between two decisions")
    look_s: float = period_option(10.0, "time between two looks, of which the mode v2025 takes the mean")
    least: int = least_option()
    queue: str = queue_option()
    queue_threshold: float = queue_threshold_option()
    token_budget: int = token_budget_option()
    max_sequences: int = max_sequences_option()
    drain: bool = drain_option()
    project: bool = option(True, "scale down by the load of the instances left; false: by the load of all of them")

    def __post_init__(self) -> None:
        """``InputError`` for values out of range."""
        check_options(self)
        if self.mode == "v2025" and self.queue != "shared":
            raise InputError("policy 'dynamo_load': mode 'v2025' looks at the shared queue; allowed: queue 'shared'")

    def build(self, site: Site) -> Parts:
        """See ``Policy``."""
        steps = stepping(site, self.token_budget, self.max_sequences)
        queue = queue_of(self.queue, self.queue_threshold, steps, site)
        planner: Autoscaler = LoadPlanner(self, site, steps)
        if self.mode == "v2025":
            planner = Planner2025(site, look_s=self.look_s, between_s=self.period_s, least=self.least, drain=self.drain)
        return planned(site, planner, steps, queue, self.period_s)


def stepping(site: Site, token_budget: int, max_sequences: int) -> StepLimits:
    """How the instances of both pools fill their steps, unless their parts say."""
    limits = Limits(token_budget=token_budget, max_sequences=max_sequences)
    return AsPlanned(site=site, parts=("prefill", "decode"), usual=ByRole(prefill=limits, decode=limits))


def planned(
    site: Site, scaling: Autoscaler, steps: StepLimits, queue: QueuedHandover | None, looks_back_s: float
) -> Parts:
    """Disaggregation as Dynamo runs it, under one of its planners, which looks back so far [s]."""
    return Parts(
        start=site.instances(("prefill", Role.PREFILL), ("decode", Role.DECODE)),
        routing=queue or Handover(least_prefill, least_decode),
        steps=steps,
        forming=queue,
        scaling=scaling,
        looks_back_s=looks_back_s,
    )


class LoadPlanner:
    """Both pools, each by itself; nothing is decided while an instance starts.

    ``floor`` is what another planner may have found to be the least; it is the larger of that and ``least``.
    """

    def __init__(self, options: DynamoLoad, site: Site, steps: StepLimits) -> None:
        self.period_s = options.period_s
        self.floor = Sizes(options.least, options.least)
        self._options, self._site = options, site
        self._pools = Pools(site, drain=options.drain)
        prefill, decode = self._pools.mappings
        here, there = steps.limits(prefill, Role.PREFILL), steps.limits(decode, Role.DECODE)
        self._tables = (site.table(prefill, here.max_sequences), site.table(decode, there.max_sequences))
        self._budget, self._sequences = here.token_budget, there.max_sequences
        self._context = site.setup.model.max_context
        self._prompt = site.prompt_tokens  # mean of those that came of late [token]

    def resize(self, view: ClusterView) -> Sequence[Wish]:
        """See ``Autoscaler``."""
        if self._pools.starting(view):
            return ()
        there = self._pools.there(view)
        steps = Sizes(self._prefill_step(view), self._decode_step(view))
        wanted = Sizes(*(max(n + step, floor) for n, step, floor in zip(there, steps, self.floor, strict=True)))
        wanted = self._pools.within(view, wanted, self._options.least)
        return self._pools.steps(view, wanted, f"by load, mode {self._options.mode}: {there.words} to {wanted.words}")

    def _prefill_step(self, view: ClusterView) -> int:
        """+1, 0 or -1 prefill instance."""
        workers = view.prefill
        queued = view.waiting_prompt_tokens[workers] + view.shared_prompt_tokens / max(workers.size, 1)
        if self._options.mode != "sla":
            limits = THRESHOLDS[self._options.mode]
            return _by_thresholds(queued / self._context, limits.prefill_up, limits.prefill_down)
        found = view.window(self.period_s).input_tokens
        self._prompt = self._prompt if np.isnan(found) else found
        now, with_one_less = (
            np.array([self._ttft(tokens) for tokens in (queued * share).tolist()])
            for share in (1.0, self._share(int(view.prefill.size)))
        )
        return _by_estimates(now, with_one_less, self._site.slo.ttft)

    def _ttft(self, queued: float) -> float:
        """Of the next prompt of mean length behind ``queued`` tokens, in steps of the budget. [s]"""
        table, budget = self._tables[0], self._budget
        full, rest = divmod(round(queued + self._prompt), budget)
        time = full * table.step_time(0, 0.0, budget, 0.0, table.ranks)
        return time + (table.step_time(0, 0.0, rest, 0.0, min(table.ranks, rest)) if rest else 0.0)

    def _decode_step(self, view: ClusterView) -> int:
        """+1, 0 or -1 decode instance."""
        workers = view.decode
        capacity = view.total_blocks[workers] * float(BLOCK_TOKENS)
        running, tokens = view.running_requests[workers], view.running_tokens[workers].astype(float)
        mean = tokens.sum() / max(int(running.sum()), 1)
        waiting = view.queued_requests[workers]
        held = tokens + view.coming_tokens[workers] + waiting * mean
        if self._options.mode != "sla":
            limits = THRESHOLDS[self._options.mode]
            return _by_thresholds(held / capacity, limits.decode_up, limits.decode_down)
        coming = view.coming_tokens[workers] / mean if mean > 0 else np.zeros(workers.size)
        requests = running + waiting + coming
        share = self._share(int(view.decode.size))
        step = _by_estimates(
            self._itl(requests + 1, held + mean),
            self._itl(requests * share + 1, held * share + mean),
            self._site.slo.tpot,
        )
        return step if step >= 0 or bool((held * share <= capacity).all()) else 0

    def _share(self, workers: int) -> float:
        """By what the load of each of N workers grows when one leaves; the last stays by the floor. [1]"""
        return workers / max(workers - 1, 1) if self._options.project else 1.0

    def _itl(self, requests: Floats, held: Floats) -> Floats:
        """Time of a token on each worker that would read all it holds, beyond what its memory takes, too. [s]"""
        batches = np.clip(np.round(requests), 1, self._sequences)
        return np.array(
            [
                self._tables[1].token_time(int(n), tokens / n)
                for n, tokens in zip(batches.tolist(), held.tolist(), strict=True)
            ]
        )


def _by_thresholds(load: Floats, up: float, down: float) -> int:
    """Any worker up, all of them down; an empty queue is below a threshold of 0."""
    if (load >= up).any():
        return 1
    return -1 if ((load < down) | (load == 0.0)).all() and load.size else 0


def _by_estimates(now: Floats, with_one_less: Floats, limit: float) -> int:
    """All workers up; down where all stay under a share of the limit with one less."""
    if not now.size:
        return 0
    if (now > limit).all():
        return 1
    return -1 if (with_one_less < SENSITIVITY * limit).all() else 0
