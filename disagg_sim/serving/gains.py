r"""Compute the gain of one frontier over another, and where disaggregation pays.

A frontier is a step function of interactivity: at ``x`` it delivers the best throughput among its points
with interactivity ``x`` or more. Of a frontier a over a frontier b (the claims of arXiv 2506.05508):

.. math:: G(x) = \frac{a(x)}{b(x)}, \qquad
          A = \frac{\int_{low}^{high} a(x)\,d\mu}{\int_{low}^{high} b(x)\,d\mu}, \qquad
          H = \frac{\int_0^\infty a(x)\,dx}{\int_0^\infty b(x)\,dx}

:math:`\mu` is x on a linear axis and ln x on a log axis, where every doubling of interactivity counts the
same. H also credits the interactivity that only one of the two reaches; A does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from disagg_sim.domain import ServingMode
from disagg_sim.errors import InputError, check_word
from disagg_sim.search.pareto import AXES, area, best_from, hypervolume
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT

COLOCATED = (ServingMode.COLOCATED, ServingMode.PIGGYBACK)  # the best of both is what disaggregation must beat
#: What a comparison of the modes has in common, where a table has the column.
SAME = ("case", "model", "isl", "osl", "system", "precision", "profile", "engine")
ROUNDING = 1e-12  # of a share that was added up from steps [1]


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The points of a frontier; dominated points among them change nothing."""

    x: NDArray[np.float64]  # (n,) interactivity [token/s]
    y: NDArray[np.float64]  # (n,) throughput per GPU [token/s]

    def at(self, x: ArrayLike) -> NDArray[np.float64]:
        """Best throughput with at least this interactivity; 0 where the curve does not reach. [token/s]"""
        return best_from(self.x, self.y, x)

    @property
    def reach(self) -> float:
        """Largest interactivity. [token/s]"""
        return float(self.x.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One frontier over another, over a stated range of interactivity."""

    axis: str  # "linear" or "log"
    low: float  # ends of the range over which they were compared [token/s]
    high: float
    area_ratio: float  # A; NaN where the two share no range [1]
    hypervolume_ratio: float  # H, over all interactivities, linear axis [1]
    largest: float  # largest G(x) in the range [1]
    largest_at: float  # the highest interactivity that has it [token/s]
    share_above: float  # share of the range where G(x) is at least ``worth``, measured on the axis [1]


def curve(points: pd.DataFrame) -> Curve:
    """Make the curve of a table of points of one case (``serving.points.COLUMNS``).

    Parameters
    ----------
    points
        At least the columns of interactivity and throughput.

    Returns
    -------
    Curve
        Arrays of shape (points,). [token/s]

    Raises
    ------
    InputError
        When there is no point.

    Examples
    --------
    At 15 tokens/s a user the point at 20 serves, beyond 20 none does:

    >>> points = pd.DataFrame({INTERACTIVITY: [10.0, 20.0], THROUGHPUT: [800.0, 300.0]})
    >>> curve(points).at([10, 15, 25]).tolist()
    [800.0, 300.0, 0.0]
    """
    if not len(points):
        raise InputError("a curve needs at least one point")
    return Curve(points[INTERACTIVITY].to_numpy(dtype=float), points[THROUGHPUT].to_numpy(dtype=float))


def pointwise_gain(a: Curve, b: Curve, x: ArrayLike) -> NDArray[np.float64]:
    """Find G(x): throughput of ``a`` over that of ``b`` at interactivity ``x``. [1]

    Parameters
    ----------
    a, b : Curve
        Frontiers of the same setting.
    x : array_like
        Interactivities. [token/s]

    Returns
    -------
    ndarray, shape of ``x``
        Infinite where only ``a`` reaches, 0 where only ``b`` does, NaN where neither does. [1]

    Examples
    --------
    >>> a, b = (Curve(np.array(x), np.array(y)) for x, y in (([10.0, 30.0], [8.0, 4.0]), ([10.0, 20.0], [8.0, 2.0])))
    >>> pointwise_gain(a, b, [10, 20, 30]).tolist()
    [1.0, 2.0, inf]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(a.at(x) / b.at(x))


def shared_range(a: Curve, b: Curve, *, low: float | None = None, high: float | None = None) -> tuple[float, float]:
    """The range of interactivity in which both curves have points, inside ``low`` to ``high``. [token/s]

    Both ends are NaN where there is none. Below its first point a curve goes on flat, so a stated ``low``
    may lie there; without one the range begins where both have points.
    """
    first = max(float(a.x.min()), float(b.x.min())) if low is None else low
    last = min(a.reach, b.reach, math.inf if high is None else high)
    return (first, last) if first <= last else (math.nan, math.nan)


def gain(
    a: Curve, b: Curve, *, axis: str = "log", low: float | None = None, high: float | None = None, worth: float = 1.0
) -> Gain:
    """Compute what ``a`` gains over ``b`` in the range of interactivity that both reach; NaN where there is none.

    ``low`` and ``high`` narrow the range [token/s]. The area ratio measures interactivity by ``axis``, "log" or
    "linear"; ``share_above`` counts gains from ``worth`` on [1].

    From 10 to 20 tokens/s a delivers 4 and b 2, over all interactivities 8 x 10 + 4 x 20 and 8 x 10 + 2 x 10:

    >>> a, b = (Curve(np.array(x), np.array(y)) for x, y in (([10.0, 30.0], [8.0, 4.0]), ([10.0, 20.0], [8.0, 2.0])))
    >>> found = gain(a, b, axis="linear")
    >>> found.low, found.high, found.area_ratio, found.hypervolume_ratio, found.largest
    (10.0, 20.0, 2.0, 1.6, 2.0)
    """
    check_word("axis", axis, AXES)
    if not 0 < (1.0 if low is None else low) <= (math.inf if high is None else high):
        raise InputError(f"range of interactivity {low} to {high}: allowed are 0 < low <= high tokens/s")
    first, last = shared_range(a, b, low=low, high=high)
    whole = hypervolume(a.x, a.y) / hypervolume(b.x, b.y)
    if math.isnan(first):
        nothing = dict.fromkeys(("area_ratio", "largest", "largest_at", "share_above"), math.nan)
        return Gain(axis=axis, low=first, high=last, hypervolume_ratio=whole, **nothing)
    steps = np.unique(np.concatenate([[first, last], *(c.x[(c.x > first) & (c.x < last)] for c in (a, b))]))
    ratios = pointwise_gain(a, b, steps)  # G is constant from above one step up to the next
    best = int(np.flatnonzero(ratios == ratios.max())[-1])
    if first == last:
        ratio, share = float(ratios[0]), float(ratios[0] >= worth)
    else:
        ratio = area(a.x, a.y, low=first, high=last, axis=axis) / area(b.x, b.y, low=first, high=last, axis=axis)
        widths = np.diff(np.log(steps) if axis == "log" else steps)
        share = float(widths[ratios[1:] >= worth].sum() / widths.sum())
    return Gain(
        axis=axis,
        low=first,
        high=last,
        area_ratio=ratio,
        hypervolume_ratio=whole,
        largest=float(ratios[best]),
        largest_at=float(steps[best]),
        share_above=share,
    )


def where_it_pays(
    frontier: pd.DataFrame,
    *,
    axis: str = "log",
    low: float | None = None,
    high: float | None = None,
    worth: float = 1.05,
    by: Sequence[str] = SAME,
) -> pd.DataFrame:
    """Find where disaggregation pays: its frontier over the best of both co-located modes, for each setting.

    Parameters
    ----------
    frontier : DataFrame
        Frontiers (or all points) of several modes below one another, column ``mode`` as in ``COLOCATED``
        and ``ServingMode.DISAGGREGATED``.
    axis, low, high, worth
        As in ``gain``.
    by : sequence of str
        Columns that must agree for two modes to be compared; those that the table lacks are left out.

    Returns
    -------
    DataFrame
        One row a setting, in order of first appearance: the columns ``by``, the fields of ``Gain``,
        ``disaggregated_reach`` and ``colocated_reach`` [token/s], and ``pays``: "everywhere", "mostly"
        (over at least half of the range), "partly", "nowhere" (G is at least ``worth``), or
        "no common range", "disaggregated only", "colocated only".

    Raises
    ------
    InputError
        An unknown mode or a missing column.

    Examples
    --------
    >>> modes = ["disaggregated", "disaggregated", "colocated", "colocated"]
    >>> points = {"mode": modes, INTERACTIVITY: [10.0, 30.0, 10.0, 20.0], THROUGHPUT: [8.0, 4.0, 8.0, 2.0]}
    >>> table = where_it_pays(pd.DataFrame(points | {"model": "any"}), axis="linear")
    >>> table[["largest", "share_above", "pays"]].values.tolist()
    [[2.0, 1.0, 'everywhere']]
    """
    known = (ServingMode.DISAGGREGATED, *COLOCATED)
    for column in ("mode", INTERACTIVITY, THROUGHPUT):
        if column not in frontier:
            raise InputError(f"table of frontiers: missing column {column!r}")
    for mode in frontier["mode"].astype(str).unique():
        check_word("mode", mode, known)
    names = [name for name in by if name in frontier]
    read = frontier[list(dict.fromkeys([*names, "mode", INTERACTIVITY, THROUGHPUT]))]
    rows = []
    for _, points in read.groupby(names, sort=False, observed=True, dropna=False):
        split = points["mode"] == ServingMode.DISAGGREGATED
        setting = {name: points[name].iloc[0] for name in names}
        rows.append(setting | _row(points[split], points[~split], axis=axis, low=low, high=high, worth=worth))
    return pd.DataFrame(rows)


def _row(
    ours: pd.DataFrame, theirs: pd.DataFrame, *, axis: str, low: float | None, high: float | None, worth: float
) -> dict[str, Any]:
    reach = {
        f"{name}_reach": float(points[INTERACTIVITY].max()) if len(points) else 0.0
        for name, points in ((ServingMode.DISAGGREGATED, ours), (COLOCATED[0], theirs))
    }
    if not len(ours) or not len(theirs):
        return reach | {"axis": axis, "pays": f"{ServingMode.DISAGGREGATED if len(ours) else COLOCATED[0]} only"}
    found = gain(curve(ours), curve(theirs), axis=axis, low=low, high=high, worth=worth)
    values = {name: getattr(found, name) for name in found.__slots__}
    return values | reach | {"pays": _verdict(found.share_above)}


def _verdict(share: float) -> str:
    if math.isnan(share):
        return "no common range"
    if share >= 1 - ROUNDING:
        return "everywhere"
    return "mostly" if share >= 0.5 - ROUNDING else "partly" if share > 0 else "nowhere"
