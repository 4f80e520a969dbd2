"""Find Pareto fronts of two quantities to be maximised, whatever they mean; take points as a step function.

The step function is the best ``y`` among points with at least this ``x``. Its points need not be a Pareto front: what
another point beats changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from disagg_sim.arrays import Floats, Ints

#: Points that are looked at first, where there are many; what their front beats is not sorted. [1]
FIRST_LOOK = 16_384
#: Points that are compared with that front at once: they stay in cache. [1]
COMPARED = 65_536


def pareto_mask(x: ArrayLike, y: ArrayLike) -> NDArray[np.bool_]:
    """Which points no other point beats: none has both x and y at least as large and one of them larger.

    Exact, O(n log n). Of equal points the first is kept; a point with a NaN is never kept. Of many points, those that
    the front of a few thousand beats are left out before the rest is sorted: 10 million take a second.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    known = np.flatnonzero(~(np.isnan(xs) | np.isnan(ys)))
    if known.size > FIRST_LOOK:
        few = known[:: known.size // FIRST_LOOK]
        few = few[_on_front(xs[few], ys[few])][::-1]
        beyond = np.append(ys[few], -np.inf)  # the largest y of these at an x or more
        parts = np.split(known, range(COMPARED, known.size, COMPARED))
        known = np.concatenate([part[ys[part] >= beyond[np.searchsorted(xs[few], xs[part])]] for part in parts])
    mask = np.zeros(xs.size, dtype=bool)
    mask[known[_on_front(xs[known], ys[known])]] = True
    return mask


def _on_front(xs: Floats, ys: Floats) -> Ints:
    """Places of the points of the front, x falling; no point has a NaN."""
    # x falls, and y inside equal x; the sort is stable, so the first of equal points stays first.
    order = np.lexsort((-ys, -xs))
    falling = ys[order]
    keep = np.ones(order.size, dtype=bool)
    keep[1:] = falling[1:] > np.maximum.accumulate(falling)[:-1]
    return order[keep]


def pareto_front(points: pd.DataFrame, *, x: str, y: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """Find the rows of ``points`` on the Pareto front of columns ``x`` and ``y``, both maximised."""
    if by:
        group = points.groupby(list(by), sort=False, observed=True, dropna=False).ngroup().to_numpy()
    else:
        group = np.zeros(len(points), dtype=np.int64)
    xs, ys = points[x].to_numpy(dtype=float), points[y].to_numpy(dtype=float)
    parts = []
    for rows in np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1]):
        front = rows[pareto_mask(xs[rows], ys[rows])]
        parts.append(front[np.argsort(xs[front], kind="stable")])
    return points.iloc[np.concatenate(parts)].reset_index(drop=True)


AXES = ("linear", "log")  # how the x axis is measured where an area is taken


def best_from(x: ArrayLike, y: ArrayLike, at: ArrayLike) -> Floats:
    """The largest ``y`` among points whose ``x`` is ``at`` or more; 0 where no point reaches so far."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    order = np.argsort(xs)
    best = np.append(np.maximum.accumulate(ys[order][::-1])[::-1], 0.0)
    return np.asarray(best[np.searchsorted(xs[order], np.asarray(at, dtype=float), side="left")])


def area(x: ArrayLike, y: ArrayLike, *, low: float, high: float, axis: str) -> float:
    """Area below the step function of the points from ``low`` to ``high``, exactly; on a log axis in the unit of y."""
    xs = np.asarray(x, dtype=float)
    edges = np.unique(np.concatenate([[low, high], xs[(xs > low) & (xs < high)]]))
    widths = np.diff(np.log(edges) if axis == "log" else edges)
    return float(np.sum(best_from(x, y, edges[1:]) * widths))


def hypervolume(x: ArrayLike, y: ArrayLike) -> float:
    """Find the area of all that the points beat, down to the origin: the linear area from x = 0 to the largest x."""
    xs = np.asarray(x, dtype=float)
    return area(xs, y, low=0.0, high=float(xs.max()), axis="linear") if xs.size else 0.0
