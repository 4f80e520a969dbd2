"""Say what binds where no deployment keeps the limits, and the nearest limits that one keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from disagg_sim.planning.choices import host_of
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.pools import gpus_of
from disagg_sim.planning.question import Size
from disagg_sim.planning.sizing import Candidates, designs_at
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.candidates import least
from disagg_sim.units import GB

#: Factors by which a limit is loosened in turn, until something keeps it. [1]
LOOSER = (1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)

Rebuild = Callable[[Candidates, Demand], Candidates]


def why_infeasible(case: Candidates, size: Size, rebuild: Rebuild) -> str:
    """Name the limit that nothing keeps, and values that something does."""
    where = f"{case.at.model.name} in {case.at.precision.name} on {case.at.system.name}"
    if said := _of_memory(case.grids.decode) or _of_memory(case.grids.prefill):
        return f"{where}: {said}"
    work, told = case.work, []
    fastest = least(case.grids.decode.latency, case.grids.decode.feasible)
    if fastest > work.tpot.seconds:
        told.append(f"no mapping decodes in the TPOT limit of {_ms(work.tpot)}; the best step is {_ms(fastest)}")
    first = host_of(case.prefill_at) + least(case.grids.prefill.latency, case.grids.prefill.feasible)
    if first > work.ttft.seconds:
        told.append(
            f"no mapping prefills a prompt in the TTFT limit of {_ms(work.ttft)}; the best pass with the host's share "
            f"is {_ms(first)}"
        )
    if told:
        return f"{where}: {'; '.join(told)}"
    if size.gpus is not None:
        pools = [case.colocated, *case.across]
        smallest = min(
            min((gpus_of(each) for each in case.colocated), default=math.inf),
            sum(min((gpus_of(each) for each in choices), default=math.inf) for choices in case.across),
        )
        if any(map(len, pools)) and smallest > size.gpus:
            return f"{where}: {size.gpus} GPUs are too few; the smallest deployment has {smallest:g}"
    nearest = _nearest(case, size, rebuild)
    return f"{where}: no number of instances keeps both limits with queueing{nearest}"


def _of_memory(grid: PhaseGrid) -> str:
    if not len(grid.mappings):
        return f"no {grid.phase} layout that an engine can start"
    if grid.feasible.any():
        return ""
    lacking = least(grid.memory_bytes - grid.memory_limit, np.ones_like(grid.feasible))
    return f"no {grid.phase} mapping fits in memory; the closest lacks {lacking / GB:.1f} GB a GPU"


def _nearest(case: Candidates, size: Size, rebuild: Rebuild) -> str:
    """Limits, one loosened at a time, that a deployment keeps; in words."""
    found = []
    rate = size.rate or 1e-3
    for name in ("ttft", "tpot"):
        limit: Limit = getattr(case.work, name)
        for factor in LOOSER:
            looser = replace(limit, seconds=limit.seconds * factor)
            work = replace(case.work, ttft=looser) if name == "ttft" else replace(case.work, tpot=looser)
            other = rebuild(case, work)
            if designs_at(other, rate):
                found.append(f"a {name.upper()} limit of {_ms(looser)}")
                break
    return f"; {' or '.join(found)} would do" if found else ""


def _ms(limit: Limit | float) -> str:
    seconds = limit if isinstance(limit, float) else limit.seconds
    text = f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"
    return text if isinstance(limit, float) else f"{text} ({limit.percentile})"
