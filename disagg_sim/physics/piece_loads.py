"""Say how unequal the attention ranks are whose decode steps take pieces of prompts along."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.physics.rank_load import at_each
from disagg_sim.physics.work import Numeric

#: Pasts at which the distribution of those of pieces is found. [1]
PASTS = 257
#: In place of nothing: tokens of a prompt that are left [token], and share of steps with a piece [1].
LEAST_LEFT, LEAST_BUSY = 1e-6, 1e-9


@dataclass(frozen=True, eq=False)
class PieceLoads:
    r"""Unequal pasts of the pieces of prompts that ranks take along in their steps.

    A piece of p tokens is of a prompt in proportion to its new tokens S, at any place of it, so it comes after
    :math:`X = C + u (S - p)` tokens, u uniform and C the cached past. With R ranks that have one each with the
    probability :math:`\varphi`, and F the distribution of X, the longest past of a step with some piece is

    .. math:: x = \frac{\int 1 - (1 - \varphi (1 - F))^R}{1 - (1 - \varphi)^R}

    Scores and values are affine in the past, so their time there lies on the line through those of two prompts.

    Parameters
    ----------
    new, past, weight
        Of prompts, and their probabilities; arrays of shape (prompts,). [token], [1]
    """

    new: Floats
    past: Floats
    weight: Floats

    @cached_property
    def tokens(self) -> Floats:
        """Probabilities of the prompts that a token of prefill may be of, (prompts,). [1]"""
        share = self.weight * self.new
        return np.asarray(share / share.sum())

    @cached_property
    def ends(self) -> tuple[float, float]:
        """New tokens of two prompts without a past: pieces of them come after mean pasts twice and six times X's."""
        mean = float(self.tokens @ (self.past + self.new / 2.0))
        return 4.0 * mean, 12.0 * mean

    def further(self, piece: Numeric, busy: Numeric, ranks: Numeric) -> Floats:
        """Find how far the slowest piece lies beyond the mean one, over the distance of the two prompts of ``ends``.

        Parameters
        ----------
        piece
            Tokens of a rank. [token]
        busy
            Share of steps in which a rank has a piece. [1]
        ranks
            DP ranks of attention. [1]

        Returns
        -------
        ndarray
            Of the broadcast shape; 0 of one rank, and of pieces longer than the first prompt of ``ends``. [1]

        Examples
        --------
        Pieces of a token, anywhere in prompts of 600: the last of two is at 400 on average, 100 beyond the mean.

        >>> one = PieceLoads(np.array([600.0]), np.zeros(1), np.ones(1))
        >>> one.ends, f"{float(one.further(1.0, 1.0, 2.0)) * (3600 - 1200) / 2:.0f} tokens"
        ((1200.0, 3600.0), '100 tokens')
        """

        def of(tokens: float, count: int, share: float) -> tuple[float, ...]:
            left = np.maximum(self.new - tokens, LEAST_LEFT)
            most = float((self.past + left).max())
            at = most * np.linspace(0.0, 1.0, PASTS) ** 2
            above = 1.0 - np.clip((at[:, None] - self.past) / left, 0.0, 1.0) @ self.tokens
            some = -np.expm1(count * np.log1p(-share)) if share < 1.0 else 1.0
            beyond = (1.0 - (1.0 - share * above) ** count) / some - above
            return (float((beyond[1:] + beyond[:-1]) @ np.diff(at)) / 2.0,)

        piece, busy, ranks = np.broadcast_arrays(*(np.asarray(each, dtype=float) for each in (piece, busy, ranks)))
        (beyond,) = at_each(of, piece, ranks, np.clip(busy, LEAST_BUSY, 1.0))
        first, second = self.ends
        return np.asarray(np.where((ranks > 1) & (piece <= first), beyond / ((second - first) / 2.0), 0.0))
