"""Find the fewest instances of a choice that keep the limits at a rate, and the most rate that something serves."""

from __future__ import annotations

import math
from collections.abc import Callable

from disagg_sim.planning.pools import MOST_INSTANCES, Choice

#: Relative width at which the search for the most rate ends. [1]
NARROW = 2e-3


def least(choice: Choice, rate: float, most: int = MOST_INSTANCES) -> int | None:
    """Find the fewest instances that keep the limits at a rate.

    Parameters
    ----------
    choice
        Configuration of the instances.
    rate
        Of the pool. [request/s]
    most
        Instances that may not be exceeded. [1]

    Returns
    -------
    int or None
        None where ``most`` do not. [1]
    """
    if not choice.most > 0:
        return None
    low = max(1, math.ceil(rate / choice.most))  # below it the queue grows without end
    if low > most:
        return None
    high, step = low, 1
    while not choice.holds(rate, high):
        if high >= most:
            return None
        low, high, step = high + 1, min(high + step, most), 2 * step
    while low < high:
        middle = (low + high) // 2
        if choice.holds(rate, middle):
            high = middle
        else:
            low = middle + 1
    return high


def highest(serves: Callable[[float], bool], bound: float) -> float:
    """Find the highest rate that is served, to a relative ``NARROW``.

    Parameters
    ----------
    serves
        Whether a rate is. [request/s]
    bound
        Rate above which none is. [request/s]

    Returns
    -------
    float
        0 where a ten-thousandth of the bound is not. [request/s]

    Examples
    --------
    >>> abs(highest(lambda rate: rate <= 7.0, 40.0) / 7.0 - 1.0) < NARROW, highest(lambda rate: False, 40.0)
    (True, 0.0)
    """
    low, high = bound * 1e-4, bound
    if not serves(low):
        return 0.0
    while high / low > 1.0 + NARROW:
        middle = math.sqrt(low * high) if high > 4 * low else (low + high) / 2
        low, high = (middle, high) if serves(middle) else (low, middle)
    return low
