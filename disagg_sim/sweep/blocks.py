"""Read a block of a sweep's points, with what its case assumes beside the specs that each row names."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from disagg_sim.certainty.rows import ASSUMED
from disagg_sim.errors import InputError
from disagg_sim.parquet import read_parquet
from disagg_sim.sweep.compare import read_frontier
from disagg_sim.sweep.kv_links import LINK, LINK_BANDWIDTH
from disagg_sim.sweep.manifest import FRONTIER_FILE


def read_block(path: Path) -> pd.DataFrame:
    """Read a file of ``points/``, as a table whose rows can be timed again (``certainty.rows``).

    A block does not repeat what all rows of its case share: NVLink domain, interference, traffic, link. These come from
    the ``frontier.csv`` of the same results, where it has the case. Returns columns of ``serving.points.COLUMNS`` with
    ``case`` in front, and those of ``certainty.rows.ASSUMED`` and of the link.
    """
    try:
        table = read_parquet(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no table of points: {' '.join(str(error).split())}") from None
    file = path.resolve().parent.parent.parent / FRONTIER_FILE
    if "case" not in table or not file.is_file():
        return table
    front = read_frontier(file).table.drop_duplicates("case").set_index("case")
    cases = table["case"].astype(str)
    if not cases.isin(front.index).all():
        return table
    shared = [name for name in (*ASSUMED, LINK, LINK_BANDWIDTH) if name in front and name not in table]
    return table.assign(**{name: cases.map(front[name]) for name in shared})
