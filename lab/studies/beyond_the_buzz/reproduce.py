"""Reproduce "Beyond the Buzz": its figures under some profiles, and its claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from disagg_sim.atomic import write_csv
from disagg_sim.errors import check_word
from disagg_sim.laboratory import in_workers
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.store import Store
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import Evidence, FrontierSource
from lab.studies.beyond_the_buzz.figures import FIGURES, draw_picture, figure_data
from lab.studies.beyond_the_buzz.frontiers import Frontiers
from lab.studies.claims import evaluate as judged_claims
from lab.studies.claims import evaluate_as_authors
from lab.studies.papers import DIGITS, PaperResults


def reproduce(frontiers: Frontiers, *, items: Sequence[str] = (), profiles: Sequence[str]) -> PaperResults:
    """Write figures with their data, and the claims, below ``frontiers.root``: ``<profile>/fig01.png`` and ``.csv``
    hold a figure, ``<profile>/sweeps/`` what it was made of. With ``items`` the claims are left out.
    """
    for item in items:
        check_word("figure", item, FIGURES)
    frontiers.prepare(items or frontiers.names, profiles)
    tasks: list[Callable[[], Path | Judged]] = []
    for profile in profiles:
        Store(frontiers.root / profile).prepare()
        if not items:
            tasks.append(partial(_judged, frontiers.tables(frontiers.names, profile), profile))
    for profile in profiles:
        places = {item: frontiers.root / profile / f"{item}.png" for item in items or FIGURES}
        tasks += [
            partial(_written, frontiers.tables([item], profile), item, profile, path) for item, path in places.items()
        ]
    done = list(run_tasks(in_workers(_call), tasks, jobs=frontiers.jobs))
    claims = as_authors = None
    if not items:
        judged = [each for each in done if isinstance(each, Judged)]
        claims = _by_claim([each.claims for each in judged], profiles, "profile")
        as_authors = _by_claim([each.as_authors for each in judged], profiles, "engine")
        write_csv(frontiers.root / "claims.csv", claims, digits=DIGITS)
        write_csv(frontiers.root / "as_authors.csv", as_authors, digits=DIGITS)
    pictures = tuple(sorted(each for each in done if isinstance(each, Path)))
    return PaperResults(claims=claims, as_authors=as_authors, pictures=pictures, computed=frontiers.design_points)


class Judged(NamedTuple):
    """Verdicts under one profile."""

    claims: pd.DataFrame
    as_authors: pd.DataFrame  # its column ``engine`` has the profile, as the paper has no engine


def _call(task: Callable[[], Path | Judged]) -> Path | Judged:
    return task()


def _judged(tables: FrontierSource, profile: str) -> Judged:
    evidence = {profile: Evidence(tables, profile)}
    claims = judged_claims(TEXT.claims, evidence)
    return Judged(claims, evaluate_as_authors(TEXT.as_authors, evidence, claims))


def _by_claim(parts: Sequence[pd.DataFrame], profiles: Sequence[str], column: str) -> pd.DataFrame:
    """Claims under each profile as one table, in order of claims and, of each, in order of profiles."""
    table = pd.concat([part.assign(_claim=range(len(part))) for part in parts], ignore_index=True)
    order = table.assign(_profile=table[column].map(["", *profiles].index)).sort_values(["_claim", "_profile"])
    kept = order.drop_duplicates(["id", column], keep="last")  # what is not judged has no profile: as under the last
    return kept.drop(columns=["_claim", "_profile"]).reset_index(drop=True)


def _written(tables: FrontierSource, item: str, profile: str, path: Path) -> Path:
    """Write a picture, and its data as ``.csv``."""
    picture = figure_data(tables, item, profile)
    write_csv(path.with_suffix(".csv"), picture.table, digits=DIGITS)
    draw_picture(picture, path)
    return path
