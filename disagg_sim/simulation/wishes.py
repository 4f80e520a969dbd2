"""Values that a policy returns: roles, limits of steps, legs of requests, batches, and wishes with a reason.

A policy changes nothing itself. The cluster checks each wish, delays it by start-up or flip times, applies it and
writes it into the decision log; an impossible one stops the run with ``PolicyError``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.errors import quoted
from disagg_sim.simulation.instance_variants import ffn_of, own_setup
from disagg_sim.simulation.kernel.layout import Mode

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
    """Tell a wish in words, for the log and for messages.

    >>> in_words(Start(Sharding(tp_attn=4, tp_ffn=4), Role.DECODE, "load"))
    'start of a decode instance (tp 4)'
    """
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
