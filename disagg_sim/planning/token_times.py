r"""Compute the distribution of TPOT over the requests of an instance that prefills between their tokens.

A request decodes for G steps of :math:`T_d`; each prompt that comes meanwhile adds s, and others come while it is
computed, :math:`\rho = \lambda s` on average. One rank serves prompts before decodes, so that G steps take until
:math:`G\,T_d` of decodes are done, the delay busy period of one server. Prompts that came in the step of the request's
own prompt wait behind it; such a step is longer than others by :math:`s/(1 - \rho^2)`, where a step lasts
:math:`T_d + s N(T)` with the arrivals of the one before. With K prompts

.. math:: TPOT = T_d + \frac{s K}{G}, \quad E[K] = \frac{\lambda V}{1 - \rho}, \quad
    Var[K] = \frac{\lambda V}{(1 - \rho)^3}, \quad V = G\,T_d + \frac{s}{1 - \rho^2}

where K has the law of Borel and Tanner, :math:`P(K = k) = a (a + k \rho)^{k-1} e^{-a - k \rho} / k!` with
:math:`a = \lambda V`. Prompts of several lengths take the law of as large a mean and variance, and so does the time in
which some of several ranks has a prompt (``queueing.busy_variance``).

The prompts that a request meets decode beside it, too. Sequences in service over its time D are the arrivals of D
before and D after its first token, by the share of D in which they meet it: their mean varies 2/3 as much as their
number at one time, a quarter of which follows from the prompts that are met, and 5/12 does not.

Sources: J. C. Tanner, "A derivation of the Borel distribution", Biometrika 48 (1961); R. W. Conway, W. L. Maxwell and
L. W. Miller, "Theory of Scheduling", 1967, section 8-4, for delay busy periods.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.planning.queueing import Delay

#: Most numbers of prompts that are told apart, and standard deviations beyond the mean that they reach. [1]
NUMBERS, REACH = 96, 8.0
#: Standard deviation of the sequences beside a request over that of their number at one time, apart from what follows
#: from the prompts that it meets. [1]
APART = math.sqrt(5 / 12)
#: Standard deviations at which a normal law is taken, and their probabilities. [1]
AT = np.linspace(-3.5, 3.5, 29)
CHANCES = np.exp(-(AT**2) / 2) / np.exp(-(AT**2) / 2).sum()
#: Least share of the time that prompts take, and most. [1]
LEAST, MOST = 1e-9, 1.0 - 1e-6


class Met(NamedTuple):
    """What the prompts that come while a request decodes add to its time."""

    mean: float  # [s]
    variance: float  # [s^2]
    each: float  # of one prompt [s]


def met_at_one_rank(decode: float, used: float, rate: float, dispersion: float) -> Met:
    """Find what prompts add to ``decode`` seconds of decode steps, where one rank computes one prompt after the other.

    Takes ``used`` (rho [1]), ``rate`` [request/s] and ``dispersion``, the variance of the prompts' work that comes in a
    long window over that of equal ones with Poisson arrivals [1].
    """
    each = used / rate
    work = decode + each / (1.0 - used**2)
    return Met(used * work / (1.0 - used), dispersion * each * used * work / (1.0 - used) ** 3, each)


def token_times(alone: float, wide: float, met: Met, tokens: float) -> Delay:
    """Find the distribution of the time of a token.

    Parameters
    ----------
    alone, wide
        Mean time of a token by decodes alone, and the standard deviation by the sequences in service. [s]
    met
        What prompts add, over all tokens.
    tokens
        Of a request after its first. [1]

    Returns
    -------
    Delay
        Of all requests. [s]

    Examples
    --------
    Ten prompts on average come at random (Poisson), and each adds 1 ms to each of 100 tokens:

    >>> found = token_times(5e-3, 0.0, Met(1.0, 0.1, 0.1), 100)
    >>> round(found.mean * 1e3, 6), round(found.at(0.9) * 1e3, 6)
    (15.0, 19.0)
    """
    numbers, shares = prompts_met(met.mean / met.each, met.variance / (met.mean * met.each))
    added = numbers * met.each
    beside = wide / 2.0 * (added - met.mean) / math.sqrt(met.variance)
    return Delay(
        calm=np.add.outer(alone + added / tokens + beside, AT * (wide * APART)).ravel(),
        calm_share=np.multiply.outer(shares, CHANCES).ravel(),
        held=np.zeros(1),
        held_share=np.zeros(1),
        wait=0.0,
    )


def prompts_met(mean: float, dispersion: float) -> tuple[Floats, Floats]:
    """Find the numbers of prompts and their probabilities, by the mean and by the variance over it. [1]

    Where these vary less than Poisson numbers, more prompts count as less each.

    >>> numbers, shares = prompts_met(3.0, 4.0)
    >>> mean = float(shares @ numbers)
    >>> round(mean, 4), round(float(shares @ (numbers - mean) ** 2), 2)
    (3.0, 12.0)
    """
    less = min(dispersion, 1.0)
    mean, wide = mean / less, max(dispersion, 1.0)
    behind = 1.0 - 1.0 / math.sqrt(wide)
    reach = REACH * (math.sqrt(mean * wide) + wide)
    least, last = max(math.floor(mean - reach), 0), math.ceil(mean + reach)
    numbers = np.unique(np.round(np.linspace(least, last, min(last - least + 1, NUMBERS))))
    first = mean * (1.0 - behind)
    ahead = first + numbers * behind
    logs = (numbers - 1.0) * np.log(ahead) - ahead - np.array([math.lgamma(each + 1.0) for each in numbers.tolist()])
    shares = np.exp(logs - logs.max())
    return numbers * less, shares / shares.sum()
