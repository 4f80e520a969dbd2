"""Name the law of an instance that does both phases: a mode's, and the mode of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.errors import InputError
from disagg_sim.physics.setup import Setup
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


def engine_mode(at: Setup) -> ServingMode:
    """Name the co-located mode of an engine as it starts by default: chunks inside decode steps, or decode stops.

    ``EngineSpec.mixed_steps`` says so. Raises ``InputError`` for a setup without an engine.

    >>> from disagg_sim.physics.setup import setup
    >>> [str(engine_mode(setup("llama_3_1_8b", "h100_sxm", "fp8", engine=name))) for name in ("vllm", "sglang")]
    ['piggyback', 'colocated']
    """
    if at.overheads is None:
        named = " or ".join(SHARED_LAWS)
        raise InputError(f"no engine that would choose the co-located mode: profile {at.profile.name}; name {named}")
    return ServingMode.PIGGYBACK if at.overheads.mixed_steps else ServingMode.COLOCATED
