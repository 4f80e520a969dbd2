"""Describe sums over the requests of an attention rank, and find the largest of several.

The equations stand in the head of ``techniques.ranks.physics``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.choices import RANDOM, ROUND_ROBIN
from disagg_sim.domain import ByValue

#: Values of a sum at which its distribution is found. [1]
VALUES = 4096
#: Half of the window that they lie in: standard deviations of the sum. [1]
DEVIATIONS = 8.0
#: Share of requests that may be longer than what the window has room for beside. [1]
BEYOND = 1e-6
#: In place of 0 under a logarithm. [1]
LEAST = 1e-300
#: Ages of a request, from its start to its end, that stand for all. [1]
AGES = 16
#: Requests that stand for those of a trace, at most. [1]
POINTS = 16_384

Complex = NDArray[np.complex128]


@dataclass(frozen=True, eq=False, kw_only=True)
class RankSum:
    """A sum over the requests of a rank, of which there are n on average, by its characteristic function."""

    #: psi of the head of this file, of angular frequencies of shape (frequencies,). [1]
    exponent: Callable[[Floats], Complex]
    #: ``mean``, ``variance``: of the sum, over n.
    mean: float
    variance: float
    reach: float  # what one request hardly exceeds
    _known: dict[float, Complex] = field(default_factory=dict, repr=False)  # psi, by the distance of the values

    def largest(self, groups: tuple[tuple[float, int], ...]) -> float:
        """Find the expected largest sum of independent ranks, in the unit of ``mean``."""
        first, step, below = self._largest(groups)
        return float(first + step * np.sum(1.0 - below))

    def law_of_largest(self, groups: tuple[tuple[float, int], ...]) -> tuple[Floats, Floats]:
        """Find the distribution of the largest sum of independent ranks.

        The result is rising values at even distances, in the unit of ``mean``, and their probabilities, (values,).

        >>> one = sum_of(np.array([100.0, 300.0]), np.array([0.5, 0.5]))
        >>> values, chances = one.law_of_largest(((1.0, 2),))
        >>> f"{chances[values < 200].sum():.2f}, {values @ chances:.0f}"
        '0.25, 250'
        """
        first, step, below = self._largest(groups)
        values: Floats = first + step * np.arange(float(VALUES))
        return values, np.diff(below, prepend=0.0)

    def _largest(self, groups: tuple[tuple[float, int], ...]) -> tuple[float, float, Floats]:
        """First of the values that the largest sum may take, their distance, and its distribution function."""
        requests = groups[0][0]
        deviation = float(np.sqrt(requests * max(self.variance, 0.0)))
        width = 2.0 * DEVIATIONS * deviation + self.reach + 2.0 * self.mean
        if not width:
            return 0.0, 1.0, np.ones(VALUES)
        step = float(2.0 ** np.ceil(np.log2(width / VALUES)))
        first = step * math.floor(max(0.0, (requests - 1.0) * self.mean - DEVIATIONS * deviation) / step)
        omega = 2.0 * np.pi / (VALUES * step) * np.arange(VALUES // 2 + 1.0)
        if step not in self._known:
            self._known[step] = self.exponent(omega)
        below = np.ones(VALUES)
        for held, ranks in groups:
            chances = np.fft.irfft(np.exp(np.conj(held * self._known[step] - 1j * omega * first)), VALUES)
            below = below * np.clip(np.cumsum(chances), 0.0, 1.0) ** ranks
        return first, step, below


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestLaw(ByValue):
    """Input and output lengths of requests, drawn independently, or jointly as they stand beside each other."""

    isl: Floats  # (inputs,) [token]
    isl_weight: Floats  # (inputs,) probabilities, sum 1 [1]
    osl: Floats  # (outputs,) [token]
    osl_weight: Floats  # (outputs,) probabilities, sum 1 [1]
    joint: bool = False  # whether ``isl`` and ``osl`` are of the same requests

    @property
    def even(self) -> bool:
        """Whether all requests have one length, of input and of output."""
        return bool(np.ptp(self.isl) == 0.0 and self.alike)

    @property
    def alike(self) -> bool:
        """Whether all answers have one length."""
        return bool(np.ptp(self.osl) == 0.0)

    @property
    def reach(self) -> float:
        """Input and output together that hardly any request exceeds. [token]"""
        if self.joint:
            return float((self.isl + self.osl).max())
        return _end(self.isl, self.isl_weight) + _end(self.osl, self.osl_weight)

    def mean(self, inputs: int, outputs: int) -> float:
        """Expected product of powers of input and output."""
        if self.joint:
            return float(self.osl_weight @ (self.isl**inputs * self.osl**outputs))
        return float(self.isl_weight @ self.isl**inputs) * float(self.osl_weight @ self.osl**outputs)

    def at_steps(self) -> RequestLaw:
        """The law of those in flight at a random step: O-1 times as likely, for so many steps they stay."""
        if not self.joint:
            return replace(self, osl_weight=_shares(self.osl_weight * (self.osl - 1.0)))
        weight = _shares(self.osl_weight * (self.osl - 1.0))
        return replace(self, isl_weight=weight, osl_weight=weight)


def _end(values: Floats, weights: Floats) -> float:
    """Value that a share ``BEYOND`` exceeds; they ascend unless all count alike."""
    order = np.argsort(values)
    place = np.searchsorted(np.cumsum(weights[order]), 1.0 - BEYOND)
    return float(values[order][min(int(place), values.size - 1)])


def _shares(weights: Floats) -> Floats:
    shares: Floats = weights / weights.sum()
    return shares


def request_law(isl: Floats, osl: Floats) -> RequestLaw:
    """Make the empirical law of requests by their lengths [token]; of more than ``POINTS`` those at even distances."""
    some = slice(None, None, -(-osl.size // POINTS))
    isl, osl = isl[some], osl[some]
    weight = np.full(osl.size, 1.0 / osl.size)
    return RequestLaw(isl=isl, isl_weight=weight, osl=osl, osl_weight=weight, joint=True)


def _waves(values: Floats, weights: Floats, omega: Floats) -> Complex:
    """Characteristic function of values, each shared between its neighbours in the window, which keeps the mean. [1]"""
    size = 2 * (omega.size - 1)
    place = values / (np.pi / omega[-1])
    below = np.floor(place)
    above, held = weights * (place - below), np.zeros(size)
    for at, share in ((below, weights - above), (below + 1.0, above)):
        held += np.bincount((at % size).astype(np.int64), share, minlength=size)
    return np.asarray(np.conj(np.fft.rfft(held)))


def _logarithm(waves: Complex) -> Complex:
    """Logarithm of a characteristic function, 0 at frequency 0 and steady from there."""
    return np.asarray(np.log(np.maximum(np.abs(waves), LEAST)) + 1j * np.unwrap(np.angle(waves)))


def _caches(law: RequestLaw, omega: Floats, *, alike: bool) -> Complex:
    """Characteristic function of the cache of a request at a random step; of ages that are ``alike``, at their mean."""
    share = np.array([0.5]) if alike else (np.arange(AGES) + 0.5) / AGES
    ages, weights = law.osl[:, None] * share, np.repeat(law.osl_weight / share.size, share.size)
    if law.joint:
        return _waves((law.isl[:, None] + ages).ravel(), weights, omega)
    return _waves(law.isl, law.isl_weight, omega) * _waves(ages.ravel(), weights, omega)


def share_at_random(law: RequestLaw, routing: str) -> float:
    """Find the share g of the head of this file.

    The result is from 0 to 1.

    Half of the answers have 1 token and half 3: of any two the shorter has 1.5 on average, and Gini is 1 - 1.5/2.

    >>> one, half = np.ones(1), np.full(2, 0.5)
    >>> law = RequestLaw(isl=one, isl_weight=one, osl=np.array([1.0, 3.0]), osl_weight=half)
    >>> [round(share_at_random(law, routing), 6) for routing in ("least_load", ROUND_ROBIN, RANDOM)]
    [0.0, 0.25, 1.0]
    """
    if routing != ROUND_ROBIN or law.alike:
        return float(routing == RANDOM)
    order = np.argsort(law.osl)
    osl, weight = law.osl[order], law.osl_weight[order]
    return float(weight * osl @ (2.0 * np.cumsum(weight) - weight - 1.0)) / float(weight @ osl)


def cache_sum(law: RequestLaw, at_random: float) -> RankSum:
    """Describe the cached tokens of a rank in decode.

    Prompts and answers of 1000 tokens: caches of 1000 to 2000, at all ages alike, or at ages and in numbers at random.

    >>> law = request_law(np.array([1000.0]), np.array([1000.0]))
    >>> sums = [cache_sum(law, share) for share in (0.0, 1.0)]
    >>> [f"{each.mean:.0f}, {each.variance**0.5:.0f}" for each in sums]
    ['1500, 0', '1500, 1528']
    """
    running, alike = law.at_steps(), not at_random and law.alike
    mean = running.mean(1, 0) + running.mean(0, 1) / 2
    square = running.mean(2, 0) + running.mean(1, 1) + running.mean(0, 2) / (4.0 if alike else 3.0)

    def exponent(omega: Floats) -> Complex:
        waves = _caches(running, omega, alike=alike)
        return np.asarray((1.0 - at_random) * _logarithm(waves) + at_random * (waves - 1.0))

    variance = max(square - (1.0 - at_random) * mean**2, 0.0)
    return RankSum(exponent=exponent, mean=mean, variance=variance, reach=law.reach)


def prompt_sum(law: RequestLaw, power: int) -> RankSum:
    """Describe the tokens of the prompts of a rank in a pass, or the sum of their squares."""
    return sum_of(law.isl**power, law.isl_weight)


def sum_of(values: Floats, weights: Floats) -> RankSum:
    """Describe the sum of a quantity over the requests of a rank, each request's drawn alike.

    >>> one = sum_of(np.array([100.0, 300.0]), np.array([0.5, 0.5]))
    >>> f"{one.mean:.0f}, of two ranks {one.largest(((1.0, 2),)):.0f}"
    '200, of two ranks 250'
    """
    mean = float(weights @ values)
    return RankSum(
        exponent=lambda omega: _logarithm(_waves(values, weights, omega)),
        mean=mean,
        variance=float(weights @ (values - mean) ** 2),
        reach=_end(values, weights),
    )
