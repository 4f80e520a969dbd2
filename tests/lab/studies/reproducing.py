"""Run the command of a study of serving policies on short samples, and see that everything is written."""

from pathlib import Path

import pandas as pd

from disagg_sim.cli.main import run
from lab.studies.claims import BOTH_COLUMNS, COLUMNS
from lab.studies.papers import paper


def reproduced(name: str, out: Path) -> pd.DataFrame:
    """The table of claims by number: one each, beside all tables."""
    assert run(["reproduce", name, "--quick", "--out", str(out)]) == 0
    study = paper(name)
    tables = {table: pd.read_csv(out / f"{table}.csv") for table in ("claims", "as_authors", *study.tables)}
    assert (tuple(tables["claims"]), tuple(tables["as_authors"])) == (COLUMNS, BOTH_COLUMNS)
    assert tables["claims"]["id"].tolist() == [each.id for each in study.text.claims]
    assert all(map(len, tables.values()))

    return tables["claims"].set_index("id")
