"""``disagg-sim specs list | show | check | schema``: list shipped specs, show one, check files, print JSON Schemas.

Serving policies are shown beside the specs: they are no files, and their options stand in their code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.errors import MissingExtraError, SpecError, UnknownNameError, nearest
from disagg_sim.facts.efficiency import ASSUMED, SECTIONS, EfficiencySpec, Fit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import (
    check_file,
    load_efficiency,
    load_model,
    load_precision,
    load_profile,
    load_system,
    load_traffic,
)
from disagg_sim.facts.yaml_files import DIRECTORIES, list_specs, shown, spec_files
from disagg_sim.report.lines import (
    Line,
    model_lines,
    option_lines,
    precision_lines,
    profile_lines,
    system_lines,
    traffic_lines,
)
from disagg_sim.report.schemas import SCHEMAS, json_schema
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.units import US

#: The kind that is no file.
POLICY = "policy"
_KIND_HELP = "hardware, model, traffic, precision, profile or policy"


def list_(kind: Annotated[str, typer.Argument(help=_KIND_HELP)] = "") -> None:
    """List shipped specs with titles; 'policies' also lists every option."""
    known = _known_kind(kind) if kind else ""
    if known == POLICY:
        _print_policies("")
        return
    kinds = (known,) if known else tuple(_KINDS)
    rows = [(each, name, _KINDS[each][0](name).title) for each in kinds for name in list_specs(each)]
    lacking = ""
    if not known:
        try:
            from disagg_sim.simulation.policies.registry import policies, title_of

            rows += [(POLICY, name, title_of(policy)) for name, policy in policies().items()]
        except MissingExtraError as error:
            lacking = f"serving policies are not listed: {error}"
    print_table(rows, header=("kind", "name", "title"))
    if lacking:
        typer.echo(lacking)


def show(
    kind: Annotated[str, typer.Argument(help=_KIND_HELP)],
    name: Annotated[str, typer.Argument(help="name printed by 'specs list', or a YAML file; policy: or a Python file")],
    fits: Annotated[
        bool, typer.Option("--fits", help="hardware: also print every fitted efficiency, one per line")
    ] = False,
) -> None:
    """Show one spec with units and sources, or one serving policy with its options."""
    if (known := _known_kind(kind)) == POLICY:
        _print_policies(name)
        return
    load, lines = _KINDS[known]
    spec = load(name)
    print_table(lines(spec))
    if isinstance(spec, SystemSpec):
        efficiency = load_efficiency(spec.name)
        typer.echo()
        if efficiency is None:
            typer.echo("no fitted efficiencies: only the profile 'ideal' can be used")
        elif fits:
            print_table(_fit_rows(efficiency), header=_FIT_HEADER)
        else:
            print_table(_fit_summary(efficiency), header=("fitted operator", "rows", "engines", "measured on"))


def schema(command: Annotated[str, typer.Argument(help=f"{', '.join(SCHEMAS)}.")]) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    typer.echo(json.dumps(json_schema(command), indent=1))


def check(
    files: Annotated[list[Path] | None, typer.Argument(help="YAML files; default: all shipped ones")] = None,
) -> None:
    """Check spec files and report every fault. Runs nothing, so policies of files are not checked."""
    rows, faulty = [], []
    notes: dict[str, None] = {}
    for path in files or [path for kind in DIRECTORIES for path in spec_files(kind).values()]:
        try:
            kind = check_file(path)
            if kind == "sweep":
                load_sweep(str(path))
            elif kind == "scenario":
                from disagg_sim.scenario.spec import check_scenario  # its policies simulate, an extra

                notes |= dict.fromkeys(check_scenario(str(path)))
            rows.append(("ok", kind, shown(path)))
        except MissingExtraError as error:
            if files:
                raise
            notes[f"scenarios are not checked: {error}"] = None
        except SpecError as error:
            faulty.append(str(error))
    if rows:
        print_table(rows)
    for note in notes:
        typer.echo(note)
    if faulty:
        raise SpecError("\n".join(faulty))


_OPTION_HEADER = ("option", "default", "allowed", "meaning")


def _print_policies(name: str) -> None:
    """Print what one serving policy does, those of a file, or all, with the parts that each needs and its options; then
    the keys of ``run``.
    """
    from disagg_sim.scenario.options import load_policies
    from disagg_sim.simulation.policies.registry import policies, policy_named, title_of  # they simulate, an extra
    from disagg_sim.simulation.run_options import RunOptions
    from disagg_sim.techniques.availability.play import Failures

    chosen = dict(policies())
    if name.endswith(".py"):
        load_policies(name)
        chosen = {each: policy for each, policy in policies().items() if each not in chosen}
        if not chosen:
            raise SpecError(f"{name}: registers no serving policy")
    elif name:
        chosen = {name: type(policy_named(name))}
    for each, policy in chosen.items():
        typer.echo(": ".join(filter(None, (each, title_of(policy)))))
        typer.echo(f"takes the parts {', '.join(policy.needs)} of a deployment")
        print_table(option_lines(policy), header=_OPTION_HEADER)
        typer.echo()
    typer.echo("run: keys of a scenario that hold for every policy")
    print_table(option_lines(RunOptions), header=_OPTION_HEADER)
    typer.echo("run.failures: keys of what fails, beside its events")
    print_table(option_lines(Failures), header=_OPTION_HEADER)


_FIT_HEADER = ("operator", "engine", "fit", "error: median, p90", "of rows held out", "measured on")
#: Fields of every fitted row: not numbers of its form.
_PROVENANCE = frozenset(Fit.__dataclass_fields__)
#: Fields of a form that are times. [s]
_TIMES = (
    "t0",
    "latency",
    "seconds_per_token",
    "k_step",
    "k_split",
    "block_time",
    "serial_time",
    "ramp",
    "per_expert",
    "hop",
    "step",
)


def _origin(row: Any, efficiency: EfficiencySpec) -> str:
    if row.engine == ASSUMED:
        return "nothing (assumption)"
    return f"{row.inherited_from} (inherited)" if row.inherited_from else efficiency.system


def _fit_summary(efficiency: EfficiencySpec) -> Iterator[Line]:
    for section in SECTIONS:
        rows = getattr(efficiency, section)
        for origin in dict.fromkeys(_origin(row, efficiency) for row in rows):
            own = [row for row in rows if _origin(row, efficiency) == origin]
            engines = dict.fromkeys(f"{row.engine} {row.version}" for row in own)
            yield section, str(len(own)), ", ".join(engines), origin
    yield "data", "", f"{efficiency.data}, {efficiency.date}", ""


def _fit_rows(efficiency: EfficiencySpec) -> Iterator[Line]:
    for section in SECTIONS:
        for row in getattr(efficiency, section):
            said = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in _PROVENANCE}
            neutral = {field.name: field.default for field in fields(row)}
            terms = (_term(key, value) for key, value in said.items() if value != neutral[key])
            errors = (
                _errors(row.points, row.median_error, row.p90_error),
                _errors(row.held_out_points, row.held_out_median_error, row.held_out_p90_error),
            )
            yield section, f"{row.engine} {row.version}", " ".join(terms), *errors, _origin(row, efficiency)


def _errors(rows: int, median: float, p90: float) -> str:
    return f"{median:.1%}, {p90:.1%}" if rows else "-"


def _term(key: str, value: Any) -> str:
    if value is None:
        return f"{key}=-"
    if key in _TIMES:
        return f"{key}={value / US:g}us"
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"


_KINDS: dict[str, tuple[Callable[[str], Any], Callable[[Any], Iterable[Line]]]] = {
    "hardware": (load_system, system_lines),
    "model": (load_model, model_lines),
    "traffic": (load_traffic, traffic_lines),
    "precision": (load_precision, precision_lines),
    "profile": (load_profile, profile_lines),
}


def _known_kind(kind: str) -> str:
    """Normalise a kind, which may be given in the plural."""
    kinds = (*_KINDS, POLICY)
    known = {**{each: each for each in kinds}, **{f"{each}s": each for each in kinds}, "policies": POLICY}
    if kind not in known:
        raise UnknownNameError(f"unknown kind {kind!r}{nearest(kind, kinds)}; known: {', '.join(kinds)}")
    return known[kind]
