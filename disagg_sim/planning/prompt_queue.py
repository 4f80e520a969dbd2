r"""Queue prompts for the steps of an instance of one attention rank, whose token budget all waiting prompts share.

A step with W prompt tokens waiting computes :math:`s = \min(W, c)` of them, c the tokens that fit beside the decodes,
and takes T(s). Prompts of p tokens arrive in it, N(T(s)) of them, so that the next step begins with

.. math:: W' = W - s + \sum_{i=1}^{N(T(s))} p_i

This Markov chain is solved on cells of c/K tokens. A prompt that arrives in a step, where Q tokens are before it, waits
for the rest of that step, then for :math:`m - 1` full ones and its last, with
:math:`m = \lceil (Q + p)/c \rceil`; prompts that come meanwhile fill up the last one:

.. math:: TTFT = (1 - x)\,T(s) + (m - 1)\,T(c) + T(\min(c,\ Q + p - (m - 1)\,c + p\,N))

Where requests of a short window vary D times as much as Poisson ones, groups of a geometric number arrive, (D + 1)/2 on
average; where they vary less, their number is binomial, of as few trials as that takes.
Source: batch service that depends on the state, after N. T. J. Bailey, "On queueing processes with bulk service", 1954.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats

#: Most cells of the prompt tokens that wait. [1]
CELLS = 320
#: Cells of those that fit into a step; more where prompts are short, two each, and at most so many. [1]
STEP_CELLS, MOST_STEP_CELLS = 10, 96
#: Waiting tokens that the cells reach, over the mean of a queue of one server. [1]
REACH = 6.0
#: Turns in which the prompt tokens of a step are found. [1]
TURNS = 8
#: Parts of a step at which arrivals are taken, and most later prompts that are counted one by one. [1]
PARTS, LATER = (np.arange(4) + 0.5) / 4, 4
#: Least probability of a number of waiting tokens that counts. [1]
LEAST = 1e-7
#: In place of 0, where it divides.
TINY = 1e-9


def prompt_delay(
    rate: float, prompts: Floats, weights: Floats, room: float, step: Callable[[Floats], Floats], dispersion: float
) -> list[tuple[Floats, Floats]]:
    """Find the time from the arrival of a prompt to the end of the step that completes it.

    Parameters
    ----------
    rate
        Of the instance. [request/s]
    prompts, weights
        Lengths [token] and their probabilities [1].
    room
        Prompt tokens of a full step. [token]
    step
        Time of a step by its prompt tokens. [s]
    dispersion
        Variance of the requests of a short window over their mean; 1 = Poisson. [1]

    Returns
    -------
    list of tuple of ndarray
        For each length times [s] and their probabilities [1]; infinite where the queue grows without end.

    Examples
    --------
    Steps of 1 s, alone or full; prompts fill one. At a load of half, a prompt waits for half a step, and half a step in
    the queue of others on average (M/D/1), before its own:

    >>> [(times, chances)] = prompt_delay(0.5, np.array([100.0]), np.ones(1), 100.0, np.ones_like, 1.0)
    >>> round(float(times @ chances), 2), round(float(chances.sum()), 6)
    (2.0, 1.0)
    """
    mean, full = float(weights @ prompts), float(step(np.array([room]))[0])
    used = rate * mean * full / room
    if used >= 1.0:
        return [(np.array([math.inf]), np.ones(1)) for _ in prompts]
    square = float(weights @ prompts**2) / mean * max(dispersion, 1.0)
    held = mean
    for _ in range(TURNS):  # prompt tokens of a step, where it is not full
        held = max(min(rate * mean * float(step(np.array([held]))[0]), room), min(mean, room))
    reach = held + REACH * (math.sqrt(held * square / (1.0 - used)) + square * used / (1.0 - used) / 2.0)
    cells = math.ceil(min(max(STEP_CELLS, 2.0 * room / mean), MOST_STEP_CELLS))  # that a full step takes away
    cells = max(min(cells, int(CELLS * room / reach)), 2)
    places = min(math.ceil(reach / room * cells) + cells, CELLS)
    width = room / cells
    times = step(width * np.arange(cells + 1, dtype=np.float64))
    jumps = np.zeros(2 * places)
    filled = np.minimum(prompts / width, places - 1.0)
    low = np.floor(filled).astype(np.intp)
    np.add.at(jumps, low, weights * (1.0 - filled + low))
    np.add.at(jumps, low + 1, weights * (filled - low))
    group = max((dispersion + 1.0) / 2.0, 1.0)  # mean of a geometric number of prompts that come together
    law = np.fft.rfft(jumps) - 1.0
    ahead = 1.0 / (1.0 - (group - 1.0) * law)  # of those in the group of a prompt
    law *= ahead

    def arrived_cells(counts: Floats, beside: Any = 1.0) -> Floats:
        """Chances of the cells that so many prompts on average fill, and others beside them, (counts, cells)."""
        mean = counts[:, None] + TINY
        trials = np.ceil(mean / max(1.0 - dispersion, TINY))
        each = (1.0 + mean / trials * law) ** trials if dispersion < 1.0 else np.exp(mean * law)
        found = np.fft.irfft(each * beside, axis=1)
        return np.maximum(found[:, :places], 0.0)

    waiting = _stationary(arrived_cells(rate * times), cells)
    spent = waiting.copy()
    spent[:cells] *= times[:cells]
    spent[cells:] *= full
    spent /= spent.sum()  # share of the time
    rows = [
        (np.full(places, (1.0 - part) * time), np.arange(places) * width, chances)
        for part in PARTS
        for time, chances in zip(times, _before(arrived_cells(rate * part * times, ahead), spent, cells), strict=True)
    ]
    rest, before, chance = (np.concatenate(each) for each in zip(*rows, strict=True))
    kept = chance > LEAST
    rest, before, chance = rest[kept], before[kept], chance[kept] / chance[kept].sum()
    behind = [(0.0, 1.0 / group), *([(group, 1.0 - 1.0 / group)] if group > 1.0 else [])]  # in the group of a prompt
    found = []
    for own in prompts.tolist():
        parts = [
            _own(rest, before + own, chance * part, room, mean, (rate / group, more), step) for more, part in behind
        ]
        found.append((np.concatenate([each for each, _ in parts]), np.concatenate([each for _, each in parts])))
    return found


def _stationary(arrived: Floats, cells: int) -> Floats:
    """Share of the steps that begin with so many cells waiting; the last one holds all above.

    By the elimination of W. K. Grassmann, M. I. Taksar and D. P. Heyman (Operations Research 33, 1985), which subtracts
    nothing; a step takes away ``cells`` at most, so a row has no entries further below.
    """
    places = arrived.shape[1]
    start = np.arange(places)
    place = start[None, :] - np.maximum(start - cells, 0)[:, None]
    move = np.where(place >= 0, arrived[np.minimum(start, cells)[:, None], np.maximum(place, 0)], 0.0)
    move[:, -1] += np.maximum(1.0 - move.sum(axis=1), 0.0)
    for last in range(places - 1, 0, -1):
        low = max(last - cells, 0)
        down = move[last, low:last]
        move[:last, last] /= down.sum()
        move[:last, low:last] += move[:last, last, None] * down
    found = np.ones(places)
    for at in range(1, places):
        found[at] = (found[:at] * move[:at, at]).sum()
    return np.asarray(found / found.sum())


def _before(arrived: Floats, spent: Floats, cells: int) -> Floats:
    """Chances that an arrival meets a step of each kind, and finds so many cells before it, (kinds, cells)."""
    found = arrived * spent[: cells + 1, None]
    found[cells] = np.convolve(arrived[cells], spent[cells:])[: arrived.shape[1]]
    return found


def _own(
    rest: Floats,
    tokens: Floats,
    chance: Floats,
    room: float,
    mean: float,
    later: tuple[float, float],
    step: Callable[[Floats], Floats],
) -> tuple[Floats, Floats]:
    """Times of a prompt by what is left of a step, and by its tokens with those before it; their probabilities.

    Takes ``later`` (rate at which others come [1/s], and how many come with it [request]).
    """
    rate, more = later
    full = float(step(np.array([room]))[0])
    steps = np.maximum(np.ceil(tokens / room - 1e-9), 1.0)
    until, last = rest + (steps - 1.0) * full, tokens - (steps - 1.0) * room
    most = int(min(max(math.ceil(room / mean), 1), LATER))
    load, share, counted, left = rate * until, np.exp(-rate * until), 0.0 * until, np.ones_like(until)
    values, shares = [], []
    for number in range(most):
        values.append(until + step(np.minimum(last + (number + more) * mean, room)))
        shares.append(chance * share)
        left, counted, share = left - share, counted + number * share, share * load / (number + 1.0)
    others = np.maximum(load - counted, 0.0) / np.maximum(left, 1e-12)  # where there are more, on average
    values.append(until + step(np.minimum(last + (np.maximum(others, most) + more) * mean, room)))
    shares.append(chance * np.maximum(left, 0.0))
    return np.concatenate(values), np.concatenate(shares)
