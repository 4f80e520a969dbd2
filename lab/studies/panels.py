"""Draw pictures of several panels: curves side by side, and a table of ratios as coloured cells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from disagg_sim.report.drawing import FuncFormatter, TwoSlopeNorm, mpl
from disagg_sim.report.figures import COLOURS, LINES, MARKS, STYLE, blank_figure, save_png

PRINTED = "paper: "  # how a curve is called whose points a paper prints: drawn as crosses
MARKED = 120  # points of a curve up to which each has a mark [1]
FEW_DECADES = 1000.0  # span up to which an axis has ticks between the powers of ten [1]
#: Small: several panels share a picture.
_STYLE: Any = {
    **STYLE,
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.spines.top": True,
    "lines.linewidth": 1.7,
    "lines.markersize": 3.6,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What the panels of a picture have in common."""

    x_label: str
    y_label: str
    x_scale: str = "linear"  # "linear", "log" or "log2"
    y_scale: str = "linear"
    top_label: str = ""  # x in its own unit, drawn above the panel; "" = no such axis
    band: tuple[float, float] | None = None  # shaded, in the unit of the top axis
    joined: bool = True  # a line through the points of a curve
    hold: bool = False  # what a curve reaches at its first x it also delivers below: a thin line shows it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """A picture of curves.

    ``table`` has the columns ``panel``, ``curve``, ``x``, ``y`` and ``x_unit``, what 1 on the axis of x is in its
    own unit; panels and curves come in order of first appearance, a curve looks the same in all panels. Columns
    ``y_label`` and ``y_scale``, where there are any, stand in place of those of ``axes``.
    """

    title: str
    axes: Axes
    table: pd.DataFrame


def curve_points(panel: str, curve: str, x: ArrayLike, y: ArrayLike, y_label: str) -> pd.DataFrame:
    """Make the points of a curve for ``Picture.table``, x in its own unit."""
    return pd.DataFrame({"panel": panel, "curve": curve, "x": x, "y": y, "x_unit": 1.0, "y_label": y_label})


def draw_picture(picture: Picture, path: Path) -> None:
    """Write a picture of curves as PNG."""
    table, axes = picture.table, picture.axes
    panels = list(dict.fromkeys(table["panel"]))
    curves = list(dict.fromkeys(table["curve"]))
    columns = math.ceil(len(panels) / 2) if len(panels) > 3 else max(len(panels), 1)
    rows = math.ceil(len(panels) / columns)
    with mpl.rc_context(_STYLE):
        size = (6.4 if len(panels) == 1 else 4.7) * columns + 0.3, 4.1 * rows + 1.1
        figure = blank_figure(size)
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=11.0)
        drawn: dict[str, Any] = {}
        for number, name in enumerate(panels):
            panel = figure.add_subplot(rows, columns, number + 1)
            _panel(panel, table[table["panel"] == name], axes, curves, drawn)
            panel.set_title(name, loc="left")
        across = 2 if columns == 1 else 4 if len(drawn) == 4 else 3
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=min(len(drawn), across))
        save_png(figure, path)


def _panel(panel: Any, table: pd.DataFrame, axes: Axes, curves: list[str], drawn: dict[str, Any]) -> None:
    for number, curve in enumerate(curves):
        points = table[table["curve"] == curve]
        if not len(points):
            continue
        ours = curve.removeprefix(PRINTED)  # a point of the paper has the colour of our curve
        colour = COLOURS[(curves.index(ours) if ours in curves else number) % len(COLOURS)]
        look: dict[str, Any] = {"linestyle": LINES[number % len(LINES)] if axes.joined else "none"}
        if len(points) <= MARKED:
            look["marker"] = MARKS[number % len(MARKS)]
        if curve.startswith(PRINTED):
            look = {"marker": "x", "linestyle": "none", "markersize": 7, "markeredgewidth": 1.8, "zorder": 3}
        (drawn[curve],) = panel.plot(points["x"], points["y"], color=colour, **look)
        first = points.iloc[0]
        if axes.hold and not curve.startswith(PRINTED) and first["x"] > table["x"].min():
            ends = [table["x"].min(), first["x"]]
            panel.plot(ends, [first["y"]] * 2, color=COLOURS[number % len(COLOURS)], linewidth=0.8, alpha=0.7)
    panel.set_xlabel(axes.x_label)
    panel.set_ylabel(table["y_label"].iloc[0] if "y_label" in table else axes.y_label)
    y_scale = table["y_scale"].iloc[0] if "y_scale" in table else axes.y_scale
    _scale(panel.xaxis, axes.x_scale, table["x"])
    _scale(panel.yaxis, y_scale, table["y"])
    if axes.x_scale == "linear":
        panel.set_xlim(left=0)
    if y_scale == "linear":
        panel.set_ylim(0, 1.06 * table["y"].max())
    unit = float(table["x_unit"].iloc[0])
    if axes.band is not None:
        left, right = panel.get_xlim()
        low, high = (min(max(end / unit, left), right) for end in axes.band)
        name = f"{axes.band[0]:g} to {axes.band[1]:g} {axes.top_label}"
        drawn[name] = panel.axvspan(low, high, color="#000000", alpha=0.06, linewidth=0)
    if axes.top_label:
        _top_axis(panel, axes, unit)
    else:
        panel.spines["top"].set_visible(False)


def _top_axis(panel: Any, axes: Axes, unit: float) -> None:
    """x in its own unit above the panel."""
    top = panel.secondary_xaxis("top", functions=(lambda x: x * unit, lambda x: x / unit))
    top.set_xlabel(axes.top_label, fontsize="small", color="#555555")
    if axes.x_scale == "log":
        low, high = (end * unit for end in panel.get_xlim())
        top.set_xticks(_log_ticks(low, high, 10))
        top.minorticks_off()
        top.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    top.tick_params(labelsize="small", colors="#555555")


def _scale(axis: Any, scale: str, values: Any) -> None:
    if scale == "linear":
        return
    base = 2 if scale == "log2" else 10
    axis._set_axes_scale("log", base=base)
    low, high = float(values.min()), float(values.max())
    margin = (high / low) ** 0.04 * 1.02
    low, high = low / margin, high * margin
    axis.axes.set(**{f"{axis.axis_name}lim": (low, high)})
    axis.set_ticks(_log_ticks(low, high, base))
    axis.minorticks_off()
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _log_ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of two, or 1, 2 and 5 times powers of ten, or these alone where there are many."""
    steps = (1, 2, 5) if base == 10 and high < FEW_DECADES * low else (1,)
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    return [tick for power in powers for step in steps if low <= (tick := step * float(base) ** power) <= high]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A table of ratios: above 1 one way, below 1 the other."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]  # by row and column; NaN = no ratio [1]
    texts: tuple[tuple[str, ...], ...]
    legend: str
    limit: float  # ratio, and its inverse, at which the colour is full [1]

    @property
    def table(self) -> pd.DataFrame:
        """The ratios: a row each with its name as ``system``, the columns behind it."""
        return pd.DataFrame(self.values, columns=list(self.columns), index=self.rows).reset_index(names="system")


def draw_cells(cells: Cells, path: Path) -> None:
    """Write a table of ratios as PNG, purple above 1 and orange below, each with its text."""
    with mpl.rc_context({**_STYLE, "axes.grid": False}):
        figure = blank_figure((2.6 + 1.75 * len(cells.columns), 1.7 + 0.46 * len(cells.rows)))
        panel = figure.add_subplot()
        panel.set_title(cells.title, loc="left")
        end = math.log(cells.limit)
        shade = np.log(np.array(cells.values, dtype=float))
        colours = mpl.colormaps["PuOr"].with_extremes(bad="#F0F0F0")
        image = panel.imshow(np.clip(shade, -end, end), cmap=colours, norm=TwoSlopeNorm(0, -end, end), aspect="auto")
        panel.set_xticks(range(len(cells.columns)), cells.columns)
        panel.set_yticks(range(len(cells.rows)), cells.rows)
        panel.tick_params(length=0)
        for spine in panel.spines.values():
            spine.set_visible(False)
        for row, texts in enumerate(cells.texts):
            for column, text in enumerate(texts):
                strong = abs(np.nan_to_num(shade[row, column])) > 0.55 * end
                colour = "white" if strong else "#222222"
                panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
        bar = figure.colorbar(image, ax=panel, shrink=0.8, label=cells.legend)
        ticks = [each for each in (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0) if 1 / cells.limit <= each <= cells.limit]
        bar.set_ticks([math.log(tick) for tick in ticks], labels=[f"{tick:g}" for tick in ticks])
        save_png(figure, path)
