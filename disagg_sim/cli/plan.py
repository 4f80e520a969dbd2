"""``disagg-sim plan``: answer on one screen what to deploy."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg_sim.certainty.token_prices import TokenPrices
from disagg_sim.choices import (
    EVEN_RANKS,
    FAILURES,
    HEADROOM,
    HELD,
    LAUNCHERS,
    MOST_HEADROOM,
    MOST_SEED,
    MOST_SKEW,
    OBJECTIVES,
    POOLS,
    RANK_IMBALANCES,
)
from disagg_sim.cli.cached import asked_reuse
from disagg_sim.cli.plan_pools import INFEASIBLE, PoolsOutput, answer_pools, of_more_pools, pools_question, refused
from disagg_sim.cli.quantities import gb_per_s, per_s, reader, share
from disagg_sim.cli.tables import blocks_text
from disagg_sim.cli.workers import Offline
from disagg_sim.errors import InputError, as_float, nearest, quoted
from disagg_sim.facts.acceptance import asked_speculation
from disagg_sim.facts.load import list_specs, load_model, load_traffic
from disagg_sim.facts.traffic import HBM, TrafficCase
from disagg_sim.launch.expressible import engines_of, expressible
from disagg_sim.launch.launch import Launch, launch, lines_of
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.assurance import assurance, surer
from disagg_sim.planning.energy import Drawn, drawn
from disagg_sim.planning.flips import changes_of
from disagg_sim.planning.limits import TPOT, TTFT
from disagg_sim.planning.plan import plan as planned
from disagg_sim.planning.prices import planned_prices
from disagg_sim.planning.question import OWN, PlanOptions, Size
from disagg_sim.planning.turns import plan_turns
from disagg_sim.report.plan import PlanExtras, changes, plan_json, screen, write_plan
from disagg_sim.search.prefixes import GpuCaches
from disagg_sim.serving.costs import JOULE
from disagg_sim.units import GB, parse_quantity
from disagg_sim.workload.lengths import Lengths, lengths, with_cached
from disagg_sim.workload.named import traffic_case
from disagg_sim.workload.readers.load import load_trace
from disagg_sim.workload.trace import Trace


def plan(
    model: Annotated[str, typer.Option(metavar="NAME|FILE", help="Model: its name, YAML or config.json.")],
    system: Annotated[str, typer.Option(metavar="S[,S2,...]|any", help="GPU systems that compete.")],
    prefill_system: Annotated[str, typer.Option(metavar="P", help="Another system for the prefill pool.")] = "",
    isl: Annotated[int | None, typer.Option(min=1, help="Input tokens.")] = None,
    osl: Annotated[int | None, typer.Option(min=2, help="Output tokens.")] = None,
    traffic: Annotated[str, typer.Option(metavar="NAME", help="Lengths of a shipped traffic.")] = "",
    trace: Annotated[str, typer.Option(metavar="FILE", help="Lengths and arrivals of a request trace.")] = "",
    pools: Annotated[
        str, typer.Option(metavar="POOL,...", help=f"More pools than prefill,decode, of {', '.join(POOLS)}.")
    ] = "",
    images: Annotated[
        str,
        typer.Option(metavar="NxHxW[@SHARE]", help="Images of a request, 2x1120x1120; share whose encoding is kept."),
    ] = "",
    ffn_system: Annotated[str, typer.Option(metavar="F", help="Another system for the ffn pool.")] = "",
    cached: Annotated[float, typer.Option(parser=share, metavar="SHARE", help="Share of prompts in caches.")] = 0.0,
    tiers: Annotated[
        str,
        typer.Option(
            metavar="TIER[=SHARE,...]",
            help="Where they are cached: hbm, dram, ssd, remote. Of sessions: 'hbm=20 GB,dram', and no share.",
        ),
    ] = "",
    rank_imbalance: Annotated[
        str,
        typer.Option(metavar="ROUTING", help=f"Of DP ranks that wait for each other: {', '.join(RANK_IMBALANCES)}."),
    ] = EVEN_RANKS,
    speculate: Annotated[str, typer.Option(metavar="auto|off|K", help="Draft tokens of a decode step.")] = "off",
    acceptance: Annotated[
        str,
        typer.Option(
            metavar="NAME|METHOD SHARES", help="Of drafts: a curve, 'mtp 0.8 0.6', or 'draft_model MODEL 0.8 0.6'."
        ),
    ] = "",
    ttft: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="TTFT: '2 s', '500 ms@p99'; p90 unless said. [default: 2 s]")
    ] = None,
    tpot: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="TPOT: '50 ms', '30 ms@p99'; p90 unless said. [default: 50 ms]")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Serve the most with so many GPUs.")] = None,
    rate: Annotated[
        float | None, typer.Option(parser=per_s, metavar="RATE", help="Serve so many requests/s with the least.")
    ] = None,
    users: Annotated[int | None, typer.Option(min=1, help="Serve so many users, a request each in flight.")] = None,
    objective: Annotated[str, typer.Option(help=f"{', '.join(OBJECTIVES)}.")] = "gpus",
    engine: Annotated[str, typer.Option(help="vllm, sglang, trtllm; default: the system's.")] = "",
    precision: Annotated[str, typer.Option(help="Precision recipe; default: the usual one of model and system.")] = "",
    max_dcp: Annotated[int, typer.Option(min=1, help="Most GPUs that share the cache of a KV head.")] = 1,
    max_pcp: Annotated[int, typer.Option(min=1, help="Most ranks that share a prompt, of prefill pools.")] = 1,
    max_redundant_experts: Annotated[int, typer.Option(min=0, help="Most slots for copies of experts.")] = 0,
    expert_skew: Annotated[
        float, typer.Option(min=0.0, max=MOST_SKEW, help="Variation of the popularity of experts over its mean.")
    ] = 0.0,
    hold_prompts: Annotated[
        str, typer.Option(metavar="none|tuned|N", help="Most decode steps that prompts wait until every rank has one.")
    ] = HELD,
    headroom: Annotated[
        float,
        typer.Option(
            parser=reader("share", high=MOST_HEADROOM),
            metavar="SHARE",
            help="Of the rate that pools could serve beside it.",
        ),
    ] = HEADROOM,
    confidence: Annotated[
        float | None,
        typer.Option(
            parser=reader("share", low=0.5, high=0.99),
            metavar="SHARE",
            help="Grow until the limits hold with this probability.",
        ),
    ] = None,
    max_nic: Annotated[
        float | None, typer.Option(parser=gb_per_s, metavar="GB/s", help="Most KV bandwidth of a GPU, each way.")
    ] = None,
    price: Annotated[list[str] | None, typer.Option(metavar="SYSTEM=USD", help="Price of a GPU hour.")] = None,
    utilisation: Annotated[
        float | None,
        typer.Option(parser=reader("share"), metavar="SHARE", help="Price tokens; share of the hours that are used."),
    ] = None,
    energy: Annotated[bool, typer.Option("--energy", help="Say what GPUs and building draw at this rate.")] = False,
    availability: Annotated[
        float | None,
        typer.Option(
            parser=reader("share"), metavar="SHARE", help="Add spares: full capacity for so much of the time."
        ),
    ] = None,
    failures: Annotated[str, typer.Option(metavar="NAME|FILE", help="Failure rates for --availability.")] = FAILURES,
    emit: Annotated[
        str, typer.Option(metavar="ENGINE", help=f"Plan for it and write what starts it: {', '.join(LAUNCHERS)}.")
    ] = "",
    proof: Annotated[bool, typer.Option("--simulate", help="Prove it by simulation and adapt the counts.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of simulated arrivals and lengths.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write everything as files, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON of a versioned schema.")] = False,
    offline: Offline = False,  # noqa: ARG001 - its callback answers it
) -> None:
    """Plan a deployment: disaggregated or co-located, pools, mappings, counts, latencies, price.

    Say the lengths by --isl and --osl, --traffic or --trace, and the size by --gpus, --rate or --users.
    """
    work = work_of(isl, osl, traffic, trace)
    memory = memory_of(work, traffic, cached, tiers)
    played = work if isinstance(work, Trace) else None
    _require_drawn(proof and memory is not None, traffic)
    if played and gpus is None and rate is None and users is None:
        rate = played.rate
    work = work if memory is not None else cached_work(work, cached, tiers)
    options = PlanOptions(
        users=users,
        trace=played,
        objective=objective,
        prefill_system=prefill_system or None,
        precision=precision or None,
        engine=engine or _engine_of(emit),
        max_dcp=max_dcp,
        max_pcp=max_pcp,
        max_redundant_experts=max_redundant_experts,
        expert_skew=expert_skew,
        hold_prompts=hold_prompts,
        headroom=headroom,
        within=OWN if emit else None,
        max_nic=None if max_nic is None else max_nic * GB,
        prices=_prices(price or []),
        speculation=asked_speculation(load_model(model).name, speculate, acceptance),
        rank_imbalance=rank_imbalance,
        availability=availability,
        failures=failures,
        set_aside=0.0 if memory is None else memory.hbm,
    )

    if of_more_pools(pools, images, ffn_system):
        held = hold_prompts != HELD
        refused({"--tiers of sessions": memory, "--trace": played, "--hold-prompts": held, "--confidence": confidence})
        limits = (ttft, tpot)
        asked = pools_question(pools, images, ffn_system, limits, Size(rate=rate, gpus=gpus, users=users))
        answer_pools(
            model,
            system,
            work,
            asked,
            options,
            told=PoolsOutput(
                emit=emit,
                out=out,
                as_json=as_json,
                seed=seed if proof else None,
                energy=energy,
                utilisation=utilisation,
            ),
        )
        return

    def of(lengths: Lengths | Trace | TrafficCase) -> Plan:
        limits = {"ttft": TTFT if ttft is None else ttft, "tpot": TPOT if tpot is None else tpot}
        return planned(model, system, lengths, **limits, rate=rate, gpus=gpus, options=options)

    found = of(work) if memory is None else plan_turns(played or traffic, memory, of).plan
    told, made = PlanExtras(), None
    found = surer(found, confidence)
    if found.best is not None:
        if proof:
            found, told = _proven(found, seed)
        told = replace(told, sure=assurance(found), drawn=_drawn(found) if energy or objective == JOULE else None)
        told = replace(told, prices=token_prices_of(found, utilisation))
        made = _start(found, emit) if emit else None
    text, shown = blocks_text(screen(found, told)), _Shown()
    if not as_json:
        shown.echo(text)
    if found.best is not None:
        told = replace(told, changes=changes_of(found))  # after the answer, which need not wait for it
        last = blocks_text([changes(found, told)])
        text += f"\n{last}"
        if not as_json:
            shown.echo(f"\n{last}")
    if as_json:
        start = {} if made is None else {"start": asdict(made)}
        shown.echo(json.dumps({**plan_json(found, told), **start}, indent=2) + "\n")
    elif made is not None:
        shown.echo("".join(f"\n{line}" for line in lines_of(made, None if out is None else out / "start")) + "\n")
    if out is not None:
        _write(found, told, text, out, made)
    shown.require_open()
    if found.best is None:
        raise typer.Exit(INFEASIBLE)


class _Shown:
    """Standard output of a plan, which is written to ``--out`` even where nobody reads it to its end."""

    def __init__(self) -> None:
        self._closed: BrokenPipeError | None = None

    def echo(self, text: str) -> None:
        """Print text as it is, unless the output was closed."""
        if self._closed is None:
            try:
                typer.echo(text, nl=False)
            except BrokenPipeError as error:
                self._closed = error

    def require_open(self) -> None:
        """End as any command does whose output was closed."""
        if self._closed is not None:
            raise self._closed


def _write(found: Plan, told: PlanExtras, text: str, out: Path, made: Launch | None) -> None:
    """Write the plan and what starts it, or nothing where one of the files may not be written."""
    if made is not None:
        made.require_own(out / "start")
    write_plan(found, told, text, out)
    if made is not None:
        made.write(out / "start")


def _require_drawn(turns: bool, traffic: str) -> None:
    """Refuse to simulate a plan for turns of the sessions of a traffic: requests alone are drawn."""
    if turns and traffic:
        keys = f"trace: {{kind: sessions, traffic: {traffic}, sessions_per_s: ...}}"
        raise InputError(
            f"plan --simulate plays no sessions of {traffic}; 'disagg-sim simulate FILE' does, with {keys}"
        )


def _proven(found: Plan, seed: int) -> tuple[Plan, PlanExtras]:
    """Prove a plan by simulation; say on standard error if the simulator has to be compiled first."""
    from disagg_sim.planning.proven import proven  # the simulator takes a second to load
    from disagg_sim.simulation.kernel.compiled import COMPILING, on_compilation

    with on_compilation(lambda: typer.echo(COMPILING, err=True)):
        plan, shown = proven(found, seed=seed)
    return plan, PlanExtras(proof=shown)


def _drawn(found: Plan) -> Drawn:
    """What the best design draws."""
    assert found.best is not None
    return drawn(found.best)


def token_prices_of(found: Plan, utilisation: float | None) -> TokenPrices | None:
    """Prices of a million tokens of the best design, where a utilisation is given."""
    if utilisation is None or found.best is None:
        return None
    return planned_prices(found.best, found.options.prices, utilisation)


def _engine_of(launcher: str) -> str | None:
    """Engine whose times are taken where only a launcher is named; None = that of the system."""
    allowed = engines_of(launcher) if launcher else ()
    return allowed[0] if len(allowed) == 1 else None


def _start(found: Plan, engine: str) -> Launch:
    """Files that start the best design that the engine can express; the notes say if it is a runner-up."""
    assert found.best is not None
    reasons = expressible(found.best, engine)
    for place, design in enumerate(found.runners_up if reasons else (), start=1):
        if not expressible(design, engine):
            made = launch(design, engine=engine)
            said = f"starts runner-up {place}; of the best: {'; '.join(reasons)}"
            return replace(made, notes=(said, *made.notes))
    return launch(found.best, engine=engine)


def work_of(isl: int | None, osl: int | None, traffic: str, trace: str) -> Lengths | Trace | TrafficCase:
    """Lengths of the requests, of the one source that is given."""
    sources = {"--isl and --osl": isl or osl, "--traffic": traffic, "--trace": trace}
    given = [name for name, value in sources.items() if value]
    if len(given) != 1:
        raise InputError(f"give the lengths once, by {' or '.join(sources)}; got {' and '.join(given) or 'none'}")
    if traffic:
        return traffic_case(traffic)
    if trace:
        found = load_trace(trace)
        for note in found.notes:
            typer.echo(f"{trace}: {note}", err=True)
        return found
    if isl is None or osl is None:
        raise InputError("--isl and --osl go together: tokens of a prompt and of its answer")
    return lengths(isl, osl)


def memory_of(work: Lengths | Trace | TrafficCase, traffic: str, share: float, tiers: str) -> GpuCaches | None:
    """What GPUs remember between requests, from ``hbm=20 GB,dram``; None: a stated share, or nothing to remember by."""
    if isinstance(work, Trace):
        known = work.prefix is not None
    else:
        known = traffic in list_specs("traffic") and load_traffic(traffic).session is not None
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


def cached_work(work: Lengths | Trace | TrafficCase, share: float, tiers: str) -> Lengths | Trace | TrafficCase:
    """The work with a share of its prompts cached, in tiers."""
    reuse = asked_reuse(share, tiers, others=", or sessions, or a trace with blocks")
    if reuse is None:
        return work
    if isinstance(work, TrafficCase):
        return replace(work, cached=reuse)
    return with_cached(work if isinstance(work, Lengths) else lengths(work), reuse)


def _prices(given: list[str]) -> dict[str, float]:
    """Prices by system, from ``NAME=USD``."""
    found: dict[str, Any] = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            found[name] = as_float(float(number.strip().removeprefix("$").removesuffix("/h")))
        except ValueError:
            raise InputError(
                f"--price {quoted(text)}; allowed: SYSTEM=USD_PER_GPU_HOUR, such as h100_sxm=2.5"
            ) from None
        if name not in list_specs("hardware"):
            raise InputError(f"--price: {quoted(name)} is not a system{nearest(name, list_specs('hardware'))}")
    return found
