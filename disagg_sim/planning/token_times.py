r"""Compute the distribution of TPOT over the requests of an instance that prefills between their tokens.

A request decodes for G steps, of :math:`T_d` alone and :math:`T_f` with prefill. Where a share Y of its time t has
prefill,

.. math:: G = t \left(\frac{1 - Y}{T_d} + \frac{Y}{T_f}\right)

so that its TPOT is at most x if steps without prefill have at least :math:`y = (1 - Y) t` of t = G x. Prompts are one
queue, of load :math:`\varphi`: in t it idles for y if it ends what waits at the first token, and what comes, within t.
Over a long time it varies by :math:`\omega` per second, :math:`\lambda E[s^2]` where prompts of s come at random.
Behind a request as much waits as at any time: nothing with the probability :math:`1 - \varphi`, else an exponential
time of :math:`\omega/(2 \varphi m)` on average, :math:`m = 1 - \varphi`. The time until a queue has idled for y, a
delay busy period, is inverse Gaussian, with :math:`\Phi` of the normal law :math:`e^{-z^2/2}/\sqrt{2 \pi}` and
:math:`R(z) = \Phi(-z)/\Phi'(z)`

.. math:: P(TPOT \le x) = \Phi(a) + \frac{1 - 2 \varphi}{m}\, \Phi'(a) \left(R(b) - \varphi R(c)\right), \quad
    a, b, c = \frac{m t - y,\ \ m t + y,\ \ y - (1 - 2 \varphi) m t}{\sqrt{\omega t}}

Of many steps the mean is that of all, :math:`1/((1 - \varphi)/T_d + \varphi/T_f)`; of fewer than a busy time has it is
more, up to :math:`(1 - \varphi) T_d + \varphi T_f`. :math:`\varphi` is chosen to meet the mean time of all steps.
Several ranks have a prompt for a time that varies otherwise (``queueing.busy_variance``), and a prompt of each length
adds a time d to the steps of others, which varies it by :math:`\lambda E[d^2]` per second in steps with prefill.

Of several instances each is given fewer requests while one decodes there (``planning.shared_instances``).

A slow request has more others beside it: the sequences in its time are the arrivals of this time and of as much before,
so that their number grows by half of the share by which it is slower. Apart from that, their mean has 5/12 of the
variance of their number at one time: of its 2/3, 1/4 follows from the prompts that are met.

Sources: R. W. Conway, W. L. Maxwell and L. W. Miller, "Theory of Scheduling", 1967, section 8-4, for delay busy
periods; D. P. Gaver, "Diffusion approximations and models for certain congestion problems", J. Appl. Prob. 5 (1968),
for the inverse Gaussian law.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.planning.mixed_steps import MixedSteps, Mixing
from disagg_sim.planning.queueing import Delay, busy_variance
from disagg_sim.serving.step_mixing import step_rate

#: Standard deviation of the sequences beside a request over that of their number at one time, apart from what follows
#: from how slow it is. [1]
APART = math.sqrt(5 / 12)
#: Share by which the sequences beside a request grow as it is slower. [1]
FOLLOW = 0.5
#: Standard deviations at which a normal law is taken, and their probabilities. [1]
AT = np.linspace(-2.4, 2.4, 9)
CHANCES = np.exp(-(AT**2) / 2) / np.exp(-(AT**2) / 2).sum()
#: Standard deviations from its mean at which the share of the time with prefill is looked at. [1]
PLACES = np.linspace(-4.5, 6.0, 36)
#: Places between a step alone and one with prefill at which its mean time is looked at, by its logarithm. [1]
EVENLY = np.linspace(0.0, 1.0, 24)
#: Turns in which sequences and their TPOT are found from each other. [1]
TURNS = 2
#: Least share of the time with prefill, and most. [1]
LEAST, MOST = 1e-9, 1.0 - 1e-6
#: Value of a normal number beyond which its tail is taken as that of its density over the value. [1]
FAR = 25.0


class Joining(NamedTuple):
    """Requests that join an instance."""

    rate: float  # [request/s]
    dispersion: float  # variance of their number in a long window over that of Poisson arrivals [1]
    uneven: float  # mean of the squares of their prompts over the squared mean [1]
    beside: float = 1.0  # rate while one of its requests decodes, over the mean rate [1]


class TimeWithPrefill(NamedTuple):
    """Prefill of an instance beside decodes."""

    share: float  # of the time with prefill [1]
    varies: float  # variance of the time with prefill in a long time, over that time [s]


def token_times(
    law: MixedSteps, mixing: Mixing, sequences: float, step: tuple[float, float], steps: Floats, arrivals: Joining
) -> Delay:
    """Find the distribution of the mean time of a step over requests that decode for so many ``steps``. [s]

    Takes the mean number of ``sequences`` [request], the mean time of a ``step`` with its standard deviation by these
    [s], and ``steps`` of equally many requests [1].
    """
    (mean, wide), gaps, last = step, float(steps.mean()), float(law.batch[-1])
    with_prefill, known = law.full if law.ranks == 1 else mixing.time, (np.array([0.0, 1.0]), np.ones(2))
    added = law.added(mixing, sequences, arrivals.rate) if law.ranks > 1 else np.zeros(1)
    for _ in range(TURNS):
        alone, full = (float(np.interp(sequences, law.batch, each)) for each in (law.step, with_prefill))
        prefill = time_with_prefill(law, mixing, sequences, (alone, full), arrivals, added)
        over = min(alone / full, MOST)
        near = prefill.share + math.sqrt(prefill.varies / (gaps * mean)) * PLACES
        share = np.concatenate([near[(near > 0.0) & (near < 1.0)], (1.0 - over**EVENLY) / (1.0 - over)])
        share.sort()
        beside = np.minimum(sequences * (1.0 + FOLLOW * (np.interp(share, *known) - 1.0)), last)
        slow, fast = np.interp(beside, law.batch, with_prefill), np.interp(beside, law.batch, law.step)
        times = 1.0 / step_rate(fast, slow, share)
        reached = at_most(share, steps[:, None] * times, prefill)
        reached = reached[0] if steps.size == 1 else reached.mean(axis=0)
        whole = np.concatenate([[0.0], np.maximum.accumulate(reached), [1.0]])
        shares = whole[1:] - whole[:-1]
        values = np.concatenate([times[:1], np.sqrt(times[1:] * times[:-1]), times[-1:]])
        mean = float(shares @ values)
        known = share, times / mean
        sequences = min(arrivals.rate * gaps * mean, last)
    calm = np.minimum(np.maximum(np.add.outer(values, AT * (wide * APART)), law.step[0]), values[-1])
    return Delay(
        calm=calm.ravel(),
        calm_share=np.multiply.outer(shares, CHANCES).ravel(),
        held=np.zeros(1),
        held_share=np.zeros(1),
        wait=0.0,
    )


def time_with_prefill(
    law: MixedSteps, mixing: Mixing, sequences: float, times: tuple[float, float], arrivals: Joining, added: Floats
) -> TimeWithPrefill:
    """Find how much of its time an instance of so many ``sequences`` [request] spends with prefill, and how evenly.

    Takes the ``times`` of a step alone and of one with prefill, and what prompts of each length have ``added`` [s].
    """
    (alone, time), (_, even, uneven, beside) = times, arrivals
    if law.ranks == 1:
        rate = float(np.interp(sequences, law.batch, mixing.steps))
        spent = min(max((1.0 / alone - rate) / max(1.0 / alone - 1.0 / time, LEAST), LEAST), MOST)
        return TimeWithPrefill(spent * beside, even * uneven * spent**2 * beside / arrivals.rate)
    held, share = (float(np.interp(sequences, law.batch, values)) for values in (mixing.held, mixing.share))
    rate, share = arrivals.rate * beside, min(max(share * beside, LEAST), MOST)
    busy, longer = max(law.prompt / held, 1.0) * time, max(1.0 - alone / time, LEAST)  # steps of a prompt [s]
    added = added * (1.0 - share * longer) / longer
    room, weights = np.array([np.interp(sequences, law.batch, law.room)]), law.prompts.weight
    counts = law.prompts.counts(room)[:, 0]
    own = busy_variance(share, counts * busy / float(weights @ counts), weights)
    return TimeWithPrefill(share, even * (own + share * rate * float(weights @ added**2)))


def at_most(share: Floats, times: Floats, prefill: TimeWithPrefill) -> Floats:
    """Chance that at most so large a share of a time [s] has prefill, where its first moment ends a prompt. [1]

    At a load of half the idle time of a long window is normal, beside the mean as often above as below:

    >>> at_most(np.array([0.4, 0.5, 0.6]), np.array(100.0), TimeWithPrefill(0.5, 0.5)).round(3).tolist()
    [0.079, 0.5, 0.921]
    """
    load, wide = prefill.share, np.sqrt(prefill.varies * times)
    mean, idle = (1.0 - load) * times, (1.0 - share) * times
    a, b, c = (mean - idle) / wide, (mean + idle) / wide, (idle - (1.0 - 2.0 * load) * mean) / wide
    below, above, later = _above(np.stack([-a, b, c]), a)
    return np.asarray(below + (1.0 - 2.0 * load) / (1.0 - load) * (above - load * later))


def _above(value: Floats, other: Floats) -> Floats:
    """Chance that a normal number is above a value, times its density at another one over that at the value. [1]"""
    near = np.minimum(value, FAR)
    chance = np.array([math.erfc(each) for each in (near / math.sqrt(2.0)).ravel().tolist()]).reshape(near.shape) / 2.0
    return np.asarray(np.exp((near**2 - other**2) / 2.0) * chance * FAR / np.maximum(value, FAR))
