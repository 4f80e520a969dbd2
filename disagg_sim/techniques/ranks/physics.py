r"""Say how unequal the attention ranks of an instance are: requests and cached tokens of the rank that all wait for.

With DP attention a rank holds the caches of its own requests, and all ranks step together: scores and values take as
long as on the rank with the most cached tokens, what is linear in tokens as long as on the one with the most requests.
How a request finds its rank says how far the numbers of requests differ, by a share g of each rank's n requests that
are as if they had come at random, their number Poisson, while the others are always there:

* ``least_load``: g = 0, all ranks have as many;
* ``round_robin``: requests come to a rank at even intervals, and one of age t is still there with the chance S(t) that
  its answer is longer. The number has the variance :math:`n (1 - \int S^2/E[O]) = n\,Gini(O)`, so g = Gini(O): 0 for
  answers of one length, 1/2 for exponential ones;
* ``random``: g = 1.

With the characteristic function :math:`\varphi` of the cache of a request at a random step, that of a rank is

.. math:: \exp\bigl(n\,[(1-g)\ln\varphi(\omega) + g\,(\varphi(\omega) - 1)]\bigr)

and the largest of R independent ranks has the mean :math:`\int 1 - F^R`. That all ranks together hold a fixed number
leaves the excess over the mean as it is. Answers of one length that come in turn keep their ages, which are alike on
all ranks. Source: physics page, section 8; H. A. David, H. N. Nagaraja, Order Statistics, 3rd edition, 2003,
section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.choices import RANDOM
from disagg_sim.physics.passes.chunked import ChunkLoad
from disagg_sim.physics.passes.prefill import PromptLoad
from disagg_sim.physics.residents import RankLoad
from disagg_sim.physics.work import Numeric, at_least_one
from disagg_sim.techniques.experts.physics import fullest_of_random
from disagg_sim.techniques.ranks.physics_sums import RankSum, RequestLaw, cache_sum, prompt_sum, share_at_random, sum_of

#: A prompt that exceeds a chunk by less than this share of it is rounding. [1]
NO_TOKEN = 1e-9


def even_groups(batch: float, ranks: int) -> tuple[tuple[float, int], ...]:
    """Spread requests over ranks as evenly as whole numbers allow: pairs (requests of a rank, ranks), fuller first."""
    least, more = divmod(int(batch), ranks)
    return tuple(each for each in ((least + 1.0, more), (float(least), ranks - more)) if all(each))


def at_each(function: Callable[..., tuple[float, ...]], batch: Numeric, ranks: Numeric, *more: Numeric) -> list[Floats]:
    """Evaluate a function of requests over all ranks, ranks, and maybe more, once for every combination."""
    arguments = np.broadcast_arrays(*(np.asarray(each, dtype=float) for each in (batch, ranks, *more)))
    known, place = np.unique(np.stack([each.ravel() for each in arguments]), axis=1, return_inverse=True)
    found = np.array([function(held, int(count), *others) for held, count, *others in known.T.tolist()])
    return [column[place.ravel()].reshape(arguments[0].shape) for column in found.T]


def chunks_of(
    tokens: RankSum, spread: float, scored: PromptLoad, batch: Numeric, ranks: Numeric, chunk_tokens: Numeric
) -> ChunkLoad:
    r"""Cut the prompts of the rank with the most tokens into chunks.

    Its n prompts count as fewer equal ones with as many query-key pairs, each of X tokens, where :math:`X =
    \frac{T}{n}\,\frac{1+v}{1+v/n}`, T the largest of the ranks' sums and v the ``spread``. Of chunks of c tokens they
    make :math:`m = E\lceil X/c \rceil`, all but the last of :math:`E\min(X, c)`: what is affine in the tokens of a
    chunk has its mean.

    Of two ranks with a prompt of 100 or 300 tokens one has 300 in three cases of four: three chunks of 100, or one.

    >>> two = sum_of(np.array([100.0, 300.0]), np.full(2, 0.5))
    >>> found = chunks_of(two, 0.25, PromptLoad(1.0, 250.0), 2.0, 2.0, 100.0)
    >>> [f"{float(each):.1f}" for each in found[:4]], f"{found.new:.0f}"
    (['1.0', '2.5', '100.0', '100.0'], '250')
    """

    def of(held: float, count: int, chunk: float) -> tuple[float, ...]:
        own = float(np.ceil(held / count))
        own *= (1.0 + spread / own) / (1.0 + spread)
        values, chances = tokens.law_of_largest(even_groups(held, count))
        each = values / own
        chunks = max(float(chances @ np.ceil(each / chunk - NO_TOKEN)), 1.0)
        size = float(chances @ np.minimum(each, chunk))
        return own, chunks, size, float(chances @ each) - (chunks - 1.0) * size

    prompts, chunks, size, last = at_each(of, batch, ranks, chunk_tokens)
    return ChunkLoad(prompts, chunks, size, last, scored)


@dataclass(frozen=True, eq=False)
class RestLoads:
    r"""Unequal ranks of passes that take prompts up behind cached pasts (tokens, probabilities).

    New tokens S of a rank's prompts, their query-key pairs and their pasts C are sums, of which the largest over the
    ranks count: :math:`T = E[\max \sum S]`, :math:`P = E[\max \sum (S C + S^2/2)]`, :math:`Q = E[\max \sum C]`. The n
    equal prompts that have all three have

    .. math:: s = \frac{P}{Q + T/2}, \quad n = \frac{T}{s}, \quad c = \frac{P}{T} - \frac{s}{2}

    which with Q = 0 are those of ``RankLoads.prefill``.
    """

    new: Floats
    past: Floats
    weight: Floats

    @cached_property
    def _sums(self) -> tuple[RankSum, RankSum, RankSum]:
        values = (self.new, self.new * self.past + self.new**2 / 2.0, self.past)
        tokens, pairs, pasts = (sum_of(each, self.weight) for each in values)
        return tokens, pairs, pasts

    def prefill(self, batch: Numeric, ranks: Numeric) -> PromptLoad:
        """Find the prompts of a pass that its ranks wait for; every rank takes an even share of them."""

        def largest(which: int) -> Callable[[float, int], tuple[float, float]]:
            def of(held: float, count: int) -> tuple[float, float]:
                groups = even_groups(held, count)
                return self._sums[which].largest(groups), self._sums[2].largest(groups)

            return of

        tokens, pasts = at_each(largest(0), batch, ranks)
        pairs, _ = at_each(largest(1), batch, ranks)
        new = pairs / (pasts + tokens / 2.0)
        return PromptLoad(tokens / new, new, pairs / tokens - new / 2.0)

    def chunked(self, batch: Numeric, ranks: Numeric, chunk_tokens: Numeric) -> ChunkLoad:
        """Find the chunks of a pass that its ranks wait for; arguments as in ``prefill`` and ``chunks_of``.

        Each chunk attends to a past with which the prompts that are cut have the largest P.
        """
        tokens, pairs, pasts = self._sums
        spread = pairs.mean / (tokens.mean * (pasts.mean + tokens.mean / 2.0)) - 1.0
        slowest = self.prefill(batch, ranks)
        cut = chunks_of(tokens, spread, slowest, batch, ranks, chunk_tokens)
        assert slowest.past is not None
        past = np.maximum(slowest.past + (slowest.new - cut.new) / 2.0, 0.0)
        return cut._replace(scored=PromptLoad(cut.prompts, cut.new, past))


@dataclass(frozen=True, eq=False)
class RankLoads:
    """Unequal ranks of instances that serve requests of one law, routed one way."""

    law: RequestLaw  # lengths of the requests
    routing: str  # of ``RANK_ROUTINGS``
    _largest: dict[tuple[tuple[float, int], ...], float] = field(default_factory=dict, repr=False)

    @cached_property
    def at_random(self) -> float:
        """Share of the requests of a rank whose number is as at random. [1]"""
        return share_at_random(self.law, self.routing)

    @cached_property
    def _by_chance(self) -> RankLoads:
        return RankLoads(self.law, RANDOM)

    @cached_property
    def _caches(self) -> RankSum:
        return cache_sum(self.law, self.at_random)

    @cached_property
    def _prompts(self) -> tuple[RankSum, RankSum]:
        return prompt_sum(self.law, 1), prompt_sum(self.law, 2)

    def prefill(self, batch: Numeric, ranks: Numeric) -> PromptLoad:
        """Find the prompts of a pass that its ranks wait for; every rank takes an even share of them."""

        def largest(held: float, count: int) -> tuple[float, float]:
            groups = even_groups(held, count)
            return self._prompts[0].largest(groups), self._prompts[1].largest(groups)

        tokens, squares = at_each(largest, batch, ranks)
        return PromptLoad(tokens**2 / squares, squares / tokens)

    def chunked(self, batch: Numeric, ranks: Numeric, chunk_tokens: Numeric) -> ChunkLoad:
        """Find the chunks of a pass that its ranks wait for; arguments as in ``prefill`` and ``chunks_of``."""
        tokens = self._prompts[0]
        return chunks_of(
            tokens, tokens.variance / tokens.mean**2, self.prefill(batch, ranks), batch, ranks, chunk_tokens
        )

    def _most_tokens(self, groups: tuple[tuple[float, int], ...]) -> float:
        """Expected cache of the rank with the most, over the mean of a request; each is found once."""
        if groups not in self._largest:
            self._largest[groups] = self._caches.largest(groups) / self._caches.mean
        return self._largest[groups]

    def decode(self, batch: Numeric, ranks: Numeric, context: float) -> RankLoad:
        """Find what the ranks hold that a decode step waits for.

        The context times the batch of the fullest rank is the expected cache of the rank with the most.

        Two ranks take 512 requests at random, 256 +- 16 each: the fuller of them has 0.564 deviations more.
        """
        most, tokens = at_each(self._fullest, batch, ranks)
        return RankLoad(context * (tokens / most), most if self.at_random else None)

    def _fullest(self, batch: float, ranks: int) -> tuple[float, float]:
        """Requests of the fullest rank, and tokens of the one with the most over the mean cache of a request."""
        if ranks == 1:
            return batch, batch
        mean, random = batch / ranks, self.at_random
        if not random:
            return float(np.ceil(mean)), self._most_tokens(even_groups(batch, ranks))
        most = mean * (1.0 - random + random * float(fullest_of_random(random * mean, ranks)))
        tokens = max(self._most_tokens(((mean, ranks),)), 1.0)
        if random < 1.0:  # turns are no worse than chance; the law says so for few requests of unlike answers
            chance = self._by_chance._fullest(batch, ranks)
            if tokens > chance[1]:
                return chance
        return max(most, 1.0), tokens


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

        It is 0 of one rank, and of pieces longer than the first prompt of ``ends``; ``busy`` is the share of steps in
        which a rank has a piece.

        Pieces of a token, anywhere in prompts of 600: the last of two is at 400 on average, 100 beyond the mean.
        """

        def of(tokens: float, count: int, share: float) -> tuple[float, ...]:
            left = np.maximum(self.new - tokens, LEAST_LEFT)
            most = float((self.past + left).max())
            at = most * np.linspace(0.0, 1.0, PASTS) ** 2
            above = 1.0 - np.clip((at[:, None] - self.past) / left, 0.0, 1.0) @ self.tokens
            some = at_least_one(count, share)
            beyond = (1.0 - (1.0 - share * above) ** count) / some - above
            return (float((beyond[1:] + beyond[:-1]) @ np.diff(at)) / 2.0,)

        piece, busy, ranks = np.broadcast_arrays(*(np.asarray(each, dtype=float) for each in (piece, busy, ranks)))
        (beyond,) = at_each(of, piece, ranks, np.clip(busy, LEAST_BUSY, 1.0))
        first, second = self.ends
        return np.asarray(np.where((ranks > 1) & (piece <= first), beyond / ((second - first) / 2.0), 0.0))
