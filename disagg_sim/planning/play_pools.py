"""Play a plan of more pools: simulate its pools at its rate, the encode pool and split instances among them."""

from __future__ import annotations

from dataclasses import replace

from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.physics.encoder import EncodeStep
from disagg_sim.planning.more_pools import MorePools
from disagg_sim.planning.prove import Run, deployed, judged
from disagg_sim.planning.replayed import drawn_requests, policy_of, run_options, slo_of
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.encoders import Encoders
from disagg_sim.simulation.simulate import simulate


def deployed_pools(found: MorePools, name: str = "planned") -> ServedDeployment:
    """Describe a plan of more pools as simulations take it.

    Parameters
    ----------
    found : MorePools
        With pools.
    name : str
        What results call it.

    Returns
    -------
    ServedDeployment
        Prefill, decode instances whole or split, and the encode pool beside their GPUs.

    Raises
    ------
    InputError
        A plan without pools.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> from disagg_sim.planning.more_pools import PoolsQuestion, plan_more_pools
    >>> from disagg_sim.planning.question import Size
    >>> asked = PoolsQuestion(pools=("prefill", "attention", "ffn"), size=Size(gpus=16), tpot=0.1)
    >>> parts = deployed_pools(plan_more_pools("llama_3_1_70b", "h200_sxm", ds.lengths(4096, 512), asked))
    >>> parts.gpus <= 16, parts.decode[0].ffn is not None
    (True, True)
    """
    if found.design is None:
        raise InputError(f"there are no pools to simulate: {found.plan.message}")
    pools = [(each, count) for each, count in found.plan.members if isinstance(each, EncodeStep)]
    encode = next((Encoders(step=step, instances=count) for step, count in pools), None)
    return replace(deployed(found.design, name), encode=encode)


def play_pools(found: MorePools, source: TrafficCase | tuple[int, int], *, seed: int = 0) -> Run:
    """Simulate the pools of a plan once, under Poisson arrivals at its rate.

    Parameters
    ----------
    found : MorePools
        With pools.
    source : TrafficCase or tuple of int
        What lengths are drawn from, or constant prompt and output. [token]
    seed : int
        Of arrivals and lengths.

    Returns
    -------
    Run
        Percentiles of TTFT, encoding included, and of TPOT [s], and whether both limits hold.

    Raises
    ------
    InputError
        A plan without pools; prompts shorter than the tokens of their images.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> from disagg_sim.planning.more_pools import PoolsQuestion, plan_more_pools
    >>> from disagg_sim.planning.question import Size
    >>> asked = PoolsQuestion(pools=("prefill", "attention", "ffn"), size=Size(rate=4.0), tpot=0.1)
    >>> found = plan_more_pools("llama_3_1_70b", "h200_sxm", ds.lengths(1024, 64), asked)
    >>> play_pools(found, (1024, 64)).holds
    True
    """
    parts, design = deployed_pools(found), found.design
    assert design is not None, "pools are deployed of a plan that has some"
    trace, begin = drawn_requests(design.work, source, design.rate, seed)
    options = run_options(design, found.options.max_nic)
    result = simulate(parts, trace, policy_of(design), slo=slo_of(design), seed=seed, options=options)
    return judged(design, result, begin)
