"""Plot elasticities along each frontier: what bounds a design, and what more hardware would bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.certainty.elasticity import PARAMETERS
from disagg_sim.report.drawing import mpl
from disagg_sim.report.figures import COLOURS, STYLE, X_LABEL, X, blank_figure, save_png
from disagg_sim.report.words import MODE_TEXT

#: Parameters as people read them.
WORDS = {
    "flops": "FLOP rate",
    "hbm_bandwidth": "HBM bandwidth",
    "nvlink_bandwidth": "NVLink bandwidth",
    "nic_bandwidth": "NIC bandwidth",
    "nvlink_latency": "NVLink latency (less)",
    "nic_latency": "NIC latency (less)",
    "hbm_capacity": "HBM capacity",
}
REST = "nothing of it: host, fixed times of kernels"
#: Elasticities of a frontier are drawn up to this: near its end they grow without limit. [1]
TOP = 3.0
_LIMIT = 0.005  # parameters that never matter more are not drawn [1]


def draw_elasticities(table: pd.DataFrame, path: Path, *, title: str) -> None:
    """Write the picture of one case: a column a mode; above what its designs hang on, below what moves the frontier.

    >>> import tempfile
    >>> table = pd.DataFrame({"mode": "colocated", X: [20.0, 40.0], "parameter": "flops", "throughput": [0.5, 0.9]})
    >>> with tempfile.TemporaryDirectory() as root:
    ...     draw_elasticities(table.assign(frontier=[0.4, 0.8]), Path(root, "demo.png"), title="demo")
    ...     [path.name for path in Path(root).iterdir()]
    ['demo.png']
    """
    modes = list(dict.fromkeys(table["mode"]))
    signed = table.assign(
        sign=np.where(table["parameter"].str.endswith("latency"), -1.0, 1.0), parameter=table["parameter"].map(WORDS)
    )
    both = signed[["throughput", "frontier"]].abs()
    largest = both.groupby(signed["parameter"]).max().max(axis=1)
    drawn = [WORDS[name] for name in PARAMETERS if largest.get(WORDS[name], 0.0) > _LIMIT]
    colours = dict(zip(WORDS.values(), COLOURS, strict=False))
    with mpl.rc_context({**STYLE, "font.size": 10.0, "axes.titlesize": 10.5}):
        figure = blank_figure((4.6 * len(modes) + 0.4, 8.0))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11.0)
        panels = figure.subplots(2, len(modes), squeeze=False)
        for column, mode in enumerate(modes):
            mine = signed[signed["mode"] == mode]
            _stack(panels[0, column], _wide(mine, "throughput"), drawn, colours)
            _curves(panels[1, column], _wide(mine, "frontier"), drawn, colours)
            panels[0, column].set_title(f"{MODE_TEXT[mode]}: throughput of its designs", loc="left")
            panels[1, column].set_title("frontier at the same interactivity", loc="left")
            panels[1, column].set_xlabel(X_LABEL)
        for row in range(2):
            panels[row, 0].set_ylabel("elasticity: % more throughput for 1 % more")
        handles = [mpl.patches.Patch(color=colours[name], label=name) for name in drawn]
        handles.append(mpl.patches.Patch(color="#DDDDDD", label=REST))
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        save_png(figure, path)


def _wide(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Elasticities to what is wanted more of (latencies: less), by interactivity and parameter."""
    values = rows.assign(value=rows[name] * rows["sign"])
    return values.pivot_table(index=X, columns="parameter", values="value", dropna=False).sort_index()


def _stack(panel: Any, table: pd.DataFrame, names: list[str], colours: dict[str, str]) -> None:
    present = [name for name in names if name in table]
    parts = [table[name].to_numpy().clip(min=0.0) for name in present]
    rest = np.clip(1.0 - np.sum(parts, axis=0), 0.0, None)
    panel.stackplot(table.index, *parts, rest, colors=[*(colours[name] for name in present), "#DDDDDD"], linewidth=0.0)
    panel.set_ylim(0, 1)
    panel.set_xlim(left=0)


def _curves(panel: Any, table: pd.DataFrame, names: list[str], colours: dict[str, str]) -> None:
    for name in names:
        if name in table and table[name].notna().any():
            panel.plot(table.index, table[name], color=colours[name], linewidth=1.8)
    least = table.min().min()
    panel.set_ylim(max(min(0.0, float(least)), -1.0) if np.isfinite(least) else 0.0, TOP)
    panel.axhline(1.0, color="#999999", linewidth=0.8, linestyle="--")
    panel.set_xlim(left=0)
