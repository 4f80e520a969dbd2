r"""What a cache of a size finds of the turns of sessions, without replaying it (Che's approximation).

An LRU cache forgets what was not used for its characteristic time T, at which what was used within T fills it. A prompt
of I tokens holds its place until the next turn of its session, or for T:

.. math:: \lambda\, E[I \min(T, g)] = C

with :math:`\lambda` prompts a second and g the time until that session comes to this cache again (never after its last
turn). A turn finds its last prompt there if g was below T. Source: H. Che, Y. Tung, Z. Wang, IEEE JSAC 20(7), 2002,
equations 6 and 7, summed over sessions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from disagg_sim.arrays import Floats, Ints
from disagg_sim.errors import InputError, above_zero
from disagg_sim.workload.trace import Trace

#: Halvings of the interval in which the characteristic time lies.
HALVINGS = 60


def characteristic_time(held: Floats, gaps: Floats, rate: float, capacity_tokens: float) -> float:
    """Find how long an LRU cache keeps what is not used again.

    Takes ``held`` and ``gaps`` (tokens of every prompt [token], and time until its session comes again, ``inf`` =
    never; (requests,) [s]) and ``rate`` [request/s]. Returns ``inf`` where the cache never fills [s].

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
    """Find what of every turn of sessions caches of a size hold.

    Takes ``caches`` of shape (requests,) (None = one for all) and ``rate`` [request/s] (None = those of the trace).
    Returns in whole blocks where the trace has blocks, shape (requests,) [token].

    >>> from disagg_sim.facts.load import load_traffic
    >>> from disagg_sim.workload.session_traces import session_trace
    >>> trace = session_trace(load_traffic("coding_agent"), rate=0.1, sessions=100, seed=1)
    >>> [f"{session_found(trace, size).sum() / trace.input_tokens.sum():.2f}" for size in (1e5, 1e6, 1e7)]
    ['0.12', '0.88', '0.88']
    """
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
