"""Values that a policy returns: roles, limits of steps, legs of requests, batches, wishes with a reason; their form.

A policy changes nothing itself. The cluster checks each wish, delays it by start-up or flip times, applies it and
writes it into the decision log; an impossible one stops the run with ``PolicyError``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.errors import quoted
from disagg_sim.simulation.instance_variants import ffn_of, own_setup
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.options import MOST_SEQUENCES

#: Most sequences of an instance unless a policy says otherwise; vLLM's default. [1]
MAX_SEQUENCES = 256
#: ``Leg.until`` of a leg that runs to the end of its request: the cluster clips it to the true length. [token]
END = 2**62
#: ``Leg.then`` of a leg whose successor is not known yet.
LATER = -1
#: ``Leg.instance`` of a new request that waits in the queue that all prefill instances share: one of them takes it.
SHARED = -2


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
    FAILED = 5  # gone with all that it had; holds its GPUs until it serves again


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How an instance forms its steps; see ``state.Mode``."""

    mode: Mode = Mode.CHUNKED
    token_budget: int = 2048  # decodes and prefill of one step; of a pass in PREFILL_FIRST [token]
    max_sequences: int = MAX_SEQUENCES  # running and in prefill together [1]
    max_prompts: int = 2**31  # prompts of one pass [1]
    hold_steps: int = 0  # most decode steps that prompts wait until every attention rank can take one; 0 = none; an
    # instance keeps those that it starts with [1]
    step_limit_s: float = np.inf  # of a SLO_AWARE step [s]
    least_prefill: int = 1  # of a SLO_AWARE step after a past so long that it exceeds the limit by itself [token]


class Leg(NamedTuple):
    """One segment of a request as a policy wishes it."""

    instance: int  # or ``SHARED``
    #: Tokens of the request, prompt and output, that exist when the leg ends: ``END``, or the prompt plus
    #: one for plain disaggregation (prefill emits the first token). [token]
    until: int = END
    #: Instance of the rest, where it is known already: caches that are pushed leave for it chunk by chunk.
    then: int = LATER
    #: Other wishes that this decision makes, applied before the leg starts.
    wishes: tuple[Wish, ...] = ()
    #: What the decision itself takes: the leg, or its transfer, starts that much later. [s]
    delay_s: float = 0.0


class Flip(NamedTuple):
    """Give an instance another role; it finishes its current work."""

    instance: int
    role: Role
    reason: str


class Start(NamedTuple):
    """Start an instance; it serves after the start-up time."""

    mapping: Sharding
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
    """Prompts that an instance takes now, or none and the time at which to ask again."""

    requests: tuple[int, ...]
    wake_s: float = np.inf  # where nothing runs: ask again at this time, arrivals ask anyway [s]


def in_words(wish: object) -> str:
    """Tell a wish in words, for the log and for messages."""
    if isinstance(wish, Flip):
        return f"flip of instance {wish.instance} to {Role(wish.role).name.lower()}"
    if isinstance(wish, Start):
        mapping = wish.mapping
        parallel = f"tp {mapping.tp_attn}" + "".join(
            f", {name} {value}" for name, value in (("dp", mapping.dp_attn), ("pp", mapping.pp)) if value > 1
        )
        at, ffn = own_setup(mapping), ffn_of(mapping)
        parallel += "" if ffn is None else f", ffn {ffn.mapping.gpus}"
        parallel += "" if at is None else f" on {at.system.name}"
        return f"start of a {Role(wish.role).name.lower()} instance ({parallel})"
    if isinstance(wish, Stop):
        return f"stop of instance {wish.instance}" + ("" if wish.drain else " without draining")
    if isinstance(wish, Move):
        return f"move of request {wish.request} from instance {wish.origin} to {wish.instance}"
    if isinstance(wish, SetLimits):
        return f"limits of instance {wish.instance}: {wish.limits}"
    return wish if isinstance(wish, str) else quoted(wish)


#: Most of whatever is counted of a step: the kernel keeps it in 64 bits. [1]
MOST_COUNTED = END


def limits_fault(limits: object) -> str:
    """What is wrong with limits; empty where nothing is."""
    if not isinstance(limits, Limits):
        return f"{quoted(limits)} is no Limits"
    counted = {"token_budget": MOST_COUNTED, "max_sequences": MOST_SEQUENCES, "max_prompts": MOST_COUNTED}
    counted["least_prefill"] = MOST_COUNTED
    for name, most in counted.items():
        value = getattr(limits, name)
        if not _is_whole(value) or not 1 <= value <= most:
            return f"{name} {quoted(value)} is out of range; allowed: whole numbers from 1 to {most}"
    if not _is_whole(limits.hold_steps) or not 0 <= limits.hold_steps <= MOST_COUNTED:
        return (
            f"hold_steps {quoted(limits.hold_steps)} is out of range; allowed: whole numbers from 0 to {MOST_COUNTED}"
        )
    if not isinstance(limits.step_limit_s, Real) or not limits.step_limit_s > 0:
        return f"step_limit_s {quoted(limits.step_limit_s)} is out of range; allowed: above 0 s"
    return "" if limits.mode in tuple(Mode) else f"mode {quoted(limits.mode)} is no Mode"


def wish_faults(wish: object) -> Iterator[str]:
    """Faults of the form of a wish; those behind the first may follow from it, or fail."""
    if not isinstance(wish, Wish):
        yield "it is no Flip, Start, Stop, Move or SetLimits"
        return
    if not isinstance(wish, Start) and not _is_whole(wish.instance):
        yield f"its instance is {quoted(wish.instance)}, no whole number"
    if isinstance(wish, Move) and not (_is_whole(wish.request) and _is_whole(wish.origin)):
        yield f"its request and origin are {quoted((wish.request, wish.origin))}, not whole numbers"
    if isinstance(wish, Flip | Start) and wish.role not in tuple(Role):
        yield f"its role is {quoted(wish.role)}, no Role"
    if isinstance(wish, Start) and not isinstance(wish.mapping, Sharding):
        yield f"its mapping is {quoted(wish.mapping)}, no Mapping"
    if not isinstance(wish.reason, str):
        yield f"its reason is {quoted(wish.reason)}, no text"
    if isinstance(wish, SetLimits):
        yield limits_fault(wish.limits)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def leg_faults(leg: Leg, have: int, states: Sequence[State], origin: int) -> Iterator[str]:
    """Faults of a leg of a request that has ``have`` tokens, on ``origin`` so far, as ``wish_faults``."""
    known = f"known: 0 to {len(states) - 1}"
    if not _is_whole(leg.instance):
        yield f"its instance is {quoted(leg.instance)}, no whole number"
    waits = leg.instance == SHARED and have == 0  # a new request, for whichever instance takes it
    if not waits and not 0 <= leg.instance < len(states):
        yield f"there is no such instance; {known}"
    if not waits and leg.instance != origin and states[leg.instance] != State.READY:
        yield f"the instance is {states[leg.instance].name.lower()}, not ready"
    if not _is_whole(leg.until):
        yield f"its end is {quoted(leg.until)}, no whole number of tokens"
    if leg.until <= have:
        yield f"it would end at token {leg.until}, and {have} tokens exist already"
    if not _is_whole(leg.then) or not LATER <= leg.then < len(states):
        yield f"it goes on on instance {quoted(leg.then)}, which is not there; {known}, or LATER"
    if not isinstance(leg.delay_s, Real) or not 0 <= leg.delay_s < math.inf or (waits and leg.delay_s):
        yield f"its delay_s is {quoted(leg.delay_s)}; allowed: from 0 s, and 0 s in the shared queue"


def role_fault(mapping: Sharding, role: Role) -> str:
    """Why an instance cannot have a role (one with feed-forward GPUs of its own decodes); empty where it can."""
    return "attention and feed-forward GPUs decode alone" if role != Role.DECODE and ffn_of(mapping) is not None else ""
