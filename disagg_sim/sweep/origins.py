"""Lay frontiers of cases with the same setups below one another, and say where they come from.

What their cases assume, which fits they use and inherit, and how far their layouts have been checked.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.physics.rates import Taken
from disagg_sim.serving.evidence import COLUMN, layout_evidence
from disagg_sim.sweep.cases import Case, axis_columns, kin


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
    """Lay frontiers of cases with the same setups, and the same columns, below one another.

    >>> kin_of({})
    []
    """
    alike: dict[Hashable, list[tuple[str, str]]] = {}
    for key, (case, table) in fronts.items():
        alike.setdefault((kin(case), *table), []).append(key)
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
    """Add the columns that say where frontiers come from.

    Returns the same with ``cases.axis_columns``, ``inherited_fits`` and the evidence of each layout.
    """
    case = alike.cases[0]  # whose setups are those of all
    assumed = pd.DataFrame([axis_columns(each) for each in alike.cases])
    beside = assumed.loc[np.repeat(assumed.index, alike.sizes)].reset_index(drop=True)
    said: dict[str, Any] = {
        "inherited_fits": "; ".join(inherited(fits_used(case))) or nothing,
        COLUMN: layout_evidence(alike.table, case.decode_setup, case.prefill_setup),
    }
    return replace(alike, table=pd.concat([alike.table, beside, pd.DataFrame(said)], axis=1))
