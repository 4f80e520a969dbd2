"""Write a plan for people: the lines of its screen, and its JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from disagg_sim.domain import DEGREES, Mode
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.limits import Limit
from disagg_sim.planning.plan import Plan
from disagg_sim.report.words import degrees_text
from disagg_sim.serving.costs import usd_per_gpu_hour
from disagg_sim.units import GB, HOUR, MS

#: Version of the JSON: a key that goes or changes its meaning makes another; new keys do not.
SCHEMA = "disagg-sim/plan/1"
MODE_TEXT = {Mode.DISAGGREGATED: "disaggregated", Mode.COLOCATED: "co-located"}
#: What binds a pass or step, in words.
BOUND_TEXT = {
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "communication": "links between GPUs",
    "latency": "latencies of links and host",
}


def mapping_words(pool: PlannedPool) -> str:
    """Write the layout of a pool in short: ``TP8``, ``DP8 EP8``, ``TP2 PP2, chunks of 4096``."""
    mapping = pool.mapping
    chunk = f", chunks of {int(mapping.chunk_tokens)}" if mapping.chunk_tokens else ""
    degrees = (int(getattr(mapping, name)) for name in (*DEGREES, "redundant_slots"))
    return degrees_text(*degrees) + chunk


def seconds_text(seconds: float) -> str:
    """Write a latency: ``31.2 ms``, ``1.27 s``; ``-`` where it has no end."""
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds / MS:.3g} ms"


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the screen: lines, or a table."""

    rows: tuple[tuple[str, ...], ...]  # of one cell each, lines
    header: tuple[str, ...] = ()
    numeric: tuple[int, ...] = ()  # columns that are flush right


def screen(plan: Plan) -> list[Block]:
    """Write a plan for people.

    Parameters
    ----------
    plan
        With or without a design.

    Returns
    -------
    list of Block
        From the question to the runners-up.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), ttft="1 s", tpot="1 ms", rate=40)
    >>> print(screen(found)[1].rows[0][0])
    INFEASIBLE: llama_3_1_8b in fp8 on h100_sxm: no mapping decodes ...
    """
    blocks = [Block(((question_line(plan),),)), Block(((verdict(plan),),))]
    best = plan.best
    if best is not None:
        blocks += [
            Block(tuple(pool_rows(best)), POOL_HEADER, (5,)),
            Block(tuple(latency_rows(plan, best)), ("", *best.ttft, "limit"), (1, 2, 3)),
            Block(tuple(fact_rows(plan, best))),
        ]
        if plan.runners_up:
            blocks.append(Block(tuple(runner_rows(plan)), RUNNER_HEADER, (3, 4, 5, 6)))
    return blocks + [Block(tuple((f"left out: {line}",) for line in plan.left_out))] * bool(plan.left_out)


def question_line(plan: Plan) -> str:
    """Write what was asked, in one line: model, systems, lengths, limits, size."""
    case, work = plan.cases[0], plan.work
    systems = ", ".join(dict.fromkeys(each.at.system.title for each in plan.cases))
    if len(plan.cases) > 3:
        systems = f"{len(plan.cases)} systems"
    law = work.lengths
    means = f"{law.mean_isl:.0f} + {law.mean_osl:.0f} tokens{'' if law.constant else ' on average'}"
    size = plan.size
    many = f"{size.gpus} GPUs" if size.gpus else f"{size.users} users" if size.users else f"{size.rate:g} requests/s"
    limits = f"TTFT {_limit(work.ttft)}, TPOT {_limit(work.tpot)}"
    return f"{case.at.model.title} on {systems}: {means}, {limits}, {many}"


def verdict(plan: Plan) -> str:
    """Write the answer in one line: disaggregate or co-locate, and by how much; or what binds."""
    best = plan.best
    if best is None:
        return f"INFEASIBLE: {plan.infeasible}"
    what = "DISAGGREGATE" if best.mode == Mode.DISAGGREGATED else "CO-LOCATE"
    head = f"{what}: {best.gpus} GPUs serve {best.rate:.4g} requests/s"
    if plan.other is None:
        return f"{head}; no {MODE_TEXT[_other(best.mode)]} deployment keeps the limits"
    other = MODE_TEXT[plan.other.mode]
    if plan.size.gpus is not None:
        return f"{head}, {plan.gain:.2f} times the {plan.other.rate:.4g} of the best {other} deployment"
    if plan.options.objective in ("gpus", "throughput"):
        return f"{head}; {other} needs {plan.other.gpus}, {plan.gain:.2f} times as many"
    return f"{head}; {other} costs {plan.gain:.2f} times as much"


def _other(mode: Mode) -> Mode:
    return Mode.COLOCATED if mode == Mode.DISAGGREGATED else Mode.DISAGGREGATED


def _limit(limit: Limit) -> str:
    return f"{seconds_text(limit.seconds)} ({limit.percentile})"


def pool_rows(design: Design) -> Iterator[tuple[str, ...]]:
    """Write a row for each pool: role, instances, layout, GPUs, batch, load, memory, what binds its pass or step."""
    for pool in design.pools:
        system, choice = pool.setup.system, pool.choice
        prefill = pool.role == "prefill"
        batch = f"{pool.batch} prompt{'s' * (pool.batch > 1)}" if prefill else f"{pool.batch} seats"
        busy = "" if prefill else f" ({pool.sequences:.0f} taken)"
        budget = getattr(choice, "budget", 0)
        yield (
            pool.role if pool.role != "colocated" else "co-located",
            f"{pool.instances} x {mapping_words(pool)}",
            f"{pool.gpus} x {system.name}",
            pool.setup.precision.name,
            f"{batch}{busy}" + (f", {budget} tokens a step" if budget else ""),
            f"{pool.utilisation:.0%}",
            f"{choice.memory / GB:.0f} of {pool.setup.memory_limit / GB:.0f} GB",
            BOUND_TEXT[choice.bound],
        )


POOL_HEADER = ("pool", "instances", "GPUs", "precision", "batch", "load", "memory", "bound by")


def latency_rows(plan: Plan, design: Design) -> Iterator[tuple[str, ...]]:
    """Write TTFT and TPOT at p50, p90 and p99, with the limit."""
    for name, values, limit in (("TTFT", design.ttft, plan.work.ttft), ("TPOT", design.tpot, plan.work.tpot)):
        yield (name, *(seconds_text(value) for value in values.values()), _limit(limit))


def price_of(plan: Plan, design: Design) -> tuple[float, float]:
    """Price of a design and of a million of its output tokens. [USD/h], [USD]; NaN where a price is not known."""
    specs = {pool.setup.system.name: pool.setup.system for pool in design.pools}
    priced = {
        name: plan.options.prices.get(name) or (usd_per_gpu_hour(spec) if spec.usd_per_gpu_hour else math.nan)
        for name, spec in specs.items()
    }
    hour = sum(pool.gpus * priced[pool.setup.system.name] for pool in design.pools)
    return hour, hour / HOUR / design.tokens_per_s * 1e6


def joules_of(design: Design) -> float:
    """Output tokens for a joule at the TDP of the GPUs. [token/J]"""
    return design.tokens_per_s / sum(pool.gpus * pool.setup.system.tdp for pool in design.pools)


def fact_rows(plan: Plan, design: Design) -> Iterator[tuple[str, str]]:
    """Write throughput, requests in flight, KV bandwidth, price and energy."""
    yield "throughput", f"{design.tokens_per_s:,.0f} output tokens/s, {design.tokens_per_s / design.gpus:,.0f} a GPU"
    yield "in flight", f"{design.in_flight:,.0f} requests on average"
    if design.mode == Mode.DISAGGREGATED:
        yield "KV caches", f"{design.kv_rate / GB:.2g} GB/s in or out of a GPU"
    hour, million = price_of(plan, design)
    if math.isnan(hour):
        unknown = ", ".join(
            sorted({pool.setup.system.name for pool in design.pools if not pool.setup.system.usd_per_gpu_hour})
        )
        yield "price", f"no market price of {unknown} is known: --price {unknown.partition(',')[0]}=USD_PER_HOUR"
    else:
        yield "price", f"{hour:,.2f} USD/h, {million:.3g} USD for a million output tokens"
    yield "energy", f"{joules_of(design):.3g} output tokens/J at the TDP of the GPUs"


def runner_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Write a row for each design that comes after the best."""
    for design in plan.runners_up:
        yield (
            MODE_TEXT[design.mode],
            " + ".join(f"{pool.instances} x {mapping_words(pool)}" for pool in design.pools),
            " + ".join(dict.fromkeys(pool.setup.system.name for pool in design.pools)),
            f"{design.gpus}",
            f"{design.rate:.4g}/s",
            seconds_text(design.ttft[plan.work.ttft.percentile]),
            seconds_text(design.tpot[plan.work.tpot.percentile]),
        )


RUNNER_HEADER = ("runners-up", "instances", "systems", "GPUs", "rate", "TTFT", "TPOT")


def plan_json(plan: Plan) -> dict[str, Any]:
    """Make the versioned JSON of a plan: SI units, no text that a program would have to read.

    Parameters
    ----------
    plan
        With or without a design.

    Returns
    -------
    dict
        ``schema``, ``status``, ``question``, ``best``, ``runners_up`` ...

    Examples
    --------
    >>> import disagg_sim as ds
    >>> found = plan_json(ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), rate=40))
    >>> found["schema"], found["status"], found["best"]["pools"][0]["system"]
    ('disagg-sim/plan/1', 'feasible', 'h100_sxm')
    """
    work, size = plan.work, plan.size
    return {
        "schema": SCHEMA,
        "status": "infeasible" if plan.best is None else "feasible",
        "binds": plan.infeasible,
        "question": {
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
        },
        "gain": _finite(plan.gain),
        "best": None if plan.best is None else design_json(plan, plan.best),
        "runners_up": [design_json(plan, design) for design in plan.runners_up],
        "left_out": list(plan.left_out),
    }


def design_json(plan: Plan, design: Design) -> dict[str, Any]:
    """Make the JSON of one design."""
    hour, million = price_of(plan, design)
    return {
        "mode": str(design.mode),
        "gpus": design.gpus,
        "rate_per_s": design.rate,
        "output_tokens_per_s": design.tokens_per_s,
        "ttft_s": design.ttft,
        "tpot_s": design.tpot,
        "kv_bytes_per_s_per_gpu": design.kv_rate,
        "usd_per_hour": _finite(hour),
        "usd_per_million_output_tokens": _finite(million),
        "output_tokens_per_joule": joules_of(design),
        "pools": [
            {
                "role": pool.role,
                "instances": pool.instances,
                "gpus": pool.gpus,
                "system": pool.setup.system.name,
                "precision": pool.setup.precision.name,
                "engine": pool.setup.engine,
                **{name: int(getattr(pool.mapping, name)) for name in (*DEGREES, "redundant_slots", "chunk_tokens")},
                "batch": pool.batch,
                "token_budget": getattr(pool.choice, "budget", None),
                "load": pool.utilisation,
                "memory_bytes": pool.choice.memory,
                "bound": pool.choice.bound,
            }
            for pool in design.pools
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
