"""Check the form of what a policy returns: limits, legs and wishes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from numbers import Integral, Real

from disagg_sim.domain import Sharding
from disagg_sim.errors import quoted
from disagg_sim.simulation.instance_variants import ffn_of
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.options import MOST_SEQUENCES
from disagg_sim.simulation.wishes import (
    END,
    LATER,
    SHARED,
    Flip,
    Leg,
    Limits,
    Move,
    Role,
    SetLimits,
    Start,
    State,
    Wish,
)

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
    """Why an instance cannot have a role: one whose feed-forward part has GPUs of its own decodes; empty where it can.

    >>> role_fault(Sharding(), Role.PREFILL)
    ''
    """
    return "attention and feed-forward GPUs decode alone" if role != Role.DECODE and ffn_of(mapping) is not None else ""
