"""``disagg-sim explain``: take a row of results, or a configuration given by hand, apart to the fits behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import typer
from rich.text import Text

from disagg_sim.certainty.breakdown import Breakdown, breakdown
from disagg_sim.certainty.designs import Designs
from disagg_sim.certainty.grid_points import design_of
from disagg_sim.certainty.pass_energy import energy_parts
from disagg_sim.certainty.passes import LATENCIES, RESOURCES
from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.certainty.trust import shares_text
from disagg_sim.choices import EVEN_RANKS, FAILURES, MORE_PHASES, NOT_HELD, PHASES, RANK_IMBALANCES
from disagg_sim.cli.cached import asked_reuse
from disagg_sim.cli.explain_pools import OF_TABLE, explain_pool, refuse_given, refuse_of_tables, refused
from disagg_sim.cli.plan_pools import INFEASIBLE
from disagg_sim.cli.quantities import reader, share
from disagg_sim.cli.tables import print_table
from disagg_sim.cli.workers import Offline
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.errors import InputError, nearest
from disagg_sim.facts.acceptance import asked_speculation
from disagg_sim.facts.load import load_failures, load_model
from disagg_sim.facts.traffic import Reuse
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.planning.prefill_delay_effect import NO_LIMIT, PrefillDelayEffect, prefill_delay_effect_of
from disagg_sim.planning.spares import Availability
from disagg_sim.planning.tiers import TierUse, tiers_of_designs
from disagg_sim.report.breakdown import (
    RESOURCE_COLOURS,
    RESOURCE_TEXT,
    Line,
    elasticity_rows,
    heading,
    latency_title,
    lines_of,
    memory_lines,
    point_of,
    resource_shares,
    time_text,
    trust_shares,
)
from disagg_sim.report.documents import explain_json
from disagg_sim.report.energy import energy_lines
from disagg_sim.report.memory import memory_of_pools, too_full
from disagg_sim.report.plan_facts import cached_rows, hand_over_rows, prefill_delay_rows, spares_rows
from disagg_sim.report.roofline import draw_breakdown
from disagg_sim.report.schemas import ExplainJson
from disagg_sim.report.sources import entries_of, source_rows
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.mappings import least_redundant_slots
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.availability import Spares
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.colocation import Colocation
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT
from disagg_sim.serving.prefill_delay import parse_prefill_delay
from disagg_sim.sweep.blocks import read_block
from disagg_sim.sweep.compare import read_frontier
from disagg_sim.sweep.kv_links import HandedOver, handed_over
from disagg_sim.units import GB
from disagg_sim.workload.lengths import Lengths, lengths, uneven, with_cached
from disagg_sim.workload.named import lengths_named
from disagg_sim.workload.prefixes import reuse_text

#: Why prompts of another phase are not held back.
_WHY_NOT = {"piggyback": "has chunks in decode steps, whose waits plans and simulations count"}
#: Characters of the longest bar.
BAR = 30
#: Character of each resource, so that a bar is read without colours, too.
MARKS = {"compute": "█", "hbm": "▓", "nvlink": "▒", "nic": "░", "latency": "─", "host": "h", "waiting": "·"}


def explain(
    results: Annotated[
        Path | None,
        typer.Argument(metavar="DIR|FILE", help="Results of a sweep, its frontier.csv, or a file of points/."),
    ] = None,
    row: Annotated[int | None, typer.Option("--row", min=0, help="Row of the table, counted from 0.")] = None,
    case: Annotated[str, typer.Option(help="Only rows of this case.")] = "",
    best: Annotated[bool, typer.Option("--best", help="Take the row of highest throughput.")] = False,
    at_interactivity: Annotated[
        float | None,
        typer.Option("--at-interactivity", metavar="X", help="Take the highest throughput at X tokens/s/user or more."),
    ] = None,
    model: Annotated[str, typer.Option(help="Design by hand: model; the options down to --osl apply.")] = "",
    system: Annotated[str, typer.Option(help="The GPU system.")] = "",
    precision: Annotated[str, typer.Option(help="The precision recipe.")] = "",
    profile: Annotated[str, typer.Option(help="ideal, optimistic or measured.")] = "measured",
    engine: Annotated[str, typer.Option(help="Engine profile; default: the system's.")] = "",
    phase: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(PHASES)}: an instance of one phase or of both; {', '.join(MORE_PHASES)}: further pools."
        ),
    ] = "decode",
    ffn_gpus: Annotated[int, typer.Option(min=0, help="GPUs of the feed-forward pool, of attention_ffn.")] = 0,
    microbatches: Annotated[int, typer.Option(min=1, help="That alternate between both pools, of attention_ffn.")] = 3,
    images: Annotated[str, typer.Option(metavar="NxHxW[@SHARE]", help="Images of a request, of encode.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism of attention.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data parallelism of attention.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallelism; the FFN shards over tp*dp*pcp/ep.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dcp: Annotated[int, typer.Option(min=1, help="Of the tp GPUs, those that share the tokens of a KV head.")] = 1,
    pcp: Annotated[int, typer.Option(min=1, help="Groups of tp GPUs that share a prompt, of prefill.")] = 1,
    speculate: Annotated[str, typer.Option(metavar="auto|off|K", help="Draft tokens of a decode step.")] = "off",
    acceptance: Annotated[
        str,
        typer.Option(
            metavar="NAME|METHOD SHARES", help="Of drafts: a curve, 'mtp 0.8 0.6', or 'draft_model MODEL 0.8 0.6'."
        ),
    ] = "",
    batch: Annotated[int, typer.Option(min=1, help="Requests of the instance.")] = 1,
    isl: Annotated[int, typer.Option(min=1, help="Input tokens.")] = 1024,
    osl: Annotated[int, typer.Option(min=2, help="Output tokens.")] = 256,
    traffic: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Lengths of a shipped traffic, in place of --isl and --osl; those of a table that does not say.",
        ),
    ] = "",
    cached: Annotated[float, typer.Option(parser=share, metavar="SHARE", help="Share of prompts in caches.")] = 0.0,
    tiers: Annotated[
        str, typer.Option(metavar="TIER[=SHARE,...]", help="Where they are cached: hbm, dram, ssd, remote.")
    ] = "",
    rank_imbalance: Annotated[
        str,
        typer.Option(metavar="ROUTING", help=f"Of DP ranks that wait for each other: {', '.join(RANK_IMBALANCES)}."),
    ] = EVEN_RANKS,
    hold_prompts: Annotated[
        str, typer.Option(metavar="none|tuned|N", help="Most decode steps that prompts wait for seats of all ranks.")
    ] = NOT_HELD,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture to write (.png, .svg, .pdf): bars and roofline.")
    ] = None,
    energy: Annotated[bool, typer.Option("--energy", help="Tell watts and joules of the passes, too.")] = False,
    availability: Annotated[
        float | None,
        typer.Option(
            parser=reader("share"), metavar="SHARE", help="Tell what a failure stops, and the spares for so much time."
        ),
    ] = None,
    failures: Annotated[str, typer.Option(metavar="NAME|FILE", help="Failure rates for --availability.")] = FAILURES,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    offline: Offline = False,  # noqa: ARG001 - its callback answers it
) -> None:
    """Take TTL, FTL and memory of a design apart, down to the equation, the fit and the YAML line of each part.

    Name a table of results and one of its rows, or a design by hand.
    """
    if (results is None) == (not model):
        raise InputError("name either a table of results, or a design by --model, --system and --precision")
    asked = lengths_named(traffic) if traffic else None
    wanted = None if availability is None else Availability(target=availability, failing=load_failures(failures))
    if results is None:
        chooses = {"--row": row is not None, "--case": case, "--best": best}
        refuse_given(chooses | {"--at-interactivity": at_interactivity is not None}, OF_TABLE)
    if results is not None:
        given = {"--rank-imbalance": rank_imbalance != EVEN_RANKS, "--cached": cached, "--tiers": tiers}
        refuse_of_tables(given | {"--hold-prompts": hold_prompts != NOT_HELD})
        table = read_points(results, case)
        chosen = chosen_row(table, row, at_interactivity, best=best)
        design: pd.DataFrame | PhaseGrid = table.loc[[chosen]]
    else:
        named = _given("--system", system), _given("--precision", precision)
        drafter = asked_speculation(load_model(model).name, speculate, acceptance)
        at, chosen = setup(model, *named, profile, engine or None, drafter), 0
        mapping = mapping_by_hand(at, Sharding(tp_attn=tp, dp_attn=dp, pp=pp, dcp=dcp, pcp=pcp), ep)
        asked = asked or lengths(isl, osl)
        if (reuse := reuse_by_hand(cached, tiers, phase, asked)) is not None:
            asked, traffic = with_cached(asked, reuse), f"{traffic or f'{isl}/{osl}'}/{reuse_text(reuse)}"
        if phase in MORE_PHASES:
            refused({"--json": as_json, "--figure": figure, "--availability": wanted})
            refused({"--speculate": drafter, "--rank-imbalance": rank_imbalance != EVEN_RANKS})
            refused({"--hold-prompts": hold_prompts != NOT_HELD})
            explain_pool(
                at, phase, mapping, asked, batch, halves=(ffn_gpus, microbatches), images=images, energy=energy
            )
            return
        asked = uneven(asked, rank_imbalance)
        design = by_hand(at, mapping, asked, phase, batch, hold_prompts)
    apart = breakdown_of(design, Origin(lengths=asked), energy=energy, wanted=wanted)
    full = too_full(memory_of_pools(apart.found, chosen))
    if figure is not None:
        draw_breakdown(apart.found, figure, row=chosen)
    if as_json:
        typer.echo(json.dumps(apart.json(), indent=2))
        raise typer.Exit(INFEASIBLE if full else 0)
    if full:
        typer.echo(f"{full}; the times below are those of GPUs with room for it\n")
    _print(apart.found, chosen, traffic, apart.watts)
    one, spared = apart.one, apart.spared
    facts = [*cached_rows(one.lengths, apart.uses, one.prefill_at.system.name, passes="prefill" in one.phases)]
    facts += [*prefill_delay_rows(apart.held), *hand_over_rows(apart.handed)]
    facts += [] if spared is None else spares_rows(spared[1], spared[0], failures)
    if facts:
        typer.echo("\nas it is served")
        print_table(facts, header=("what", "", "rests on"))
    if full:
        raise typer.Exit(INFEASIBLE)


class Apart(NamedTuple):
    """A design and its parts."""

    one: Designs
    found: Breakdown
    watts: pd.DataFrame | None  # of its passes; None where energy is not asked for
    uses: tuple[TierUse, ...]
    spared: tuple[list[tuple[str, int]], Spares] | None  # pools and their spares; None without an availability
    held: PrefillDelayEffect | None  # None where prompts are not held back
    handed: HandedOver | None  # None where no hand-over of caches was counted

    def json(self) -> ExplainJson:
        """The document of ``--json``."""
        spares = None if self.spared is None else self.spared[1]
        return explain_json(self.found, self.watts, self.uses, spares, self.held, self.handed)


def breakdown_of(
    design: pd.DataFrame | PhaseGrid, origin: Origin, *, energy: bool, wanted: Availability | None
) -> Apart:
    """Take one design apart."""
    one = design_of(design, 0, 0) if isinstance(design, PhaseGrid) else next(designs_of(design, origin))
    return Apart(
        one=one,
        found=breakdown(design, origin=origin),
        watts=energy_parts(design, origin=origin) if energy else None,
        uses=tiers_of_designs(one),
        spared=None if wanted is None else wanted.of_designs(one),
        held=prefill_delay_effect_of(one),
        handed=None
        if isinstance(design, PhaseGrid)
        else handed_over({str(name): value for name, value in design.iloc[0].items()}),
    )


def reuse_by_hand(share: float, tiers: str, phase: str, asked: Lengths) -> Reuse | None:
    """What caches hold of the prompts of a design by hand."""
    reuse = asked_reuse(share, tiers)
    if reuse is not None and phase == "decode":
        others = ", ".join(each for each in PHASES if each != phase)
        raise InputError(f"--cached is of prompts, and --phase is {phase}; allowed: {others}")
    if reuse is not None and asked.cached is not None:
        raise InputError("--cached: --traffic says what is cached already; name a traffic without")
    return reuse


def _given(option: str, value: str) -> str:
    if not value:
        raise InputError(f"a design by hand needs {option}, too")
    return value


def mapping_by_hand(at: Setup, attention: Sharding, ep: int) -> Sharding:
    """Mapping whose FFN shards over what attention leaves of a stage, with the fewest copies of experts."""
    if attention.stage_gpus % ep:
        raise InputError(f"--ep {ep} does not divide the {attention.stage_gpus} GPUs of a stage (tp*dp*pcp)")
    slots = least_redundant_slots(at.model, ep) or 0
    return replace(attention, tp_ffn=attention.stage_gpus // ep, ep=ep, redundant_slots=slots)


def by_hand(
    at: Setup, mapping: Sharding, asked: Lengths, phase: str, batch: int, hold_prompts: str = NOT_HELD
) -> pd.DataFrame | PhaseGrid:
    """One design: of an instance that does both phases the way to prefill that leaves decode the least TTL."""
    if phase not in PHASES:
        known = (*PHASES, *MORE_PHASES)
        raise InputError(f"--phase {phase!r} is unknown{nearest(phase, known)}; allowed: {', '.join(known)}")
    if phase != ServingMode.COLOCATED and hold_prompts != NOT_HELD:
        raise InputError(f"--hold-prompts is of --phase colocated; {phase} {_WHY_NOT.get(phase, 'is of one phase')}")
    if phase in ("prefill", "decode"):
        score = decode_grid if phase == "decode" else prefill_grid
        return score(at, mapping, asked, batch=[batch])
    serve = colocated if phase == ServingMode.COLOCATED else piggyback
    hold = parse_prefill_delay(hold_prompts)
    rows = serve(at, mapping, asked, ftl_limit=NO_LIMIT, options=Colocation(batch=(batch,), hold_steps=hold))
    if not hold:
        return rows
    waits = rows[rows["hold_steps"] == hold[0]]
    if not len(waits):
        raise InputError(
            f"--hold-prompts {hold_prompts}: no gain for this design; allowed: none, tuned, or with several attention "
            "ranks (--dp) and fewer than one answer a rank that ends in a step"
        )
    return waits.iloc[[0]].reset_index(drop=True)


def read_points(path: Path, case: str) -> pd.DataFrame:
    """Read a table of points: the frontier of a directory of results, a CSV file, or a block of ``points/``."""
    table = read_block(path) if path.suffix == ".parquet" else read_frontier(path).table
    if not case:
        return table
    known = list(dict.fromkeys(table["case"])) if "case" in table else []
    if case not in known:
        raise InputError(f"{path}: no case {case!r}{nearest(case, known)}; known: {', '.join(known) or 'none'}")
    return table[table["case"] == case]


def chosen_row(table: pd.DataFrame, row: int | None, least: float | None, *, best: bool) -> Any:
    """Index of the row that --row, --at-interactivity or --best means; ``InputError`` where it is none or several."""
    if sum((row is not None, least is not None, best)) > 1:
        raise InputError("--row, --best and --at-interactivity exclude each other")
    if row is not None:
        if row not in table.index:
            raise InputError(f"--row {row}: the table has rows {table.index.min()} to {table.index.max()}")
        return row
    enough = table if least is None else table[table[INTERACTIVITY] >= least]
    if not len(enough):
        fastest = f"; the fastest row has {table[INTERACTIVITY].max():.4g}" if len(table) else ""
        raise InputError(f"no row of {least or 0:g} tokens/s/user or more{fastest}")
    if len(table) > 1 and least is None and not best:
        raise InputError(f"{len(table)} rows: name one by --row, --best or --at-interactivity")
    return enough[THROUGHPUT].idxmax()


def _print(found: Breakdown, row: Any, traffic: str, watts: pd.DataFrame | None) -> None:
    point = point_of(found, row)
    typer.echo(heading(point | {"traffic": traffic} if traffic else point))
    for latency in LATENCIES:
        lines = lines_of(found, row, latency)
        if not lines:
            continue
        shares = resource_shares(found, row, latency)
        typer.echo(f"\n{latency_title(found, row, latency)}")
        legend = (f"{MARKS[name]} {RESOURCE_TEXT[name]} {share:.0%}" for name, share in shares.items() if share > 0)
        typer.echo("  ".join(legend))
        typer.echo(f"rests on: {shares_text(trust_shares(found, row, latency))}")
        longest = max(line.seconds for line in lines)
        rows = [
            (
                f"{line.operator} ({line.step})" if line.step else line.operator,
                time_text(line.seconds),
                f"{line.share:.1%}",
                _bar(line, longest),
                f"{line.light:.0%}",
                line.trust,
                entries_of(line.source) + " !" * bool(line.outside),
            )
            for line in lines
        ]
        header: tuple[str, ...] = ("part", "time", "share", "spent on", "of light", "label", "rests on")
        print_table(rows, header=header, numeric=(1, 2, 4))
        for outside in dict.fromkeys(f"{entries_of(line.source)}: {line.outside}" for line in lines if line.outside):
            typer.echo(f"! outside the range of {outside}")
    for title, lines_of_energy in energy_lines(watts) if watts is not None else ():
        typer.echo(f"\n{title}")
        head = ("class", "time", "of the time", "power", "energy", "of the energy")
        print_table(lines_of_energy, header=head, numeric=(1, 2, 3, 4, 5))
    for title, limit, parts in memory_lines(found, row):
        typer.echo(f"\n{title}")
        cells = [
            (name, f"{size / GB:.2f} GB", f"{size / limit:.1%}", "▓" * round(BAR * size / limit))
            for name, size in parts
        ]
        print_table(cells, header=("part", "size", "of the limit", ""), numeric=(1, 2))
    typer.echo("\nwhat a change of the hardware brings")
    changes = list(elasticity_rows(found, row))
    print_table(changes, header=("change", "TTL", "FTL", "tokens/s/GPU"), numeric=(1, 2, 3))
    typer.echo("\nwhat the parts rest on")
    header = ("entry", "equation", "label", "rows", "error", "p90", "place", "range")
    print_table(source_rows(found, row), header=header, numeric=(3, 4, 5), whole=(0, 1, 2))


def _bar(line: Line, longest: float) -> Text:
    """A bar as long as the part, in pieces as long as what its time goes by for."""
    bar, done, drawn = Text(), 0.0, 0
    for name in RESOURCES:
        done += line.by[name]
        cells = round(BAR * done / longest) - drawn
        bar.append(MARKS[name] * cells, style=RESOURCE_COLOURS[name])
        drawn += cells
    return bar
