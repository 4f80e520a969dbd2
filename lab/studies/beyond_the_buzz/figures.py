"""Draw the figures of "Beyond the Buzz" (arXiv 2506.05508) as in the paper: curves, axes, normalisation.

The paper normalises both axes of most figures: here x is divided by the largest interactivity and y by the
largest throughput of a panel. The data of a figure hold both, and beside each point the configuration behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.atomic import written
from disagg_sim.domain import ServingMode
from disagg_sim.errors import check_word
from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.report.roofline import COLOURS, MARK, STYLE, blank_figure, mpl
from disagg_sim.search.pareto import pareto_front
from disagg_sim.serving.gains import COLOCATED
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT
from disagg_sim.units import GB
from lab.studies.beyond_the_buzz.evidence import FrontierSource

LINES = ("-", "--", ":", "-.")
PRINTED = "paper: "  # how a curve is called whose points a paper prints: drawn as crosses in the colour of ours
ACROSS = 3  # panels beside each other [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What the panels of a picture have in common."""

    x_label: str
    y_label: str
    x_scale: str = "linear"  # or "log"
    y_scale: str = "linear"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """A picture of curves: a table of ``panel``, ``curve``, ``x``, ``y`` and ``x_unit``, what 1 on the axis of x is in
    its own unit; its columns ``y_label`` and ``y_scale``, if any, stand in place of those of ``axes``.
    """

    title: str
    axes: Axes
    table: pd.DataFrame


def draw_picture(picture: Picture, path: Path) -> None:
    """Write a picture of curves as PNG."""
    axes, panels = picture.axes, list(picture.table.groupby("panel", sort=False))
    curves = [name for name in picture.table["curve"].unique() if not name.startswith(PRINTED)]
    columns = min(len(panels), ACROSS)
    rows = -(-len(panels) // columns)
    with mpl.rc_context({**STYLE, "font.size": 10.0, "axes.titlesize": 10.5, "lines.markersize": 3.6}):
        figure = blank_figure((4.7 * columns + 1.5, 4.1 * rows + 1.1))
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=11.0)
        drawn: dict[str, Any] = {}
        for number, (name, mine) in enumerate(panels):
            panel = figure.add_subplot(rows, columns, number + 1)
            for curve, points in mine.groupby("curve", sort=False):
                ours = str(curve).removeprefix(PRINTED)
                place = curves.index(ours) if ours in curves else 0
                look: dict[str, Any] = {"marker": "o", "linestyle": LINES[place % len(LINES)]}
                if ours != curve:
                    look = {"marker": "x", "linestyle": "none", "markersize": 7, "zorder": 3}
                (drawn[str(curve)],) = panel.plot(points["x"], points["y"], color=COLOURS[place % len(COLOURS)], **look)
            own = mine.iloc[0]
            panel.set(xlabel=axes.x_label, ylabel=own.get("y_label", axes.y_label), title=name)
            panel.set(xscale=axes.x_scale, yscale=own.get("y_scale", axes.y_scale))
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=min(len(drawn), 3))
        with written(path) as handle:
            figure.canvas.print_png(handle, metadata={"Software": MARK})  # draws once; ``savefig`` draws twice


#: Range of interactivity near the plots of the paper, over which gains are stated. [token/s]
RANGE = (20.0, 100.0)
NAMES = {
    "deepseek_r1": "DeepSeek-R1",
    "llama_3_1_8b": "Llama-3.1-8B",
    "llama_3_1_70b": "Llama-3.1-70B",
    "llama_3_1_405b": "Llama-3.1-405B",
}
BEST, PIGGYBACK = "co-located, best of both modes", "piggybacked, every step mixed"
NORMALISED = Axes(x_label="interactivity / largest of the panel", y_label="throughput per GPU / largest of the panel")

#: Where interactivity spans more than this factor its axis is logarithmic; the paper's is linear. [1]
LINEAR_SPAN = 50.0

#: What was read from the paper's figures.
_WORDS = read_mapping(Path(__file__).with_suffix(".yaml"))
READ = _WORDS["read"]

#: A curve: its name and the points that it shows.
Curves = list[tuple[str, "pd.DataFrame"]]


def figure_data(frontiers: FrontierSource, figure: str, profile: str) -> Picture:
    """Compute what a figure needs, and arrange it as the paper does: a row a point, as drawn, then the point in SI
    units.
    """
    check_word("figure", figure, FIGURES)
    found = FIGURES[figure](frontiers.frontier(figure, profile), profile)
    return replace(found, table=_with_readings(found.table, READ.get(figure, [])))


def _with_readings(table: pd.DataFrame, readings: Sequence[tuple[str, str, float, float]]) -> pd.DataFrame:
    """A figure's table and what was read from the paper's."""
    frames = [table]
    for panel, name, place, y in readings:
        ours = table[(table["panel"] == panel) & (table["curve"].eq(name) | (name == ""))]
        if ours.empty:
            continue
        inside = ours["x"][(ours["x"] * ours["x_unit"]).between(*RANGE)]
        ends = inside if len(inside) else ours["x"]
        x = ends.iloc[0 if place == 0 else -1] if name else place
        row = {"panel": panel, "curve": f"{PRINTED}{name or 'read'}", "x": x, "y": y, "x_unit": ours["x_unit"].iloc[0]}
        frames.append(pd.DataFrame([row]))
    return pd.concat(frames, ignore_index=True) if readings else table


def best_colocated(points: pd.DataFrame) -> pd.DataFrame:
    """Frontier of both co-located modes of one case together, the baseline of the paper."""
    return _front(points[points["mode"].isin(COLOCATED)])


def _front(points: pd.DataFrame) -> pd.DataFrame:
    return pareto_front(points, x=INTERACTIVITY, y=THROUGHPUT) if len(points) else points


def _modes(points: pd.DataFrame, *, mixed: bool) -> Curves:
    """Disaggregated and co-located curves of one case."""
    every, naive = points["every_step_mixed"], points["mla_form"].isin(["naive", "auto"])
    curves = [
        ("disaggregated", points[points["mode"] == ServingMode.DISAGGREGATED]),
        (BEST, best_colocated(points[~every])),
    ]
    if mixed:
        curves.append((PIGGYBACK, points[every & naive]))
        curves.append((f"{PIGGYBACK}, MLA cached", points[every & (points["mla_form"] == "cached")]))
    return curves


def _panels(panels: list[tuple[str, Curves]], *, y: str = THROUGHPUT, normalised: bool = True) -> pd.DataFrame:
    """The table of a picture: x and y over the largest of each panel, or as they are."""
    rows = []
    for panel, curves in panels:
        shown = [(name, points) for name, points in curves if len(points)]
        if not shown:
            continue
        x_unit = max(points[INTERACTIVITY].max() for _, points in shown) if normalised else 1.0
        y_unit = max(points[y].max() for _, points in shown) if normalised else 1.0
        rows += [
            points.assign(
                panel=panel, curve=name, x=points[INTERACTIVITY] / x_unit, y=points[y] / y_unit, x_unit=x_unit
            )
            for name, points in shown
        ]
    return _ordered(pd.concat(rows, ignore_index=True))


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that are drawn in front."""
    first = ["panel", "curve", "x", "y", "x_unit"]
    return table[first + [name for name in table if name not in first]]


def _axes(axes: Axes, table: pd.DataFrame) -> Axes:
    """The axes with a scale of x that keeps all points of a picture apart."""
    return replace(axes, x_scale="log") if table["x"].max() > LINEAR_SPAN * table["x"].min() else axes


def _title(number: int, subject: str, points: pd.DataFrame, profile: str) -> str:
    system, precision = points["system"].iloc[0], points["precision"].iloc[0]
    return f"Figure {number}: {subject}\n{system}, {precision}, profile {profile}"


def _lengths(points: pd.DataFrame) -> str:
    return f"{points['isl'].iloc[0]:.0f}/{points['osl'].iloc[0]:.0f}"


def _figure(
    points: pd.DataFrame,
    profile: str,
    *,
    number: int,
    subject: str,
    panels: Sequence[str] = (),
    panel: str = "",
    curves: str = "",
    curve: str = "{value}",
    words: Mapping[str, str] | None = None,
    mixed: bool = False,
    y: str = THROUGHPUT,
    largest_of: Sequence[str] = (),
    axes: Mapping[str, str] | None = None,
) -> Picture:
    """A figure as ``figures.yaml`` describes it: a panel for each case of some columns, a curve for each value of
    another or for each mode; over the largest of each panel unless it has ``axes`` of its own.
    """

    def named(text: str, case: pd.DataFrame, value: object = "") -> str:
        return text.format(model=NAMES[str(case["model"].iloc[0])], lengths=_lengths(case), value=value)

    def drawn(case: pd.DataFrame) -> Curves:
        if not curves:
            return _modes(case, mixed=mixed)
        pools = case[case["mode"] == ServingMode.DISAGGREGATED]
        found = [
            (named((words or {}).get(str(value), curve), mine, value), mine)
            for value, mine in pools.groupby(curves, sort=False, observed=True)
        ]
        return [*found, (BEST, best_colocated(case))]

    if largest_of:
        points = points.assign(**{y: points[list(largest_of)].max(axis=1) / GB})
    cases = [case for _, case in points.groupby(list(panels), sort=False, observed=True)] if panels else [points]
    table = _panels([(named(panel, case), drawn(case)) for case in cases], y=y, normalised=axes is None)
    title = _title(number, named(subject, points), points, profile)
    return Picture(title=title, axes=_axes(NORMALISED if axes is None else Axes(**axes), table), table=table)


def _pipelining(table: pd.DataFrame, profile: str) -> Picture:
    """Figure 5: time to the first token and throughput over the depth of the pipeline."""
    rows = []
    for form, points in table.groupby("mla_form", sort=False):
        reference = points.loc[points["pp"] == points["pp"].min(), "tokens_per_s_per_gpu"].iloc[0]
        relative = points["tokens_per_s_per_gpu"] / reference
        over = ", ".join(str(pp) for pp in points.loc[~points["fits"], "pp"])
        name = f"MLA {form}" + (f" (PP {over}: beyond the memory)" if over else "")
        shown = points.assign(curve=name, x=points["pp"], x_unit=1.0)
        latency = {"panel": "first-token latency", "y_label": "FTL [s]", "y_scale": "log"}
        throughput = {"panel": "throughput", "y_label": "prompt tokens/s/GPU relative to PP 1", "y_scale": "linear"}
        rows += [shown.assign(y=points["ftl_s"], **latency), shown.assign(y=relative, **throughput)]
    lengths, gpus = table["isl"].iloc[0], table["gpus"].iloc[0]
    title = _title(5, f"pipelined prefill, ISL {lengths}, EP x PP = {gpus}", table, profile)
    axes = Axes(x_label="pipeline stages PP", y_label="", x_scale="log")
    return Picture(title=title, axes=axes, table=_ordered(pd.concat(rows, ignore_index=True)))


#: The figures that can be drawn, in the paper's order.
FIGURES: dict[str, Callable[[pd.DataFrame, str], Picture]] = {
    name: partial(_figure, number=int(name[3:]), **row) if row else _pipelining
    for name, row in _WORDS["figures"].items()
}
