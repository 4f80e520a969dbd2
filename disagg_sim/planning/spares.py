"""Add spare instances to designs, for a stated availability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from disagg_sim.certainty.designs import Designs
from disagg_sim.facts.failures import FailureSpec
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.serving.availability import Need, Spares, blast_of, check_target, spares_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """A stated availability, and how often parts fail: what a plan adds spares for."""

    target: float  # share of time in which every pool has the instances that the load needs [1]
    failing: FailureSpec

    def __post_init__(self) -> None:
        """``InputError`` for a target out of range."""
        check_target(self.target)

    def spared(self, design: Design, costs: Mapping[str, float]) -> Design:
        """The design with the cheapest spares for the target, and its cost with them."""
        needs = [self.need(design, pool, costs) for pool in design.pools]
        found = spares_for(needs, self.target)
        pools = tuple(replace(pool, spares=count) for pool, count in zip(design.pools, found.counts, strict=True))
        cost = design.cost + sum(need.cost * count for need, count in zip(needs, found.counts, strict=True))
        return replace(design, pools=pools, cost=cost, spares=found)

    def need(self, design: Design, pool: PlannedPool, costs: Mapping[str, float]) -> Need:
        """What a pool of the design needs; links count where caches go over NICs."""
        system, gpus = pool.setup.system, int(pool.mapping.gpus)
        across = len(design.pools) > 1 and design.gpus > system.nvlink_domain
        blast = blast_of(self.failing, system, gpus, links=across)
        return Need(instances=pool.instances, cost=gpus * costs[system.name], blast=blast)

    def of_designs(self, one: Designs) -> tuple[list[tuple[str, int]], Spares]:
        """Name and GPUs of an instance of each pool of a design of one row, and its fewest spare GPUs for the target.

        An instance of one phase hands caches over, over NICs where the other pool has no place in its NVLink domain.
        """
        pools = [] if one.shared or "prefill" not in one.phases else [("prefill", one.prefill_at, one.prefill_mapping)]
        pools += [] if one.mode == "prefill" else [("co-located" if one.shared else "decode", one.at, one.mapping)]
        counts = {"prefill": one.prefill_instances}
        total = float(one.total_gpus[0]) + (len(pools) == 1 and not one.shared)
        named, needs = [], []
        for name, at, mapping in pools:
            gpus = int(mapping.gpus[0])
            links = not one.shared and total > at.system.nvlink_domain
            blast = blast_of(self.failing, at.system, gpus, links=links)
            count = int(counts.get(name, one.instances)[0])
            named.append((name, gpus))
            needs.append(Need(instances=count, cost=gpus, blast=blast))
        return named, spares_for(needs, self.target)
