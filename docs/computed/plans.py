"""What plans of joules say."""

from __future__ import annotations

import disagg_sim as ds
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
