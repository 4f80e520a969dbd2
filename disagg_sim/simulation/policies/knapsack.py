"""0/1 knapsack by value per weight."""

from __future__ import annotations

from collections.abc import Sequence


def greedy(values: Sequence[float], weights: Sequence[float], capacity: float) -> list[int]:
    """Indices of what goes in: the highest value per weight first, whatever does not fit is passed over.

    At most the heaviest item's value off the best filling, as the fractional knapsack shows. Of equals the first.

    >>> greedy([1.0, 1.0, 1.5], [40, 70, 50], 100)
    [2, 0]
    """
    order = sorted(range(len(weights)), key=lambda item: -values[item] / weights[item])
    taken, left = [], capacity
    for item in order:
        if weights[item] <= left:
            taken.append(item)
            left -= weights[item]
    return taken
