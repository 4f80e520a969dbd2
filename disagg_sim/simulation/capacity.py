"""Search the serving capacity: the largest request rate up to which a run meets its criterion, by bisection.

Bisection assumes that a criterion missed at one rate is missed at every higher rate. Policies that change roles may
break this assumption: they may miss the criterion under light load and meet it under heavier load. So the search tries
a few more rates. If the criterion is met above a rate that misses it, the answer is the lower rate, with a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.notebook import Shown
from disagg_sim.simulation.metrics import Summary

#: An aim: whether a run is good enough.
Aim = Callable[[Summary], bool]

STEP = 2.0  # by which the bracket grows or shrinks until it holds the capacity [1]
TOLERANCE = 0.05  # relative width of the bracket at which the search ends [1]
WIDEST = 64.0  # the bracket is looked for within this factor of its start, both ways [1]
#: Rates that are tried beside, over the largest that met the aim, and over the smallest that did not: an octave apart,
#: so that no stretch of an octave with the other answer is missed within two octaves below and one above. [1]
BELOW, BEYOND = (0.5, 0.25), (2.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(Shown):
    """The largest rate below which every rate that was tried met the aim, and what the search saw."""

    rate_scale: float  # of the trace's own rate; 0 where the lowest rate that was tried did not meet the aim [1]
    requests_per_s: float  # the same as a request rate [request/s]
    above: float  # smallest rate scale that did not meet it; inf when every one did [1]
    met_again: float  # largest rate scale that met it above one that did not; 0 where none did [1]
    runs: tuple[Summary, ...]  # every rate that was tried, ascending

    @property
    def message(self) -> str:
        """One line."""
        if self.met_again:
            missed = next(row for row in self.runs if row.rate_scale == self.above)
            return (
                f"{self.requests_per_s:.4g} requests/s ({self.rate_scale:.4g} times the trace's rate); NOT MONOTONE: "
                f"{self.above:.4g} times misses the aim ({missed.slo_attainment:.1%} of the requests are inside the "
                f"SLO), {self.met_again:.4g} times meets it again"
            )
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


def attains(share: float) -> Aim:
    """Ask that at least a share of all requests are inside the SLO."""
    if not 0 < share <= 1:
        raise InputError(f"share {share} is out of range; allowed: above 0, at most 1")
    return lambda row: row.slo_attainment >= share


def p99_inside(slo: Slo) -> Aim:
    """Ask that the 99th percentiles of TTFT and TPOT are inside the SLO, and that no request was lost."""
    return lambda row: row.completed == row.requests and row.ttft_p99_s <= slo.ttft and row.tpot_p99_s <= slo.tpot


def serving_capacity(
    run: Callable[[float], Summary],
    aim: Aim,
    *,
    rate: float,
    start: float = 1.0,
    tolerance: float = TOLERANCE,
    checked: bool = True,
) -> Capacity:
    """Search the largest rate scale [1] up to which every rate that is tried meets an aim.

    From ``start`` the scale doubles while the aim is met, or halves until it is; the bracket is then bisected in
    proportion. That takes about 6 runs from a start within a factor of two, one more for each doubling. A half and a
    quarter of the answer and twice the first rate above it are tried, too, unless they were: three more runs at most
    where all agree. A lower rate that misses the aim takes the place of the upper end, and the search goes on below it,
    up to 5 runs more and one for each halving.
    """
    seen: dict[float, Summary] = {}

    def met(scale: float) -> bool:
        if scale not in seen:
            seen[scale] = run(scale)
        return aim(seen[scale])

    low, high = bracket(met, start=start, tolerance=tolerance)
    if checked:
        for scale in (*(low * factor for factor in BELOW), *(high * factor for factor in BEYOND)):
            if 0 < scale < math.inf and not any(_close(scale, other, tolerance) for other in seen):
                met(scale)
        missed = min((scale for scale in seen if scale < low and not met(scale)), default=0.0)
        if missed:
            low, high = bracket(met, start=missed / STEP, tolerance=tolerance, above=missed)
    again = max((scale for scale in seen if scale > high and met(scale)), default=0.0)
    return Capacity(
        rate_scale=low,
        requests_per_s=low * rate,
        above=high,
        met_again=again,
        runs=tuple(seen[key] for key in sorted(seen)),
    )


def _close(one: float, other: float, tolerance: float) -> bool:
    return max(one, other) <= min(one, other) * (1 + tolerance)


def bracket(
    met: Callable[[float], bool], *, start: float, tolerance: float = TOLERANCE, above: float = math.inf
) -> tuple[float, float]:
    """Bracket the largest scale that is met: double or halve from ``start``, then bisect; 0 and inf where none is."""
    low, high = 0.0, above
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
