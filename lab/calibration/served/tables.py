"""Tabulate what serving rows show: errors by form and system, rows left out, which mode wins; write all tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.atomic import write_csv
from lab.calibration.served.bars import judged
from lab.calibration.served.groups import errors_of, groups

#: What ``summary.csv`` groups by.
GROUP = ("part", "form", "quantity", "system", "model", "framework", "mode", "load", "saturated")
#: Quantities in the order of tables.
QUANTITIES = ("tpot", "ttft", "throughput", "latency", "transfer")
#: Two runs of the same configuration, and two engines on the same system, differ by so much (median). [1]
RERUN_NOISE, ENGINE_NOISE = 0.005, 0.16
#: Interactivities at which modes are compared. [token/s/user]
INTERACTIVITIES = (20.0, 30.0, 50.0, 75.0, 100.0, 150.0)


def summary(table: pd.DataFrame, by: Sequence[str] = GROUP) -> pd.DataFrame:
    """Summarise the errors of the evaluated lines by group.

    Returns the group, ``rows``, ``median_error`` and ``p90_error`` of the absolute relative error, ``bias`` (the median
    with its sign), ``spearman``; with bands ``coverage``, the share of the rows inside [1].
    """
    lines = []
    for key, part in table[table["evaluated"]].groupby(list(by), dropna=False, sort=True):
        lines.append(dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True)) | errors_of(part))
    coverage = ["coverage"] if "predicted_p10" in table else []
    return pd.DataFrame(lines, columns=[*by, "rows", "median_error", "p90_error", "bias", "spearman", *coverage])


def side_by_side(apart: pd.DataFrame) -> pd.DataFrame:
    """Put the quantities of each group of one part beside one another; for readers, not for programs.

    Returns ``by``, ``group``, ``rows``, and a column of words for each quantity: points, median error, bias, coverage.
    """
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
    """Count the rows of each file.

    Returns ``file``, ``rows``, ``plain_rows`` (no speculation, no flag), ``evaluated`` of these, and their
    ``share`` [1].
    """
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


def who_wins(table: pd.DataFrame, levels: Sequence[float] = INTERACTIVITIES) -> pd.DataFrame:
    """Compare the best throughput of aggregated and disaggregated runs at equal interactivity.

    Groups are (model, system, precision, lengths) with both modes; every measured run competes with its measured
    numbers, and again with its predicted ones. Takes ``levels`` [token/s]. Returns a row per group and level:
    throughput of disaggregated over aggregated, ``gain_measured`` and ``gain_predicted`` [1], and whether both name the
    same winner.
    """
    key = ["model", "system", "weights", "isl", "osl"]
    done = table[table["evaluated"] & table["quantity"].isin(["tpot", "throughput"])].copy()
    done = done[(done["load"] == "closed_loop") & done["form"].isin(["inferencex_dsr1"])]
    done["weights"] = done["recipe"].str.extract(r"^(nvfp4|fp8|bf16)")[0]
    columns = ["file", "row", "mode", *key]
    wide = done.pivot_table(index=columns, columns="quantity", values=["measured", "predicted"]).dropna().reset_index()
    lines = []
    for group, runs in wide.groupby(key, sort=True):
        if runs["mode"].nunique() < 2:
            continue
        for level in levels:
            best = {}
            for what in ("measured", "predicted"):
                fast = runs[runs[(what, "tpot")] <= 1.0 / level]
                for mode in ("aggregated", "disaggregated"):
                    best[what, mode] = fast.loc[fast["mode"] == mode, (what, "throughput")].max()
            gains = [best[what, "disaggregated"] / best[what, "aggregated"] for what in ("measured", "predicted")]
            if not np.isfinite(gains).all():
                continue
            lines.append((*group, level, *gains, (gains[0] > 1) == (gains[1] > 1)))
    return pd.DataFrame(lines, columns=[*key, "tokens_per_s_per_user", "gain_measured", "gain_predicted", "agree"])


def write_rows(table: pd.DataFrame, directory: Path) -> None:
    """Write ``rows.csv`` alone: of files without a measurement there is nothing else to tell.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     write_rows(pd.DataFrame({"row": ["2"], "reason": ["no measurement"]}), Path(root))
    ...     print(Path(root, "rows.csv").read_text(), end="")
    row,reason
    2,no measurement
    """
    write_frames({"rows": table}, directory)


def write_tables(table: pd.DataFrame, directory: Path) -> None:
    """Write ``rows.csv`` and the tables: ``summary``, ``groups``, ``bars``, ``counts``, ``reasons``,
    ``who_wins.csv``.
    """
    others = {"summary": summary(table), "groups": groups(table), "bars": judged(table), "counts": counted(table)}
    write_frames({"rows": table} | others | {"reasons": reasons(table), "who_wins": who_wins(table)}, directory)


def write_frames(tables: dict[str, pd.DataFrame], directory: Path) -> None:
    """Write each table to ``NAME.csv``."""
    for name, frame in tables.items():
        write_csv(directory / f"{name}.csv", frame, digits=6)
