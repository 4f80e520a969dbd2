"""Define what a serving policy decides, as small protocols: a read-only view in, a wish with a reason out.

A policy looks and does not touch; see ``wishes`` for what it may ask for. It is a frozen dataclass of options,
registered by name; ``build`` makes its parts anew for every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Real
from typing import Any, ClassVar, Protocol, TypeVar

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, PolicyError, quoted
from disagg_sim.simulation.deployment import PARTS
from disagg_sim.simulation.site import Site, StepLimits
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Batch, Leg, Role, Wish


class Routing(Protocol):
    """Chooses the instance of every segment."""

    def place(self, view: ClusterView, request: int) -> Leg:
        """First leg of a request that has just arrived."""

    def proceed(self, view: ClusterView, request: int, origin: int) -> Leg:
        """Next leg of a request whose leg on ``origin`` has ended; on ``origin`` itself nothing is transferred."""


class Admission(Protocol):
    """Turns requests away at the door."""

    def admit(self, view: ClusterView, request: int) -> bool:
        """Whether to serve a request; those beyond the model's context or every memory are rejected before."""


class BatchForming(Protocol):
    """Prefill scheduling: what instances take of the prompts that wait for them, and of those that wait for any.

    The prompts of an instance whose limits say ``MANUAL`` wait until it takes them, as one pass of their own; those of
    the shared queue (``Leg(SHARED, ...)``) until any instance that serves prefill takes them.
    """

    def form(self, view: ClusterView, instance: int, waiting: Sequence[int]) -> Batch:
        """Asked while prompts wait, and again at ``wake_s``; ``waiting`` has the oldest first, 256 at most.

        A ``MANUAL`` instance is asked when it is free. Another is asked when a prompt comes to the shared queue and
        when one that it took has left, until it takes none: whether it has room is for the policy to say.
        """


class Roles(Protocol):
    """Changes what instances are for."""

    period_s: float

    def flips(self, view: ClusterView) -> Sequence[Wish]:
        """Asked every ``period_s`` [s]; flips, moves of prompts that wait, and changed limits."""


class Autoscaler(Protocol):
    """Sizes the pools."""

    period_s: float

    def resize(self, view: ClusterView) -> Sequence[Wish]:
        """Asked every ``period_s`` [s]; starts and stops."""


class Failover(Protocol):
    """Hears of failures, which leave the numbers of instances as they are.

    A phase may be without an instance then: ``view.prefill`` or ``view.decode`` is empty. New requests wait until
    both phases have one.
    """

    def failed(self, view: ClusterView, instances: Sequence[int], requests: Sequence[int]) -> Sequence[Wish]:
        """``instances`` are gone, and these requests left them; some begin again, under other numbers."""

    def restored(self, view: ClusterView, instances: Sequence[int]) -> Sequence[Wish]:
        """They serve again, empty, in the roles that they had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A policy, ready for one run: its first instances, and the protocols that it fills."""

    start: tuple[tuple[Sharding, Role], ...]  # instances that serve from time 0; their number is their index
    routing: Routing
    steps: StepLimits
    admission: Admission | None = None
    forming: BatchForming | None = None
    roles: Roles | None = None
    scaling: Autoscaler | None = None
    failover: Failover | None = None
    transfer: str = "pull"  # how its system moves caches, of ``transfers.WAYS``
    looks_back_s: float = 0.0  # longest window of the past that it asks for, where requests leave the run [s]
    keeps_segments: bool = False  # whether it remembers numbers of segments, so that the kernel may not forget any


class Policy(Protocol):
    """A serving policy: a frozen dataclass of its options."""

    #: Parts of a deployment that it takes; see ``deployment.PARTS``.
    needs: ClassVar[tuple[str, ...]]

    def build(self, site: Site) -> Parts:
        """Its parts for one run, with fresh state."""


#: Policies by name; ``register`` fills it, ``policies.registry`` loads the built-in ones.
POLICIES: dict[str, type[Policy]] = {}

Registered = TypeVar("Registered", bound=type[Policy])


def register(name: str) -> Callable[[Registered], Registered]:
    """Class decorator: make a policy known under ``name``; ``InputError`` when another has it, or it is no policy.

    Parameters
    ----------
    name
        As scenarios and ``policy_named`` call the policy; one line.

    Returns
    -------
    callable
        Takes the class, a dataclass, and returns it.

    Examples
    --------
    >>> register("vllm")(object)
    Traceback (most recent call last):
    disagg_sim.errors.InputError: ...
    """

    def add(policy: Registered) -> Registered:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise InputError(f"{quoted(name)} is not the name of a policy; allowed: one line")
        require_policy(name, policy)
        if not is_dataclass(policy):
            raise InputError(f"policy {name!r}: {policy.__name__} is not a dataclass; write @register above @dataclass")
        if name in POLICIES:
            raise InputError(f"policy {name!r} is registered twice: {POLICIES[name].__name__} and {policy.__name__}")
        POLICIES[name] = policy
        return policy

    return add


def require_policy(name: str, policy: Any) -> None:
    """Raise ``InputError`` where a class, or an object, is no policy: it has to have ``needs`` and ``build``."""
    needs = getattr(policy, "needs", None)
    if not isinstance(needs, tuple) or not needs or any(each not in PARTS for each in needs):
        raise InputError(f"policy {name!r}: needs is {quoted(needs)}; allowed: a tuple of some of {', '.join(PARTS)}")
    if not callable(getattr(policy, "build", None)):
        raise InputError(f"policy {name!r}: has no method build")


#: Protocols of ``Parts`` -> what they have to answer to; the first two must be there.
METHODS = {
    "routing": ("place", "proceed"),
    "steps": ("limits",),
    "admission": ("admit",),
    "forming": ("form",),
    "roles": ("flips",),
    "scaling": ("resize",),
    "failover": ("failed", "restored"),
}
NEEDED = ("routing", "steps")


def require_parts(policy: str, parts: object) -> Parts:
    """What ``build`` returned, if a run can begin with it; ``PolicyError`` with all that is wrong otherwise."""
    if not isinstance(parts, Parts):
        raise PolicyError(f"policy {policy!r}: build has to return Parts, not {quoted(parts)}")
    faults = []
    for name, methods in METHODS.items():
        part = getattr(parts, name)
        if part is None and name not in NEEDED:
            continue
        faults += [f"{name} has no method {each}" for each in methods if not callable(getattr(part, each, None))]
        if name in ("roles", "scaling"):
            period = getattr(part, "period_s", None)
            if not isinstance(period, Real):
                faults.append(f"period_s of {name} is {quoted(period)}, no number of seconds")
    if not isinstance(parts.start, Sequence) or not parts.start:
        faults.append(f"start is {quoted(parts.start)}; allowed: one (Sharding, Role) or more")
    else:
        for each in parts.start:
            two = isinstance(each, tuple) and len(each) == 2
            if not two or not isinstance(each[0], Sharding) or each[1] not in tuple(Role):
                faults.append(f"start holds {quoted(each)}; allowed: (Sharding, Role)")
                break
    if faults:
        raise PolicyError(f"policy {policy!r}: {'; '.join(faults)}")
    return parts
