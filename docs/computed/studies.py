"""Verdicts on the claims of published papers, from the tables of ``docs/studies/``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from docs.computed import quick, table
from lab.studies.as_authors import detail_rows, verdict_rows

STUDIES = Path(__file__).resolve().parents[1] / "studies"
NAMES = ("arrow", "beyond_the_buzz", "dopd", "dynaserve")


def verdicts(name: str) -> str:
    """Both verdicts of each claim of a paper, and why one misses."""
    return table(("", "claim", "as its authors", "ours", "why"), verdict_rows(_read(name)))


def details(name: str) -> str:
    """What the verdicts rest on, for the page of the site."""
    header = ("", "where, and what was measured", "inferred", "paper", "here, as its authors", "accepted")
    return table((*header, "here, ours", "accepted in ours"), detail_rows(_read(name)))


def _read(name: str) -> pd.DataFrame:
    return pd.read_csv(STUDIES / f"{name}.csv", dtype=str, keep_default_na=False)


def _registered(name: str) -> Callable[[], str]:
    def made() -> str:
        return verdicts(name)

    made.__name__ = f"{name}_claims"
    return quick(made)


for _name in NAMES:
    _registered(_name)
