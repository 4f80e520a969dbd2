"""Pictures of a sweep: frontier, KV-transfer bandwidth and prefill:decode ratio of every case, and overviews."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg_sim.report.labels import place_labels
from disagg_sim.report.words import case_title, mapping_text, overview_name, records
from disagg_sim.sweep.backends import run_tasks
from disagg_sim.sweep.plan import Case
from disagg_sim.sweep.results import SweepResult
from disagg_sim.sweep.store import Key, Store
from disagg_sim.units import GB

if TYPE_CHECKING:
    import pandas as pd

#: Okabe and Ito's palette, which colour-blind readers tell apart; marks differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
CLOUD = "#BBBBBB"
CLOUD_POINTS = 6000  # drawn of a case's points off the frontier, evenly taken
X, Y = "tokens_per_s_per_user", "tokens_per_s_per_gpu"
X_LABEL = "interactivity [tokens/s/user]"
Y_LABEL = "throughput [output tokens/s/GPU, both pools]"
_STYLE: Any = {
    "figure.figsize": (9.0, 5.6), "figure.dpi": 110, "savefig.dpi": 110, "font.size": 11.0, "axes.titlesize": 11.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E6E6E6",
    "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 5.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class CaseFigures:
    """All that the three pictures of a case need."""

    case: Case
    folder: Path
    frontier: pd.DataFrame
    inherited: bool  # whether some fits were made on another system
    store: Store
    blocks: tuple[Key, ...]  # of the case's points, for the cloud


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """The frontiers of one model and shape on all systems of a sweep."""

    path: Path
    title: str
    frontiers: tuple[tuple[str, pd.DataFrame], ...]  # (label, frontier)


def draw_figures(result: SweepResult, root: Path, *, jobs: int) -> int:
    """Draw ``figures/<case>/*.png`` of every case with results, and ``figures/*.png`` comparing systems.

    Returns
    -------
    int
        Pictures drawn. [1]
    """
    for old in (root / "figures").glob("**/*.png"):
        old.unlink()
    store = Store(root)
    cases = [
        CaseFigures(
            case=case.plan.case,
            folder=root / "figures" / case.plan.case.name,
            frontier=case.frontier,
            inherited=bool(case.inherited_fits),
            store=store,
            blocks=tuple(block.key for block in case.plan.decode),
        )
        for case in result.cases
        if len(case.frontier)
    ]
    tasks: list[CaseFigures | Overview] = [*cases, *_overviews(cases, root)]
    return sum(run_tasks(_draw, tasks, jobs=jobs))


def _overviews(cases: Iterable[CaseFigures], root: Path) -> list[Overview]:
    groups: dict[str, list[CaseFigures]] = {}
    for item in cases:
        groups.setdefault(overview_name(item.case), []).append(item)
    return [
        Overview(
            path=root / "figures" / name,
            title=f"{items[0].case.model}, {items[0].case.isl}/{items[0].case.osl} tokens ({items[0].case.profile})\n"
            "disaggregated frontiers of all systems",
            frontiers=tuple(
                (f"{item.case.system}, {item.case.precision}{_marked(item.inherited)}", item.frontier)
                for item in items
            ),
        )
        for name, items in groups.items()
        if len(items) > 1
    ]


def _marked(inherited: bool) -> str:
    return ", some fits inherited" if inherited else ""


def _draw(task: CaseFigures | Overview) -> int:
    if isinstance(task, Overview):
        _overview(task)
        return 1
    task.folder.mkdir(parents=True, exist_ok=True)
    _pareto(task)
    _kv_bandwidth(task)
    _ratio(task)
    return 3


def _title(task: CaseFigures, subject: str) -> str:
    return f"{case_title(task.case)}{_marked(task.inherited)}\n{subject}"


def _axes(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png", metadata={"Software": None})
    temporary.replace(path)


def _pareto(task: CaseFigures) -> None:
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        title = _title(task, "disaggregated frontier with its mappings")
        figure, axes = _axes(title, X_LABEL, Y_LABEL)
        cloud = _cloud(task)
        axes.plot(cloud[X], cloud[Y], ".", color=CLOUD, markersize=2.5, label="matched points", zorder=1)
        front = task.frontier
        axes.plot(front[X], front[Y], "-o", color=COLOURS[0], markersize=3.5, label="frontier", zorder=3)
        axes.set_xlim(0, front[X].max() * 1.2)  # room for the last labels
        axes.set_ylim(0, front[Y].max() * 1.22)
        axes.legend(loc="upper right")
        place_labels(figure, axes, [(row[X], row[Y], _label(row)) for row in records(front)])
        _save(figure, task.folder / "pareto.png")


def _label(point: Mapping[str, Any]) -> str:
    chunk = f" chunk {int(point['prefill_chunk_tokens'])}" if point["prefill_chunk_tokens"] else ""
    return (
        f"decode {mapping_text(point, 'decode')}, batch {int(point['decode_batch'])}\n"
        f"prefill {mapping_text(point, 'prefill')}{chunk}, batch {int(point['prefill_batch'])}"
    )


def _kv_bandwidth(task: CaseFigures) -> None:
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        title = _title(task, "KV-cache transfer along the frontier")
        figure, axes = _axes(title, X_LABEL, "KV-cache bandwidth per GPU at full rate [GB/s]")
        front = task.frontier
        pairs = (("egress", "out of each prefill GPU"), ("ingress", "into each decode GPU"))
        for number, (side, said) in enumerate(pairs):
            rate = front[f"kv_{side}_bytes_per_s_per_gpu"] / GB
            axes.plot(front[X], rate, "-" + MARKS[number], color=COLOURS[number], markersize=4, label=f"{side}: {said}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")
        _save(figure, task.folder / "kv_bandwidth.png")


def _ratio(task: CaseFigures) -> None:
    import matplotlib as mpl
    from matplotlib.ticker import FuncFormatter

    with mpl.rc_context(_STYLE):
        title = _title(task, "prefill to decode GPUs along the frontier")
        figure, axes = _axes(title, X_LABEL, "prefill GPUs / decode GPUs (log scale)")
        front = task.frontier
        axes.plot(front[X], front["ctx_gen_gpu_ratio"], "-o", color=COLOURS[0], markersize=4)
        axes.axhline(1.0, color="#666666", linewidth=1.0, linestyle="--")
        axes.annotate(
            "equal pools", (1.0, 1.0), xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points",
            ha="right", color="#444444",
        )  # fmt: skip
        axes.set_yscale("log")
        low, high = min(front["ctx_gen_gpu_ratio"].min(), 1.0), max(front["ctx_gen_gpu_ratio"].max(), 1.0)
        ticks = [t * 10.0**e for e in range(-4, 4) for t in (1, 2, 5) if low / 1.6 <= t * 10.0**e <= high * 1.6]
        axes.set_ylim(low / 1.6, high * 1.6)
        axes.set_yticks(ticks)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlim(left=0)
        _save(figure, task.folder / "ctx_gen_ratio.png")


def _overview(task: Overview) -> None:
    import matplotlib as mpl
    from matplotlib.ticker import FuncFormatter

    with mpl.rc_context(_STYLE):
        figure, axes = _axes(task.title, X_LABEL, Y_LABEL + ", log scale")
        for number, (label, front) in enumerate(task.frontiers):
            colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
            axes.plot(front[X], front[Y], "-" + mark, color=colour, markersize=4, label=label)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlim(left=0)
        axes.legend(loc="best")
        _save(figure, task.path)


def _cloud(task: CaseFigures) -> pd.DataFrame:
    """Evenly taken points of the case, read block by block."""
    import pandas as pd

    share = max(1, CLOUD_POINTS // max(1, len(task.blocks)))
    parts = []
    for key in task.blocks:
        points = task.store.read(key, columns=[X, Y])
        parts.append(points.iloc[:: max(1, len(points) // share)])
    return pd.concat(parts, ignore_index=True)
