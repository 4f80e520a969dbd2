"""What sizing asks of one configuration of the instances of a pool, whatever the pool does."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import Setup


class PoolChoice(Protocol):
    """One configuration of the instances of a pool."""

    @property
    def at(self) -> Setup:
        """Model, system, recipe and engine."""

    @property
    def mapping(self) -> Sharding:
        """Sharding of one instance."""

    @property
    def most(self) -> float:
        """Upper bound of the rate of an instance. [request/s]"""

    @property
    def ceiling(self) -> float:
        """Upper bound of ``most`` that takes less time to compute. [request/s]"""

    def asks(self, rate: float, most: float) -> int | None:
        """Instances that ``most`` asks for at a rate [request/s]; None where more than ``most`` of them."""

    def holds(self, rate: float, instances: int) -> bool:
        """Whether so many instances keep the limits at a rate [request/s]."""


class QuickBound:
    """A choice whose ``most`` takes no time to compute."""

    __slots__ = ()

    @property
    def most(self) -> float:
        """See ``PoolChoice``."""
        raise NotImplementedError

    @property
    def ceiling(self) -> float:
        """See ``PoolChoice``."""
        return self.most

    def asks(self, rate: float, most: float) -> int | None:
        """See ``PoolChoice``."""
        found = max(math.ceil(rate / self.most), 1) if self.most > 0 else math.inf
        return int(found) if found <= most else None


def gpus_of(choice: PoolChoice) -> int:
    """GPUs of one instance. [1]"""
    return int(choice.mapping.gpus)


def first_of(low: int, most: int, holds: Callable[[int], bool]) -> int | None:
    """Find the least number from ``low`` to ``most`` that holds, as all above it do; None where none does.

    >>> first_of(2, 100, lambda number: number >= 41), first_of(2, 100, lambda number: number > 100)
    (41, None)
    """
    for number in range(low, min(low + 2, most + 1)):  # most of the time one of these
        if holds(number):
            return number
    if low + 1 >= most or not holds(most):
        return None
    low, high, step = low + 2, min(low + 3, most), 4
    while not holds(high):
        low, high, step = high + 1, min(high + step, most), 2 * step
    return bisect_left(range(high + 1), True, lo=low, hi=high, key=holds)
