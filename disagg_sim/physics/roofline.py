"""Turn work into time: the blended roofline, and the time of an operator by what limits it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.physics.work import Numeric, Work


@dataclass(frozen=True, slots=True)
class Rate:
    """What a kernel reaches: already efficiency times peak."""

    flops: Numeric  # [FLOP/s]
    bandwidth: Numeric  # [B/s]
    t0: Numeric  # [s]
    blend: Numeric  # exponent q; inf = compute and memory overlap fully [1]


class Sums(NamedTuple):
    """Time sums of a pass by resource, ignoring overlap: the largest of the four is its bound. [s]"""

    compute: Numeric = 0.0  # F/(e_c*Pi), and rows of experts that multiprocessors gather and sum
    memory: Numeric = 0.0  # bytes/(e_m*BW)
    communication: Numeric = 0.0  # message/(eta*BW_link)
    latency: Numeric = 0.0  # t0 + a + host

    def plus(self, other: AnySums, times: Numeric = 1.0) -> Any:
        """These and ``times`` times the others."""
        if other is NO_SUMS:
            return self
        if isinstance(other, GridSums):
            return other.after(self, times)
        return Sums(
            added(self.compute, other.compute, times),
            added(self.memory, other.memory, times),
            added(self.communication, other.communication, times),
            added(self.latency, other.latency, times),
        )


#: Places of points of a grid, (rows, columns); None = all points.
Points = tuple[Any, Any] | None


class GridSums:
    """Sums of the points of a grid, added up where they are asked for; else as ``Sums``.

    A search asks for those of the few points that it chooses.
    """

    def __init__(self, at: Callable[[Points], Sums]) -> None:
        self._at = at
        self._whole: Sums | None = None

    def at(self, points: Points) -> Sums:
        """Those of points of the grid, or of all; the latter are added up once."""
        if points is not None:
            return self._at(points)
        if self._whole is None:
            self._whole = self._at(None)
        return self._whole

    def plus(self, other: AnySums, times: Numeric = 1.0) -> GridSums:
        """These and ``times`` times the others."""
        return GridSums(lambda points: self.at(points).plus(sums_at(other, points), picked(times, points)))

    def after(self, first: Sums, times: Numeric) -> GridSums:
        """The others and ``times`` times these."""
        return GridSums(lambda points: sums_at(first, points).plus(self.at(points), picked(times, points)))

    def __iter__(self) -> Iterator[Numeric]:
        """The four of all points. [s]"""
        return iter(self.at(None))

    def __getattr__(self, name: str) -> Numeric:
        """One of the four, of all points. [s]"""
        if name not in Sums._fields:
            raise AttributeError(name)
        return getattr(self.at(None), name)


AnySums = Sums | GridSums


def picked(values: Numeric, points: Points) -> Numeric:
    """Values of a grid at points of it; numbers and axes are the same at all of their rows or columns."""
    if points is None or np.ndim(values) == 0:
        return values
    return values[tuple(place if size > 1 else 0 for place, size in zip(points, np.shape(values), strict=True))]


def sums_at(sums: AnySums, points: Points) -> Sums:
    """Sums at points of a grid, None = all. [s]"""
    return sums.at(points) if isinstance(sums, GridSums) else Sums(*(picked(part, points) for part in sums))


def at_columns(sums: AnySums, place: Any) -> GridSums:
    """Lay sums of some columns out over a grid of shape (rows, columns). [s]"""

    def laid(values: Numeric) -> Numeric:
        return values[:, place] if np.ndim(values) == 2 and np.shape(values)[1] > 1 else values

    def at(points: Points) -> Sums:
        if points is not None:
            return sums_at(sums, (points[0], place[points[1]]))
        return Sums(*(laid(part) for part in sums))

    return GridSums(at)


def chosen_sums(first: Numeric, yes: AnySums, no: AnySums) -> AnySums:
    """Choose between the sums of two ways to do the same, point by point. [s]"""

    def at(points: Points) -> Sums:
        here = picked(first, points)
        both = zip(sums_at(yes, points), sums_at(no, points), strict=True)
        return Sums(*(np.where(here, one, other) for one, other in both))

    return GridSums(at) if isinstance(yes, GridSums) or isinstance(no, GridSums) else at(None)


def added(mine: Numeric, theirs: Numeric, times: Numeric = 1.0) -> Numeric:
    """``mine + theirs * times`` without touching an array for a plain zero or one."""
    if (isinstance(theirs, float) and theirs == 0.0) or (isinstance(times, float) and times == 0.0):
        return mine
    more = theirs if isinstance(times, float) and times == 1.0 else theirs * times
    return more if isinstance(mine, float) and mine == 0.0 else mine + more


NO_SUMS = Sums()


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of an operator (compute and memory blended) and its parts. [s]"""

    time: Numeric = 0.0
    sums: Sums = NO_SUMS

    def __add__(self, other: Cost) -> Cost:
        """Cost of both, one after the other."""
        return Cost(self.time + other.time, self.sums.plus(other.sums))

    def __mul__(self, times: Numeric) -> Cost:
        """Cost of the same thing ``times`` times."""
        return Cost(self.time * times, NO_SUMS.plus(self.sums, times))


NOTHING = Cost()


def blend(compute: Numeric, memory: Numeric, q: Numeric) -> Numeric:
    """Partial overlap of compute and memory: :math:`(c^q + m^q)^{1/q}`, the larger one for q = inf.

    q = 1 is the plain sum. Source: physics page, section 7.

    Parameters
    ----------
    compute, memory
        Time of the arithmetic and of the traffic of a kernel, each alone. [s]
    q
        Exponent, 1 or more; inf = full overlap. [1]

    Returns
    -------
    numeric
        Of the broadcast shape. [s]

    Examples
    --------
    3 and 4 us take 5 us at q = 2, 7 without any overlap and 4 with a full one:

    >>> [float(blend(3.0, 4.0, q)) for q in (2.0, 1.0, np.inf)]
    [5.0, 7.0, 4.0]
    """
    if np.ndim(q) == 0:
        if np.isinf(q):
            return np.maximum(compute, memory)
        if q == 1.0:
            return compute + memory
        return (compute**q + memory**q) ** (1.0 / q)
    high = np.maximum(compute, memory)
    low = np.minimum(compute, memory)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(high > 0, low / high, 0.0)
    return high * (1.0 + ratio**q) ** (1.0 / q)


def operator_cost(work: Work, rate: Rate) -> Cost:
    r"""Cost of one kernel: :math:`t = t_0 + ((F/e_c\Pi)^q + (B/e_m W)^q)^{1/q}` (section 7).

    References: S. Williams et al., "Roofline", CACM 52(4), 2009, :doi:`10.1145/1498765.1498785`.

    Parameters
    ----------
    work
        F [FLOP] and B, the bytes that go through HBM [B].
    rate
        What the kernel reaches: :math:`e_c\Pi` [FLOP/s], :math:`e_m W` [B/s], :math:`t_0` [s], q [1].

    Returns
    -------
    Cost
        Time of one call and its parts, of the broadcast shape. [s]

    Examples
    --------
    3 GFLOP at 1 PFLOP/s take 3 us, 16 MB at 4 TB/s 4 us, both at q = 2 5 us, and the launch 5 us more:

    >>> cost = operator_cost(Work(flops=3e9, hbm_bytes=16e6), Rate(flops=1e15, bandwidth=4e12, t0=5e-6, blend=2.0))
    >>> f"{cost.time * 1e6:.1f} us"
    '10.0 us'
    """
    compute = work.flops / rate.flops
    memory = work.hbm_bytes / rate.bandwidth
    return Cost(rate.t0 + blend(compute, memory, rate.blend), Sums(compute, memory, 0.0, rate.t0))
