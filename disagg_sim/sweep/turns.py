"""Read the caches that the turns of sessions meet in a sweep, in bytes of a GPU; count them in tokens of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from disagg_sim.facts import load
from disagg_sim.facts.hardware import WRITES, KvTier
from disagg_sim.facts.schema import Axis, Named, OneOf, PlainName, Quantity, Range, Strict, Unless, Written, schema_of
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.drafting import cached_layers
from disagg_sim.physics.setup import Setup
from disagg_sim.search.prefixes import GpuCaches
from disagg_sim.units import TB
from disagg_sim.workload.turns import TurnCaches


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Turns of sessions, and the caches that they meet."""

    sessions_per_s: float
    tpot_s: float = 0.0
    cache: GpuCaches | None = None  # None = nothing is remembered

    @property
    def uncached(self) -> TurnCaches:
        """Where nothing is remembered."""
        return TurnCaches(sessions_per_s=self.sessions_per_s, tpot_s=self.tpot_s)

    def met(self, at: Setup, prompt: float) -> TurnCaches:
        """Count the caches in tokens."""
        if self.cache is None:
            return self.uncached
        served = cached_layers(at), at.precision
        return self.cache.met(served, at.system, prompt, sessions_per_s=self.sessions_per_s, tpot_s=self.tpot_s)


class _Cache(Strict):
    """Prefix caches of instances."""

    gpus: Annotated[int, Range(1, 10**5)] = 1
    hbm: Annotated[float, Quantity("B", 0.0, TB)] = 0.0
    tiers: Axis[str] = ()
    caches: Annotated[int, Range(1, 10**5)] = 1
    sticky: bool = True
    writes: Annotated[str, OneOf(WRITES)] = WRITES[0]


def _made(keys: _Cache) -> GpuCaches:
    if HBM in keys.tiers:
        raise ValueError(f"tiers {', '.join(keys.tiers)}: hbm has a key of its own, hbm: 20 GB")
    said = {name: value for name, value in keys if name != "writes"}
    return GpuCaches(**said, back=keys.writes == WRITES[1])


class TurnKeys(Strict):
    """Sessions of a shipped traffic, and the caches that their turns meet."""

    sessions: Annotated[str, load.spec_name("traffic")]
    sessions_per_s: Annotated[float, Range(1e-6, 1e6, "sessions/s")]
    tpot_s: Annotated[float, Range(0.0, 100.0, "s")] = 0.0
    ftl_s: Annotated[float, Range(1e-6, 1e6, "s")] | None = None
    cache: Axis[Annotated[GpuCaches | None, Written(_Cache, _made), Unless("none", None)]] = (None,)


#: ``{dram: {bandwidth: 50 GB/s, latency_s: 2.0e-5, capacity: 250 GB}}``, in place of those of a system's file.
TierKeys: Any = Annotated[
    tuple[tuple[str, KvTier], ...],
    Written(
        Named[PlainName, Annotated[KvTier, Written(schema_of(KvTier), lambda keys: KvTier(**dict(keys)))]],
        lambda tiers: tuple(tiers.items()),
    ),
]
