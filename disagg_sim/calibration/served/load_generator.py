"""What a finite benchmark run adds to the steady state: all slots start at once, and the last ones drain.

A generator that holds N requests in flight and sends ``waves`` times N of them, with service times uniform in
``1 +- spread``, starts with N prompts at the same instant and ends with slots that have nothing to do.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np

from disagg_sim.physics.work import Numeric

#: Slots above which the factor no longer moves by more than a tenth of a per cent.
MOST_SLOTS = 512


@lru_cache(maxsize=256)
def drain_factor(slots: int, waves: int, spread: float) -> float:
    """Length of a run of ``waves * slots`` requests over that of one without an end: at least 1. [1]

    Requests of length uniform in ``1 +- spread`` go to whichever slot is free first (fixed random order).
    """
    if slots < 1 or waves < 1:
        return 1.0
    slots = min(slots, MOST_SLOTS)
    times = np.random.default_rng(0).uniform(1 - spread, 1 + spread, slots * waves)
    free = [0.0] * slots
    for time in times:
        heapq.heapreplace(free, free[0] + float(time))
    return max(free) * slots / float(times.sum())


def drain_factors(slots: Numeric, waves: float, spread: float) -> Numeric:
    """``drain_factor`` of every element. [1]"""
    return np.array([drain_factor(int(n), int(waves), spread) for n in np.asarray(slots, dtype=float)])
