r"""Size designs for users in flight, each of whom sends the next request when the last has ended.

A design with fewer instances is slower, and slower answers are asked for less often: so many users meet each design at
a rate of its own, the one at which so many requests are in flight (Little's law). A design serves the users where it
keeps its limits at that rate. From below, the rate goes up to the least own rate of the cheapest designs, until one of
them keeps its limits at its own:

.. math:: r_{k+1} = \min_{d \in D(r_k)} r_d, \qquad N_d(r_d) = N
"""

from __future__ import annotations

import math
from dataclasses import replace

from disagg_sim.domain import ServingMode
from disagg_sim.planning.design import Design
from disagg_sim.planning.pools import AnyChoice
from disagg_sim.planning.sizing import Candidates, cost_of, designs_at

#: Share by which the rate goes up in a round, at least. [1]
STEP = 5e-3
#: Relative width at which the search for a design's own rate ends. [1]
NARROW = 1e-7


def designs_of_users(case: Candidates, users: int) -> list[Design]:
    """Find designs of both modes that serve some users within the limits, cheapest first, each at its own rate.

    Returns some designs of each mode; none where nothing serves.
    """
    work = case.work
    found: dict[ServingMode, list[Design]] = {ServingMode.DISAGGREGATED: [], ServingMode.COLOCATED: []}
    rate = users / (work.ttft.seconds + work.lengths.gaps * work.tpot.seconds) / 2  # a mean may exceed a median's limit
    known: dict[tuple[tuple[AnyChoice, int], ...], float] = {}
    while math.isfinite(rate):
        faster = math.inf
        for design in designs_at(case, rate):
            kept, key = found[design.mode], tuple((pool.choice, pool.instances) for pool in design.pools)
            own = known[key] if key in known else known.setdefault(key, own_rate(design, users))
            if own <= rate:
                kept.append(at_rate(case, design, own))
            elif design.cost < min((each.cost for each in kept), default=math.inf):
                faster = min(faster, own)
        rate = max(faster, rate * (1.0 + STEP))
    every = dict.fromkeys(each for kept in found.values() for each in kept)  # in the order of their rates
    return sorted(every, key=lambda each: (each.cost, each.gpus))


def own_rate(design: Design, users: int) -> float:
    """Find the rate at which a design has so many requests in flight. [request/s]"""
    low, high = sorted((design.rate, users / design.in_flight * design.rate))  # the longer they take, the fewer come
    while high - low > NARROW * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _with_rate(design, middle).in_flight >= users else (middle, high)
    return high


def _with_rate(design: Design, rate: float) -> Design:
    pools = tuple(replace(pool, rate=rate) for pool in design.pools)
    return replace(design, pools=pools, rate=rate, kv_rate=design.kv_rate * rate / design.rate)


def at_rate(case: Candidates, design: Design, rate: float) -> Design:
    """Give a design another rate, with the KV bandwidth and the cost that follow."""
    found = _with_rate(design, rate)
    if not case.drawn:
        return found
    return replace(found, cost=design.cost + cost_of(case, found) - cost_of(case, design))  # its spares draw as before
