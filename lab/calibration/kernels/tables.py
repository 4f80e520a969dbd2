"""Read kernel tables: CSV to checked rows, excluded rows, and the split into fitted and held-out shapes.

The columns of each form of table are in ``tables.yaml``. A file with a column ``form`` holds tables of several forms,
one below the other; cells of columns that a row's form lacks are empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.errors import DisaggSimError, given_twice, nearest, quoted
from disagg_sim.facts.efficiency import LIBRARIES
from disagg_sim.facts.yaml_files import canonical_name, list_specs, read_mapping, shown
from disagg_sim.parquet import read_parquet
from disagg_sim.reading import read_file, read_table, table_of, unpacked
from disagg_sim.units import US
from lab.calibration.files import kept_from_fits
from lab.calibration.kernels.conditions import ALLOWED, Condition, ConditionError, parse_condition
from lab.calibration.names import names

#: Words of every form.
IDENTITY = ("system", "framework", "version", "kernel_source")
#: Column of the measurement. [us]
LATENCY = "latency_us"
#: Column that names the form of each row where a file holds several.
FORM = "form"
#: Column that any table may have: a name of each row, by which verdicts tell it; else its line does.
ROW_ID = "row_id"


@dataclass(frozen=True, slots=True)
class TableForm:
    """Columns of one kind of table."""

    name: str
    words: tuple[str, ...]  # columns of text beside IDENTITY
    sizes: tuple[str, ...]  # whole numbers
    key: tuple[str, ...]  # columns of the shape by which rows are held out

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns."""
        return (*IDENTITY, *self.words, *self.sizes, LATENCY)


#: Name -> form.
FORMS = {
    name: TableForm(name, tuple(row["words"]), tuple(row["sizes"]), tuple(row.get("key", row["sizes"])))
    for name, row in read_mapping(Path(__file__).with_suffix(".yaml")).items()
}
#: Sizes that may be zero; all others start at 1.
MAY_BE_ZERO = frozenset({"sms", "past_len", "rank0_num_tokens", "past_tokens", "shared_index"})

#: Faults of a file that are listed one by one; more are counted.
LISTED_FAULTS = 20
#: Largest size that a row may have: whole numbers up to it are exact. [1]
LARGEST_SIZE = 2**53
_EXCLUDE_COLUMNS = ("file", "system", "framework", "condition", "reason")
#: Largest number of a table: sizes, times and tokens are far below. [1]
MOST_NUMBER = 1e15


class TableError(DisaggSimError):
    """A table of measurements is wrong: file, row or column, value, what is allowed."""


@dataclass(frozen=True)
class KernelTable:
    """Rows of one CSV.

    ``rows`` has the columns of the form (``system`` spelt as in ``hw_specs/``, words and sizes as written) and

    * ``row``: line of the file, the header being line 1; ``row_id``: its name, where the file gives one;
    * ``latency``: the measurement [s], NaN where the file has none that can be used;
    * ``fault``: what is wrong with the row, "" where nothing is (always "" from a strict reader);
    * ``masked``: reason of the mask, "" where none applies;
    * ``held_out``: whether the row's shape is kept from the fits.
    """

    form: TableForm
    path: Path
    sha256: str
    rows: pd.DataFrame


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A line of the file of known bad rows: rows of ``form`` that fulfil ``condition``."""

    form: str
    condition: Condition
    reason: str


def read_tables(path: Path, *, exclusions: Sequence[Exclusion] = (), strict: bool = True) -> tuple[KernelTable, ...]:
    """Read the tables of a CSV of kernel measurements, times in s: one, or one for each word of a column ``form``."""
    raw = read_cells(path)
    sha256 = hashlib.sha256(read_file(path)).hexdigest()
    raw.index = pd.RangeIndex(2, len(raw) + 2)  # line numbers
    if FORM not in raw.columns:
        return (_table(path, sha256, raw, _form(path, list(raw.columns)), exclusions, strict),)
    unknown = sorted(set(raw[FORM]) - set(FORMS))
    if unknown:
        raise TableError(
            f"{shown(path)}: no form {quoted(unknown[0])}{nearest(unknown[0], FORMS)}; known: {', '.join(FORMS)}"
        )
    tables = []
    for name, rows in raw.groupby(FORM, sort=False):
        form = FORMS[str(name)]
        missing = [column for column in form.columns if column not in raw.columns]
        if missing:
            raise TableError(f"{shown(path)}: missing column {missing[0]!r} of a {form.name} table")
        tables.append(_table(path, sha256, rows, form, exclusions, strict))
    return tuple(tables)


def read_all(
    paths: Sequence[Path],
    exclude: Path | None,
    *,
    strict: bool = True,
    faults_of: Callable[[KernelTable], Sequence[str]] = lambda _: (),
) -> list[KernelTable]:
    """Read the tables of several files, without the rows to exclude; raise one error with the faults of all."""
    exclusions = read_exclusions(exclude) if exclude else ()
    tables: list[KernelTable] = []
    faults: list[str] = []
    for path in paths:
        try:
            for table in read_tables(path, exclusions=exclusions, strict=strict):
                faults += faults_of(table)
                tables.append(table)
        except TableError as error:
            faults += str(error).splitlines()
    if faults:
        raise TableError("\n".join(faults))
    return tables


def _table(
    path: Path, sha256: str, raw: pd.DataFrame, form: TableForm, exclusions: Sequence[Exclusion], strict: bool
) -> KernelTable:
    """Rows of one form, indexed by their line, checked."""
    rows, faults = _checked(raw, form)
    rows["masked"] = _mask(rows, form, exclusions)
    rows["system"] = rows["system"].map(spec_name)
    rows["held_out"] = held_out(form, rows)
    rows.loc[rows["fault"] != "", "latency"] = np.nan
    if strict and faults:
        more = [f"and {len(faults) - LISTED_FAULTS} more"] if len(faults) > LISTED_FAULTS else []
        raise TableError("\n".join([*(f"{shown(path)}: {f}" for f in faults[:LISTED_FAULTS]), *more]))
    return KernelTable(form, path, sha256, rows)


def read_exclusions(path: Path) -> tuple[Exclusion, ...]:
    """The mask: CSV with the columns file, system, framework (both for the reader), condition, reason."""
    lines = read_cells(path)
    if tuple(lines.columns) != _EXCLUDE_COLUMNS:
        found = quoted(", ".join(map(str, lines.columns)))
        raise TableError(f"{shown(path)}: columns must be {', '.join(_EXCLUDE_COLUMNS)}, not {found}")
    masks = []
    for number, line in enumerate(lines.itertuples(index=False), start=2):
        name = str(line.file).removesuffix(".csv")
        if name not in FORMS:
            raise TableError(f"{shown(path)}: line {number}: no table {quoted(name)}{nearest(name, FORMS)}")
        form, text = FORMS[name], str(line.condition)
        try:
            rows = parse_condition(text, words=(*IDENTITY, *form.words), numbers=(*form.sizes, LATENCY))
        except ConditionError as error:
            where = f"{shown(path)}: line {number}: condition {quoted(text)} of {name}"
            raise TableError(f"{where}: {error}; a condition is made of {ALLOWED}") from None
        masks.append(Exclusion(name, rows, str(line.reason)))
    return tuple(masks)


def spec_name(system: str) -> str:
    """Translate the name of a system in a table to that of its spec."""
    return str(names()["table_systems"].get(system, canonical_name(system)))


def held_out(form: TableForm, rows: pd.DataFrame) -> Any:
    """Whether each row's shape is kept from the fits, by the SHA-256 of ``form|key values``: alike for every system,
    framework and format, in every file and every run.
    """
    values = zip(*(rows[name].astype(str) for name in form.key), strict=True)
    keys = pd.Series(["|".join(each) for each in values], index=rows.index, dtype=str)
    side = {key: kept_from_fits(f"{form.name}|{key}") for key in keys.unique()}
    return keys.map(side).astype(bool)


def require_numbers(
    path: Path,
    rows: pd.DataFrame,
    columns: Sequence[str],
    *,
    least: float = 0.0,
    most: float = MOST_NUMBER,
    whole: bool = False,
) -> pd.DataFrame:
    """The rows with some columns as numbers; ``TableError`` for the first value that cannot be meant."""
    found = {}
    for name in columns:
        values = pd.to_numeric(rows[name], errors="coerce").astype(float)
        wrong = ~(values.between(least, most) & ((values == values.round()) | (not whole))).to_numpy()
        if wrong.any():
            row = int(np.argmax(wrong))
            allowed = f"{'whole ' * whole}numbers from {least:g} to {most:g}"
            value = quoted(str(rows[name].iloc[row]))
            raise TableError(f"{shown(path)}: row {row + 1}: {name} is {value}; allowed: {allowed}")
        found[name] = values.astype(int) if whole else values
    return rows.assign(**found)


@contextmanager
def as_table_faults(path: Path, what: str = "a table") -> Iterator[None]:
    """Make what keeps a file from being read as ``what`` it is one line of ``TableError``."""
    try:
        yield
    except FileNotFoundError:
        raise TableError(f"{shown(path)}: no such file") from None
    except OSError as error:
        raise TableError(f"{shown(path)}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # pandas' parser errors are such
        raise TableError(f"{shown(path)}: not {what}: {' '.join(str(error).split())}") from None


def read_measured(path: Path, columns: Sequence[str], what: str) -> pd.DataFrame:
    """Read a table of measurements of ``what``, CSV or Parquet, which must have some columns."""
    with as_table_faults(path):
        table = read_parquet(path) if path.suffix == ".parquet" else read_table(path, keep_default_na=False)
    if missing := [column for column in columns if column not in table]:
        near = nearest(missing[0], table.columns)
        raise TableError(f"{shown(path)}: missing column {missing[0]!r} of {what}{near}")
    return table


def read_cells(path: Path) -> pd.DataFrame:
    """Read all cells of a CSV as text; reject a header that names a column twice."""
    with as_table_faults(path):
        data = unpacked(read_file(path))
        cells = table_of(data, path, dtype=str, keep_default_na=False)
        header = table_of(data, path, dtype=str, keep_default_na=False, header=None, nrows=1).iloc[0]
    if twice := given_twice(map(str, header)):
        raise TableError(f"{shown(path)}: column {quoted(twice)} occurs twice in the header")
    return cells


def form_of(columns: Iterable[str]) -> TableForm | None:
    """The form that shares most columns with a table; None when it has less than half of every form's own."""
    present = set(columns) - {*IDENTITY, LATENCY}

    def likeness(form: TableForm) -> float:
        own = {*form.words, *form.sizes}
        return len(own & present) / len(own | present)

    best = max(FORMS.values(), key=likeness)
    return best if likeness(best) >= 0.5 else None


def _form(path: Path, columns: list[str]) -> TableForm:
    form = form_of(columns)
    if form is None:
        raise TableError(f"{shown(path)}: columns of no known table; known tables: {', '.join(FORMS)}")
    missing = [column for column in form.columns if column not in columns]
    unknown = [column for column in columns if column not in (*form.columns, ROW_ID)]
    told = [nearest(column, missing or form.columns) for column in unknown]
    faults = [f"unknown column {quoted(column)}{meant}" for column, meant in zip(unknown, told, strict=True)]
    faults += [
        f"missing column {column!r} of a {form.name} table"
        for column in missing
        if not any(repr(column) in meant for meant in told)
    ]
    if faults:
        raise TableError("\n".join(f"{shown(path)}: {fault}" for fault in faults))
    return form


def _checked(raw: pd.DataFrame, form: TableForm) -> tuple[pd.DataFrame, list[str]]:
    """Typed rows with their faults, and the faults as lines."""
    rows = raw[[*form.columns, *([ROW_ID] if ROW_ID in raw else [])]].copy()
    rows["row"] = rows.index
    rows = rows.reset_index(drop=True)
    rows["fault"] = ""
    known = (*names()["table_systems"], *list_specs("hardware"))
    systems = {name: spec_name(name) in known for name in rows["system"].unique()}
    _note(rows, ~rows["system"].map(systems).astype(bool), "system", "is unknown", known)
    _note(rows, ~rows["framework"].isin(LIBRARIES), "framework", "is unknown", LIBRARIES)
    for column in (*IDENTITY, *form.words):
        _note(rows, rows[column] == "", column, "is empty")
    for column in form.sizes:
        least = 0 if column in MAY_BE_ZERO else 1
        number = pd.to_numeric(rows[column], errors="coerce")
        whole = number.between(least, LARGEST_SIZE) & (number == np.floor(number))
        _note(rows, ~whole, column, f"is not a whole number from {least}")
        rows[column] = number.where(whole, 0).astype(np.int64)
    number = pd.to_numeric(rows[LATENCY], errors="coerce").astype(float)
    _note(rows, ~(np.isfinite(number) & (number > 0)), LATENCY, "is not a time above 0")
    rows[LATENCY] = number
    rows["latency"] = number * US
    bad = rows[rows["fault"] != ""]
    return rows, [f"line {line}: {fault}" for line, fault in zip(bad["row"], bad["fault"], strict=True)]


def _note(rows: pd.DataFrame, bad: Any, column: str, said: str, known: Sequence[str] = ()) -> None:
    """Note the fault of a column at the rows that have it; a row keeps its first fault."""
    for index in rows.index[bad & (rows["fault"] == "")]:
        value = rows.loc[index, column]
        allowed = f"{nearest(value, known)}; allowed: {', '.join(known)}" if known else ""
        rows.loc[index, "fault"] = f"{column} {quoted(str(value))} {said}{allowed}"


def _mask(rows: pd.DataFrame, form: TableForm, exclusions: Sequence[Exclusion]) -> Any:
    """Reason of the first exclusion that a row falls under, "" where there is none."""
    reasons = pd.Series("", index=rows.index, dtype=object)
    for exclusion in exclusions:
        if exclusion.form != form.name:
            continue
        found = rows.index[exclusion.condition(rows)]
        reasons.loc[found] = reasons.loc[found].where(reasons.loc[found] != "", exclusion.reason)
    return reasons
