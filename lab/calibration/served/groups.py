"""Judge served runs by distinct operating points, apart by layout, family, engine, version, system and load.

A source repeats some runs a hundred times and others never. Runs of one configuration, layout, lengths and load are one
**operating point** (``ServingRow.point``) and count once, with the median of their errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

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
    """Collapse re-runs: one line for each operating point and quantity.

    Returns the columns of the table; ``relative_error`` is the median of the runs of the point, ``predicted`` the
    median prediction, ``measured`` what belongs to both; ends of bands keep their ratio to the prediction.
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
    """Compute the errors of evaluated lines by distinct operating points, by rows where the name says so: ``ERRORS``,
    with bands ``COVERAGE``. [1]
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
