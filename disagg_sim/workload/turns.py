r"""Turns of sessions as one joint law: new tokens, cached past and answer, with what caches of a size find of them.

A sample of sessions gives prompts, answers and the gaps between turns; Che's approximation what
caches find of each turn at any rate of sessions, so that no trace of that rate is replayed. An LRU cache forgets what
was not used for its characteristic time T, at which what was used within T fills it. A prompt of I tokens holds its
place until the next turn of its session, or for T:

.. math:: \lambda\, E[I \min(T, g)] = C

with :math:`\lambda` prompts a second and g the time until that session comes to this cache again (never after its last
turn). A turn finds its last prompt there if g was below T. Tiers below HBM serve what a larger cache finds: differences
of one curve,

.. math:: s_t = h(c_t) - h(c_{t-1})

with the rooms c as they are where every tier gets every block, and their sums where a tier gets what the one above
forgets. Sources: physics page, section 8 (Prefix reuse); H. Che, Y. Tung, Z. Wang, IEEE JSAC 20(7), 2002, equations 6
and 7, summed over sessions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from disagg_sim.arrays import Floats, Ints
from disagg_sim.errors import InputError, above_zero
from disagg_sim.facts.load import load_traffic
from disagg_sim.techniques.prefix.requests import prefixes_of
from disagg_sim.techniques.prefix.requests_hits import hit_curve, routed
from disagg_sim.workload.lengths import Lengths, observed_lengths
from disagg_sim.workload.synthetic import session_trace
from disagg_sim.workload.trace import Trace

#: Halvings of the interval in which the characteristic time lies.
HALVINGS = 60


def characteristic_time(held: Floats, gaps: Floats, rate: float, capacity_tokens: float) -> float:
    """Find how long an LRU cache keeps what is not used again; ``inf`` where it never fills. [s]

    20 prompts a second of 2500 tokens that nobody uses again fill a million tokens in 20 s:

    >>> round(characteristic_time(np.full(4, 2500.0), np.full(4, np.inf), 20.0, 1e6), 6)
    20.0
    """

    def filled(time: float) -> float:
        return rate * float(np.mean(held * np.minimum(time, gaps)))

    ever = np.isfinite(gaps)
    if math.isinf(capacity_tokens) or (ever.all() and filled(float(gaps.max())) <= capacity_tokens):
        return math.inf
    low, high = 0.0, 1.0
    while filled(high) < capacity_tokens:
        low, high = high, 2.0 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if filled(middle) < capacity_tokens else (low, middle)
    return high


def session_found(
    trace: Trace,
    capacity_tokens: float,
    *,
    shared_tokens: int = 0,
    caches: ArrayLike | None = None,
    rate: float | None = None,
) -> Ints:
    """Find what of every turn of sessions caches of a size hold, in whole blocks where the trace has blocks. [token]"""
    if trace.sessions is None:
        raise InputError(f"trace {trace.name} has no sessions; allowed: one whose requests are turns of sessions")
    above_zero("capacity_tokens", capacity_tokens, "tokens")
    which = np.zeros(len(trace), dtype=np.int64) if caches is None else np.asarray(caches, dtype=np.int64)
    session = trace.sessions.session
    order = np.lexsort((np.arange(len(trace)), which, session))  # the visits of a session to a cache one by one
    again = (np.diff(session[order]) == 0) & (np.diff(which[order]) == 0)
    before, after = order[:-1][again], order[1:][again]
    gaps = np.full(len(trace), np.inf)
    gaps[before] = trace.arrival[after] - trace.arrival[before]
    block = 1 if trace.prefix is None else trace.prefix.block_tokens
    held = (trace.input_tokens // block * block).astype(np.float64)
    shared = min(shared_tokens // block * block, int(held.min()))
    each = (trace.rate if rate is None else rate) / np.unique(which).size
    time = characteristic_time(held - shared, gaps, each, max(capacity_tokens - shared, block))
    found = np.full(len(trace), float(shared))
    kept = gaps[before] < time
    found[after[kept]] = held[before[kept]]
    whole: Ints = np.minimum(found, trace.input_tokens - 1).astype(np.int64)
    return whole


#: Sessions that stand for a traffic: the hit rate of recorded agents is within 0.5 points of that of 4,000.
SESSIONS = 400
#: Their seed: the law is the same each time.
SEED = 0
#: Classes of prompts in which the turns of sessions are kept.
CLASSES = 64
#: What stands between the name of a traffic and its caches.
MARK = "/turns"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCaches:
    """Caches that the turns of sessions meet."""

    sessions_per_s: float  # that begin, over all caches [1/s]
    rooms: tuple[tuple[str, float], ...] = ()  # tier, and what one cache holds there, the fastest first [token]
    caches: int = 1  # instances, or attention ranks, each with a cache of its own [1]
    sticky: bool = True  # whether a session stays with a cache, else each turn goes to any of them
    pooled: tuple[str, ...] = ()  # tiers that all caches share; their rooms are those of all together
    back: bool = False  # whether a tier gets what the one above forgets, else every block
    tpot_s: float = 0.0  # of answers, which lengthen the time to the next turn [s]


def turns_text(caches: TurnCaches) -> str:
    """Name caches of turns in the tables of a sweep."""
    rooms = [f"{name}{tokens:.0f}{'all' if name in caches.pooled else ''}" for name, tokens in caches.rooms]
    said = [f"{caches.sessions_per_s:.12g}", *rooms]
    said += [f"caches{caches.caches}"] if caches.caches > 1 else []
    said += [] if caches.sticky else ["anywhere"]
    said += ["back"] if caches.back else []
    said += [f"tpot{caches.tpot_s:.12g}"] if caches.tpot_s else []
    return MARK + "_".join(said)


def turns_of(traffic: str) -> tuple[str, TurnCaches] | None:
    """Part the name of a traffic from the caches that its turns meet; None where it says none."""
    name, mark, said = traffic.partition(MARK)
    if not mark:
        return None
    rate, *parts = said.split("_")
    found = TurnCaches(sessions_per_s=float(rate))
    for part in parts:
        read = re.fullmatch(r"([a-z]+?)(\d[\d.e-]*|inf)?(all)?", part)
        if read is None:
            raise InputError(f"traffic {traffic!r}: {part!r} is no part of the name of a cache")
        word, number, pooled = read.groups()
        if number is None:
            found = replace(found, sticky=False) if word == "anywhere" else replace(found, back=True)
        elif word == "caches":
            found = replace(found, caches=int(number))
        elif word == "tpot":
            found = replace(found, tpot_s=float(number))
        else:
            found = replace(found, rooms=(*found.rooms, (word, float(number))))
            found = replace(found, pooled=(*found.pooled, word)) if pooled else found
    return name, found


@lru_cache
def turn_lengths(traffic: str, caches: TurnCaches) -> Lengths:
    """Make the joint law of new tokens, cached past and answer of the turns of a traffic's sessions."""
    trace, shared_tokens = _sample(traffic)
    trace = answered(trace, caches.tpot_s)
    found, tiers = found_by_tier(trace, caches, mean_turns(traffic) * caches.sessions_per_s, shared_tokens)
    return joint_lengths(trace.input_tokens, trace.output_tokens, found, tiers)


@lru_cache
def _sample(traffic: str) -> tuple[Trace, int]:
    """Sessions that stand for a traffic, and the start that all their prompts share. [token]"""
    law = load_traffic(traffic)
    if law.session is None:
        raise InputError(f"traffic {traffic} has no sessions; allowed: one with the key 'session'")
    return session_trace(law, rate=1.0, sessions=SESSIONS, seed=SEED), law.session.shared_tokens


def mean_turns(traffic: str) -> float:
    """Count the turns of a session of a traffic, on average. [request]"""
    return len(_sample(traffic)[0]) / SESSIONS


def joint_lengths(isl: Ints, osl: Ints, past: Ints, tiers: tuple[tuple[str, float], ...] = ()) -> Lengths:
    """Take turns of sessions as one joint law, of few prompts that stand for all."""
    found = observed_lengths(isl, osl)
    order = np.argsort(isl, kind="stable")
    parts = [part for part in np.array_split(isl[order].astype(np.float64), CLASSES) if part.size]
    return replace(
        found,
        isl=np.array([part.mean() for part in parts]),
        isl_weight=np.array([part.size / isl.size for part in parts]),
        cached=prefixes_of(isl.astype(np.float64), past, tiers, few=True),
    )


def answered(trace: Trace, tpot_s: float) -> Trace:
    """Delay the turns of sessions by the answers before them; in the order of the new arrivals."""
    if not tpot_s or trace.sessions is None:
        return trace
    order = np.argsort(trace.sessions.session, kind="stable")
    session = trace.sessions.session[order]
    spent = np.cumsum(trace.output_tokens[order] * tpot_s) - trace.output_tokens[order] * tpot_s
    first = np.concatenate([[True], np.diff(session) != 0])
    begun = spent[np.maximum.accumulate(np.where(first, np.arange(session.size), 0))]
    later = np.empty(len(trace))
    later[order] = spent - begun
    arrival = trace.arrival + later
    rows = np.argsort(arrival, kind="stable")
    return replace(
        trace,
        arrival=arrival[rows],
        input_tokens=trace.input_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        prefix=None if trace.prefix is None else trace.prefix.take(rows),
        sessions=trace.sessions.take(rows),
    )


def trace_lengths(trace: Trace, caches: TurnCaches) -> Lengths:
    """Make the joint law of the requests of a trace, with what an exact replay of its blocks finds.

    >>> trace = session_trace(load_traffic("coding_agent"), rate=0.2, sessions=30, seed=1)
    >>> law = trace_lengths(trace, TurnCaches(sessions_per_s=0.2, rooms=(("hbm", 1e5), ("dram", 1e7)), caches=2))
    >>> [(name, f"{share:.2f}") for name, share in law.cached.reuse.tiers]
    [('hbm', '0.74'), ('dram', '0.26')]
    """
    one = caches.sticky and trace.sessions is None
    number = 1 if one else caches.caches
    more = caches.caches / number
    rooms = tuple((name, tokens if name in caches.pooled else tokens * more) for name, tokens in caches.rooms)
    which = None if number == 1 else routed(trace, number, sticky=caches.sticky, seed=SEED)
    curves = {False: hit_curve(trace, which)}
    curves[True] = hit_curve(trace) if caches.pooled and which is not None else curves[False]
    own = replace(caches, rooms=rooms, caches=number)
    found, tiers = _in_tiers(own, lambda room, pooled: curves[pooled].found(room), len(trace))
    return joint_lengths(trace.input_tokens, trace.output_tokens, found, tiers)


def found_by_tier(
    trace: Trace, caches: TurnCaches, rate: float, shared_tokens: int
) -> tuple[Ints, tuple[tuple[str, float], ...]]:
    """Find what of every turn caches hold, in any tier [token], and which share of it each tier serves [1]."""
    which = routed(trace, caches.caches, sticky=caches.sticky, seed=SEED)

    def found(room: float, pooled: bool) -> Ints:
        if room <= shared_tokens:
            return np.zeros(len(trace), dtype=np.int64)
        where = None if pooled else which
        return session_found(trace, room, shared_tokens=shared_tokens, caches=where, rate=rate)

    return _in_tiers(caches, found, len(trace))


def _in_tiers(
    caches: TurnCaches, found: Callable[[float, bool], Ints], requests: int
) -> tuple[Ints, tuple[tuple[str, float], ...]]:
    """Differences of what caches find as the tiers add up, by room of a cache, or of all together."""
    held, served, above = np.zeros(requests, dtype=np.int64), [], 0.0
    for name, tokens in caches.rooms:
        pooled = name in caches.pooled
        room = tokens + (above * (caches.caches if pooled else 1) if caches.back else 0.0)
        above = above if pooled else above + tokens
        before = int(held.sum())
        held = np.maximum(held, found(room, pooled))
        served.append((name, int(held.sum()) - before))
    total = int(held.sum())
    return held, tuple((name, tokens / total) for name, tokens in served if tokens) if total else ()
