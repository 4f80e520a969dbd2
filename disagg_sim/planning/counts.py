"""Find the fewest instances of a choice that keep the limits at a rate."""

from __future__ import annotations

import math

from disagg_sim.planning.pools import MOST_INSTANCES, Choice


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
