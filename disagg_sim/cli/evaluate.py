"""``disagg-sim evaluate``: say what requests see of a deployment that is given by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import typer

from disagg_sim.cli.plan_inputs import plan_inputs
from disagg_sim.cli.tables import blocks_text
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, nearest, quoted
from disagg_sim.launch.launch import flags_of
from disagg_sim.launch.read import Started, read_launch
from disagg_sim.launch.workers import longest_of
from disagg_sim.planning.evaluate import TOGETHER, Evaluation
from disagg_sim.planning.evaluate import evaluate as evaluated
from disagg_sim.question import EvaluateQuestion, PlanQuestion
from disagg_sim.report.evaluate import evaluate_json, evaluate_screen
from disagg_sim.report.plan import ScreenPart
from disagg_sim.report.plan_rows import role_text
from disagg_sim.report.schemas import PLAN
from disagg_sim.simulation.deployment import LIMITS, Replicas
from disagg_sim.simulation.options import MOST

#: Keys of a pool -> degrees of its sharding; ``tp`` and ``ep`` say that of the feed-forward part, too.
_DEGREES = {
    "tp": "tp_attn",
    "dp": "dp_attn",
    "ep": "ep",
    "pp": "pp",
    "dcp": "dcp",
    "pcp": "pcp",
    "redundant_slots": "redundant_slots",
    "chunk_tokens": "chunk_tokens",
}
_KEYS = (*_DEGREES, "instances", *LIMITS, "captured")
_ROLES = tuple(dict.fromkeys(role for roles in TOGETHER for role in roles))


def evaluation_of(asked: EvaluateQuestion) -> Evaluation:
    """Evaluate the deployment of a question."""
    known = {each.name for each in fields(PlanQuestion)}
    shared = {each.name: getattr(asked, each.name) for each in fields(asked) if each.name in known}
    if [bool(asked.pool), bool(asked.launch), asked.plan is not None].count(True) != 1:
        raise InputError(
            "say the deployment once: each pool by --pool, or by --launch, or a plan's directory by --plan"
        )
    started = [each for given in asked.launch or () for each in read_launch(given)]
    if started:
        engines = sorted({*(each.engine for each in started), *([asked.engine] if asked.engine else [])})
        if len(engines) > 1:
            raise InputError(f"engines {' and '.join(engines)}; allowed: one engine in all pools, and in --engine")
        shared["engine"] = engines[0]
    planned = _planned_pools(asked.plan) if asked.plan is not None else []
    for key in ("precision", "engine"):  # as it was planned, unless another one is asked for
        names = {str(pool.get(key) or "") for pool in planned}
        shared[key] = shared[key] or (names.pop() if len(names) == 1 else "")
    given = plan_inputs(PlanQuestion(**shared))
    told = [(each.role, each.replicas) for each in started] or list(map(pool_of, asked.pool or ()))
    pools = pools_of_plan(asked.plan) if asked.plan is not None else dict(told)
    if len(pools) < len(told):
        raise InputError(f"pools {', '.join(role for role, _ in told)}; allowed: each role once")
    found = evaluated(
        asked.model, asked.system, pools, given.work, **given.limits, rate=asked.rate, options=given.options
    )
    for each in started:
        recipe = next(pool.setup.precision for pool in found.design.pools if pool.role == each.role)
        if each.cache not in ("", recipe.cache.name):
            said = f"its launch keeps the KV cache in {each.cache}, the recipe {recipe.name} in {recipe.cache.name}"
            raise InputError(f"{each.role}: {said}; give --precision")
    moved = {pool["role"]: str(pool.get("system")) for pool in planned}
    return replace(found, notes=(*_notes(found, started, asked.precision), *_moved(found, moved)))


def _notes(found: Evaluation, started: Sequence[Started], precision: str) -> Iterator[str]:
    """Say what a launch leaves open, what of it was not read, and which requests it refuses."""
    if started and not precision:
        names = " and ".join(dict.fromkeys(pool.setup.precision.name for pool in found.design.pools))
        yield f"precision {names} is the usual one of the model and its system, not read from the launch: --precision"
    if unread := dict.fromkeys(name for each in started for name in each.unread):
        yield f"settings that were not read: {', '.join(unread)}"
    longest = math.ceil(longest_of(found.design.work.lengths))
    for each in started:
        if 0 < each.longest < longest:
            refused = f"requests of more than {each.longest:,} tokens, and some have {longest:,}"
            yield f"{role_text(each.role)} refuses {refused}"


def _moved(found: Evaluation, systems: Mapping[str, str]) -> Iterator[str]:
    """Say which pools of a plan are judged on another system."""
    for pool in found.design.pools:
        name = pool.setup.system.name
        if (of_plan := systems.get(pool.role, name)) != name:
            yield f"{role_text(pool.role)} was planned on {of_plan} and is judged on {name}"


def pool_of(text: str) -> tuple[str, Replicas]:
    """Read a pool: its role, and what differs from one GPU."""
    role, _, rest = text.partition(":")
    if (role := role.strip()) not in _ROLES:
        said = f"--pool {quoted(text)}: {quoted(role)} is no pool{nearest(role, _ROLES)}"
        raise InputError(f"{said}; allowed: {', '.join(_ROLES)}, such as decode:tp=4,instances=2,batch=128")
    numbers: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in rest.split(","))):
        key, _, number = (each.strip() for each in part.partition("="))
        if key not in _KEYS:
            raise InputError(
                f"--pool {role}: unknown key {quoted(key)}{nearest(key, _KEYS)}; allowed: {', '.join(_KEYS)}"
            )
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise InputError(f"--pool {role}: {key} {quoted(number)} is no whole number; allowed: such as {key}=4")
        numbers[key] = int(number)
    if role == "prefill" and "captured" in numbers:
        raise InputError("--pool prefill: captured is of decode steps; allowed: in decode and colocated")
    degrees = {_DEGREES[key]: number for key, number in numbers.items() if key in _DEGREES}
    return role, _replicas(f"--pool {role}", degrees, numbers)


def pools_of_plan(path: Path) -> dict[str, Replicas]:
    """Read the pools of the best design of a plan, from its directory or its ``plan.json``."""
    degrees = {*_DEGREES.values(), "tp_ffn", "draft_tokens"}
    return {
        pool["role"]: replace(_replicas(f"--plan {path}", {name: pool[name] for name in degrees}, pool), captured=MOST)
        for pool in _planned_pools(path)
    }


def _planned_pools(path: Path) -> list[dict[str, Any]]:
    """Pools of the best design, as the file has them."""
    file = path / "plan.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--plan {file}: {getattr(error, 'strerror', None) or 'is no JSON'}") from None
    best = document.get("best") if isinstance(document, dict) and document.get("schema") == PLAN else None
    if not best:
        raise InputError(f"--plan {file}: has no design of schema {PLAN}; allowed: what disagg-sim plan --out wrote")
    if others := [pool["role"] for pool in best["pools"] if pool["role"] not in _ROLES]:
        raise InputError(f"--plan {file}: has pools of {', '.join(others)}; allowed: {', '.join(_ROLES)}")
    pools: list[dict[str, Any]] = best["pools"]
    return pools


def _replicas(where: str, degrees: dict[str, int], values: Mapping[str, Any]) -> Replicas:
    """Equal instances; experts that are not spread by ep are cut by all GPUs of a stage."""
    try:
        stage = degrees.get("tp_attn", 1) * degrees.get("dp_attn", 1) * degrees.get("pcp", 1)
        if stage % max(degrees.get("ep", 1), 1):
            raise InputError(f"ep {degrees['ep']} does not divide the {stage} GPUs of a stage (tp x dp x pcp)")
        whole: dict[str, Any] = {"tp_ffn": stage // max(degrees.get("ep", 1), 1), **degrees}
        mapping = Sharding(**whole)
        limits = {name: values.get(name) for name in (*LIMITS, "captured")}
        return Replicas(mapping=mapping, instances=values.get("instances", 1), **limits)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def evaluate(asked: EvaluateQuestion) -> None:
    """Evaluate and print."""
    found = evaluation_of(asked)
    planned = None if asked.alone else found.planned
    if asked.as_json:
        typer.echo(json.dumps(evaluate_json(found, planned), indent=2))
    else:
        rows = [ScreenPart(tuple(flags_of(found.design)), ("pool", "flags of its engine"))]
        typer.echo(blocks_text([*evaluate_screen(found, planned), *rows]), nl=False)
