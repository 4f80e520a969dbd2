"""Draw the figures of "Beyond the Buzz" (arXiv 2506.05508) as in the paper: curves, axes, normalisation.

The paper normalises both axes of most figures: here x is divided by the largest interactivity and y by the
largest throughput of a panel. The data of a figure hold both, and beside each point the configuration behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.atomic import write_csv, written
from disagg_sim.domain import ServingMode
from disagg_sim.errors import check_word
from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.report.roofline import COLOURS, MARK, STYLE, blank_figure, mpl
from disagg_sim.search.pareto import pareto_front
from disagg_sim.serving.gains import COLOCATED
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT
from disagg_sim.units import GB
from lab.studies.beyond_the_buzz.evidence import FrontierSource
from lab.studies.papers import DIGITS

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
    """A picture of curves.

    ``table`` has the columns ``panel``, ``curve``, ``x``, ``y`` and ``x_unit``, what 1 on the axis of x is in its own
    unit; a curve looks the same in all panels. Columns ``y_label`` and ``y_scale``, where there are any, stand in place
    of those of ``axes``.
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
USER = "tokens/s/user"
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
READ = read_mapping(Path(__file__).with_suffix(".yaml"))

#: A curve: its name and the points that it shows.
Curves = list[tuple[str, "pd.DataFrame"]]


def figure_data(frontiers: FrontierSource, figure: str, profile: str) -> Picture:
    """Compute what a figure needs, and arrange it as the paper does.

    Its table has a row a point: ``panel``, ``curve``, ``x`` and ``y`` as drawn, ``x_unit``, then the point in SI units.
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


def _picture(title: str, panels: list[tuple[str, Curves]]) -> Picture:
    """A picture with the paper's normalisation."""
    table = _panels(panels)
    return Picture(title=title, axes=_axes(NORMALISED, table), table=table)


def _title(number: int, subject: str, points: pd.DataFrame, profile: str) -> str:
    system, precision = points["system"].iloc[0], points["precision"].iloc[0]
    return f"Figure {number}: {subject}\n{system}, {precision}, profile {profile}"


def _lengths(points: pd.DataFrame) -> str:
    return f"{points['isl'].iloc[0]:.0f}/{points['osl'].iloc[0]:.0f}"


def _gains(points: pd.DataFrame, profile: str, *, number: int, subject: str, by: list[str], mixed: bool) -> Picture:
    """Figures 1, 6, 7 and 8: disaggregated against co-located, a panel per case."""
    panels = [
        (f"{NAMES[case['model'].iloc[0]]}, {_lengths(case)}", _modes(case, mixed=mixed))
        for _, case in points.groupby(by, sort=False, observed=True)
    ]
    return _picture(_title(number, subject, points, profile), panels)


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


def _ratios(points: pd.DataFrame, profile: str) -> Picture:
    """Figure 9: the best ratio of prefill to decode GPUs, one curve per model."""
    curves = [(NAMES[str(model)], case) for model, case in points.groupby("model", sort=False, observed=True)]
    axes = Axes(x_label=f"interactivity [{USER}]", y_label="context / generation GPUs", y_scale="log", x_scale="log")
    title = _title(9, f"best ratio of the pools, {_lengths(points)}", points, profile)
    return Picture(title=title, axes=axes, table=_panels([("", curves)], y="ctx_gen_gpu_ratio", normalised=False))


def _fixed_ratios(points: pd.DataFrame, profile: str) -> Picture:
    """Figure 10: fixed ratios of the pools against the best one, and co-located serving."""
    pools = points[points["mode"] == ServingMode.DISAGGREGATED]
    curves = [
        ("best ratio" if ratio == "optimal" else f"ratio {ratio}", case)
        for ratio, case in pools.groupby("ctx_gen_ratio", sort=False)
    ]
    panel = (f"{NAMES[points['model'].iloc[0]]}, {_lengths(points)}", [*curves, (BEST, best_colocated(points))])
    title = _title(10, "fixed ratios of context to generation GPUs", points, profile)
    return _picture(title, [panel])


def _domains(points: pd.DataFrame, profile: str) -> Picture:
    """Figure 11: size of the NVLink domain."""
    panels = [
        (
            f"{NAMES[str(model)]}, {_lengths(case)}",
            [(f"domain of {domain} GPUs", front) for domain, front in case.groupby("nvlink_domain", sort=True)],
        )
        for model, case in points.groupby("model", sort=False, observed=True)
    ]
    return _picture(_title(11, "NVLink domain", points, profile), panels)


def _transfer(points: pd.DataFrame, profile: str) -> Picture:
    """Figure 12: the larger of egress and ingress per GPU, absolute."""
    sides = ("kv_egress_bytes_per_s_per_gpu", "kv_ingress_bytes_per_s_per_gpu")
    rate = points[list(sides)].max(axis=1) / GB
    curves = [(f"{_lengths(case)}", case) for _, case in points.assign(kv_gb_per_s=rate).groupby("isl", sort=True)]
    title = _title(12, f"KV-cache transfer, {NAMES[points['model'].iloc[0]]}", points, profile)
    axes = Axes(x_label=f"interactivity [{USER}]", y_label="max(egress, ingress) per distinct GPU [GB/s]")
    table = _panels([("", curves)], y="kv_gb_per_s", normalised=False)
    return Picture(title=title, axes=_axes(axes, table), table=table)


def _distribution(points: pd.DataFrame, profile: str) -> Picture:
    """Figure 14: a distribution of lengths against constant lengths."""
    curves = [
        (f"constant {traffic}" if "/" in str(traffic) else str(traffic), case)
        for traffic, case in points.groupby("traffic", sort=False)
    ]
    title = _title(14, "a distribution of lengths and constant lengths", points, profile)
    return _picture(title, [(NAMES[points["model"].iloc[0]], curves)])


_SHAPE = ["isl", "osl"]
#: The figures that can be drawn, in the paper's order.
FIGURES: dict[str, Callable[[pd.DataFrame, str], Picture]] = {
    "fig01": partial(_gains, number=1, subject="disaggregated and co-located", by=_SHAPE, mixed=True),
    "fig05": _pipelining,
    "fig06": partial(_gains, number=6, subject="disaggregated and co-located", by=["model"], mixed=True),
    "fig07": partial(_gains, number=7, subject="sizes of models", by=["model"], mixed=False),
    "fig08": partial(_gains, number=8, subject="traffic", by=_SHAPE, mixed=True),
    "fig09": _ratios,
    "fig10": _fixed_ratios,
    "fig11": _domains,
    "fig12": _transfer,
    "fig14": _distribution,
}


def write_picture(path: Path, picture: Picture) -> Path:
    """Write a picture and its data as ``.csv``. Returns ``path``."""
    write_csv(path.with_suffix(".csv"), picture.table, digits=DIGITS)
    draw_picture(picture, path)
    return path
