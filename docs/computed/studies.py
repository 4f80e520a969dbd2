"""Verdicts on the claims of published papers, from the tables of ``docs/studies/``."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from docs.computed import on_site, quick, table
from lab.studies.as_authors import detail_rows, verdict_rows

STUDIES = Path(__file__).resolve().parents[1] / "studies"


def _register(name: str) -> None:
    """Both verdicts of each claim and why one misses, for the page; what they rest on, for the site."""

    def verdicts() -> str:
        return table(("", "claim", "as its authors", "ours", "why"), verdict_rows(_read(name)))

    def details() -> str:
        header = ("", "where, and what was measured", "inferred", "paper", "here, as its authors", "accepted")
        return table((*header, "here, ours", "accepted in ours"), detail_rows(_read(name)))

    verdicts.__name__, details.__name__ = f"{name}_claims", f"{name}_details"
    quick(verdicts)
    on_site(details)


def _read(name: str) -> pd.DataFrame:
    return pd.read_csv(STUDIES / f"{name}.csv", dtype=str, keep_default_na=False)


for _name in ("arrow", "beyond_the_buzz", "dopd", "dynaserve"):
    _register(_name)
