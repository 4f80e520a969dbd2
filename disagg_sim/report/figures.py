"""Plot every case of a sweep (frontiers of all modes, KV-transfer bandwidth, prefill:decode ratio), and overviews.

Past 400 lines: the pictures share their styles and labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.atomic import remove, written
from disagg_sim.domain import ServingMode
from disagg_sim.report.drawing import Figure, FigureCanvasAgg, FuncFormatter, Line2D, mpl, place_labels
from disagg_sim.report.words import MODE_TEXT, mapping_text, overview_name, pools_text, records, tag_text
from disagg_sim.search.layouts import NOT_LAUNCHABLE, SERVED
from disagg_sim.search.pareto import best_from
from disagg_sim.serving.evidence import COLUMN as EVIDENCE_COLUMN
from disagg_sim.serving.evidence import level
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.cases import Case
from disagg_sim.sweep.fidelity import SPEEDS
from disagg_sim.sweep.results import SweepResult
from disagg_sim.sweep.store import Key, Store
from disagg_sim.units import GB

#: In every picture: others are neither replaced by ``explain --figure`` nor removed.
MARK = "Drawn by disagg-sim"
#: Okabe and Ito's palette, which colour-blind readers tell apart; marks differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
TITLE_WIDTH = 92  # characters of a line
_INVISIBLE = 0.01  # relative distance of curves that no reader of a picture sees [1]
CLOUD = "#BBBBBB"
CLOUD_POINTS = 6000  # drawn of a case's points off the frontier, evenly taken
X = "tokens_per_s_per_user"
X_LABEL = "interactivity [tokens/s/user]"
Y_LABELS = {
    "gpu": "throughput [output tokens/s/GPU, all GPUs]",
    "usd": "output tokens per USD, all GPUs",
    "watt": "output tokens per joule, TDP of all GPUs",
    "joule": "output tokens per joule that all GPUs draw",
}
#: Colour, mark and line of each mode, the same in every picture.
MODE_STYLE = {
    "disaggregated": (COLOURS[0], MARKS[0], "-"),
    "colocated": (COLOURS[1], MARKS[1], "--"),
    "piggyback": (COLOURS[2], MARKS[2], "-."),
}
#: Marks of designs by the evidence of their layouts; those that are launchable bear none.
EVIDENCE_STYLE: dict[str, Any] = {
    SERVED: {"marker": "o", "markersize": 9.5, "markerfacecolor": "none", "color": COLOURS[6], "markeredgewidth": 0.9},
    NOT_LAUNCHABLE: {"marker": "x", "markersize": 8.0, "color": COLOURS[6], "markeredgewidth": 1.4},
}
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


@dataclass(frozen=True, slots=True, eq=False)
class CaseFigures:
    """All that the pictures of a case need."""

    case: Case
    folder: Path
    fronts: tuple[tuple[str, pd.DataFrame], ...]  # (mode, frontier), those with points
    inherited: bool  # whether some fits were made on another system
    store: Store
    blocks: tuple[Key, ...]  # of the points of the first of the modes, for the cloud
    bands: tuple[tuple[str, pd.DataFrame], ...]  # (mode, error bars of its frontier), those that were asked for

    @property
    def y(self) -> str:
        """Column of the throughput."""
        return self.case.throughput


@dataclass(frozen=True, slots=True, eq=False)
class CaseFrontiers:
    """The frontiers of a case in a picture that compares cases."""

    label: str
    modes: tuple[tuple[bool, pd.DataFrame], ...]  # (whether disaggregated, best of these modes at every speed)


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """The frontiers of one model in all cases of a sweep, a panel for each traffic."""

    path: Path
    title: str
    y: str  # column of the throughput
    y_label: str
    panels: tuple[tuple[str, tuple[CaseFrontiers, ...]], ...]  # (traffic, curves)


def draw_figures(result: SweepResult, root: Path, *, jobs: int, bands: Mapping[str, pd.DataFrame] | None = None) -> int:
    """Draw ``figures/<case>/*.png`` of every case with results, and ``figures/*.png`` comparing cases. [1]"""
    for old in (root / "figures").glob("**/*.png"):
        remove(old, MARK)
    root = root.absolute()  # workers run in directories of their own
    store = Store(root)
    cases = [
        CaseFigures(
            case=case.plan.case,
            folder=root / "figures" / case.plan.case.name,
            fronts=tuple((mode.mode, mode.frontier) for mode in case.found),
            inherited=bool(case.inherited_fits),
            store=store,
            blocks=tuple(block.key for block in case.found[0].plan.points),
            bands=_by_mode((bands or {}).get(case.plan.case.name)),
        )
        for case in result.cases
        if case.found
    ]
    tasks: list[CaseFigures | Overview] = [*cases, *_overviews(cases, root)]
    return sum(run_tasks(_draw, tasks, jobs=jobs))


def _by_mode(bands: pd.DataFrame | None) -> tuple[tuple[str, pd.DataFrame], ...]:
    if bands is None or not len(bands):
        return ()
    return tuple((str(mode), rows.sort_values(X)) for mode, rows in bands.groupby("mode", sort=False, observed=True))


def _overviews(cases: Iterable[CaseFigures], root: Path) -> list[Overview]:
    groups: dict[str, list[CaseFigures]] = {}
    for item in cases:
        groups.setdefault(overview_name(item.case), []).append(item)
    return [
        Overview(
            path=root / "figures" / name,
            title=items[0].case.model,
            y=items[0].y,
            y_label=Y_LABELS[items[0].case.per],
            panels=_panels(items),
        )
        for name, items in groups.items()
        if len(items) > 1
    ]


def _panels(items: Sequence[CaseFigures]) -> tuple[tuple[str, tuple[CaseFrontiers, ...]], ...]:
    """Curves by traffic; what cannot be told apart is one curve with the labels of all."""
    found: dict[str, list[CaseFrontiers]] = {}
    for item in items:
        split = [front for mode, front in item.fronts if mode == ServingMode.DISAGGREGATED]
        shared = [front for mode, front in item.fronts if mode != ServingMode.DISAGGREGATED]
        modes = tuple((bool(mine is split), _best_of(mine, item.y)) for mine in (split, shared) if mine)
        curves, label = found.setdefault(str(item.case.traffic), []), _curve_label(item, items)
        for place, other in enumerate(curves):
            if _alike(other.modes, modes, item.y):
                curves[place] = replace(other, label=f"{other.label} or {label}")
                break
        else:
            curves.append(CaseFrontiers(label, modes))
    return tuple((traffic, tuple(curves)) for traffic, curves in found.items())


def _best_of(fronts: Sequence[pd.DataFrame], y: str) -> pd.DataFrame:
    """The frontier of several modes together."""
    points = pd.concat([front[[X, y]] for front in fronts], ignore_index=True)
    points = points[points[y] >= best_from(points[X], points[y], points[X])]
    return points.sort_values(X, ignore_index=True)


def _alike(some: Sequence[tuple[bool, pd.DataFrame]], others: Sequence[tuple[bool, pd.DataFrame]], y: str) -> bool:
    """Whether no reader of a picture could tell the curves apart."""
    if [split for split, _ in some] != [split for split, _ in others]:
        return False
    for (_, one), (_, other) in zip(some, others, strict=True):
        grid = np.union1d(one[X], other[X])
        heights = [best_from(curve[X].to_numpy(), curve[y].to_numpy(), grid) for curve in (one, other)]
        ends = [curve[X].max() for curve in (one, other)]
        reached = grid <= min(ends)
        same = np.abs(np.log(heights[0][reached] / heights[1][reached])) < _INVISIBLE
        if not same.all() or abs(ends[0] - ends[1]) > _INVISIBLE * max(ends):
            return False
    return True


def _curve_label(item: CaseFigures, among: Iterable[CaseFigures]) -> str:
    """Label of a curve: systems, and the axes that differ between curves."""
    others = [other.case for other in among]
    shared = {tag for tag in item.case.tags if all(tag in other.tags for other in others)}
    tags = ", ".join(tag_text(tag) for tag in item.case.tags if tag not in shared)
    return ", ".join(part for part in (pools_text(item.case.pools), tags) if part) + _marked(item.inherited)


def _marked(inherited: bool) -> str:
    return ", some fits inherited" if inherited else ""


def _draw(task: CaseFigures | Overview) -> int:
    if isinstance(task, Overview):
        _overview(task)
        return 1
    _pareto(task)
    for mode, front in task.fronts:
        if mode == ServingMode.DISAGGREGATED:
            _kv_bandwidth(task, front)
            _ratio(task, front)
            return 3
    return 1


def _title(task: CaseFigures, subject: str) -> str:
    case = task.case
    beside = "".join(f", {tag_text(tag)}" for tag in case.tags)
    head = f"{case.model} on {pools_text(case.pools)}, {case.traffic} tokens{beside} ({case.profile})"
    return f"{fill(head + _marked(task.inherited), TITLE_WIDTH)}\n{subject}"


def blank_figure(size: tuple[float, float] | None = None) -> Any:
    """Make an empty picture that needs no display."""
    figure = Figure(layout="constrained", figsize=size)
    FigureCanvasAgg(figure)
    return figure


def _axes(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    figure = blank_figure()
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def save_png(figure: Any, path: Path) -> None:
    """Write a picture so that it is there whole or not at all."""
    with written(path) as handle:
        figure.canvas.print_png(handle, metadata={"Software": MARK})  # draws once; ``savefig`` draws twice


def _pareto(task: CaseFigures) -> None:
    """Frontiers of all modes, the first annotated with its mappings, over a cloud of its points."""
    y = task.y
    with mpl.rc_context(STYLE):
        first, front = task.fronts[0]
        shaded = ", bands of 80 %" if task.bands else ""
        title = _title(task, f"frontier of each mode{shaded}; mappings of the {MODE_TEXT[first]} one")
        figure, axes = _axes(title, X_LABEL, Y_LABELS[task.case.per])
        cloud = _cloud(task)
        axes.plot(cloud[X], cloud[y], ".", color=CLOUD, markersize=2.5, label=f"{MODE_TEXT[first]} points", zorder=1)
        for mode, band in task.bands:
            ends = band["frontier_p10"], band["frontier_p90"]
            axes.fill_between(band[X], *ends, color=MODE_STYLE[mode][0], alpha=0.16, linewidth=0.0, zorder=2)
        for mode, curve in task.fronts:
            colour, mark, line = MODE_STYLE[mode]
            hollow = mode == "colocated"  # so that the curve of a mode that contains it does not hide its marks
            axes.plot(
                curve[X],
                curve[y],
                line + mark,
                color=colour,
                markersize=6.0 if hollow else 3.5,
                zorder=3,
                markerfacecolor="white" if hollow else colour,
                label=f"{MODE_TEXT[mode]} frontier",
            )
        _mark_evidence(axes, [curve for _, curve in task.fronts], y)
        axes.set_xlim(0, max(curve[X].max() for _, curve in task.fronts) * 1.2)  # room for the last labels
        tops = [*(curve[y].max() for _, curve in task.fronts), *(band["frontier_p90"].max() for _, band in task.bands)]
        axes.set_ylim(0, max(tops) * 1.22)
        axes.legend(loc="upper right")
        others = [curve[[X, y]].to_numpy() for _, curve in task.fronts[1:]]
        place_labels(figure, axes, [(row[X], row[y], _label(row, first)) for row in records(front)], others=others)
        figure.set_layout_engine("none")  # laid out for the labels already
        save_png(figure, task.folder / "pareto.png")


def _mark_evidence(axes: Any, curves: Sequence[pd.DataFrame], y: str) -> None:
    """Ring the points whose layouts served runs have checked, and cross those that no engine can start."""
    points = pd.concat([curve[[X, y, EVIDENCE_COLUMN]] for curve in curves])
    levels = points[EVIDENCE_COLUMN].map(level)
    for name, style in EVIDENCE_STYLE.items():
        mine = points[levels == name]
        if len(mine):
            axes.plot(mine[X], mine[y], linestyle="", zorder=5, label=f"layouts {name}", **style)


def _label(point: Mapping[str, Any], mode: str) -> str:
    if mode != ServingMode.DISAGGREGATED:
        return f"{mapping_text(point, 'decode')}, batch {int(point['decode_batch'])}"
    chunk = f" chunk {int(point['prefill_chunk_tokens'])}" if point["prefill_chunk_tokens"] else ""
    return (
        f"decode {mapping_text(point, 'decode')}, batch {int(point['decode_batch'])}\n"
        f"prefill {mapping_text(point, 'prefill')}{chunk}, batch {int(point['prefill_batch'])}"
    )


def _kv_bandwidth(task: CaseFigures, front: pd.DataFrame) -> None:
    with mpl.rc_context(STYLE):
        title = _title(task, "KV-cache transfer along the frontier")
        figure, axes = _axes(title, X_LABEL, "KV-cache bandwidth per GPU at full rate [GB/s]")
        pairs = (("egress", "out of each prefill GPU"), ("ingress", "into each decode GPU"))
        for number, (side, said) in enumerate(pairs):
            rate = front[f"kv_{side}_bytes_per_s_per_gpu"] / GB
            axes.plot(front[X], rate, "-" + MARKS[number], color=COLOURS[number], markersize=4, label=f"{side}: {said}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")
        save_png(figure, task.folder / "kv_bandwidth.png")


def _ratio(task: CaseFigures, front: pd.DataFrame) -> None:
    with mpl.rc_context(STYLE):
        title = _title(task, "prefill to decode GPUs along the frontier")
        figure, axes = _axes(title, X_LABEL, "prefill GPUs / decode GPUs (log scale)")
        axes.plot(front[X], front["ctx_gen_gpu_ratio"], "-o", color=COLOURS[0], markersize=4)
        axes.axhline(1.0, color="#666666", linewidth=1.0, linestyle="--")
        axes.annotate(
            "equal pools",
            (1.0, 1.0),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            color="#444444",
        )
        axes.set_yscale("log")
        low, high = min(front["ctx_gen_gpu_ratio"].min(), 1.0), max(front["ctx_gen_gpu_ratio"].max(), 1.0)
        ticks = [t * 10.0**e for e in range(-4, 4) for t in (1, 2, 5) if low / 1.6 <= t * 10.0**e <= high * 1.6]
        axes.set_ylim(low / 1.6, high * 1.6)
        axes.set_yticks(ticks)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlim(left=0)
        save_png(figure, task.folder / "ctx_gen_ratio.png")


def _overview(task: Overview) -> None:
    labels = list(dict.fromkeys(curve.label for _, curves in task.panels for curve in curves))
    columns = min(len(task.panels), 2)
    rows = -(-len(task.panels) // columns)
    with mpl.rc_context(STYLE):
        figure = blank_figure((6.4 * columns, 4.4 * rows + 0.24 * len(labels) + 0.6))
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes, (traffic, curves) in zip(panels.flat, task.panels, strict=False):
            axes.set_title(f"{task.title}, {traffic} tokens in/out", loc="left")
            for curve in curves:
                place = labels.index(curve.label)
                colour, mark = COLOURS[place % len(COLOURS)], MARKS[place // len(COLOURS) % len(MARKS)]
                for split, front in curve.modes:
                    line = "-" if split else (0, (4, 2))
                    every = {"marker": mark, "markevery": 0.12} if len(labels) > len(COLOURS) else {}
                    axes.plot(front[X], front[task.y], linestyle=line, color=colour, **every)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.set_xlim(left=0)
            for speed in SPEEDS:  # of the tables
                if speed < axes.get_xlim()[1]:
                    axes.axvline(speed, color="#888888", linewidth=0.9, linestyle=":", zorder=1)
            axes.set_xlabel(X_LABEL)
            axes.yaxis.set_tick_params(labelleft=True)
        for axes in panels.flat[len(task.panels) :]:
            axes.set_visible(False)
        for row in panels:
            row[0].set_ylabel(task.y_label + ", log scale")
        figure.legend(handles=_legend(task, labels), loc="outside lower left", ncols=2)
        save_png(figure, task.path)


def _legend(task: Overview, labels: Sequence[str]) -> list[Line2D]:
    """Colours of the cases, then the lines of the modes, those that are drawn."""
    drawn = {split for _, curves in task.panels for curve in curves for split, _ in curve.modes}
    modes: list[tuple[str, bool, Any]] = [("disaggregated", True, "-"), ("best co-located", False, (0, (4, 2)))]
    handles = [
        Line2D([], [], color=COLOURS[place % len(COLOURS)], linewidth=3.0, label=label)
        for place, label in enumerate(labels)
    ]
    for name, split, line in modes:
        if split in drawn:
            handles.append(Line2D([], [], color="#444444", linestyle=line, label=name))
    return handles


def _cloud(task: CaseFigures) -> pd.DataFrame:
    """Evenly taken points of the case, read block by block."""
    share = max(1, CLOUD_POINTS // max(1, len(task.blocks)))
    parts = []
    for key in task.blocks:
        points = task.store.read(key, columns=[X, task.y])
        parts.append(points.iloc[:: max(1, len(points) // share)])
    return pd.concat(parts, ignore_index=True)
