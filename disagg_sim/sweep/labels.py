"""Label the rows of frontiers: what their throughput rests on, and where they leave the range of their fits.

Designs are timed once for both; those of several cases in one go where their passes are alike. Frontiers of
cases with the same setups are laid below one another with what their cases assume, which fits they use and inherit, and
how far their layouts have been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Ints
from disagg_sim.certainty.contributions import Adjust, Contribution, timed_contributions, value_of
from disagg_sim.certainty.designs import Designs, Times
from disagg_sim.certainty.extrapolation import doubtful, words_outside
from disagg_sim.certainty.rows import READ, SHIPPED, Origin, designs_of
from disagg_sim.certainty.trust import COLUMN as TRUST
from disagg_sim.certainty.trust import rests_on, shares_of_each, words_of_shares
from disagg_sim.facts.load import load_profile
from disagg_sim.physics.rates import Taken
from disagg_sim.physics.setup import Setup
from disagg_sim.serving.evidence import COLUMN, layout_evidence
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.cases import Case, axis_columns, origin_of, setup_case


@dataclass(frozen=True, slots=True)
class UsedFit:
    """A fit behind the times of a case."""

    taken: Taken
    system: str = ""  # whose pool it times; "" where the pools are alike

    @property
    def text(self) -> str:
        """Its provenance in words, the system first where the pools differ."""
        return f"{self.system}, {self.taken.text}" if self.system else self.taken.text


def fits_used(case: Case) -> tuple[UsedFit, ...]:
    """Every fit behind the case's times; empty for a profile without fits."""
    pools = case.pools
    sides = ((case.prefill_system, pools.prefill_precision), (case.decode_system, pools.precision))
    fits = [case.setup_of(*side).rates.used for side in sides]
    if pools.alike:
        return tuple(map(UsedFit, fits[0]))
    names = (pools.prefill_system, pools.system)
    return tuple(UsedFit(taken, name) for name, found in zip(names, fits, strict=True) for taken in found)


def inherited(fits: tuple[UsedFit, ...]) -> tuple[str, ...]:
    """Provenance of those that were made on another system."""
    return tuple(fit.text for fit in fits if fit.taken.inherited)


#: Cases and their frontiers, by digest and mode.
Fronts = dict[tuple[str, str], tuple[Case, pd.DataFrame]]


@dataclass(frozen=True, slots=True, eq=False)
class Kin:
    """Frontiers of cases with the same setups, one below another: a table has a price for each of its columns."""

    keys: tuple[tuple[str, str], ...]  # digest and mode of each
    cases: tuple[Case, ...]  # of each
    stops: tuple[int, ...]  # row behind each [1]
    table: pd.DataFrame

    @property
    def parts(self) -> Iterator[tuple[tuple[str, str], slice]]:
        """Rows of each frontier, by digest and mode."""
        return zip(self.keys, (slice(*ends) for ends in pairwise((0, *self.stops))), strict=True)

    @property
    def sizes(self) -> list[int]:
        """Rows of each frontier. [1]"""
        return np.diff(self.stops, prepend=0).tolist()


def kin_of(fronts: Fronts) -> list[Kin]:
    """Lay frontiers of cases with the same setups, and the same columns, below one another."""
    alike: dict[Hashable, list[tuple[str, str]]] = {}
    for key, (case, table) in fronts.items():
        alike.setdefault((setup_case(case), *table), []).append(key)
    found = []
    for keys in alike.values():
        cases, tables = zip(*(fronts[key] for key in keys), strict=True)
        stops = np.cumsum([len(table) for table in tables]).tolist()
        found.append(Kin(tuple(keys), cases, tuple(stops), _below(tables)))
    return found


def _below(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables below one another; columns of one word are plain, whether the word is that of all tables or not."""
    whole = pd.concat(tables, ignore_index=True)
    kinds = {name: kind for name, kind in whole.dtypes.items() if isinstance(kind, pd.CategoricalDtype)}
    return whole.astype({name: kind.categories.dtype for name, kind in kinds.items() if len(kind.categories) == 1})


def with_origins(alike: Kin, *, nothing: str) -> Kin:
    """Add the columns that say where frontiers come from."""
    case = alike.cases[0]  # whose setups are those of all
    assumed = pd.DataFrame([axis_columns(each) for each in alike.cases])
    beside = assumed.loc[np.repeat(assumed.index, alike.sizes)].reset_index(drop=True)
    said: dict[str, Any] = {
        "inherited_fits": "; ".join(inherited(fits_used(case))) or nothing,
        COLUMN: layout_evidence(alike.table, case.decode_setup, case.prefill_setup),
    }
    return replace(alike, table=pd.concat([alike.table, beside, pd.DataFrame(said)], axis=1))


#: Rows that are timed together, a number that hides what it takes to begin: most share a task with several cases. [1]
ROWS = 2000


def labels(families: Sequence[Kin], *, outside: bool, jobs: int | Workers = 1) -> list[dict[str, NDArray[Any]]]:
    """Label tables of cases; those of cases that differ in lengths, limits or costs alone are timed together."""
    places = [(number, rows) for number, family in enumerate(families) for rows in _groups(family)]
    tasks = [_task(place, families[number], rows, outside) for place, (number, rows) in enumerate(places)]
    told = dict(run_tasks(_words_of_rows, tasks, jobs=jobs))
    found: list[dict[str, NDArray[Any]]] = [{} for _ in families]
    for place, (number, rows) in enumerate(places):
        for name, words in told[place].items():
            of_all = found[number].setdefault(name, np.empty(len(families[number].table), dtype=object))
            of_all[rows] = words
    return found


def _groups(family: Kin) -> list[Ints]:
    """Rows of the tables that are timed together, ``ROWS`` or little more."""
    tables = [
        (_prompt(case), np.arange(part.start, part.stop))
        for case, (_, part) in zip(family.cases, family.parts, strict=True)
    ]
    groups: list[list[Ints]] = []
    held = ROWS
    for _, rows in sorted(tables, key=lambda table: table[0]):
        if held >= ROWS:
            groups.append([])
            held = 0
        groups[-1].append(rows)
        held += rows.size
    return [np.concatenate(group) for group in groups]


def _prompt(case: Case) -> tuple[bool, bool, float]:
    """What passes of prefill differ in: those of neighbours are alike."""
    cached, lengths = case.lengths.cached, case.lengths
    return case.lengths.constant, cached is not None, lengths.mean_isl


def _task(place: int, family: Kin, rows: Ints, outside: bool) -> _Task:
    case = family.cases[0]
    origin = replace(origin_of(case), lengths={str(each.traffic): each.lengths for each in family.cases})
    told = outside and load_profile(case.profile).fitted
    table = family.table[[name for name in family.table if name in READ]]
    return _Task(place, table.take(rows).reset_index(drop=True), origin, outside=told)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    place: int
    table: pd.DataFrame
    origin: Origin
    outside: bool


def _words_of_rows(task: _Task) -> tuple[int, dict[str, NDArray[Any]]]:
    """Words of each row by what they tell."""
    if task.outside:
        found = label_rows(task.table, origin=task.origin)
        return task.place, {str(name): words.to_numpy() for name, words in found.items()}
    return task.place, {TRUST: rests_on(task.table, origin=task.origin).to_numpy()}


def label_rows(points: pd.DataFrame, *, origin: Origin = SHIPPED) -> pd.DataFrame:
    """Say of every row of a table, by its index, what ``rests_on`` and ``outside_calibration`` say."""
    every = list(designs_of(points, replace(origin, exact=False)))
    found: dict[int, tuple[Times, Sequence[Contribution]]] = {}

    def timed(designs: Sequence[Designs], marks: Callable[[Setup], Adjust]) -> list[Times]:
        told = timed_contributions(designs, doubtful, marks)
        found.update((id(one), (_plain(times), parts)) for one, (times, parts) in zip(designs, told, strict=True))
        return [times for times, _ in told]

    trust = words_of_shares(points, every, shares_of_each(every, timed))
    return pd.concat([trust, words_outside(points, every, [found[id(one)] for one in every])], axis=1)


def _plain(times: Times) -> Times:
    """Times without marks: their real part, the same all along the leading axis. [s]"""
    return Times(*(value_of(part)[0] if np.ndim(part) > 1 else value_of(part) for part in times))
