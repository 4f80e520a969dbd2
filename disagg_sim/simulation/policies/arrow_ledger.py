"""Arrow's ledger: what its scheduler knows of each instance, and its choices by it, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.simulation.compiled import entry

#: Columns of the ledger, one row an instance. The first three are of its predictor, see ``Predictor``.
CONSTANT, LINEAR, QUADRATIC = range(3)
FREE = 3  # when the prompts in its queue will be done, on its own clock [s]
AHEAD = 4  # of that clock to the real one: what its last prompt took longer than predicted, in all [s]
INTERVAL = 5  # mean time between its decode steps over the window; 0 without one [s]
HELD = 6  # MaxRunningTokens [token]
SEATS = 7  # sequences that it can run [1]


@entry
def soonest(among: Any, ledger: Any, queued: Any, running: Any, coming: Any, waiting: Any, now: float) -> Any:
    """Least queue delay in pool P and in D->P: instance, delay [s]; -1 and infinity of an empty pool."""
    pure, mixed = -1, -1
    pure_s, mixed_s = np.inf, np.inf
    for i in among:
        delay = max(ledger[i, FREE] + ledger[i, AHEAD] - now, 0.0) if queued[i] > 0 else 0.0
        if running[i] > 0 or coming[i] > 0 or waiting[i] > 0:
            if delay < mixed_s:
                mixed, mixed_s = i, delay
        elif delay < pure_s:
            pure, pure_s = i, delay
    return pure, pure_s, mixed, mixed_s


@entry
def take(ledger: Any, i: int, tokens: int, queued: Any, now: float) -> float:
    """Book a prompt on an instance: its predicted end, on the clock of the instance. [s]"""
    time = ledger[i, CONSTANT] + tokens * (ledger[i, LINEAR] + tokens * ledger[i, QUADRATIC])
    start = now - ledger[i, AHEAD]
    if queued[i] > 0:
        start = max(start, ledger[i, FREE])
    ledger[i, FREE] = start + time
    return float(start + time)


@entry
def place(
    among: Any, ledger: Any, queued: Any, running: Any, coming: Any, waiting: Any, tokens: int, ttft: float, now: float
) -> Any:
    """First steps of algorithm 1: an instance of P, else of D->P within the limit, booked, and the predicted end.

    Without one: minus 1 minus the instance to take late, nothing booked.
    """
    pure, pure_s, mixed, mixed_s = soonest(among, ledger, queued, running, coming, waiting, now)
    for i, delay in ((pure, pure_s), (mixed, mixed_s)):
        if i >= 0:
            time = ledger[i, CONSTANT] + tokens * (ledger[i, LINEAR] + tokens * ledger[i, QUADRATIC])
            if delay + time <= ttft:
                return i, take(ledger, i, tokens, queued, now)
    return -1 - (pure if pure >= 0 else mixed), 0.0


@entry
def lightest(among: Any, running: Any, coming: Any, waiting: Any, prompts: Any) -> Any:
    """Fewest tokens in pool D and in P->D: instance, tokens, -1 of an empty pool.

    Tokens of an instance are those of all requests that it decodes, is being sent, or keeps waiting for memory.
    """
    pure, mixed = -1, -1
    pure_tokens, mixed_tokens = 0, 0
    for i in among:
        tokens = running[i] + coming[i] + waiting[i]
        if prompts[i] > 0:
            if mixed < 0 or tokens < mixed_tokens:
                mixed, mixed_tokens = i, tokens
        elif pure < 0 or tokens < pure_tokens:
            pure, pure_tokens = i, tokens
    return pure, pure_tokens, mixed, mixed_tokens


@entry
def hand_over(
    among: Any, ledger: Any, running: Any, coming: Any, waiting: Any, prompts: Any, requests: Any, queued: Any,
    tpot: float,
) -> int:  # fmt: skip
    """First steps of algorithm 2: an instance of D, else of P->D within the limits; else minus 1 minus the lighter."""
    pure, pure_tokens, mixed, mixed_tokens = lightest(among, running, coming, waiting, prompts)
    for i, tokens in ((pure, pure_tokens), (mixed, mixed_tokens)):
        free = i >= 0 and tokens <= ledger[i, HELD] and requests[i] + queued[i] < ledger[i, SEATS]
        if free and ledger[i, INTERVAL] <= tpot:
            return int(i)
    return -1 - int(mixed if pure < 0 or (mixed >= 0 and mixed_tokens < pure_tokens) else pure)


@entry
def low(
    among: Any, ledger: Any, running: Any, coming: Any, waiting: Any, requests: Any, queued: Any, without: int,
    share: float,
) -> bool:  # fmt: skip
    """Whether all that decodes would take at most a ``share`` of what the instances other than ``without`` hold."""
    tokens, sequences, most, seats = 0, 0, 0.0, 0.0
    for i in among:
        tokens += running[i] + coming[i] + waiting[i]
        sequences += requests[i] + queued[i]
        if i != without:
            most += ledger[i, HELD]
            seats += ledger[i, SEATS]
    return bool(tokens <= share * most and sequences <= share * seats)


@entry
def measure(among: Any, ledger: Any, steps: Any, time: Any, past: Any) -> float:
    """Fill the intervals since the ``past`` steps and time (2, instances), which become the present ones.

    Their mean over those of ``among`` that made steps; 0 without one. [s]
    """
    total, count = 0.0, 0
    for i in range(ledger.shape[0]):
        grown = steps[i] - past[0, i]
        ledger[i, INTERVAL] = (time[i] - past[1, i]) / grown if grown > 0 else 0.0
        past[0, i], past[1, i] = steps[i], time[i]
    for i in among:
        if ledger[i, INTERVAL] > 0.0:
            total += ledger[i, INTERVAL]
            count += 1
    return total / count if count > 0 else 0.0


@entry
def idle_instance(among: Any, computed: Any, before: Any, queued: Any, running: Any) -> int:
    """An instance of prefill that computed nothing since ``before``, one that still decodes first; -1 = none."""
    found = -1
    for i in among:
        if computed[i] == before[i] and queued[i] == 0 and (found < 0 or (running[i] > 0 and running[found] == 0)):
            found = i
    return int(found)


@entry
def busy_instance(among: Any, ledger: Any, waiting: Any, limit: float) -> int:
    """A decode instance with an interval above ``limit`` [s], or with requests that wait to decode; -1 = none."""
    for i in among:
        if ledger[i, INTERVAL] > limit or waiting[i] > 0:
            return int(i)
    return -1
