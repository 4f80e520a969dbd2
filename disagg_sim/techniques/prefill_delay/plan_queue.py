r"""Compute prefill delay: how many prompts start together, and how long they wait, where requests arrive at random.

An instance of R attention ranks with prefill delay starts prompts when every rank has one, or w decode steps of T_d
after the first could start. Requests go to the rank with the fewest, so each further one is on another rank. Prompts
that arrive while others are computed start at once. They arrive at the rate :math:`\lambda`, N(t) of them in a time t;
each is computed in m steps of T, so :math:`k = \lambda m T` are under way on average. While the first waits, others
arrive (Wald):

.. math:: h = \lambda E[H] = E[\min(N(wT_d),\ R - 1)]

A rank computes one prompt after the other, so the share of the time in which no rank has one is that in which all R
servers of one queue are idle, :math:`\pi_0` (M/M/R). Steps with prefill then follow each other for
:math:`(1/\pi_0 - 1)/\lambda`, and their share of the time is

.. math:: \varphi = \frac{1/\pi_0 - 1}{1/\pi_0 + h}

Where arrivals vary less, :math:`c^2 < 1` times as much, gaps of at least :math:`(1 - c)/\lambda` are taken, the rest of
which is exponential. On many ranks all are idle after a prompt whose gap is longer than its steps, so that their share
of the time is, in place of :math:`e^{-k}`,

.. math:: \lambda E[(A - m T)^+] = c\, e^{-(k - 1 + c)/c}, \quad k > 1 - c

or 1 - k, and that of R ranks is taken to change by the same factor.

In truth prompts that arrive during the last step wait for the next start. Some ranks then have two prompts, whose steps
take longer; in simulations both effects cancel in :math:`\varphi`, but not in the waits. With
:math:`k' = k - \lambda T` the steps take :math:`(e^{k'} - 1)/\lambda + T`, n prompts come in the last one, Poisson of
the mean :math:`\lambda T`, and of those of a start that n wait for (one where none did), on average

.. math:: n P(N(u) < R - n) + \lambda \int_u^{wT_d} P(N(t) < R - n - 1)\,dt, \qquad u < wT_d

wait for longer than u: those that are there, and those that come s later, of which :math:`N(s) + N(u) < R - n - 1` is
true. All are sums of Poisson probabilities.

Source: A. O. Allen, "Probability, Statistics and Queueing Theory", 2nd ed., 1990, section 5.3, for M/M/R.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from disagg_sim.arrays import Floats

#: Cells of a wait in which prompts are counted; a longest wait of more than so many standard deviations beyond the mean
#: in which every rank has a prompt is cut there. [1]
CELLS, DEVIATIONS = 16, 4.0
#: Loads at which the share of the time in which all ranks are idle is tabulated.
LOADS = 1025


def gathered(come: Floats, ranks: int) -> Floats:
    """Count the further prompts that arrive while the first one waits. [request]

    Takes ``come`` (mean arrivals in the longest wait [request]). Returns h, of the shape of ``come``.

    With two ranks one has a prompt: the other gets one with the probability of at least one arrival.

    >>> gathered(np.array([0.0, 1.0, 100.0]), 2).round(4).tolist()
    [0.0, 0.6321, 1.0]
    """
    return _further(_below(come, ranks))[..., -1]


def mixed_share(under_way: Floats, ranks: int, further: Floats | float = 0.0, even: float = 1.0) -> Floats:
    """Find the share of the time in steps with prefill, of the shape of ``under_way``. [1]

    Takes k, prompts in progress on average over all time [request]; R ranks, each with at most one in progress; h, 0
    where nothing waits [request]; and the variance of the arrivals over that of Poisson ones, more than 1 as 1 [1].

    With 0.1 prompts under way, steps with prefill take 9.5 % of the time, or 1.3 % where eight start together. Two
    ranks that work for 80 % of the time each are both idle for a ninth of it:

    >>> [mixed_share(np.array([0.1]), 8, further).round(4).tolist() for further in (0.0, 7.0)]
    [[0.0952], [0.013]]
    >>> mixed_share(np.array([1.6]), 2).round(4).tolist()
    [0.8889]

    Prompts at equal distances overlap no more than they must:

    >>> [mixed_share(np.array([0.6, 1.6]), 64, even=even).round(3).tolist() for even in (1.0, 0.25, 0.0)]
    [[0.451, 0.798], [0.591, 0.945], [0.6, 1.0]]
    """
    some = np.minimum(under_way, ranks)  # else their queue grows without end
    # share of the time in which none of R servers of one queue works (M/M/R)
    idle = (1.0 - some / ranks) * (np.exp(-np.interp(some, *_busier(ranks))) if ranks > 1 else 1.0)
    if even < 1.0:
        idle *= _evener(some, math.sqrt(even))
    return np.asarray((1.0 - idle) / (1.0 + further * idle))


def _evener(some: Floats, wide: float) -> Floats:
    """Share of the time in which none of many ranks works, over that of Poisson arrivals.

    Takes the standard deviation of the gaps between arrivals over their mean [1].
    """
    least = np.minimum(some, 1.0 - wide)  # of a gap
    rest = (some - least) / wide if wide > 0.0 else np.where(some > least, np.inf, 0.0)
    return np.asarray((1.0 - least) * np.exp(some - rest))


@cache
def _busier(ranks: int) -> tuple[Floats, Floats]:
    """Loads, and the logarithm of the share of the time in which one rank is idle over that in which all are."""
    some = np.linspace(0.0, ranks, LOADS)
    below, left = _chances(some, ranks).cumsum(axis=-1), 1.0 - some / ranks
    every = below[..., -1]
    last = (every - below[..., -2]) * some / ranks
    return some, some + np.log(every * left + last)


def waits(rate: float, longest: float, step: float, under_way: float, ranks: int) -> tuple[Floats, Floats]:
    """Find the distribution of the prefill delay over the prompts of an instance.

    Takes the rate of arrivals at it [request/s] and wT_d [s], both above 0, T of a step with prefill [s], k [request]
    and R, above 1. Returns waits [s], ascending from 0, and their probabilities, (``CELLS`` + 2,).

    Without other arrivals every prompt waits for the longest time; with many, nearly none waits that long:

    >>> [float(waits(rate, 1.0, 1e-9, 0.0, 8)[1][-1].round(3)) for rate in (1e-6, 1e3)]
    [1.0, 0.0]
    """
    last_one = (ranks + DEVIATIONS * math.sqrt(ranks) + DEVIATIONS) / rate
    edges = min(longest, last_one) * np.linspace(0.0, 1.0, CELLS + 1)
    there, none = _there(np.asarray(rate * step), ranks)
    below = _below(rate * edges, ranks)
    further = _further(below)
    number, lacking = np.arange(1, ranks), np.arange(ranks - 1, 0, -1)
    later = further[-1, lacking - 1] - further[:, lacking - 1]
    tail = (number * below[:, lacking] + later) @ there  # that wait for longer than each edge [request]
    all_of_them = math.exp(under_way - rate * step) - 1.0 + rate * step
    all_of_them += float(none + there @ further[-1, lacking])
    counts = np.concatenate([[all_of_them - tail[0]], -np.diff(tail), tail[-1:]])
    return np.concatenate([[0.0], (edges[1:] + edges[:-1]) / 2, edges[-1:]]), counts / counts.sum()


def _there(mean: Floats, ranks: int) -> tuple[Floats, Floats]:
    """Find the probabilities that 1 to R-1 prompts wait, counting none as one, (..., R-1), and that of none. [1]"""
    chances = np.diff(_below(mean, ranks), axis=-1)
    none = chances[..., 0].copy()
    chances[..., 1:2] += chances[..., :1]
    return chances[..., 1:], none


def _further(below: Floats) -> Floats:
    """Mean of the smaller of a Poisson number and 0 to R-1, by the probabilities that it is below these."""
    first = np.zeros((*below.shape[:-1], 1))
    return np.concatenate([first, np.cumsum(1.0 - below[..., 1:-1], axis=-1)], axis=-1)


def _below(mean: Floats, ranks: int) -> Floats:
    """Probabilities that a Poisson number is below 0 to R, (..., R+1). [1]"""
    below = _chances(mean, ranks).cumsum(axis=-1)
    return np.concatenate([np.zeros((*below.shape[:-1], 1)), below], axis=-1)


def _chances(mean: Floats, ranks: int) -> Floats:
    """Probabilities that a Poisson number is 0 to R-1, (..., R). [1]"""
    number, log_factorial = _numbers(ranks)
    some = np.maximum(mean, 1e-300)[..., None]
    return np.asarray(np.exp(number * np.log(some) - some - log_factorial))


@cache
def _numbers(ranks: int) -> tuple[Floats, Floats]:
    """Numbers from 0 to R-1 and the logarithms of their factorials, (R,). [1]"""
    number = np.arange(float(ranks))
    return number, np.concatenate([[0.0], np.cumsum(np.log(number[1:]))])
