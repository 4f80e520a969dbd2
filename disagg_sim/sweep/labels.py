"""Label the rows of frontiers, those of several cases in one go where the passes of their designs are alike."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.certainty.rows import READ, Origin
from disagg_sim.certainty.said import said_of
from disagg_sim.certainty.trust import COLUMN as TRUST
from disagg_sim.certainty.trust import rests_on
from disagg_sim.facts.load import load_profile
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.cases import Case, kin, origin_of

#: Rows that are timed together, a number that hides what it takes to begin: most share a task with several cases. [1]
ROWS = 2000


def labels(
    fronts: Sequence[tuple[Case, pd.DataFrame]], *, outside: bool, jobs: int | Workers = 1
) -> list[pd.DataFrame]:
    """Label tables of cases; those of cases that differ in lengths, limits or costs alone are timed together.

    Parameters
    ----------
    fronts
        Cases and tables with their ``axis_columns``, no table without rows.
    outside
        Whether rows of fitted profiles are told where they leave the range of their fits, too.
    jobs
        Where tables are timed.

    Returns
    -------
    list of DataFrame
        One a table, with its index: column ``rests_on``, and ``outside_calibration`` where that was told.
    """
    groups = _groups(fronts)
    tasks = [_task(place, [fronts[number] for number in numbers], outside) for place, numbers in enumerate(groups)]
    told = dict(run_tasks(_said, tasks, jobs=jobs))
    found: dict[int, pd.DataFrame] = {}
    for place, numbers in enumerate(groups):
        start = 0
        for number in numbers:
            index = fronts[number][1].index
            words = {name: values[start : start + len(index)] for name, values in told[place].items()}
            found[number] = pd.DataFrame(words, index)
            start += len(index)
    return [found[number] for number in range(len(fronts))]


def _groups(fronts: Sequence[tuple[Case, pd.DataFrame]]) -> list[list[int]]:
    """Numbers of the tables that are timed together: of cases with the same setups, ``ROWS`` rows or little more."""
    alike: dict[Case, list[int]] = {}
    for number, (case, _) in enumerate(fronts):
        alike.setdefault(kin(case), []).append(number)
    groups: list[list[int]] = []
    for numbers in alike.values():
        held = ROWS
        for number in sorted(numbers, key=lambda number: _prompt(fronts[number][0])):
            if held >= ROWS:
                groups.append([])
                held = 0
            groups[-1].append(number)
            held += len(fronts[number][1])
    return groups


def _prompt(case: Case) -> tuple[bool, bool, float]:
    """What passes of prefill differ in: those of neighbours are alike."""
    cached, lengths = case.lengths.cached, case.lengths
    return case.lengths.constant, cached is not None, lengths.mean_isl


def _task(place: int, fronts: Sequence[tuple[Case, pd.DataFrame]], outside: bool) -> _Task:
    case = fronts[0][0]
    origin = replace(origin_of(case), lengths={str(case.traffic): case.lengths for case, _ in fronts})
    told = outside and load_profile(case.profile).fitted
    return _Task(place, joint([table for _, table in fronts]), origin, outside=told)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    place: int
    table: pd.DataFrame
    origin: Origin
    outside: bool


def _said(task: _Task) -> tuple[int, dict[str, NDArray[Any]]]:
    """Words of each row by what they tell."""
    if task.outside:
        found = said_of(task.table, origin=task.origin)
        return task.place, {str(name): words.to_numpy() for name, words in found.items()}
    return task.place, {TRUST: rests_on(task.table, origin=task.origin).to_numpy()}


def joint(tables: Sequence[pd.DataFrame], wanted: Container[object] = READ) -> pd.DataFrame:
    """Lay some columns of tables with the same columns below one another, categories as plain texts.

    Parameters
    ----------
    tables
        One or more.
    wanted
        Names of columns; without it those that name the designs.

    Returns
    -------
    DataFrame
        In the order of the columns of the tables, rows numbered anew.

    Examples
    --------
    >>> parts = [pd.DataFrame({"mode": ["colocated"], "isl": [isl], "note": [""]}) for isl in (1024, 2048)]
    >>> joint(parts).to_dict("list")
    {'mode': ['colocated', 'colocated'], 'isl': [1024, 2048]}
    """
    names = [name for name in tables[0] if name in wanted]
    parts = {name: [_plain(table[name]) for table in tables] for name in names}
    return pd.DataFrame({name: np.concatenate(each) for name, each in parts.items()}, copy=False)


def _plain(column: pd.Series) -> NDArray[Any]:
    if isinstance(column.dtype, pd.CategoricalDtype):
        return np.asarray(np.array(column.dtype.categories.tolist(), dtype=object)[column.array.codes])
    return np.asarray(column.to_numpy(dtype=object if isinstance(column.dtype, pd.StringDtype) else None))
