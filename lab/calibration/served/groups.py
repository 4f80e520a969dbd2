"""Judge served runs by distinct operating points: apart by layout, family, engine, system and load, against bars.

A source repeats some runs a hundred times and others never. Runs of one configuration, layout, lengths and load are one
**operating point** (``ServingRow.point``) and count once, with the median of their errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.atomic import write_csv
from disagg_sim.facts.yaml_files import read_mapping
from lab.calibration.kernels.residuals import by_group, figures_of, rank_correlation

#: Concurrency of an instance up to which TTFT has no queue to speak of. [request]
TTFT_CONCURRENCY = 4.0
FEW_REQUESTS = "4 and fewer"
#: Closed-loop forms: engines of today under a stated concurrency.
SERVED_FORMS = ("inferencex_dsr1", "inferencex_dense", "inferencex_models", "nvidia_gap")
#: What groups are told apart by; each is a column of ``with_dimensions``.
DIMENSIONS = (
    *("attention", "experts", "pipeline", "mode", "layout", "prefill_layout", "family", "family and layout"),
    *("model", "engine", "engine and version", "system", "load", "requests of an instance"),
)
#: Numbers that ``errors_of`` gives, in order; the last needs bands.
ERRORS = ("rows", "points", "median_error", "median_error_of_rows", "p90_error", "bias", "spearman")
COVERAGE = ("coverage", "coverage_of_rows")


def points(table: pd.DataFrame) -> pd.DataFrame:
    """Collapse re-runs: one line for each operating point and quantity, with the medians of error and prediction,
    ``measured`` what belongs to both; ends of bands keep their ratio to the prediction.
    """
    done = table[table["evaluated"]]
    once = _collapsed(done)
    place = done.drop_duplicates(["point", "quantity"])
    return place.assign(**{str(name): once[name].to_numpy() for name in once}).reset_index(drop=True)


def _collapsed(done: pd.DataFrame) -> pd.DataFrame:
    """Numbers of each operating point and quantity, in order of first appearance."""
    numbers = done[["predicted", "relative_error"]]
    ends = [name for name in ("predicted_p10", "predicted_p90") if name in done]
    numbers = numbers.assign(**{end: done[end] / done["predicted"] for end in ends})
    found = numbers.groupby([done["point"], done["quantity"]], sort=False).median()
    measured = found["predicted"] / (1.0 + found["relative_error"])
    return found.assign(measured=measured, **{end: found["predicted"] * found[end] for end in ends})


def errors_of(table: pd.DataFrame) -> dict[str, Any]:
    """Errors of evaluated lines by operating points, by rows where the name says so: ``ERRORS``, with bands
    ``COVERAGE``. [1]
    """
    once = _collapsed(table)
    found = figures_of(once["relative_error"])
    told: dict[str, Any] = {
        "rows": len(table),
        "points": len(once),
        "median_error": found["median"],
        "median_error_of_rows": float(table["relative_error"].abs().median()),
        "p90_error": found["p90"],
        "bias": found["bias"],
        "spearman": rank_correlation(once["predicted"], once["measured"]),
    }
    if "predicted_p10" in table:
        told |= dict(zip(COVERAGE, (inside(once), inside(table)), strict=True))
    return told


def inside(table: pd.DataFrame) -> float:
    """Share of the measured numbers that lie in their 80 % band. [1]"""
    return float(table["measured"].between(table["predicted_p10"], table["predicted_p90"]).mean())


def per_instance(table: pd.DataFrame) -> pd.Series:
    """Requests in flight of an instance; ``workers`` of the lines are ``2xTP4`` or ``TP4``. [request]"""
    count = table["workers"].str.extract(r"^(\d+)x")[0].astype(float).fillna(1.0)
    return table["concurrency"] / count


def with_dimensions(table: pd.DataFrame) -> pd.DataFrame:
    """The lines with a column for each of ``DIMENSIONS``."""
    layout, split = table["layout"], table["mode"] == "disaggregated"
    few = per_instance(table) <= TTFT_CONCURRENCY
    several = table["mode"] + np.where(split, " (decode)", "")
    columns: dict[str, Any] = {
        "attention": np.where(layout.str.startswith("DP"), "DP", "TP"),
        "experts": np.where(layout.str.contains("EP"), "EP", "no EP"),
        "pipeline": np.where(layout.str.endswith("PP"), "PP", "no PP"),
        "prefill_layout": np.where(split, table["prefill_layout"], "as decode"),
        "family and layout": table["family"] + ", " + layout + ", " + several,
        "engine and version": (table["engine"] + " " + table["version"]).str.strip(),
        "requests of an instance": np.where(few, FEW_REQUESTS, "more than 4, or not stated"),
    }
    return table.assign(**columns)


def groups(table: pd.DataFrame, dimensions: Sequence[str] = DIMENSIONS) -> pd.DataFrame:
    """Compute errors below saturation by each dimension, quantity and part (``all`` for the three together)."""
    below = with_dimensions(table[table["evaluated"] & ~table["saturated"]])
    both = pd.concat([below, below.assign(part="all")], ignore_index=True)
    lines = [
        {"dimension": dimension} | line
        for dimension in dimensions
        for line in by_group(both.assign(value=both[dimension]), ("value", "quantity", "part"), errors_of)
    ]
    names = ("dimension", "value", "quantity", "part", *ERRORS, *(COVERAGE if "predicted_p10" in table else ()))
    return pd.DataFrame(lines, columns=list(names))


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


BARS = tuple(Bar(name, **row) for name, row in read_mapping(Path(__file__).with_name("bars.yaml")).items())


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


#: What ``summary.csv`` groups by.
GROUP = ("part", "form", "quantity", "system", "model", "framework", "mode", "load", "saturated")
#: Quantities in the order of tables.
QUANTITIES = ("tpot", "ttft", "throughput", "latency", "transfer")
#: Two runs of the same configuration, and two engines on the same system, differ by so much (median). [1]
RERUN_NOISE, ENGINE_NOISE = 0.005, 0.16


def summary(table: pd.DataFrame, by: Sequence[str] = GROUP) -> pd.DataFrame:
    """Summarise the errors of the evaluated lines by group."""
    lines = by_group(table[table["evaluated"]], by, errors_of)
    coverage = ["coverage"] if "predicted_p10" in table else []
    return pd.DataFrame(lines, columns=[*by, "rows", "median_error", "p90_error", "bias", "spearman", *coverage])


def side_by_side(apart: pd.DataFrame) -> pd.DataFrame:
    """Put the quantities of each group of one part beside one another: points, median error, bias, coverage."""
    lines = []
    for (dimension, value), mine in apart.groupby(["dimension", "value"], sort=False):
        told: dict[str, Any] = {"by": dimension, "group": value, "rows": int(mine["rows"].max())}
        for line in mine.itertuples():
            inside = f", {line.coverage:.0%} in band" if "coverage" in apart else ""
            told[str(line.quantity)] = f"{line.points}: {line.median_error:.1%}, {line.bias:+.0%}{inside}"
        lines.append(told)
    names = [name for name in QUANTITIES if (apart["quantity"] == name).any()]
    return pd.DataFrame(lines, columns=["by", "group", "rows", *names]).fillna("")


def counted(table: pd.DataFrame) -> pd.DataFrame:
    """Count the rows of each file, those without speculation or flag, and the share of these that is evaluated."""
    lines = []
    for file, part in table.groupby("file", sort=True):
        plain = part[~part["reason"].str.startswith("speculative") & (part["qa_flag"] == "")]
        done = plain.groupby("row")["evaluated"].any()
        share = float(done.mean()) if len(done) else float("nan")
        lines.append((file, part["row"].nunique(), len(done), int(done.sum()), share))
    return pd.DataFrame(lines, columns=["file", "rows", "plain_rows", "evaluated", "share"])


def reasons(table: pd.DataFrame) -> pd.DataFrame:
    """Why rows or quantities were not evaluated, and how often."""
    left = table[~table["evaluated"]]
    found = left.groupby(["file", "quantity", "reason"], sort=True).size().reset_index(name="lines")
    return found.sort_values("lines", ascending=False, kind="stable", ignore_index=True)


def write_tables(table: pd.DataFrame, directory: Path) -> None:
    """Write ``rows.csv`` and the tables: ``summary``, ``groups``, ``bars``, ``counts``, ``reasons``."""
    others = {"summary": summary(table), "groups": groups(table), "bars": judged(table), "counts": counted(table)}
    write_frames({"rows": table} | others | {"reasons": reasons(table)}, directory)


def write_frames(tables: dict[str, pd.DataFrame], directory: Path | None) -> None:
    """Write each table to ``NAME.csv`` of a directory, where one is given."""
    if directory is None:
        return
    for name, frame in tables.items():
        write_csv(directory / f"{name}.csv", frame, digits=6)
