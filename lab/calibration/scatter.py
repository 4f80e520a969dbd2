"""Plot measured against predicted values, of kernels and of served runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.report.drawing import mpl
from disagg_sim.report.figures import COLOURS, STYLE, blank_figure, save_png
from disagg_sim.units import MS
from lab.calibration.served.tables import ENGINE_NOISE

#: Relative errors between the dotted lines of kernels. [1]
BAND = 0.2
#: Panels beside each other.
ACROSS = 4
#: Quantity -> (unit, scale of the axis).
UNITS = {"tpot": ("ms", MS), "ttft": ("ms", MS), "latency": ("s", 1.0), "throughput": ("per s", 1.0)}


def draw_scatter(table: pd.DataFrame, path: Path, *, title: str, unit: str, band: float = BAND) -> Path:
    """Draw predicted over measured, both logarithmic, one panel for each ``panel``, one colour for each ``curve``.

    Takes ``table`` (columns ``panel``, ``curve``, ``hollow``, ``measured`` and ``predicted``, above 0) and ``band``
    (relative error of the dotted lines [1]). Returns ``path``.
    """
    panels, curves = sorted(table["panel"].unique()), sorted(table["curve"].unique())
    columns = min(len(panels), ACROSS)
    rows = -(-len(panels) // columns)
    with mpl.rc_context({**STYLE, "font.size": 10.0, "axes.titlesize": 10.5}):
        figure = blank_figure((4.4 * columns + 0.3, 4.2 * rows + 0.8))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11.0)
        drawn: dict[str, Any] = {}
        for number, name in enumerate(panels):
            panel = figure.add_subplot(rows, columns, number + 1)
            mine = table[table["panel"] == name]
            times = mine[["measured", "predicted"]].to_numpy()
            low, high = times.min() / 1.3, times.max() * 1.3
            panel.plot([low, high], [low, high], color="0.3", linewidth=1.0, zorder=3)
            for factor in (1.0 + band, 1.0 - band):
                panel.plot([low, high], [low * factor, high * factor], ":", color="0.3", linewidth=0.9, zorder=3)
            size = min(max(160.0 / len(mine) ** 0.5, 2.5), 7.0)  # visible, but distinguishable [pt]
            for (curve, hollow), points in mine.groupby(["curve", "hollow"], sort=True):
                place = curves.index(curve)
                colour, mark = COLOURS[place % len(COLOURS)], "o^s"[place // len(COLOURS) % 3]
                look = {"mfc": "none", "mew": 0.7} if hollow else {"mew": 0.0, "alpha": 0.5}
                style: dict[str, Any] = {"marker": mark, "linestyle": "", "markersize": size / 2.0, **look}
                (dots,) = panel.plot(points["measured"], points["predicted"], color=colour, rasterized=True, **style)
                drawn.setdefault(str(curve), dots)
            panel.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=f"{name} ({len(mine)})")
            panel.set(xlabel=f"measured [{unit}]", ylabel=f"predicted [{unit}]" if number % columns == 0 else "")
        legend = figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=min(len(drawn), 7))
        for handle in legend.legend_handles:
            handle.set(markersize=9.0, alpha=1.0)
        save_png(figure, path)
    return path


def scatter_plots(table: pd.DataFrame, directory: Path) -> list[Path]:
    """Draw ``scatter_<quantity>.png`` of each quantity: a panel for each form, a colour for each system."""
    done = table[table["evaluated"]]
    done = done.assign(panel=done["form"], curve=done["system"], hollow=done["saturated"])
    written = []
    for quantity, (unit, scale) in UNITS.items():
        part = done[done["quantity"] == quantity]
        if len(part):
            part = part.assign(measured=part["measured"] / scale, predicted=part["predicted"] / scale)
            title = (
                f"{quantity}: filled below saturation, hollow above; the band is {ENGINE_NOISE:.0%}, engine to engine"
            )
            path = directory / f"scatter_{quantity}.png"
            written.append(draw_scatter(part, path, title=title, unit=unit, band=ENGINE_NOISE))
    return written
