"""Pictures of the study of sparse and linear attention, from the sweep ``new_attention``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator

import disagg_sim as ds
from disagg_sim.report.roofline import COLOURS, blank_figure
from disagg_sim.units import GB
from docs.computed.new_attention import (
    CO_LOCATED,
    LABELS,
    PROMPTS,
    SPEEDS,
    SYSTEMS,
    X,
    Y,
    best,
    gains,
    hand_over,
    points,
)

MARKS = ("o", "s", "^", "D", "v", "P", "X")
X_LABEL = "interactivity [tokens/s/user]"
#: Colour and mark of each model; the yardstick is black.
LOOKS = dict(zip(LABELS, zip((COLOURS[6], *COLOURS[:6]), ("X", *MARKS[:6]), strict=True), strict=True))
GREY = "#555555"
#: Points of a frontier that are drawn.
MOST = 24
#: A NIC of 400 Gb/s. [B/s]
NIC = 50 * GB


def look(model: str, isl: int = 0) -> dict[str, Any]:
    """Colour and label of a model; dotted where it states no context as long as the prompt."""
    line = {"linestyle": (0, (1, 1.2))} if isl > ds.load_model(model).max_context else {}
    width = 2.4 if model == "deepseek_r1" else 1.6
    return {"color": LOOKS[model][0], "label": LABELS[model], "linewidth": width, **line}


def thinned(front: pd.DataFrame) -> pd.DataFrame:
    """A frontier with at most ``MOST`` points and both ends, for a small file."""
    return front.iloc[np.unique(np.linspace(0, len(front) - 1, MOST).round().astype(int))] if len(front) else front


def panels(height: float, sharex: str = "none") -> tuple[Any, Iterator[tuple[str, int, Any]]]:
    """A figure with a row for each system and a column for each prompt."""
    figure = blank_figure((10.0, height))
    grid = figure.subplots(len(SYSTEMS), len(PROMPTS), sharex=sharex, squeeze=False)
    return figure, (
        (system, isl, grid[row][column]) for row, system in enumerate(SYSTEMS) for column, isl in enumerate(PROMPTS)
    )


def legend(figure: Any) -> None:
    """All models, below the panels."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


def plain(axis: Any) -> None:
    """Decades of a logarithmic axis as plain numbers."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def frontiers() -> Any:
    """Disaggregated frontiers of every model, by system and prompt."""
    figure, each = panels(6.6)
    for system, isl, axes in each:
        for model in LABELS:
            front = thinned(points(model, system, isl, "disaggregated"))
            axes.plot(front[X], front[Y], **look(model, isl))
        axes.set(xscale="log", yscale="log", xlim=(4, 260))
        axes.set_title(f"{SYSTEMS[system]}, {PROMPTS[isl]} in, 1k out", loc="left")
        axes.set_xticks([5, 10, 20, 50, 100, 200])
        for axis in (axes.xaxis, axes.yaxis):
            plain(axis)
    for axes in figure.axes[-len(PROMPTS) :]:
        axes.set_xlabel(X_LABEL)
    for axes in figure.axes[:: len(PROMPTS)]:
        axes.set_ylabel("output tokens/s/GPU")
    legend(figure)
    return figure


def transfer() -> Any:
    """Bytes that a prompt hands over, and the bandwidth that this takes of a GPU of prefill."""
    figure = blank_figure((10.0, 4.6))
    size, *sides = figure.subplots(1, 1 + len(SYSTEMS))
    lengths = np.geomspace(1_000, 1_047_552, 60)
    for model in LABELS:
        size.plot(lengths, np.array([float(hand_over(model, isl)) for isl in lengths]) / GB, **look(model))
    size.set(xscale="log", yscale="log", xlabel="prompt [token]", ylabel="cache and states of a prompt [GB]")
    for axes, (system, label) in zip(sides, SYSTEMS.items(), strict=True):
        for model in LABELS:
            found = {isl: best(model, system, isl, "disaggregated", speed=SPEEDS[isl]) for isl in PROMPTS}
            rates = [np.nan if row is None else row["kv_egress_bytes_per_s_per_gpu"] / GB for row in found.values()]
            axes.plot(list(found), rates, marker=LOOKS[model][1], **look(model))
        axes.axhline(NIC / GB, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate("400 Gb/s", (8_192, NIC / GB), (0, -12), textcoords="offset points", color=GREY, fontsize=9)
        axes.set(xscale="log", yscale="log", xlabel="prompt [token]", ylabel="out of a GPU of prefill [GB/s]")
        axes.set_title(label, loc="left")
    for axes in figure.axes:
        axes.set_xticks(list(PROMPTS), PROMPTS.values())
        axes.xaxis.set_minor_locator(NullLocator())
        plain(axes.yaxis)
    legend(figure)
    return figure


def ratio() -> Any:
    """GPUs of prefill for one of decode, by prompt."""
    figure = blank_figure((10.0, 4.4))
    for axes, (system, label) in zip(figure.subplots(1, len(SYSTEMS)), SYSTEMS.items(), strict=True):
        for model in LABELS:
            found = {isl: best(model, system, isl, "disaggregated", speed=20.0) for isl in PROMPTS}
            ratios = [np.nan if row is None else row["ctx_gen_gpu_ratio"] for row in found.values()]
            axes.plot(list(found), ratios, marker=LOOKS[model][1], **look(model))
        axes.set(xscale="log", yscale="log", xlabel="prompt [token]", ylabel="GPUs of prefill for one of decode")
        axes.set_title(f"{label}, at 20 tokens/s/user or more", loc="left")
        axes.set_xticks(list(PROMPTS), PROMPTS.values())
        axes.xaxis.set_minor_locator(NullLocator())
        plain(axes.yaxis)
    legend(figure)
    return figure


def gain() -> Any:
    """Gain of disaggregation over the best co-located mode, by speed."""
    figure, each = panels(6.2)
    for system, isl, axes in each:
        for model in LABELS:
            fronts = [points(model, system, isl, *modes) for modes in (("disaggregated",), CO_LOCATED)]
            reach = min((front[X].max() for front in fronts if len(front)), default=0.0)
            speeds = np.geomspace(5.0, 150.0, 36)
            found = gains(model, system, isl, speeds)
            axes.plot(speeds[speeds <= reach], found[speeds <= reach], **look(model, isl))
        axes.axhline(1.0, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set(xscale="log", xlim=(5, 150), ylim=(0.75, 4.25))
        axes.set_xticks([5, 10, 20, 50, 100])
        plain(axes.xaxis)
        axes.set_title(f"{SYSTEMS[system]}, {PROMPTS[isl]} in, 1k out", loc="left")
    for axes in figure.axes[-len(PROMPTS) :]:
        axes.set_xlabel(X_LABEL)
    for axes in figure.axes[:: len(PROMPTS)]:
        axes.set_ylabel("disaggregated over co-located")
    legend(figure)
    return figure
