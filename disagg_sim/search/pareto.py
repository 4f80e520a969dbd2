"""Find Pareto fronts of two quantities to be maximised, whatever they mean."""

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
    the front of a few thousand beats are left out before the rest is sorted: 10 million take a second. Takes ``x`` and
    ``y`` of shape (n,). The result has shape (n,).

    >>> pareto_mask([1, 2, 2, 3], [9, 5, 7, 1]).tolist()
    [True, False, True, True]
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
    """Find the rows of ``points`` on the Pareto front of columns ``x`` and ``y``, both maximised.

    Returns groups in order of first appearance, inside a group x rises (and y falls); fresh index.

    The slow case keeps its front where cases are apart:

    >>> points = pd.DataFrame({"case": ["a", "a", "a", "b"], "user": [10, 20, 20, 15], "gpu": [8, 5, 3, 4]})
    >>> [pareto_front(points, x="user", y="gpu", by=by).gpu.tolist() for by in ((), ("case",))]
    [[8, 5], [8, 5, 4]]
    """
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
