"""Say how routed experts load their ranks: experts that are hit, and picks of the fullest rank.

Tokens pick experts at random, each by its popularity. Popularities follow a lognormal law whose coefficient of
variation is the ``skew``; 0 makes all experts equally popular. Source: physics page, section 6.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.physics.tabulate import distinct
from disagg_sim.physics.work import Numeric, at_least_one

#: Mean picks of a rank up to which the largest of Poisson counts is summed; above, counts are normal. [1]
MOST_SUMMED = 400.0
#: Points of the tables over the mean picks. [1]
POINTS = 120
#: Slots that are shuffled to average the fullest rank: 512 orders of 256 experts, of variation 1 on 32 to 1 %. [1]
SHUFFLED = 2**17


class ExpertRouting(NamedTuple):
    """How tokens fall on expert ranks."""

    imbalance: float | None = None  # picks of the fullest rank over the mean, all experts alike; None = at random [1]
    skew: float = 0.0  # variation of the popularity of experts by which they are hit, at random [1]
    rank_skew: float = 0.0  # and by which their ranks fill [1]


class ExpertLoad(NamedTuple):
    """What the fullest of the expert ranks is given."""

    picks: Numeric  # [1]
    distinct: Numeric  # experts with at least one pick on the rank with most of them [1]


@lru_cache(maxsize=512)
def largest_normal(ranks: float) -> float:
    """Expected largest of ``ranks`` independent standard normal deviates; 0 for one. [1]"""
    x = np.linspace(-9.0, 9.0, 4001)
    density = np.exp(-x * x / 2)
    below = (np.cumsum(density) - density / 2) / density.sum()
    return float(np.trapezoid(np.heaviside(x, 0.5) - below**ranks, x))


def normal_excess(ranks: Numeric) -> Numeric:
    """``largest_normal`` of every element. [1]"""
    counts, place = distinct(np.asarray(ranks, dtype=float))
    return np.asarray(np.array([largest_normal(n) for n in counts.tolist()])[place])


@lru_cache(maxsize=512)
def _excess_table(ranks: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logarithm of the mean, and (largest of ``ranks`` Poisson counts / mean - 1)*sqrt(mean)."""
    means = np.geomspace(1e-3, MOST_SUMMED, POINTS)
    counts = np.arange(int(MOST_SUMMED + 12 * np.sqrt(MOST_SUMMED)) + 20)
    logarithm = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    below = np.cumsum(np.exp(counts * np.log(means)[:, None] - means[:, None] - logarithm), axis=1)
    largest = np.sum(1.0 - np.minimum(below, 1.0) ** ranks, axis=1)
    return np.log(means), (largest / means - 1.0) * np.sqrt(means)


def fullest_of_random(mean: Numeric, ranks: Numeric) -> Numeric:
    """Picks of the fullest of ``ranks`` ranks over their ``mean``, each pick falling on a rank at random. [1]

    The largest of independent Poisson counts, ``sum_x (1 - F(x)^n)/mean``; the fixed sum of the picks leaves what is
    expected of it as it is. Means above ``MOST_SUMMED`` take the normal limit ``1 + z(n)/sqrt(mean)``.

    Examples
    --------
    >>> [round(float(fullest_of_random(mean, 8)), 2) for mean in (1.0, 16.0, 256.0)]
    [2.58, 1.37, 1.09]
    """
    ranks, mean = np.asarray(ranks, dtype=float), np.maximum(np.asarray(mean, dtype=float), 1e-3)
    shape = np.broadcast_shapes(mean.shape, ranks.shape)
    excess, logarithm = np.broadcast_to(normal_excess(ranks), shape).copy(), np.broadcast_to(np.log(mean), shape)
    few = mean <= MOST_SUMMED
    for count in distinct(ranks)[0]:
        here = (ranks == count) & few
        if count > 1 and here.any():
            excess[here] = np.interp(logarithm[here], *_excess_table(float(count)))
    return 1.0 + np.where(ranks > 1, excess, 0.0) / np.sqrt(mean)


@lru_cache(maxsize=64)
def popularity(experts: int, skew: float) -> NDArray[np.float64]:
    """Shares of all picks of ``experts`` experts, falling: quantiles of a lognormal law of variation ``skew``. [1]"""
    deviation = np.sqrt(np.log1p(skew * skew))
    places = [NormalDist().inv_cdf((i + 0.5) / experts) for i in range(experts)]
    share = np.exp(-deviation * np.array(places))
    return np.asarray(share / share.sum())


class Placement(NamedTuple):
    """Where the experts of a layer, and copies of some, lie."""

    share: NDArray[np.float64]  # of all picks that each slot gets, (slots,) [1]
    known: bool  # whether the slots are those of one rank after the other; else they lie anywhere
    fullest: float  # picks of the fullest rank over the mean for endless tokens, expected [1]


@lru_cache(maxsize=512)
def placement(experts: int, slots: int, ranks: int, skew: float) -> Placement:
    """Place experts as engines do.

    Spare ``slots`` hold copies (``packed``). Without any, experts lie in any order: the fullest rank is the mean of
    many orders. A normal law of the sums of ranks would not do: a very popular expert makes its rank the fullest.
    """
    share = popularity(experts, skew)
    if ranks == 1 or skew == 0.0:
        return Placement(share, False, 1.0)
    if slots > experts:
        return packed(share, slots, ranks)
    padded = np.concatenate([share, np.zeros(-slots % ranks)])
    order = np.argsort(np.random.default_rng(0).random((SHUFFLED // padded.size, padded.size)), axis=1)
    fullest = padded[order].reshape(len(order), ranks, -1).sum(axis=-1).max(axis=-1).mean()
    return Placement(share, False, float(fullest * ranks))


def packed(share: NDArray[np.float64], slots: int, ranks: int) -> Placement:
    """Place copies of experts as the engines' EPLB does.

    Each spare slot takes a copy of the expert with the most picks a copy, one after the other; then each copy goes to
    the emptiest rank with room, the heaviest first.
    """
    copies = np.ones(share.size)
    for _ in range(slots - share.size):
        copies[np.argmax(share / copies)] += 1
    loads = np.sort(np.repeat(share / copies, copies.astype(int)))[::-1]
    filled, room, rank = np.zeros(ranks), np.full(ranks, slots // ranks), np.empty(loads.size, dtype=np.intp)
    for slot, load in enumerate(loads):
        rank[slot] = place = int(np.argmin(np.where(room > 0, filled, np.inf)))
        filled[place] += load
        room[place] -= 1
    return Placement(loads[np.argsort(rank, kind="stable")], True, float(filled.max() * ranks))


def hit_slots(tokens: Numeric, top_k: int, lie: Placement, ranks: int) -> Numeric:
    r"""Experts with at least one pick on the rank with most of them, some being popular. [1]

    .. math:: \frac{1}{ep}\sum_s P_s + \sqrt{L^2 + z^2\,\tfrac{1}{ep}\sum_s P_s(1-P_s)}

    :math:`P_s = 1-(1-k q_s)^T` of every slot s. L is what the fullest rank has beyond the mean where each P is certain:
    of a placement that is known its largest sum; of any other :math:`z\sqrt{n\,var(P)\,S/(S-1)}` for ranks of n of
    the S slots, drawn without replacement: variances of ranks are smaller by :math:`1-1/ep`, and as what one has more
    the others have less, the largest of them lies farther out by as much.
    """
    counts, place = np.unique(np.asarray(tokens, dtype=float), return_inverse=True)
    chance = np.minimum(top_k * lie.share, 1.0 - 1e-12)
    hit, slots, z = at_least_one(counts[:, None], chance), chance.size, largest_normal(float(ranks))
    mean, varies = hit.sum(axis=-1) / ranks, (hit * (1.0 - hit)).sum(axis=-1) / ranks
    if lie.known:
        lasting = hit.reshape(counts.size, ranks, -1).sum(axis=-1).max(axis=-1) - mean
    else:
        lasting = z * np.sqrt(slots / ranks * hit.var(axis=-1) * slots / max(slots - 1, 1))
    most = mean + np.sqrt(lasting**2 + z**2 * varies)
    return most[place.reshape(np.shape(tokens))]


def lasting_imbalance(experts: int, ep: Numeric, redundant: Numeric, skew: float) -> Numeric:
    """Picks of the fullest of ``ep`` ranks over the mean for endless tokens, of every pair of ranks and copies. [1]"""
    if skew == 0.0:
        return np.ones(np.broadcast_shapes(np.shape(ep), np.shape(redundant)))
    pairs, place = _pairs(ep, redundant)
    return np.array([placement(experts, experts + spare, ranks, skew).fullest for ranks, spare in pairs])[place]


def _pairs(ep: Numeric, redundant: Numeric) -> tuple[list[tuple[int, int]], Any]:
    """Distinct pairs of ranks and copies, and the place of each element in them."""
    both = np.stack(np.broadcast_arrays(np.asarray(ep), np.asarray(redundant)), axis=-1)
    pairs, place = np.unique(both.reshape(-1, 2), axis=0, return_inverse=True)
    return [(int(ranks), int(spare)) for ranks, spare in pairs], place.reshape(both.shape[:-1])


def fullest_load(
    tokens: Numeric, *, experts: int, top_k: int, ep: Numeric, routing: ExpertRouting, redundant: Numeric = 0
) -> ExpertLoad:
    r"""Picks of the fullest rank, and the most experts that are hit on one, for ``tokens`` tokens of all ranks.

    .. math:: I = 1 + \sqrt{(I_\infty - 1)^2 + (I_0(\mu) - 1)^2},\quad \mu = Tk/ep

    Popularity and chance are independent, so their variances add. No rank has more than all its experts take. T are the
    tokens of all ranks, k the experts of a token, ``routing`` the variation of the popularity of experts by which they
    are hit and by which ranks fill, 0 = all alike; ``redundant`` slots beside one for each expert, over all ranks, hold
    copies. The result has the broadcast shape [1].

    One rank has all 64 x 8 picks and hits 256 x (1 - (1 - 8/256)^64) experts; of 32 ranks the fullest has 1.55 times
    its share of 16:

    >>> alike = ExpertRouting()
    >>> [float(each.round(1)) for each in fullest_load(64.0, experts=256, top_k=8, ep=1, routing=alike)]
    [512.0, 222.4]
    >>> fullest_load(64.0, experts=256, top_k=8, ep=32, routing=alike).picks.round(1) / 16
    np.float64(1.55)
    """
    ep, redundant = np.asarray(ep, dtype=float), np.asarray(redundant, dtype=float)
    mean = np.asarray(tokens) * (top_k / ep)
    chance = fullest_of_random(mean, ep) - 1.0
    slots = (experts + redundant) / ep
    most = np.minimum(np.minimum(top_k, slots) * ep / top_k, ep)
    lasting = lasting_imbalance(experts, ep, redundant, routing.rank_skew) - 1.0
    if routing.skew == 0.0:
        hit, copied = at_least_one(np.asarray(tokens), top_k / experts), (experts + redundant) / experts
        number = experts * hit
        chances = normal_excess(ep) * np.sqrt(number * (1.0 - hit) * copied / ep)
        distinct = np.minimum(number * copied, tokens * top_k) / ep + chances
    else:
        distinct = _popular_hit(tokens, experts, top_k, (ep, redundant), routing.skew)
    picks = mean * np.minimum(1.0 + np.sqrt(lasting**2 + chance**2), np.maximum(most, 1.0))
    return ExpertLoad(picks, np.minimum(np.minimum(distinct, slots), picks))


def _popular_hit(tokens: Numeric, experts: int, top_k: int, spread: tuple[Numeric, Numeric], skew: float) -> Numeric:
    """Experts that are hit on the rank with most of them, for every pair of ranks and copies. [1]"""
    pairs, place = _pairs(*spread)
    lie = [placement(experts, experts + spare, ranks, skew) for ranks, spare in pairs]
    tokens, kind = np.broadcast_arrays(np.asarray(tokens, dtype=float), place)
    distinct = np.empty(tokens.shape)
    for number, (ranks, _) in enumerate(pairs):
        here = kind == number
        distinct[here] = hit_slots(tokens[here], top_k, lie[number], ranks)
    return distinct
