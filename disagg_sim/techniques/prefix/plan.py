"""Say what the tiers of a plan do: what prompts find there, how long it takes to load, what computing it takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg_sim.certainty.designs import Designs
from disagg_sim.domain import Sharding
from disagg_sim.physics.cache_tiers import load_time, tier_tokens
from disagg_sim.physics.passes.prompts import form_of_whole, prompt_pass
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.design import Design
from disagg_sim.workload.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """One tier of the instances that prefill; times are those of one prompt of mean length that comes alone."""

    name: str  # ``hbm``, or of ``kv_tiers`` of the system
    share: float  # of all prompt tokens, what is found there [1]
    holds: float  # room of an instance, of a shared tier in all; inf = as much as needed [token]
    load: float  # of a cached start; 0 in HBM [s]
    recomputed: float  # what computing that start again would add to the pass [s]

    @property
    def loads(self) -> bool:
        """Whether loading brings the first token sooner than computing."""
        return self.load <= self.recomputed


def tier_uses(design: Design) -> tuple[TierUse, ...]:
    """Find what each tier does for the prompts of a design, the fastest first; none where no tier is named."""
    pool = design.first
    return tiers_of_instance(pool.setup, pool.mapping, design.work.lengths, pool.instances)


def tiers_of_instance(at: Setup, mapping: Sharding, lengths: Lengths, instances: int = 1) -> tuple[TierUse, ...]:
    """Find what each tier does for the prompts of an instance.

    7,360 tokens of 65,536 B are loaded at 50 GB/s and 20 us in 9.7 ms:

    >>> import disagg_sim as ds
    >>> from disagg_sim.facts.traffic import ConstantShare, Reuse
    >>> reuse = Reuse(share=ConstantShare(share=0.9), tiers=(("dram", 1.0),))
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    >>> (dram,) = tiers_of_instance(at, ds.Sharding(), ds.lengths(8192, 256, cached=reuse))
    >>> f"{1e3 * dram.load:.1f} ms", dram.loads
    ('9.7 ms', True)
    """
    cached = lengths.cached
    if cached is None or not cached.reuse.tiers:
        return ()
    isl, past, chunk = lengths.mean_isl, cached.mean_past, int(mapping.chunk_tokens)
    form = "auto" if chunk else form_of_whole("auto", reused=True)
    first, again = (
        prompt_pass(at, mapping, batch=1, isl=isl, past=held, chunk_tokens=chunk, mla_form=form).ftl
        for held in (past, 0.0)
    )
    found = []
    for name, share in cached.reuse.tiers:
        tier = at.system.tier(name)
        room = at.set_aside or None if tier is None else tier.capacity
        together = instances if tier is not None and tier.shared else 1
        found.append(
            TierUse(
                name=name,
                share=share * past / isl,
                holds=tier_tokens(at, mapping, room, isl) * together,
                load=float(np.squeeze(load_time(at, mapping, batch=1, past=past, tier=tier))),
                recomputed=float(np.squeeze(again - first)),
            )
        )
    return tuple(sorted(found, key=lambda each: each.load))


def tiers_of_designs(one: Designs) -> tuple[TierUse, ...]:
    """Find ``tier_uses`` of a design of a table, or of an instance; none for one that only decodes."""
    if "prefill" not in one.phases:
        return ()
    count = one.instances if one.shared else one.prefill_instances
    return tiers_of_instance(one.prefill_at, one.prefill_mapping[0], one.lengths, int(count[0]))
