"""Say what playing the closed loops brings over their steady state, source by source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from lab.calibration.served.groups import errors_of, with_dimensions, write_frames
from lab.calibration.served.rows import ServingRow
from lab.calibration.served.simulate import Answer, key_of, value_of

#: What the tables group by.
BY = ("file", "family and layout", "requests of an instance")
#: What scripts without a warm-up ran: their TTFT holds what a server does once, and counts apart.
COLD = "aggregated, without a warm-up"
#: Numbers of a group, of each way to predict. [1]
ERRORS = ("median_error", "bias", "p90_error")


def with_simulated(table: pd.DataFrame, rows: Sequence[ServingRow], answers: Iterable[Answer]) -> pd.DataFrame:
    """Add to the evaluated lines of closed loops what their played runs say, or why they say nothing."""
    known = {answer.key: answer for answer in answers}
    found = {}
    for row in rows:
        answer = known.get(key_of(row)) if row.engine else None
        if answer is not None:
            for quantity in row.quantities:
                found[row.file, row.row, quantity.name] = (value_of(quantity, answer), answer.reason)
    lines = table[table["evaluated"] & (table["load"] == "closed_loop")]
    keys = zip(lines["file"], lines["row"], lines["quantity"], strict=True)
    told = [found.get(key, (math.nan, "no such row")) for key in keys]
    simulated = np.array([value for value, _ in told], dtype=float)
    return lines.assign(
        simulated=simulated,
        simulated_error=simulated / lines["measured"] - 1.0,
        not_simulated=[reason for _, reason in told],
    )


def brought(lines: pd.DataFrame) -> pd.DataFrame:
    """Compute the errors of both ways below saturation, by operating points that were played."""
    below = with_dimensions(lines[np.isfinite(lines["simulated"]) & ~lines["saturated"]]).assign(all="all")
    found = []
    for dimension in ("all", *BY):
        for (value, quantity, part), mine in below.groupby([dimension, "quantity", "part"], sort=True):
            played = mine.assign(predicted=mine["simulated"], relative_error=mine["simulated_error"])
            ways = {"steady": errors_of(mine), "simulated": errors_of(played)}
            numbers = {f"{name}_{way}": told[name] for way, told in ways.items() for name in ERRORS}
            first = {"dimension": dimension, "value": value, "quantity": quantity, "part": part}
            found.append(first | {name: ways["steady"][name] for name in ("rows", "points")} | numbers)
    numbered = [f"{name}_{way}" for way in ("steady", "simulated") for name in ERRORS]
    return pd.DataFrame(found, columns=["dimension", "value", "quantity", "part", "rows", "points", *numbered])


def statistics(lines: pd.DataFrame, rows: Sequence[ServingRow], answers: Iterable[Answer]) -> pd.DataFrame:
    """Compute the errors of every statistic that sources state, each against its like, below saturation."""
    known = {answer.key: answer for answer in answers if not answer.reason}
    below = lines[np.isfinite(lines["simulated"]) & ~lines["saturated"]]
    parts = dict(zip(zip(below["file"], below["row"], strict=True), below["part"], strict=True))
    told = []
    for row in rows:
        part = parts.get((row.file, row.row))
        if part is None:
            continue
        for quantity in (*row.quantities, *row.others):
            if quantity.name != "throughput" and quantity.measured > 0:
                error = value_of(quantity, known[key_of(row)]) / quantity.measured - 1.0
                mode = COLD if row.cold and quantity.name == "ttft" else row.mode
                told.append((quantity.name, quantity.statistic, mode, part, row.point, error))
    frame = pd.DataFrame(told, columns=["quantity", "statistic", "mode", "part", "point", "error"])
    points = frame.groupby(["quantity", "statistic", "mode", "part", "point"], sort=True)["error"].median()
    groups = points.groupby(level=[0, 1, 2, 3])
    return groups.agg(points="size", median_error=lambda each: each.abs().median(), bias="median").reset_index()


def not_simulated(lines: pd.DataFrame) -> pd.DataFrame:
    """Count the rows that could not be played, by reason, the most frequent first. [1]"""
    left = lines[lines["not_simulated"] != ""].drop_duplicates(["file", "row"])
    counts = left.groupby("not_simulated").size().sort_values(ascending=False)
    return counts.rename_axis("reason").reset_index(name="rows")


def write_simulated(
    lines: pd.DataFrame, rows: Sequence[ServingRow], answers: Sequence[Answer], directory: Path
) -> None:
    """Write ``simulated_rows.csv``, ``simulated.csv`` and ``simulated_statistics.csv``."""
    columns = ["file", "row", "quantity", "statistic", "measured", "predicted", "simulated", "not_simulated"]
    tables = {
        "simulated_rows": lines[columns],
        "simulated": brought(lines),
        "simulated_statistics": statistics(lines, rows, answers),
    }
    write_frames(tables, directory)
