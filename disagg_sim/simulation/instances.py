"""Manage the instances of a run: roles, start, stop, the wishes that change them, and the GPUs that they hold.

Past 400 lines: every change of an instance, from the wish for it to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Mask
from disagg_sim.domain import Sharding
from disagg_sim.errors import PolicyError, quoted
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.engine import FIRST, Engine
from disagg_sim.simulation.faults import place_of
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import AdmissionRule, Mode, RankChoice
from disagg_sim.simulation.options import LEAST_PERIOD_S, MOST_LOOKS
from disagg_sim.simulation.records import Decision
from disagg_sim.simulation.site import ExpectedTraffic, Site, StepLimits, decode_slots, prefill_rate
from disagg_sim.simulation.wishes import (
    Flip,
    Limits,
    Move,
    Role,
    SetLimits,
    Start,
    State,
    Stop,
    Wish,
    in_words,
    limits_fault,
    role_fault,
    wish_faults,
)

Index = NDArray[np.intp]
#: Limits of a role; the rest of them are those of an instance.
CHANGED = ("token_budget", "step_limit_s", "max_sequences", "max_prompts", "least_prefill", "mode")
PHASES = {"prefill": (Role.PREFILL, Role.BOTH), "decode": (Role.DECODE, Role.BOTH)}


def spec_of(policy: str, site: Site, steps: StepLimits, mapping: Sharding, role: Role) -> InstanceSpec:
    """One instance as the fleet wants it; it has room for the most sequences that any role of it may run."""
    limits, scheduler = _limits_of(policy, steps, mapping, role), site.scheduler
    most = max(_limits_of(policy, steps, mapping, each).max_sequences for each in Role)
    block_s, first_s = (-1.0, 0.0) if site.swap_s is None else site.swap_s(mapping)
    return InstanceSpec(
        swap_block_s=block_s,
        swap_first_s=first_s,
        blocks=site.blocks(mapping, limits),  # first: steps too large for the memory would fill the host's with a table
        table=site.table(mapping, most),
        max_sequences=most,
        hold_steps=limits.hold_steps,
        admission=AdmissionRule[scheduler.admission.upper()],
        watermark=scheduler.watermark,
        scheduling=site.scheduling,
        keeps_preempted=scheduler.keeps_preempted,
        finds_computed=scheduler.prefix_found == "computed",
        rank_choice=RankChoice[scheduler.rank_choice.upper()],
        # where nothing decodes, nothing is formed ahead
        steps_ahead=0 if role is Role.PREFILL else site.setup_of(mapping).steps_ahead(mapping),
    )


def _limits_of(policy: str, steps: StepLimits, mapping: Sharding, role: Role) -> Limits:
    limits = steps.limits(mapping, role)
    if fault := limits_fault(limits):
        where = f"policy {policy!r}: limits of a {role.name.lower()} instance"
        raise PolicyError(f"{where}: {fault}{place_of(steps.limits)}")
    return limits


class GpuBudget:
    """GPUs of a deployment, which the instances of one policy hold, or those of several models."""

    def __init__(self, deployment: ServedDeployment) -> None:
        self._deployment = deployment
        self._apart = len(deployment.systems) > 1
        self._rosters: list[Roster] = []
        self.instances: list[tuple[Roster, int]] = []  # of the whole cluster by number: roster, and number there
        self.dead: Callable[[str], int] = lambda _: 0  # failed GPUs of a system, or of any, that no instance holds [1]

    def join(self, roster: Roster) -> None:
        """Count the instances of a roster from now on."""
        self._rosters.append(roster)

    def enter(self, roster: Roster, instance: int) -> int:
        """Number an instance of a roster in the whole cluster."""
        self.instances.append((roster, instance))
        return len(self.instances) - 1

    def total(self, roster: Roster, mapping: Sharding | None = None) -> int:
        """GPUs for the instances of a roster: all but others' and dead ones; with a mapping, of its system. [1]"""
        system = self._system(roster, mapping)
        gpus = (self._deployment.gpus_on(system) if system else self._deployment.gpus) - self.dead(system)
        return gpus - sum(sum(_gpus_in_use(each, system)) for each in self._rosters if each is not roster)

    def free(self, roster: Roster, mapping: Sharding | None = None) -> int:
        """Those of ``total`` that its instances do not hold. [1]"""
        return self.total(roster, mapping) - sum(_gpus_in_use(roster, self._system(roster, mapping)))

    def _system(self, roster: Roster, mapping: Sharding | None) -> str:
        """Name of the system of a mapping; empty where all GPUs are alike, or all count."""
        return roster.site.setup_of(mapping).system.name if self._apart and mapping is not None else ""


def _gpus_in_use(roster: Roster, system: str) -> Iterator[int]:
    """GPUs of the instances that have not stopped, of a system or of any. [1]"""
    for gpus, state, mapping in zip(roster.gpus, roster.state, roster.mapping, strict=True):
        if state != State.STOPPED and (not system or roster.site.setup_of(mapping).system.name == system):
            yield gpus


class Roster:
    """Who serves what. Wishes are checked here, delayed, applied and logged."""

    def __init__(
        self, policy: str, site: Site, steps: StepLimits, *, engine: Engine, fleet: Fleet, budget: GpuBudget
    ) -> None:
        self.policy, self.site, self.steps = policy, site, steps
        self.engine, self.fleet, self.budget = engine, fleet, budget
        budget.join(self)
        self.number: list[int] = []  # of each instance in the whole cluster, which may have other models
        self.rows: Sequence[int] = ()  # of the trace, by request, where it has requests for other models
        self.mapping: list[Sharding] = []
        self.kind: list[int] = []  # number of its mapping among the different ones
        self._kinds: dict[Sharding, int] = {}
        self.role: list[Role] = []
        self.roles: tuple[Role, ...] = ()  # the same, and of ``state``, as policies see them
        self.states: tuple[State, ...] = ()
        self.mode: list[Mode] = []
        self.state: list[State] = []
        self.gpus: list[int] = []
        self.start_s: list[float] = []
        self.stop_s: list[float] = []
        self.flips: list[int] = []
        self._down: list[tuple[int, float, float]] = []  # instances that failed, and serve again: from, to [s]
        self._lives: dict[int, int] = {}  # failures of an instance so far; one that never failed is not there [1]
        self._failed_s: dict[int, float] = {}  # when instances failed that do not serve yet [s]
        self.coming: list[int] = []  # segments promised to it: in transfer, waiting for a batch [1]
        self.prefill_rate: list[float] = []  # what each serves of the expected traffic [request/s]
        self.seats: list[int] = []  # [1]
        self._links: dict[int, tuple[float, float]] = {}  # by kind: bandwidth of an instance [B/s], latency [s]
        self._served: dict[tuple[int, Role], tuple[float, int]] = {}  # by kind
        self.decisions: list[Decision] = []
        self.prefill: Index = np.empty(0, np.intp)  # ready instances that take prefill
        self.decode: Index = np.empty(0, np.intp)
        self.held_gpus = (0, 0, 0)  # by all instances, those of prefill, and the others [1]
        self.there: Mask = np.empty(0, np.bool_)  # instances that have neither stopped nor failed
        self._asked: object = None  # method of the policy whose wishes are carried out, for messages
        self.regrouped: Callable[[Index, Index], None] = _nothing  # called with those that prefill and that decode now
        self.joined: Callable[[], None] = _nothing  # called when instances have come
        self.serves: Callable[[int], None] = _nothing  # called when an instance serves, or serves in another role
        self.died: Callable[[int], None] = _nothing  # called when an instance has stopped without draining
        self.carries: Callable[[Move], None] = _nothing  # called for a move that names a ready instance

    def open(self, start: Sequence[tuple[Sharding, Role]]) -> None:
        """Let the first instances serve; the fleet has them already."""
        limits = cache(partial(_limits_of, self.policy, self.steps))
        for mapping, role in start:
            self._add(mapping, role, State.READY, limits(mapping, role))
        self._regroup()

    def check_looks(self, period: float, end: float) -> None:
        """``PolicyError`` for a policy that looks too often until ``end`` [s]."""
        wish = f"a look every {period} s"
        if not period >= LEAST_PERIOD_S:
            self.refuse(wish, f"allowed: from {LEAST_PERIOD_S} s")
        if end / period > MOST_LOOKS:
            self.refuse(
                wish,
                f"the trace lasts {end:g} s, {end / period:,.0f} looks; allowed: up to {MOST_LOOKS:,} looks, every "
                f"{end / MOST_LOOKS:.3g} s",
            )

    def apply(self, wishes: Sequence[Wish], asked: object) -> None:
        """Check, log and carry out what the method ``asked`` of the policy wishes."""
        self._asked = asked
        if type(wishes) not in (list, tuple):
            self.refuse(wishes, "wishes come in a list, which may be empty")
        for wish in wishes:
            if fault := next(wish_faults(wish), ""):
                self.refuse(quoted(wish), fault)
            if isinstance(wish, Flip):
                self._flip(wish)
            elif isinstance(wish, Start):
                self._start(wish)
            elif isinstance(wish, Stop):
                self._stop(wish)
            elif isinstance(wish, Move):
                self._move(wish)
            else:
                self._limit(wish)
        self._asked = None

    def refuse(self, wish: object, why: str, asked: object = None) -> NoReturn:
        """Stop the run over what the method ``asked`` answered, by default the one whose wishes are carried out.

        A text for ``wish`` stands in the message as it is.
        """
        where = f"policy {self.policy!r} at {self.engine.now:.6g} s"
        raise PolicyError(f"{where}: {in_words(wish)} is impossible: {why}{place_of(asked or self._asked)}")

    def fail(self, instances: Sequence[int]) -> None:
        """Instances are gone with all that they had; those that were to leave have left."""
        now = self.engine.now
        for instance in instances:
            self.fleet.abort(instance, now)
            self._lives[instance] = self._lives.get(instance, 0) + 1
            if self.state[instance] == State.DRAINING:
                self.state[instance], self.stop_s[instance] = State.STOPPED, now
            else:
                self.state[instance], self._failed_s[instance] = State.FAILED, now
        self._regroup()

    def restore(self, instances: Sequence[int]) -> None:
        """Failed instances serve again, in the role that they had or were to take."""
        now = self.engine.now
        for instance in instances:
            self._step_as_usual(instance)
            self.fleet.start(instance, now)
            self.state[instance] = State.READY
            self._down.append((instance, self._failed_s.pop(instance), now))
        self._regroup()
        for instance in instances:
            self.serves(instance)

    def out_of_service(self, end: float) -> NDArray[np.float64]:
        """Time for which each instance had failed, up to ``end``. [s]"""
        down = np.zeros(len(self.role))
        for instance, since, until in [*self._down, *((each, at, end) for each, at in self._failed_s.items())]:
            down[instance] += max(min(until, end) - since, 0.0)
        return down

    def emptied(self, instance: int) -> None:
        """An instance that drained has nothing left: it stops, or reloads for its new role."""
        if self.state[instance] == State.DRAINING:
            self.state[instance] = State.STOPPED
            self.stop_s[instance] = self.engine.now
            self._regroup()
        else:
            self._serve_after(self.site.flip_s, instance)

    def arrived(self, instance: int) -> None:
        """A promised segment has reached an instance; one that drains waits for the last."""
        self.coming[instance] -= 1
        if self.coming[instance] == 0 and self.state[instance] in (State.DRAINING, State.FLIPPING):
            self.fleet.drain(instance, self.engine.now)

    # --- wishes -------------------------------------------------------------------------------------------------

    def _flip(self, wish: Flip) -> None:
        instance = self._ready(wish, wish.instance)
        same = f"instance {instance} has that role" if wish.role == self.role[instance] else ""
        if fault := same or role_fault(self.mapping[instance], wish.role):
            self.refuse(wish, fault)
        self._spare(wish, instance, wish.role if self.site.flip_s == 0 else None)
        self.role[instance] = Role(wish.role)
        self.flips[instance] += 1
        self._log("flip", instance, wish)
        if self.site.flip_s > 0:
            self._leave(instance, State.FLIPPING)
        else:
            self._step_as_usual(instance)
        self._regroup()
        if self.site.flip_s == 0:
            self.serves(instance)

    def _start(self, wish: Start) -> None:
        if wish.mapping.gpus > (left := self.budget.free(self, wish.mapping)):
            gpus = self.budget.total(self, wish.mapping)
            self.refuse(wish, f"it takes {wish.mapping.gpus} GPUs, and {left} of {gpus} are free")
        mapping, role = wish.mapping, Role(wish.role)
        instance = self._add(mapping, role, State.STARTING, _limits_of(self.policy, self.steps, mapping, role))
        self._regroup()
        self._log("start", instance, wish)
        self.joined()
        self._serve_after(self.site.start_up_s, instance)

    def _stop(self, wish: Stop) -> None:
        instance = self._known(wish, wish.instance)
        if self.state[instance] not in (State.READY, State.STARTING):
            self.refuse(wish, f"instance {instance} is {self.state[instance].name.lower()}")
        if self.state[instance] == State.READY:
            self._spare(wish, instance, None)
        self._log("stop", instance, wish)
        if wish.drain:
            self._leave(instance, State.DRAINING)
        else:
            self.fleet.abort(instance, self.engine.now)
            self.state[instance], self.stop_s[instance] = State.STOPPED, self.engine.now
        self._regroup()
        if not wish.drain:
            self.died(instance)

    def _move(self, wish: Move) -> None:
        self._known(wish, wish.origin)
        instance = self._ready(wish, wish.instance)
        self.carries(wish)
        self._log("move", instance, wish)

    def _limit(self, wish: SetLimits) -> None:
        self._set(self._known(wish, wish.instance), wish.limits)
        self._log("limits", wish.instance, wish)

    # --- carried out --------------------------------------------------------------------------------------------

    def _add(self, mapping: Sharding, role: Role, state: State, limits: Limits) -> int:
        instance = len(self.role)
        if fault := role_fault(mapping, role):
            self.refuse(f"the role {role.name.lower()} of an instance with ffn", fault)
        if instance == len(self.fleet):
            self.fleet.add(spec_of(self.policy, self.site, self.steps, mapping, role), self.engine.now)
        kind = self._kinds.setdefault(mapping, len(self._kinds))
        if kind not in self._links:
            self._links[kind] = self.site.instance_bandwidth(mapping), self.site.wire(mapping).latency_s
        self.fleet.wires.join(*self._links[kind], int(mapping.gpus))
        self.number.append(self.budget.enter(self, instance))
        self.mapping.append(mapping)
        self.kind.append(kind)
        self.role.append(role)
        self.mode.append(Mode.CHUNKED)
        self.state.append(state)
        self.gpus.append(mapping.gpus)
        self.start_s.append(self.engine.now)
        self.stop_s.append(np.nan)
        self.flips.append(0)
        self.coming.append(0)
        if (kind, role) not in self._served:
            self._served[kind, role] = self._serves_of(mapping, role)
        rate, seats = self._served[kind, role]
        self.prefill_rate.append(rate)
        self.seats.append(seats)
        self._set(instance, limits)
        return instance

    def _serves_of(self, mapping: Sharding, role: Role) -> tuple[float, int]:
        """Prefill rate and seats of an instance, each in the role that it has for it; see ``site``."""
        shared, limits, site = role == Role.BOTH, self.steps.limits, self.site
        traffic = ExpectedTraffic(site.prompt_tokens, site.output_tokens, site.slo.tpot)
        prefill, decode = (limits(mapping, role if shared else each) for each in (Role.PREFILL, Role.DECODE))
        spec = spec_of(self.policy, site, self.steps, mapping, role)
        held = decode_slots(spec.table, decode, spec.blocks, traffic, shared=shared)
        return prefill_rate(spec.table, prefill, traffic), held

    def _serve_after(self, wait_s: float, instance: int) -> None:
        self.engine.at(self.engine.now + wait_s, FIRST, self._serve, instance, self._lives.get(instance, 0))

    def _serve(self, instance: int, life: int) -> None:
        if self._lives.get(instance, 0) != life:
            return  # it has failed since
        if self.state[instance] == State.FLIPPING:
            self._step_as_usual(instance)
            self.fleet.start(instance, self.engine.now)
        elif self.state[instance] != State.STARTING:
            return  # stopped while it started
        self.state[instance] = State.READY
        self._regroup()
        self.serves(instance)

    def _leave(self, instance: int, state: State) -> None:
        starting = self.state[instance] == State.STARTING
        self.state[instance] = state
        if starting:
            self.emptied(instance)
        elif self.coming[instance] == 0:
            self.fleet.drain(instance, self.engine.now)

    def _step_as_usual(self, instance: int) -> None:
        """Give an instance the limits of its role."""
        self._set(instance, _limits_of(self.policy, self.steps, self.mapping[instance], self.role[instance]))

    def _set(self, instance: int, limits: Limits) -> None:
        self.mode[instance] = limits.mode
        self.fleet.set_limits(instance, self.engine.now, {name: getattr(limits, name) for name in CHANGED})

    def _regroup(self) -> None:
        """Say anew who serves what; nobody else writes what policies see of it."""
        count, self.roles, self.states = len(self.role), tuple(self.role), tuple(self.state)
        state, role = (np.fromiter(column, np.int64, count) for column in (self.state, self.role))

        def ready(roles: tuple[Role, ...]) -> Index:
            found = np.flatnonzero((state == State.READY) & np.isin(role, roles))
            found.flags.writeable = False
            return found

        gpus, prefill = np.where(state == State.STOPPED, 0, self.gpus), role == Role.PREFILL
        self.held_gpus = int(gpus.sum()), int(gpus[prefill].sum()), int(gpus[~prefill].sum())
        self.there = state < State.STOPPED
        self.prefill, self.decode = ready(PHASES["prefill"]), ready(PHASES["decode"])
        self.regrouped(self.prefill, self.decode)

    def _ready(self, wish: Wish, instance: int) -> int:
        """The instance; rejected unless it serves."""
        known = self._known(wish, instance)
        if self.state[known] != State.READY:
            self.refuse(wish, f"instance {known} is {self.state[known].name.lower()}, not ready")
        return known

    def _known(self, wish: Wish, instance: int) -> int:
        if not 0 <= instance < len(self.role):
            self.refuse(wish, f"there is no instance {instance}; known: 0 to {len(self.role) - 1}")
        return int(instance)

    def _spare(self, wish: Wish, instance: int, role: Role | None) -> None:
        """Refuse what leaves a phase without a ready instance."""
        for phase, group in (("prefill", self.prefill), ("decode", self.decode)):
            if instance in group and group.size == 1 and role not in PHASES[phase]:
                self.refuse(wish, f"instance {instance} is the last that serves {phase}")

    def _log(self, kind: str, instance: int, wish: Wish) -> None:
        named = {name: self.number[getattr(wish, name)] for name in ("instance", "origin") if hasattr(wish, name)}
        if isinstance(wish, Move) and wish.request < len(self.rows):
            named["request"] = self.rows[wish.request]
        words = in_words(wish._replace(**named))
        self.decisions.append(Decision(self.engine.now, kind, self.number[instance], words, wish.reason))


def _nothing(*_: object) -> None:
    """Nobody listens."""
