"""Draw curves in panels beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from numpy.typing import ArrayLike

from disagg_sim.atomic import written
from disagg_sim.report.roofline import COLOURS, MARK, STYLE, blank_figure, mpl

LINES = ("-", "--", ":", "-.")
PRINTED = "paper: "  # how a curve is called whose points a paper prints: drawn as crosses in the colour of ours
ACROSS = 3  # panels beside each other [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What the panels of a picture have in common."""

    x_label: str
    y_label: str
    x_scale: str = "linear"  # or "log"
    y_scale: str = "linear"
    joined: bool = True  # a line through the points of a curve


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """A picture of curves.

    ``table`` has the columns ``panel``, ``curve``, ``x``, ``y`` and ``x_unit``, what 1 on the axis of x is in its own
    unit; a curve looks the same in all panels. Columns ``y_label`` and ``y_scale``, where there are any, stand in place
    of those of ``axes``.
    """

    title: str
    axes: Axes
    table: pd.DataFrame


def curve_points(panel: str, curve: str, x: ArrayLike, y: ArrayLike, y_label: str) -> pd.DataFrame:
    """Make the points of a curve for ``Picture.table``, x in its own unit."""
    return pd.DataFrame({"panel": panel, "curve": curve, "x": x, "y": y, "x_unit": 1.0, "y_label": y_label})


def draw_picture(picture: Picture, path: Path) -> None:
    """Write a picture of curves as PNG."""
    axes, panels = picture.axes, list(picture.table.groupby("panel", sort=False))
    curves = [name for name in picture.table["curve"].unique() if not name.startswith(PRINTED)]
    columns = min(len(panels), ACROSS)
    rows = -(-len(panels) // columns)
    with mpl.rc_context({**STYLE, "font.size": 10.0, "axes.titlesize": 10.5, "lines.markersize": 3.6}):
        figure = blank_figure((4.7 * columns + 1.5, 4.1 * rows + 1.1))
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=11.0)
        drawn: dict[str, Any] = {}
        for number, (name, mine) in enumerate(panels):
            panel = figure.add_subplot(rows, columns, number + 1)
            for curve, points in mine.groupby("curve", sort=False):
                ours = str(curve).removeprefix(PRINTED)
                place = curves.index(ours) if ours in curves else 0
                look: dict[str, Any] = {
                    "marker": "o",
                    "linestyle": LINES[place % len(LINES)] if axes.joined else "none",
                }
                if ours != curve:
                    look = {"marker": "x", "linestyle": "none", "markersize": 7, "zorder": 3}
                (drawn[str(curve)],) = panel.plot(points["x"], points["y"], color=COLOURS[place % len(COLOURS)], **look)
            own = mine.iloc[0]
            panel.set(xlabel=axes.x_label, ylabel=own.get("y_label", axes.y_label), title=name)
            panel.set(xscale=axes.x_scale, yscale=own.get("y_scale", axes.y_scale))
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=min(len(drawn), 3))
        with written(path) as handle:
            figure.canvas.print_png(handle, metadata={"Software": MARK})  # draws once; ``savefig`` draws twice
