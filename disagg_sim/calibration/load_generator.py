"""What a finite benchmark run adds to the steady state: all slots start at once, and the last ones drain.

A generator that holds N requests in flight and sends ``waves`` times N of them, with output lengths uniform in
80-100 % of the stated one, starts with N prompts at the same instant and ends with slots that have nothing to do.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np

from disagg_sim.physics.work import Numeric

#: Half width of the service times around their mean: lengths are uniform in [0.8, 1.0], mean 0.9. [1]
SPREAD = 0.1 / 0.9
#: Slots above which the factor no longer moves by more than a tenth of a per cent.
MOST_SLOTS = 512


@lru_cache(maxsize=256)
def drain_factor(slots: int, waves: int) -> float:
    """Length of a run of ``waves * slots`` requests over that of one without an end: at least 1. [1]

    Requests of length uniform in ``1 +- SPREAD`` go to whichever slot is free first (fixed random order).
    """
    if slots < 1 or waves < 1:
        return 1.0
    slots = min(slots, MOST_SLOTS)
    times = np.random.default_rng(0).uniform(1 - SPREAD, 1 + SPREAD, slots * waves)
    free = [0.0] * slots
    for time in times:
        heapq.heapreplace(free, free[0] + float(time))
    return max(free) * slots / float(times.sum())


def drain_factors(slots: Numeric, waves: float) -> Numeric:
    """``drain_factor`` of every element. [1]"""
    return np.array([drain_factor(int(n), int(waves)) for n in np.asarray(slots, dtype=float)])
