"""Find how requests come to one of several co-located instances that a router keeps equally full."""

from __future__ import annotations

#: Variance of the arrivals at one of many co-located instances, over that of Poisson arrivals, where each request goes
#: to the instance with the fewest requests (chosen from simulations, which lie on both sides). [1]
EVEN = 0.3


def evened(instances: int) -> float:
    """Variance of the arrivals at an instance over that of Poisson ones. [1]

    >>> evened(1), round(evened(1000), 3)
    (1.0, 0.301)
    """
    return EVEN + (1.0 - EVEN) / instances
