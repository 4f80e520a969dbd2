"""Compare two tables of fronts point by point: lost, new and moved points, change of area.

``compare_fronts`` knows no word of the domain: it is told which columns identify a point and which two are
wanted large. ``read_frontier`` and ``FRONTIER`` say so for the frontiers of a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_numeric_dtype

from disagg_sim.arrays import Floats
from disagg_sim.certainty.rows import ASSUMED
from disagg_sim.certainty.trust import COLUMN as TRUST
from disagg_sim.domain import MAPPING_COLUMNS, SHARDING
from disagg_sim.errors import InputError, given_twice, nearest, quoted
from disagg_sim.parquet import read_parquet
from disagg_sim.reading import heard, read_file, table_of
from disagg_sim.search.pareto import best_from, hypervolume
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT, with_unsaid
from disagg_sim.sweep.kv_links import LINK, LINK_BANDWIDTH
from disagg_sim.sweep.manifest import FRONTIER_FILE, MANIFEST, Manifest, is_as_written, read_manifest

_NOWHERE = "no such file or directory"
RTOL = 1e-6  # relative change of a value below which it has not moved [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRoles:
    """What the columns of a table of fronts are; all others are values that must stay."""

    group: tuple[str, ...]  # part the table into fronts
    key: tuple[str, ...]  # identify a point inside its front
    x: str  # both wanted large, above 0
    y: str
    derived: tuple[str, ...]  # follow from x, y and the key, so a change of theirs is told once: not compared

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that a table must have."""
        return (*self.group, *self.key, self.x, self.y)


#: The frontiers of a sweep. A configuration is its mappings, chunk and batches. How many instances of it are
#: deployed follows from the match of rates: of many counts with nearly the same throughput one wins by a hair,
#: so a small move of a rate turns 5 : 4 into 19 : 15, and the throughput tells whether that matters.
FRONTIER = ColumnRoles(
    group=("case", "mode"),
    key=(
        *(f"prefill_{name}" for name in (*MAPPING_COLUMNS, "batch")),
        *(f"decode_{name}" for name in (*SHARDING, "batch")),
    ),
    x=INTERACTIVITY,
    y=THROUGHPUT,
    derived=(
        *("ttl_s", "prefill_instances", "decode_instances", "total_gpus", "ctx_gen_gpu_ratio", "request_rate_per_s"),
        *("ftl_with_slot_wait_s", "usd_per_hour", "tdp_watts", TRUST),
    ),
)


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value of a point that changed."""

    column: str
    old: float | str
    new: float | str

    @property
    def relative(self) -> float:
        """``new/old - 1``; infinite from 0, NaN for text. [1]"""
        if isinstance(self.old, str) or isinstance(self.new, str):
            return math.nan
        return self.new / self.old - 1 if self.old else math.copysign(math.inf, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChange:
    """A point that was lost, is new, or moved."""

    key: tuple[tuple[str, Any], ...]  # (column, value), what identifies the point
    old: tuple[float, float] | None  # (x, y) before; None = not on the old front
    new: tuple[float, float] | None  # (x, y) now; None = not on the new front
    moves: tuple[ValueChange, ...]  # values beyond the tolerance, in order of the columns
    reached: bool  # lost or new: the other front has a point as good in x and y, within the tolerance

    @property
    def words_alone(self) -> bool:
        """Texts moved, and no number beyond the tolerance."""
        return bool(self.moves) and all(isinstance(move.old, str) or isinstance(move.new, str) for move in self.moves)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontChange:
    """One front against its baseline."""

    group: tuple[str, ...]  # values of the group columns
    points: tuple[int, int]  # before, now [1]
    areas: tuple[float, float]  # hypervolume from the origin, before and now [unit of x times unit of y]
    lost: tuple[PointChange, ...]
    new: tuple[PointChange, ...]
    moved: tuple[PointChange, ...]
    worse: bool  # some old point is out of reach of the new front, beyond the tolerance
    words_decide: bool  # whether a point of which text only moved makes the front another

    @property
    def area_change(self) -> float:
        """Relative change of the area. [1]"""
        return ValueChange("area", *self.areas).relative if self.areas[0] != self.areas[1] else 0.0

    @property
    def same_points(self) -> bool:
        """Nothing was lost, is new, or moved."""
        return not (self.lost or self.new or self.moved)

    @property
    def same(self) -> bool:
        """Nothing moved that decides, and points that came or went left the curve where it was (one of two equals)."""
        moved = any(self.words_decide or not point.words_alone for point in self.moved)
        return not moved and all(point.reached for point in (*self.lost, *self.new))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All fronts of two tables."""

    fronts: tuple[FrontChange, ...]

    @property
    def same(self) -> bool:
        """No front changed beyond the tolerance."""
        return all(front.same for front in self.fronts)

    @property
    def worse(self) -> bool:
        """Some front lost ground beyond the tolerance."""
        return any(front.worse for front in self.fronts)


@dataclass(frozen=True, eq=False)
class Frontier:
    """A frontier table and its cases, including those without any point."""

    path: Path
    table: pd.DataFrame
    cases: tuple[str, ...]
    manifest: Manifest | None  # of the sweep that wrote the table; None where none is at hand


def read_frontier(path: Path) -> Frontier:
    """Read a sweep's frontier, from its directory of results or from a CSV file."""
    results = Path(heard(path)).is_dir()
    file = path / FRONTIER_FILE if results else path
    manifest = read_manifest(path) if results else None
    try:
        data = read_file(file)
    except FileNotFoundError:
        if manifest and manifest.cases and FRONTIER_FILE not in manifest.tables:
            return Frontier(path, pd.DataFrame(columns=list(FRONTIER.required)), manifest.cases, manifest)
        said = f"holds no {FRONTIER_FILE}: not the results of a finished sweep" if results else _NOWHERE
        raise InputError(f"{path}: {said}") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if manifest and manifest.tables and not is_as_written(manifest, data):
        raise InputError(
            f"{file}: not the table that {MANIFEST} was written for: damaged, changed by hand, or of a run that was "
            "stopped; run the sweep again"
        )
    table = _read_table(file, data)
    if manifest is None:
        with suppress(InputError):  # of the directory of a table, where it was written for that table
            beside = read_manifest(file.parent)
            manifest = beside if beside and is_as_written(beside, data) else None
    planned = manifest.cases if manifest else ()
    return Frontier(path, table, tuple(dict.fromkeys([*planned, *table["case"]])), manifest)


def _read_table(file: Path, data: bytes) -> pd.DataFrame:
    try:
        table = with_unsaid(table_of(data, file))
        header = table_of(data, file, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
    except ValueError as error:
        raise InputError(f"{file}: not a table: {' '.join(str(error).split())}") from None
    if twice := given_twice(map(str, header)):
        raise InputError(f"{file}: column {quoted(twice)} occurs twice in the header")
    _check_table(file, table)
    return table.astype(dict.fromkeys(FRONTIER.group, str))


def _check_table(file: Path, table: pd.DataFrame) -> None:
    for name in FRONTIER.required:
        if name not in table:
            near = nearest(name, [str(column) for column in table.columns])
            raise InputError(f"{file}: missing column {name!r}{near}")
        if name in FRONTIER.group or not len(table):
            continue
        values = table[name]
        if not is_numeric_dtype(values):
            raise InputError(f"{file}: column {name!r} is not all numbers")
        if not np.isfinite(values).all() or (name in (FRONTIER.x, FRONTIER.y) and not (values > 0).all()):
            raise InputError(f"{file}: column {name!r} has a value that is empty, infinite or not above 0")


def compare_frontiers(old: Frontier, new: Frontier, *, rtol: float = RTOL) -> Comparison:
    """Compare the cases that both frontiers have."""
    if len(old.table) and len(new.table):
        only = [_own_columns(old, new), _own_columns(new, old)]
        if any(only):
            raise InputError(f"the tables have different columns: {'; '.join(filter(None, only))}")
    shared = [case for case in old.cases if case in new.cases]
    if not shared:
        raise InputError(f"{old.path} and {new.path} have no case in common{_names(old.cases)}")
    tables = [item.table[item.table["case"].isin(shared)] for item in (old, new)]
    return compare_fronts(*tables, roles=FRONTIER, rtol=rtol)


def _own_columns(item: Frontier, other: Frontier) -> str:
    own = [str(name) for name in item.table if name not in other.table and name != TRUST]  # older tables lack it
    return f"{item.path} alone has {', '.join(own)}" if own else ""


def require_same_cases(baseline: Frontier, current: Frontier) -> None:
    """Raise when one of two frontiers has a case that the other lacks."""
    for item, other, what in ((baseline, current, "not computed"), (current, baseline, "without a baseline")):
        missing = [case for case in item.cases if case not in other.cases]
        if missing:
            raise InputError(f"{other.path}: {len(missing)} of {len(item.cases)} cases {what}{_names(missing)}")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f": {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "") if shown else ""


def compare_fronts(old: pd.DataFrame, new: pd.DataFrame, *, roles: ColumnRoles, rtol: float = RTOL) -> Comparison:
    """Pair the points of two tables of fronts by key, front by front.

    Points of one front with the same key (there should be none) are paired in order of x. Returns fronts in order of
    first appearance, old ones first.
    """
    if not 0 <= rtol < 1:
        raise InputError(f"rtol {rtol} is out of range; allowed: 0 to below 1")
    groups = [_groups(table, roles) for table in (old, new)]
    names = dict.fromkeys([*groups[0], *groups[1]])
    empty = (old if len(old) else new).iloc[:0]
    before, now = groups
    return Comparison(
        tuple(_compare_front(name, before.get(name, empty), now.get(name, empty), roles, rtol) for name in names)
    )


def _groups(table: pd.DataFrame, roles: ColumnRoles) -> dict[tuple[str, ...], pd.DataFrame]:
    if not len(table):
        return {}
    parts = table.groupby(list(roles.group), sort=False, observed=True)
    return {tuple(str(part) for part in name): group for name, group in parts}


def _compare_front(
    group: tuple[str, ...], old: pd.DataFrame, new: pd.DataFrame, roles: ColumnRoles, rtol: float
) -> FrontChange:
    was, now = _places(old, roles), _places(new, roles)
    held, gained = _reached(was, now, rtol), _reached(now, was, rtol)
    olds, news = _rows(old, roles), _rows(new, roles)
    lost = [_point(key, roles, old=row, reached=bool(held[at])) for key, (at, row) in olds.items() if key not in news]
    more = [_point(key, roles, new=row, reached=bool(gained[at])) for key, (at, row) in news.items() if key not in olds]
    moved = []
    for key, (_, row) in olds.items():
        if key in news and (moves := _moves(row, news[key][1], roles, rtol)):
            moved.append(_point(key, roles, old=row, new=news[key][1], moves=moves))
    return FrontChange(
        group=group,
        points=(len(old), len(new)),
        areas=(hypervolume(*was), hypervolume(*now)),
        lost=tuple(lost),
        new=tuple(more),
        moved=tuple(moved),
        worse=not held.all(),
        words_decide=rtol <= RTOL,
    )


def _places(table: pd.DataFrame, roles: ColumnRoles) -> tuple[Floats, Floats]:
    """x and y of the points, shape (n,) each."""
    return table[roles.x].to_numpy(dtype=float), table[roles.y].to_numpy(dtype=float)


def _reached(points: tuple[Floats, Floats], front: tuple[Floats, Floats], rtol: float) -> NDArray[np.bool_]:
    """Which points the other front equals or beats in both quantities, within the tolerance; shape (n,)."""
    x, y = points
    return np.asarray(best_from(*front, at=x * (1 - rtol)) >= y * (1 - rtol))


def _rows(table: pd.DataFrame, roles: ColumnRoles) -> dict[tuple[Any, ...], tuple[int, dict[str, Any]]]:
    """Key, with its number among equals -> (place in the table, the row)."""
    rows = [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
    found: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
    for at in sorted(range(len(rows)), key=lambda at: float(rows[at][roles.x])):
        key, number = tuple(rows[at][name] for name in roles.key), 0
        while (*key, number) in found:
            number += 1
        found[*key, number] = (at, rows[at])
    return found


def _point(
    key: tuple[Any, ...],
    roles: ColumnRoles,
    *,
    old: dict[str, Any] | None = None,
    new: dict[str, Any] | None = None,
    moves: Iterable[ValueChange] = (),
    reached: bool = False,
) -> PointChange:
    places = [None if row is None else (float(row[roles.x]), float(row[roles.y])) for row in (old, new)]
    named = tuple(zip(roles.key, key[:-1], strict=True))
    return PointChange(key=named, old=places[0], new=places[1], moves=tuple(moves), reached=reached)


def _moves(old: dict[str, Any], new: dict[str, Any], roles: ColumnRoles, rtol: float) -> list[ValueChange]:
    moves = []
    fixed = {*roles.group, *roles.key, *roles.derived}
    for name in (name for name in old if name not in fixed):
        before, now = old[name], new[name]
        if isinstance(before, str) or isinstance(now, str):
            if _text(before) != _text(now):
                moves.append(ValueChange(name, _text(before), _text(now)))
        elif not np.isclose(now, before, rtol=rtol, atol=0.0, equal_nan=True):
            moves.append(ValueChange(name, float(before), float(now)))
    return moves


def _text(cell: Any) -> str:
    """A cell as text; an empty one, which a CSV file gives back as NaN, is the empty text."""
    return cell if isinstance(cell, str) else "" if np.isnan(cell) else str(cell)


def read_block(path: Path) -> pd.DataFrame:
    """Read a file of ``points/``, as a table whose rows can be timed again (``certainty.rows``).

    A block does not repeat what all rows of its case share: NVLink domain, traffic, link. These come from
    the ``frontier.csv`` of the same results, where it has the case. Returns columns of ``serving.points.COLUMNS`` with
    ``case`` in front, and those of ``certainty.rows.ASSUMED`` and of the link.
    """
    try:
        table = read_parquet(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no table of points: {' '.join(str(error).split())}") from None
    file = path.resolve().parent.parent.parent / FRONTIER_FILE
    if "case" not in table or not file.is_file():
        return table
    front = read_frontier(file).table.drop_duplicates("case").set_index("case")
    cases = table["case"].astype(str)
    if not cases.isin(front.index).all():
        return table
    shared = [name for name in (*ASSUMED, LINK, LINK_BANDWIDTH) if name in front and name not in table]
    return table.assign(**{name: cases.map(front[name]) for name in shared})
