"""The pictures of README and docs: ``python docs/figures.py`` computes and draws them into ``docs/img/``.

Every picture is computed from the shipped specs; nothing is read from a stored result. Equal versions of the
libraries give equal bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this tree

import disagg_sim as ds  # noqa: E402
from disagg_sim.report.figures import COLOURS, MARKS, STYLE, X_LABEL, X, blank_figure  # noqa: E402
from disagg_sim.report.words import mapping_text  # noqa: E402
from docs.computed.headline import AT, colocated, disaggregated, gain, gain_band  # noqa: E402

FOLDER = ROOT / "docs" / "img"
Y = "tokens_per_s_per_gpu"
GREY, INK = "#555555", "#222222"
#: Plain SVG: text as paths, no date, and names of elements that do not depend on the process.
SVG = {"svg.fonttype": "path", "svg.hashsalt": "disagg-sim", "figure.facecolor": "white"}


def frontier() -> Any:
    """Frontiers of the headline case, disaggregated and co-located, with 80 % bands and the gain at one speed."""
    found = {"disaggregated": disaggregated(), "co-located": colocated()}
    both = pd.concat([points.assign(mode=mode) for mode, points in found.items()], ignore_index=True)
    band = ds.uncertainty(pd.concat(found.values()), samples=1000, seed=0).frontier(np.arange(8, 132, 3.0))
    band["mode"] = band["mode"].where(band["mode"] == "disaggregated", "co-located")
    figure = blank_figure((9.0, 5.0))
    axes = figure.add_subplot()
    ends = {}
    for mode, colour, line, mark in zip(found, COLOURS, ("-", "--"), MARKS, strict=False):
        front = ds.pareto_front(both[both["mode"] == mode])
        sure = band[band["mode"] == mode].groupby(X)[[f"{Y}_p10", f"{Y}_p90"]].max()
        sure = sure[sure.index >= front[X].min()]
        axes.fill_between(sure.index, sure[f"{Y}_p10"], sure[f"{Y}_p90"], color=colour, alpha=0.13, linewidth=0)
        axes.plot(front[X], front[Y], line + mark, color=colour, markersize=3.5)
        ends[mode] = front[front[X] >= AT].iloc[0] if front[X].is_monotonic_increasing else None
    high, low = (float(ds.curve(both[both["mode"] == mode]).at(AT)) for mode in found)
    axes.annotate("", (AT, high), (AT, low), arrowprops={"arrowstyle": "<->", "color": INK, "linewidth": 1.4})
    least, most = gain_band()
    text = f"{gain():.1f}× the throughput\nat {AT:g} tokens/s/user\n(80 % band: {least:.1f} to {most:.1f}×)"
    axes.annotate(text, (AT + 1.2, 0.2 * high + 0.8 * low), va="center", color=INK, fontsize=10.5)
    best, other = ends["disaggregated"], ends["co-located"]
    design = (
        f"at {AT:g}: prefill {mapping_text(best, 'prefill')}, {best['prefill_instances']:.0f} instances\n"
        f"and decode {mapping_text(best, 'decode')}, batch {best['decode_batch']:,.0f}, one instance"
    )
    axes.annotate("disaggregated", (57, 1690), color=COLOURS[0], fontsize=12.5, fontweight="bold", va="bottom")
    axes.annotate(design, (57, 1670), color=COLOURS[0], fontsize=9.5, va="top")
    axes.annotate("co-located", (8, 700), color=COLOURS[1], fontsize=12.5, fontweight="bold", va="bottom")
    design = f"at {AT:g}: {mapping_text(other, 'decode')}, batch {other['decode_batch']:,.0f}"
    axes.annotate(design, (8, 680), color=COLOURS[1], fontsize=9.5, va="top")
    axes.annotate(
        "shaded: 80 % bands", (1, 1), xycoords="axes fraction", ha="right", va="top", color=GREY, fontsize=9.5
    )
    title = "DeepSeek-R1 (NVFP4) on GB200 NVL72, 16,384 tokens in, 2,048 out, first token within 10 s"
    axes.set_title(title, loc="left", pad=10)
    axes.set(xlabel=X_LABEL, ylabel="throughput [output tokens/s/GPU, all GPUs]", xlim=(0, 130), ylim=(0, None))
    return figure


#: Name of each picture's file, and what draws it.
FIGURES: dict[str, Callable[[], Any]] = {"frontier": frontier}


def draw(name: str, path: Path) -> None:
    """Draw one picture into a file; its ending says whether as SVG or PNG."""
    with mpl.rc_context({**STYLE, **SVG}):
        figure = FIGURES[name]()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def main() -> None:
    """Draw the pictures that are asked for."""
    parser = argparse.ArgumentParser(description="Compute and draw the pictures of README and docs.")
    parser.add_argument("names", nargs="*", choices=[[], *FIGURES], help="these alone; all by default")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to draw into (default: docs/img)")
    parser.add_argument("--png", action="store_true", help="draw PNG in place of SVG")
    asked = parser.parse_args()
    for name in asked.names or FIGURES:
        path = asked.out / f"{name}.{'png' if asked.png else 'svg'}"
        draw(name, path)
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
