r"""Queue passes at the last stage of a pipeline, which they leave in the order of their starts.

The next pass of an instance starts when the first stage is free, and the stages of a pass take about as long as each
other. A pass that spends O in the later stages leaves them :math:`Y_n` after the first stage, with I the time for which
the first stage idled before it (``simulation.kernel.steps``):

.. math:: Y_n = \max(O_n,\ Y_{n-1} - I_n)

So what counts is the largest O in the current busy period of the first stage, and those of earlier busy periods less
the time since. Busy periods begin at a rate :math:`\lambda_0` of idle time. With G(y) the probability that no pass of a
busy period has O above y, the rest of all earlier ones is at most y with probability

.. math:: Z(y) = \exp\left(-\lambda_0 \int_y^\infty (1 - G(t))\, dt\right)

If prompts are computed one by one and a share C of them waits, further ones begin within a busy period at a rate
:math:`\lambda_b`. With the stage times s, F(y) the probability of O up to y, and ``E[...; O <= y]`` the mean over
those,

.. math:: G(y) = E\left[e^{-\lambda_b s (1 - G(y))};\ O \le y\right], \qquad
          H(y) = \frac{1 - C}{C} \cdot \frac{F(y) - G(y)}{1 - F(y)}

H is the probability that no pass before a waiting request in its busy period has O above y, of all 1/(1 - C) requests
of a busy period but the first. Passes that take all waiting prompts are a Markov chain (``planning.passes``), here
restricted to O up to y. The wait of a request is taken as independent of O of earlier passes, and the host time of a
pass is neglected.

Source: G is that of a branching process, after L. Takacs, "Introduction to the Theory of Queues", 1962, section 1.4.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.planning.passes import Passes, shared
from disagg_sim.planning.queueing import ROUNDING, share_that_waits

#: Shares of the requests at which the rest of earlier passes is computed: middles of equal ones. [1]
SHARES = (np.arange(6) + 0.5) / 6
#: Most values of the later time that are distinguished, and the share of the passes beyond the longest. [1]
MOST_LEVELS, RAREST = 16, 1e-3
#: Steps of Newton's method, which rises to G. [1]
STEPS = 12
#: In place of 0, where it divides.
TINY = 1e-12


class Blocking(NamedTuple):
    """Time after the first stage until earlier passes leave the last one, at equally probable values. [s]"""

    idle: Floats  # (shares,) where a request finds the first stage idle
    queued: Floats  # (sizes, shares) where it meets a pass there, by the size of that pass


class StageTimes(NamedTuple):
    """Times of passes of prompts of one length in a pipeline, (lengths, batches) each."""

    first: Floats  # until the first stage is free [s]
    later: Floats  # from then on until the first tokens [s]

    def added(self, weights: Floats, batch: Floats, sizes: Floats) -> StageTimes:
        """Find how much longer passes of some sizes take than of one prompt, at the mean length. [s]"""
        means = (weights @ each for each in self)
        return StageTimes(*(np.interp(sizes, batch, each) - each[0] for each in means))


def blocking_one_by_one(stages: StageTimes, weights: Floats, rate: float, servers: int, used: float) -> Blocking:
    """Find how long earlier passes block the last stage if each takes one prompt, of the shortest queue.

    Takes ``weights`` of the lengths [1], ``rate`` of an instance [request/s], ``servers`` [1], and the share of their
    time that is ``used``, below 1 [1].

    Prompts of 1 s a stage and, one in ten, of 10 s, in two stages. At a low load little is left for a prompt that finds
    the first stage idle, and one that waits does so behind a long prompt half of the time:

    >>> times = np.array([[1.0], [10.0]])
    >>> found = blocking_one_by_one(StageTimes(times, times), np.array([0.9, 0.1]), 0.01, 1, 0.019)
    >>> float(found.idle.max()), found.queued[0].tolist()
    (0.0, [1.0, 1.0, 1.0, 10.0, 10.0, 10.0])
    """
    first, later = stages.first[:, 0], stages.later[:, 0]
    levels = np.unique(later)
    inside = weights * (later <= levels[:, None])
    share = share_that_waits(servers, used)
    more = rate * share / used * first  # that begin during a pass of each length
    none = np.zeros(levels.size)  # probability of a busy period without passes above a level
    for _ in range(STEPS):
        terms = inside * np.exp(-more * (1.0 - none[:, None]))
        none += (terms.sum(axis=1) - none) / (1.0 - terms @ more)
    below = inside.sum(axis=1)
    before = (1.0 - share) / max(share, TINY) * (below - none) / np.maximum(1.0 - below, TINY)
    before[-1] = none[-1] = 1.0
    return _blocking(levels, none, before[:, None], rate * (1.0 - share) / (1.0 - used))


def blocking_passes(
    stages: StageTimes, weights: Floats, batch: Floats, rate: float, servers: int, found: Passes
) -> Blocking:
    """Find how long earlier passes block the last stage if each takes all waiting prompts.

    The first prompt of a pass has any length, the others the mean.

    Takes ``weights`` of the lengths [1], the sizes ``batch`` of the columns [request], ``rate`` of an instance
    [request/s], ``servers`` [1], and the passes of a server.
    """
    share = found.share.sum(axis=1)
    sizes = np.arange(1.0, share.size + 1.0)
    first, later = (one[:, :1] + more for one, more in zip(stages, stages.added(weights, batch, sizes), strict=True))
    levels = _levels(later, np.outer(weights, share))
    inside = weights[:, None] * (later <= levels[:, None, None])
    met = (inside * first).sum(axis=1) / (weights @ first)
    come = max(rate * found.meets / found.used, TINY)  # while a pass is under way [1/s]
    alone = shared(come * first.ravel(), servers, 1)[:, 0].reshape(first.shape)
    next_size = shared(come * (weights @ first), servers, sizes.size)[:, 1:]
    next_size /= next_size.sum(axis=1)[:, None]
    follow = (inside * (1.0 - alone)).sum(axis=1)[:, :, None] * next_size
    stay = np.eye(sizes.size) * (1.0 + TINY) - follow
    start = np.broadcast_to(np.eye(sizes.size)[:1].T, (levels.size, sizes.size, 1))
    passed = np.linalg.solve(stay.transpose(0, 2, 1), start)[:, :, 0]  # passes of a size with none above before them
    none = (passed * (inside * alone).sum(axis=1)).sum(axis=1)
    before = passed * met / np.maximum(passed[-1] * met[-1], TINY)
    idle = rate * (1.0 - found.meets) / max(1.0 - found.used, TINY)
    return _blocking(levels, none, before, idle)


def _levels(later: Floats, weights: Floats) -> Floats:
    """Later times that a share of the passes exceeds, from all of them to ``RAREST``."""
    order = np.argsort(later, axis=None)
    reached = weights.ravel()[order].cumsum()
    shares = 1.0 - np.geomspace(1.0, RAREST, MOST_LEVELS)
    return np.asarray(later.ravel()[order][np.searchsorted(reached, shares * reached[-1])])


def behind(own: Floats, later: Floats, blocking: Floats) -> Floats:
    """Find the latencies of passes by their own, their later time, and how long the last stage is blocked. [s]"""
    return np.asarray(own + np.maximum(blocking - later, 0.0))


def _blocking(levels: Floats, none: Floats, before: Floats, rate: float) -> Blocking:
    """Find the blocking by passes of this busy period and of earlier ones, which begin at a rate of idle time [1/s].

    Takes ``levels`` [s], the probabilities that ``none`` of a busy period is above each, and that none ``before`` a
    request is, (levels, sizes).
    """
    above = np.append(1.0, 1.0 - none[:-1]) * np.diff(levels, prepend=0.0)
    area = np.append(above[::-1].cumsum()[::-1], 0.0)  # beyond 0 and each level
    idle = np.interp(-np.log(SHARES) / max(rate, TINY), area[::-1], np.append(0.0, levels)[::-1])
    reached = before * np.exp(-rate * area[1:, None])
    places = (reached < SHARES[:, None, None] - ROUNDING).sum(axis=1)
    return Blocking(idle, levels[np.minimum(places, levels.size - 1)].T)
