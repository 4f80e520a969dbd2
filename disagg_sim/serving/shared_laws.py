"""Name the law of an instance that does both phases: a mode's, and the mode of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.serving.colocated import count_colocated, search_colocated
from disagg_sim.serving.colocation import ColocatedCase, ColocatedPoints
from disagg_sim.serving.piggyback import count_piggyback, search_piggyback


@dataclass(frozen=True, slots=True)
class SharedLaw:
    """How a co-located mode is searched."""

    search: Callable[[ColocatedCase, Sharding], ColocatedPoints]
    count: Callable[[ColocatedCase, Sharding], int]  # design points [1]


#: Laws of the co-located modes.
SHARED_LAWS: dict[str, SharedLaw] = {
    ServingMode.COLOCATED: SharedLaw(search_colocated, count_colocated),
    ServingMode.PIGGYBACK: SharedLaw(search_piggyback, count_piggyback),
}
