"""Write a plan for people and programs: its screen, its JSON, its files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from disagg_sim.atomic import require_own, write_csv, write_text
from disagg_sim.certainty.token_prices import TokenPrices
from disagg_sim.certainty.trust import COLUMN as TRUST
from disagg_sim.certainty.trust import Trust, shares_text
from disagg_sim.domain import MAPPING_FIELDS
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.assurance import NO_TEXT, Assurance
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.energy import Drawn, drawn
from disagg_sim.planning.flips import AnswerFlip, Changes
from disagg_sim.planning.pool_evidence import evidence_of
from disagg_sim.report.plan_facts import checked_rows, fact_rows, joules_of, price_of_pools, price_rows, watts_rows
from disagg_sim.report.plan_rows import (
    LATENCY_HEADER,
    POOL_HEADER,
    RUNNER_HEADER,
    change_lines,
    latency_rows,
    pool_rows,
    question_line,
    role_text,
    runner_rows,
    verdict,
    why_rows,
)
from disagg_sim.report.schemas import (
    PLAN,
    AssuranceJson,
    DesignJson,
    DrawnJson,
    FlipJson,
    PlanJson,
    PoolJson,
    ProofJson,
    QuestionJson,
    RunJson,
    labels,
    plain,
)
from disagg_sim.report.words import seconds_text
from disagg_sim.techniques.prefix.plan import tier_uses
from disagg_sim.units import HOUR, MILLION

if TYPE_CHECKING:
    from disagg_sim.planning.prove import Proof, ProofRun


@dataclass(frozen=True, slots=True)
class ScreenPart:
    """A part of the screen: lines, or a table."""

    rows: tuple[tuple[str, ...], ...]  # of one cell each, lines
    header: tuple[str, ...] = ()
    numeric: tuple[int, ...] = ()  # columns that are flush right

    @classmethod
    def of(cls, *lines: str) -> ScreenPart:
        """Lines."""
        return cls(tuple((line,) for line in lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExtras:
    """What is told of a plan beside itself; None of what was not asked for."""

    sure: Assurance | None = None
    changes: Changes | None = None
    proof: Proof | None = None
    drawn: Drawn | None = None
    prices: TokenPrices | None = None


NOTHING = PlanExtras()


def screen(plan: Plan, told: PlanExtras = NOTHING) -> list[ScreenPart]:
    """Write a plan for people."""
    blocks = [ScreenPart.of(question_line(plan)), ScreenPart.of(*verdict(plan, told.sure))]
    best = plan.best
    if best is not None:
        latencies = latency_rows(plan.work, (best.ttft, best.tpot), told.sure, simulated=best.simulated is not None)
        watts = watts_rows(told.drawn, best.gpus, best.rate, best.tokens_per_s)
        blocks += [
            ScreenPart(tuple(pool_rows(best)), POOL_HEADER, (6,)),
            ScreenPart(tuple(latencies), LATENCY_HEADER, (1, 2, 3)),
            ScreenPart((*fact_rows(plan.options, best, told.sure), *price_rows(told.prices), *watts)),
        ]
        if told.proof is not None:
            blocks.append(ScreenPart.of(*proof_lines(plan, told.proof)))
        blocks.append(ScreenPart(tuple(why_rows(plan, best)), ("why", "")))
        if told.sure is not None:
            blocks.append(ScreenPart(tuple(checked_rows(told.sure)), ("checked", "layout", "time rests on")))
        if plan.runners_up:
            blocks.append(ScreenPart(tuple(runner_rows(plan)), RUNNER_HEADER, (3, 4, 5, 6)))
    return blocks + [ScreenPart.of(*(f"left out: {line}" for line in plan.left_out))] * bool(plan.left_out)


def changes(plan: Plan, told: PlanExtras) -> ScreenPart:
    """Write what would change the answer, the last part of the screen."""
    lines = [] if told.changes is None else change_lines(plan, told.changes)
    return ScreenPart.of("what would change the answer", *lines)


def write_plan(plan: Plan, told: PlanExtras, text: str, out: Path) -> None:
    """Write ``plan.txt``, ``plan.json``, ``designs.csv`` where nothing else is, and what follows may be written."""
    names = ("plan.json", "plan.txt", "designs.csv", "start")
    require_own(out, names, '"schema": "disagg-sim/', by="plan.json")
    write_text(out / "plan.json", json.dumps(plan_json(plan, told), indent=2) + "\n")
    write_text(out / "plan.txt", text)
    designs = [plan.best, *plan.runners_up] if plan.best is not None else []
    rows = [row for place, design in enumerate(designs) for row in _design_rows(plan, design, place)]
    write_csv(out / "designs.csv", pd.DataFrame(rows))


def _design_rows(plan: Plan, design: Design, place: int) -> list[dict[str, Any]]:
    """A row a pool."""
    whole: dict[str, Any] = {**design_json(plan, design)}
    spares = whole.pop("spares", None)
    del whole["pools"]
    flat = {
        f"{name.removesuffix('_s')}_{each}_s": value
        for name in ("ttft_s", "tpot_s")
        for each, value in whole.pop(name).items()
    }
    shared = {f"design_{name}" if name == "gpus" else name: value for name, value in whole.items()}
    rows = []
    for pool in design.pools:
        last = {} if spares is None else {"spares": pool.spares}
        said = shares_text(evidence_of(plan, pool).rests_on)
        rows += [{"place": place, **shared, **flat, **each, TRUST: said, **last} for each in _pool_json(pool)]
    return rows


def plan_json(plan: Plan, told: PlanExtras = NOTHING) -> PlanJson:
    """Make the versioned JSON of a plan: SI units, no text that a program would have to read."""
    work, size, aside = plan.work, plan.size, None if told.changes is None else told.changes.aside
    question: QuestionJson = {
        "model": plan.cases[0].at.model.name,
        "systems": list(dict.fromkeys(case.at.system.name for case in plan.cases)),
        "mean_isl": work.lengths.mean_isl,
        "mean_osl": work.lengths.mean_osl,
        "ttft": {"seconds": work.ttft.seconds, "share": work.ttft.share},
        "tpot": {"seconds": work.tpot.seconds, "share": work.tpot.share},
        "rate_per_s": size.rate,
        "gpus": size.gpus,
        "users": size.users,
        "objective": plan.options.objective,
    }
    if work.lengths.cached is not None:
        question["mean_cached"] = work.lengths.cached.mean_past
    if plan.options.speculation is not None:
        question["speculation"] = plan.options.speculation.name
    if (further := plan.cases[0].further) is not None:
        question["pools"] = list(further.names)
    if plan.options.images is not None:
        question["images"] = asdict(plan.options.images)
    whole: PlanJson = {
        "schema": PLAN,
        "status": "infeasible" if plan.best is None else "feasible",
        "binds": plan.infeasible,
        "labels": labels(),
        "question": question,
        "gain": plain(plan.gain),
        "best": None if plan.best is None else design_json(plan, plan.best),
        "runners_up": [design_json(plan, design) for design in plan.runners_up],
        "assurance": None if told.sure is None else assurance_json(told.sure),
        "flips": None if told.changes is None else [_flip_json(plan, flip) for flip in told.changes.flips],
        "limit_costs": None if told.changes is None else [plain(asdict(each)) for each in told.changes.limits],
        "set_aside": None if aside is None else design_json(plan, aside),
        "simulated": None if told.proof is None else _proof_json(told.proof),
        "left_out": list(plan.left_out),
        "said": _sentences(plan, told),
    }
    if plan.best is not None and (uses := tier_uses(plan.best)):
        whole["tiers"] = [plain({**asdict(each), "loads": each.loads}) for each in uses]
    if plan.best is not None and plan.fewest is not None:
        own, small = (drawn(each).watts / each.tokens_per_s for each in (plan.best, plan.fewest))
        whole["joules_per_output_token"] = own
        whole["fewest_gpus"] = {"joules_per_output_token": small, "design": design_json(plan, plan.fewest)}
    if plan.best is not None and told.drawn is not None:
        whole["drawn"] = drawn_json(told.drawn, plan.best.rate, plan.best.tokens_per_s)
    if told.prices is not None:
        new, cached, output = (plain(float(each)) for each in told.prices)
        whole["usd_per_million_tokens"] = {"input": new, "cached": cached, "output": output}
    return whole


def drawn_json(found: Drawn, rate: float, tokens: float) -> DrawnJson:
    """Make the JSON of what is drawn at a rate of requests, and of output tokens. [1/s]"""
    return {
        "watts": found.watts,
        "watts_p10": found.band[0],
        "watts_p90": found.band[1],
        "facility_watts": plain(found.facility),
        "joules_per_request": found.watts / rate,
        "output_tokens_per_drawn_joule": tokens / found.watts,
        "rests_on": str(Trust.INHERITED if found.inherited else Trust.FITTED),
    }


def _flip_json(plan: Plan, flip: AnswerFlip) -> FlipJson:
    """Make the JSON of another answer, with the kind of its decode instances where several compete."""
    made: FlipJson = plain(asdict(flip))
    if not plan.halves_compete:
        del made["split"]
    return made


def assurance_json(sure: Assurance) -> AssuranceJson:
    """Make the JSON of how sure a plan is, with bands of encoding and of the text's experts where there are some."""
    causes = [each._asdict() for each in sure.ttft_causes]
    made: AssuranceJson = plain(asdict(sure) | {"ttft_causes": causes})
    if math.isnan(sure.encoding[0]):
        del made["encoding"]
    if sure.text == NO_TEXT:
        del made["text"]
    return made


def _sentences(plan: Plan, told: PlanExtras) -> dict[str, Any]:
    """Sentences of the screen that no number of the JSON says, for people who read a page of it."""
    why = [] if plan.best is None else [list(row) for row in why_rows(plan, plan.best)]
    return {
        "question": question_line(plan),
        "verdict": verdict(plan, told.sure),
        "why": why,
        "changes": None if told.changes is None else change_lines(plan, told.changes),
    }


def design_json(plan: Plan, design: Design) -> DesignJson:
    """Make the JSON of one design."""
    hour = price_of_pools(design.pools, plan.options.prices)
    made: DesignJson = {
        "mode": str(design.mode),
        "gpus": design.gpus,
        "rate_per_s": design.rate,
        "output_tokens_per_s": design.tokens_per_s,
        "ttft_s": plain(design.ttft),
        "tpot_s": plain(design.tpot),
        "kv_bytes_per_s_per_gpu": design.kv_rate,
        "usd_per_hour": plain(hour),
        "usd_per_million_output_tokens": plain(hour / HOUR / design.tokens_per_s * MILLION),
        "output_tokens_per_joule": joules_of(design.pools, design.tokens_per_s),
        "hosts": {name: {"count": count, "idle_gpus": idle} for name, (count, idle) in design.hosts.items()},
        "pools": [each for pool in design.pools for each in _pool_json(pool)],
    }
    if design.simulated is not None:
        made["simulated"] = True
    if design.spares is not None:
        made["spares"] = plain(asdict(design.spares))
    return made


def _pool_json(pool: PlannedPool) -> Iterator[PoolJson]:
    """Make the JSON of a pool, one each of attention and feed-forward ranks that are apart."""
    for part in pool.halves:
        made: PoolJson = plain(
            {
                "role": part.role,
                "instances": pool.instances,
                "gpus": part.gpus,
                "system": part.setup.system.name,
                "precision": part.setup.precision.name,
                "engine": part.setup.engine,
                **{name: int(getattr(part.mapping, name)) for name in MAPPING_FIELDS},
                "batch": pool.batch,
                "token_budget": getattr(pool.choice, "budget", None),
                "load": pool.utilisation,
                "memory_bytes": part.memory,
                "bound": pool.choice.bound,
            }
        )
        if (steps := pool.replicas.hold_steps) is not None:
            made["hold_steps"] = steps
        if not math.isnan(part.idle):
            made |= {"microbatches": part.microbatches, "idle": part.idle}
        yield made


def proof_lines(plan: Plan, proof: Proof) -> list[str]:
    """Write the result of the simulation."""
    run, work = proof.final, plan.work
    held = "holds" if run.holds else "MISSES"
    trace = plan.options.trace.name if plan.options.trace is not None else "Poisson arrivals"
    lines = [
        f"simulated on {trace}, {run.requests:,} requests: {held} the limits; TTFT {work.ttft.percentile} "
        f"{seconds_text(run.ttft[work.ttft.percentile])}, TPOT {work.tpot.percentile} "
        f"{seconds_text(run.tpot[work.tpot.percentile])}" + (f", {run.lost} requests lost" if run.lost else "")
    ]
    if run is not proof.planned:
        before, after = (" + ".join(map(str, each.counts)) for each in (proof.planned, run))
        found = "" if proof.planned.holds else ", which missed them"
        lines.append(
            f"adapted from {before} instances at {proof.planned.rate:.4g} requests/s{found} to {after} at "
            f"{run.rate:.4g}, in {proof.runs} simulations"
        )
    if (failing := proof.failing) is not None:
        one = failing.run
        counts = zip(failing.failed, proof.design.pools, strict=True)
        failed = " + ".join(f"{count} {role_text(pool.role)}" for count, pool in counts)
        lines.append(
            f"with {failed} instances failed at once, as many as there are spares: "
            f"{'holds' if one.holds else 'MISSES'} the limits; TTFT {work.ttft.percentile} "
            f"{seconds_text(one.ttft[work.ttft.percentile])}, TPOT {work.tpot.percentile} "
            f"{seconds_text(one.tpot[work.tpot.percentile])}, {failing.moved} requests began again"
            + (f", {one.lost} lost" if one.lost else "")
        )
    return lines


def _proof_json(proof: Proof) -> ProofJson:
    def run(each: ProofRun) -> RunJson:
        made: RunJson = plain({**asdict(each), "holds": each.holds})
        return made

    made: ProofJson = {"planned": run(proof.planned), "final": run(proof.final), "simulations": proof.runs}
    if (failing := proof.failing) is not None:
        made["failing"] = {"run": run(failing.run), "failed": list(failing.failed), "moved": failing.moved}
    return made
