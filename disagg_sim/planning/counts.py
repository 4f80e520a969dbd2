"""Count instances: what sizing asks of a configuration, the fewest that keep the limits at a rate, the most rate.

What a pool does is its own: a ``PoolChoice`` says what an instance serves at most, and whether so many keep the limits.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import Setup

#: Most instances of a pool. [1]
MOST_INSTANCES = 100_000
#: Relative width at which the search for the most rate ends. [1]
NARROW = 2e-3


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


Choice = TypeVar("Choice", bound=PoolChoice)


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


def least(choice: PoolChoice, rate: float, most: int = MOST_INSTANCES, low: int | None = None) -> int | None:
    """Find the fewest instances, from ``low``, that keep the limits at a rate [request/s]; None if ``most`` do not."""
    low = choice.asks(rate, most) if low is None else low
    return None if low is None else first_of(low, most, partial(choice.holds, rate))


class SizedPool(NamedTuple, Generic[Choice]):
    """A pool."""

    choice: Choice
    instances: int  # [1]

    @property
    def gpus(self) -> int:
        """Of all its instances. [1]"""
        return self.instances * gpus_of(self.choice)


def pools(
    choices: Sequence[Choice],
    rate: float,
    most: float,
    within: Callable[[float, float], float],
    handing: Callable[[Choice], Choice] | None = None,
    largest: Callable[[Choice], float] = lambda _: math.inf,
) -> Iterator[SizedPool[Choice]]:
    """Find pools that keep the limits at a rate, those of choices that could do with the fewest GPUs first.

    A choice could do with the GPUs of as many instances as its ``most`` asks for. ``ceiling`` is known before, and
    choices that lose by it are not looked at closer. Takes ``rate`` [request/s], ``within`` (GPUs that a pool may
    have, by the fewest found so far and those that the next could do with [1]), ``handing`` (of a choice the same
    before a decode pool; None = itself) and ``largest`` (GPUs that a pool of a choice may have [1]).
    """
    fewest, gpus = most, [gpus_of(choice) for choice in choices]
    order = [
        (math.ceil(rate / ceiling) * gpus[place], False, place, 0)
        for place, choice in enumerate(choices)
        if (ceiling := choice.ceiling) > 0
    ]
    heapq.heapify(order)
    while order and order[0][0] <= (limit := within(fewest, order[0][0])):
        _, known, place, low = heapq.heappop(order)
        choice = choices[place] if handing is None or not known else handing(choices[place])
        room = min(int(min(limit, largest(choice)) // gpus[place]), MOST_INSTANCES)
        if not known:
            if (asked := choice.asks(rate, room)) is not None:
                heapq.heappush(order, (asked * gpus[place], True, place, asked))
            continue
        instances = least(choice, rate, room, low)
        if instances is not None:
            found = SizedPool(choice, instances)
            fewest = min(fewest, found.gpus)
            yield found


def best_rate(choices: Sequence[PoolChoice]) -> float:
    """Find the highest rate that a GPU of some choices cannot exceed; 0 without choices. [request/s]"""
    best = 0.0
    for choice in sorted(choices, key=lambda each: each.ceiling / gpus_of(each), reverse=True):
        if choice.ceiling / gpus_of(choice) <= best:
            break
        if choice.asks(best * gpus_of(choice), 1) is not None:
            best = max(best, choice.most / gpus_of(choice))
    return best


def highest(serves: Callable[[float], bool], bound: float, least: float = 0.0) -> float:
    """Find the highest rate that is served, to a relative ``NARROW``.

    Takes ``serves`` (whether a rate is [request/s]), ``bound`` [request/s] and ``least`` [request/s] (0 = a
    ten-thousandth of the bound). Returns 0 where the least is not [request/s].

    >>> abs(highest(lambda rate: rate <= 7.0, 40.0) / 7.0 - 1.0) < NARROW, highest(lambda rate: False, 40.0)
    (True, 0.0)
    """
    low, high = least or bound * 1e-4, bound
    if not serves(low):
        return 0.0
    while high / low > 1.0 + NARROW:
        middle = math.sqrt(low * high) if high > 4 * low else (low + high) / 2
        low, high = (middle, high) if serves(middle) else (low, middle)
    return low
