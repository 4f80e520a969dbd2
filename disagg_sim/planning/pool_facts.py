r"""Say what further pools draw at the rate of their plan, and what a million tokens cost.

Prefill pools and whole decode instances draw what those of ``planning.energy`` do, and the halves of a decode instance
in its place what theirs do (``certainty.pool_parts``), at least one sequence being there in :math:`1 - e^{-m}` of the
time. Encoders work for a request as long as it takes them. Prompts pay for encode and prefill pools, output tokens for
the others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from disagg_sim.certainty.pool_parts import encode_spent, split_spent
from disagg_sim.certainty.token_prices import TokenPrices, check_utilisation
from disagg_sim.physics.encoder import EncodeStep
from disagg_sim.physics.passes.attention_ffn import Split
from disagg_sim.physics.power import power_at
from disagg_sim.planning.energy import Drawn, added_up, prefill_design, prices_of_one, watts_of_pools
from disagg_sim.planning.pools_plan import PlannedPools, PoolInstances
from disagg_sim.serving.costs import usd_per_gpu_hour
from disagg_sim.simulation.instance_variants import bare


class PoolFacts(NamedTuple):
    """What is told of the pools beside their plan, where it was asked for."""

    drawn: Drawn | None = None
    prices: TokenPrices | None = None  # of a million tokens [USD]


def drawn_of_pools(found: PlannedPools) -> Drawn:
    """Compute what the GPUs of all pools draw at the rate of the plan."""
    watts = zip(found.stages, _watts(found), strict=True)
    return added_up((stage.setup, stage.gpus, own) for stage, own in watts)


def _watts(found: PlannedPools) -> list[float]:
    """What the GPUs of each stage draw. [W]"""
    assert found.design is not None, "pools draw"
    lengths = found.design.work.lengths
    whole = {pool.role: pool for pool in found.design.pools}
    steps = [member for member, _ in found.plan.members if isinstance(member, EncodeStep)]
    halves = {stage.pool: stage for stage in found.stages if stage.pool in ("attention", "ffn")}
    own = _split_watts(found, halves["attention"], halves["ffn"]) if halves else {}
    for stage in found.stages:
        if stage.pool == "encode":
            step = steps[0]
            spent, idle = encode_spent(step), power_at(stage.setup).idle
            work = found.plan.request_rate * (1.0 - step.cached) * (float(spent.joules) - idle * float(spent.seconds))
            own[stage.pool] = stage.gpus * idle + work
        elif stage.pool not in halves:
            own[stage.pool] = float(watts_of_pools([whole[stage.pool]], lengths)[0])
    return [own[stage.pool] for stage in found.stages]


def _split_watts(found: PlannedPools, attention: PoolInstances, ffn: PoolInstances) -> dict[str, float]:
    assert found.design is not None
    assert attention.mapping is not None
    assert ffn.mapping is not None
    decode, lengths = found.design.pools[-1], found.design.work.lengths
    mapping = bare(attention.mapping)
    held = max(1.0, decode.sequences)
    each = held / (int(mapping.dp_attn) * attention.microbatches)
    split = Split(mapping, bare(ffn.mapping), attention.microbatches)
    busy = -math.expm1(-decode.sequences)
    spent = split_spent(attention.setup, ffn.setup, split, lengths, each)
    sides = zip((attention, ffn), spent, strict=True)
    return {stage.pool: _mean(stage, float(one.joules / one.seconds), busy) for stage, one in sides}


def _mean(stage: PoolInstances, watts: float, busy: float) -> float:
    idle = power_at(stage.setup).idle
    return stage.gpus * (idle + busy * (watts - idle))


def prices_of_pools(found: PlannedPools, utilisation: float) -> TokenPrices:
    """Compute what a million tokens cost at the rate of the plan.

    Returns numbers [USD].
    """
    check_utilisation(utilisation)
    assert found.design is not None, "prices are of pools"
    hour = {"prompts": 0.0, "answers": 0.0}
    for stage in found.stages:
        side = "prompts" if stage.pool in ("encode", "prefill") else "answers"
        hour[side] += stage.gpus * usd_per_gpu_hour(stage.setup.system, found.options.prices)
    fill = prefill_design(found.design.pools[0], found.design.work.lengths)
    return prices_of_one(fill, (hour["prompts"], hour["answers"]), found.design.rate, utilisation)
