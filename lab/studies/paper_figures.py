"""Draw the figures of papers: columns of a table as curves, and the points that the paper prints beside them.

A ``Figure`` names columns of a table that a study computes; ``figures.yaml`` of a study has its figures. What a paper
prints as numbers stands beside our curves as crosses; values that can be read from its pictures alone are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd

from disagg_sim.facts.yaml_files import read_mapping
from lab.studies.panels import PRINTED, Axes, Picture, curve_points

#: What a figure is computed from.
Source_contra = TypeVar("Source_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Generic[Source_contra]):
    """Columns of a table as curves: a panel for each column of ``y`` and each value of ``panel``."""

    title: str
    data: Callable[[Source_contra], pd.DataFrame]
    x: str  # column
    y: Mapping[str, str]  # column: label of its axis
    x_label: str
    x_scale: str = "linear"
    curve: str  # column
    panel: str = ""  # column; "" = none
    joined: bool = True  # a line through the points of a curve
    printed: Sequence[tuple[str, str, float, float]] = ()  # panel, what is printed, x, y


def read_figures(module: str, functions: Mapping[str, Any]) -> dict[str, Figure[Any]]:
    """Read the figures beside a module: ``data`` names one of ``functions``, ``options`` what it takes besides."""

    def read(data: str, options: Mapping[str, Any] | None = None, **row: Any) -> Figure[Any]:
        return Figure(data=partial(functions[data], **options or {}), **row)

    return {name: read(**row) for name, row in read_mapping(Path(module).with_suffix(".yaml")).items()}


def picture(figure: Figure[Any], source: Any) -> Picture:
    """Compute a figure.

    >>> table = pd.DataFrame({"gpus": [1, 2, 1, 2], "case": ["a", "a", "b", "b"], "rate": [3.0, 6.0, 2.0, 4.0]})
    >>> figure = Figure(
    ...     title="demo", data=lambda _: table, x="gpus", y={"rate": "requests/s"}, x_label="GPUs", curve="case",
    ...     printed=(("requests/s", "a", 2.0, 5.0),),
    ... )
    >>> picture(figure, None).table[["panel", "curve", "x", "y"]].values.tolist()[-1]
    ['requests/s', 'paper: a', 2.0, 5.0]
    """
    table, frames = figure.data(source), []
    groups = table.groupby(figure.panel, sort=False) if figure.panel else [("", table)]
    for group, rows in groups:
        for column, label in figure.y.items():
            name = ", ".join(each for each in (str(group), label if len(figure.y) > 1 or not group else "") if each)
            frames += [
                curve_points(name, str(curve), points[figure.x], points[column], label)
                for curve, points in rows.sort_values(figure.x, kind="stable").groupby(figure.curve, sort=False)
            ]
    labels = {str(frame["panel"].iloc[0]): frame["y_label"].iloc[0] for frame in frames}
    frames += [curve_points(panel, f"{PRINTED}{what}", [x], [y], labels[panel]) for panel, what, x, y in figure.printed]
    axes = Axes(x_label=figure.x_label, y_label="", x_scale=figure.x_scale, joined=figure.joined)
    return Picture(title=figure.title, axes=axes, table=pd.concat(frames, ignore_index=True))
