"""Count the design points of a block, and those that each reason removed; counts of blocks add up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

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

    computed: int = 0  # design points whose time and memory were computed [1]
    feasible: int = 0  # of them, those that fit in memory [1]
    rows: int = 0  # stored rows: prefill candidates, or matched decode points [1]
    removals: tuple[Removal, ...] = ()

    def to_json(self) -> str:
        """As a text that Python's ``json`` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Tally:
        """Back from ``to_json``."""
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
    """Sum of counts; of each reason the sum of counts and the closest shortfall."""
    held = tuple(tallies)
    merged: dict[tuple[str, str], Removal] = {}
    for item in (item for tally in held for item in tally.removals):
        known = merged.get((item.phase, item.reason))
        merged[item.phase, item.reason] = (
            item
            if known is None
            else Removal(
                phase=item.phase,
                reason=item.reason,
                count=item.count + known.count,
                shortfall=min(item.shortfall, known.shortfall),
                unit=item.unit,
            )
        )
    return Tally(
        computed=sum(t.computed for t in held),
        feasible=sum(t.feasible for t in held),
        rows=sum(t.rows for t in held),
        removals=tuple(merged.values()),
    )
