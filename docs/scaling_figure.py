"""Picture of cost against size, from what ``benchmarks/scaling.py`` measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.report.roofline import COLOURS, blank_figure
from disagg_sim.units import GB
from docs.attention_figures import MARKS

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from scaling import KINDS, TABLE, fits

#: What each kind is called in the picture.
WORDS = {
    "sweeps": "sweeps, three modes",
    "matching": "matching and frontier",
    "co-located": "simulation, co-located",
    "disaggregated": "simulation, disaggregated",
}


def scaling() -> Any:
    """CPU time and peak memory over size: marks are measured, dashed lines are fits drawn on."""
    rows = pd.read_csv(TABLE)
    lines = fits(rows)
    figure = blank_figure((10.0, 4.8))
    left, right = figure.subplots(1, 2)
    for colour, mark, (kind, words) in zip(COLOURS, MARKS, WORDS.items(), strict=False):
        part, line = rows[rows["kind"] == kind], lines[kind]
        look = {"color": colour, "marker": mark, "markersize": 5}
        told = f"{words}: {line.exponent:.2f} \u00b1 {line.error:.2f}"
        left.loglog(part["size"], part["cpu_s"], label=told, linestyle="", **look)
        beyond = np.geomspace(KINDS[kind].fitted_from, KINDS[kind].wanted, 2)
        left.loglog(beyond, [line.at(size) for size in beyond], "--", color=colour, linewidth=1.2)
        right.semilogx(part["size"], part["peak_bytes"] / GB, linestyle="-", linewidth=1.0, **look)
    for axes, name in ((left, "CPU time of one core [s]"), (right, "peak memory of the process [GB]")):
        axes.set(xlabel="design points, or requests", ylabel=name)
        axes.grid(which="major", alpha=0.3)
    right.set_ylim(0.0, None)
    figure.legend(title="exponent of CPU time \u00b1 its standard error", loc="outside lower center", ncols=2)
    return figure
