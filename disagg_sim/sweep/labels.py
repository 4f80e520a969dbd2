"""Label the rows of frontiers, those of several cases in one go where the passes of their designs are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pandas as pd

from disagg_sim.certainty.rows import Origin
from disagg_sim.sweep.cases import Case, kin, origin_of


class Label(Protocol):
    """Says something of every row of a table, whatever the other rows are."""

    def __call__(self, points: pd.DataFrame, *, origin: Origin) -> pd.Series:
        """One value a row."""


def labels(fronts: Sequence[tuple[Case, pd.DataFrame]], say: Label) -> list[pd.Series]:
    """Label tables of cases; those of cases that differ in limits or costs alone are timed together.

    Parameters
    ----------
    fronts
        Cases and tables with their ``axis_columns``, no table without rows.
    say
        What is said of a row.

    Returns
    -------
    list of Series
        One a table, with its index.
    """
    groups: dict[tuple[Case, object], list[int]] = {}
    for number, (case, _) in enumerate(fronts):
        groups.setdefault((kin(case), case.traffic), []).append(number)
    found: dict[int, pd.Series] = {}
    for numbers in groups.values():
        tables = [fronts[number][1] for number in numbers]
        joint = pd.concat(tables, ignore_index=True) if len(tables) > 1 else tables[0]
        values = say(joint, origin=origin_of(fronts[numbers[0]][0])).to_numpy()
        start = 0
        for number, table in zip(numbers, tables, strict=True):
            found[number] = pd.Series(values[start : start + len(table)], index=table.index)
            start += len(table)
    return [found[number] for number in range(len(fronts))]
