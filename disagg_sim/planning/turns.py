"""Plan for turns of sessions, whose hit rate follows from what the planned GPUs remember.

The more is found, the fewer GPUs are needed, and the less they remember: plans are made until the new tokens of a turn
and the tiers of its past stay. Sessions stick to an instance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from disagg_sim.planning.answer import Plan
from disagg_sim.techniques.prefix.search import GpuCaches
from disagg_sim.workload.lengths import Lengths
from disagg_sim.workload.trace import Trace
from disagg_sim.workload.turns import TurnCaches, mean_turns, trace_lengths, turn_lengths

#: Plans at most: each corrects the hit rate of the one before.
MOST_PLANS = 6
#: Changes below which a plan stands: of the new tokens of a turn, over them, and of the share of a tier. [1]
SETTLED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """A plan, and what the turns that it serves find."""

    plan: Plan
    caches: TurnCaches  # of its best design
    lengths: Lengths  # that it was made for


def plan_turns(traffic: str | Trace, memory: GpuCaches, planned: Callable[[Lengths], Plan]) -> TurnPlan:
    """Plan for the turns of a traffic's sessions, or a trace, with the caches that the plan itself has.

    Takes ``planned`` (makes the plan for some lengths, with ``memory.hbm`` set aside (``PlanOptions.set_aside``)).
    Returns the last plan where they do not settle, or one without a design.
    """
    caches = TurnCaches(sessions_per_s=1.0, rooms=(("hbm", math.inf),))
    law = _law(traffic, caches)
    for _ in range(MOST_PLANS):
        plan = planned(law)
        if plan.best is None:
            break
        pool, rate = plan.best.first, plan.best.rate
        own = replace(memory, gpus=int(pool.mapping.gpus), caches=pool.instances)
        served = pool.setup.cached_layers, pool.setup.precision
        sessions_per_s = rate / mean_turns(traffic) if isinstance(traffic, str) else rate
        caches = own.met(served, pool.setup.system, law.mean_isl, sessions_per_s=sessions_per_s)
        found = _law(traffic, caches)
        if _alike(found, law):
            break
        law = found
    return TurnPlan(plan=plan, caches=caches, lengths=law)


def _law(traffic: str | Trace, caches: TurnCaches) -> Lengths:
    return turn_lengths(traffic, caches) if isinstance(traffic, str) else trace_lengths(traffic, caches)


def _alike(found: Lengths, law: Lengths) -> bool:
    """Whether turns find as much, and in the same tiers."""
    first, second = (dict(each.cached.reuse.tiers) if each.cached is not None else {} for each in (found, law))
    apart = [abs(first.get(name, 0.0) - second.get(name, 0.0)) for name in {*first, *second}]
    return abs(found.mean_new / law.mean_new - 1.0) < SETTLED and max(apart, default=0.0) < SETTLED
