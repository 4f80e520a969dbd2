"""Write plans of more pools than prefill and decode for people and programs: screen, JSON, files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from disagg_sim.atomic import write_csv
from disagg_sim.certainty.trust import Trust
from disagg_sim.domain import MAPPING_COLUMNS
from disagg_sim.planning.pools_plan import PlannedPools, PoolInstances
from disagg_sim.report.plan import (
    NOTHING,
    PlanExtras,
    ScreenPart,
    degrees_json,
    drawn_json,
    token_prices_json,
    write_answer,
)
from disagg_sim.report.plan_facts import fact_rows, price_of_pools, price_rows, watts_rows
from disagg_sim.report.plan_rows import law_words, seconds_text
from disagg_sim.report.schemas import POOLS, PoolsJson, PoolsRunJson, StageJson, plain
from disagg_sim.report.words import beside_text, size_text, text_of

if TYPE_CHECKING:
    from disagg_sim.planning.prove import ProofRun

HEADER = ("pool", "instances", "GPUs", "precision", "batch", "rate", "load", "a request takes", "binds")
#: Pools as people read them.
POOL_TEXT = {"ffn": "FFN"}
#: What a larger batch of an instance would break, in words.
HELD_TEXT = {
    "memory": "memory holds the batch",
    "attention_memory": "memory holds the batch",
    "ffn_memory": "memory holds the batch",
    "ftl": "the FTL limit holds the batch",
    "ttl": "the TTL limit holds the batch",
    "kv_link": "the KV link holds the rate",
}
#: Loads that differ by less set the rate together. [1]
SAME = 1e-6


def pools_screen(found: PlannedPools, extras: PlanExtras = NOTHING) -> list[ScreenPart]:
    """Write a plan of more pools for people."""
    plan = found.plan
    head = f"{plan.total_gpus} GPUs: " if plan.members else "INFEASIBLE: "
    blocks = [ScreenPart.of(_question(found)), ScreenPart.of(f"{head}{plan.message}")]
    if plan.members:
        rate = plan.request_rate
        watts = watts_rows(extras.drawn, plan.total_gpus, rate, rate * found.lengths.mean_osl)
        blocks += [
            ScreenPart(tuple(_rows(found)), HEADER, (5, 6, 7)),
            ScreenPart((*_facts(found), *price_rows(extras.prices), *watts)),
        ]
    told = [
        f"beside, on {names}: {f'{other.total_gpus} GPUs, ' if other.members else ''}{other.message}"
        for names, other in found.others
    ]
    told += [f"left out: {line}" for line in found.left_out]
    return [*blocks, ScreenPart.of(*told)] if told else blocks


def played_screen(found: PlannedPools, run: ProofRun) -> ScreenPart:
    """Write what a simulation of the pools says, for people."""
    asked = found.question
    said = ", ".join(
        f"{name} {limit.percentile} {seconds_text(values[limit.percentile])}"
        for name, limit, values in (("TTFT", asked.ttft, run.ttft), ("TPOT", asked.tpot, run.tpot))
    )
    lost = f", {run.lost:,} lost" if run.lost else ""
    holds = "both limits hold" if run.holds else "the limits do not hold: leave more room"
    return ScreenPart.of(f"simulated, {run.requests:,} requests at {run.rate:.4g}/s: {said}{lost}: {holds}")


def _question(found: PlannedPools) -> str:
    asked, law = found.question, found.lengths if found.design is None else found.design.work.lengths
    images = ""
    if asked.images is not None:
        kept = f", {asked.images.cached:.3g} of them kept" if asked.images.cached else ""
        count = asked.images.images
        images = f", {count} image{'s' * (count > 1)} of {asked.images.height} x {asked.images.width}{kept}"
    limits = ", ".join(
        f"{name} {each.percentile} {seconds_text(each.seconds)}"
        for name, each in (("TTFT", asked.ttft), ("TPOT", asked.tpot))
    )
    means = law_words(law, found.options.speculation, found.stages[0].setup if found.stages else None)
    return f"{found.model.title} over {', '.join(asked.pools)}: {means}{images}, {limits}, {size_text(asked.size)}"


def _rows(found: PlannedPools) -> Iterator[tuple[str, ...]]:
    """A row for each pool; what binds it names the busiest pool."""
    slowest = max(stage.load for stage in found.stages)
    for stage in found.stages:
        name = POOL_TEXT.get(stage.pool, stage.pool)
        micro = f" in {stage.microbatches} micro-batches" if stage.microbatches > 1 else ""
        yield (
            name,
            f"{stage.instances}{f' + {stage.spares}' * bool(stage.spares)} x {_layout(stage)}",
            f"{stage.gpus} x {stage.setup.system.name}",
            stage.setup.precision.name,
            f"{stage.batch} request{'s' * (stage.batch > 1)}{micro}",
            f"{stage.rate:.4g}/s",
            f"{stage.load:.0%}",
            seconds_text(stage.seconds) + (" a token" if stage.pool in ("decode", "attention", "ffn") else ""),
            "; ".join(_binds(stage, stage.load > slowest * (1 - SAME))),
        )


def _layout(stage: PoolInstances) -> str:
    """Degrees of the half of a layer that a pool runs: ``DP12``, ``EP6+2``, ``TP4 PP2``."""
    mapping = stage.mapping
    if mapping is None:
        return "1 GPU"
    if stage.pool == "attention" or (stage.pool == "ffn" and not stage.setup.model.is_moe):
        return text_of(replace(mapping, ep=1))
    if stage.pool == "ffn":
        return text_of(replace(mapping, dp_attn=1))
    return text_of(mapping) + beside_text(int(mapping.chunk_tokens), int(mapping.draft_tokens))


def _binds(stage: PoolInstances, slowest: bool) -> Iterator[str]:
    if slowest:
        yield "the busiest pool"
    if stage.held_by:
        yield HELD_TEXT[stage.held_by]
    if not math.isnan(stage.idle):
        yield f"waits {stage.idle:.0%} of a step"


def _facts(found: PlannedPools) -> Iterator[tuple[str, str, str]]:
    asked, design = found.question, found.design
    assert design is not None, "facts are of pools"
    first = "queues, hand-over of the cache and first step of decode included"
    first = f"encoding, {first}" if "encode" in asked.pools else first
    for name, limit, values, beside in (
        ("TTFT", asked.ttft, design.ttft, first),
        ("TPOT", asked.tpot, design.tpot, ""),
    ):
        others = ", ".join(
            f"{share} {seconds_text(value)}" for share, value in values.items() if share != limit.percentile
        )
        of = f"{limit.percentile} {seconds_text(values[limit.percentile])} of {seconds_text(limit.seconds)}"
        played = "as simulated" if design.simulated is not None else beside
        yield name, f"{of}; {others}", played
    if found.holds is not None:
        room = f"{found.options.headroom:.0%} of headroom"
        bars = f"{Trust.ASSUMED}: error bars of passes and steps, encoding as prefill"
        yield "confidence", f"both limits hold with a probability of {found.holds:.0%}, with {room}", bars
    yield from fact_rows(found.options, design, None)


def pools_json(found: PlannedPools, run: ProofRun | None = None, extras: PlanExtras = NOTHING) -> PoolsJson:
    """Make the versioned JSON of a plan of more pools: SI units."""
    plan, asked, law, design = found.plan, found.question, found.lengths, found.design
    made: PoolsJson = {
        "schema": POOLS,
        "status": plan.status,
        "message": plan.message,
        "binds": plan.binds,
        "nearest": plain(plan.nearest),
        "question": {
            "model": found.model.name,
            "pools": list(asked.pools),
            "images": None if asked.images is None else plain(asdict(asked.images)),
            "mean_isl": law.mean_isl,
            "mean_osl": law.mean_osl,
            "mean_cached": law.mean_isl - law.mean_new,
            "cached_tiers": {} if law.cached is None else dict(law.cached.reuse.tiers),
            "speculation": "" if (drafter := found.options.speculation) is None else drafter.name,
            "ttft": {"seconds": asked.ttft.seconds, "share": asked.ttft.share},
            "tpot": {"seconds": asked.tpot.seconds, "share": asked.tpot.share},
            "rate_per_s": asked.size.rate,
            "gpus": asked.size.gpus,
            "users": asked.size.users,
            "objective": found.options.objective,
        },
        "rate_per_s": plan.request_rate,
        "gpus": plan.total_gpus,
        "output_tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "ttft_s": {} if design is None else design.ttft,
        "tpot_s": {} if design is None else design.tpot,
        "ftl_s": plain(plan.ftl_s),
        "ttl_s": plain(plan.ttl_s),
        "usd_per_hour": None if design is None else plain(price_of_pools(design.pools, found.options.prices)),
        "gap": plain(plan.gap),
        "pools": [_stage_json(stage) for stage in found.stages],
        "others": {names: other.message for names, other in found.others},
        "left_out": list(found.left_out),
    }
    if design is not None and design.spares is not None:
        made["spares"] = plain(asdict(design.spares))
    if found.holds is not None:
        made["holds"] = plain(found.holds)
    if run is not None:
        made["simulated"] = _run_json(run)
    if extras.drawn is not None:
        made["drawn"] = drawn_json(extras.drawn, plan.request_rate, plan.request_rate * law.mean_osl)
    if extras.prices is not None:
        made["usd_per_million_tokens"] = token_prices_json(extras.prices)
    return made


def _run_json(run: ProofRun) -> PoolsRunJson:
    return {
        "requests": run.requests,
        "ttft_s": plain(run.ttft),
        "tpot_s": plain(run.tpot),
        "lost": run.lost,
        "holds": run.holds,
    }


def _stage_json(stage: PoolInstances) -> StageJson:
    return {
        "pool": stage.pool,
        "instances": stage.instances,
        "spares": stage.spares,
        "gpus": stage.gpus,
        "system": stage.setup.system.name,
        "precision": stage.setup.precision.name,
        "engine": stage.setup.engine,
        "mapping": {} if stage.mapping is None else degrees_json(stage.mapping, MAPPING_COLUMNS),
        "draft_tokens": 0 if stage.mapping is None else int(stage.mapping.draft_tokens),
        "batch": stage.batch,
        "microbatches": stage.microbatches,
        "rate_per_s": stage.rate,
        "load": stage.load,
        "seconds": stage.seconds,
        "idle": plain(stage.idle),
        "held_by": stage.held_by,
    }


def write_pools(
    found: PlannedPools, text: str, out: Path, run: ProofRun | None = None, extras: PlanExtras = NOTHING
) -> None:
    """Write everything as files: ``plan.txt``, ``plan.json``, ``designs.csv``, a row a pool."""
    made = pools_json(found, run, extras)
    write_answer(out, text, made)
    rows = [{**pool, **pool["mapping"]} for pool in made["pools"]]
    write_csv(out / "designs.csv", pd.DataFrame(rows).drop(columns="mapping", errors="ignore"))
