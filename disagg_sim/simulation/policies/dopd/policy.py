"""DOPD: dynamic optimal prefill/decode ratio, with prefill batches formed by length.

"DOPD", built on NVIDIA Dynamo; equations as in ``sizes``. Its parts:

* P/D manager (algorithm 2, ``sizes``): in every window it records mean input, mean output and the requests in service,
  and forecasts each. The sizes of both pools follow from the forecasts and the profile of prefill and decode times,
  which observed times correct.
* Prefill scheduler (algorithm 1, ``sizes``): prefill instances take prompts from one queue, first in, first out
  (section V-C; ``queue: instances`` gives each a queue of its own). Short prompts are batched up to the forecast input
  length, long ones run alone.
* KV-aware router: a request decodes where its prompt tokens that are not in the cache and the tokens in decode are
  fewest together: when its prefill is done, or at its arrival, as section V-B has it (``decode_at``). Ultra-short
  prompts are computed there, too, beside its decodes, as are prompts of which the cache has all but as few tokens.

TP of the instances is that of the deployment.

Corrections of the printed algorithms: after a batch the scheduler takes the next request before it continues; the
number of prefill instances is not multiplied by the decode instances, which the concurrency already contains
(``sizing="printed"`` multiplies; ``published`` is the rule of the authors' published code); the mean context of a
decode step is input plus half the output; the time-out of a batch is an upper bound. Our choices where the paper is
silent: windows of 60 s, an action every 300 s, half of the queueing time as time-out, 128 tokens as ultra-short, and a
moving average of observed over predicted busy time as the correction.

Under a constant load the printed rules need not settle: they size by the requests in service, which are more the fewer
instances there are. ``sizing="little"`` sizes by the rate of arrivals, and settles; ``headroom`` leaves room where a
whole instance would just carry the forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from disagg_sim.simulation.instances import Index
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, Mode
from disagg_sim.simulation.options import (
    MOST_SEQUENCES,
    MOST_TOKENS,
    Checked,
    headroom_option,
    option,
    period_option,
    queue_option,
    token_budget_option,
)
from disagg_sim.simulation.policies.dopd.sizes import (
    BATCHES,
    LARGEST_GRAPH,
    NEWEST,
    SIZINGS,
    LengthAware,
    Profile,
    kingman_wait,
)
from disagg_sim.simulation.policies.loads import NOBODY, ByRole, least, least_uncached, tokens_of
from disagg_sim.simulation.policies.pools import Pools, Sizes, forecast_named, forecast_option
from disagg_sim.simulation.policy import Parts, register
from disagg_sim.simulation.site import AsPlanned, Site, StepLimits
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import SHARED, Leg, Limits, Role, State, Wish

PREFILL, DECODE = Role.PREFILL, Role.DECODE
#: When the decode instance of a request is chosen.
DECODE_AT = ("prefill", "arrival")


@register("dopd")
@dataclass(frozen=True, slots=True, kw_only=True)
class Dopd(Checked):
    """Size pools by the optimal P:D ratio for the forecast load; batch prompts of similar length."""

    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    resize: bool = option(True, "size the pools; false: they stay as they are")
    sizing: str = option(
        "mended",
        "rule of the sizes: the paper's without its faults, as printed, as in the published code, or by Little's law",
        choices=SIZINGS,
    )
    headroom: float = headroom_option()
    forecast: str = forecast_option()
    window_s: float = period_option(60.0, "time of one observation")
    action_s: float = period_option(300.0, "time between two decisions on sizes")
    check_s: float = period_option(5.0, "time between two checks for free GPUs while an instance waits for some")
    queue: str = queue_option()
    batches: str = option(
        "knapsack", "how prompts form prefill batches: by length, or in order of arrival", choices=BATCHES
    )
    decode_at: str = option(
        "prefill",
        "when the decode instance of a request is chosen: when its prefill is done, or at its arrival, as printed",
        choices=DECODE_AT,
    )
    local_tokens: int = option(
        128, "prompts up to this are computed on the decode instance; 0: none", unit="token", low=0, high=MOST_TOKENS
    )
    token_budget: int = token_budget_option("decodes and prefill of one step of a decode instance")
    max_sequences: int = option(
        LARGEST_GRAPH,
        "most sequences of an attention rank: the largest captured CUDA graph",
        low=1,
        high=MOST_SEQUENCES,
    )

    def build(self, site: Site) -> Parts:
        """See ``Policy``."""
        decode = Limits(token_budget=self.token_budget, max_sequences=self.max_sequences)
        prefill = Limits(mode=Mode.MANUAL, token_budget=self.token_budget, max_sequences=self.max_sequences)
        steps = AsPlanned(site=site, parts=self.needs, usual=ByRole(prefill=prefill, decode=decode))
        forming = LengthAware(site, self.batches, shared=self.queue == "shared")
        routing = DopdRouter(forming, self.local_tokens, at_arrival=self.decode_at == "arrival")
        return Parts(
            start=site.instances(("prefill", PREFILL), ("decode", DECODE)),
            routing=routing,
            steps=steps,
            forming=forming,
            failover=forming,
            scaling=Manager(self, site, steps, routing),
            looks_back_s=self.window_s,
        )


class DopdRouter:
    """The queue of prefill, and the decode instance with the fewest tokens, in decode or not known there.

    Prompts of which no more than ``local_tokens`` are not known to that instance are computed there. With
    ``at_arrival`` a request keeps the instance of its arrival, where its prompt counts from then on.
    """

    def __init__(self, forming: LengthAware, local_tokens: int, *, at_arrival: bool = False) -> None:
        self.forming, self._local = forming, local_tokens
        self._chosen: dict[int, int] = {}  # by request whose prefill is not done
        self._promised: dict[int, int] | None = {} if at_arrival else None  # prompt tokens of these, by instance

    def idlest(self, view: ClusterView, among: Index, request: int = NOBODY) -> int:
        """The prefill instance that has prefilled its tokens first, those that wait for a batch included."""
        waiting = self.forming.waiting_tokens(view)
        own = tokens_of(view, request)
        instance: int = least(among, view.queued_prompt_tokens, waiting, view.prefill_rate, own)
        return instance

    def place(self, view: ClusterView, request: int) -> Leg:
        """See ``Routing``."""
        tokens = view.input_tokens[request]
        self._forget(view, request)
        if tokens <= self._local or view.remembers or self._promised is not None:
            instance = least_uncached(view, request, self._promised)
            if tokens - view.cached_tokens(request, instance) <= self._local:
                return Leg(instance)
            if self._promised is not None:
                self._chosen[request] = instance
                self._promised[instance] = self._promised.get(instance, 0) + tokens
        if self.forming.shared:
            return Leg(SHARED, tokens + 1)
        instance = self.idlest(view, view.prefill, request)
        if tokens < view.rank_blocks[instance] * BLOCK_TOKENS:  # else the instance refuses it
            self.forming.arrived(instance, tokens)
        return Leg(instance, tokens + 1)

    def proceed(self, view: ClusterView, request: int, origin: int) -> Leg:  # noqa: ARG002  wherever it was
        """See ``Routing``; an instance chosen before that does not serve any more is chosen anew."""
        chosen = self._forget(view, request)
        if chosen is not None and view.states[chosen] is State.READY and view.roles[chosen] is DECODE:
            return Leg(chosen)
        return Leg(least_uncached(view, request, self._promised))

    def _forget(self, view: ClusterView, request: int) -> int | None:
        """The decode instance of a request that counts there no longer as promised; None: it was not chosen."""
        chosen = self._chosen.pop(request, None)
        if chosen is not None and self._promised is not None:
            self._promised[chosen] -= view.input_tokens[request]
        return chosen


class Manager:
    """Algorithm 2: observes window by window, forecasts, and sizes the pools."""

    def __init__(self, options: Dopd, site: Site, steps: StepLimits, routing: DopdRouter) -> None:
        self.period_s = min(options.check_s, options.window_s)
        self._options, self._forming = options, routing.forming
        self._pools = Pools(site, idlest=routing.idlest)
        prefill, decode = self._pools.mappings
        self.profile = Profile.of(site, prefill, decode, steps.limits(decode, DECODE))
        self._requests, self._inputs, self._outputs = (forecast_named(options.forecast) for _ in range(3))
        self._window_end, self._action = options.window_s, options.action_s
        self._wanted: tuple[Sizes, str] | None = None
        self._there, self._looks = 0.0, 0  # requests in service, added up over the looks of a window
        self._seen = 0  # requests up to the last window
        self._totals_before: NDArray[np.float64] = np.zeros(5)  # see ``_totals``
        self._correction = [1.0, 1.0]  # of prefill and decode times [1]

    def resize(self, view: ClusterView) -> Sequence[Wish]:
        """See ``Autoscaler``."""
        self._there += float(view.queued_requests.sum() + view.running_requests.sum()) + sum(view.coming)
        self._there += view.shared_requests
        self._looks += 1
        if view.now >= self._window_end:
            self._window_end += self._options.window_s
            self._observe(view)
        if not self._options.resize:
            return ()
        if view.now >= self._action:
            self._action += self._options.action_s
            self._decide(view)
        if self._wanted is None:
            return ()
        wanted, reason = self._wanted
        wishes = self._pools.steps(view, wanted, reason)
        if self._pools.there(view) == wanted:
            self._wanted = None
        return wishes

    def _observe(self, view: ClusterView) -> None:
        """One window: forecasts, length threshold, time-out and corrections."""
        window = view.window(self._options.window_s)
        sizing = self._options.sizing
        arrived = {"published": float(window.arrivals), "little": window.arrivals / window.seconds}
        self._requests.observe(arrived.get(sizing, self._there / self._looks))
        self._there, self._looks = 0.0, 0
        self._inputs.observe(window.input_tokens)
        self._outputs.observe(window.output_tokens)
        threshold = self._inputs.next()
        if not math.isnan(threshold):
            self._forming.threshold = threshold
        latest = view.order[self._seen :]
        self._seen = view.arrived
        lengths = np.array([view.input_tokens[request] for request in latest])
        times = np.array([self.profile.prefill_time(length) for length in lengths.tolist()])
        gaps = np.diff([view.arrival_s[request] for request in latest])
        self._forming.wait_s = kingman_wait(gaps, times, servers=max(int(view.prefill.size), 1))
        self._correct(view, float(lengths.mean()) if lengths.size else math.nan)

    def _correct(self, view: ClusterView, inputs: float) -> None:
        """Moving averages of the times observed over the window by those that the profile has for its means."""
        totals = self._totals(view)
        busy, computed, steps, time, emitted = (totals - self._totals_before).tolist()
        self._totals_before = totals
        if computed > 0 and inputs > 0:
            self._learn(0, busy / computed * inputs / self.profile.prefill_time(max(round(inputs), 1)))
        if steps > 0 and not math.isnan(self._outputs.next()):
            context = self._inputs.next() + self._outputs.next() / 2
            accepted = self.profile.decode.accepted_tokens
            self._learn(1, time / steps / accepted / self.profile.token_time(emitted / steps / accepted, context))

    def _totals(self, view: ClusterView) -> NDArray[np.float64]:
        """Busy time and tokens of all prefill instances; decode steps, their time and tokens of all of decode."""
        prefill = np.array([role is PREFILL for role in view.roles])
        columns = (
            view.busy_time[prefill],
            view.prefill_tokens[prefill],
            view.decode_steps[~prefill],
            view.decode_time[~prefill],
            view.decode_tokens[~prefill],
        )
        return np.array([column.sum() for column in columns])

    def _learn(self, which: int, ratio: float) -> None:
        self._correction[which] += NEWEST[self._options.sizing] * (ratio - self._correction[which])

    def _decide(self, view: ClusterView) -> None:
        requests, inputs, outputs = self._requests.next(), self._inputs.next(), self._outputs.next()
        if math.isnan(inputs) or math.isnan(outputs):
            return
        load, rule = requests * (1.0 + self._options.headroom), self._options.sizing
        wanted = self.profile.sizes(load, inputs, outputs, rule=rule, correction=self._correction)
        wanted = self._pools.within(view, wanted)
        there = self._pools.there(view)
        unit = {"published": "requests a window", "little": "requests/s"}.get(rule, "requests")
        reason = f"{requests:.4g} {unit} of {inputs:.0f}/{outputs:.0f} tokens: {there.words} to {wanted.words}"
        self._wanted = wanted, reason
