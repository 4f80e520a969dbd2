"""Arrow: stateless instances that change between prefill and decode at no cost, steered by the SLOs.

Y. Wu et al., "Arrow: Adaptive Scheduling Mechanisms for Disaggregated LLM Inference Architecture", arXiv 2505.11916:
pools and algorithms 1 to 4. An instance belongs to one of four pools: P and D do only what they are assigned to;
D->P is assigned to prefill and still decodes what it has; P->D is assigned to decode and still prefills what it has.
It drops into the pure pool when the old work is done, so that the pools follow from role and load alone.

Read from the paper's text where it is silent: limits are the SLOs themselves; the load of decode is low when
the instances left would be at most half full and tokens come in time; running tokens count requests that wait for
memory, else memory would keep them below ``MaxRunningTokens`` for ever, and an instance also needs a free sequence
(``waiting_counts: false`` is the printed rule);
"for a period" is three looks of the monitor; an instance of prefill is idle when it computed nothing since the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.errors import InputError
from disagg_sim.simulation.compiled import entry
from disagg_sim.simulation.options import (
    LEAST_PERIOD_S,
    MOST,
    MOST_SEQUENCES,
    MOST_TOKENS,
    check_options,
    option,
)
from disagg_sim.simulation.policies.arrow_profile import Predictor, max_running_tokens
from disagg_sim.simulation.policies.loads import ByRole
from disagg_sim.simulation.policy import (
    LATER,
    AsPlanned,
    Flip,
    Leg,
    Limits,
    Parts,
    Role,
    Site,
    State,
    StepLimits,
    Wish,
    register,
)

if TYPE_CHECKING:
    from disagg_sim.simulation.view import ClusterView

#: An enum's members are slow to look up.
PREFILL, DECODE, READY, FLIPPING = Role.PREFILL, Role.DECODE, State.READY, State.FLIPPING
#: What makes a decode instance turn to prefill: the TTFT predicted for a request that arrives, or those observed.
TRIGGERS = ("predicted", "observed")


@register("arrow")
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """Placement within the limits, flips where there is none, decode before prefill in overload."""

    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    token_budget: int = option(
        2048, "decodes and prefill of one step of an instance", unit="token", low=1, high=MOST_TOKENS
    )
    max_sequences: int = option(
        256, "most sequences of an instance, running and in prefill; vLLM's default", low=1, high=MOST_SEQUENCES
    )
    prompts_per_step: int = option(1, "prompts of which one step takes pieces", low=1, high=MOST)
    trigger: str = option(
        "predicted", "what flips a decode instance to prefill: the TTFT predicted at an arrival, or late ones observed",
        choices=TRIGGERS,
    )  # fmt: skip
    monitor_s: float = option(1.0, "time between two looks of the monitor", unit="s", low=LEAST_PERIOD_S)
    window_s: float = option(
        5.0, "time over which the interval between tokens is averaged; from monitor_s", unit="s", low=LEAST_PERIOD_S
    )
    patience: int = option(3, "looks in a row with late tokens before an instance turns to decode", low=1, high=MOST)
    low_load: float = option(
        0.5, "share of MaxRunningTokens up to which decode may give an instance up", low=0.0, high=1.0
    )
    busy_interval: float = option(
        0.8, "share of the TPOT limit above which decode takes an idle instance", low=0.0, high=1.0
    )
    waiting_counts: bool = option(
        True, "requests that wait for memory are load of decode; false: running ones alone, as printed"
    )

    def __post_init__(self) -> None:
        """``InputError`` for values out of range."""
        check_options(self)
        if not self.window_s >= self.monitor_s:
            raise InputError(f"window_s {self.window_s} is out of range; allowed: from monitor_s = {self.monitor_s} s")

    def build(self, site: Site) -> Parts:
        """See ``System``; prefill and decode parts say where the instances begin."""
        limits = Limits(
            token_budget=self.token_budget, max_sequences=self.max_sequences, max_prompts=self.prompts_per_step
        )
        start = site.instances(("prefill", PREFILL), ("decode", DECODE))
        steps = AsPlanned(site=site, parts=self.needs, usual=ByRole(prefill=limits, decode=limits))
        scheduler = GlobalScheduler(self, site, steps, [mapping for mapping, _ in start])
        return Parts(start=start, routing=scheduler, steps=steps, roles=scheduler)


#: Columns of the ledger, one row an instance. The first three are of its predictor, see ``Predictor``.
CONSTANT, LINEAR, QUADRATIC = range(3)
FREE = 3  # when the prompts in its queue will be done, on its own clock [s]
AHEAD = 4  # of that clock to the real one: what its last prompt took longer than predicted, in all [s]
INTERVAL = 5  # mean time between its decode steps over the window; 0 without one [s]
MOST = 6  # MaxRunningTokens [token]
SEATS = 7  # sequences that it can run [1]


@entry
def _soonest(among: Any, ledger: Any, queued: Any, running: Any, coming: Any, waiting: Any, now: float) -> Any:
    """Least queue delay in pool P and in D->P: instance, delay [s]; -1 and infinity of an empty pool."""
    pure, mixed = -1, -1
    pure_s, mixed_s = np.inf, np.inf
    for i in among:
        delay = max(ledger[i, FREE] + ledger[i, AHEAD] - now, 0.0) if queued[i] > 0 else 0.0
        if running[i] > 0 or coming[i] > 0 or waiting[i] > 0:
            if delay < mixed_s:
                mixed, mixed_s = i, delay
        elif delay < pure_s:
            pure, pure_s = i, delay
    return pure, pure_s, mixed, mixed_s


@entry
def _take(ledger: Any, i: int, tokens: int, queued: Any, now: float) -> float:
    """Book a prompt on an instance: its predicted end, on the clock of the instance. [s]"""
    time = ledger[i, CONSTANT] + tokens * (ledger[i, LINEAR] + tokens * ledger[i, QUADRATIC])
    start = now - ledger[i, AHEAD]
    if queued[i] > 0:
        start = max(start, ledger[i, FREE])
    ledger[i, FREE] = start + time
    return float(start + time)


@entry
def _place(
    among: Any, ledger: Any, queued: Any, running: Any, coming: Any, waiting: Any, tokens: int, ttft: float, now: float
) -> Any:
    """First steps of algorithm 1: an instance of P, else of D->P within the limit, booked, and the predicted end.

    Without one: minus 1 minus the instance to take late, nothing booked.
    """
    pure, pure_s, mixed, mixed_s = _soonest(among, ledger, queued, running, coming, waiting, now)
    for i, delay in ((pure, pure_s), (mixed, mixed_s)):
        if i >= 0:
            time = ledger[i, CONSTANT] + tokens * (ledger[i, LINEAR] + tokens * ledger[i, QUADRATIC])
            if delay + time <= ttft:
                return i, _take(ledger, i, tokens, queued, now)
    return -1 - (pure if pure >= 0 else mixed), 0.0


@entry
def _lightest(among: Any, running: Any, coming: Any, waiting: Any, prompts: Any) -> Any:
    """Fewest tokens in pool D and in P->D: instance, tokens, -1 of an empty pool.

    Tokens of an instance are those of all requests that it decodes, is being sent, or keeps waiting for memory.
    """
    pure, mixed = -1, -1
    pure_tokens, mixed_tokens = 0, 0
    for i in among:
        tokens = running[i] + coming[i] + waiting[i]
        if prompts[i] > 0:
            if mixed < 0 or tokens < mixed_tokens:
                mixed, mixed_tokens = i, tokens
        elif pure < 0 or tokens < pure_tokens:
            pure, pure_tokens = i, tokens
    return pure, pure_tokens, mixed, mixed_tokens


@entry
def _hand_over(
    among: Any, ledger: Any, running: Any, coming: Any, waiting: Any, prompts: Any, requests: Any, queued: Any,
    tpot: float,
) -> int:  # fmt: skip
    """First steps of algorithm 2: an instance of D, else of P->D within the limits; else minus 1 minus the lighter."""
    pure, pure_tokens, mixed, mixed_tokens = _lightest(among, running, coming, waiting, prompts)
    for i, tokens in ((pure, pure_tokens), (mixed, mixed_tokens)):
        free = i >= 0 and tokens <= ledger[i, MOST] and requests[i] + queued[i] < ledger[i, SEATS]
        if free and ledger[i, INTERVAL] <= tpot:
            return int(i)
    return -1 - int(mixed if pure < 0 or (mixed >= 0 and mixed_tokens < pure_tokens) else pure)


@entry
def _low(
    among: Any, ledger: Any, running: Any, coming: Any, waiting: Any, requests: Any, queued: Any, without: int,
    share: float,
) -> bool:  # fmt: skip
    """Whether all that decodes would take at most a ``share`` of what the instances other than ``without`` hold."""
    tokens, sequences, most, seats = 0, 0, 0.0, 0.0
    for i in among:
        tokens += running[i] + coming[i] + waiting[i]
        sequences += requests[i] + queued[i]
        if i != without:
            most += ledger[i, MOST]
            seats += ledger[i, SEATS]
    return bool(tokens <= share * most and sequences <= share * seats)


@entry
def _measure(among: Any, ledger: Any, steps: Any, time: Any, past: Any) -> float:
    """Fill the intervals since the ``past`` steps and time (2, instances), which become the present ones.

    Their mean over those of ``among`` that made steps; 0 without one. [s]
    """
    total, count = 0.0, 0
    for i in range(ledger.shape[0]):
        grown = steps[i] - past[0, i]
        ledger[i, INTERVAL] = (time[i] - past[1, i]) / grown if grown > 0 else 0.0
        past[0, i], past[1, i] = steps[i], time[i]
    for i in among:
        if ledger[i, INTERVAL] > 0.0:
            total += ledger[i, INTERVAL]
            count += 1
    return total / count if count > 0 else 0.0


@entry
def _idle(among: Any, computed: Any, before: Any, queued: Any, running: Any) -> int:
    """An instance of prefill that computed nothing since ``before``, one that still decodes first; -1 = none."""
    found = -1
    for i in among:
        if computed[i] == before[i] and queued[i] == 0 and (found < 0 or (running[i] > 0 and running[found] == 0)):
            found = i
    return int(found)


@entry
def _busy(among: Any, ledger: Any, waiting: Any, limit: float) -> int:
    """A decode instance with an interval above ``limit`` [s], or with requests that wait to decode; -1 = none."""
    for i in among:
        if ledger[i, INTERVAL] > limit or waiting[i] > 0:
            return int(i)
    return -1


class GlobalScheduler:
    """Routing and monitor of Arrow: one state, looked at by both.

    Parameters
    ----------
    options : Arrow
        The system's.
    site, steps, mappings
        What is there, how instances step, and the mapping of each instance.
    """

    def __init__(self, options: Arrow, site: Site, steps: StepLimits, mappings: Sequence[Mapping]) -> None:
        self.period_s = options.monitor_s
        self._options, self._ttft, self._tpot = options, site.slo.ttft, site.slo.tpot
        self._at_once = site.flip_s == 0.0
        self._reacts = options.trigger == "observed"
        self._nothing = None if options.waiting_counts else np.zeros(len(mappings), np.int64)
        rows = {}
        for mapping in set(mappings):
            chunk, limits = steps.limits(mapping, PREFILL).token_budget, steps.limits(mapping, DECODE)
            table = site.table(mapping, limits.max_sequences)
            most = max_running_tokens(table, site.blocks(mapping, limits), limits.max_sequences, self._tpot)
            seats = limits.max_sequences if options.waiting_counts else np.inf
            rows[mapping] = (*Predictor.fit(table, chunk), 0.0, 0.0, 0.0, most, seats)
        self.ledger = np.array([rows[mapping] for mapping in mappings], dtype=float)
        self._ends: dict[int, float] = {}  # of the prompts in queues, predicted, on the clocks of their instances [s]
        looks = max(round(options.window_s / options.monitor_s), 1)
        self._past = np.zeros((looks, 2, len(mappings)))  # steps and time of decode at the last looks, in turn
        self._looks = 0
        self._computed = np.zeros(len(mappings), np.int64)  # prompt tokens, at the last look
        self._mean_interval = 0.0  # of the decode instances [s]
        self._late = 0  # looks in a row
        self._worst = 0.0  # TTFT observed since the last look [s]

    # --- routing ------------------------------------------------------------------------------------------------

    def place(self, view: ClusterView, request: int) -> Leg:
        """Algorithm 1: the prefill instance that meets the TTFT limit, of P, of D->P, or flipped; else late in P."""
        tokens, queued, now = view.input_tokens[request], view.queued_prompt_tokens, view.now
        chosen, end = _place(
            view.prefill, self.ledger, queued, view.running_requests, view.coming_tokens, self._waiting(view),
            tokens, self._ttft, now,
        )  # fmt: skip
        wishes: tuple[Wish, ...] = ()
        if chosen < 0:
            chosen = -1 - chosen
            flip = None if self._reacts else self._to_prefill(view, "predicted")
            if flip is not None:
                wishes = (flip,)
                chosen = flip.instance if self._at_once else chosen
            end = _take(self.ledger, chosen, tokens, queued, now)
        self._ends[request] = end
        return Leg(chosen, tokens + 1, LATER, wishes)

    def proceed(self, view: ClusterView, request: int, origin: int) -> Leg:
        """Algorithm 2: where the prefill was if that decodes now; else in D or P->D within the limits, or flipped."""
        now = view.now
        self.ledger[origin, AHEAD] = now - self._ends.pop(request)
        if self._reacts:
            self._worst = max(self._worst, now - view.arrival_s[request])
        if view.roles[origin] is DECODE and view.states[origin] is READY:
            return Leg(origin)
        view.refresh()  # else steps since the last event of an instance would be missing
        chosen = _hand_over(
            view.decode, self.ledger, view.running_tokens, view.coming_tokens, self._waiting(view),
            view.queued_prompt_tokens, view.running_requests, view.queued_requests, self._tpot,
        )  # fmt: skip
        if chosen >= 0:
            return Leg(chosen)
        flip = self._to_decode(view, "no decode instance within its limits")
        if flip is None:
            return Leg(-1 - chosen)
        return Leg(flip.instance if self._at_once else -1 - chosen, wishes=(flip,))

    # --- flips --------------------------------------------------------------------------------------------------

    def _to_prefill(self, view: ClusterView, how: str) -> Flip | None:
        """Algorithm 3: of P->D, else of D, the one with fewest running tokens, if the load of decode is low."""
        if view.decode.size < 2 or self._mean_interval > self._tpot or self._changing(view, PREFILL):
            return None
        running, coming, waiting = view.running_tokens, view.coming_tokens, self._waiting(view)
        pure, _, mixed, _ = _lightest(view.decode, running, coming, waiting, view.queued_prompt_tokens)
        chosen = mixed if mixed >= 0 else pure
        if not _low(
            view.decode, self.ledger, running, coming, waiting, view.running_requests, view.queued_requests, chosen,
            self._options.low_load,
        ):  # fmt: skip
            return None
        return Flip(chosen, PREFILL, f"first token {how} after the limit of {self._ttft:g} s")

    def _to_decode(self, view: ClusterView, why: str) -> Flip | None:
        """Algorithm 4: of D->P, else of P, the one with the least prefill delay."""
        if view.prefill.size < 2 or self._changing(view, DECODE):
            return None
        pure, _, mixed, _ = _soonest(
            view.prefill, self.ledger, view.queued_prompt_tokens, view.running_requests, view.coming_tokens,
            self._waiting(view), view.now,
        )  # fmt: skip
        return Flip(mixed if mixed >= 0 else pure, DECODE, why)

    def _waiting(self, view: ClusterView) -> Any:
        """Cached tokens of the requests that wait for memory, where they count. [token]"""
        return view.queued_context_tokens if self._nothing is None else self._nothing

    def _changing(self, view: ClusterView, role: Role) -> bool:
        """Whether an instance is on its way to a role already; possible where a change takes time."""
        return not self._at_once and any(
            each is role and state is FLIPPING for each, state in zip(view.roles, view.states, strict=True)
        )

    # --- monitor ------------------------------------------------------------------------------------------------

    def flips(self, view: ClusterView) -> Sequence[Wish]:
        """Measure the intervals between tokens; turn an instance to decode where they are late or could be better."""
        oldest = self._past[self._looks % len(self._past)]
        self._looks += 1
        self._mean_interval = _measure(view.decode, self.ledger, view.decode_steps, view.decode_time, oldest)
        self._late = self._late + 1 if self._mean_interval > self._tpot else 0
        late, self._worst = self._worst > self._ttft, 0.0
        wish = None
        if self._late >= self._options.patience:
            self._late = 0
            wish = self._to_decode(view, f"tokens every {self._mean_interval:.3g} s, limit {self._tpot:g} s")
        elif view.prefill.size > 1:
            wish = self._idle_to_decode(view)
        self._computed = view.prefill_tokens.copy()
        if wish is None and late:
            wish = self._to_prefill(view, "observed")
        return () if wish is None else (wish,)

    def _idle_to_decode(self, view: ClusterView) -> Flip | None:
        """An idle instance of prefill, if some decode instance is busy."""
        prompts = view.queued_prompt_tokens
        idle = _idle(view.prefill, view.prefill_tokens, self._computed, prompts, view.running_requests)
        if idle < 0:
            return None
        limit = self._options.busy_interval * self._tpot
        busy = _busy(view.decode, self.ledger, self._waiting(view), limit)
        if busy < 0 or self._changing(view, DECODE):
            return None
        return Flip(idle, DECODE, f"idle, while instance {busy} needs help")
