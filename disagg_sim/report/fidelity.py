"""Measured against predicted: tables and scatter plots of a validation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg_sim.atomic import write_text
from disagg_sim.report.figures import COLOURS, STYLE, blank_figure, save_png

if TYPE_CHECKING:
    import pandas as pd

#: Relative errors between the dotted lines of a scatter plot. [1]
BAND = 0.2
#: Digits of numbers in the tables.
_DIGITS = "%.6g"


def write_tables(out: Path, tables: dict[str, pd.DataFrame]) -> None:
    """Write each table as ``NAME.csv`` into a directory, which is made where it is missing.

    Raises
    ------
    StoreError
        When the directory cannot be written.
    """
    for name, table in tables.items():
        write_text(out / f"{name}.csv", table.to_csv(index=False, float_format=_DIGITS))


def draw_scatter(table: pd.DataFrame, path: Path, *, title: str, unit: str) -> None:
    """Predicted over measured, both logarithmic, one panel for each ``panel``, one colour for each ``curve``.

    Parameters
    ----------
    table
        Columns ``panel``, ``curve``, ``measured`` and ``predicted``, above 0.
    unit
        What both are counted in.
    """
    import matplotlib as mpl

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
    """Marks of a cloud of so many points: large enough to be seen, small enough to be told apart. [pt]"""
    return float(min(max(160.0 / max(points, 1) ** 0.5, 2.5), 7.0))
