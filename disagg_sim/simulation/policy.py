"""What a serving system decides, as small protocols: a read-only view in, a wish with a reason out.

A policy looks and does not touch. The cluster checks each wish, delays it by start-up or flip times,
applies it and writes it into the decision log; an impossible one stops the run with ``PolicyError``.

A *system* is a frozen dataclass of options, registered by name; ``build`` makes its parts anew for every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from disagg_sim.domain import Mapping, Slo
from disagg_sim.errors import InputError, UnknownNameError, nearest, quoted
from disagg_sim.physics.kv_transfer import kv_bytes_per_request
from disagg_sim.physics.setting import Setting
from disagg_sim.simulation.deployment import PARTS, Replicas, ServedDeployment
from disagg_sim.simulation.faults import own_faults
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.kv_link import LinkSpec, instance_bandwidth
from disagg_sim.simulation.options import MOST_SEQUENCES

if TYPE_CHECKING:
    from disagg_sim.simulation.kernel.step_table import StepTable
    from disagg_sim.simulation.view import ClusterView

#: Most sequences of an instance unless a system says otherwise; vLLM's default. [1]
MAX_SEQUENCES = 256
#: ``Leg.until`` of a leg that runs to the end of its request: the cluster clips it to the true length. [token]
END = 2**62
#: ``Leg.then`` of a leg whose successor is not known yet.
LATER = -1


class Role(IntEnum):
    """What an instance is there for; routing keeps to it, the instance itself can run any segment."""

    PREFILL = 0
    DECODE = 1
    BOTH = 2


class State(IntEnum):
    """Where an instance is in its life."""

    STARTING = 0  # holds its GPUs, does not serve yet
    READY = 1
    DRAINING = 2  # finishes what it has, then stops
    FLIPPING = 3  # finishes what it has, then reloads for the new role
    STOPPED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How an instance forms its steps; see ``state.Mode``."""

    mode: Mode = Mode.CHUNKED
    token_budget: int = 2048  # decodes and prefill of one step; of a pass in PREFILL_FIRST [token]
    max_sequences: int = MAX_SEQUENCES  # running and in prefill together [1]
    max_prompts: int = 2**31  # prompts of one pass [1]
    step_limit_s: float = np.inf  # of a SLO_AWARE step [s]


class Leg(NamedTuple):
    """One segment of a request as a policy wishes it."""

    instance: int
    #: Tokens of the request, prompt and output, that exist when the leg ends: ``END``, or the prompt plus
    #: one for plain disaggregation (prefill emits the first token). [token]
    until: int = END
    #: Instance of the rest, where it is known already: its cache is pushed chunk by chunk.
    then: int = LATER
    #: Other wishes that this decision makes, applied before the leg starts.
    wishes: tuple[Wish, ...] = ()
    #: What the decision itself takes: the leg, or its transfer, starts that much later. [s]
    delay_s: float = 0.0


class Flip(NamedTuple):
    """Give an instance another role; it finishes what it has."""

    instance: int
    role: Role
    reason: str


class Start(NamedTuple):
    """Start an instance; it serves after the start-up time."""

    mapping: Mapping
    role: Role
    reason: str


class Stop(NamedTuple):
    """Stop an instance: it takes nothing new and leaves when it is empty, or at once and its requests fail."""

    instance: int
    reason: str
    drain: bool = True


class Move(NamedTuple):
    """Give a prompt that waits on an instance, none of it computed yet, to another: nothing has to be transferred."""

    request: int
    origin: int
    instance: int
    reason: str


class SetLimits(NamedTuple):
    """Change how an instance forms its steps."""

    instance: int
    limits: Limits
    reason: str


Wish = Flip | Start | Stop | Move | SetLimits


class Batch(NamedTuple):
    """A prefill batch to run now, or none and the time at which to ask again."""

    requests: tuple[int, ...]
    wake_s: float = np.inf  # where nothing runs: ask again at this time, arrivals ask anyway [s]


class Routing(Protocol):
    """Chooses the instance of every segment."""

    def place(self, view: ClusterView, request: int) -> Leg:
        """First leg of a request that has just arrived."""
        ...

    def proceed(self, view: ClusterView, request: int, origin: int) -> Leg:
        """Next leg of a request whose leg on ``origin`` has ended; on ``origin`` itself nothing is transferred."""
        ...


class Admission(Protocol):
    """Turns requests away at the door."""

    def admit(self, view: ClusterView, request: int) -> bool:
        """Whether to serve it; what exceeds the model's context or every memory is refused without asking."""
        ...


class BatchForming(Protocol):
    """Prefill scheduling: forms the prefill batches of instances whose limits say ``MANUAL``."""

    def form(self, view: ClusterView, instance: int, waiting: Sequence[int]) -> Batch:
        """Asked when the instance is free and prompts wait, oldest first, and at ``wake_s``."""
        ...


class StepLimits(Protocol):
    """Decode scheduling: how the instances of a role fill their steps."""

    def limits(self, mapping: Mapping, role: Role) -> Limits:
        """Rules and bounds of an instance, when it starts or takes the role."""
        ...


class Roles(Protocol):
    """Changes what instances are for."""

    period_s: float

    def flips(self, view: ClusterView) -> Sequence[Wish]:
        """Asked every ``period_s`` [s]; flips, moves of prompts that wait, and changed limits."""
        ...


class Autoscaler(Protocol):
    """Sizes the pools."""

    period_s: float

    def resize(self, view: ClusterView) -> Sequence[Wish]:
        """Asked every ``period_s`` [s]; starts and stops."""
        ...


class Listener(Protocol):
    """Hears of finished requests, for policies that keep accounts of their own."""

    def finished(self, view: ClusterView, request: int, instance: int) -> None:
        """A request has emitted its last token on ``instance``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A system, ready for one run: its first instances, and the protocols that it fills."""

    start: tuple[tuple[Mapping, Role], ...]  # instances that serve from time 0; their number is their index
    routing: Routing
    steps: StepLimits
    admission: Admission | None = None
    forming: BatchForming | None = None
    roles: Roles | None = None
    scaling: Autoscaler | None = None
    listener: Listener | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a system may know before its run."""

    setting: Setting
    deployment: ServedDeployment
    slo: Slo
    link: LinkSpec
    link_bandwidth: float  # of one GPU, one way [B/s]
    link_latency_s: float  # [s]
    tables: Callable[[Mapping, int], StepTable]  # step times of an instance and its most sequences
    blocks: Callable[[Mapping, Limits], int]  # KV blocks that it holds [block]
    rng: Callable[[str], np.random.Generator]  # random stream of that name
    start_up_s: float  # from the wish to the first token served [s]
    flip_s: float  # a change of role takes the instance out of service that long [s]
    prompt_tokens: float  # mean of the traffic that is expected [token]
    output_tokens: float  # mean of the traffic that is expected [token]

    def table(self, mapping: Mapping, max_sequences: int = MAX_SEQUENCES) -> StepTable:
        """Step times of an instance that decodes up to ``max_sequences`` [1]."""
        return self.tables(mapping, max_sequences)

    def instance_bandwidth(self, mapping: Mapping) -> float:
        """Into or out of an instance, one way. [B/s]"""
        return instance_bandwidth(self.setting, mapping, self.link_bandwidth)

    def kv_bytes(self, tokens: int) -> float:
        """Cache of ``tokens`` of one request, each element once. [B]"""
        return kv_bytes_per_request(self.setting.model, self.setting.precision, tokens)

    def transfer_s(self, tokens: int, sender: Mapping, receiver: Mapping) -> float:
        """Time to move the cache of ``tokens`` between two instances that share their links with nobody. [s]"""
        bandwidth = min(self.instance_bandwidth(sender), self.instance_bandwidth(receiver))
        return self.link_latency_s + self.kv_bytes(tokens) / bandwidth

    def instances(self, *parts: tuple[str, Role]) -> tuple[tuple[Mapping, Role], ...]:
        """Instances of parts of the deployment, one entry each: ``site.instances(("prefill", Role.PREFILL))``."""
        return tuple(
            (replicas.mapping, role)
            for part, role in parts
            for replicas in self.deployment.part(part)
            for _ in range(replicas.instances)
        )


#: Role of the instances of a part when they start.
ROLE_OF = {"prefill": Role.PREFILL, "decode": Role.DECODE, "colocated": Role.BOTH, "pairs": Role.BOTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class AsPlanned:
    """Step limits as the parts of the deployment say, as usual for the policy where these are silent.

    What a part says holds before an option of the policy. ``batch`` of a part that decodes is the most sequences that
    run together, ``token_budget`` the most tokens of a step; the budget of the policy grows to a token a sequence.
    ``batch`` of a prefill part means passes of so many whole prompts, of at most ``token_budget`` tokens, or of what
    they have at the expected lengths. A policy that prefills in chunks, or forms batches by a rule of its own, has no
    such passes: it keeps to its own limits there.
    """

    site: Site
    usual: StepLimits
    parts: tuple[str, ...]  # that the policy takes
    alone: bool = False  # one phase an instance: passes of whole prompts, no room for prefill in decode steps

    def limits(self, mapping: Mapping, role: Role) -> Limits:
        """See ``StepLimits``."""
        usual = self.usual.limits(mapping, role)
        part = self._part(mapping, role)
        if part is None:
            return usual
        if part.batch is None:
            return replace(usual, token_budget=part.token_budget or usual.token_budget)
        if role != Role.PREFILL:
            budget = part.token_budget or max(part.batch, 1 if self.alone else usual.token_budget)
            return replace(usual, token_budget=budget, max_sequences=part.batch)
        if not self.alone:
            return usual
        budget = part.token_budget or math.ceil(part.batch * self.site.prompt_tokens)
        resident = min(2 * mapping.pp * part.batch, MOST_SEQUENCES)  # in the pipeline and leaving, as in memory
        return Limits(mode=Mode.PREFILL_FIRST, token_budget=budget, max_prompts=part.batch, max_sequences=resident)

    def _part(self, mapping: Mapping, role: Role) -> Replicas | None:
        """What the deployment says of instances of that mapping; of two entries of one mapping the limits are equal."""
        own = (self.site.deployment.part(part) for part in self.parts if ROLE_OF[part] == role)
        return next((each for replicas in own for each in replicas if each.mapping == mapping), None)


class System(Protocol):
    """A serving system: a frozen dataclass of its options."""

    #: Parts of a deployment that it takes; see ``deployment.PARTS``.
    needs: ClassVar[tuple[str, ...]]

    def build(self, site: Site) -> Parts:
        """Its parts for one run, with fresh state."""
        ...


#: Systems by name; ``disagg_sim.simulation.policies`` fills it.
SYSTEMS: dict[str, type[System]] = {}

Registered = TypeVar("Registered", bound=type[System])


def register(name: str) -> Callable[[Registered], Registered]:
    """Class decorator: make a system known under ``name``; ``InputError`` when another has it, or it is no system."""

    def add(system: Registered) -> Registered:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise InputError(f"{quoted(name)} is no name of a system; allowed: one line")
        require_system(name, system)
        if not is_dataclass(system):
            raise InputError(f"system {name!r}: {system.__name__} is no dataclass; @register stands above @dataclass")
        if name in SYSTEMS:
            raise InputError(f"system {name!r} is registered twice: {SYSTEMS[name].__name__} and {system.__name__}")
        SYSTEMS[name] = system
        return system

    return add


def require_system(name: str, system: Any) -> None:
    """Raise ``InputError`` where a class, or an object, is no system: it has to have ``needs`` and ``build``."""
    needs = getattr(system, "needs", None)
    if not isinstance(needs, tuple) or not needs or any(each not in PARTS for each in needs):
        raise InputError(f"system {name!r}: needs is {quoted(needs)}; allowed: a tuple of some of {', '.join(PARTS)}")
    if not callable(getattr(system, "build", None)):
        raise InputError(f"system {name!r}: has no method build")


def systems() -> dict[str, type[System]]:
    """All registered systems by name, the built-in ones first."""
    import disagg_sim.simulation.policies  # noqa: F401  fills the registry

    return SYSTEMS


def title_of(system: type[System]) -> str:
    """What a system does, in one line: the first of its docstring; empty where nobody wrote one."""
    written = (system.__doc__ or "").strip()
    made = written.startswith(f"{system.__name__}(")  # ``dataclass`` puts the signature where nothing stands
    return "" if made or not written else written.splitlines()[0]


def system_named(name: str, **options: Any) -> System:
    """The registered system of that name with some of its options changed.

    Raises
    ------
    UnknownNameError
        No such system, or no such option of it; the text names the nearest.
    PolicyError
        A user's own system that cannot be made, with the error that it raised as the cause.
    """
    if name not in systems():
        names = ", ".join(sorted(SYSTEMS))
        raise UnknownNameError(f"unknown system {quoted(name)}{nearest(name, SYSTEMS)}; known: {names}")
    known = [field.name for field in fields(SYSTEMS[name])]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise UnknownNameError(
                f"system {name!r} has no option {quoted(option)}{nearest(option, known)}; "
                f"it has {', '.join(known) or 'none'}"
            )
    with own_faults(f"system {name!r}", SYSTEMS[name].__module__):
        return SYSTEMS[name](**options)
