"""Times of the steps and tokens of an instance that prefills between, or inside, its decode steps.

Pure functions of numbers: frontiers, error bars, plans and forecasts of served runs take the same time of a step and of
a token (physics page, section 8). How often ranks have pieces is the load's: slots that are always full have them apart
from each other (``mixed_steps``), requests that come at a rate share the steps of prompts of several pieces
(``planning.mixed_steps``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats


class MixedShares(NamedTuple):
    """Shares of the steps of an instance, by how many ranks have a piece of a prompt."""

    alone: Floats  # steps that count as steps with a piece on one rank [1]
    full: Floats  # steps that count as steps with a piece on every rank [1]
    plain: Floats  # steps without a piece [1]

    @property
    def some(self) -> Floats:
        """Steps with a piece. [1]"""
        return self.alone + self.full

    def loaded(self, one: Any, every: Any) -> Any:
        """Mean time of a step with a piece, of those with one on one rank and on every one. [s]"""
        return every - self.alone / self.some * (every - one)

    def mean(self, plain: Any, one: Any, every: Any, accepted: Any = 1.0) -> Any:
        """Mean time of a step, for each token that one with a piece emits of a sequence; ``plain`` is a token's. [s]"""
        return self.full * every / accepted + self.plain * plain + self.alone * one / accepted


def mixed_steps(busy: Any, ranks: Any, plain: Any = None) -> MixedShares:
    """Divide the steps by ranks with a piece of a prompt, where each rank has one with probability ``busy``.

    With r of R ranks that have a piece a step takes T(1) + (r-1)*(T(R) - T(1))/(R-1); r follows Binomial(R, phi), or
    is 0 in the share ``plain`` of the steps.
    """
    each = ranks + 0.0 * busy  # a power of one exponent to a row depends, in the last digit, on its place
    plain = np.asarray((1.0 - busy) ** each if plain is None else plain)
    some = 1.0 - plain
    full = np.where(np.asarray(ranks) > 1, (ranks * busy - some) / np.maximum(ranks - 1.0, 1.0), busy)
    full = np.clip(full, 0.0, some)
    alone = np.where(np.asarray(ranks) > 1, some - full, 0.0)  # of one rank the difference is rounding
    return MixedShares(alone, full, plain)


def time_alone(step: Any, some: Any, left: Any) -> Any:
    """Find the time in steps of decodes alone for each step with prompts. [s]

    Takes a ``step`` of decodes alone [s], and the chances that ``some`` prompt comes in it, and that no step with
    prompts follows one, as none is ``left`` and none came [1]. In a closed loop as many come in any step; those that
    come at a rate come in long steps, and share the next.

    >>> [float(time_alone(1.0, 1 - 0.5, 0.5**length)) for length in (1, 3)]
    [1.0, 0.25]
    """
    return step / some * left


def own_step(one: Any, every: Any, busy: Any) -> Floats:
    """Time a step with a piece on one rank, and on each other one with the probability ``busy``. [s]"""
    return np.asarray(one + busy * (every - one))


def time_of_others(mean: Any, own: Any, share: Any) -> Any:
    """Find the mean time of a token that meets the prompts of others, not its request's own. [s]

    Takes the ``mean`` over all tokens and of those from steps with a piece on their ``own`` rank [s], and the ``share``
    of a request's tokens that its own prompt takes as many steps as [1]. No step counts that is shorter than the mean.

    >>> float(time_of_others(0.012, 0.060, 0.025))  # four requests, of which one prompt is in every tenth step
    0.0108
    """
    return mean - share * np.maximum(own - mean, 0.0)


def token_time(step: Any, passes: Any, gaps: Any, loaded: Any = None) -> Any:
    r"""Find the mean time of a token that meets the prompts of others.

    .. math:: TPOT = T_d \max\left(1 - \frac{t}{g\,T_{mix}},\ 0\right) + \frac{t}{g}

    Parameters
    ----------
    step
        Of decodes alone, :math:`T_d`. [s]
    passes
        Time t of steps with prompts of others while a request decodes. [s]
    gaps
        Steps from the first token of a request to its last, g. [1]
    loaded
        Step with prompts beside which decodes go on, :math:`T_{mix}`; None = a pass stops them. [s]

    Returns
    -------
    float or ndarray
        Over the life of a request. [s]

    Examples
    --------
    Passes of 1 s on 100 tokens that take 10 ms each; where decodes ride along in steps of 50 ms, 20 of these are steps
    with prompts:

    >>> token_time(0.010, 1.0, 100.0), round(float(token_time(0.010, 1.0, 100.0, 0.050)), 6)
    (0.02, 0.018)
    """
    alone = step if loaded is None else step * np.maximum(1.0 - passes / (gaps * loaded), 0.0)
    return alone + passes / gaps


def step_rate(step: Any, loaded: Any, share: Any) -> Any:
    r"""Count the steps of both kinds in a second, where a share of the time goes to steps with prompts.

    .. math:: \frac{1}{TPOT} = \frac{\varphi}{T_{mix}} + \frac{1 - \varphi}{T_d}

    That is ``token_time`` where steps with prompts take :math:`t = \varphi\,g\,TPOT`.

    Parameters
    ----------
    step, loaded
        Of decodes alone, :math:`T_d`, and with prompts, :math:`T_{mix}`. [s]
    share
        Of the time in steps with prompts, :math:`\varphi`. [1]

    Returns
    -------
    float or ndarray
        The inverse of TPOT. [1/s]

    Examples
    --------
    >>> mean = 1.0 / step_rate(0.010, 0.050, 0.4)
    >>> round(mean, 6), round(float(token_time(0.010, 0.4 * 100.0 * mean, 100.0, 0.050)), 6)
    (0.014706, 0.014706)
    """
    return share / loaded + (1.0 - share) / step


def token_times(
    step: Any, each: Any, own: Any, batch: Any, gaps: float, idle: Any, left: Any, fed: Any = None
) -> tuple[Any, Any]:
    r"""Find the mean time between two tokens of an instance that makes passes between its decode steps.

    .. math:: \overline{TTL} = \max(s\,T_d + B\,t/g,\ f), \qquad TPOT = \max(T_d + \max((B - l)\,t - t_{own},\ 0)/g,\ f)

    Source: physics page, section 8.

    Parameters
    ----------
    step, each, own
        Decode step :math:`T_d`; what a prompt costs t, and the pass that it is in :math:`t_{own}`. [s]
    batch, gaps
        Slots B [request]; steps from the first token of a request to its last g [1].
    idle, left
        Slots over those that decode s [1]; slots that stay free after a pass l [request].
    fed
        Time in which cached pasts are loaded for a token f; None = they are there. [s]

    Returns
    -------
    mean, tpot
        Over all tokens of the instance, and over the life of a request, which waits for the passes of others. [s]

    Examples
    --------
    Steps of 10 ms; each of 4 requests with 100 tokens to go costs a pass of 50 ms:

    >>> mean, tpot = token_times(0.010, 0.050, 0.050, 4, 100.0, idle=1.0, left=0.0)
    >>> f"{mean * 1e3:.1f} {tpot * 1e3:.1f}"
    '12.0 11.5'
    """
    others = np.maximum((batch - left) * each - own, 0.0)
    mean, tpot = step * idle + batch / gaps * each, token_time(step, others, gaps)
    return (mean, tpot) if fed is None else (np.maximum(mean, fed), np.maximum(tpot, fed))


def longest_gap(step: Any, long_pass: Any, passes: Any, accepted: Any) -> Any:
    """Find the longest gap between two tokens: a step, and the passes between two steps, one at least, as one is made.

    Takes ``step`` and ``long_pass`` [s], ``passes`` (of a token, on average [1]) and ``accepted`` (tokens of a step).
    Returns [s].

    >>> [float(longest_gap(0.010, 0.100, passes, 1.0).round(3)) for passes in (0.01, 1.0 + 1e-9, 4.3)]
    [0.11, 0.11, 0.51]
    """
    return accepted * step + np.maximum(np.ceil(np.round(accepted * passes, 6)), 1.0) * long_pass
