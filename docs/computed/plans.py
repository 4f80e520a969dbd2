"""What plans of joules and of moving experts say."""

from __future__ import annotations

from functools import lru_cache

import disagg_sim as ds
from disagg_sim.planning.aging import Moves, moves_of
from disagg_sim.planning.answer import Plan
from disagg_sim.report.plan_rows import mapping_words, moved_line
from docs.computed import quick


@quick
def joule_moved() -> str:
    """What moves against the design of fewest GPUs where joules are the objective."""
    options = ds.PlanOptions(objective="joule")
    plan = ds.plan("llama_3_1_70b", "h100_sxm", ds.lengths(4096, 512), rate=20, options=options)
    assert plan.best is not None
    assert plan.fewest is not None
    pools = " + ".join(f"{pool.instances} x {mapping_words(pool)}" for pool in plan.best.pools)
    return f"{pools}; {moved_line(plan.best, plan.fewest)}"


@lru_cache
def _drifting(seconds: float) -> tuple[Plan, Moves]:
    """A plan of DeepSeek-R1 on H200 whose experts do not stay popular, and how often its prefill pool moves copies."""
    options = ds.PlanOptions(
        expert_skew=1.0, max_redundant_experts=64, popularity_drift=seconds, engine="sglang", precision="fp8"
    )
    plan = ds.plan("deepseek_r1", "h200_sxm", ds.lengths(4096, 1024), rate=60, options=options)
    assert plan.best is not None
    return plan, next(each for each in moves_of(plan.best) if each.role == "prefill")


def _layout(plan: Plan) -> str:
    assert plan.best is not None
    return mapping_words(plan.best.pools[0])


@quick
def copies_moved() -> str:
    """Layout of prefill, period and losses within an hour."""
    plan, moves = _drifting(3600.0)
    often = f"a prefill pool of {_layout(plan)} moves them every {moves.passes} passes"
    return (
        f"{often} and loses {moves.loss:.1%} of its time, {moves.usual:.1%} at 1,000 passes, {moves.never:.0%} if never"
    )


@quick
def copies_aging() -> str:
    """Layout of prefill where popularity lasts 100 s."""
    plan, moves = _drifting(100.0)
    return f"it is {_layout(plan)} and loses {moves.loss:.1%}"
