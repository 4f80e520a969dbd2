"""Import what pictures take of matplotlib, without a ``matplotlibrc`` of the working directory; place labels.

Labels stand at the points of a curve: as many as fit without overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from disagg_sim.extras import unconfigured

with unconfigured():
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

__all__ = ["Figure", "FigureCanvasAgg", "FuncFormatter", "Line2D", "LogLocator", "NullLocator", "Text", "mpl"]


MOST = 7  # labels of one picture
_RIGHT = tuple((x, y) for y in (8, 24, 40, 60, 85) for x in (12, 30, 60, 100))  # [point]
_LEFT = tuple((-x, y) for x, y in _RIGHT)  # for the last point alone: left of the others lies the cloud


def plain(name: str) -> str:
    """A name from outside as pictures take it: a ``$`` in it begins no formula."""
    return name.replace("$", r"\$")


def place_labels(
    figure: Any, axes: Any, points: Sequence[tuple[float, float, str]], *, others: Sequence[np.ndarray[Any, Any]] = ()
) -> int:
    """Annotate up to ``MOST`` of the points, evenly spread along the curve that they form. [1]"""
    if not points:
        return 0
    renderer = figure.canvas.get_renderer()
    figure.draw_without_rendering()
    curve = axes.transData.transform([(x, y) for x, y, _ in points])
    drawn = np.concatenate([_dense(curve), *(_dense(axes.transData.transform(other)) for other in others)])
    frame = axes.get_window_extent(renderer)
    legend = axes.get_legend()
    taken = [legend.get_window_extent(renderer)] if legend is not None else []
    placed = 0
    for index in _spread(curve, MOST):
        x, y, text = points[index]
        for offset in _RIGHT + (_LEFT if index == len(points) - 1 else ()):
            note = axes.annotate(
                text,
                (x, y),
                xytext=offset,
                textcoords="offset points",
                fontsize=8.5,
                color="#222222",
                zorder=4,
                ha="left" if offset[0] > 0 else "right",
                arrowprops={"arrowstyle": "-", "color": "#777777", "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3},
                bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            )
            note.set_in_layout(False)
            note.update_positions(renderer)
            box = Text.get_window_extent(note, renderer)  # of the text alone, without its line
            inside = frame.x0 <= box.x0 and box.x1 <= figure.bbox.x1 - 4 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            leader = np.linspace(curve[index], (box.x0 if offset[0] > 0 else box.x1, box.y0), 30)
            apart = not any(box.overlaps(other) or other.count_contains(leader) for other in taken)
            if inside and apart and not box.count_contains(drawn):
                drawn = np.concatenate([drawn, leader])
                taken.append(box.padded(5))
                placed += 1
                break
            note.remove()
    return placed


def _spread(curve: np.ndarray[Any, Any], count: int) -> list[int]:
    """Indices of points evenly spaced along the drawn length of the curve, both ends among them."""
    steps = np.hypot(*np.diff(curve, axis=0).T) if len(curve) > 1 else np.zeros(0)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    wanted = np.linspace(0.0, along[-1], min(count, len(curve)))
    return sorted({int(np.argmin(np.abs(along - place))) for place in wanted})


def _dense(curve: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The curve with points added along its straight parts, so that no box slips between two."""
    parts = [np.linspace(a, b, 30) for a, b in pairwise(curve)]
    return np.concatenate(parts) if parts else curve
