"""Draw the breakdown of a design: its parts by resource, and its operators on the roofline of the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.atomic import require_own, written
from disagg_sim.certainty.breakdown import Breakdown
from disagg_sim.certainty.passes import LATENCIES, RESOURCES
from disagg_sim.errors import InputError
from disagg_sim.extras import unconfigured
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_system
from disagg_sim.report.breakdown import RESOURCE_COLOURS, RESOURCE_TEXT, heading, latency_title, lines_of, point_of
from disagg_sim.units import MS, TB, TERA

with unconfigured():  # without a ``matplotlibrc`` of the working directory
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

__all__ = ["COLOURS", "MARK", "STYLE", "blank_figure", "breakdown_figure", "draw_breakdown", "mpl"]

#: In every picture: others are not replaced.
MARK = "Drawn by disagg-sim"
#: Okabe and Ito's palette, which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Of all pictures.
STYLE: Any = {
    "figure.figsize": (9.0, 5.6),
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "font.size": 11.0,
    "axes.titlesize": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
}

#: Arithmetic that no matrix product uses.
UNUSED_ARITHMETIC = frozenset({"fp64", "fp32", "tf32", "int8"})
ROOF = "#555555"
#: Bars that a panel has room for at least, beside its roofline. [1]
LEAST_BARS = 9
_STYLE: Any = {**STYLE, "font.size": 9.5, "axes.titlesize": 10.5, "svg.hashsalt": "disagg-sim"}
#: Operators that have their name on the roofline. [1]
NAMED = 7


def blank_figure(size: tuple[float, float] | None) -> Any:
    """Make an empty picture that needs no display."""
    figure = Figure(layout="constrained", figsize=size)
    FigureCanvasAgg(figure)
    return figure


def draw_breakdown(found: Breakdown, path: Path, *, row: Any) -> None:
    """Write the picture of a design."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg", "pdf"):
        raise InputError(f"{path}: a picture ends in .png, .svg or .pdf")
    require_own(path.parent, [path.name], MARK)
    told = {"Software": MARK} if kind == "png" else {"Creator": MARK, **({"Date": None} if kind == "svg" else {})}
    with mpl.rc_context(_STYLE):
        figure = breakdown_figure(found, row)
        with written(path) as handle:
            figure.savefig(handle, format=kind, metadata=told)


def breakdown_figure(found: Breakdown, row: Any) -> Any:
    """Draw a design: for TTL and FTL each its parts by resource, and its operators on the roofline of the GPU."""
    point = point_of(found, row)
    names = [name for name in LATENCIES if len(found.latency(row, name))]
    heights = [max(len(lines_of(found, row, name)), LEAST_BARS) for name in names]
    figure = blank_figure((13.0, 1.4 + 0.29 * sum(heights) + 0.9 * len(names)))
    figure.suptitle(heading(point).replace(": ", "\n", 1), x=0.01, ha="left", fontsize=11.0)
    grid = figure.add_gridspec(len(names), 2, width_ratios=(1.15, 1.0), height_ratios=heights)
    for place, name in enumerate(names):
        bars, roof = figure.add_subplot(grid[place, 0]), figure.add_subplot(grid[place, 1])
        _draw_bars(bars, found, row, name)
        parts, side = found.latency(row, name), "prefill_" if name == "ftl" and "prefill_system" in point else ""
        own = parts["step"] != "prefill pass" if name == "ttl" else parts["step"] != ""
        _draw_roofline(roof, parts[own], load_system(str(point[f"{side}system"])))
    return figure


def _draw_bars(axes: Any, found: Breakdown, row: Any, latency: str) -> None:
    """Stacked bars: one a part of the latency, coloured by what its time goes by for; a tick at the speed of light."""
    lines = lines_of(found, row, latency)
    places = np.arange(len(lines))[::-1]
    unit, name = (MS, "ms") if max(line.seconds for line in lines) < 1.0 else (1.0, "s")
    left = np.zeros(len(lines))
    for resource in RESOURCES:
        width = np.array([line.by[resource] for line in lines]) / unit
        if width.sum() > 0:
            colour, text = RESOURCE_COLOURS[resource], RESOURCE_TEXT[resource]
            axes.barh(places, width, left=left, height=0.72, color=colour, label=text, zorder=2)
            left = left + width
    ideal = np.array([line.light * line.seconds for line in lines]) / unit
    shown = ideal > 0
    ends = places[shown] - 0.42, places[shown] + 0.42
    axes.vlines(ideal[shown], *ends, color="black", linewidth=1.6, zorder=3, label="speed of light")
    for place, end, line in zip(places, np.maximum(left, ideal), lines, strict=True):
        mark = "  outside its fit" if line.outside else ""
        axes.annotate(
            f"{line.share:.1%}{mark}",
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    steps = {"prefill pass": " (prefill)", "mixed step": " (mixed)"}
    labels = [line.operator + (steps.get(line.step, "") if latency == "ttl" else "") for line in lines]
    axes.set_yticks(places, labels)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, max(left.max(), ideal.max()) * 1.2)
    axes.set_ylim(-0.7, len(lines) - 0.3)
    axes.set_xlabel(f"time [{name}]")
    axes.set_title(latency_title(found, row, latency), loc="left")
    axes.legend(loc="lower right", fontsize=8.5)


def _draw_roofline(axes: Any, parts: pd.DataFrame, system: SystemSpec) -> None:
    """Draw the operators that multiply by FLOP per byte and FLOP/s reached, under the roofs; area is share of time."""
    work = parts[(parts["flops"] > 0) & (parts["hbm_bytes"] > 0)]
    x, y = work["flops"] / work["hbm_bytes"], work["flops"] / work["seconds"] / TERA
    peaks: dict[float, list[str]] = {}
    for name, peak in system.peak_flops.items():
        if name not in UNUSED_ARITHMETIC:
            peaks.setdefault(peak / TERA, []).append(name)
    top, bandwidth = max(peaks), system.hbm_bandwidth / TERA
    low = 10.0 ** np.floor(np.log10(min(x.min(), top / bandwidth) / 2.0)) if len(work) else 1.0
    high = 10.0 ** np.ceil(np.log10(max(x.max() if len(work) else 1.0, top / bandwidth) * 2.0))
    axes.plot([low, top / bandwidth], [low * bandwidth, top], color=ROOF, zorder=1)
    for peak, names in peaks.items():
        axes.plot([peak / bandwidth, high], [peak, peak], color=ROOF, zorder=1)
        text = f"{', '.join(names)}\n{peak:,.0f} TFLOP/s"
        axes.annotate(text, (1.01, peak), xycoords=("axes fraction", "data"), va="center", fontsize=8.5, color=ROOF)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    bottom = min(y.min() if len(work) else top, low * bandwidth * 4.0) / 2.0
    axes.set_ylim(bottom, top * 2.0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    foot = (max(bottom * 1.15 / bandwidth, low), max(bottom * 1.15, low * bandwidth))
    axes.annotate(
        f"HBM {system.hbm_bandwidth / TB:.3g} TB/s",
        foot,
        xytext=(14, 0),
        textcoords="offset points",
        va="bottom",
        fontsize=8.5,
        color=ROOF,
    )
    bound = work[[f"{name}_s" for name in RESOURCES]].idxmax(axis=1)
    colours = [RESOURCE_COLOURS[str(name).removesuffix("_s")] for name in bound]
    axes.scatter(x, y, s=30 + 1400 * work["share"], c=colours, alpha=0.75, linewidths=0.8, edgecolors="white", zorder=3)
    named = work.nlargest(NAMED, "share").index
    for place, i in enumerate(sorted(named, key=lambda i: -y[i])):  # in the corner above the roof, where no point lies
        axes.annotate(
            str(work["operator"][i]),
            (x[i], y[i]),
            xytext=(0.03, 0.94 - 0.075 * place),
            textcoords="axes fraction",
            fontsize=8.5,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkB": 2.0},
            zorder=4,
        )
    axes.set_xlabel("FLOP per byte of HBM traffic")
    axes.set_ylabel("TFLOP/s reached on a GPU")
    axes.set_title("its operators that multiply, on the roofline (area: share of time)", loc="left")
