r"""Compute queueing in closed form: waits for prefill, and how many sequences decode at once.

**Prefill** is a queue of c servers. With Poisson arrivals (rate :math:`\lambda`) and exponential service (mean s) a
share C of the requests waits (Erlang C), each for an exponential time. For other arrivals and services the wait is
multiplied by the mean of their squared coefficients of variation (Allen and Cunneen):

.. math:: \frac{E[W]}{C} = \frac{s}{c\,(1-\rho)} \cdot \frac{c_a^2 + c_s^2}{2}, \qquad \rho = \frac{\lambda s}{c}

**Decode** is processor sharing: with n sequences in a pool every one gets a token a step, so the pool completes
:math:`\mu(n) = n / (g\,T(n))` requests/s, with g the mean number of tokens after the first and T the time of a step.
For Poisson arrivals and any distribution of output lengths the number in service has the distribution (Kelly's
symmetric queues)

.. math:: \pi(n) \propto \prod_{k=1}^{n} \frac{\lambda}{\mu(k)}

Where requests arrive more evenly than Poisson, fewer wait (Kraemer and Langenbach-Belz, for one server).

Sources: A. O. Allen, "Probability, Statistics and Queueing Theory", 2nd ed., 1990, section 5.3 (Erlang C, Allen and
Cunneen); S. Halfin and W. Whitt, "Heavy-traffic limits for queues with many exponential servers", Operations Research
29 (1981), for many servers; W. Kraemer and M. Langenbach-Belz, "Approximate formulae for the delay in the queueing
system GI/G/1", 8th International Teletraffic Congress, 1976; F. P. Kelly, "Reversibility and Stochastic Networks",
1979, section 3.3.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from disagg_sim.arrays import Floats, Mask

#: Servers from which the limit of many servers replaces Erlang's recursion. [1]
MANY = 200
#: Values of the number in service that are computed; a pool with more seats has them at equal distances, and each of
#: the first numbers. [1]
PLACES, FIRST = 1024, 256
#: Shares of a pass or a step that may be left when a request arrives, at equal distances. [1]
RESIDUES = (np.arange(8) + 0.5) / 8
#: Longest dot product that OpenBLAS computes on one core (kernel/x86_64/ddot.c). [1]
ONE_CORE = 10_000
#: Share by which sums of the same probabilities may differ between machines: a quantile does not depend on it. [1]
ROUNDING = 1e-9
#: Values that are sorted rather than halved. [1]
FEW = 256
#: Values of which not all are sorted, how many of them say where others are, and share by which these may err. [1]
MANY_VALUES, LOOKED_AT, APART = 20_000, 1000, 0.03
#: Shares of the requests over which a latency has one value, their mean; percentiles that are asked for are in their
#: middles. [1]
EDGES = np.array([0.0, 0.2, 0.4, 0.6, 0.75, 0.86, 0.94, 0.96, 0.985, 0.995, 1.0])
MIDDLES, BETWEEN = (EDGES[1:] + EDGES[:-1]) / 2, np.diff(EDGES)
_NORMAL = NormalDist()


def share_that_waits(servers: int, utilisation: float) -> float:
    """Find the share of Poisson arrivals that find all c servers busy: Erlang C. [1]

    The utilisation is the offered load over the capacity of all servers; from 1 on the share is 1.

    At one server the share is its utilisation; at two that are used by half a third waits:

    >>> share_that_waits(1, 0.6), round(share_that_waits(2, 0.5), 4)
    (0.6, 0.3333)
    """
    if utilisation >= 1.0:
        return 1.0
    if utilisation <= 0.0:
        return 0.0
    if servers > MANY:
        beta = (1.0 - utilisation) * math.sqrt(servers)
        return 1.0 / (1.0 + beta * _NORMAL.cdf(beta) / _NORMAL.pdf(beta)) if beta < 8.0 else 0.0
    if servers == 1:
        return utilisation
    load, blocked = utilisation * servers, 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1.0 - utilisation * (1.0 - blocked))


def busy_variance(share: float, services: Floats, weights: Floats) -> float:
    r"""Find the variance of the busy time in a long window, over the length of the window; busy = some server works.

    Servers are as many as it takes (M/G/:math:`\infty`): all idle with probability :math:`\pi`, and, if all are idle,
    all idle a time t later with probability :math:`e^{-\lambda E[\min(t, s)]}`, where
    :math:`\lambda = -\ln(\pi)/E[s]`.

    Parameters
    ----------
    share
        Share of the time in which some server works. [1]
    services, weights
        s, service times of requests [s], and their probabilities [1].

    Returns
    -------
    float
        0 where some server always works, or none. [s]

    Examples
    --------
    Busy times that come in longer pieces vary more:

    >>> [round(busy_variance(0.5, np.array(each), np.full(2, 0.5)), 3) for each in ([1.0, 1.0], [0.2, 1.8])]
    [0.221, 0.356]
    """
    mean = float(weights @ services)
    if not 0.0 < share < 1.0 or not mean:
        return 0.0
    order, none = np.argsort(services), 1.0 - share
    ends, left = services[order], weights[order][::-1].cumsum()[::-1]
    slope = -math.log(none) / mean * left
    lengths = np.diff(ends, prepend=0.0)
    idle = np.exp(-np.cumsum(slope * lengths))
    found = (np.append(1.0, idle[:-1]) - idle) / slope - none * lengths
    return 2.0 * none * max(float(found.sum()), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Delay:
    """Distribution of a latency: values and their probabilities, some of them plus an exponential wait."""

    calm: Floats  # values of requests that do not wait in a queue [s]
    calm_share: Floats  # their probabilities [1]
    held: Floats  # values of the others without the wait [s]
    held_share: Floats  # their probabilities; all together add up to 1 [1]
    wait: float  # mean of the exponential wait; inf where the queue grows without end [s]

    def then(self, more: Delay) -> Delay:
        """The latency with a further one after it, independent of it and without a queue."""
        calm, held = (np.add.outer(each, more.calm).ravel() for each in (self.calm, self.held))
        shares = [np.outer(each, more.calm_share).ravel() for each in (self.calm_share, self.held_share)]
        return Delay(calm, shares[0], held, shares[1], self.wait)

    def late(self, limit: float) -> float:
        """Share of the requests that take longer than a limit [s]. [1]"""
        return 1.0 if self._endless else self._late(limit)

    @property
    def _endless(self) -> bool:
        return math.isinf(self.wait) or math.isinf(self.calm.max())

    def within(self, limit: float, late: float) -> bool:
        """Whether at most a share ``late`` of the requests takes longer than a limit [s]: often it is plain."""
        over = _mean(self.calm_share, self.calm > limit)
        if over > late or self._endless:
            return late >= 1.0
        most = float(self.held_share.sum()) * (1.0 + ROUNDING)
        if self.wait > 0 and over + most > late:
            most *= math.exp(min(float(self.held.max()) - limit, 0.0) / self.wait)
        return over + most <= late or over + self._waiting(limit) <= late

    def _late(self, limit: float) -> float:
        """The same as ``late`` where all waits end."""
        return _mean(self.calm_share, self.calm > limit) + self._waiting(limit)

    def _waiting(self, limit: float) -> float:
        """Share of the requests that wait in a queue, and take longer than a limit [s]. [1]"""
        if not self.wait > 0:
            return _mean(self.held_share, self.held > limit)
        tail = np.minimum(self.held - limit, 0.0)
        tail /= self.wait
        return _mean(self.held_share, np.exp(tail, out=tail))

    @property
    def mean(self) -> float:
        """Mean latency; inf where the queue grows without end. [s]"""
        sides = ((self.calm_share, self.calm), (self.held_share, self.held + self.wait))
        calm, held = (_mean(share, np.where(share > 0.0, values, 0.0)) for share, values in sides)
        return calm + held  # 0 times infinity is 0: a case that never comes

    def at(self, share: float) -> float:
        """Latency that a share of the requests does not exceed; inf where the queue grows without end. [s]"""
        if self._endless:
            return math.inf
        if not self.wait > 0:
            values, shares = np.concatenate([self.calm, self.held]), np.concatenate([self.calm_share, self.held_share])
            return _reached(values, shares, float(shares.sum()) - 1.0 + share - ROUNDING)
        most = 1.0 - share + ROUNDING
        last, following = self._around(most)  # between which only those that wait are still late
        if last == -math.inf:
            return following
        waits = self.held <= last
        late = _mean(self.held_share, np.exp(-np.maximum(last - self.held, 0.0) / self.wait) * waits)
        left = most - _mean(self.calm_share, self.calm > last) - _mean(self.held_share, ~waits)
        end = last + self.wait * math.log(late / left) if left > 0.0 else math.inf
        return min(end, following)

    def _around(self, most: float) -> tuple[float, float]:
        """The last value that a larger share than ``most`` exceeds, and the following one; -inf or inf where none is.

        Many values are parted where a few of them say that it is: of those above it counts how many they are, of those
        below how many still wait.
        """
        calm, calm_share, held, held_share = self.calm, self.calm_share, self.held, self.held_share
        last, following, above, below, low, side = -math.inf, math.inf, 0.0, 0.0, 0.0, -1

        def place_in(values: Floats, some: Delay) -> int:
            def is_late(limit: float) -> bool:
                return some._late(limit) + above + below * math.exp((low - limit) / self.wait) <= most

            return bisect_left(values, True, key=is_late)

        while (size := calm.size + held.size) > MANY_VALUES:
            one, two = calm.size // LOOKED_AT | 1, held.size // LOOKED_AT | 1  # odd, as values come in eights
            some = Delay(calm[::one], one * calm_share[::one], held[::two], two * held_share[::two], self.wait)
            values = np.sort(np.concatenate([some.calm, some.held]))
            place = place_in(values, some) + side * math.ceil(APART * values.size)
            middle, side = float(values[min(max(place, 0), values.size - 1)]), -side
            over, longer = calm > middle, held > middle
            waiting = below * math.exp((low - middle) / self.wait)
            waiting += float(held_share[~longer] @ np.exp((held[~longer] - middle) / self.wait))
            beyond = above + float(calm_share[over].sum() + held_share[longer].sum())
            if beyond + waiting <= most:
                above, following = beyond, min(calm[over].min(initial=following), held[longer].min(initial=following))
                over, longer = ~over, ~longer
            else:
                below, low = waiting, middle
                last = max(calm[~over].max(initial=last), held[~longer].max(initial=last))
            calm, calm_share, held, held_share = calm[over], calm_share[over], held[longer], held_share[longer]
            if calm.size + held.size == size and side > 0:
                break  # nearly all are equal
        values = np.unique(np.concatenate([calm, held]))
        place = place_in(values, Delay(calm, calm_share, held, held_share, self.wait))
        return max([last, *values[:place][-1:].tolist()]), min([following, *values[place : place + 1].tolist()])


def without_queue(values: Floats, shares: Floats) -> Delay:
    """A latency of such values [s] and probabilities, by the means of a few shares of the requests."""
    order = np.argsort(values)
    reached, added = (np.append(0.0, each[order].cumsum()) for each in (shares, shares * values))
    means = np.diff(np.interp(EDGES, reached / reached[-1], added / reached[-1])) / BETWEEN
    return Delay(means, BETWEEN, np.empty(0), np.empty(0), 0.0)


def _reached(values: Floats, shares: Floats, share: float) -> float:
    """Least value up to which the shares add up to one: values are halved until few are left to be sorted."""
    while values.size > FEW:
        inside = values <= np.median(values[:: values.size // 32])
        below = float(shares[inside].sum())
        if inside.all():
            break
        keep = inside if below >= share else ~inside
        values, shares, share = values[keep], shares[keep], share if below >= share else share - below
    order = np.argsort(values)
    reached = int(np.searchsorted(np.cumsum(shares[order]), share))
    return float(values[order[min(reached, order.size - 1)]])


def _mean(shares: Floats, values: Floats | Mask) -> float:
    """Add up shares times values in pieces for one core of OpenBLAS: the sum is the same on any number of cores."""
    if shares.size <= ONE_CORE:
        return float(shares @ values)
    pieces = range(0, shares.size, ONE_CORE)
    return float(sum(shares[first : first + ONE_CORE] @ values[first : first + ONE_CORE] for first in pieces))


def mean_wait(servers: int, utilisation: float, service: float, variation: float) -> float:
    """Find the mean wait, of the requests that wait, at several servers with one queue, after Allen and Cunneen. [s]

    Takes c servers, the utilisation as ``share_that_waits`` does (infinite from 1 on), the mean service time [s], and
    as variation half the sum of the squared coefficients of variation of arrivals and service: 1/2 for Poisson arrivals
    of equal requests.

    Equal requests of 1 s at one server with utilisation 0.5: half of them wait, 1 s on average.

    >>> mean_wait(1, 0.5, 1.0, 0.5)
    1.0
    """
    return math.inf if utilisation >= 1.0 else service / (servers * (1.0 - utilisation)) * variation


@dataclass(frozen=True, slots=True)
class Service:
    """Service time of requests, and how evenly requests arrive."""

    mean: float  # [s]
    variation: float = 0.0  # squared coefficient of variation of the service [1]
    arrivals: float = 1.0  # that of the gaps between arrivals; 1 = Poisson [1]


def shortest_queue_delay(
    own: Floats, weights: Floats, servers: int, utilisation: float, law: Service, queued: Floats | None = None
) -> Delay:
    r"""Find the latency where a request joins the queue with the fewest requests, whatever is left of their services.

    A share C (``share_that_waits``) finds all servers busy. It waits for the rest of the service in its queue, which is
    uniform over that service. A share of these equal to the utilisation also waits for other requests, for an
    exponential time. Its mean is the wait of Allen and Cunneen less the shortest of the c rests (s/(c + 1) for equal
    services), over that share. With one server the mean wait is that of M/G/1.

    Takes the latency of a request that does not wait [s] and its probabilities; c servers and the offered work over
    what they can do; for how long a request occupies one, and how evenly requests arrive (``law``); and the latency
    without its wait of a request that waits, as probable as ``own`` [s]; None = ``own``. Returns that of all requests.

    >>> found = shortest_queue_delay(np.array([1.0]), np.array([1.0]), 1, 0.5, Service(1.0))
    >>> found.wait, round(found.late(1.0), 9)
    (1.0, 0.5)
    """
    share = share_that_waits(servers, utilisation) * _evened(utilisation, law)
    behind = min(max(utilisation, 1e-9), 1.0)
    rest = law.mean * (1.0 + law.variation)  # longest rest of the service that an arrival meets, twice the mean rest
    wait = mean_wait(servers, utilisation, law.mean, (law.arrivals + law.variation) / 2) - rest / (servers + 1)
    held = ((own if queued is None else queued)[:, None] + rest * RESIDUES).ravel()
    held_share = np.repeat(share * weights / RESIDUES.size, RESIDUES.size)
    return Delay(
        calm=np.concatenate([own, held]),
        calm_share=np.concatenate([(1.0 - share) * weights, (1.0 - behind) * held_share]),
        held=held,
        held_share=behind * held_share,
        wait=max(wait, 0.0) / behind,
    )


def _evened(utilisation: float, law: Service) -> float:
    """Find the share that waits where requests arrive more evenly than Poisson, over that of Poisson arrivals. [1]"""
    even, own, used = law.arrivals, law.variation, utilisation
    if even >= 1.0 or used >= 1.0:
        return 1.0
    least = (1.0 - even) * (1.0 - used) * (1.0 + even + used * own)
    return max(1.0 - least / (1.0 + used * (own - 1.0) + used**2 * (4.0 * even + own)), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """Distribution of the number of sequences that a pool has in service."""

    number: Floats  # (places,) sequences of an instance, ascending [request]
    share: Floats  # (places,) share of the time, and of the arrivals, with that number [1]
    full: float  # share of the time in which every seat is taken [1]

    def at(self, share: float) -> float:
        """Find the sequences of an instance that are not exceeded for a share of the time. [request]"""
        place = int(np.searchsorted(np.cumsum(self.share), share - ROUNDING))
        return float(self.number[min(place, self.number.size - 1)])

    @property
    def mean(self) -> float:
        """Sequences of an instance, on average. [request]"""
        return float(self.share @ self.number)

    @property
    def of_some(self) -> float:
        """Share of the arrivals whose instance, one with the fewest sequences, has some. [1]"""
        return float(self.share[self.number >= 1.0].sum())

    def moments(self, values: Floats) -> tuple[float, float]:
        """Mean and standard deviation of a value of each place of ``number``, as requests see it."""
        mean = float(self.share @ values)
        return mean, math.sqrt(max(float(self.share @ (values - mean) ** 2), 0.0))


def occupancy(rate: float, instances: int, seats: int, batch: Floats, completed: Floats) -> Occupancy:
    """Find the number of sequences in service of a pool that shares its work evenly over instances.

    Takes the arrival rate of the pool [request/s], its instances, the most sequences of one (``seats``), sequences of
    one, ascending from 1, and the rate at which it completes them [request/s]. With more requests than seats some wait:
    such times count in ``full``.

    Where a step takes as long for any batch, the number in service is Poisson: mean 20 at 20 requests/s of 1 s each.

    >>> some = np.arange(1.0, 101.0)
    >>> found = occupancy(20.0, instances=1, seats=100, batch=some, completed=some)
    >>> round(found.mean, 6), found.at(0.9), found.full < 1e-9
    (20.0, 26.0, True)
    """
    places = instances * seats
    width = max(1.0, places / PLACES)
    number = np.arange(1, math.floor(places / width) + 1) * width
    if width > 1.0:
        number = np.concatenate([np.arange(1.0, FIRST + 1.0), number[number > FIRST]])
    widths = np.diff(number, prepend=0.0)
    of_one = number / instances
    done = instances * np.interp(of_one, batch, completed)
    below = of_one < batch[0]
    done[below] = instances * of_one[below] / batch[0] * completed[0]
    grown = np.concatenate([[0.0], np.cumsum(widths * np.log(rate / done))])
    share = np.exp(grown - grown.max())
    last = rate / float(done[-1])
    waiting = share[-1] * last / (1.0 - last) if last < 1.0 else math.inf
    full = share[-1] + waiting
    share[1:] *= widths
    share[-1] += waiting
    total = float(share.sum())
    if math.isinf(total):
        return Occupancy(np.array([float(seats)]), np.ones(1), 1.0)
    return Occupancy(np.concatenate([[0.0], of_one]), share / total, float(full / total))
