"""Serving capacity: the largest request rate at which a run still meets its aim, by bisection over the rate scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.shown import Shown
from disagg_sim.simulation.metrics import Summary

#: An aim: whether a run is good enough.
Aim = Callable[[Summary], bool]

STEP = 2.0  # by which the bracket grows or shrinks until it holds the capacity [1]
TOLERANCE = 0.05  # relative width of the bracket at which the search ends [1]
WIDEST = 64.0  # the bracket is looked for within this factor of its start, both ways [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(Shown):
    """The largest rate that met the aim, and what the search saw."""

    rate_scale: float  # of the trace's own rate; 0 when no rate that was tried met the aim [1]
    requests_per_s: float  # the same as a request rate [request/s]
    above: float  # smallest rate scale that did not meet it; inf when every one did [1]
    runs: tuple[Summary, ...]  # every rate that was tried, ascending

    @property
    def message(self) -> str:
        """One line."""
        if not self.rate_scale:
            best = self.runs[0]
            return (
                f"no rate meets the aim: at {best.rate_scale:.4g} times the trace's rate {best.slo_attainment:.1%} of "
                f"the requests are inside the SLO (TTFT p99 {best.ttft_p99_s:.4g} s, TPOT p99 {best.tpot_p99_s:.4g} s)"
            )
        if math.isinf(self.above):
            return f"every rate up to {self.rate_scale:.4g} times the trace's meets the aim"
        return (
            f"{self.requests_per_s:.4g} requests/s ({self.rate_scale:.4g} times the trace's rate); "
            f"{self.above:.4g} times is too much"
        )


def attains(share: float = 0.9) -> Aim:
    """At least ``share`` [1] of all requests are inside the SLO."""
    if not 0 < share <= 1:
        raise InputError(f"share {share} is out of range; allowed: above 0, at most 1")
    return lambda row: row.slo_attainment >= share


def p99_inside(slo: Slo) -> Aim:
    """The 99th percentiles of TTFT and TPOT are inside the SLO, and no request was lost."""
    return lambda row: row.completed == row.requests and row.ttft_p99_s <= slo.ttft and row.tpot_p99_s <= slo.tpot


def serving_capacity(
    run: Callable[[float], Summary], aim: Aim, *, rate: float, start: float = 1.0, tolerance: float = TOLERANCE
) -> Capacity:
    """The largest rate scale that meets an aim.

    From ``start`` the scale doubles while the aim is met, or halves until it is; the bracket is then
    bisected in proportion. That takes about 6 runs from a start within a factor of two, one more for each
    doubling. Where the aim is met, missed and met again, as may happen on a short trace, a boundary is
    found, not every one.

    Parameters
    ----------
    run : callable
        Rate scale [1] to the summary of a run at it.
    aim : callable
        ``attains()``, ``p99_inside(slo)``, or another.
    rate : float
        Request rate of the trace at scale 1. [request/s]
    start : float
        Rate scale to begin with. [1]
    tolerance : float
        Relative width of the bracket at the end. [1]
    """
    seen: dict[float, Summary] = {}

    def met(scale: float) -> bool:
        seen[scale] = run(scale)
        return aim(seen[scale])

    low, high = bracket(met, start=start, tolerance=tolerance)
    return Capacity(
        rate_scale=low, requests_per_s=low * rate, above=high, runs=tuple(seen[key] for key in sorted(seen))
    )


def bracket(met: Callable[[float], bool], *, start: float = 1.0, tolerance: float = TOLERANCE) -> tuple[float, float]:
    """Largest scale met and smallest not met, searched as in ``serving_capacity``; 0 or inf where there is none."""
    low, high = 0.0, math.inf
    scale = start
    while start / WIDEST <= scale <= start * WIDEST and (low == 0.0 or math.isinf(high)):
        if met(scale):
            low, scale = scale, scale * STEP
        else:
            high, scale = scale, scale / STEP
    while low > 0.0 and high < math.inf and high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        if met(middle):
            low = middle
        else:
            high = middle
    return low, high
