"""Count the design points of a block, and those that each reason removed; counts of blocks add up.

They say why a case has no frontier, and by how much its closest point misses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import ServingMode
from disagg_sim.sweep.cases import Case
from disagg_sim.sweep.plan import ModePlan
from disagg_sim.sweep.spec import PointLimits
from disagg_sim.units import GB

SHARED = "prefill and decode"  # phase of the points of a co-located mode
OUT_OF_MEMORY = "out of memory"
ABOVE_FTL = "above the FTL limit"
ABOVE_TTL = "above the TTL limit"
ABOVE_NIC = "above the NIC limit"
NO_MATCH = "no match within gpu_cap"
NO_BALANCE = "no match within gpu_cap and tolerance"
NO_RATIO = "no match at the fixed ratio within gpu_cap"
NO_PREFILL = "no prefill configuration within the limits to match with"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Design points that one reason removed."""

    phase: str  # "prefill" or "decode"
    reason: str
    count: int  # design points [1]
    shortfall: float  # by how much the closest of them misses; inf where that has no meaning [unit]
    unit: str  # "B", "s", "B/s" or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of one block, or of many added up."""

    computed: int  # design points whose time and memory were computed [1]
    feasible: int = 0  # of them, those that fit in memory [1]
    rows: int  # stored rows: prefill candidates, or matched decode points [1]
    removals: tuple[Removal, ...] = ()

    def to_json(self) -> str:
        """Write as JSON, with infinities as Python's ``json`` writes them."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Tally:
        """Read the text of ``to_json``."""
        values = json.loads(text)
        return cls(**{**values, "removals": tuple(Removal(**removal) for removal in values["removals"])})


def removal(
    phase: str, reason: str, removed: NDArray[np.bool_], excess: NDArray[np.float64] | None = None, unit: str = ""
) -> tuple[Removal, ...]:
    """Count the points in ``removed``; empty if there are none."""
    if not removed.any():
        return ()
    closest = math.inf if excess is None else float(np.min(excess, where=removed, initial=np.inf))
    return (Removal(phase=phase, reason=reason, count=int(removed.sum()), shortfall=closest, unit=unit),)


def add_up(tallies: Iterable[Tally]) -> Tally:
    """Add up counts; each reason keeps its closest shortfall."""
    every = tuple(tallies)
    merged: dict[tuple[str, str], Removal] = {}
    for item in (item for tally in every for item in tally.removals):
        if known := merged.get((item.phase, item.reason)):
            shortfall = min(item.shortfall, known.shortfall)
            item = replace(item, count=item.count + known.count, shortfall=shortfall)  # noqa: PLW2901
        merged[item.phase, item.reason] = item
    return Tally(
        computed=sum(t.computed for t in every),
        feasible=sum(t.feasible for t in every),
        rows=sum(t.rows for t in every),
        removals=tuple(merged.values()),
    )


def verdict(case: Case, plan: ModePlan, prefill: Tally, points: Tally) -> str:
    """Explain in one clause why a mode of a case has no frontier."""
    if plan.mode != ServingMode.DISAGGREGATED:
        return _of_instances(case, plan, points)
    for name, phase, tally in ((case.prefill_system.name, "prefill", prefill), (case.system, "decode", points)):
        if not tally.computed:
            return _no_mapping(case, name, plan)
        if not tally.feasible:
            return _fits_nowhere(case, name, phase, tally)
    if not prefill.rows:
        return _no_prefill(case, prefill)
    if _has(points, ABOVE_TTL) and not _has(points, ABOVE_NIC) and points.rows == 0:
        left = points.feasible - sum(r.count for r in points.removals if r.reason == ABOVE_TTL)
        if not left:
            return _too_slow("decode configuration", "TTL", case.limits.ttl_s, _closest(points, ABOVE_TTL))
    reasons = ", ".join(f"{r.reason} ({r.count})" for r in points.removals)
    return f"no decode point has a match; decode points removed: {reasons}; gpu_cap is {case.limits.gpu_cap}"


def detail(item: Removal, limits: PointLimits) -> str:
    """By how much the closest of the removed points misses; its shortfall is finite."""
    if item.reason == OUT_OF_MEMORY:
        return f"the closest lacks {item.shortfall / GB:.3g} GB per GPU"
    if item.reason == ABOVE_NIC:
        needed, allowed = _distinct_texts((limits.nic_limit + item.shortfall) / GB, limits.nic_limit / GB)
        return f"the closest needs {needed} GB/s, limit {allowed} GB/s"
    limit = limits.ftl_s if item.reason == ABOVE_FTL else limits.ttl_s
    taken, allowed = _distinct_texts(limit + item.shortfall, limit)
    return f"the closest takes {taken} s, limit {allowed} s"


def _of_instances(case: Case, plan: ModePlan, points: Tally) -> str:
    """Explain why co-located instances have no frontier."""
    if not points.computed:
        return _no_mapping(case, case.system, plan)
    if not points.feasible:
        return _fits_nowhere(case, case.system, plan.mode, points)
    if points.feasible == sum(r.count for r in points.removals if r.reason == ABOVE_FTL):
        return _too_slow(f"{plan.mode} configuration", "FTL", case.limits.ftl_s, _closest(points, ABOVE_FTL))
    over = _closest(points, ABOVE_TTL)
    return _too_slow(f"{plan.mode} configuration within the FTL limit", "TTL", case.limits.ttl_s, over)


def _no_mapping(case: Case, system: str, plan: ModePlan) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in plan.refused)
    return f"{case.model} has no allowed mapping on {system}: {reasons}"


def _fits_nowhere(case: Case, system: str, phase: str, tally: Tally) -> str:
    short = _closest(tally, OUT_OF_MEMORY) / GB
    return f"{case.model} fits on no allowed mapping of {system} ({phase}): the closest lacks {short:.1f} GB per GPU"


def _no_prefill(case: Case, prefill: Tally) -> str:
    if (over := _closest(prefill, ABOVE_FTL)) < math.inf and not _has(prefill, ABOVE_NIC):
        return _too_slow("prefill configuration", "FTL", case.limits.ftl_s, over)
    limit = case.limits.nic_limit
    least, allowed = _distinct_texts((limit + _closest(prefill, ABOVE_NIC)) / GB, limit / GB)
    return f"no prefill configuration stays below {allowed} GB/s of KV egress; the least is {least} GB/s"


def _too_slow(what: str, latency: str, limit: float, over: float) -> str:
    best, allowed = _distinct_texts(limit + over, limit)
    return f"no {what} meets the {latency} limit of {allowed} s; the best {latency} is {best} s"


def _distinct_texts(value: float, limit: float) -> tuple[str, str]:
    """Format value and limit with just enough digits to show that the value is larger."""
    texts = [(f"{value:.{digits}g}", f"{limit:.{max(digits, 6)}g}") for digits in range(4, 18)]
    return next((pair for pair in texts if float(pair[0]) > float(pair[1])), texts[0])


def _has(tally: Tally, reason: str) -> bool:
    return any(item.reason == reason for item in tally.removals)


def _closest(tally: Tally, reason: str) -> float:
    return min((item.shortfall for item in tally.removals if item.reason == reason), default=math.inf)
