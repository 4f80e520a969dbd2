r"""Compute the distribution of TPOT over the requests of an instance that prefills between their tokens.

A request decodes for G steps of :math:`T_d`; each prompt that comes meanwhile adds s, and others come while it is
computed, :math:`\rho = \lambda s` on average. One rank serves prompts before decodes, so that many steps take until
:math:`G\,T_d` of decodes are done, the delay busy period of one server: with K prompts

.. math:: TPOT = T_d + \frac{s K}{G}, \quad E[K] = \frac{\lambda V}{1 - \rho}, \quad
    Var[K] = \frac{\lambda V D}{(1 - \rho)^3} \left(1 - \frac{2 \rho b}{G}\right), \quad V = G\,T_d + D s b

Prompts that came in the step of the request's own prompt wait behind it. Steps last :math:`T_d + s N(T)`, with N
arrivals in the one before, and that of a prompt is longer than others by :math:`D s/(1 - \rho^2)`, where arrivals vary
D times as much as Poisson ones. Of what that adds in the end a share :math:`1 - \rho^G` falls into G steps, so that
:math:`b = (1 - \rho^G)/(1 - \rho^2)`; prompts of the last steps delay others, which makes the variance smaller.

K has the law of Borel and Tanner, :math:`P(K = k) = a (a + k \rho)^{k-1} e^{-a - k \rho} / k!` with
:math:`a = \lambda V`. Prompts of several lengths take the law of as large a mean and variance, and so does the time in
which some of several ranks has a prompt (``queueing.busy_variance``). There a step takes longer by d for each further
prompt, which varies the time by :math:`\lambda d^2/(1 - \lambda d)^2` per second in steps with prefill.

Of several instances each is given fewer requests while one decodes there (``planning.shared_instances``).

The prompts that a request meets decode beside it, too. Over its time W the sequences in service are the arrivals of W
before and W after its first token, each by the share of W in which it is there: their mean has 2/3 of the variance of
their number at one time, of which 1/4 follows from the prompts that are met, and 5/12 does not.

Sources: J. C. Tanner, "A derivation of the Borel distribution", Biometrika 48 (1961); R. W. Conway, W. L. Maxwell and
L. W. Miller, "Theory of Scheduling", 1967, section 8-4, for delay busy periods.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.planning.mixed_steps import MixedSteps, Mixing
from disagg_sim.planning.queueing import Delay, busy_variance

#: Most numbers of prompts that are told apart, and standard deviations beyond the mean that they reach. [1]
NUMBERS, REACH = 96, 8.0
#: Standard deviation of the sequences beside a request over that of their number at one time, apart from what follows
#: from the prompts that it meets. [1]
APART = math.sqrt(5 / 12)
#: Standard deviations at which a normal law is taken, and their probabilities. [1]
AT = np.linspace(-3.5, 3.5, 29)
CHANCES = np.exp(-(AT**2) / 2) / np.exp(-(AT**2) / 2).sum()
#: Least variance of the prompts that are met over their mean. [1]
EVENEST = 1e-4
#: Least share of the time that prompts take, and most. [1]
LEAST, MOST = 1e-9, 1.0 - 1e-6


class Joining(NamedTuple):
    """Requests that join an instance."""

    rate: float  # [request/s]
    dispersion: float  # variance of their number in a long window over that of Poisson arrivals [1]
    uneven: float  # mean of the squares of their prompts over the squared mean [1]
    beside: float = 1.0  # rate while one of its requests decodes, over the mean rate [1]


class Met(NamedTuple):
    """What the prompts that come while a request decodes add to its time."""

    mean: float  # [s]
    variance: float  # [s^2]
    each: float  # of one prompt [s]


def met_prompts(
    law: MixedSteps, mixing: Mixing, sequences: float, decodes: tuple[float, float], arrivals: Joining
) -> tuple[float, Met]:
    """Find the mean time of a step by decodes alone [s], and what prompts add to a request.

    Takes ``sequences`` of the instance [request] and ``decodes`` (steps of a request [1], and their mean time [s]).
    """
    held, time, share, alone, one = (
        float(np.interp(sequences, law.batch, values))
        for values in (mixing.held, mixing.time, mixing.share, law.step, law.own[1][0])
    )
    (steps, mean), (rate, even, uneven, beside) = decodes, arrivals
    used = min(max(share * (1.0 - alone / time), LEAST), MOST)
    mean, used, share, rate = mean * (1.0 - used), used * beside, share * beside, rate * beside
    window = steps * mean / (1.0 - used)
    if law.ranks == 1:
        each, begun = used / rate, (1.0 - used**steps) / (1.0 - used**2)
        work = window * (1.0 - used) + even * each * begun
        varied = even * uneven * each * used * work / (1.0 - used) ** 3 * (1.0 - 2.0 * used * begun / steps)
        return mean, Met(used * work / (1.0 - used), varied, each)
    busy = max(law.prompt / held, 1.0) * time  # steps of a prompt [s]
    further = (time - one) / max(rate * busy / share - 1.0, LEAST)  # that another one adds to a step [s]
    further = min(max(further, 0.0), MOST / rate)
    alternating = (used / share / (1.0 - used)) ** 2 * busy_variance(share, busy, law.ranks)
    several = share * rate * (further / (1.0 - rate * further)) ** 2
    return mean, Met(window * used, even * window * (alternating + several), max(time - alone, LEAST))


def token_times(alone: float, wide: float, met: Met, tokens: float, most: float) -> Delay:
    """Find the distribution of the time of a token.

    Parameters
    ----------
    alone, wide
        Mean time of a token by decodes alone, and the standard deviation by the sequences in service. [s]
    met
        What prompts add, over all tokens.
    tokens
        Of a request after its first. [1]
    most
        Time of a token where the budgets of all steps are full. [s]

    Returns
    -------
    Delay
        Of all requests. [s]

    Examples
    --------
    Ten prompts on average come at random (Poisson), and each adds 1 ms to each of 100 tokens:

    >>> found = token_times(5e-3, 0.0, Met(1.0, 0.1, 0.1), 100, 1.0)
    >>> round(found.mean * 1e3, 6), round(found.at(0.9) * 1e3, 6)
    (15.0, 19.0)
    """
    dispersion = max(met.variance / (met.mean * met.each), EVENEST)
    numbers, shares = prompts_met(met.mean / met.each, dispersion)
    added = numbers * met.each
    beside = wide / 2.0 * (added - met.mean) / math.sqrt(dispersion * met.mean * met.each)
    return Delay(
        calm=np.minimum(np.add.outer(alone + added / tokens + beside, AT * (wide * APART)), most).ravel(),
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
