"""Arrow's ledger: what its scheduler knows of each instance, and its choices by it, compiled.

Every comparison is in what an instance serves: seconds of its own prefill, shares of the tokens that it decodes in
time. On equal instances these are the paper's comparisons of delays and of tokens, choice by choice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.simulation.kernel.compiled import entry, inner

#: Columns of the ledger, one row an instance. The first three are of its predictor, see ``Predictor``.
CONSTANT, LINEAR, QUADRATIC = range(3)
FREE = 3  # when the prompts in its queue will be done, on its own clock [s]
AHEAD = 4  # of that clock to the real one: what its last prompt took longer than predicted, in all [s]
INTERVAL = 5  # mean time between its decode steps over the window; 0 without one [s]
HELD = 6  # MaxRunningTokens; -1 where others decode in time and it never does [token]
SEATS = 7  # sequences that it can run [1]
ROOM = 8  # tokens that its memory holds [token]
WEIGHT = 9  # its MaxRunningTokens over the largest; 1 where nobody decodes in time [1]


@entry
def prompt_s(ledger: Any, i: int, tokens: int) -> float:
    """Predicted time of a prompt alone on an instance. [s]"""
    return float(ledger[i, CONSTANT] + tokens * (ledger[i, LINEAR] + tokens * ledger[i, QUADRATIC]))


@inner
def delay_s(ledger: Any, i: int, queued: Any, now: float) -> float:
    """Predicted wait of a prompt that comes now: what is left of the queue. [s]"""
    return float(max(ledger[i, FREE] + ledger[i, AHEAD] - now, 0.0)) if queued[i] > 0 else 0.0


@entry
def take(ledger: Any, i: int, tokens: int, queued: Any, now: float) -> float:
    """Book a prompt on an instance: its predicted end, on the clock of the instance. [s]"""
    start = now - ledger[i, AHEAD]
    if queued[i] > 0:
        start = max(start, ledger[i, FREE])
    ledger[i, FREE] = start + prompt_s(ledger, i, tokens)
    return float(ledger[i, FREE])


@entry
def place(
    among: Any, ledger: Any, queued: Any, running: Any, coming: Any, waiting: Any, tokens: int, ttft: float, now: float
) -> Any:
    """First steps of algorithm 1: an instance of P, else of D->P within the limit, booked, and the predicted end.

    In each pool it is the one where the prompt would be done first, of several the one with the shorter queue.
    Without one: minus 1, the time until the prompt is done late [s], and where; minus 1 where nobody has room.
    """
    pure, mixed = -1, -1
    pure_s, mixed_s, pure_delay, mixed_delay = np.inf, np.inf, np.inf, np.inf
    for i in among:
        if ledger[i, ROOM] <= tokens:
            continue
        delay = delay_s(ledger, i, queued, now)
        time = delay + prompt_s(ledger, i, tokens)
        if running[i] > 0 or coming[i] > 0 or waiting[i] > 0:
            if time < mixed_s or (time == mixed_s and delay < mixed_delay):
                mixed, mixed_s, mixed_delay = i, time, delay
        elif time < pure_s or (time == pure_s and delay < pure_delay):
            pure, pure_s, pure_delay = i, time, delay
    for i, time in ((pure, pure_s), (mixed, mixed_s)):
        if i >= 0 and time <= ttft:
            return i, take(ledger, i, tokens, queued, now), i
    return (-1, pure_s, pure) if pure >= 0 else (-1, mixed_s, mixed)


@entry
def sooner(among: Any, ledger: Any, queued: Any, tokens: int, within: float, now: float) -> Any:
    """Those of some instances where a prompt would be done in less than ``within`` [s]."""
    found = np.empty_like(among)
    count = 0
    for i in among:
        if ledger[i, ROOM] > tokens and delay_s(ledger, i, queued, now) + prompt_s(ledger, i, tokens) < within:
            found[count] = i
            count += 1
    return found[:count]


@entry
def soonest_free(among: Any, ledger: Any, queued: Any, tokens: int, most: float, now: float) -> Any:
    """Of instances whose queue lasts less than ``most`` [s], where a prompt would be done first, and the time. [s]"""
    found, found_s = -1, np.inf
    for i in among:
        delay = delay_s(ledger, i, queued, now)
        if ledger[i, ROOM] > tokens and delay < most:
            time = delay + prompt_s(ledger, i, tokens)
            if time < found_s:
                found, found_s = i, time
    return found, found_s


@entry
def least_delay(among: Any, ledger: Any, queued: Any, running: Any, coming: Any, waiting: Any, now: float) -> int:
    """Of D->P, else of P, the instance with the shortest queue that can decode in time; -1 = none."""
    pure, mixed = -1, -1
    pure_s, mixed_s = np.inf, np.inf
    for i in among:
        if ledger[i, HELD] < 0.0:
            continue
        delay = delay_s(ledger, i, queued, now)
        if running[i] > 0 or coming[i] > 0 or waiting[i] > 0:
            if delay < mixed_s:
                mixed, mixed_s = i, delay
        elif delay < pure_s:
            pure, pure_s = i, delay
    return int(mixed if mixed >= 0 else pure)


@inner
def share(ledger: Any, i: int, tokens: int) -> float:
    """Of what an instance decodes in time. [1]"""
    return float(tokens / max(ledger[i, HELD], 1.0)) if ledger[i, HELD] >= 0.0 else np.inf


@entry
def lightest(among: Any, ledger: Any, running: Any, coming: Any, waiting: Any, prompts: Any, more: int) -> Any:
    """Where ``more`` tokens leave the least share taken, in pool D and in P->D: instance and share, -1 = none.

    Tokens of an instance are those of all requests that it decodes, is being sent, or keeps waiting for memory.
    """
    pure, mixed = -1, -1
    pure_share, mixed_share = np.inf, np.inf
    for i in among:
        if ledger[i, ROOM] <= more:
            continue
        taken = share(ledger, i, running[i] + coming[i] + waiting[i] + more)
        if prompts[i] > 0:
            if mixed < 0 or taken < mixed_share:
                mixed, mixed_share = i, taken
        elif pure < 0 or taken < pure_share:
            pure, pure_share = i, taken
    return pure, pure_share, mixed, mixed_share


@entry
def hand_over(
    among: Any,
    ledger: Any,
    running: Any,
    coming: Any,
    waiting: Any,
    prompts: Any,
    requests: Any,
    queued: Any,
    more: int,
    tpot: float,
) -> int:
    """First steps of algorithm 2: an instance of D, else of P->D within the limits; else minus 1 minus the lighter.

    The limits are MaxRunningTokens, a free sequence, and intervals up to ``tpot`` [s].
    """
    pure, pure_share, mixed, mixed_share = lightest(among, ledger, running, coming, waiting, prompts, more)
    for i in (pure, mixed):
        if i < 0 or requests[i] + queued[i] >= ledger[i, SEATS] or ledger[i, INTERVAL] > tpot:
            continue
        if running[i] + coming[i] + waiting[i] <= ledger[i, HELD]:
            return int(i)
    lighter = mixed if pure < 0 or (mixed >= 0 and mixed_share < pure_share) else pure
    return -1 - int(lighter if lighter >= 0 else among[0])


@entry
def low(
    among: Any,
    ledger: Any,
    running: Any,
    coming: Any,
    waiting: Any,
    requests: Any,
    queued: Any,
    without: int,
    most: float,
) -> bool:
    """Whether all that decodes would take a share up to ``most`` of what the instances but ``without`` hold."""
    tokens, sequences, held, seats = 0, 0, 0.0, 0.0
    for i in among:
        tokens += running[i] + coming[i] + waiting[i]
        sequences += requests[i] + queued[i]
        if i != without:
            held += max(ledger[i, HELD], 0.0)
            seats += ledger[i, SEATS]
    return bool(tokens <= most * held and sequences <= most * seats)


@entry
def measure(among: Any, ledger: Any, steps: Any, time: Any, past: Any) -> float:
    """Fill the intervals since the ``past`` steps and time (2, instances), which become the present ones.

    Their mean over those of ``among`` that made steps, by weight; 0 without one. [s]
    """
    total, weights = 0.0, 0.0
    for i in range(ledger.shape[0]):
        grown = steps[i] - past[0, i]
        ledger[i, INTERVAL] = (time[i] - past[1, i]) / grown if grown > 0 else 0.0
        past[0, i], past[1, i] = steps[i], time[i]
    for i in among:
        if ledger[i, INTERVAL] > 0.0:
            total += ledger[i, WEIGHT] * ledger[i, INTERVAL]
            weights += ledger[i, WEIGHT]
    return total / weights if weights > 0.0 else 0.0


@entry
def idle_instance(among: Any, ledger: Any, computed: Any, before: Any, queued: Any, running: Any) -> int:
    """One of prefill that computed nothing since ``before`` and decodes in time, one that decodes first; -1 = none."""
    found = -1
    for i in among:
        if computed[i] != before[i] or queued[i] > 0 or ledger[i, HELD] < 0.0:
            continue
        if found < 0 or (running[i] > 0 and running[found] == 0):
            found = i
    return int(found)


@entry
def busy_instance(among: Any, ledger: Any, running: Any, coming: Any, waiting: Any, limit: float, light: float) -> int:
    """One of decode where requests wait, or with an interval above ``limit`` [s]; -1 = none.

    Where no more than a share ``light`` of what it holds is taken, its steps are slow by nature.
    """
    for i in among:
        slow = ledger[i, INTERVAL] > limit and share(ledger, i, running[i] + coming[i] + waiting[i]) > light
        if waiting[i] > 0 or slow:
            return int(i)
    return -1
