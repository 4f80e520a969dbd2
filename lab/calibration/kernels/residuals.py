"""Compute errors of predicted against measured times, by operator, engine, system, part and size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from disagg_sim.facts.uncertainty import EIGHTY
from disagg_sim.units import MS, US

#: Kernels shorter than this are told apart: their time is launch and floor more than work. [s]
SHORT = 20 * US
#: Size classes by measured time, each up to its end. [s]
CLASSES = (("below 20 us", SHORT), ("20-200 us", 200 * US), ("0.2-2 ms", 2 * MS), ("above 2 ms", np.inf))
#: Columns of an error table beside its keys.
FIGURES = ("rows", "median", "p90", "bias")
#: One more where the rows have bands: share of them that lies inside. [1]
COVERAGE = "coverage"
#: Errors count up to so many deviations where variances are compared: a few kernels timed wrongly shall not speak for
#: all. [1]
CLIP = 3.0
#: How figures are written for people.
_FORMATS = {"median": "{:.1%}", "p90": "{:.1%}", "bias": "{:+.1%}", COVERAGE: "{:.0%}"}


def error_table(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Summarise the errors of each group of ``keys`` and of its size classes.

    Takes ``rows`` (columns ``measured`` and ``predicted`` [s], no NaN, and the keys; and ``low`` and ``high`` [s] where
    there are bands). Returns the keys, ``size`` ("all" or a name of ``CLASSES``), and ``FIGURES``: number of rows,
    median and 90 % quantile of the absolute relative error, median relative error [1]; with bands ``COVERAGE``.

    >>> rows = pd.DataFrame({"operator": "gemm", "measured": [10 * US, 1 * MS], "predicted": [12 * US, 0.9 * MS]})
    >>> [(line.size, line.rows, f"{line.bias:+.2f}") for line in error_table(rows, ["operator"]).itertuples()]
    [('all', 2, '+0.05'), ('below 20 us', 1, '+0.20'), ('0.2-2 ms', 1, '-0.10')]
    """
    error = rows["predicted"] / rows["measured"] - 1.0
    ends = np.array([end for _, end in CLASSES])
    names = np.array([name for name, _ in CLASSES])
    size = names[np.searchsorted(ends, rows["measured"].to_numpy(), side="right")]
    table = rows[list(keys)].assign(size=size, error=error)
    figures: tuple[str, ...] = FIGURES
    if "low" in rows:
        figures = (*FIGURES, COVERAGE)
        table[COVERAGE] = rows["measured"].between(rows["low"], rows["high"])
    both = pd.concat([table.assign(size="all"), table])
    order = ["all", *(name for name, _ in CLASSES)]

    def numbers(group: pd.DataFrame) -> dict[str, float]:
        covered = {COVERAGE: group[COVERAGE].mean()} if COVERAGE in figures else {}
        return {"rows": len(group)} | figures_of(group["error"]) | covered

    result = pd.DataFrame(by_group(both, [*keys, "size"], numbers), columns=[*keys, "size", *figures])
    rank = {name: number for number, name in enumerate(order)}
    return result.sort_values([*keys, "size"], key=lambda c: c.map(rank) if c.name == "size" else c, ignore_index=True)


def by_group(
    table: pd.DataFrame, by: Sequence[str], numbers: Callable[[pd.DataFrame], dict[str, Any]]
) -> list[dict[str, Any]]:
    """List the groups of some columns in order: their words, and ``numbers`` of their rows."""
    groups = table.groupby(list(by), dropna=False, sort=True)
    return [dict(zip(by, key, strict=True)) | numbers(rows) for key, rows in groups]


def figures_of(error: pd.Series) -> dict[str, float]:
    """Median and 90 % quantile of absolute relative errors, and the median of the errors. [1]"""
    size = error.abs()
    return {"median": float(size.median()), "p90": float(size.quantile(0.9)), "bias": float(error.median())}


def part_of(held_out: bool) -> str:
    """Name the part of rows that the fit saw, or did not."""
    return "held out" if held_out else "fitted"


def lines_of(table: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """Write an error table as words for the terminal, errors in percent."""
    for row in table.to_dict("records"):
        yield tuple(_FORMATS.get(str(column), "{}").format(value) for column, value in row.items())


def band(predicted: NDArray[np.float64], sigma: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """10 % and 90 % quantiles of what is log-normal around ``predicted``, with s.d. ``sigma`` of the logarithm [1]."""
    width = np.exp(EIGHTY * sigma)
    return predicted / width, predicted * width


def deviation(errors: NDArray[np.float64]) -> float:
    """Standard deviation of the normal distribution around 0 whose 80 % band holds 80 % of these, in their unit."""
    return float(np.quantile(np.abs(errors), 0.8)) / EIGHTY


def rank_correlation(x: ArrayLike, y: ArrayLike) -> float:
    """Compute Spearman's rank correlation; equal values share their mean rank.

    Takes ``x`` and ``y`` of shape (pairs,). The result is from -1 to 1; NaN for fewer than three pairs or a constant
    side.

    Two neighbours of four change places, 1 - 6 * (1 + 1)/(4 * 15):

    >>> f"{rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 5.0, 9.0, 7.0]):.3f}"
    '0.800'
    """
    ranks = pd.DataFrame({"x": x, "y": y}).rank()
    if len(ranks) < 3 or ranks.nunique().min() < 2:
        return float("nan")
    return float(ranks["x"].corr(ranks["y"]))
