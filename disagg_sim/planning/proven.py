"""Prove a plan in both modes: the answer is the better one as simulated, not as planned."""

from __future__ import annotations

import math
from dataclasses import replace

from disagg_sim.domain import ServingMode
from disagg_sim.errors import InfeasibleError
from disagg_sim.planning.answer import RUNNERS_UP, Plan
from disagg_sim.planning.design import Design
from disagg_sim.planning.prove import Proof, prove
from disagg_sim.planning.ranking import first_mode
from disagg_sim.planning.sizing import designs_at

#: Designs of a mode that are proven. [1]
MOST_PROVEN = 6


def proven(plan: Plan, *, seed: int = 0) -> tuple[Plan, Proof]:
    """Put proven designs in the place of the planned ones: of both modes, so that the better one is.

    Of each mode designs are proven, the cheapest as planned first, until none of the others would be cheaper, or
    ``MOST_PROVEN`` are: the one that planned best may need more than another. Returns the plan with its proven designs,
    and the proof of its best.

    >>> import disagg_sim as ds
    >>> found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), ttft="1 s", tpot="20 ms", rate=40)
    >>> plan, proof = proven(found)
    >>> plan.best == proof.design, proof.proven
    (True, True)
    """
    if plan.best is None:
        prove(plan)  # says why not
    tried = {mode: _tried(plan, mode, seed) for mode in ServingMode}
    every = [pair for pairs in tried.values() for pair in pairs]
    if not every:
        prove(plan, seed=seed)  # says why not
    heads = {mode: min((each for _, each in pairs), key=_standing) for mode, pairs in tried.items() if pairs}
    held = {mode: each for mode, each in heads.items() if each.proven}
    alike = len({each.design.pools[-1].setup.system.name for each in held.values()}) == 1
    first = first_mode({mode: _value(each.design) for mode, each in held.items()}, simpler=alike) if held else None
    best = min(heads.values(), key=_standing) if first is None else held[first]
    other = next((each.design for each in held.values() if each is not best), None)
    gain = math.inf if other is None else _value(other) / _value(best.design)
    rest = [each.design for _, each in every if each.proven and each is not best and each.design is not other]
    later = [each for each in plan.runners_up if all(each is not planned for planned, _ in every)]
    rest += [each for each in later if _value(each) >= _value(best.design)]  # no simulation of a cheaper one holds
    runners = sorted([*([] if other is None else [other]), *sorted(rest, key=_value)[: RUNNERS_UP - 1]], key=_value)
    cheapest = min((each.design for _, each in every if each.proven), key=_value, default=best.design)
    told = replace(plan, best=best.design, other=other, gain=gain, runners_up=tuple(runners), cheapest=cheapest)
    return told, best


def _tried(plan: Plan, mode: ServingMode, seed: int) -> list[tuple[Design, Proof]]:
    """Designs of a mode with their proofs, until none of the others could be cheaper."""
    designs = [each for each in (plan.best, plan.other, *plan.runners_up) if each is not None]
    if plan.size.rate is not None:
        designs += [each for case in plan.cases for each in designs_at(case, plan.size.rate)]
    found: list[tuple[Design, Proof]] = []
    least = math.inf
    for design in sorted((each for each in dict.fromkeys(designs) if each.mode == mode), key=_value):
        if len(found) == MOST_PROVEN or _value(design) >= least:
            break
        try:
            proof = prove(plan, design, seed=seed)
        except InfeasibleError:  # the simulator sees no request that could keep its limits
            continue
        found.append((design, proof))
        least = min(least, _value(proof.design)) if proof.proven else least
    return found


def _value(design: Design) -> float:
    """Cost of the work, in the unit of the objective times seconds a request."""
    return design.cost / design.rate


def _standing(proof: Proof) -> tuple[bool, float]:
    """The smaller comes first."""
    return not proof.proven, _value(proof.design)
