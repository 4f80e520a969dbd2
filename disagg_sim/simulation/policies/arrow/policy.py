"""Arrow: stateless instances that change between prefill and decode at no cost, steered by the SLOs.

Y. Wu et al., "Arrow: Adaptive Scheduling Mechanisms for Disaggregated LLM Inference Architecture", arXiv 2505.11916:
pools and algorithms 1 to 4. An instance belongs to one of four pools: P and D do only what they are assigned to;
D->P is assigned to prefill and still decodes what it has; P->D is assigned to decode and still prefills what it has.
When the old work is done, the instance joins P or D; so role and load alone determine the pool.

A step takes all decodes and then chunks of prompts up to its budget (section 5.4). The predictor times each prompt as
if it were alone; what the last one took more or less than that moves the clock of its instance (ours; ``corrects``).
The paper fits it once at launch to prompts of different lengths and prints no more; ours are of 32 to 131,072 tokens,
with errors over their times.

Our choices where the paper is silent:

* limits are the SLOs themselves;
* the load of decode is low if the remaining instances would be at most half full and tokens come in time;
* running tokens include requests that wait for memory, because otherwise memory would always keep them below
  ``MaxRunningTokens``; an instance also needs a free sequence (``waiting_counts: false`` is the printed rule);
* "for a period" means three checks of the monitor; a prefill instance is idle if it computed nothing since the last
  check.

The paper assumes equal instances. Our extension compares the loads of unequal instances by their capacity:

* a prompt goes to the instance that would complete it first, not to the shortest queue;
* running tokens, including those of the request to place, count as a share of ``MaxRunningTokens``; mean intervals are
  weighted by ``MaxRunningTokens``; an instance that never decodes within the TPOT limit decodes only if no other
  can;
* a request goes only to instances whose memory holds its prompt;
* a decode instance flips for a prompt only if it would complete the prompt sooner than P, where it would be late;
* at a low load, steps above the TPOT limit flip no instance to decode: the instance is slow by nature;
* at each check, waiting prompts that will be late move from the tail of the longest queue to queues shorter than one
  check interval; if there is no such queue, an instance flips as for an arrival, or an idle decode instance does
  (``moves``). A prompt whose prefill has begun stays.

On equal instances every choice is that of the paper.

The kernel takes these choices by itself, as long as an instance meets the limits, with no call from Python for each
(``ArrowChooser``). Where none does it asks the policy, which may flip an instance.

Past 400 lines: the choices that the kernel takes, and those that the policy takes, work on the same ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.simulation.clients import SparseColumn
from disagg_sim.simulation.instances import Index
from disagg_sim.simulation.kernel.addresses import carray, home_at, pointer
from disagg_sim.simulation.kernel.compiled import called_by_address
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, dtype_of
from disagg_sim.simulation.options import (
    check_options,
    max_sequences_option,
    option,
    period_option,
    prompts_per_step_option,
    token_budget_option,
)
from disagg_sim.simulation.policies.arrow.account import ACCOUNT, Predictor, max_running_tokens
from disagg_sim.simulation.policies.arrow.ledger import (
    among_these,
    book,
    busy_instance,
    hand_over,
    idle_instance,
    least_delay,
    lightest,
    low,
    measure,
    order_of,
    place,
    prompt_s,
    sooner,
    soonest_free,
    take,
)
from disagg_sim.simulation.policies.loads import ByRole
from disagg_sim.simulation.policy import Parts, register
from disagg_sim.simulation.site import AsPlanned, Site, StepLimits
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import LATER, Flip, Leg, Limits, Move, Role, State, Wish


class Context:
    """What the choices work on; arrays by their addresses (``_at``)."""

    ledger_at: int  # (instances)
    instances: int
    state_at: int  # (rows, width) order of those that prefill
    tokens_at: int  # order of those that decode
    rows: int
    width: int
    ends_at: int  # (requests) predicted ends, on the clock of the instance [s]
    requests: int
    ttft: float  # limits [s]
    tpot: float
    looked_s: float  # when tokens in decode were looked up last [s]


CONTEXT = dtype_of(Context)
NOBODY = -1
#: Share of MaxRunningTokens up to which decode may give an instance up, and of the TPOT limit above which it takes one.
LOW_LOAD, BUSY_INTERVAL = 0.5, 0.8


def _place(home: int, context: int, request: int, tokens: int, origin: int, now: float) -> int:  # noqa: ARG001
    """Algorithm 1 where an instance meets the limit; else ``NOBODY``, and nothing has changed."""
    one = carray(pointer(context), 1, CONTEXT)[0]
    ledger = carray(pointer(one.ledger_at), one.instances, ACCOUNT)
    order = carray(pointer(one.state_at), (one.rows, one.width), np.float64)
    i, end, _ = place(home_at(home), order, ledger, tokens, one.ttft, now)
    if i >= 0:
        carray(pointer(one.ends_at), one.requests, np.float64)[request] = end
    return int(i)


def _go_on(home: int, context: int, request: int, tokens: int, origin: int, now: float) -> int:
    """Algorithm 2 where an instance is within the limits; else below 0, also where the request may stay."""
    one = carray(pointer(context), 1, CONTEXT)[0]
    ledger = carray(pointer(one.ledger_at), one.instances, ACCOUNT)
    queues = carray(pointer(one.state_at), (one.rows, one.width), np.float64)
    order = carray(pointer(one.tokens_at), (one.rows, one.width), np.float64)
    if not among_these(queues, origin):
        return NOBODY
    if ledger[origin].corrects == 1:
        ledger[origin].ahead_s = now - carray(pointer(one.ends_at), one.requests, np.float64)[request]
    one.looked_s = now
    return int(hand_over(home_at(home), (queues, order), ledger, tokens, one.tpot, now, origin))


@cache
def _functions() -> tuple[Any, Any]:
    """The compiled choices, made where they are first needed."""
    return called_by_address(_place), called_by_address(_go_on)


class ArrowChooser:
    """Arrow's choices, and what they work on (``ranking.Chooser``)."""

    def __init__(self, ledger: Any, kind: Ints, *, ttft: float, tpot: float) -> None:
        self._ends = SparseColumn(1, np.float64)  # see ``ends``
        self.queues: Floats = order_of(np.zeros(0, np.intp), kind)
        self.tokens: Floats = self.queues
        self._ledger, self._kind = ledger, kind
        self._among: tuple[Index | None, Index | None] = (None, None)
        self._context: Any = np.zeros(1, CONTEXT)
        self._context["ttft"], self._context["tpot"], self._context["looked_s"] = ttft, tpot, -np.inf
        self._looked_s = self._context["looked_s"]

    @property
    def ends(self) -> Floats:
        """Predicted ends of prompts, by request. [s]"""
        return self._ends.values

    @property
    def looked_s(self) -> float:
        """When tokens in decode were looked up last; flips for prompts go by these. [s]"""
        return float(self._looked_s[0])

    def look(self, now: float) -> None:
        """Tokens in decode are looked up."""
        self._looked_s[0] = now

    def book(self, request: int, end: float) -> None:
        """A prompt is predicted to end then, on the clock of its instance. [s]"""
        if request >= self.ends.size:
            self.room_for(2 * request + 1)
        self.ends[request] = end

    def room_for(self, requests: int) -> None:
        """So many requests may come."""
        self._ends = self._ends.longer(requests)
        self._bind()

    def release(self, before: int) -> None:
        """Requests before one are over."""
        self._ends.release(before)

    def renew(self, prefill: Index, decode: Index) -> None:
        """See ``ranking.Chooser``."""
        if self._among[0] is not prefill:
            self.queues = order_of(prefill, self._kind)
        if self._among[1] is not decode:
            self.tokens = order_of(decode, self._kind)
        self._among = prefill, decode
        self._bind()

    def addresses(self) -> tuple[int, int, int]:
        """See ``ranking.Chooser``."""
        place, go_on = _functions()
        return place.address, go_on.address, self._context.ctypes.data

    def _bind(self) -> None:
        """Say where the arrays are."""
        context = self._context
        context["ledger_at"], context["instances"] = self._ledger.ctypes.data, self._ledger.size
        context["state_at"], context["tokens_at"] = self.queues.ctypes.data, self.tokens.ctypes.data
        context["rows"], context["width"] = self.queues.shape
        context["ends_at"], context["requests"] = self.ends.ctypes.data, self.ends.size
        self._looked_s = context["looked_s"]


#: An enum's members are slow to look up.
PREFILL, DECODE, READY, FLIPPING = Role.PREFILL, Role.DECODE, State.READY, State.FLIPPING
#: What makes a decode instance turn to prefill: the TTFT predicted for a request that arrives, or those observed.
TRIGGERS = ("predicted", "observed")
#: Where prompts that wait may move: nowhere, as printed; between instances of unequal mappings; between any.
MOVES = ("never", "unequal", "always")
#: Checks in a row with late tokens before an instance flips to decode. [1]
PATIENCE = 3
#: Most looks of the monitor in its window, each of which is kept: 0.2 MB an instance; the default keeps five. [1]
MOST_PAST = 10_000


@register("arrow")
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """Place requests where they meet the limits; if no instance does, flip one; in overload decode comes first."""

    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    token_budget: int = token_budget_option()
    max_sequences: int = max_sequences_option()
    prompts_per_step: int = prompts_per_step_option()
    trigger: str = option(
        "predicted",
        "what flips a decode instance to prefill: the TTFT predicted at an arrival, or late ones observed",
        choices=TRIGGERS,
    )
    monitor_s: float = period_option(1.0, "time between two checks of the monitor")
    window_s: float = period_option(5.0, "time over which the interval between tokens is averaged; from monitor_s")
    idle_helps: bool = option(
        True, "an idle prefill instance turns to decode where decode is busy; false: after late tokens alone"
    )
    waiting_counts: bool = option(
        True, "requests that wait for memory are load of decode; false: running ones alone, as printed"
    )
    corrects: bool = option(
        True, "what the last prompt took beyond its prediction moves the clock of its instance; false: as printed"
    )
    moves: str = option(
        "unequal",
        "whether prompts that wait late may move to a free instance: never, as printed, or between which",
        choices=MOVES,
    )

    def __post_init__(self) -> None:
        """``InputError`` for values out of range."""
        check_options(self)
        longest = MOST_PAST * self.monitor_s
        if not self.monitor_s <= self.window_s <= longest:
            raise InputError(
                f"window_s {self.window_s} is out of range; allowed: from monitor_s = {self.monitor_s} s to "
                f"{longest:g} s, {MOST_PAST:,} looks"
            )

    def build(self, site: Site) -> Parts:
        """See ``Policy``; prefill and decode parts say where the instances begin."""
        limits = Limits(
            token_budget=self.token_budget, max_sequences=self.max_sequences, max_prompts=self.prompts_per_step
        )
        start = site.instances(("prefill", PREFILL), ("decode", DECODE))
        steps = AsPlanned(site=site, parts=self.needs, usual=ByRole(prefill=limits, decode=limits))
        scheduler = GlobalScheduler(self, site, steps, [mapping for mapping, _ in start])
        return Parts(start=start, routing=scheduler, steps=steps, roles=scheduler, failover=scheduler)


class GlobalScheduler:
    """Routing and monitor of Arrow: one state, looked at by both."""

    def __init__(self, options: Arrow, site: Site, steps: StepLimits, mappings: Sequence[Sharding]) -> None:
        self.period_s = options.monitor_s
        self._options, self._ttft, self._tpot = options, site.slo.ttft, site.slo.tpot
        self._at_once = site.flip_s == 0.0
        self._reacts = options.trigger == "observed"
        rows = {}
        for mapping in set(mappings):
            chunk, limits = steps.limits(mapping, PREFILL).token_budget, steps.limits(mapping, DECODE)
            table, blocks = site.table(mapping, limits.max_sequences), site.blocks(mapping, limits)
            most = max_running_tokens(table, blocks, limits.max_sequences, self._tpot)
            seats = limits.max_sequences if options.waiting_counts else np.inf
            fit = Predictor.fit(table, chunk)
            own = (most, seats, blocks * BLOCK_TOKENS, 1.0, options.waiting_counts, options.corrects)
            rows[mapping] = (*fit, 0.0, 0.0, 0.0, *own)
        self.ledger: Any = np.array([rows[mapping] for mapping in mappings], ACCOUNT)
        self._free_s, self._ahead_s, held = (self.ledger[name] for name in ("free_s", "ahead_s", "held"))
        if held.any():
            self.ledger["weight"] = held / held.max()
            held[held == 0.0] = -1.0
        kinds = {mapping: kind for kind, mapping in enumerate(rows)}
        kind = np.array([kinds[mapping] for mapping in mappings])
        self._unequal = len(rows) > 1
        self._moves = options.moves == "always" or (options.moves == "unequal" and self._unequal)
        #: Orders of instances, and predicted ends of prompts.
        self.choices = ArrowChooser(self.ledger, kind, ttft=self._ttft, tpot=self._tpot)
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
        tokens, now = view.input_tokens[request], view.now
        self.choices.renew(view.prefill, view.decode)
        order = self.choices.queues
        chosen, end, late = place(view.home, order, self.ledger, tokens, self._ttft, now)
        wishes: tuple[Wish, ...] = ()
        if chosen < 0:
            chosen = late if late >= 0 else int(view.prefill[0])
            flip = None if self._reacts else self._to_prefill(view, "predicted", tokens, end)
            if flip is not None:
                wishes = (flip,)
                chosen = flip.instance if self._at_once else chosen
            end = book(view.home, order, self.ledger, chosen, tokens, now)
        self.choices.book(request, end)
        return Leg(chosen, tokens + 1, LATER, wishes)

    def proceed(self, view: ClusterView, request: int, origin: int) -> Leg:
        """Algorithm 2: where the prefill was if that decodes now; else in D or P->D within the limits, or flipped."""
        now = view.now
        choices = self.choices
        if self._options.corrects:
            self._ahead_s[origin] = now - choices.ends[request]
        if self._reacts:
            self._worst = max(self._worst, now - view.arrival_s[request])
        if view.roles[origin] is DECODE and view.states[origin] is READY:
            return Leg(origin)
        choices.look(now)
        choices.renew(view.prefill, view.decode)
        chosen = hand_over(
            view.home,
            (choices.queues, choices.tokens),
            self.ledger,
            view.input_tokens[request],
            self._tpot,
            now,
            origin,
        )
        if chosen >= 0:
            return Leg(chosen)
        flip = self._to_decode(view, "no decode instance within its limits")
        if flip is None:
            return Leg(-1 - chosen)
        return Leg(flip.instance if self._at_once else -1 - chosen, wishes=(flip,))

    def forget_before(self, before: int) -> None:
        """Requests before one are over, and nobody asks for them."""
        self.choices.release(before)

    def chooser(self, requests: int) -> ArrowChooser | None:
        """Let the kernel place and hand over requests by itself; None: this policy has to see each of them."""
        if self._reacts or self._moves:
            return None
        self.choices.room_for(requests)
        return self.choices

    # --- flips --------------------------------------------------------------------------------------------------

    def _to_prefill(self, view: ClusterView, how: str, tokens: int = 0, within: float = np.inf) -> Flip | None:
        """Algorithm 3: of P->D, else of D, the one with fewest running tokens, if the load of decode is low.

        Of unequal ones only where a prompt of ``tokens`` would be done ``within`` that time [s].
        """
        if view.decode.size < 2 or self._mean_interval > self._tpot or self._changing(view, PREFILL):
            return None
        among, ledger, looked = view.decode, self.ledger, self.choices.looked_s
        if self._unequal:
            among = sooner(among, view.inst, ledger, tokens, within, view.now)
        pure, _, mixed, _ = lightest(among, view.home, ledger, 0, looked)
        chosen = mixed if mixed >= 0 else pure
        if chosen < 0 or not low(view.decode, view.home, ledger, chosen, LOW_LOAD, looked):
            return None
        return Flip(chosen, PREFILL, f"first token {how} after the limit of {self._ttft:g} s")

    def _to_decode(self, view: ClusterView, why: str) -> Flip | None:
        """Algorithm 4: of D->P, else of P, the one with the least prefill delay."""
        if view.prefill.size < 2 or self._changing(view, DECODE):
            return None
        chosen = least_delay(view.prefill, view.inst, self.ledger, view.now)
        return Flip(chosen, DECODE, why) if chosen >= 0 else None

    def _changing(self, view: ClusterView, role: Role) -> bool:
        """Whether an instance is on its way to a role already; possible where a change takes time."""
        return not self._at_once and any(
            each is role and state is FLIPPING for each, state in zip(view.roles, view.states, strict=True)
        )

    # --- failures -----------------------------------------------------------------------------------------------

    def failed(self, view: ClusterView, instances: Sequence[int], requests: Sequence[int]) -> Sequence[Wish]:  # noqa: ARG002  all are gone
        """See ``Failover``: a phase that has lost its last instance gets one of the other, whatever its load."""
        flip = None
        if not view.prefill.size and view.decode.size > 1:
            pure, _, mixed, _ = lightest(view.decode, view.home, self.ledger, 0, view.now)
            chosen = mixed if mixed >= 0 else pure
            flip = Flip(chosen, PREFILL, "no prefill instance is left") if chosen >= 0 else None
        elif not view.decode.size:
            flip = self._to_decode(view, "no decode instance is left")
        return () if flip is None else (flip,)

    def restored(self, view: ClusterView, instances: Sequence[int]) -> Sequence[Wish]:  # noqa: ARG002  the monitor sees it
        """See ``Failover``."""
        return ()

    # --- monitor ------------------------------------------------------------------------------------------------

    def flips(self, view: ClusterView) -> Sequence[Wish]:
        """Measure the intervals between tokens; turn an instance to decode where they are late or could be better."""
        oldest = self._past[self._looks % len(self._past)]
        self._looks += 1
        self._mean_interval = measure(view.decode, view.inst, self.ledger, oldest)
        self._late = self._late + 1 if self._mean_interval > self._tpot else 0
        late, self._worst = self._worst > self._ttft, 0.0
        wish = None
        if self._late >= PATIENCE:
            self._late = 0
            wish = self._to_decode(view, f"tokens every {self._mean_interval:.3g} s, limit {self._tpot:g} s")
        elif self._options.idle_helps and view.prefill.size > 1:
            wish = self._idle_to_decode(view)
        self._computed = view.prefill_tokens.copy()
        if wish is None and late:
            wish = self._to_prefill(view, "observed")
        if wish is None and self._moves and not view.remembers:  # else those behind may count on a prompt's blocks
            return self._relief(view)
        return () if wish is None else (wish,)

    def _idle_to_decode(self, view: ClusterView) -> Flip | None:
        """An idle instance of prefill, if some decode instance is busy."""
        idle = idle_instance(view.prefill, view.inst, self.ledger, self._computed)
        if idle < 0:
            return None
        light = LOW_LOAD if self._unequal else -1.0
        busy = busy_instance(view.decode, view.inst, self.ledger, BUSY_INTERVAL * self._tpot, light)
        if busy < 0 or self._changing(view, DECODE):
            return None
        return Flip(idle, DECODE, f"idle, while instance {busy} needs help")

    def _idle_to_prefill(self, view: ClusterView, tokens: int, within: float, origin: int) -> Flip | None:
        """An idle instance of decode, where a prompt that waits on ``origin`` would be done ``within`` that time."""
        if view.decode.size < 2 or self._changing(view, PREFILL):
            return None
        taken = view.running_tokens + view.coming_tokens + view.queued_requests
        if self._options.waiting_counts:
            taken += view.queued_context_tokens
        idle = view.decode[taken[view.decode] == 0]
        chosen, time = soonest_free(idle, view.waiting_prompt_tokens, self.ledger, tokens, np.inf, view.now)
        if chosen < 0 or time > within:
            return None
        return Flip(chosen, PREFILL, f"idle, while prompts wait late on instance {origin}")

    def _relief(self, view: ClusterView) -> list[Wish]:
        """Moves of prompts that wait and will be late to queues that last less than a look; a flip where none does."""
        now, ledger, among = view.now, self.ledger, view.prefill
        queued = view.waiting_prompt_tokens.copy()
        wishes: list[Wish] = []
        flips = not self._reacts
        origins = np.flatnonzero(queued)
        for origin in origins[np.argsort(-(self._free_s[origins] + self._ahead_s[origins]), kind="stable")].tolist():
            for request in reversed(view.waiting_prompts(origin).tolist()):
                tokens, left = view.input_tokens[request], self.choices.ends[request] + self._ahead_s[origin] - now
                if now + left <= view.arrival_s[request] + self._ttft:
                    break
                target, time = soonest_free(among, queued, ledger, tokens, self.period_s, now)
                if target < 0 and flips:
                    flips = False
                    flip = self._to_prefill(view, "of a prompt that waits predicted", tokens, left - self.period_s)
                    flip = flip or self._idle_to_prefill(view, tokens, left - self.period_s, origin)
                    wishes += [] if flip is None else [flip]
                    if flip is not None and self._at_once:
                        among = np.append(among, flip.instance)
                        target, time = soonest_free(among, queued, ledger, tokens, self.period_s, now)
                if target < 0 or time + self.period_s > left:
                    break
                wishes.append(Move(request, origin, target, f"late by {now + left - view.arrival_s[request]:.3g} s"))
                self._free_s[origin] -= prompt_s(ledger, origin, tokens)
                queued[origin] -= tokens
                self.choices.ends[request] = take(ledger, target, tokens, queued[target], now)
                queued[target] += tokens
        return wishes
