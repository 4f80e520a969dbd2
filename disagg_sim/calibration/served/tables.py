"""Tabulate errors of serving rows: by group, against the limits, and which mode wins at equal interactivity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.atomic import write_csv
from disagg_sim.calibration.kernels.conditions import Condition, parse_condition
from disagg_sim.calibration.kernels.residuals import rank_correlation

#: What ``summary.csv`` groups by.
GROUP = ("part", "form", "quantity", "system", "model", "framework", "mode", "load", "saturated")
#: Two runs of the same configuration, and two engines on the same system, differ by so much (median). [1]
RERUN_NOISE, ENGINE_NOISE = 0.005, 0.16
#: Concurrency of an instance up to which TTFT has no queue to speak of. [request]
TTFT_CONCURRENCY = 4.0
#: Interactivities at which modes are compared. [token/s/user]
INTERACTIVITIES = (20.0, 30.0, 50.0, 75.0, 100.0, 150.0)
#: Closed-loop forms: engines of today under a stated concurrency.
SERVED_FORMS = ("inferencex_dsr1", "inferencex_dense", "nvidia_gap")


@dataclass(frozen=True, slots=True)
class Bar:
    """What a group of rows is held to: median absolute error, or rank correlation where ``rank`` is given."""

    name: str
    quantity: str
    limit: float
    rows: Condition  # that it is held to
    rank: bool = False


def _rows(condition: str) -> Condition:
    return parse_condition(condition, words=("model", "load"), numbers=("moe", "per_instance"))


BARS = (
    Bar("TPOT, dense", "tpot", 0.10, _rows("model != 'deepseek_r1' and moe == 0")),
    Bar("TPOT, DeepSeek-R1", "tpot", 0.15, _rows("model == 'deepseek_r1'")),
    Bar("throughput", "throughput", 0.12, _rows("load == 'closed_loop'")),
    Bar("TTFT at 4 and fewer an instance", "ttft", 0.25, _rows(f"per_instance <= {TTFT_CONCURRENCY}")),
    Bar("rank of TPOT", "tpot", 0.95, _rows("load == 'closed_loop'"), rank=True),
    Bar("rank of throughput", "throughput", 0.95, _rows("load == 'closed_loop'"), rank=True),
)


def _errors(table: pd.DataFrame) -> dict[str, Any]:
    error = table["relative_error"]
    return {
        "rows": len(table),
        "median_error": float(error.abs().median()),
        "p90_error": float(error.abs().quantile(0.9)),
        "bias": float(error.median()),
        "spearman": rank_correlation(table["predicted"], table["measured"]),
        **({"coverage": float(_inside(table).mean())} if "predicted_p10" in table else {}),
    }


def _inside(table: pd.DataFrame) -> pd.Series:
    """Whether each measured number lies in its 80 % band."""
    return table["measured"].between(table["predicted_p10"], table["predicted_p90"])


def summary(table: pd.DataFrame, by: Sequence[str] = GROUP) -> pd.DataFrame:
    """Summarise the errors of the evaluated lines by group.

    Parameters
    ----------
    table : DataFrame
        As ``served.evaluate.evaluate`` returns it, with or without the bands of ``served.bands.with_bands``.
    by : sequence of str
        Columns that make a group.

    Returns
    -------
    DataFrame
        The group, ``rows``, ``median_error`` and ``p90_error`` of the absolute relative error, ``bias`` (the
        median with its sign), ``spearman``; with bands ``coverage``, the share of the rows inside. [1]
    """
    lines = []
    for key, part in table[table["evaluated"]].groupby(list(by), dropna=False, sort=True):
        lines.append(dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True)) | _errors(part))
    coverage = ["coverage"] if "predicted_p10" in table else []
    return pd.DataFrame(lines, columns=[*by, "rows", "median_error", "p90_error", "bias", "spearman", *coverage])


def counted(table: pd.DataFrame) -> pd.DataFrame:
    """Count the rows of each file: all, those without speculation and flag, and of these the evaluated ones."""
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


def judged(table: pd.DataFrame, forms: Sequence[str] = SERVED_FORMS) -> pd.DataFrame:
    """Hold the rows below saturation to ``BARS``: the fitted part, the held-out part and files that are new.

    Parameters
    ----------
    table : DataFrame
        As ``served.evaluate.evaluate`` returns it.
    forms : sequence of str
        Forms of files whose rows count.

    Returns
    -------
    DataFrame
        A row per bar and part: ``bar``, ``part``, ``rows``, ``reached``, ``limit``, ``met``, ``p90_error``, ``bias``.
    """
    from disagg_sim.facts.load import load_model

    rows = table[table["evaluated"] & ~table["saturated"] & table["form"].isin(forms)].copy()
    sparse = {name for name in rows["model"].unique() if load_model(name).is_moe}
    rows["moe"] = rows["model"].isin(sparse)
    workers = rows["workers"].str.extract(r"^(\d+)x")[0].astype(float).fillna(1.0)
    rows["per_instance"] = rows["concurrency"] / workers
    lines = []
    for bar in BARS:
        for part in ("fitted", "held-out", "new"):
            mine = rows[bar.rows.holds(rows)]
            mine = mine[(mine["quantity"] == bar.quantity) & (mine["part"] == part)]
            if not len(mine):
                continue
            found = _errors(mine)
            reached = found["spearman"] if bar.rank else found["median_error"]
            good = bool(reached >= bar.limit if bar.rank else reached <= bar.limit)
            tail = (found["p90_error"], found["bias"])
            lines.append((bar.name, part, found["rows"], reached, bar.limit, good, *tail))
    return pd.DataFrame(lines, columns=["bar", "part", "rows", "reached", "limit", "met", "p90_error", "bias"])


def who_wins(table: pd.DataFrame, levels: Sequence[float] = INTERACTIVITIES) -> pd.DataFrame:
    """Compare the best throughput of aggregated and disaggregated runs at equal interactivity.

    Groups are (model, system, precision, lengths) with both modes; every measured run competes with its measured
    numbers, and again with its predicted ones.

    Parameters
    ----------
    table : DataFrame
        As ``served.evaluate.evaluate`` returns it.
    levels : sequence of float
        Interactivities that a run must give at least. [token/s]

    Returns
    -------
    DataFrame
        A row per group and level: throughput of disaggregated over aggregated, ``gain_measured`` and ``gain_predicted``
        [1], and whether both name the same winner.
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

    Raises
    ------
    StoreError
        When the directory cannot be written.
    """
    _write({"rows": table}, directory)


def write_tables(table: pd.DataFrame, directory: Path) -> None:
    """Write ``rows.csv``, ``summary.csv``, ``bars.csv``, ``counts.csv``, ``reasons.csv`` and ``who_wins.csv``.

    Parameters
    ----------
    table : DataFrame
        As ``served.evaluate.evaluate`` returns it.
    directory : Path
        Made if need be.

    Raises
    ------
    StoreError
        When the directory cannot be written.
    """
    others = {"summary": summary(table), "bars": judged(table), "counts": counted(table)}
    _write({"rows": table} | others | {"reasons": reasons(table), "who_wins": who_wins(table)}, directory)


def _write(tables: dict[str, pd.DataFrame], directory: Path) -> None:
    for name, frame in tables.items():
        write_csv(directory / f"{name}.csv", frame, digits=6)
