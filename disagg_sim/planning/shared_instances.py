r"""Find how requests arrive at one of several co-located instances behind a least-load router.

A request goes to the instance with the fewest in flight, those that decode included. So of c instances with n each on
average, a share :math:`f = n - K` has K + 1, the others :math:`K = \lfloor n \rfloor`. Where one of the latter ends a
request, the next request goes there; such ends are a share :math:`q = (1 - f) K/n` of all. The other requests go to any
instance with K, whatever it does, one of which has just ended a request: to each of these (1 - f) c + 1 at
:math:`(1 - q)/(1 - f + 1/c)` of the mean rate. An instance that was just given a request has K with the chance q, else
K + 1, and is given none of these. So of the mean rate a share

.. math:: u = \frac{1}{c} + \left(1 - \frac{1}{c}\right) E\left[\frac{q (1 - q)}{1 - f + 1/c}\right]

comes to an instance with a prompt under way whatever it does; one instance gets all its requests so. The others follow
ends, and sequences advance by a token a step, of T_mix where prompts are computed, else of T_d: the instance is given

.. math:: s = u + (1 - u) \frac{T_d}{T_{mix}}

times the requests of one without a prompt.

This forgets when sequences began. Answers of one length end as they began: the requests that follow come together
again, and their groups grow from one lifetime to the next, without end. Two that began together also end together,
before a place is taken again, where their answers differ by fewer than w tokens: the steps until the next request
comes, at a rate :math:`\lambda` of all instances, and the m steps of its prompt,

.. math:: w = \frac{1}{\lambda T_d} + m.

The share of requests with such a companion, at instances with two or more in flight, is taken to come whatever
the instance does (s = 1), only more evenly than Poisson arrivals (``EVEN``).

A request that decodes meets prompts in the places of the others at its instance, not in its own. Where an instance has
N in flight, K or K + 1, these are N - 1 places, so that prompts come at

.. math:: b = \frac{E[N (N - 1)]}{E[N]^2} = \frac{E[n (n - 1) + f (1 - f)]}{E[n]^2}

times the mean rate while one decodes: 1 for Poisson numbers at one instance, 1 - 1/n at many. How many come varies as
these places are taken again, a renewal process. In a whole lifetime that is, over Poisson arrivals, the squared
coefficient of variation :math:`c_v^2` of the lengths of answers; in a share x of it, of equal lifetimes, 1 - x, as a
place is taken once or not at all. With the share x in which a request decodes, beside its own prefill and the queue of
one server (M/D/1) before it, and with what all instances share, that is

.. math:: \frac{1}{c} + \left(1 - \frac{1}{c}\right) \left(1 - x \left(1 - \min(c_v^2, 1)\right)\right)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.planning.queueing import Occupancy
from disagg_sim.techniques.ranks.physics_sums import RequestLaw

#: Variance of the arrivals at one of many co-located instances, over that of Poisson arrivals, where these count as
#: coming at random (chosen from simulations, which lie on both sides). [1]
EVEN = 0.3
#: In place of 0, where it divides; least factor on the rate of the prompts that a request meets. [1]
TINY, FEWEST = 1e-9, 1e-6


def variance_at_instance(instances: int) -> float:
    """Variance of the arrivals at an instance over that of Poisson ones. [1]"""
    return EVEN + (1.0 - EVEN) / instances


class Sent(NamedTuple):
    """How requests are sent to one of several instances."""

    free: float  # share that comes whatever it does [1]
    even: float  # variance over that of Poisson arrivals [1]

    def in_prefill(self, slower: Floats | float) -> Floats | float:
        """Find the requests sent to an instance with prefill over those to one without, by T_mix over T_d. [1]"""
        return self.free + (1.0 - self.free) / np.maximum(slower, 1.0)


#: As Poisson arrivals come.
AT_RANDOM = Sent(1.0, 1.0)


def sent(found: Occupancy, instances: int, together: float) -> Sent:
    """Find how requests are sent to an instance, some of them together with one that they began with.

    Takes ``together`` (share of requests that end with one that they began with, where they have company [1]).

    >>> half = Occupancy(np.array([10.5]), np.ones(1), 0.0)
    >>> one, eight = (sent(half, instances, 0.0) for instances in (1, 8))
    >>> one == AT_RANDOM, round(eight.free, 3), round(float(eight.in_prefill(10.0)), 3)
    (True, 0.474, 0.527)
    """
    grouped = together * in_company(found)
    free = grouped + (1.0 - grouped) * unsteered_share(found, instances)
    return Sent(free, grouped * variance_at_instance(instances) + (1.0 - grouped))


def unsteered_share(found: Occupancy, instances: int) -> float:
    """Find the share u of the requests that arrive whether an instance is in prefill or not. [1]

    >>> half = Occupancy(np.array([10.5]), np.ones(1), 0.0)
    >>> unsteered_share(half, 1), round(unsteered_share(half, 8), 2), round(unsteered_share(half, 1000), 2)
    (1.0, 0.47, 0.5)
    """
    whole = np.floor(found.number)
    less = 1.0 - found.number + whole
    filled = less * whole / np.maximum(found.number, TINY)
    more = filled * (1.0 - filled) / (less + 1.0 / instances)
    return 1.0 / instances + (1.0 - 1.0 / instances) * float(found.share @ more)


def in_company(found: Occupancy) -> float:
    """Find the share of the requests that are not alone at their instance. [1]

    >>> in_company(Occupancy(np.array([0.9]), np.ones(1), 0.0)), in_company(Occupancy(np.array([1.5]), np.ones(1), 0.0))
    (0.0, 0.6666666666666666)
    """
    of_one = np.clip(2.0 - found.number, 0.0, 1.0) / np.maximum(found.number, TINY)
    some = np.where(found.number < 1.0, 0.0, 1.0 - np.minimum(of_one, 1.0))
    return float(found.share @ (some * found.number)) / max(found.mean, TINY)


def chance_of_close_ends(requests: RequestLaw, tokens: float) -> float:
    """Find the probability that the answers of two requests differ by fewer tokens. [1]

    >>> even = np.array([100.0, 200.0, 300.0, 400.0])
    >>> law = RequestLaw(isl=even, isl_weight=np.full(4, 0.25), osl=even, osl_weight=np.full(4, 0.25))
    >>> chance_of_close_ends(law, 50.0), chance_of_close_ends(law, 150.0)
    (0.25, 0.625)
    """
    order = np.argsort(requests.osl)
    osl, weight = requests.osl[order], requests.osl_weight[order]
    below = np.concatenate([[0.0], np.cumsum(weight)])
    near = below[np.searchsorted(osl, osl + tokens)] - below[np.searchsorted(osl, osl - tokens, side="right")]
    return min(float(weight @ near), 1.0)


def variance_while_decoding(requests: RequestLaw, instances: int, decoding: float) -> float:
    """Variance of the requests that come to an instance while one of its own decodes, over that of Poisson ones. [1]

    Takes ``decoding`` (share of its time in flight in which a request decodes [1]).

    >>> even = np.array([100.0, 300.0])
    >>> law = RequestLaw(isl=even, isl_weight=np.full(2, 0.5), osl=even, osl_weight=np.full(2, 0.5))
    >>> variance_while_decoding(law, 1, 1.0), variance_while_decoding(law, 4, 1.0), variance_while_decoding(law, 4, 0.0)
    (1.0, 0.4375, 1.0)
    """
    mean = float(requests.osl_weight @ requests.osl)
    spread = float(requests.osl_weight @ (requests.osl - mean) ** 2) / mean**2
    return 1.0 / instances + (1.0 - 1.0 / instances) * (1.0 - decoding * (1.0 - min(spread, 1.0)))


def arrivals_while_decoding(found: Occupancy, instances: int, decoding: float) -> float:
    """Requests that come to an instance while one of its own decodes, over the mean rate. [1]

    Takes ``decoding`` as ``variance_while_decoding``; ``found`` counts those that decode.

    >>> ten, one = Occupancy(np.array([10.0]), np.ones(1), 0.0), Occupancy(np.array([0.9]), np.ones(1), 0.0)
    >>> arrivals_while_decoding(ten, 8, 1.0), arrivals_while_decoding(ten, 8, 0.5), arrivals_while_decoding(one, 8, 1.0)
    (0.9, 0.95, 1e-06)
    """
    if instances == 1:
        return 1.0
    decoding = max(decoding, TINY)
    number = found.number / decoding
    part = number - np.floor(number)
    others = number * (number - 1.0) + part * (1.0 - part)
    return min(max(float(found.share @ others) / max(found.mean / decoding, TINY) ** 2, FEWEST), 1.0)
