"""Tabulate what serving rows show: errors by form and system, rows left out; write all tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.atomic import write_csv
from lab.calibration.kernels.residuals import by_group
from lab.calibration.served.bars import judged
from lab.calibration.served.groups import errors_of, groups

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
