"""Show where disaggregation pays: models by traffic by systems, as one table and one picture."""

from __future__ import annotations

from typing import Any

import pandas as pd

from disagg_sim.serving.gains import where_it_pays
from lab.studies.beyond_the_buzz.evidence import FrontierSource
from lab.studies.beyond_the_buzz.figures import NAMES, RANGE
from lab.studies.panels import Cells

#: Name of the sweep.
PAYS = "where_it_pays"
#: Ratio of areas at which the colour of a cell is full. [1]
FULL = 2.5
_SETTING = ("model", "isl", "osl", "system", "precision", "profile")


def pays_table(frontiers: FrontierSource, profile: str) -> pd.DataFrame:
    """Disaggregated over the best of both co-located modes, a row a setting.

    Returns columns of ``gains.where_it_pays`` over the range that both reach, log axis, and those of the area ratio
    once more inside ``figures.RANGE`` with the suffix ``_20_to_100``.
    """
    points = frontiers.frontier(PAYS, profile)
    own = where_it_pays(points)
    low, high = RANGE
    inside = where_it_pays(points, low=low, high=high)[[*_SETTING, "low", "high", "area_ratio", "pays"]]
    return own.merge(inside, on=list(_SETTING), suffixes=("", f"_{low:g}_to_{high:g}"))


def pays_cells(table: pd.DataFrame) -> Cells:
    """The table as cells: a row per model and system, a column per traffic, the area ratio over the shared range."""
    rows = list(dict.fromkeys(zip(table["model"], table["system"], strict=True)))
    columns = list(dict.fromkeys(zip(table["isl"], table["osl"], strict=True)))
    found = {(row["model"], row["system"], row["isl"], row["osl"]): row for row in table.to_dict("records")}
    profile = table["profile"].iloc[0]
    cells = [[found[(*row, *column)] for column in columns] for row in rows]
    return Cells(
        title="Where disaggregation pays: area under its frontier over that of the best co-located one\n"
        f"(log axis, range that both reach; in words: where it is at least 5 % above; profile {profile})",
        rows=tuple(f"{NAMES[model]}, {system}" for model, system in rows),
        columns=tuple(f"{isl:.0f}/{osl:.0f}" for isl, osl in columns),
        values=tuple(tuple(float(cell["area_ratio"]) for cell in row) for row in cells),
        texts=tuple(tuple(_text(cell) for cell in row) for row in cells),
        legend="area ratio A",
        limit=FULL,
    )


def _text(cell: dict[Any, Any]) -> str:
    ratio = float(cell["area_ratio"])
    return f"{ratio:.2f}  {cell['pays']}" if ratio == ratio else str(cell["pays"])  # noqa: PLR0124 - NaN
