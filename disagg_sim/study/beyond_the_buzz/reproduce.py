"""Reproduce "Beyond the Buzz": its figures under some profiles, where disaggregation pays, and its claims."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from disagg_sim.atomic import write_csv
from disagg_sim.errors import UnknownNameError, nearest
from disagg_sim.report.panels import Cells, Picture
from disagg_sim.study.beyond_the_buzz.claims import evaluate
from disagg_sim.study.beyond_the_buzz.figures import figure_data, figure_names
from disagg_sim.study.beyond_the_buzz.frontiers import Frontiers
from disagg_sim.study.beyond_the_buzz.where_it_pays import PAYS, pays_cells, pays_table
from disagg_sim.study.papers import DIGITS, PaperResults, draw
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.store import Store


def item_names() -> tuple[str, ...]:
    """Everything that has a picture: the figures, and ``where_it_pays``."""
    return (*figure_names(), PAYS)


def reproduce(frontiers: Frontiers, *, items: Sequence[str] = (), profiles: Sequence[str]) -> PaperResults:
    """Write figures with their data, and the claims, below ``frontiers.root``.

    ``<profile>/fig01.png`` and ``.csv`` hold a figure, ``<profile>/sweeps/`` what it was made of.

    Parameters
    ----------
    frontiers : Frontiers
        The sweeps of the study.
    items : sequence of str
        Of ``item_names``; without any, all of them and ``claims.csv``.
    profiles : sequence of str
        Efficiency profiles.

    Returns
    -------
    PaperResults
        Table of claims, or None where ``items`` were asked for; paths of the pictures; design points computed. [1]

    Raises
    ------
    UnknownNameError
        When there is no such figure.
    DisaggSimError
        An unknown profile, a fault in a file, a directory that cannot be written.

    Examples
    --------
    >>> reproduce(Frontiers(Path("results")), items=("fig5",), profiles=("ideal",))
    Traceback (most recent call last):
    disagg_sim.errors.UnknownNameError: unknown figure 'fig5', did you mean 'fig05'?; known: fig01, ...
    """
    known = item_names()
    for item in items:
        if item not in known:
            raise UnknownNameError(f"unknown figure {item!r}{nearest(item, known)}; known: {', '.join(known)}")
    frontiers.prepare(items or frontiers.names, profiles)
    drawings: list[tuple[Picture | Cells, Path]] = []
    for profile in profiles:
        Store(frontiers.root / profile).prepare()
        for item in items or known:
            picture, table = _item(frontiers, item, profile)
            path = frontiers.root / profile / f"{item}.png"
            write_csv(path.with_suffix(".csv"), table, digits=DIGITS)
            drawings.append((picture, path))
    claims = None
    if not items:
        claims = evaluate(frontiers, profiles)
        write_csv(frontiers.root / "claims.csv", claims, digits=DIGITS)
    pictures = tuple(run_tasks(_draw, drawings, jobs=frontiers.jobs))
    return PaperResults(claims=claims, pictures=tuple(sorted(pictures)), computed=frontiers.design_points)


def _item(frontiers: Frontiers, item: str, profile: str) -> tuple[Picture | Cells, pd.DataFrame]:
    if item == PAYS:
        table = pays_table(frontiers, profile)
        return pays_cells(table), table
    data = figure_data(frontiers, item, profile)
    return data.picture, data.table


def _draw(drawing: tuple[Picture | Cells, Path]) -> Path:
    return draw(*drawing)
