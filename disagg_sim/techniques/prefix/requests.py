r"""What caches hold of prompts: the joint distribution of a prompt and of its cached start (prefix reuse).

A prompt of I tokens of which a share h is found has the past :math:`C = \lfloor\min(hI, I-1)/s_b\rfloor\,s_b`: whole
blocks of s_b tokens, and at least one token is computed. Prefill computes S = I - C new tokens after C cached ones. Its
time is close to bilinear in S and C, so it is integrated over their joint distribution, never taken at the mean: strata
of pasts, in each of which C is a straight line in S. A least-squares line keeps E[C] and E[S*C].
Source: physics page, section 8 (Prefix reuse).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from disagg_sim.arrays import Floats, Mask
from disagg_sim.domain import ByValue
from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import HBM, BetaShare, ConstantShare, Reuse, ShareSpec
from disagg_sim.workload.distributions import ROUNDING, Prompts, gauss, nodes_of, whole_blocks

#: Strata of unequal pasts, of equal numbers of prompts; prompts with nothing cached are one more.
STRATA = 3
#: Pasts that lie so close to a line in the new tokens need no strata: distance over the mean past. [1]
ON_A_LINE = 0.02
#: Gauss points of the new tokens, in each of two classes with pasts on a line, that stand for turns and traces where a
#: grid is wide. Request rates are within 3 % of those of 80 classes of prompts and half within 0.7 % (recorded agents;
#: Mooncake's traces: 1 %), at four times the passes of constant lengths.
FEW = 2
#: Gauss points of a Beta distribution of shares.
SHARE_NODES = 12


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedPrefixes(ByValue):
    """Joint distribution of prompts and of their cached pasts; arrays of shape (points,)."""

    isl: Floats  # [token]
    past: Floats  # [token]
    weight: Floats  # probabilities, sum 1 [1]
    reuse: Reuse  # what it was made of
    few: bool = False  # whether few prompts stand for all (``FEW``), as for turns of sessions

    @property
    def new(self) -> Floats:
        """Tokens that prefill computes, at least one of each prompt. [token]"""
        return self.isl - self.past

    @property
    def constant(self) -> bool:
        """Whether all prompts have one length, one past, and it lies in one tier."""
        return self.isl.size == 1 and len(self.reuse.tiers) <= 1

    @cached_property
    def mean_past(self) -> float:
        """Expected cached past. [token]"""
        return float(self.weight @ self.past)

    @property
    def sent(self) -> Floats:
        """Tokens whose cache goes to decode: all but the whole blocks that decode holds already. [token]"""
        return self.isl - whole_blocks(self.past * self.reuse.in_decode, self.reuse.block_tokens)

    def computed(self, again: tuple[str, ...]) -> tuple[Floats, Floats, Floats]:
        """New tokens, pasts and probabilities of prompts where pasts in the tiers ``again`` are computed again."""
        share = sum(part for name, part in self.reuse.tiers if name in again)
        if not share:
            return self.new, self.past, self.weight
        new, past = np.concatenate([self.new, self.isl]), np.concatenate([self.past, np.zeros_like(self.past)])
        return new, past, np.concatenate([self.weight * (1.0 - share), self.weight * share])

    def nodes(self, step: float = 0.0) -> Prompts:
        """Find few prompts that stand for all, of blocks of ``step`` tokens."""
        found = []
        for stratum in self._strata():
            share = float(self.weight[stratum].sum())
            new, past, weight = self.new[stratum], self.past[stratum], self.weight[stratum] / share
            at, own = gauss(new, weight, FEW, log=False) if self.few else nodes_of(new, weight, step)
            line = _line(new, past, weight, at)
            found.append((at + line, line, own * share))
        isl, past, weight = (np.concatenate(parts) for parts in zip(*found, strict=True))
        tiers = self.reuse.tiers or ((HBM, 1.0),)
        return Prompts(
            np.tile(isl, len(tiers)),
            np.tile(past, len(tiers)),
            np.concatenate([weight * share for _, share in tiers]),
            tuple(name for name, _ in tiers for _ in range(isl.size)),
        )

    def quantile(self, p: float) -> tuple[float, float]:
        """Length and past of the prompt whose new tokens a share ``p`` of the prompts does not exceed. [token]"""
        order = np.argsort(self.new, kind="stable")
        new, weight = self.new[order], self.weight[order]
        at = np.interp([p], np.cumsum(weight) - weight / 2, new)
        past = float(_line(self.new, self.past, self.weight, at)[0])
        return float(at[0]) + past, past

    def _strata(self) -> list[Mask]:
        if self.few:  # prompts with few new tokens and with many, of equal sums of their roots
            order = np.argsort(self.new, kind="stable")
            roots = np.cumsum(self.weight[order] * np.sqrt(self.new[order]))
            many = self.new > self.new[order][np.searchsorted(roots, roots[-1] / 2)]
            return [half for half in (~many, many) if half.any()]
        off = self.past - _line(self.new, self.past, self.weight, self.new)
        if math.sqrt(float(self.weight @ off**2)) <= ON_A_LINE * self.mean_past:
            return [np.ones(self.past.size, dtype=bool)]
        cold = self.past == 0
        warm, found = ~cold, [cold] if cold.any() else []
        order = np.argsort(self.past, kind="stable")
        order = order[warm[order]]
        rank = np.empty(self.past.size)
        rank[order] = np.cumsum(self.weight[order]) / self.weight[order].sum()
        place = np.minimum(np.floor(rank * STRATA * (1 - ROUNDING)), STRATA - 1)
        return [*found, *(each for k in range(STRATA) if (each := warm & (place == k)).any())]


def cached_share(isl: Floats, weight: Floats, reuse: Reuse) -> CachedPrefixes:
    """Join a distribution of prompts [token] with a share of each that caches hold, drawn independently of its length.

    Whole blocks of 16 tokens, and a prompt is never cached whole:

    >>> shares = [Reuse(share=ConstantShare(share=share)) for share in (0.5, 1.0)]
    >>> [float(cached_share(np.array([100.0]), np.ones(1), reuse).past[0]) for reuse in shares]
    [48.0, 96.0]
    """
    share, chance = _shares(reuse.share)
    whole = np.repeat(isl, share.size)
    held = np.minimum(whole * np.tile(share, isl.size), whole - 1)
    return CachedPrefixes(
        isl=whole,
        past=whole_blocks(np.maximum(held, 0.0), reuse.block_tokens),
        weight=np.repeat(weight, share.size) * np.tile(chance, isl.size),
        reuse=reuse,
    )


def prefixes_of(
    isl: Floats, past: ArrayLike, tiers: tuple[tuple[str, float], ...] = (), *, few: bool = False
) -> CachedPrefixes:
    """Take the cached pasts of requests as they were observed. [token]"""
    found = np.asarray(past, dtype=np.float64)
    if found.shape != isl.shape or not np.all((found >= 0) & (found < isl)):
        raise InputError("cached tokens must be one number a request, from 0 and below its input tokens")
    share = float(found.sum() / isl.sum())
    weight = np.full(isl.size, 1.0 / isl.size)
    reuse = Reuse(share=ConstantShare(share=share), block_tokens=1, tiers=tiers)
    return CachedPrefixes(isl=isl, past=found, weight=weight, reuse=reuse, few=few)


def _line(new: Floats, past: Floats, weight: Floats, at: Floats) -> Floats:
    """Past on the least-squares line over the new tokens, at some of them; never below 0. [token]"""
    centre, mean = float(weight @ new), float(weight @ past)
    spread = float(weight @ (new - centre) ** 2)
    slope = float(weight @ ((new - centre) * past)) / spread if spread > (ROUNDING * centre) ** 2 else 0.0
    return np.maximum(mean + slope * (at - centre), 0.0)


def _shares(law: ShareSpec) -> tuple[Floats, Floats]:
    """Shares that stand for a distribution, and their probabilities; arrays of shape (shares,). [1]"""
    if isinstance(law, ConstantShare):
        return np.array([law.share]), np.ones(1)
    if isinstance(law, BetaShare):
        return _beta(law.alpha, law.beta)
    shares = np.array(law.shares)
    middle, half = (shares[1:] + shares[:-1]) / 2, np.diff(shares) / 2
    chance = np.diff(np.array(law.probabilities)) / 2
    off = half / math.sqrt(3.0)  # two Gauss points of each piece
    return np.concatenate([middle - off, middle + off]), np.concatenate([chance, chance])


def _beta(alpha: float, beta: float) -> tuple[Floats, Floats]:
    """Gauss-Jacobi quadrature of the Beta distribution: exact for polynomials of degree 2*SHARE_NODES - 1 in the share.

    The recurrence of the Jacobi polynomials with weight (1-x)^a (1+x)^b, a = beta - 1 and b = alpha - 1, moved to
    (0, 1). Source: W. Gautschi, Orthogonal Polynomials, 2004, table 1.1.
    """
    a, b = beta - 1.0, alpha - 1.0
    n = np.arange(1.0, SHARE_NODES)
    total = 2.0 * n + a + b
    diagonal = np.concatenate([[(b - a) / (a + b + 2.0)], (b**2 - a**2) / (total * (total + 2.0))])
    first = 4.0 * (1.0 + a) * (1.0 + b) / ((2.0 + a + b) ** 2 * (3.0 + a + b))
    n, total = n[1:], total[1:]
    side = 4.0 * n * (n + a) * (n + b) * (n + a + b) / (total**2 * (total + 1.0) * (total - 1.0))
    side = np.concatenate([[first], side])
    jacobi = np.diag(diagonal) + np.diag(np.sqrt(side), 1) + np.diag(np.sqrt(side), -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return (1.0 + nodes) / 2.0, vectors[0] ** 2
