"""Write what was found of a deployment that is given by hand: its screen and its JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator

from disagg_sim.planning.answer import Plan
from disagg_sim.planning.evaluate import Evaluation
from disagg_sim.planning.limits import Demand
from disagg_sim.report.plan import ScreenPart, assurance_json, design_json
from disagg_sim.report.plan_facts import checked_rows, fact_rows
from disagg_sim.report.plan_rows import (
    LATENCY_HEADER,
    MODE_TEXT,
    POOL_HEADER,
    binds_text,
    instances_text,
    latency_rows,
    percent,
    pool_rows,
    question_line,
    role_text,
)
from disagg_sim.report.schemas import EVALUATE, EvaluateJson, plain
from disagg_sim.report.words import seconds_text


def evaluate_screen(found: Evaluation, planned: Plan | None) -> list[ScreenPart]:
    """Write it for people: the verdict, with the plan for the same load; pools, latencies, what binds."""
    given, design, sure = found.given, found.design, found.sure
    latencies = latency_rows(design.work, (found.ttft, found.tpot), sure)
    blocks = [
        ScreenPart.of(question_line(given), *verdict(found, planned)),
        ScreenPart(tuple(pool_rows(design)), POOL_HEADER, (6,)),
        ScreenPart(tuple(latencies), LATENCY_HEADER, (1, 2, 3)),
    ]
    if not found.overloaded:
        blocks.append(ScreenPart(tuple(fact_rows(given.options, design, sure))))
    blocks.append(ScreenPart(tuple(_why(found)), ("why", "")))
    if sure is not None:
        blocks.append(ScreenPart(tuple(checked_rows(sure)), ("checked", "layout", "time rests on")))
    return blocks


def verdict(found: Evaluation, planned: Plan | None) -> Iterator[str]:
    """Write whether the limits hold, what the GPUs could serve within them, and what the planner would take."""
    design, work = found.design, found.design.work
    gpus, most = f"{design.gpus} GPU{' serves' if design.gpus == 1 else 's serve'}", found.capacity
    within = f"{most:.4g} requests/s within the limits" if most else "no rate at all within the limits"
    if found.overloaded:
        slow = " and ".join(role_text(pool.role) for pool in design.pools if pool.role in found.overloaded)
        yield f"OVERLOADED: more requests reach {slow} than it can take; {gpus} {within}"
    elif found.missed:
        yield f"MISSES: {', '.join(_missed(found, work))}; {gpus} {within}"
    else:
        yield f"HOLDS: {gpus} {design.rate:.4g} requests/s, and up to {within}"
    if found.sure is not None and not math.isnan(found.sure.holds):
        alone = f"TTFT {percent(found.sure.ttft_holds)}, TPOT {percent(found.sure.tpot_holds)}"
        yield f"both limits hold at this rate with a probability of {percent(found.sure.holds)} ({alone})"
    if planned is not None and (best := planned.best) is not None:
        needed = f"{best.gpus} GPU{'' if best.gpus == 1 else 's'}"
        yield f"the plan for this load: {needed}, {instances_text(best)} ({MODE_TEXT[best.mode]})"
    elif planned is not None:
        yield f"no plan keeps these limits: {planned.infeasible}"
    if found.uncaptured:
        yield (
            f"decode steps of more than {found.uncaptured} tokens of an attention rank are launched kernel by kernel: "
            "a server captures no larger CUDA graphs unless told (a pool's captured=, a flag of its launch)"
        )
    yield from found.notes


def _missed(found: Evaluation, work: Demand) -> Iterator[str]:
    for name, values, limit in (("ttft", found.ttft, work.ttft), ("tpot", found.tpot, work.tpot)):
        if name in found.missed:
            late = seconds_text(values[limit.percentile])
            yield f"{name.upper()} {limit.percentile} {late}, limit {seconds_text(limit.seconds)}"
    if "seats" in found.missed:
        yield f"all sequence slots of decode are in use {found.full:.0%} of the time"


def _why(found: Evaluation) -> Iterator[tuple[str, str]]:
    """What binds each pool, and what memory would allow."""
    for pool in found.design.pools:
        room = getattr(pool.choice, "memory_seats", 0)
        more = f"; memory has room for {room:,} sequences" if room > pool.batch else ""
        yield role_text(pool.role), binds_text(pool) + more


def evaluate_json(found: Evaluation, planned: Plan | None) -> EvaluateJson:
    """Write it for programs, in SI units."""
    best = None if planned is None else planned.best
    made: EvaluateJson = {
        "schema": EVALUATE,
        "holds": not found.missed,
        "missed": list(found.missed),
        "overloaded": list(found.overloaded),
        "capacity_per_s": found.capacity,
        "full_share": found.full,
        "design": {**design_json(found.given, found.design), "ttft_s": plain(found.ttft), "tpot_s": plain(found.tpot)},
        "assurance": None if found.sure is None else assurance_json(found.sure),
        "planned": None if best is None or planned is None else design_json(planned, best),
        "said": list(verdict(found, planned)),
    }
    return made
