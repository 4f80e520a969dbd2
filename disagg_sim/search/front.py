"""Treat points as a step function: the best ``y`` among points with at least this ``x``, and areas below it.

Knows nothing of what ``x`` and ``y`` mean; both are wanted large. The points need not be a Pareto front:
what another point beats changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from disagg_sim.arrays import Floats

AXES = ("linear", "log")  # how the x axis is measured where an area is taken


def best_from(x: ArrayLike, y: ArrayLike, at: ArrayLike) -> Floats:
    """The largest ``y`` among points whose ``x`` is ``at`` or more; 0 where no point reaches so far.

    Takes ``x`` and ``y`` of shape (n,) and ``at`` [unit of x]. Returns a function that never rises with ``at`` [unit of
    y].

    >>> best_from([10, 30], [8, 2], [5, 10, 20, 31]).tolist()
    [8.0, 8.0, 2.0, 0.0]
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    order = np.argsort(xs)
    best = np.append(np.maximum.accumulate(ys[order][::-1])[::-1], 0.0)
    return np.asarray(best[np.searchsorted(xs[order], np.asarray(at, dtype=float), side="left")])


def area(x: ArrayLike, y: ArrayLike, *, low: float, high: float, axis: str) -> float:
    """Area below the step function of the points from ``low`` to ``high``, exactly.

    Takes ``x`` and ``y`` of shape (n,) and ``low`` and ``high`` [unit of x]. Returns [unit of y times unit of x], or
    [unit of y] on a log axis.

    >>> area([10, 30], [8, 2], low=0, high=30, axis="linear")
    120.0
    """
    xs = np.asarray(x, dtype=float)
    edges = np.unique(np.concatenate([[low, high], xs[(xs > low) & (xs < high)]]))
    widths = np.diff(np.log(edges) if axis == "log" else edges)
    return float(np.sum(best_from(x, y, edges[1:]) * widths))


def hypervolume(x: ArrayLike, y: ArrayLike) -> float:
    """Find the area of all that the points beat, down to the origin: the linear area from x = 0 to the largest x.

    Parameters
    ----------
    x, y : array_like, shape (n,)
        The points, in any order; both above 0. [any]

    Returns
    -------
    float
        0 without points. [unit of y times unit of x]

    Examples
    --------
    Up to x = 10 the best y is 8, from there to 30 it is 2; 10 x 8 + 20 x 2:

    >>> hypervolume([10, 30], [8, 2])
    120.0
    """
    xs = np.asarray(x, dtype=float)
    return area(xs, y, low=0.0, high=float(xs.max()), axis="linear") if xs.size else 0.0
