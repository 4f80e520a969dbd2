"""Play a plan of more pools: simulate its pools at its rate, the encode pool and split instances among them."""

from __future__ import annotations

from dataclasses import replace

from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.physics.encoder import EncodeStep
from disagg_sim.planning.pools_plan import PlannedPools
from disagg_sim.planning.prove import ProofRun, deployed, judged
from disagg_sim.planning.replayed import drawn_requests, policy_of, run_options, slo_of
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.encoders import Encoders
from disagg_sim.simulation.simulate import simulate


def deployed_pools(found: PlannedPools, name: str = "planned") -> ServedDeployment:
    """Describe a plan of more pools as simulations take it."""
    if found.design is None:
        raise InputError(f"there are no pools to simulate: {found.plan.message}")
    pools = [(each, count) for each, count in found.plan.members if isinstance(each, EncodeStep)]
    encode = next((Encoders(step=step, instances=count) for step, count in pools), None)
    return replace(deployed(found.design, name), encode=encode)


def play_pools(found: PlannedPools, source: TrafficCase | tuple[int, int], *, seed: int = 0) -> ProofRun:
    """Simulate the pools of a plan once, under Poisson arrivals at its rate.

    Takes ``source`` [token]. Returns percentiles of TTFT, encoding included, and of TPOT [s], and whether both limits
    hold.
    """
    parts, design = deployed_pools(found), found.design
    assert design is not None, "pools are deployed of a plan that has some"
    trace, begin = drawn_requests(design.work, source, design.rate, seed)
    options = run_options(design, found.options.max_nic)
    result = simulate(parts, trace, policy_of(design), slo=slo_of(design), seed=seed, options=options)
    return judged(design, result, begin)
