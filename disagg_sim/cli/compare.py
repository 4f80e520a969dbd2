"""``disagg-sim check``: compare frontiers with a baseline. ``disagg-sim compare``: show how two sweeps differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg_sim.atomic import write_text
from disagg_sim.cli.tables import print_table
from disagg_sim.report.documents import compare_json
from disagg_sim.report.words import mapping_text
from disagg_sim.sweep.compare import (
    FRONTIER,
    Comparison,
    FrontChange,
    Frontier,
    PointChange,
    ValueChange,
    compare_frontiers,
    read_frontier,
    require_same_cases,
)
from disagg_sim.sweep.digests import Change

MOVED = 1  # exit code of ``check``, and of nothing else
STANDARD_OUTPUT = Path("-")  # JSON goes there in place of words
SHOWN = 10  # changed points printed of each front, and changed inputs, unless all are asked for [1]

_Results = Annotated[Path, typer.Argument(metavar="DIR", help="Results of a sweep, or a frontier.csv.")]
_Rtol = Annotated[
    float, typer.Option(help="Relative changes up to this count as equal; above 1e-6 texts may change, too.")
]
_Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE|-", help="Write every change as JSON; - prints it.")
]
_All = Annotated[bool, typer.Option("--all", help=f"Print all changed points, not the {SHOWN} largest of a case.")]


def check(
    results: _Results,
    baseline: Annotated[Path, typer.Option(metavar="DIR", help="Baseline: results of a sweep, or a frontier.csv.")],
    rtol: _Rtol = 1e-6,
    allow_better: Annotated[
        bool, typer.Option("--allow-better", help="Fail only where the frontier lost ground.")
    ] = False,
    json_file: _Json = None,
    everything: _All = False,
) -> None:
    """Compare the frontiers of a sweep with a baseline; exit 1 if a point was lost, added or moved.

    If a curve moved, the inputs that differ are listed: values of spec files, options, versions.

    Exit code 0: nothing changed. 1: points were lost, added, or moved beyond the tolerance. 2: the comparison is not
    possible, for example without a baseline. 3: a bug, or the output could not be written.
    """
    old, new = read_frontier(baseline), read_frontier(results)
    require_same_cases(old, new)
    comparison = _compared(old, new, (baseline, results), rtol=rtol, json_file=json_file, everything=everything)
    failed = comparison.worse if allow_better else not comparison.same
    if json_file != STANDARD_OUTPUT:
        typer.echo(f"{'FAILED' if failed else 'ok'}: {_verdict(comparison)} (baseline {baseline}, rtol {rtol:g})")
    if failed:
        raise typer.Exit(MOVED)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="First results: directory of a sweep, or a frontier.csv.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Second results: the same.")],
    rtol: _Rtol = 1e-6,
    json_file: _Json = None,
    everything: _All = False,
) -> None:
    """Show lost, new and moved points from A to B, in the cases that both have."""
    old, new = read_frontier(a), read_frontier(b)
    comparison = _compared(old, new, (a, b), rtol=rtol, json_file=json_file, everything=everything)
    if json_file == STANDARD_OUTPUT:
        return
    for item, other in ((old, new), (new, old)):
        for case in (case for case in item.cases if case not in other.cases):
            typer.echo(f"only in {item.path}: {case}")
    typer.echo(f"{_verdict(comparison)} (from {a} to {b}, rtol {rtol:g})")


def _compared(
    old: Frontier, new: Frontier, paths: tuple[Path, Path], *, rtol: float, json_file: Path | None, everything: bool
) -> Comparison:
    """Compare two results, write the JSON into its file, and print it, or else what changed and by which inputs."""
    comparison, causes = compare_frontiers(old, new, rtol=rtol), causes_of(old, new)
    made = compare_json(comparison, causes, baseline=paths[0], results=paths[1], rtol=rtol)
    text = json.dumps(made, indent=1, allow_nan=False)
    if json_file == STANDARD_OUTPUT:
        typer.echo(text)
        return comparison
    if json_file is not None:
        write_text(json_file, f"{text}\n")
    _print(comparison, everything=everything)
    if not comparison.same:
        _print_causes(old, new, causes, everything=everything)
    return comparison


def _verdict(comparison: Comparison) -> str:
    fronts = comparison.fronts
    total = f"{len(fronts)} {'frontier' if len(fronts) == 1 else 'frontiers'}"
    changed = sum(not front.same for front in fronts)
    if not changed:
        words = sum(len(front.moved) for front in fronts)
        told = f", but texts of {words} {'point' if words == 1 else 'points'}" if words else ""
        return f"{total} unchanged{told}"
    counts = [
        f"{sum(len(points) for points in found)} {name}"
        for name, found in (
            ("lost", [front.lost for front in fronts]),
            ("new", [front.new for front in fronts]),
            ("moved", [front.moved for front in fronts]),
        )
    ]
    ground = "some lost ground" if comparison.worse else "none lost ground"
    return f"{changed} of {total} changed, {ground}; points {', '.join(counts)}"


def _print(comparison: Comparison, *, everything: bool) -> None:
    for front in comparison.fronts:
        if front.same_points:
            continue
        ranked = sorted(_changes(front), key=lambda change: -_size(change[1]))
        shown = ranked if everything else ranked[:SHOWN]
        typer.echo(
            f"{' '.join(front.group)}: {front.points[0]} -> {front.points[1]} points, "
            f"area {_percent(front.area_change)}; "
            f"{len(front.lost)} lost, {len(front.new)} new, {len(front.moved)} moved"
        )
        print_table(
            [["", name, *_cells(point)] for name, point in shown],
            header=["", "", "decode", "prefill", "tokens/s/user", "tokens/s/GPU", "also moved"],
        )
        if len(ranked) > len(shown):
            typer.echo(f"  and {len(ranked) - len(shown)} more (--all prints them)")
        typer.echo("")


def causes_of(old: Frontier, new: Frontier) -> list[Change] | None:
    """List the inputs that differ between two results; None if one of them has no record of its inputs."""
    if old.manifest is None or new.manifest is None or not (old.manifest.inputs and new.manifest.inputs):
        return None
    return old.manifest.changes(new.manifest)


def _print_causes(old: Frontier, new: Frontier, causes: list[Change] | None, *, everything: bool) -> None:
    """Print a line for every input that differs."""
    if causes is None:
        mute = [str(item.path) for item in (old, new) if item.manifest is None or not item.manifest.inputs]
        typer.echo(f"inputs: not compared, as {' and '.join(mute)} has no manifest.json with inputs (docs/ci.md)")
    elif not causes:
        typer.echo("inputs: the same specs, options, versions and code on both sides")
    else:
        typer.echo(f"inputs: {len(causes)} {'value differs' if len(causes) == 1 else 'values differ'}")
        shown = causes if everything else causes[:SHOWN]
        for cause in shown:
            typer.echo(f"  {cause}")
        if len(causes) > len(shown):
            typer.echo(f"  and {len(causes) - len(shown)} more (--all prints them)")
    typer.echo("")


def _changes(front: FrontChange) -> Iterator[tuple[str, PointChange]]:
    for name, points in (("lost", front.lost), ("new", front.new)):
        yield from ((f"{name}, curve kept" if point.reached else name, point) for point in points)
    yield from (("moved, text only" if point.words_alone else "moved", point) for point in front.moved)


def _size(point: PointChange) -> float:
    """Largest relative change of a point's numbers; infinite for lost and new points, so that they come first. [1]"""
    if not point.moves:
        return 0.0 if point.reached else math.inf
    return max((abs(move.relative) for move in point.moves if not math.isnan(move.relative)), default=0.0)


def _cells(point: PointChange) -> list[str]:
    """Format both mappings, both quantities of the frontier, and the other columns that moved, the largest first."""
    key: dict[str, Any] = dict(point.key)
    chunk = f" chunk {key['prefill_chunk_tokens']}" if key["prefill_chunk_tokens"] else ""
    decode = f"{mapping_text(key, 'decode')} batch {key['decode_batch']}"
    prefill = f"{mapping_text(key, 'prefill')}{chunk} batch {key['prefill_batch']}"
    pairs = [
        (None if point.old is None else point.old[at], None if point.new is None else point.new[at]) for at in (0, 1)
    ]
    others = [move for move in point.moves if move.column not in (FRONTIER.x, FRONTIER.y)]
    others.sort(key=lambda move: 0.0 if math.isnan(move.relative) else -abs(move.relative))
    more = f", {len(others) - 1} more" if len(others) > 1 else ""
    return [decode, prefill, *(_pair(*pair) for pair in pairs), ", ".join(_move(move) for move in others[:1]) + more]


def _pair(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return f"{old if new is None else new:.5g}"
    if old == new:
        return f"{old:.5g}"
    return f"{old:.5g} -> {new:.5g} ({_percent(new / old - 1)})"


def _move(move: ValueChange) -> str:
    if isinstance(move.old, str) or isinstance(move.new, str):
        long = max(len(str(move.old)), len(str(move.new))) > 20
        return f"{move.column} changed" if long else f"{move.column} {move.old or '-'} -> {move.new or '-'}"
    return f"{move.column} {move.old:.5g} -> {move.new:.5g} ({_percent(move.relative)})"


def _percent(relative: float) -> str:
    """Format a relative change in percent."""
    return "unchanged" if relative == 0 else f"{100 * relative:+.3g} %"
