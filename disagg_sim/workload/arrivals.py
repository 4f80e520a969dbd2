r"""Draw arrivals: when requests come, at a mean rate, from named random streams.

All are stationary: the first gap is a residual one, so that the expected number of requests in a time T is exactly
rate*T, however bursty the process. For a renewal process whose gaps have density f and mean m, the residual has the
density (1 - F)/m; it is a uniform share of a gap drawn with the length-biased density x f(x)/m.

Moments of the two-state Markov-modulated Poisson process (MMPP): a share p of the time is a burst, of mean length
tau; the rate is lambda (1 + (1 - p) d) in a burst and lambda (1 - p d) outside, so that its mean is lambda and d is
the contrast of the two. The autocovariance of the rate is p (1 - p) d^2 lambda^2 exp(-s t) with
s = 1/(tau (1 - p)), and the requests N of a window T have

.. math::
    E[N] = \lambda T, \qquad
    \frac{Var[N]}{E[N]^2} = \frac{1}{\lambda T} + p (1 - p) d^2 g(sT), \qquad
    g(x) = \frac{2 (x - 1 + e^{-x})}{x^2}.

With independent lengths of coefficient of variation c_L, the tokens of a window have

.. math:: c^2 = \frac{1 + c_L^2}{\lambda T} + p (1 - p) d^2 g(sT).

Source: W. Fischer and K. Meier-Hellstern, "The Markov-modulated Poisson process (MMPP) cookbook", Performance
Evaluation 18 (1993); the last line is the law of total variance.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.choices import MOST_SEED
from disagg_sim.errors import InputError, above_zero, whole_number
from disagg_sim.workload.trace import MOST_REQUESTS, too_many

#: Least requests, or changes of state, that are drawn at once. [1]
LEAST_BLOCK = 16
#: Largest coefficient of variation of Gamma gaps: of a million, all but one are then next to 0. [1]
MOST_CV = 1000.0
#: Times at once that no block exceeds. [1]
WHOLE = 2**62
#: More than rounding moves a time, of that time. [1]
ROUNDING = 1e-12


def named_rng(seed: int, name: str) -> np.random.Generator:
    """Return the random stream of a name: its draws depend on the seed and the name, on nothing else."""
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(np.random.SeedSequence([whole_number("seed", seed, 0, most=MOST_SEED), key]))


class ArrivalProcess(Protocol):
    """A stationary process of arrivals."""

    def blocks(self, rng: np.random.Generator, rate: float, size: int, most: int) -> Iterator[Floats]:
        """Ascending arrival times from 0 on at a mean ``rate`` [request/s], without end. [s]

        They are drawn in blocks of about ``size``, which shape the values, and come up to ``most`` at once, which does
        not: two calls that differ in ``most`` give the same times.
        """


def _summed(draw: Callable[[int], Floats], rate: float, last: float, size: int, most: int) -> Iterator[Floats]:
    """Times after ``last`` of renewal gaps over ``rate``, block after block, without end. [s]"""
    while True:
        start, total = last, 0.0
        for begin in range(0, size, most):
            gaps = draw(min(most, size - begin))
            gaps[0] += total  # the sum goes on, addition by addition, as if the block were drawn at once
            sums = np.cumsum(gaps)
            total = float(sums[-1])
            times = start + sums / rate
            last = float(times[-1])
            yield times


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps."""

    def blocks(self, rng: np.random.Generator, rate: float, size: int, most: int) -> Iterator[Floats]:
        """See ``ArrivalProcess``. [s]"""
        yield from _summed(rng.standard_exponential, rate, 0.0, size, most)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps: a renewal process, from evenly spaced (cv 0) over Poisson (cv 1) to bursty."""

    cv: float  # standard deviation over mean of the gaps [1]

    def __post_init__(self) -> None:
        """``InputError`` unless the cv is in range."""
        if not 0 <= self.cv <= MOST_CV:
            raise InputError(f"cv of gaps {self.cv} is out of range; allowed: 0 to {MOST_CV:g}")

    def blocks(self, rng: np.random.Generator, rate: float, size: int, most: int) -> Iterator[Floats]:
        """See ``ArrivalProcess``. [s]"""
        shape = 1 / self.cv**2 if self.cv else math.inf
        first = rng.random() * (rng.standard_gamma(shape + 1) / shape if self.cv else 1.0) / rate
        yield np.array([first])

        def gaps(count: int) -> Floats:
            return rng.standard_gamma(shape, count) / shape if self.cv else np.ones(count)

        yield from _summed(gaps, rate, first, size, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mmpp:
    """Two-state Markov-modulated Poisson process: bursts and what is between them, each of exponential length."""

    contrast: float  # rate in a burst less rate outside, over the mean rate: d of the moments [1]
    burst_share: float  # share of the time that is burst: p [1]
    burst_s: float  # mean length of a burst: tau [s]

    def __post_init__(self) -> None:
        """``InputError`` unless both rates are 0 or more."""
        above_zero("burst_s", self.burst_s, "s")
        if not 0 < self.burst_share < 1:
            raise InputError(f"burst_share {self.burst_share} is out of range; allowed: above 0 and below 1")
        if not 0 <= self.contrast * self.burst_share <= 1:
            raise InputError(f"contrast {self.contrast} is out of range; allowed: 0 to {1 / self.burst_share:g}")

    def blocks(self, rng: np.random.Generator, rate: float, size: int, most: int) -> Iterator[Floats]:
        """See ``ArrivalProcess``; those of one burst, or of what is between two, come at once. [s]"""
        p, gap_s = self.burst_share, self.burst_s * (1 - self.burst_share) / self.burst_share
        bursts = size / (rate * (self.burst_s + gap_s))
        if bursts > MOST_REQUESTS:
            raise InputError(
                f"burst_s {self.burst_s:g} s: {bursts:.3g} bursts in {size / rate:g} s are too many; "
                f"allowed: up to {MOST_REQUESTS:,}"
            )
        states = np.arange(LEAST_BLOCK + 2 * round(bursts)) % 2
        drawn = states.size / 2 * rate * (self.burst_s + gap_s)
        if min(drawn, max(most, drawn / states.size)) > MOST_REQUESTS:
            what = f"burst_s {self.burst_s:g} s, {states.size // 2} bursts at {rate:g} requests/s"
            raise InputError(too_many(what, drawn))
        if rng.random() >= p:
            states = 1 - states
        lengths = np.where(states == 0, self.burst_s, gap_s)
        rates = np.where(states == 0, rate * (1 + (1 - p) * self.contrast), rate * max(1 - p * self.contrast, 0.0))
        start = 0.0
        while True:
            spans = lengths * rng.standard_exponential(states.size)
            ends = start + np.cumsum(spans)
            counts, begins = rng.poisson(rates * spans), ends - spans
            group = (np.cumsum(counts) - counts) // most  # spans whose requests come together
            edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), spans.size]
            held = np.zeros(0)
            for first, end in pairwise(edges):
                own, here = counts[first:end], begins[first:end]
                drawn_s = np.repeat(here, own) + np.repeat(spans[first:end], own) * rng.random(own.sum())
                times = np.sort(np.concatenate([held, drawn_s]))
                sure = times.size  # by rounding the last of a span may lie behind the first of the next
                if end < spans.size:
                    sure = int(np.searchsorted(times, begins[end] * (1 - ROUNDING)))
                held = times[sure:]
                yield times[:sure]
            start = float(ends[-1])

    def window_cv(self, *, rate: float, length_cv: float, window_s: float) -> float:
        """Coefficient of variation of the tokens that arrive in a window, by the module's last equation. [1]"""
        p = self.burst_share
        variance = p * (1 - p) * self.contrast**2 * _window_share(window_s / (self.burst_s * (1 - p)))
        return math.sqrt((1 + length_cv**2) / (rate * window_s) + variance)


def arrivals(
    process: ArrivalProcess, rng: np.random.Generator, rate: float, *, requests: int = 0, duration: float = 0.0
) -> Floats:
    """Draw ascending times of a process at a mean rate [request/s]; 0 requests = all before ``duration``. [s]"""
    expected = requests or rate * duration
    if 0 < rate < math.inf and MOST_REQUESTS < expected < math.inf:
        where = f"rate {rate:g}/s" if requests else f"duration {duration:g} s at {rate:g} requests/s"
        raise InputError(too_many(where, expected))
    found: list[Floats] = []
    count = 0
    for times in arrivals_in_pieces(process, rng, rate, requests=requests, duration=duration, most=WHOLE):
        found.append(times)
        count += times.size
        if count > MOST_REQUESTS:  # an uneven process may draw far more than it does on average
            raise InputError(too_many(f"{process} in {duration:g} s", count))
    return np.concatenate(found) if found else np.zeros(0)


def arrivals_in_pieces(
    process: ArrivalProcess,
    rng: np.random.Generator,
    rate: float,
    *,
    requests: int = 0,
    duration: float = 0.0,
    most: int,
) -> Iterator[Floats]:
    """Draw the times of ``arrivals`` piece by piece, so that they need not be held together. [s]"""
    expected = requests or rate * duration
    if not (0 < rate < math.inf and 0 < expected < math.inf):
        raise InputError(f"{expected:g} requests at {rate:g} a second; allowed: both above 0 and finite")
    left = requests
    for drawn in process.blocks(rng, rate, LEAST_BLOCK + math.ceil(1.1 * expected), most):
        times = drawn[:left] if requests else drawn[: np.searchsorted(drawn, duration)]
        if times.size:
            yield times
        left -= times.size
        if left == 0 if requests else times.size < drawn.size:
            return


def fit_mmpp(
    cv: float, *, rate: float, length_cv: float, window_s: float = 60.0, burst_share: float, burst_s: float
) -> Mmpp:
    r"""Solve the module's equations for the contrast at which the tokens of a window vary with ``cv``.

    .. math:: d^2 = \frac{c^2 - (1 + c_L^2)/(\lambda T)}{p (1 - p) g(sT)}

    Parameters
    ----------
    cv
        Coefficient of variation of the tokens that arrive in a window. [1]
    rate
        Mean rate. [request/s]
    length_cv
        Coefficient of variation of the length of a request. [1]
    window_s
        Length of a window. [s]
    burst_share, burst_s
        Share of the time that is burst [1], and mean length of a burst [s]: one number does not fix all three.

    Returns
    -------
    Mmpp
        The process with these bursts and that contrast d. [1]

    Raises
    ------
    InputError
        A cv below that of Poisson arrivals, or above that of bursts with nothing between them.

    Examples
    --------
    Poisson arrivals of 4 requests/s vary with ``1/sqrt(240)`` = 0.065 from minute to minute; these with 0.3:

    >>> bursty = fit_mmpp(0.3, rate=4.0, length_cv=0.0, burst_share=0.1, burst_s=30.0)
    >>> f"{bursty.window_cv(rate=4.0, length_cv=0.0, window_s=60.0):.6f}"
    '0.300000'
    """
    poisson = Mmpp(contrast=0.0, burst_share=burst_share, burst_s=burst_s)
    per_contrast = burst_share * (1 - burst_share) * _window_share(window_s / (burst_s * (1 - burst_share)))
    least = poisson.window_cv(rate=above_zero("rate", rate), length_cv=length_cv, window_s=window_s)
    most = math.sqrt(least**2 + per_contrast / burst_share**2)
    if not least <= cv <= most:
        raise InputError(f"cv {cv:g} of a window is out of range; allowed with these bursts: {least:.3g} to {most:.3g}")
    contrast = math.sqrt((cv**2 - least**2) / per_contrast)
    return Mmpp(contrast=min(contrast, 1 / burst_share), burst_share=burst_share, burst_s=burst_s)


def _window_share(x: float) -> float:
    """Variance of the mean over a window of x correlation times, over the variance at an instant: g of the module."""
    return 1 - x / 3 if x < 1e-4 else 2 * (x + math.expm1(-x)) / x**2
