"""Distributions of one length: mean, quantiles and samples of input or output lengths.

The parameters are those of the traffic files (``facts.traffic``); here they become distributions:

>>> from disagg_sim.facts.load import load_traffic
>>> length_distribution(load_traffic("log_normal_4096_512").cases[0].isl).quantile(0.5)
4096.0

Integrals over a distribution take few points (Gauss quadrature): lengths whose weighted mean stands for the
mean over it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import ConstantLength, EmpiricalLength, LengthSpec, LogNormalLength, ParetoLength

#: A share of a length that is whole but for rounding counts as whole. [1]
ROUNDING = 1e-12


class LengthDistribution(Protocol):
    """A distribution of request lengths."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Expected length. [token]"""

    def quantile(self, p: float) -> float:
        """Length that a share ``p`` of the requests does not exceed. [token]"""

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """``n`` independent lengths, whole and at least 1; shape ``(n,)``. [token]"""


def _check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise InputError(f"probability {p!r} is outside [0, 1]")


def _whole(lengths: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(np.rint(lengths), 1).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(ConstantLength):
    """Every request has the same length."""

    @property
    def mean(self) -> float:
        """Expected length. [token]"""
        return float(self.tokens)

    def quantile(self, p: float) -> float:
        """Length that a share ``p`` of the requests does not exceed. [token]"""
        _check_probability(p)
        return float(self.tokens)

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:  # noqa: ARG002 - nothing is random here
        """``n`` equal lengths; shape ``(n,)``. [token]"""
        return np.full(n, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal(LogNormalLength):
    """``exp(N(ln median, sigma^2))``; moments ``E[X^k] = median^k * exp(k^2 sigma^2 / 2)``."""

    @property
    def mean(self) -> float:
        """Expected length. [token]"""
        return self.median * math.exp(self.sigma**2 / 2)

    def quantile(self, p: float) -> float:
        """Length that a share ``p`` of the requests does not exceed. [token]"""
        _check_probability(p)
        if p in (0.0, 1.0) and self.sigma > 0:
            return math.inf if p else 0.0
        return self.median if self.sigma == 0 else self.median * math.exp(self.sigma * NormalDist().inv_cdf(p))

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """``n`` independent lengths, whole and at least 1; shape ``(n,)``. [token]"""
        return _whole(self.median * np.exp(self.sigma * rng.standard_normal(n)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto(ParetoLength):
    """Pareto tail cut at ``maximum``: ``P(X > x) = (x^-a - H^-a) / (L^-a - H^-a)`` on ``[L, H]``."""

    @property
    def mean(self) -> float:
        """Expected length. [token]"""
        # a L / (1 - r^a) * integral_1^(1/r) y^-a dy with r = L/H; the integral is a logarithm at a = 1
        ratio = self.minimum / self.maximum
        gap = (1 - self.alpha) * -math.log(ratio)
        integral = -math.log(ratio) * (math.expm1(gap) / gap if gap else 1.0)
        return self.alpha * self.minimum * integral / -math.expm1(self.alpha * math.log(ratio))

    def quantile(self, p: float) -> float:
        """Length that a share ``p`` of the requests does not exceed. [token]"""
        _check_probability(p)
        return float(self._inverse(np.float64(p)))

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """``n`` independent lengths, whole and at least 1; shape ``(n,)``. [token]"""
        return _whole(np.asarray(self._inverse(rng.random(n)), dtype=np.float64))

    def _inverse(self, p: np.float64 | NDArray[np.float64]) -> np.float64 | NDArray[np.float64]:
        cut = (self.minimum / self.maximum) ** self.alpha
        lengths: NDArray[np.float64] = self.minimum * (1.0 - p * (1.0 - cut)) ** (-1.0 / self.alpha)
        return np.clip(lengths, self.minimum, self.maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Empirical(EmpiricalLength):
    """Quantile table: uniform between neighbouring quantiles."""

    @property
    def mean(self) -> float:
        """Expected length. [token]"""
        tokens = np.asarray(self.tokens, dtype=np.float64)
        return float(np.sum(np.diff(self.probabilities) * (tokens[:-1] + tokens[1:]) / 2))

    def quantile(self, p: float) -> float:
        """Length that a share ``p`` of the requests does not exceed. [token]"""
        _check_probability(p)
        return float(np.interp(p, self.probabilities, self.tokens))

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """``n`` independent lengths, whole and at least 1; shape ``(n,)``. [token]"""
        return _whole(np.interp(rng.random(n), self.probabilities, self.tokens))


def length_distribution(spec: LengthSpec) -> LengthDistribution:
    """Make the distribution that a traffic file describes. [token]"""
    match spec:
        case ConstantLength():
            return Constant(**asdict(spec))
        case LogNormalLength():
            return LogNormal(**asdict(spec))
        case ParetoLength():
            return Pareto(**asdict(spec))
        case EmpiricalLength():
            return Empirical(**asdict(spec))


#: Gauss points of a law: a smooth prefill pass integrates to 4e-4 over every shipped traffic, one with tiles to 2e-3,
#: as each point stands somewhere on the stair of its last tile.
NODES = 8
#: Ends of the parts at whose middles quantiles are read: chosen so that 0.5, 0.9, 0.95 and 0.99 are middles. [1]
PART_ENDS = np.array([0.0, 0.1, 0.25, 0.4, 0.6, 0.72, 0.8, 0.86, 0.94, 0.96, 0.985, 0.995, 1.0])
#: Gauss points of each of four strata under stairs: chunked passes integrate to 0.5 %, where four points left 0.7 %.
STAIR_NODES = 5
#: Less than this share of its mean, the spread of a law is rounding. [1]
NO_SPREAD = 1e-9


def nodes_of(lengths: Floats, weight: Floats, step: float = 0.0) -> tuple[Floats, Floats]:
    """Find few lengths [token], rising, with weights [1], that stand for a distribution; one where there is one length.

    Of a smooth function (``step`` 0) by Gauss quadrature of the law of the logarithm with ``NODES`` points: exact for
    polynomials of degree 2*NODES - 1 in it. A function with stairs jumps or bends at the multiples of ``step``. Up to
    3*step each stair is a stratum of its own with ``STAIR_NODES`` Gauss points. Beyond, where the law spreads over many
    stairs, a point stands for its whole stair: it is shared between the two nearest mid-stair lengths, which keeps the
    mean and gives a stair its mean height.

    >>> lengths, weights = nodes_of(np.array([1.0, 2.0, 4.0]), np.full(3, 1 / 3))
    >>> lengths.round(6).tolist(), weights.round(6).tolist()
    ([1.0, 2.0, 4.0], [0.333333, 0.333333, 0.333333])
    """
    if not step or lengths.size == 1:
        return gauss(lengths, weight, NODES)
    found, weights = [], []
    for low, high in pairwise((0.0, step, 2 * step, 3 * step, math.inf)):
        inside = (lengths > low) & (lengths <= high)
        share = float(weight[inside].sum())
        if not share > 0:
            continue
        some, part = lengths[inside], weight[inside] / share
        nodes, own = gauss(some, part, STAIR_NODES)
        if math.isinf(high) and float(part @ (some - part @ some) ** 2) > step**2:
            below = np.floor(nodes / step - 0.5) + 0.5  # mid-stair length, in steps
            above = nodes / step - below
            nodes = np.concatenate([below, below + 1]) * step
            own = np.concatenate([own * (1 - above), own * above])
        found.append(nodes)
        weights.append(own * share)
    nodes, place = np.unique(np.concatenate(found), return_inverse=True)
    return nodes, np.bincount(place, np.concatenate(weights)).astype(np.float64)


class Prompts(NamedTuple):
    """Prompts that stand for a distribution, arrays of shape (nodes,)."""

    isl: Floats  # whole length [token]
    past: Floats  # of it, cached before its prefill [token]
    weight: Floats  # probabilities, sum 1 [1]
    tier: tuple[str, ...]  # (nodes,) where the past lies

    @property
    def new(self) -> Floats:
        """Tokens that prefill computes. [token]"""
        return self.isl - self.past

    def each(self) -> Iterator[tuple[float, float, float, str]]:
        """Length, past and weight of one node after the other, and where its past lies. [token], [token], [1]"""
        return zip(self.isl.tolist(), self.past.tolist(), self.weight.tolist(), self.tier, strict=True)


class PromptParts(NamedTuple):
    """Parts of a distribution of lengths, each by the length at its middle, of which quantiles are read.

    Gauss nodes stand for means alone: of a log-normal law they leave nothing between the quantiles 0.87 and 0.99.
    """

    isl: Floats  # (parts,) rising [token]
    weights: Floats  # (parts,) probabilities [1]
    matrix: Floats  # (parts, nodes) that takes values at the nodes to those of the parts [1]

    @classmethod
    def of(cls, lengths: Floats, weight: Floats, nodes: Floats) -> PromptParts:
        """Divide a distribution; parabolas through three nodes give values between them."""
        middles = (PART_ENDS[1:] + PART_ENDS[:-1]) / 2
        reached = np.cumsum(weight)
        isl = lengths[np.minimum(np.searchsorted(reached, middles * reached[-1]), lengths.size - 1)]
        count = min(nodes.size, 3)
        first = np.clip(np.searchsorted(nodes, isl) - 2 + (count < 3), 0, nodes.size - count)
        near = first[:, None] + np.arange(count)
        matrix = np.zeros((isl.size, nodes.size))
        for own in range(count):
            others = [other for other in range(count) if other != own]
            at = nodes[near]
            terms = [(isl - at[:, other]) / (at[:, own] - at[:, other]) for other in others]
            matrix[np.arange(isl.size), near[:, own]] = np.prod(terms, axis=0) if terms else 1.0
        return cls(isl, np.diff(PART_ENDS), matrix)

    def values(self, of_nodes: Floats) -> Floats:
        """Values at the parts of those at the nodes, (nodes, ...)."""
        return np.tensordot(self.matrix, of_nodes, 1)


def gauss(lengths: Floats, weight: Floats, count: int, *, log: bool = True) -> tuple[Floats, Floats]:
    """Gauss quadrature of a discrete distribution of lengths (Stieltjes, Golub and Welsch): rising lengths and weights.

    The recurrence of orthonormal polynomials stops early where fewer points carry the law.

    >>> lengths, weight = np.arange(1.0, 101.0), np.full(100, 0.01)
    >>> nodes, weights = gauss(lengths, weight, 2, log=False)
    >>> nodes.size, f"{weights @ nodes**3 / (weight @ lengths**3):.6f}"
    (2, '1.000000')
    """
    at = np.log(lengths) if log else lengths
    centre = float(weight @ at)
    spread = math.sqrt(float(weight @ (at - centre) ** 2))
    if spread <= NO_SPREAD * (1.0 if log else centre):
        return lengths[:1], np.ones(1)  # as it is: a tile more or less may hang on its last digit
    x = (at - centre) / spread
    diagonal, side = [], []
    previous, current, norm = np.zeros_like(x), np.ones_like(x), 0.0
    for _ in range(count):
        diagonal.append(float(weight @ (x * current**2)))
        following = (x - diagonal[-1]) * current - norm * previous
        norm = math.sqrt(float(weight @ following**2))
        if norm <= NO_SPREAD:
            break
        side.append(norm)
        previous, current = current, following / norm
    jacobi = np.diag(diagonal) + np.diag(side[: len(diagonal) - 1], 1) + np.diag(side[: len(diagonal) - 1], -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    found = centre + spread * nodes
    return np.exp(found) if log else found, vectors[0] ** 2


def whole_blocks(tokens: Floats, block_tokens: int) -> Floats:
    """Round down to whole blocks. [token]"""
    return np.floor(tokens / block_tokens * (1 + ROUNDING)) * block_tokens
