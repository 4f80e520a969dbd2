"""Fit by robust least squares of the logarithm of a time; all kernels are fitted in this way.

Deterministic: one fixed start, no random numbers. A weak pull towards the start settles what the rows do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.extras import extra
from disagg_sim.facts.efficiency import Fit

Array = NDArray[np.float64]
F = TypeVar("F", bound=Fit)
K = TypeVar("K")
S = TypeVar("S")
#: Relative error at which the loss turns from squares to absolute values (soft L1). [1]
SOFT = 0.1
#: Residual of a parameter at e times its start: 100 rows that are wrong by 2 % outweigh a factor of e. [1]
PULL = 0.02
#: Fewer numbers are taken where they raise the loss by no more than this share. [1]
WORTH = 0.15
#: Steps of the optimiser at most. [1]
STEPS = 200


@dataclass(frozen=True, slots=True)
class Parameter:
    """A positive number to fit, in the unit of the field of the fit that it is named after."""

    name: str
    start: float
    low: float
    high: float


def fit_logarithm(times: Callable[[Array], Array], measured: Array, parameters: Sequence[Parameter]) -> Array:
    """Values of ``parameters`` for which ``log(times(values)/measured)`` is least, soft L1 at ``SOFT``; times in s."""
    with extra("calibrate"):
        from scipy.optimize import least_squares

    start = np.log([p.start for p in parameters])
    bounds = (np.log([p.low for p in parameters]), np.log([p.high for p in parameters]))
    target = np.log(measured)

    def residuals(logarithms: Array) -> Array:
        values = np.exp(logarithms)
        return np.concatenate([np.log(times(values)) - target, PULL * (logarithms - start)])

    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=SOFT, max_nfev=STEPS)
    return np.asarray(np.exp(found.x))


def solved(
    build: Callable[[Array], S], times: Callable[[S], Array], measured: Array, parameters: Sequence[Parameter]
) -> tuple[float, S]:
    """Loss, and what ``build`` makes of those values of ``parameters`` whose ``times`` [s] miss ``measured`` least."""
    best = build(fit_logarithm(lambda values: times(build(values)), measured, parameters))
    return mean_loss(times(best), measured), best


def by_name(parameters: Iterable[Parameter], values: Array) -> dict[str, Any]:
    """The values by the names of their parameters."""
    return dict(zip((each.name for each in parameters), values.tolist(), strict=True))


def enough(tried: Sequence[tuple[float, Sequence[F]]], most: int, worth: float = WORTH) -> list[F]:
    """Of (loss, fits) of several forms, the fits with fewest numbers whose loss is larger than the best by the share
    ``worth`` at most; forms of more than ``most`` numbers do not count where another has fewer.
    """
    few = [pair for pair in tried if sum(fit.parameters for fit in pair[1]) <= most] or list(tried)
    limit = (1.0 + worth) * min(loss for loss, _ in few)
    good = [(loss, fits) for loss, fits in few if loss <= limit]
    return list(min(good, key=lambda pair: (sum(fit.parameters for fit in pair[1]), pair[0]))[1])


def mean_loss(predicted: Array, measured: Array) -> float:
    """Mean soft L1 of the logarithms, in squares of ``SOFT``. [1]"""
    off = np.log(predicted / measured) / SOFT
    return float(np.mean(np.sqrt(1.0 + off**2) - 1.0))


def error_quantiles(predicted: Array, measured: Array) -> tuple[float, float]:
    """Median and 90 % quantile of the absolute relative error. [1]"""
    errors = np.abs(predicted / measured - 1.0)
    return float(np.median(errors)), float(np.quantile(errors, 0.9))


def ranges(table: pd.DataFrame, sizes: Iterable[str]) -> tuple[tuple[str, float, float], ...]:
    """Least and largest value of each of ``sizes`` that is a column: the ``valid`` of a fit of these rows."""
    return tuple((size, float(table[size].min()), float(table[size].max())) for size in sizes if size in table)


def origin(table: pd.DataFrame, sizes: Iterable[str]) -> dict[str, Any]:
    """What every fit says of its rows, those of one library; its errors are told later (``kernels.fit``)."""
    first = table.iloc[0]
    whose = {"engine": str(first["framework"]), "version": str(first["version"]), "points": len(table)}
    return {**whose, "median_error": 0.0, "p90_error": 0.0, "valid": ranges(table, sizes)}


def joint_fits(
    tables: Mapping[K, pd.DataFrame],
    numbers: Sequence[Parameter],
    own: Mapping[K, Collection[str]],
    build: Callable[[K, dict[str, Any]], F],
    times: Callable[[K, F], Array],
    weighed: Any = slice(None),
) -> tuple[float, list[F]]:
    """Loss and fits of several tables that share the numbers which are no table's ``own``; these count as parameters of
    the first. ``weighed`` says which rows count, some perhaps twice.
    """
    apart = {key: [each for each in numbers if each.name in own[key]] for key in tables}
    shared = [each for each in numbers if not any(each.name in names for names in own.values())]
    measured = np.concatenate([table["latency"].to_numpy(dtype=float) for table in tables.values()])[weighed]

    def fits(values: Array) -> list[F]:
        rest, found = iter(values.tolist()), list[F]()
        mine = {key: {p.name: next(rest) for p in apart[key]} for key in tables}
        common = {p.name: next(rest) for p in shared}
        for key, each in mine.items():
            count = len(each) + (0 if found else len(common))
            found.append(build(key, {**each, **common, "parameters": count}))
        return found

    def of_all(found: list[F]) -> Array:
        each = [times(key, fit) for key, fit in zip(tables, found, strict=True)]
        return np.asarray(np.concatenate(each)[weighed])

    return solved(fits, of_all, measured, [p for each in apart.values() for p in each] + shared)


def by_fit(
    rows: pd.DataFrame, fits: Iterable[F], words: Mapping[str, Any], times: Callable[[pd.DataFrame, F], Array]
) -> Array:
    """Time of each row by the fit that has its ``words`` (any where it leaves one empty), NaN without one. [s]"""
    result = np.full(len(rows), np.nan)
    for fit in fits:
        here = np.ones(len(rows), dtype=bool)
        for name, column in words.items():
            word = getattr(fit, name, "")
            here &= np.asarray(column == word) | (word == "")
        if here.any():
            result[here] = times(rows[here], fit)
    return result
