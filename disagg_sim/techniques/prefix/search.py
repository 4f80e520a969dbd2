"""Prefix caches of instances: what they hold, and what prompts add to those that all instances share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.cache_tiers import loaded_bytes, room_tokens
from disagg_sim.physics.setup import Setup
from disagg_sim.workload.lengths import Lengths
from disagg_sim.workload.turns import TurnCaches


def stored_bytes(at: Setup, lengths: Lengths) -> float:
    """Size what a prompt adds to tiers that all instances share: new blocks leave prefill by the port of hand-overs.

    Every new block is written there once: at once where tiers are written through, later where they get what the tier
    above forgets. Loads from there come in by the other direction of the port. The result is on average, each element
    once; 0 where no past lies in a shared tier [B].

    A tenth of 8,192 tokens is new, each of 65,536 B:

    >>> import disagg_sim as ds
    >>> from disagg_sim.facts.traffic import ConstantShare, Reuse
    >>> at, share = ds.setup("llama_3_1_8b", "h200_sxm", "fp8"), ConstantShare(share=0.9)
    >>> kept = [ds.lengths(8192, 256, cached=Reuse(share=share, tiers=((name, 1.0),))) for name in ("remote", "dram")]
    >>> [stored_bytes(at, each) / 65_536 for each in kept]
    [832.0, 0.0]
    """
    tiers = () if lengths.cached is None else lengths.cached.reuse.below
    if not any(tier is not None and tier.shared for tier in (at.system.tier(name) for name in tiers)):
        return 0.0
    return sum(weight * loaded_bytes(at, isl, past) for isl, past, weight, _ in lengths.prompt_nodes().each())


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCaches:
    """Prefix caches of instances, by what each GPU brings."""

    gpus: int = 1  # of each cache [1]
    hbm: float = 0.0  # of each GPU, set aside for prompts between requests [B]
    tiers: tuple[str, ...] = ()  # below it, of ``kv_tiers`` of the system, the fastest first
    caches: int = 1  # [1]
    sticky: bool = True
    back: bool = False

    def met(
        self,
        served: tuple[ModelSpec, Precision],
        system: SystemSpec,
        prompt: float,
        *,
        sessions_per_s: float,
        tpot_s: float = 0.0,
    ) -> TurnCaches:
        """Count the caches in tokens, of ``sessions_per_s`` [1/s]."""
        tiers = {name: tier for name in self.tiers if (tier := system.tier(name)) is not None}
        pooled = tuple(name for name, tier in tiers.items() if tier.shared)

        def room(name: str, capacity: float | None) -> float:
            gpus = self.gpus * (self.caches if name in pooled else 1)
            return math.inf if capacity is None else float(round(room_tokens(*served, gpus * capacity, prompt)))

        rooms = [(HBM, room(HBM, self.hbm))] if self.hbm else []
        return TurnCaches(
            sessions_per_s=sessions_per_s,
            rooms=(*rooms, *((name, room(name, tier.capacity)) for name, tier in tiers.items())),
            caches=self.caches,
            sticky=self.sticky,
            pooled=pooled,
            back=self.back,
            tpot_s=tpot_s,
        )
