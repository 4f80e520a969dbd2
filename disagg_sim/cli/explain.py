"""``disagg-sim explain``: break a row of results, or a design given by options, down to its fits."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import typer
from rich.text import Text

from disagg_sim.certainty.breakdown import Breakdown, breakdown
from disagg_sim.certainty.designs import Designs
from disagg_sim.certainty.energy import energy_parts
from disagg_sim.certainty.passes import LATENCIES, RESOURCES
from disagg_sim.certainty.rows import Origin, design_of, designs_of
from disagg_sim.certainty.trust import shares_text
from disagg_sim.choices import MORE_PHASES, NO_DELAY, PHASES
from disagg_sim.cli.explain_pools import explain_pool
from disagg_sim.cli.plan_inputs import asked_reuse
from disagg_sim.cli.tables import INFEASIBLE, print_table
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.errors import InputError, nearest
from disagg_sim.facts.load import load_failures, load_model, load_system
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.planning.design import Availability
from disagg_sim.planning.question import usual_precision
from disagg_sim.question import ExplainQuestion, LaunchQuestion, changed_flags
from disagg_sim.report.breakdown import (
    RESOURCE_COLOURS,
    RESOURCE_TEXT,
    Line,
    elasticity_rows,
    energy_lines,
    entries_of,
    heading,
    latency_title,
    lines_of,
    memory_lines,
    memory_of_pools,
    point_of,
    resource_shares,
    source_rows,
    time_text,
    too_full,
    trust_shares,
)
from disagg_sim.report.documents import explain_json
from disagg_sim.report.plan_facts import cached_rows, hand_over_rows, prefill_delay_rows, spares_rows, technique_rows
from disagg_sim.report.roofline import draw_breakdown
from disagg_sim.report.schemas import ExplainJson
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.mappings import least_redundant_slots
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.colocation import Colocation
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT
from disagg_sim.sweep.compare import read_block, read_frontier
from disagg_sim.sweep.kv_links import HandedOver, handed_over
from disagg_sim.techniques.availability.law import Spares
from disagg_sim.techniques.prefill_delay.law import parse_prefill_delay
from disagg_sim.techniques.prefill_delay.plan_effect import NO_LIMIT, PrefillDelayEffect, prefill_delay_effect_of
from disagg_sim.techniques.prefix.plan import TierUse, tiers_of_designs
from disagg_sim.techniques.speculation.facts_asked import asked_speculation
from disagg_sim.units import GB
from disagg_sim.workload.lengths import Lengths, lengths, uneven, with_cached
from disagg_sim.workload.named import lengths_named, reuse_text

#: Fields that choose a row of a table, and fields for both rows and designs given by options.
OF_ROWS = ("row", "case", "best", "at_interactivity")
OF_BOTH = ("results", "traffic", "figure", "energy", "availability", "failures", "as_json")
OF_TABLE = "chooses a row of a table of results, and a design by hand has none; leave it out, or name the table"
#: Fields that one further pool alone takes.
OF_POOLS = {"encode": ("images",), "attention_ffn": ("ffn_gpus", "microbatches")}
#: Why another phase has no prefill delay.
_WHY_NOT = {"piggyback": "has chunks in decode steps, whose waits plans and simulations count"}
#: Length of the longest bar, in characters.
BAR = 30
#: Character of each resource in a bar, for screens without colours.
MARKS = {"compute": "█", "hbm": "▓", "nvlink": "▒", "nic": "░", "latency": "─", "host": "h", "waiting": "·"}


def explain(asked: ExplainQuestion) -> None:
    """Break a design down, print and draw it; exit with code 2 if its memory is too small."""
    if asked.results is None and asked.phase in MORE_PHASES:
        explain_pool(asked, *design_by_hand(asked)[:3])
        return
    apart = explained(asked)
    full = too_full(memory_of_pools(apart.found, apart.row))
    if asked.figure is not None:
        draw_breakdown(apart.found, asked.figure, row=apart.row)
    if asked.as_json:
        typer.echo(json.dumps(apart.json(), indent=2))
        raise typer.Exit(INFEASIBLE if full else 0)
    if full:
        typer.echo(f"{full}; the times below are those of GPUs with room for it\n")
    _print(apart)
    one, spared = apart.one, apart.spared
    facts = [*cached_rows(one.lengths, apart.uses, one.prefill_at.system.name, passes="prefill" in one.phases)]
    facts += [*prefill_delay_rows(apart.held), *hand_over_rows(apart.handed), *technique_rows(one.at)]
    facts += [] if spared is None else spares_rows(spared[1], spared[0], asked.failures)
    if facts:
        typer.echo("\nas it is served")
        print_table(facts, header=("what", "", "rests on"))
    if full:
        raise typer.Exit(INFEASIBLE)


class Apart(NamedTuple):
    """A design and its breakdown."""

    one: Designs
    found: Breakdown
    row: Any  # of the table; 0 for a design given by options
    traffic: str  # in the heading; "" = the traffic of the row
    watts: pd.DataFrame | None  # of its passes; None where energy is not asked for
    uses: tuple[TierUse, ...]
    spared: tuple[list[tuple[str, int]], Spares] | None  # pools and their spares; None without an availability
    held: PrefillDelayEffect | None  # None without prefill delay
    handed: HandedOver | None  # None without a KV link in the sweep

    def json(self) -> ExplainJson:
        """Make the document of ``--json``."""
        spares = None if self.spared is None else self.spared[1]
        return explain_json(self.found, self.watts, self.uses, spares, self.held, self.handed)


def explained(asked: ExplainQuestion) -> Apart:
    """Break down the row of a table, or a design given by options."""
    row: Any = 0
    design: pd.DataFrame | PhaseGrid
    if asked.results is None:
        at, mapping, law, traffic = design_by_hand(asked)
        law = uneven(law, asked.rank_imbalance)
        design, origin = _scored(asked, at, mapping, law), Origin(lengths=law)
    else:
        _require_one(asked)
        by_hand = {each.name for each in fields(asked)} - {*OF_ROWS, *OF_BOTH}
        if flags := changed_flags(asked, *by_hand):
            raise InputError(f"{', '.join(flags)}: of a design by hand; a table says that of each row")
        origin, traffic = Origin(lengths=lengths_named(asked.traffic) if asked.traffic else None), asked.traffic
        design = chosen_row(read_points(asked.results, asked.case), asked)
        row = design.index[0]
    one = design_of(design, 0, 0) if isinstance(design, PhaseGrid) else next(designs_of(design, origin))
    spared = None
    if asked.availability is not None:
        spared = Availability(target=asked.availability, failing=load_failures(asked.failures)).of_designs(one)
    return Apart(
        one=one,
        found=breakdown(design, origin=origin),
        row=row,
        traffic=traffic,
        watts=energy_parts(design, origin=origin) if asked.energy else None,
        uses=tiers_of_designs(one),
        spared=spared,
        held=prefill_delay_effect_of(one),
        handed=None
        if isinstance(design, PhaseGrid)
        else handed_over({str(name): value for name, value in design.iloc[0].items()}),
    )


def _require_one(asked: ExplainQuestion) -> None:
    """Refuse a question with neither or both of a table and a design given by options."""
    if (asked.results is None) == (not asked.model):
        raise InputError("name either a table of results, or a design by --model and --system")


def design_by_hand(asked: ExplainQuestion) -> tuple[Setup, Sharding, Lengths, str]:
    """Read setup, mapping, lengths and name of the traffic of a design given by options."""
    _require_one(asked)
    law = lengths_named(asked.traffic) if asked.traffic else lengths(asked.isl, asked.osl)
    if flags := changed_flags(asked, *OF_ROWS):
        raise InputError(f"{', '.join(flags)} {OF_TABLE}")
    for pool, names in OF_POOLS.items():
        if asked.phase != pool and (flags := changed_flags(asked, *names)):
            raise InputError(f"{', '.join(flags)}: only --phase {pool} takes it, and --phase is {asked.phase}")
    if not asked.system:
        raise InputError("a design by hand needs --system, too")
    model, system = load_model(asked.model), load_system(asked.system)
    drafter = asked_speculation(model.name, asked.speculate, asked.acceptance)
    precision = asked.precision or usual_precision(model, system)
    at = setup(model, system, precision, asked.profile, asked.engine or None, drafter, asked.techniques)
    attention = Sharding(tp_attn=asked.tp, dp_attn=asked.dp, pp=asked.pp, dcp=asked.dcp, pcp=asked.pcp)
    mapping = mapping_by_hand(at, attention, asked.ep)
    reuse = asked_reuse(asked.cached, asked.tiers)
    if reuse is None:
        return at, mapping, law, asked.traffic
    if asked.phase == "decode":
        others = ", ".join(each for each in PHASES if each != asked.phase)
        raise InputError(f"--cached is of prompts, and --phase is {asked.phase}; allowed: {others}")
    if law.cached is not None:
        raise InputError("--cached: --traffic says what is cached already; name a traffic without")
    name = asked.traffic or f"{asked.isl}/{asked.osl}"
    return at, mapping, with_cached(law, reuse), f"{name}/{reuse_text(reuse)}"


def mapping_by_hand(at: Setup, attention: Sharding, ep: int) -> Sharding:
    """Shard the FFN over the GPUs of an attention stage, with the fewest redundant experts."""
    if attention.stage_gpus % ep:
        raise InputError(f"--ep {ep} does not divide the {attention.stage_gpus} GPUs of a stage (tp*dp*pcp)")
    slots = least_redundant_slots(at.model, ep) or 0
    return replace(attention, tp_ffn=attention.stage_gpus // ep, ep=ep, redundant_slots=slots)


def _scored(asked: ExplainQuestion, at: Setup, mapping: Sharding, law: Lengths) -> pd.DataFrame | PhaseGrid:
    """Score one design; an instance of both phases gets the prefill batch with the lowest TTL."""
    phase = asked.phase
    if phase in MORE_PHASES:
        raise InputError(f"--phase {phase} is printed by disagg-sim explain alone; allowed: {', '.join(PHASES)}")
    if phase not in PHASES:
        known = (*PHASES, *MORE_PHASES)
        raise InputError(f"--phase {phase!r} is unknown{nearest(phase, known)}; allowed: {', '.join(known)}")
    if phase != ServingMode.COLOCATED and asked.hold_prompts != NO_DELAY:
        raise InputError(f"--hold-prompts is of --phase colocated; {phase} {_WHY_NOT.get(phase, 'is of one phase')}")
    if phase in ("prefill", "decode"):
        score = decode_grid if phase == "decode" else prefill_grid
        return score(at, mapping, law, batch=[asked.batch])
    serve = colocated if phase == ServingMode.COLOCATED else piggyback
    hold = parse_prefill_delay(asked.hold_prompts)
    rows = serve(at, mapping, law, ftl_limit=NO_LIMIT, options=Colocation(batch=(asked.batch,), hold_steps=hold))
    if not hold:
        return rows
    waits = rows[rows["hold_steps"] == hold[0]]
    if not len(waits):
        raise InputError(
            f"--hold-prompts {asked.hold_prompts}: no gain for this design; allowed: none, tuned, or with several "
            "attention ranks (--dp) and fewer than one answer a rank that ends in a step"
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


def chosen_row(table: pd.DataFrame, asked: ExplainQuestion | LaunchQuestion) -> pd.DataFrame:
    """Choose the row by --row, --at-interactivity or --best; refuse none or several."""
    row, least = asked.row, asked.at_interactivity
    if len(changed_flags(asked, "row", "at_interactivity", "best")) > 1:
        raise InputError("--row, --best and --at-interactivity exclude each other")
    if row is not None:
        if row not in table.index:
            raise InputError(f"--row {row}: the table has rows {table.index.min()} to {table.index.max()}")
        return table.loc[[row]]
    enough = table if least is None else table[table[INTERACTIVITY] >= least]
    if not len(enough):
        fastest = f"; the fastest row has {table[INTERACTIVITY].max():.4g}" if len(table) else ""
        raise InputError(f"no row of {least or 0:g} tokens/s/user or more{fastest}")
    if len(table) > 1 and least is None and not asked.best:
        raise InputError(f"{len(table)} rows: name one by --row, --best or --at-interactivity")
    return table.loc[[enough[THROUGHPUT].idxmax()]]


def _print(apart: Apart) -> None:
    found, row, watts = apart.found, apart.row, apart.watts
    point = point_of(found, row)
    typer.echo(heading(point | {"traffic": apart.traffic} if apart.traffic else point))
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
    """Draw the bar of a part, in pieces by resource."""
    bar, done, drawn = Text(), 0.0, 0
    for name in RESOURCES:
        done += line.by[name]
        cells = round(BAR * done / longest) - drawn
        bar.append(MARKS[name] * cells, style=RESOURCE_COLOURS[name])
        drawn += cells
    return bar
