"""Verdicts on the claims of published papers, from the tables of ``docs/studies/``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from docs.computed import on_site, quick, table
from lab.studies.claims import Verdict, detail_rows, holding, verdict_rows

STUDIES = Path(__file__).resolve().parents[1] / "studies"


def _register(name: str) -> None:
    """Both verdicts of each claim, why one misses and how many hold, for the page; what they rest on, for the site."""

    def verdicts() -> str:
        return table(("", "claim", "as its authors", "ours", "why"), verdict_rows(stored(name)))

    def details() -> str:
        header = ("", "where, and what was measured", "inferred", "paper", "here, as its authors", "accepted")
        return table((*header, "here, ours", "accepted in ours"), detail_rows(stored(name)))

    def hold() -> str:
        theirs, ours = (_counts(stored(name), column) for column in ("verdict", "our_verdict"))
        return f"{theirs} hold as the authors set it up, {ours} in our setting"

    verdicts.__name__, details.__name__, hold.__name__ = f"{name}_claims", f"{name}_details", f"{name}_hold"
    quick(verdicts)
    quick(hold)
    on_site(details)


def _counts(claims: pd.DataFrame, column: str) -> str:
    """How many hold in a column of verdicts, of those that a run could refute; by engine where they differ."""
    found = {line["profile"]: f"{line['holds']} of {line['of']}" for line in held(claims, column)}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{count} (`{engine}`)" for engine, count in found.items())


def held(claims: pd.DataFrame, column: str) -> list[dict[str, Any]]:
    """Count a column of verdicts by engine or profile; what is not judged as its authors set it up has neither."""
    engines = [engine for engine in claims["engine"].unique() if engine]
    rows = [claims[claims["engine"].isin((engine, ""))].assign(profile=engine) for engine in engines]
    judged = pd.concat(rows).assign(verdict=lambda every: every[column])
    return holding(judged[judged["verdict"] != Verdict.NOT_JUDGED]).to_dict("records")


def stored(name: str) -> pd.DataFrame:
    """The verdicts that a page shows."""
    return pd.read_csv(STUDIES / f"{name}.csv", dtype=str, keep_default_na=False)


for _name in ("arrow", "beyond_the_buzz", "dopd", "dynaserve"):
    _register(_name)
