"""Pictures of evaluated serving rows: predicted against measured, and the error over the load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from disagg_sim.report.figures import COLOURS, MARKS, STYLE, save_png
from disagg_sim.units import MS

if TYPE_CHECKING:
    import pandas as pd

#: Quantity -> (unit, scale of the axis).
UNITS = {"tpot": ("ms", MS), "ttft": ("ms", MS), "latency": ("s", 1.0), "throughput": ("per s", 1.0)}
#: Band of the noise between engines that is drawn beside the diagonal. [1]
NOISE = 0.16


def scatter_plots(table: pd.DataFrame, directory: Path) -> list[Path]:
    """One picture a quantity, ``scatter_<quantity>.png``: a panel for each form, a colour for each system."""
    written = []
    done = table[table["evaluated"]]
    for quantity in UNITS:
        part = done[done["quantity"] == quantity]
        if len(part):
            written.append(_scatter(part, quantity, directory / f"scatter_{quantity}.png"))
    return written


def _mark(index: int) -> str:
    """Another mark for the same colour in each round of the palette."""
    return MARKS[(index + index // len(COLOURS)) % len(MARKS)]


def _scatter(part: pd.DataFrame, quantity: str, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    unit, scale = UNITS[quantity]
    forms, systems = sorted(part["form"].unique()), sorted(part["system"].unique())
    columns = min(len(forms), 3)
    rows = -(-len(forms) // columns)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=(4.6 * columns, 4.2 * rows + 0.5), squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(forms) :]:
            axis.set_visible(False)
        for axis, form in zip(axes.flat, forms, strict=False):
            mine = part[part["form"] == form]
            ends = np.array([mine[["measured", "predicted"]].min().min(), mine[["measured", "predicted"]].max().max()])
            ends = ends / scale * np.array([0.8, 1.25])
            axis.plot(ends, ends, color="#000000", linewidth=1.0)
            axis.fill_between(ends, ends * (1 - NOISE), ends * (1 + NOISE), color="#DDDDDD", linewidth=0)
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
        figure.suptitle(f"{quantity}: filled below saturation, hollow above; the band is {NOISE:.0%}, engine to engine")
        save_png(figure, path)
        plt.close(figure)
    return path
