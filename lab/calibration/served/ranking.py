"""Does the forecast rank? Its best configuration at equal interactivity, judged by the throughput that was measured.

A **group** is one model, system, engine and pair of lengths; its **configurations** are layouts in a weight format,
each with runs at several loads. A run is a point (interactivity ``1/TPOT``, throughput per GPU), measured and forecast;
re-runs count once. Where a source states no throughput, it follows from the closed loop, measured and forecast alike:
``throughput = concurrency * (ISL + OSL) / (TTFT + (OSL - 1) * TPOT) / GPUs`` (Little's law).

The runs of a configuration make a curve: at an interactivity x the best throughput of a run at least so fast, or
between two neighbours that bracket x (straight in logarithms). A group is judged at the interactivity of each of its
measured runs that two or more configurations reach, as measured. There the forecast picks the one whose forecast curve
is highest, and what was measured there judges the pick.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from lab.calibration.served.groups import points
from lab.calibration.served.rows import UNKNOWN_START

#: Interactivities at which modes are compared. [token/s/user]
LEVELS = (10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 65.0, 80.0, 100.0, 125.0, 150.0, 200.0)
#: Interactivity below which the height of a frontier is told apart: large batches. [token/s/user]
SLOW = 35.0
#: Share of the best throughput that a pick may lack and still count as good: runs repeat to 1 to 6 % elsewhere. [1]
NEAR_BEST = 0.03
#: What makes a group, and what a configuration in it.
GROUP = ("family", "model", "system", "engine", "isl", "osl")
CONFIGURATION = ("mode", "weights", "prefill_workers", "workers")
#: Columns of ``ranked``, in order.
RANKED = (
    *(*GROUP, "tokens_per_s_per_user", "configurations", "best", "picked", "right", "relative_throughput"),
    *("pairs", "pairs_right", "height"),
)


def served_points(table: pd.DataFrame) -> pd.DataFrame:
    """Interactivity [token/s/user] and throughput [token/s/GPU] of closed loops by point, measured and forecast."""
    mean = (table["reason"] == UNKNOWN_START) & table[
        "predicted"
    ].notna()  # is not judged, but tells the rate of a loop
    ratio = table["relative_error"].where(~mean, table["predicted"] / table["measured"] - 1.0)
    table = table.assign(evaluated=table["evaluated"] | mean, relative_error=ratio)
    usable = table[table["evaluated"] & ~table["saturated"] & (table["load"] == "closed_loop")]
    once = points(usable.assign(weights=[str(recipe).partition("_")[0] for recipe in usable["recipe"]]))
    place = ["point", *GROUP, *CONFIGURATION, "gpus", "concurrency"]
    names = {"measured": "measured", "forecast": "predicted"}
    if once.empty:
        told = [f"{number}_{name}" for name in names for number in ("interactivity", "throughput")]
        return pd.DataFrame(columns=[*place, *told, "configuration"])
    wide = once.pivot(index=place, columns="quantity", values=list(names.values()))  # noqa: PD010 - no product of keys
    wide = wide.reindex(columns=pd.MultiIndex.from_product([names.values(), ["tpot", "ttft", "throughput"]])).dropna(
        subset=[("measured", "tpot"), ("predicted", "tpot")]
    )
    found = wide.index.to_frame(index=False)
    for name, source in names.items():
        tpot, ttft, throughput = (wide[source, each].to_numpy() for each in ("tpot", "ttft", "throughput"))
        derived = loop_throughput(found, tpot, ttft)
        stated = np.isfinite(wide["measured", "throughput"].to_numpy()) & np.isfinite(throughput)
        found[f"interactivity_{name}"] = 1.0 / tpot
        found[f"throughput_{name}"] = np.where(stated, throughput, derived)
    split = found["mode"] == "disaggregated"
    workers = np.where(split, found["prefill_workers"] + " + " + found["workers"], found["workers"])
    found["configuration"] = found["weights"] + " " + workers
    return found[np.isfinite(found["throughput_measured"] * found["throughput_forecast"])].reset_index(drop=True)


def loop_throughput(runs: pd.DataFrame, tpot: Floats, ttft: Floats) -> Floats:
    """Input and output tokens of a closed loop by Little's law. [token/s/GPU]"""
    isl, osl, concurrency, gpus = (runs[name].to_numpy(dtype=float) for name in ("isl", "osl", "concurrency", "gpus"))
    return np.asarray(concurrency * (isl + osl) / (ttft + (osl - 1.0) * tpot) / gpus)


def curve_at(interactivity: Floats, throughput: Floats, levels: Sequence[float]) -> Floats:
    """Best throughput of a configuration at interactivities; NaN where none of its runs is so fast. [token/s/GPU]"""
    order = np.argsort(-np.asarray(interactivity, dtype=float), kind="stable")
    x, y = np.log(interactivity[order]), np.maximum.accumulate(np.log(throughput[order]))
    found = np.interp(np.log(np.asarray(levels, dtype=float)), x[::-1], y[::-1], right=np.nan)
    return np.asarray(np.exp(found).round(9))


def curves(runs: pd.DataFrame, what: str, levels: Sequence[float]) -> pd.DataFrame:
    """Curves of the configurations of a group, (levels, configurations); ``what`` is measured or forecast."""
    return pd.DataFrame(
        {
            name: curve_at(mine[f"interactivity_{what}"].to_numpy(), mine[f"throughput_{what}"].to_numpy(), levels)
            for name, mine in runs.groupby("configuration", sort=True)
        },
        index=pd.Index(levels, name="tokens_per_s_per_user"),
    )


def levels_of(runs: pd.DataFrame) -> list[float]:
    """Interactivities of the measured runs of a group, each once. [token/s/user]"""
    return sorted(set(runs["interactivity_measured"]))


def ranked(runs: pd.DataFrame) -> pd.DataFrame:
    """Judge what the forecast picks, group by group and interactivity by interactivity: ``RANKED``.

    ``relative_throughput`` is that of the pick over the best, measured (1 less the regret), ``height`` the best
    forecast over the best measured throughput [1]; ``pairs_right`` are those that the forecast puts in the measured
    order.
    """
    lines: list[tuple[Any, ...]] = []
    for group, mine in runs.groupby(list(GROUP), sort=True):
        levels = levels_of(mine)
        measured, forecast = (curves(mine, what, levels) for what in ("measured", "forecast"))
        # configurations forecast to be too slow follow all others, the fastest of them first
        too_slow = -1.0 / mine.groupby("configuration")["interactivity_forecast"].max()
        for place, level in enumerate(levels):
            real: pd.Series = measured.iloc[place].dropna()
            if len(real) < 2:
                continue
            there: pd.Series = forecast.iloc[place]
            told = there[real.index].fillna(too_slow)
            best, picked = str(real.idxmax()), str(told.idxmax())
            relative = float(real[picked] / real[best])
            pairs = [(real[a] - real[b]) * (told[a] - told[b]) for a, b in combinations(real.index, 2)]
            right = sum(product > 0 for product in pairs)
            known = float(there[real.index].max())
            tail = (len(real), best, picked, relative == 1.0, relative, len(pairs), right, known / float(real[best]))
            lines.append((*group, level, *tail))
    return pd.DataFrame(lines, columns=list(RANKED))


def heights(runs: pd.DataFrame) -> pd.DataFrame:
    """Height of the forecast frontier over the measured one, at each run on that one which the forecast reaches. [1]"""
    lines: list[tuple[Any, ...]] = []
    for group, mine in runs.groupby(list(GROUP), sort=True):
        levels = levels_of(mine)
        measured, forecast = (curves(mine, what, levels).max(axis=1) for what in ("measured", "forecast"))
        best = mine.groupby("interactivity_measured")["throughput_measured"].max()
        on = np.isclose(best, measured, rtol=1e-6) & forecast.notna().to_numpy()
        lines += [(*group, level, height) for level, height in (forecast / measured)[on].items()]
    return pd.DataFrame(lines, columns=[*GROUP, "tokens_per_s_per_user", "height"])


def summed(cells: pd.DataFrame, by: str | None = None) -> pd.DataFrame:
    """Sum up judged cells, in all or by a column: shares, mean relative throughput, median height. [1]"""
    names = ["group", "groups", "cells", "best_picked", "near_best", "relative_throughput", "regret", "worst"]
    names += ["pairs", "pairs_right", "height", "height_p10", "height_p90"]
    parts = [("all", cells)] if by is None else list(cells.groupby(by, sort=True))
    lines = []
    for name, mine in parts:
        if not len(mine):
            continue
        relative, height = mine["relative_throughput"].mean(), mine["height"]
        near = (mine["relative_throughput"] >= 1.0 - NEAR_BEST).mean()
        shares = (mine["right"].mean(), near, relative, 1.0 - relative, mine["relative_throughput"].min())
        order = (int(mine["pairs"].sum()), mine["pairs_right"].sum() / mine["pairs"].sum())
        heights = (height.median(), height.quantile(0.1), height.quantile(0.9))
        lines.append((name, len(mine.groupby(list(GROUP))), len(mine), *shares, *order, *heights))
    return pd.DataFrame(lines, columns=names)


def modes(runs: pd.DataFrame, levels: Sequence[float] = LEVELS) -> pd.DataFrame:
    """Compare the best disaggregated with the best aggregated configuration at the ``levels`` that both reach.
    [token/s/user]
    """
    lines = []
    for group, mine in runs.groupby(list(GROUP), sort=True):
        split = mine["mode"] == "disaggregated"
        if split.all() or not split.any():
            continue
        gains = [
            curves(mine[split], what, levels).max(axis=1) / curves(mine[~split], what, levels).max(axis=1)
            for what in ("measured", "forecast")
        ]
        both = pd.concat(gains, axis=1).dropna()
        told = zip(both.index, *both.to_numpy(dtype=float).T, strict=True)
        lines += [(*group, level, real, forecast, (real > 1) == (forecast > 1)) for level, real, forecast in told]
    return pd.DataFrame(lines, columns=[*GROUP, "tokens_per_s_per_user", "gain_measured", "gain_forecast", "agree"])
