"""Run each request from arrival through segments on instances and transfers between them to its end.

Past 400 lines: all steps of a request in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from disagg_sim.arrays import Floats, Mask
from disagg_sim.errors import quoted
from disagg_sim.simulation.batches import Batches
from disagg_sim.simulation.clients import Clients
from disagg_sim.simulation.engine import LAST, NORMAL
from disagg_sim.simulation.instances import Index
from disagg_sim.simulation.kernel.compiled import COMPILES
from disagg_sim.simulation.kernel.entry import ARRIVES, COMES
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, CLOSES, HOLD, NOTIFY, Mode, SegmentStatus
from disagg_sim.simulation.kernel.ranking import Chooser, Choosing, Placing, Ranked, Route, RoutingQueue, ranking
from disagg_sim.simulation.options import MOST_IDLE_LOOKS, MOST_LOOKS
from disagg_sim.simulation.policy import Parts
from disagg_sim.simulation.transfers import PUSHED, Lengths, Transfers, Work
from disagg_sim.simulation.view import ClusterState, ClusterView, Waiting
from disagg_sim.simulation.wishes import END, LATER, SHARED, Leg, Move, State, Wish, leg_faults
from disagg_sim.techniques.availability.play import Failures
from disagg_sim.techniques.availability.play_recovery import ActiveLeg, Recovery
from disagg_sim.techniques.prefix.play_tiers import Tiers

NAN = math.nan
NOWHERE = -1  # instance of a request that has just arrived
READY, STOPPED, MANUAL = State.READY, State.STOPPED, Mode.MANUAL  # an enum's members are slow to look up
HEARD, KEPT = NOTIFY | CLOSES, NOTIFY | HOLD | CLOSES  # flags of a last segment with a report, and of others


class LinkFailures(Protocol):
    """Failures of a run, as seen by one of its clusters."""

    restarts: dict[int, int]  # pending restarts of failed instances, by ``id`` of their cluster [1]

    def links_lost(self, cluster: Cluster) -> bool:
        """Whether a link of a cluster is down for good, and no other link will recover."""


class Cluster:
    """Requests, policy and kernel of one cluster; a source of events.

    A request is placed ``Site.request_host_s`` after its arrival; its TTFT counts from the arrival.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        state: ClusterState,
        clients: Clients,
        transfer: str,
        first_token: str,
        failures: Failures | None,
    ) -> None:
        self.parts, self.state, self.view = parts, state, state.view
        self.engine, self.fleet, self.roster, self.site = state.engine, state.fleet, state.roster, state.site
        self.prefix, self.prompts, self._totals = state.prefix, state.prompts, state.totals
        self.tiers = state.prefix if isinstance(state.prefix, Tiers) else None
        engine, roster = state.engine, state.roster
        self.requests = len(self.prompts)
        self._order = state.asked
        self.refused: list[int] = []  # requests
        self.lost: list[int] = []
        self.batches = Batches(parts.forming, state, self._submit_batch)
        self.going: dict[int, ActiveLeg] = {}
        self._late: dict[int, int] = {}  # ended segments, by requests with a delayed next leg
        self._told = -1
        self._clients = clients
        self.outages: LinkFailures | None = None  # where something fails
        self._host = self.site.request_host_s  # of a request before it is placed [s]
        self._feed: RoutingQueue | None = None  # set if the kernel places requests itself
        self._due = len(clients.timed) + len(clients.at_once)  # requests that have arrived or will arrive [request]
        self._looks = 0  # ticks of the policy, so far
        self._idle_looks = 0  # latest ticks with nothing but prompts in the shared queue
        self._period_s = max((each.period_s for each in (parts.roles, parts.scaling) if each is not None), default=0.0)
        self._pool, self._widest = roster.decode[:0], 0  # prefill instances, and the memory of the largest [token]
        self._takes, self._ticks = (part is not None for part in (parts.forming, parts.roles or parts.scaling))
        self._notify_all = clients.hears or failures is not None
        self._emits_late = first_token == "decode"
        self.transfers = Transfers(transfer, state, self)
        self._place, self._proceed = parts.routing.place, parts.routing.proceed
        self.recovery = Recovery(self, failures.migration_limit if failures is not None else 0)
        roster.joined, roster.serves = self._instances_changed, self._serves
        roster.died, roster.carries = self.recovery.stopped, self._move
        self._instances_changed()
        engine.attach(self)
        for request in clients.at_once:
            engine.at(engine.now, NORMAL, self._admit, request)
        timed, reach = state.arrival_s, None  # of an open loop; not copied, to save memory
        if clients.timed != range(self.requests):
            timed = timed[np.asarray(clients.timed, dtype=np.intp)]
        if state.coming is not None:
            timed, reach = state.coming.placed_s, state.coming.reach
        elif self._host:
            timed = timed + self._host
        route = self._route() if failures is None and not clients.hears else None
        if route is not None:
            self._feed_kernel(timed, route)
        else:
            engine.feed(memoryview(timed), NORMAL, self.arrive, clients.timed, reach)  # type: ignore[arg-type, unused-ignore]
        if parts.roles is not None:
            self._every(parts.roles.period_s, parts.roles.flips)
        if parts.scaling is not None:
            self._every(parts.scaling.period_s, parts.scaling.resize)

    def _route(self) -> Route | None:
        """Make the rules by which the kernel places and hands over requests; None if only Python can."""
        parts, roster = self.parts, self.roster
        if any(each is not None for each in (parts.admission, parts.forming, parts.scaling, self.prefix)):
            return None
        placing: Placing | None = getattr(parts.routing, "placing", None)
        choosing: Callable[[int], Chooser | None] | None = getattr(parts.routing, "chooser", None)
        caches = self.transfers.caches() if not np.intersect1d(roster.prefill, roster.decode).size else None
        if placing is not None and parts.roles is None:
            first = self._ranked(placing.first, roster.prefill)
            if placing.then is None or caches is None:
                return Route(placing.whole, first)
            return Route(placing.whole, first, self._ranked(placing.then, roster.decode), caches=caches)
        compiles = COMPILES and caches is not None
        chooser = choosing(self.requests) if choosing is not None and compiles else None
        if chooser is None:
            return None
        roster.regrouped = chooser.renew
        chooser.renew(roster.prefill, roster.decode)
        return Route(False, chooser=chooser, caches=caches)

    def _ranked(self, choosing: Choosing, among: Index) -> Ranked:
        return Ranked(choosing.load, choosing.own_tokens, ranking(among, getattr(self.view, choosing.served)))

    def _feed_kernel(self, times: Floats, route: Route) -> None:
        """Let the kernel place requests."""
        state, most = self.state, min(*self._tokens, self._largest)
        inputs, _ = state.lengths
        emits = self._emits_late
        self._feed = RoutingQueue(times, inputs, state.tokens, route, most=most, emits_late=emits, supply=state.coming)
        state.feed = self._feed
        self._next, self._place_in_order = self._feed.skip, self.engine.reserve()
        self.fleet.take(self._feed)

    @property
    def at_work(self) -> bool:
        """Whether anything can still happen to a request."""
        return self._moves or (
            self.view.shared_requests > 0
            and (len(self.batches.wakes) > 0 or (self._ticks and self._idle_looks < MOST_IDLE_LOOKS))
        )

    @property
    def _moves(self) -> bool:
        """Whether anything can still happen, except that an instance takes a prompt of the shared queue."""
        return (
            self.view.arrived < self._due
            or (
                (self.fleet.wires.in_flight > 0 or self.transfers.waiting > 0)
                and (self.outages is None or self.fleet.wires.moves or not self.outages.links_lost(self))
            )
            or self.fleet.next_time() < math.inf
            or any(self.roster.coming)
            or (self.outages is not None and self.outages.restarts[id(self)] > 0 and self.recovery.waits)
        )

    # --- source of the engine -----------------------------------------------------------------------------------

    def advance(self, until: float) -> float:
        """Run the instances; see ``engine.Source``."""
        segment, time = self.fleet.run_until(until)
        if segment == -1:
            return math.inf
        self._told = segment
        return time

    def deliver(self) -> None:
        """Handle the report of ``advance``: a segment, an instance, a transfer or an arrival."""
        segment = self._told
        if segment < 0:
            instance, there = -2 - segment, len(self.fleet)
            if segment == COMES:
                self.engine.at_place(NORMAL, self._place_in_order, self.arrive, self._next(), True)
            elif segment <= ARRIVES:
                self.transfers.landed(ARRIVES - segment)
            elif instance < there:
                self.roster.emptied(instance)
            else:
                self.transfers.stalled(instance - there)
            return
        going = self.going.pop(segment, None)
        if going is None:
            if self._feed is None or self.transfers.waits(segment):
                self.transfers.reserved(segment)
                return
            request, instance = self.fleet.whose(segment)  # it was placed by the kernel
            going = request, instance, self.prompts[request] + 1, LATER, True
        request, instance, _, _, more = going
        if self._takes:
            self.batches.ended(instance, request)
        if more:
            self.start_next_leg(segment, going)
        else:
            self._over(request)

    def start_next_leg(self, segment: int, going: ActiveLeg) -> None:
        """Start the next leg of a request after a leg has ended."""
        request, instance, until, then, _ = going
        if then != LATER and self.roster.state[then] == READY:
            leg, pushed = Leg(then), True
        elif self.recovery.closed:
            self.recovery.held[segment] = going
            return
        else:
            leg, pushed = self._proceed(self.view, request, instance), False
            if type(leg) is not Leg:
                self.roster.refuse(leg, f"where request {request} goes on has to be a Leg", self._proceed)
            if leg.wishes:
                self.roster.apply(leg.wishes, self._proceed)
            self._check(leg, request, until, instance, self._proceed)
        now = self.engine.now
        if leg.delay_s > 0:
            self.roster.coming[leg.instance] += 1
            self._late[request] = segment
            self.engine.at(now + leg.delay_s, NORMAL, self._continue_after_delay, going, leg, pushed, now)
        else:
            self._continue_leg(segment, going, leg, pushed, now)

    def forget(self, gone: Mask, begin: int) -> None:
        """Forget requests before ``begin``, and the segments that are ``gone``."""
        state, transfers = self.state, self.transfers
        first = state.first_number
        self.refused[:] = [each for each in self.refused if first.get(each, each) >= begin]
        self.lost[:] = [each for each in self.lost if first.get(each, each) >= begin]
        if self.prefix is not None or self.parts.keeps_segments:
            return
        number = self.fleet.forget(state.forget(gone, self.parts.looks_back_s)).tolist()
        self.going = {number[segment]: going for segment, going in self.going.items()}
        self._late = {request: number[segment] for request, segment in self._late.items()}
        self.recovery.renumber(number)
        transfers.renumber(number)
        before = state.release(begin, self._period_s)
        if (forget_before := getattr(self.parts.routing, "forget_before", None)) is not None:
            forget_before(before)

    # --- arrival and end ----------------------------------------------------------------------------------------

    def arrive(self, request: int, known: bool = False) -> None:
        """Place a request, which policies learn of now unless it was ``known`` before."""
        view = self.view
        if not known:
            self._order.append(request)
        if self.recovery.closed:
            self.recovery.parked.append(request)
            return
        if self._totals[request] > self._largest:
            self.refuse(request)
            return
        admission = self.parts.admission
        if admission is not None and request < self.requests and not admission.admit(view, request):
            self.refuse(request)
            return
        leg = self._place(view, request)
        if type(leg) is not Leg:
            self.roster.refuse(leg, f"a place for request {request} has to be a Leg", self._place)
        if leg.wishes:
            self.roster.apply(leg.wishes, self._place)
        self._check(leg, request, 0, NOWHERE, self._place)
        if leg.instance == SHARED:
            self._share(request, leg)
            return
        last_token_s = self.state.last_given_s.get(request, NAN)
        if leg.delay_s > 0:
            self.roster.coming[leg.instance] += 1
            self.engine.at(self.engine.now + leg.delay_s, NORMAL, self._begin_late, request, leg, last_token_s)
        else:
            self.submit(request, leg, 0, last_token_s)

    def _begin_late(self, request: int, leg: Leg, last_token_s: float, rest: int | None = None) -> None:
        """Submit a delayed prompt, or one whose cached tokens are loaded from tiers below HBM: it computes ``rest``."""
        if rest is not None:
            self.fleet.expect(leg.instance, -1, -rest)
        if self.roster.state[leg.instance] < STOPPED:
            self.submit(request, leg, 0, last_token_s, loaded=rest is not None)
            self.roster.arrived(leg.instance)
        else:
            self.roster.arrived(leg.instance)
            self.leave(request)

    def _share(self, request: int, leg: Leg) -> None:
        """Put a new prompt into the shared queue of prefill instances, if any has the memory for it."""
        if self.batches.forming is None:
            self.roster.refuse(leg, "nothing takes prompts of the shared queue: it forms no batches", self._place)
        if self._pool is not self.roster.prefill:
            self._pool = self.roster.prefill
            self._widest = max(self._tokens[instance] for instance in self._pool)
        lengths, until, _, more = self._shape(request, leg.until, 0)
        if sum(lengths) > self._widest:
            self.refuse(request)
        else:
            last_token_s = self.state.last_given_s.get(request, NAN)
            self.batches.share(request, (*lengths, until, leg.then, last_token_s, more))

    def refuse(self, request: int) -> None:
        """End a request without service."""
        self._end_early(request, self.refused)

    def lose(self, request: int) -> None:
        """End a request that is lost with its instance."""
        self._end_early(request, self.lost)

    def leave(self, request: int) -> None:
        """Recover a request whose next instance is gone."""
        self.recovery.leave((request,))

    def _end_early(self, request: int, among: list[int]) -> None:
        """End a request without its last token, and later requests that depend on it."""
        first = self.state.first_number.get(request, request)
        among += [request, *self._clients.dropped(first)]
        self._over(request)

    def _over(self, request: int) -> None:
        """End a request, after its last token or before; its client may send another."""
        request = self.state.first_number.get(request, request)
        if (coming := self._clients.following(request)) is not None:
            self._due += 1
            self.engine.at(self.engine.now + coming.wait_s, NORMAL, self._admit, coming.request)

    def _admit(self, request: int) -> None:
        self.state.arrived(request)
        if self._host > 0:
            self.engine.at(self.engine.now + self._host, NORMAL, self.arrive, request)
        else:
            self.arrive(request)

    def discard_first_token(self, segment: int, going: ActiveLeg) -> int:
        """Count tokens that exist for the next instance after a leg; drop a first token that the next one emits."""
        request, _, until, _, _ = going
        have = self._handed(request, until)
        if have < until:
            self.fleet.drop_first_token(segment, self.state.last_given_s.get(request, NAN))
        return have

    # --- segments -----------------------------------------------------------------------------------------------

    def work(self, request: int, leg: Leg, have: int) -> Work | None:
        """Make the work of a leg from ``have`` existing tokens on; None if the instance lacks the memory."""
        work = self._shape(request, leg.until, have)
        context, new, generate = work[0]
        return None if context + new + generate > self._tokens[leg.instance] else work

    def _shape(self, request: int, until: int, have: int) -> Work:
        """Make the work of an instance for a request from ``have`` existing tokens to ``until``."""
        prompt, total = self.prompts[request], self._totals[request]
        if until == prompt:  # the pass that completes a prompt emits a token
            until += 1
        more = until < total or (until == prompt + 1 and self._emits_late)
        until = min(until, total)
        if have >= prompt:  # the last emitted token is not cached yet
            lengths = have - 1, 0, until - have
        elif until >= prompt:
            lengths = have, prompt - have, until - prompt
        else:
            lengths = have, until - have, 0
        flags = KEPT if more else HEARD if self._notify_all or (lengths[1] and self._takes) else CLOSES
        return lengths, until, flags, more

    def submit(self, request: int, leg: Leg, have: int, last_token_s: float, *, loaded: bool = False) -> None:
        """Submit the leg of a request from ``have`` existing tokens on, after loading its cached tokens."""
        work, instance = self.work(request, leg, have), leg.instance
        if work is None:
            self.refuse(request)
            return
        lengths, until, flags, more = work
        if self.tiers is not None and not have and not loaded:
            ready = self.tiers.load(instance, request, lengths[1], self.engine.now)
            if ready > self.engine.now:
                self.roster.coming[instance] += 1
                rest = lengths[1] - self.tiers.found(instance, request)
                self.fleet.expect(instance, 1, rest)
                self.engine.at(ready, NORMAL, self._begin_late, request, leg, last_token_s, rest)
                return
        if lengths[1] and self.roster.mode[instance] == MANUAL:
            self.roster.coming[instance] += 1
            self.batches.wait(instance, request, (*lengths, until, leg.then, last_token_s, more))
            return
        segment = self._begin(instance, request, lengths, flags, last_token_s)
        self.track_leg(segment, request, leg, work)

    def track_leg(self, segment: int, request: int, leg: Leg, work: Work) -> None:
        """Track a leg that an instance has started to serve."""
        _, until, flags, more = work
        if flags & NOTIFY:
            then = leg.then
            self.going[segment] = request, leg.instance, until, then, more
            if more and then != LATER:
                self._promise(segment, request, leg, until)

    def _promise(self, segment: int, request: int, leg: Leg, until: int) -> None:
        """Announce the next instance of a leg, so that its cache can be pushed during the leg."""
        if self.transfers.way in PUSHED and self.roster.state[leg.then] == READY and leg.then != leg.instance:
            self.transfers.promise(request, leg.instance, segment, Leg(leg.then), self._handed(request, until))

    def _handed(self, request: int, until: int) -> int:
        """Count tokens that exist for the next instance after a leg up to ``until``. [token]"""
        return until - 1 if self._emits_late and until == self.prompts[request] + 1 else until

    def _submit_batch(self, instance: int, batch: Sequence[tuple[int, Waiting]]) -> None:
        left = len(batch)
        for request, (context, new, generate, until, then, last_token_s, more) in batch:
            left -= 1
            flags = NOTIFY | (HOLD if more else 0) | (CLOSES if left == 0 else 0)
            segment = self._begin(instance, request, (context, new, generate), flags, last_token_s)
            self.going[segment] = request, instance, until, then, more
            if more and then != LATER:
                self._promise(segment, request, Leg(instance, until, then), until)
        for _ in batch:
            self.roster.arrived(instance)

    def _begin(self, instance: int, request: int, lengths: Lengths, flags: int, last_token_s: float) -> int:
        """Queue a segment; a cached start of its prompt needs no prefill, except the last token of the prompt."""
        now, prefix, submit = self.engine.now, self.prefix, self.fleet.submit
        if prefix is None or lengths[0] > 0 or lengths[1] == 0:
            return submit(instance, request, lengths, now, flags=flags, last_token_s=last_token_s)
        self.fleet.refresh(now)  # running requests have taken blocks since their last event
        cached = min(prefix.found(instance, request), lengths[1] - 1) // prefix.step * prefix.step
        here = submit(instance, request, lengths, now, flags=flags, last_token_s=last_token_s, cached=cached)
        prefix.keep(instance, request, here)
        return here

    def _continue_after_delay(self, going: ActiveLeg, leg: Leg, pushed: bool, ended: float) -> None:
        segment = self._late.pop(going[0])
        if self.fleet.status_of(segment) == SegmentStatus.LOST:
            self.discard_first_token(segment, going)
            self.leave(going[0])
        else:
            self._continue_leg(segment, going, leg, pushed, ended)
        self.roster.arrived(leg.instance)

    def _continue_leg(self, segment: int, going: ActiveLeg, leg: Leg, pushed: bool, ended: float) -> None:
        """Continue on the same instance, or on another after a transfer; the segment ended at ``ended``. [s]"""
        request, origin, until, _, _ = going
        if leg.instance != origin:
            have = self.discard_first_token(segment, going)
            self.transfers.begin(request, origin, segment, leg, have, ended, known=pushed)
            return
        self.transfers.forget(request)
        self.fleet.release(segment, self.engine.now)
        if until >= self._totals[request]:
            self._over(request)
        else:
            last = ended if until > self.prompts[request] else self.state.last_given_s.get(request, NAN)
            self.submit(request, leg, until, last)

    def _check(self, leg: Leg, request: int, have: int, origin: int, asked: object) -> None:
        """Refuse an invalid leg; ``asked`` is the method of the policy that returned it."""
        if fault := next(leg_faults(leg, have, self.roster.state, origin), ""):
            self.roster.refuse(f"request {request} on instance {quoted(leg.instance)}", fault, asked)

    # --- instances and ticks ------------------------------------------------------------------------------------

    def _instances_changed(self) -> None:
        self.state.rebind()
        views = self.fleet.views
        self._tokens = (views.rank_blocks * BLOCK_TOKENS - views.table["drafts"]).tolist()
        self._largest = min(max(self._tokens), self.site.setup.model.max_context)

    def _serves(self, instance: int) -> None:
        """Note that an instance serves, perhaps in another role."""
        self.batches.ask(instance)
        self.recovery.serves()

    def _move(self, wish: Move) -> None:
        """Move a waiting prompt to another instance, which the roster has checked to be ready."""
        request, origin, instance, _ = wish
        refuse = self.roster.refuse
        if self.prefix is not None:
            refuse(wish, "instances remember prompts here, and those that wait behind it may count on it")
        waiting = self.fleet.waiting(origin)
        found = waiting[self.fleet.segments.request[waiting] == request]
        if not found.size:
            refuse(wish, f"no prompt of it waits on instance {origin} with nothing computed")
        segment = int(found[0])
        whole = request, origin, END, LATER, False  # of a leg that is not tracked
        _, _, until, then, more = self.going.pop(segment, whole)
        until = until if more else END
        tokens, most = min(self._totals[request], until), self._tokens[instance]
        if tokens > most:
            refuse(wish, f"it needs {tokens} tokens of memory, and instance {instance} has {most}")
        self.fleet.withdraw(segment, self.engine.now)
        self.submit(request, Leg(instance, until, then), 0, self.state.last_given_s.get(request, NAN))

    def _every(self, period: float, decide: Callable[[ClusterView], Sequence[Wish]]) -> None:
        self.engine.at(self.engine.now + period, LAST, self._tick, period, decide)

    def _tick(self, period: float, decide: Callable[[ClusterView], Sequence[Wish]]) -> None:
        if self.at_work:
            self._looks += 1
            if self._looks > MOST_LOOKS:
                self.roster.refuse(
                    f"another look every {period:g} s", f"a run has {MOST_LOOKS:,} looks at most", decide
                )
            self._idle_looks = 0 if self._moves else self._idle_looks + 1
            self.view.refresh()
            self.roster.apply(decide(self.view), decide)
            self._every(period, decide)
