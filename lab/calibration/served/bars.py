"""Hold served runs to limits, by distinct operating points: errors, biases, rank correlations, coverage of bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from disagg_sim.facts.yaml_files import read_mapping
from lab.calibration.served.groups import SERVED_FORMS, errors_of, groups, with_dimensions

#: Parts of the data, in the order of the table.
PARTS = ("fitted", "held-out", "new")
#: Rows from which a group's coverage is judged, and its limits. [1]
COVERAGE_ROWS, COVERAGE_LIMITS = 50, (0.70, 0.90)


@dataclass(frozen=True, slots=True)
class Bar:
    """What a group of rows is held to."""

    name: str
    quantity: str
    limit: float
    rows: Mapping[str, str]  # values that the rows have in some columns of ``with_dimensions``
    what: str = "median_error"  # number of ``errors_of``: an error or bias is at most, a correlation at least the limit

    def met(self, reached: float) -> bool:
        """Whether the number keeps the limit."""
        return bool(reached >= self.limit if self.what == "spearman" else abs(reached) <= self.limit)


BARS = tuple(Bar(name, **row) for name, row in read_mapping(Path(__file__).with_suffix(".yaml")).items())


def judged(table: pd.DataFrame, forms: Sequence[str] = SERVED_FORMS) -> pd.DataFrame:
    """Hold the operating points below saturation to ``BARS``: the fitted part, the held-out part and new files."""
    rows = table[table["evaluated"] & ~table["saturated"] & table["form"].isin(forms)]
    rows = with_dimensions(rows)
    lines = []
    for bar in BARS:
        held = rows[rows[list(wanted := {"quantity": bar.quantity, **bar.rows})].eq(pd.Series(wanted)).all(axis=1)]
        for part in PARTS:
            mine = held[held["part"] == part]
            if len(mine):
                found = errors_of(mine)
                reached = found[bar.what]
                tail = (reached, bar.limit, bar.met(reached), found["p90_error"], found["bias"], found.get("coverage"))
                lines.append((bar.name, part, found["rows"], found["points"], *tail))
    names = ["bar", "part", "rows", "points", "reached", "limit", "met", "p90_error", "bias", "coverage"]
    return pd.DataFrame(lines, columns=names).astype({"coverage": float})


def coverage(table: pd.DataFrame) -> pd.DataFrame:
    """Compute the coverage of the 80 % bands in every group of ``COVERAGE_ROWS`` or more rows that no fit saw."""
    kept = table[table["held_out"]].assign(part="held-out")
    found = groups(kept)
    found = found[(found["part"] == "all") & (found["rows"] >= COVERAGE_ROWS)]
    met = found["coverage"].between(*COVERAGE_LIMITS)
    names = ["dimension", "value", "quantity", "rows", "points", "coverage", "coverage_of_rows"]
    return found[names].assign(met=met).reset_index(drop=True)
