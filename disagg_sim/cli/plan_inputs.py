"""Read the inputs of a plan from a question: lengths, caches, prices, options."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any, NamedTuple

import typer

from disagg_sim.errors import InputError, nearest, quoted
from disagg_sim.facts.load import load_model, load_traffic
from disagg_sim.facts.traffic import HBM, Reuse, TrafficCase
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.launch.expressible import engines_of
from disagg_sim.planning.limits import TPOT, TTFT
from disagg_sim.planning.question import PlanOptions
from disagg_sim.question import PlanQuestion, prices_of
from disagg_sim.serving.pool_names import Images
from disagg_sim.techniques.prefix.search import GpuCaches
from disagg_sim.techniques.speculation.facts_asked import asked_speculation
from disagg_sim.units import asked_quantity, parse_quantity
from disagg_sim.workload.lengths import Lengths, lengths, reuse_of, with_cached
from disagg_sim.workload.named import traffic_case
from disagg_sim.workload.readers.load import load_trace
from disagg_sim.workload.trace import Trace

#: Tolerance of the sum of the shares of tiers. [1]
SHARES_ROUNDING = 1e-9

#: Images of a request: ``2x1120x1120@0.5``.
_IMAGES = re.compile(r"(\d+)x(\d+)x(\d+)(?:@([0-9.]+))?")


class PlanInputs(NamedTuple):
    """Requests, limits and options of a plan."""

    work: Lengths | Trace | TrafficCase
    memory: GpuCaches | None  # prefix caches of the GPUs; None: a stated cached share, or no sessions and no block ids
    limits: dict[str, Any]  # of TTFT and TPOT
    options: PlanOptions


def plan_inputs(asked: PlanQuestion) -> PlanInputs:
    """Read the inputs of a plan from a question."""
    work = _work(asked)
    memory = memory_of(work, asked.traffic, asked.cached, asked.tiers)
    if asked.proof and memory is not None and asked.traffic:
        keys = f"trace: {{kind: sessions, traffic: {asked.traffic}, sessions_per_s: ...}}"
        raise InputError(
            f"plan --simulate plays no sessions of {asked.traffic}; 'disagg-sim simulate FILE' does, with {keys}"
        )
    starts = engines_of(asked.emit) if asked.emit else ()
    prices = asked.price if isinstance(asked.price, dict) else prices_of(asked.price or ())
    for name in prices:
        if name not in list_specs("hardware"):
            raise InputError(f"--price: {quoted(name)} is not a system{nearest(name, list_specs('hardware'))}")
    same = {each.name for each in fields(PlanOptions)} & {each.name for each in fields(asked)}
    given = {name: value for name in same if (value := getattr(asked, name)) != ""}  # else as options have it
    given |= {
        "trace": work if isinstance(work, Trace) else None,
        "engine": asked.engine or (starts[0] if len(starts) == 1 else None),
        "prices": prices,
        "pools": tuple(dict.fromkeys(part.strip() for part in asked.pools.split(",") if part.strip())),
        "images": images_of(asked.images) if asked.images else None,
        "speculation": asked_speculation(load_model(asked.model).name, asked.speculate, asked.acceptance),
        "set_aside": 0.0 if memory is None else memory.hbm,
    }
    options = PlanOptions(**given)
    reuse = None
    if memory is None:
        reuse = asked_reuse(asked.cached, asked.tiers, others=", or sessions, or a trace with blocks")
    if reuse is not None:
        whole = lengths(work) if isinstance(work, Trace) else work
        work = replace(whole, cached=reuse) if isinstance(whole, TrafficCase) else with_cached(whole, reuse)
    limits: dict[str, Any] = {"ttft": TTFT, "tpot": TPOT}
    limits |= {name: limit for name in limits if (limit := getattr(asked, name)) not in (None, "")}
    return PlanInputs(work, memory, limits, options)


def images_of(text: str) -> Images:
    """Images of a request, from ``2x1120x1120`` or ``2x1120x1120@0.5``."""
    found = _IMAGES.fullmatch(text.strip())
    share = float(found[4] or 0.0) if found and (found[4] or "0").count(".") <= 1 and found[4] != "." else 1.0
    if found is None or not share < 1.0 or not all(1 <= int(found[i]) <= 10**5 for i in (1, 2, 3)):
        raise InputError(
            f"--images {quoted(text)}; allowed: COUNTxHEIGHTxWIDTH in pixels, 2x1120x1120, and @SHARE below 1 of them "
            "whose encoding is kept"
        )
    return Images(images=int(found[1]), height=int(found[2]), width=int(found[3]), cached=share)


def _work(asked: PlanQuestion) -> Lengths | Trace | TrafficCase:
    """Read the lengths of the requests from their only source."""
    sources = {"--isl and --osl": asked.isl or asked.osl, "--traffic": asked.traffic, "--trace": asked.trace}
    given = [name for name, value in sources.items() if value]
    if len(given) != 1:
        raise InputError(f"give the lengths once, by {' or '.join(sources)}; got {' and '.join(given) or 'none'}")
    if asked.traffic:
        return traffic_case(asked.traffic)
    if asked.trace:
        found = load_trace(asked.trace)
        for note in found.notes:
            typer.echo(f"{asked.trace}: {note}", err=True)
        return found
    if asked.isl is None or asked.osl is None:
        raise InputError("--isl and --osl go together: tokens of a prompt and of its answer")
    return lengths(asked.isl, asked.osl)


def memory_of(work: Lengths | Trace | TrafficCase, traffic: str, share: float, tiers: str) -> GpuCaches | None:
    """Read prefix caches, ``hbm=20 GB,dram``; None with a stated cached share, or without sessions and block ids.

    Says on stderr where prompts repeat earlier ones and no caches are given.
    """
    if isinstance(work, Trace):
        known = work.prefix is not None
    else:
        known = traffic in list_specs("traffic") and load_traffic(traffic).session is not None
    if known and not (tiers or share):
        said = "prompts repeat earlier ones, and all are computed whole: --tiers 'hbm=20 GB' counts caches"
        typer.echo(f"{traffic or getattr(work, 'name', 'the trace')}: {said}", err=True)
    if not tiers or share or not known:
        return None
    hbm, below = 0.0, []
    for part in tiers.split(","):
        name, _, size = part.strip().partition("=")
        if name == HBM and size:
            try:
                hbm = parse_quantity(size, "B")
            except ValueError as error:
                raise InputError(f"--tiers {quoted(part)}: {error}") from None
        elif name == HBM or size:
            raise InputError(f"--tiers {quoted(part)} of sessions; allowed: hbm=SIZE, such as 'hbm=20 GB', or a tier")
        else:
            below.append(name)
    return GpuCaches(hbm=hbm, tiers=tuple(below))


def asked_reuse(share: float, tiers: str, *, others: str = "") -> Reuse | None:
    """Read the cached share of prompts [1], and its tiers (``dram``, or ``hbm=0.5,dram=0.5``); None where it is 0."""
    if tiers and not share:
        raise InputError(f"--tiers says where prompts are cached; give --cached, too{others}")
    return replace(reuse_of(share), tiers=_tiers(tiers)) if share else None


def _tiers(text: str) -> tuple[tuple[str, float], ...]:
    """Tiers with their shares of the cached prompts, from ``dram`` or ``hbm=0.5,dram=0.5``."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.strip().partition("=")
        try:
            found[name] = asked_quantity(number or 1.0, "share", "--tiers")
        except InputError:
            raise InputError(f"--tiers {quoted(part)}; allowed: TIER or TIER=SHARE, such as hbm=50%,dram=0.5") from None
        if not 0.0 <= found[name] <= 1.0:
            raise InputError(f"--tiers {quoted(part)} is out of range; allowed: shares from 0 to 1")
    if found and not abs(sum(found.values()) - 1.0) <= SHARES_ROUNDING:
        raise InputError(f"--tiers {quoted(text)}: shares add up to {sum(found.values()):g}; allowed: 1")
    return tuple(sorted(found.items()))
