"""Plot and tabulate measured against predicted values, of kernels and of served runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.report.drawing import Line2D, mpl
from disagg_sim.report.figures import COLOURS, MARKS, STYLE, blank_figure, save_png
from disagg_sim.units import MS
from lab.calibration.served.tables import ENGINE_NOISE

#: Relative errors between the dotted lines of a scatter plot. [1]
BAND = 0.2
#: Quantity -> (unit, scale of the axis).
UNITS = {"tpot": ("ms", MS), "ttft": ("ms", MS), "latency": ("s", 1.0), "throughput": ("per s", 1.0)}


def draw_scatter(table: pd.DataFrame, path: Path, *, title: str, unit: str) -> None:
    """Draw predicted over measured, both logarithmic, one panel for each ``panel``, one colour for each ``curve``.

    Takes ``table`` (columns ``panel``, ``curve``, ``measured`` and ``predicted``, above 0).

    >>> import tempfile
    >>> table = pd.DataFrame({"panel": "GEMM", "curve": "h100_sxm", "measured": [1.0, 10.0], "predicted": [1.1, 9.0]})
    >>> with tempfile.TemporaryDirectory() as root:
    ...     draw_scatter(table, Path(root, "gemm.png"), title="kernels", unit="us")
    ...     [path.name for path in Path(root).iterdir()]
    ['gemm.png']
    """
    panels, curves = sorted(table["panel"].unique()), sorted(table["curve"].unique())
    with mpl.rc_context({**STYLE, "font.size": 10.0, "axes.titlesize": 10.5}):
        figure = blank_figure((4.4 * len(panels) + 0.3, 5.0))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11.0)
        drawn: dict[str, Any] = {}
        for number, name in enumerate(panels):
            panel = figure.add_subplot(1, len(panels), number + 1)
            mine = table[table["panel"] == name]
            times = mine[["measured", "predicted"]].to_numpy()
            low, high = times.min() / 1.3, times.max() * 1.3
            panel.plot([low, high], [low, high], color="0.3", linewidth=1.0, zorder=3)
            for factor in (1.0 + BAND, 1.0 - BAND):
                panel.plot([low, high], [low * factor, high * factor], ":", color="0.3", linewidth=0.9, zorder=3)
            for place, curve in enumerate(curves):
                points = mine[mine["curve"] == curve]
                if len(points):
                    drawn[curve] = panel.plot(
                        points["measured"],
                        points["predicted"],
                        ".",
                        markersize=_size(len(mine)),
                        alpha=0.5,
                        mew=0.0,
                        color=COLOURS[place % len(COLOURS)],
                        rasterized=True,
                    )[0]
            panel.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=f"{name} ({len(mine)})")
            panel.set_xlabel(f"measured [{unit}]")
            if number == 0:
                panel.set_ylabel(f"predicted [{unit}]")
        legend = figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=max(len(drawn), 1))
        for handle in legend.legend_handles:
            handle.set(markersize=9.0, alpha=1.0)
        save_png(figure, path)


def _size(points: int) -> float:
    """Marker size for a number of points: visible, but distinguishable. [pt]"""
    return float(min(max(160.0 / max(points, 1) ** 0.5, 2.5), 7.0))


def scatter_plots(table: pd.DataFrame, directory: Path) -> list[Path]:
    """Draw ``scatter_<quantity>.png`` of each quantity: a panel for each form, a colour for each system.

    >>> import tempfile
    >>> row = {"evaluated": True, "quantity": "tpot", "form": "serving", "system": "h100_sxm", "saturated": False}
    >>> row |= {"measured": 0.010, "predicted": 0.011, "relative_error": 0.1}
    >>> with tempfile.TemporaryDirectory() as root:
    ...     written = scatter_plots(pd.DataFrame([row]), Path(root))
    >>> [path.name for path in written]
    ['scatter_tpot.png']
    """
    written = []
    done = table[table["evaluated"]]
    for quantity in UNITS:
        part = done[done["quantity"] == quantity]
        if len(part):
            written.append(_quantity(part, quantity, directory / f"scatter_{quantity}.png"))
    return written


def _mark(index: int) -> str:
    """Another mark for the same colour in each round of the palette."""
    return MARKS[(index + index // len(COLOURS)) % len(MARKS)]


def _quantity(part: pd.DataFrame, quantity: str, path: Path) -> Path:
    unit, scale = UNITS[quantity]
    forms, systems = sorted(part["form"].unique()), sorted(part["system"].unique())
    columns = min(len(forms), 3)
    rows = -(-len(forms) // columns)
    with mpl.rc_context(STYLE):
        figure = blank_figure((4.6 * columns, 4.2 * rows + 0.5))
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(forms) :]:
            axis.set_visible(False)
        for axis, form in zip(axes.flat, forms, strict=False):
            mine = part[part["form"] == form]
            ends = np.array([mine[["measured", "predicted"]].min().min(), mine[["measured", "predicted"]].max().max()])
            ends = ends / scale * np.array([0.8, 1.25])
            axis.plot(ends, ends, color="#000000", linewidth=1.0)
            axis.fill_between(ends, ends * (1 - ENGINE_NOISE), ends * (1 + ENGINE_NOISE), color="#DDDDDD", linewidth=0)
            for index, system in enumerate(systems):
                for full, face in ((False, COLOURS[index % len(COLOURS)]), (True, "none")):
                    dots = mine[(mine["system"] == system) & (mine["saturated"] == full)]
                    axis.scatter(
                        dots["measured"] / scale,
                        dots["predicted"] / scale,
                        s=14,
                        marker=_mark(index),
                        facecolors=face,
                        edgecolors=COLOURS[index % len(COLOURS)],
                        linewidths=0.7,
                    )
            below = mine.loc[~mine["saturated"], "relative_error"].abs()
            error = f", median error {below.median():.1%}" if len(below) else ""
            axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=f"{form} ({len(mine)} lines{error})")
            axis.set(xlabel=f"measured {quantity} [{unit}]", ylabel=f"predicted {quantity} [{unit}]")
            axis.title.set_fontsize(9.5)
        handles = [
            Line2D([], [], color=COLOURS[i % len(COLOURS)], marker=_mark(i), linestyle="", label=name)
            for i, name in enumerate(systems)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(systems), 7), fontsize=8.5)
        figure.suptitle(
            f"{quantity}: filled below saturation, hollow above; the band is {ENGINE_NOISE:.0%}, engine to engine"
        )
        save_png(figure, path)
    return path
