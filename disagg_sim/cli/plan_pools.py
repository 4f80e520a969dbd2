"""``disagg-sim plan --pools``: plan encode, attention and feed-forward pools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from disagg_sim.choices import EVEN_RANKS, TWO
from disagg_sim.cli.tables import blocks_text
from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.launch.launch import launch, lines_of
from disagg_sim.planning.limits import TPOT, TTFT, limit_of
from disagg_sim.planning.pool_facts import PoolFacts, drawn_of_pools, prices_of_pools
from disagg_sim.planning.pools_plan import PlannedPools, PoolsQuestion, plan_more_pools
from disagg_sim.planning.question import PlanOptions, Size
from disagg_sim.report.more_pools import played_screen, pools_json, pools_screen, write_pools
from disagg_sim.serving.pool_names import Images
from disagg_sim.workload.lengths import Lengths, lengths, uneven
from disagg_sim.workload.trace import Trace

if TYPE_CHECKING:
    from disagg_sim.planning.prove import ProofRun

INFEASIBLE = 2  # exit code
_IMAGES = re.compile(r"(\d+)x(\d+)x(\d+)(?:@([0-9.]+))?")


def _names(pools: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in pools.split(",") if part.strip()))


def of_more_pools(pools: str, images: str, ffn_system: str) -> bool:
    """Whether pools beside prefill and decode are asked for; those two are every plan's."""
    return bool(images or ffn_system or {*_names(pools)} - {*TWO}) or len(_names(pools)) == 1


def refused(given: Mapping[str, object]) -> None:
    """``InputError`` for options that are of plans of prefill and decode alone."""
    said = [name for name, value in given.items() if value]
    if said:
        raise InputError(f"{', '.join(said)} and --pools exclude each other: only plans of prefill and decode take it")


def pools_question(
    pools: str, images: str, ffn_system: str, limits: tuple[str | float | None, str | float | None], size: Size
) -> PoolsQuestion:
    """What ``--pools`` and the options beside it ask."""
    names = _names(pools)
    if not names:
        raise InputError("--images and --ffn-system need --pools, such as encode,prefill,decode")
    return PoolsQuestion(
        pools=names,
        size=size,
        images=images_of(images) if images else None,
        ttft=limit_of(TTFT if limits[0] in (None, "") else limits[0], "ttft"),
        tpot=limit_of(TPOT if limits[1] in (None, "") else limits[1], "tpot"),
        ffn_system=ffn_system or None,
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsOutput:
    """What is written of a plan beside the screen."""

    emit: str  # a launcher; "" = no files that start it
    out: Path | None
    as_json: bool
    seed: int | None = None  # of a simulation of the pools; None = none
    energy: bool = False  # whether watts and joules are told
    utilisation: float | None = None  # share of used hours at which tokens are priced; None = they are not [1]


def of_pools(
    model: str, system: str, work: Lengths | Trace | TrafficCase, asked: PoolsQuestion, options: PlanOptions
) -> PlannedPools:
    """The plan of further pools."""
    law = work if isinstance(work, Lengths) else lengths(work)
    if options.rank_imbalance != EVEN_RANKS:
        law = uneven(law, options.rank_imbalance)
    found = plan_more_pools(model, system, law, asked, options)
    assert isinstance(found, PlannedPools)  # of prefill and decode alone the command plans as without --pools
    return found


def facts_of(found: PlannedPools, *, energy: bool, utilisation: float | None) -> PoolFacts:
    """What was asked for beside the plan; nothing of an infeasible one."""
    if not found.plan.members:
        return PoolFacts()
    prices = None if utilisation is None else prices_of_pools(found, utilisation)
    return PoolFacts(drawn=drawn_of_pools(found) if energy else None, prices=prices)


def answer_pools(
    model: str,
    system: str,
    work: Lengths | Trace | TrafficCase,
    asked: PoolsQuestion,
    options: PlanOptions,
    *,
    told: PoolsOutput,
) -> None:
    """Plan, print and write; exit code 2 where nothing keeps the limits."""
    found = of_pools(model, system, work, asked, options)
    run = _played(found, work, told.seed) if told.seed is not None and found.plan.members else None
    facts = facts_of(found, energy=told.energy, utilisation=told.utilisation)
    text = blocks_text([*pools_screen(found, facts), *([] if run is None else [played_screen(found, run)])])
    made = launch(found, engine=told.emit) if told.emit and found.plan.members else None
    if told.as_json:
        start = {} if made is None else {"start": asdict(made)}
        typer.echo(json.dumps({**pools_json(found, run, facts), **start}, indent=2))
    else:
        typer.echo(text, nl=False)
    if told.out is not None:
        if made is not None:
            made.require_own(told.out / "start")
        write_pools(found, text, told.out, run, facts)
    if made is not None and not told.as_json:
        typer.echo("".join(f"\n{line}" for line in lines_of(made, None if told.out is None else told.out / "start")))
    if made is not None and told.out is not None:
        made.write(told.out / "start")
    if not found.plan.members:
        raise typer.Exit(INFEASIBLE)


def _played(found: PlannedPools, work: Lengths | Trace | TrafficCase, seed: int) -> ProofRun:
    """Simulate the pools; say on standard error if the simulator has to be compiled first."""
    from disagg_sim.planning.play_pools import play_pools  # the simulator takes a second to load
    from disagg_sim.simulation.kernel.compiled import COMPILING, on_compilation

    law = found.lengths
    source = work if isinstance(work, TrafficCase) else (round(law.mean_isl), round(law.mean_osl))
    with on_compilation(lambda: typer.echo(COMPILING, err=True)):
        return play_pools(found, source, seed=seed)
