r"""Queue prompts for the steps of an instance of one attention rank, whose token budget all waiting prompts share.

A step with W prompt tokens waiting computes :math:`s = \min(W, c)` of them, c the tokens that fit beside the decodes,
and takes T(s). Prompts of p tokens arrive in it, N(T(s)) of them, so that the next step begins with

.. math:: W' = W - s + \sum_{i=1}^{N(T(s))} p_i

This Markov chain is solved on cells of c/K tokens. A prompt that arrives in a step, where Q tokens are before it, waits
for the rest of that step, then for :math:`m - 1` full ones and its last, with
:math:`m = \lceil (Q + p)/c \rceil`; prompts that come meanwhile fill up the last one:

.. math:: TTFT = (1 - x)\,T(s) + (m - 1)\,T(c) + T(\min(c,\ Q + p - (m - 1)\,c + p\,N))

An engine that schedules one step ahead forms each step as the one before begins. So A, the tokens that came in the step
before, wait, too; :math:`W - s + A` are ahead of a prompt in the next step, which it misses:

.. math:: TTFT = (1 - x)\,T(s) + T(s') + (m - 1)\,T(c) + T(\ldots), \qquad s' = \min(W - s + A,\ c)

with :math:`W - s + A - s'` of them before it behind s'; prompts that come after the last but one of its steps has begun
do not share the last. There :math:`W' = W - s + A`, so that with room for all the odd
and the even steps are two chains like that above, independent of each other. A is taken so at any room, as a draw from
what comes in a step: of simulated steps the mean is met to 3 % at loads to 0.7, and to 7 % at 0.92 where a full step
takes four times as long as one of decodes alone or longer. Where no decode runs either, no step is formed ahead.

Requests may come at another rate in steps with prompts (``planning.shared_instances``).

Where requests of a short window vary D times as much as Poisson ones, groups of a geometric number arrive, (D + 1)/2 on
average; where they vary less, their number is binomial, of as few trials as that takes.
Source: batch service that depends on the state, after N. T. J. Bailey, "On queueing processes with bulk service", 1954.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from disagg_sim.arrays import Complexes, Floats, Ints

#: Most cells of the prompt tokens that wait. [1]
CELLS = 320
#: Cells of those that fit into a step; more where prompts are short, two each, and at most so many. [1]
STEP_CELLS, MOST_STEP_CELLS = 10, 96
#: Waiting tokens that the cells reach, over the mean of a queue of one server. [1]
REACH = 6.0
#: Cells that leave the chain together. [1]
BLOCK = 48
#: Turns in which the prompt tokens of a step are found, and the rates of steps with and without them, which together
#: give that of the instance so nearly; the rates may take more turns. [1]
TURNS, MOST_TURNS, NEAR = 8, 32, 0.005
#: Parts of a step at which arrivals are taken, fewer where they also miss steps of several lengths. [1]
PARTS, PARTS_AHEAD = (np.arange(4) + 0.5) / 4, (np.arange(3) + 0.5) / 3
#: Most later prompts that are counted one by one. [1]
LATER = 4
#: Least probability of a number of waiting tokens that counts. [1]
LEAST = 1e-7
#: In place of 0, where it divides.
TINY = 1e-9


class PromptArrivals(NamedTuple):
    """Requests that come to an instance."""

    rate: float  # [request/s]
    dispersion: float = 1.0  # variance of the requests of a short window over their mean; 1 = Poisson [1]
    sent: float = 1.0  # rate while prompts are under way, over that in steps of decodes alone [1]


def prompt_delay(
    coming: PromptArrivals,
    prompts: Floats,
    weights: Floats,
    room: float,
    step: Callable[[Floats], Floats],
    own: Floats | None = None,
    running: float | None = None,
) -> list[tuple[Floats, Floats]]:
    """Find the time from the arrival of a prompt to the end of the step that completes it.

    Takes how requests come; lengths of prompts [token] and their probabilities; the prompt tokens of a full step
    (``room``) and the time of a step by them [s]; the lengths that are timed (``own``; None = all); and, where steps
    are formed as the one before begins, the chance that decodes run (``running``; None = as it ends). Returns for each
    timed length times [s] and their probabilities; infinite where the queue grows without end.

    Steps of 1 s, alone or full; prompts fill one. At a load of half, a prompt waits for half a step, and half a step in
    the queue of others on average (M/D/1), before its own:

    >>> law = PromptArrivals(0.5), np.array([100.0]), np.ones(1), 100.0, np.ones_like
    >>> [(times, chances)] = prompt_delay(*law)
    >>> round(float(times @ chances), 2), round(float(chances.sum()), 6)
    (2.0, 1.0)

    The same engine one step ahead, with decodes in all steps: each prompt joins a step later.

    >>> [(times, chances)] = prompt_delay(*law, running=1.0)
    >>> round(float(times @ chances), 2)
    3.0
    """
    (rate, dispersion, sent), timed = coming, prompts if own is None else own
    mean = float(weights @ prompts)
    held, most = reach(rate, prompts, weights, room, step, dispersion)
    if math.isinf(most):
        return [(np.array([math.inf]), np.ones(1)) for _ in timed]
    cells = math.ceil(min(max(STEP_CELLS, 2.0 * room / mean), MOST_STEP_CELLS))  # that a full step takes away
    cells = max(min(cells, int(CELLS * room / most)), 2)
    places = min(math.ceil(most / room * cells) + cells, CELLS)
    width = room / cells
    times = step(width * np.arange(cells + 1, dtype=np.float64))
    busy = min(rate * mean / held * float(step(np.array([held]))[0]), 1.0)  # share of the time in steps with prefill
    idle = rate / (1.0 - busy + busy * sent)
    rates = np.where(np.arange(cells + 1) > 0, sent * idle, idle)
    size = 64 * math.ceil(2 * places / 64)  # of transforms, two times the cells at least
    group = max((dispersion + 1.0) / 2.0, 1.0)  # mean of a geometric number of prompts that come together
    law = np.fft.rfft(_filled(np.minimum(prompts / width, places - 1.0), weights, size)) - 1.0
    ahead = 1.0 / (1.0 - (group - 1.0) * law)  # of those in the group of a prompt
    law *= ahead

    def arrived(counts: Floats) -> Complexes:
        """Transforms of the chances of the cells that so many prompts on average fill, (..., counts, cells)."""
        mean = counts[..., None] + TINY
        if dispersion >= 1.0:
            return np.exp(mean * law)
        trials = np.ceil(mean / max(1.0 - dispersion, TINY))
        return _power(1.0 + mean / trials * law, trials.astype(np.intp))

    def chances(transforms: Complexes) -> Floats:
        return np.maximum(np.fft.irfft(transforms, size)[..., :places], 0.0)

    waiting, spent, rates = _met(rate, rates, times, lambda counts: chances(arrived(counts)))
    parts = PARTS if running is None else PARTS_AHEAD
    met = arrived(rates * parts[:, None] * times) * ahead
    met[:, :cells] *= spent[:cells, None]
    if running is None:
        met[:, cells] *= np.fft.rfft(spent[cells:], size)
        chance = chances(met)  # that a prompt comes in a part of a step of each kind, and finds so many cells before it
    else:
        come = chances(np.bincount(np.minimum(np.arange(places), cells), waiting) @ arrived(rates * times))
        missed, parted, left = _missed(come, spent[cells:], times)
        missed[0, 0] *= running
        chance = np.stack([*(parted[:, None, :, None] * chances(met)), chances(met * np.fft.rfft(left, size))])
    *then, part, kind, cell = places_of = np.nonzero(chance > LEAST)
    chance = chance[places_of]
    chance /= chance.sum()
    rest, ahead_of_it = (1.0 - parts[part]) * times[kind], cell * width
    beside = rates[kind] * rest / group  # that come in what is left of the step
    first = None
    if running is not None:
        missing = missed[then[0], kind]
        rest, first = rest + missing, missing * np.where(then[0] > 0, rates[-1], rates[0]) / group
    behind = [(0.0, 1.0 / group), *([(group, 1.0 - 1.0 / group)] if group > 1.0 else [])]  # in the group of a prompt
    laws = []
    for length in timed.tolist():
        found = [
            _own(rest, ahead_of_it + length, chance * share, room, mean, (beside, first, rates[-1] / group, more), step)
            for more, share in behind
        ]
        laws.append((np.concatenate([each for each, _ in found]), np.concatenate([each for _, each in found])))
    return laws


def most_delay(waiting: float, longest: float, room: float, slowest: float) -> float:
    """Bound what ``prompt_delay`` gives from above by how many tokens its cells reach. [s]

    Takes tokens: ``waiting`` at most (``reach``), of the ``longest`` prompt, and those for which a step has ``room``
    [token]; and the time of the ``slowest`` step [s].
    """
    most = 1.5 * (waiting + room)  # in whole cells, of which there may be few
    return (math.ceil((most + longest) / room) + 1) * slowest


def reach(
    rate: float, prompts: Floats, weights: Floats, room: float, step: Callable[[Floats], Floats], dispersion: float
) -> tuple[float, float]:
    """Prompt tokens of a step with some, and those that wait at most; inf where the queue grows without end. [token]"""
    mean, full = float(weights @ prompts), float(step(np.array([room]))[0])
    used = rate * mean * full / room
    if used >= 1.0:
        return room, math.inf
    square = float(weights @ prompts**2) / mean * max(dispersion, 1.0)
    held, least = mean, min(mean, room)
    for _ in range(TURNS):  # prompt tokens of a step, where it is not full
        before, held = held, max(min(rate * mean * float(step(np.array([held]))[0]), room), least)
        if held == before:
            break
    return held, held + REACH * (math.sqrt(held * square / (1.0 - used)) + square * used / (1.0 - used) / 2.0)


def _filled(cells: Floats, weights: Floats, size: int) -> Floats:
    """Chances of whole cells, so many, by those of parts of cells."""
    found, low = np.zeros(size), np.floor(cells).astype(np.intp)
    np.add.at(found, low, weights * (1.0 - cells + low))
    np.add.at(found, low + 1, weights * (cells - low))
    return found


def _missed(come: Floats, behind_full: Floats, times: Floats) -> tuple[Floats, Floats, Floats]:
    """Steps that are formed without the prompts that come in the one before: of decodes alone, with some tokens, full.

    Takes the chances of the cells that ``come`` in a step, and of those that a full step leaves. Returns their times
    (steps, kinds of the step before) [s], the chances of the first two, and those of a full one and the cells that wait
    behind it (kinds, cells).
    """
    cells, places = times.size - 1, come.size
    waiting = np.stack([come, np.convolve(behind_full, come)[:places]])  # where the step before is not full, and is
    firsts = [0, 1, cells]
    chance = np.add.reduceat(waiting, firsts, axis=1)
    mean = np.add.reduceat(waiting * times[np.minimum(np.arange(places), cells)], firsts, axis=1)
    kinds = np.arange(times.size) // cells
    return (mean / np.maximum(chance, TINY))[kinds].T, chance[kinds, :-1].T, waiting[kinds, cells:]


def _met(
    rate: float, rates: Floats, times: Floats, arrived: Callable[[Floats], Floats]
) -> tuple[Floats, Floats, Floats]:
    """Share of the steps that begin with so many cells waiting, of the prompts that come in them, and their rates.

    These are ``rate`` on average.
    """
    for _ in range(MOST_TURNS):
        waiting = _stationary(arrived(rates * times), times.size - 1)
        kinds = np.minimum(np.arange(waiting.size), times.size - 1)
        spent = waiting * (rates * times)[kinds]
        come = float(spent.sum()) / float(waiting @ times[kinds])
        if abs(come / rate - 1.0) < NEAR:
            break
        rates = rates * (rate / come)
    return waiting, spent / spent.sum(), rates


def _power(base: Complexes, trials: Ints) -> Complexes:
    """Raise to whole powers by squares, which takes less time than ``**``."""
    found = np.where(trials & 1, base, 1.0)
    for place in range(1, int(trials.max()).bit_length()):
        base = base * base
        found = np.where(trials >> place & 1, found * base, found)
    return found


def _stationary(arrived: Floats, cells: int) -> Floats:
    """Share of the steps that begin with so many cells waiting; the last one holds all above.

    A chain that is watched only below a block B moves by :math:`P_{AA} + P_{AB} (I - P_{BB})^{-1} P_{BA}`. A step takes
    away ``cells`` at most, so P_BA has as many rows and columns.
    """
    places = arrived.shape[1]
    padded = np.concatenate([np.zeros(places), arrived[cells]])
    move = np.concatenate([arrived[:cells], sliding_window_view(padded, places)[places:cells:-1]])
    above = 1.0 - arrived.cumsum(axis=1)  # below ``cells`` and at it
    move[:cells, -1] += np.maximum(above[:-1, -1], 0.0)
    move[cells:, -1] += np.maximum(above[-1, : cells - 1 : -1], 0.0)
    edges = range(places, cells, -BLOCK)
    inside = []
    for high, low in pairwise(edges):
        inside.append(np.linalg.inv(np.eye(high - low) - move[low:high, low:high]))
        back = inside[-1][:, :cells] @ move[low : min(low + cells, high), low - cells : low]
        move[:low, low - cells : low] += move[:low, low:high] @ back
    left = edges[-1]
    found = np.linalg.solve((np.eye(left) - move[:left, :left] + 1.0).T, np.ones(left))
    for block in reversed(inside):
        found = np.concatenate([found, found @ move[: found.size, found.size : found.size + len(block)] @ block])
    return np.asarray(found / found.sum())


def _own(
    rest: Floats,
    tokens: Floats,
    chance: Floats,
    room: float,
    mean: float,
    later: tuple[Floats, Floats | None, float, float],
    step: Callable[[Floats], Floats],
) -> tuple[Floats, Floats]:
    """Times of a prompt by what is left of a step, and by its tokens with those before it; their probabilities.

    Takes ``later`` (others that come in the rest of the step and in the step that it misses, None = none is [request],
    the rate at which they do in full steps [1/s], and how many come with it [request]).
    """
    beside, missing, rate, more = later
    full = float(step(np.array([room]))[0])
    steps = np.maximum(np.ceil(tokens / room - 1e-9), 1.0)
    until, last = rest + (steps - 1.0) * full, tokens - (steps - 1.0) * room
    most = int(min(max(math.ceil(room / mean), 1), LATER))
    load = beside + rate * (steps - 1.0) * full
    if missing is not None:  # the last full step is too late for others
        load += np.where(steps > 1.0, missing - rate * full, 0.0)
    share, counted, left = np.exp(-load), np.zeros_like(load), np.ones_like(load)
    values, shares = [], []
    for number in range(most):
        values.append(until + step(np.minimum(last + (number + more) * mean, room)))
        shares.append(chance * share)
        left, counted, share = left - share, counted + number * share, share * load / (number + 1.0)
    others = np.maximum(load - counted, 0.0) / np.maximum(left, 1e-12)  # where there are more, on average
    values.append(until + step(np.minimum(last + (np.maximum(others, most) + more) * mean, room)))
    shares.append(chance * np.maximum(left, 0.0))
    return np.concatenate(values), np.concatenate(shares)
