"""Read what another tool predicts for served runs, so that it is judged on the same rows and in the same way.

A CSV with one line a run: ``row_id`` as in the file of measurements, ``tpot_ms``, and ``ttft_ms`` or
``tput_total_tok_s_gpu`` (input and output tokens a second and GPU, over all GPUs) or both. Blank is "not predicted".
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.yaml_files import shown
from disagg_sim.units import MS
from lab.calibration.kernels.tables import TableError, read_cells

#: Column of the file -> quantity of the lines, and unit of the column.
COLUMNS = {"tpot_ms": ("tpot", MS), "ttft_ms": ("ttft", MS), "tput_total_tok_s_gpu": ("throughput", 1.0)}


def read_predictions(path: Path) -> pd.DataFrame:
    """Read the predictions of another tool by row: ``tpot``, ``ttft`` [s], ``throughput`` [token/s/GPU], NaN where
    there is none.
    """
    table = read_cells(path)
    missing = next((name for name in ("row_id", "tpot_ms") if name not in table), "")
    if not missing and not {"ttft_ms", "tput_total_tok_s_gpu"} & set(table):
        missing = "ttft_ms"
    if missing:
        hint = nearest(missing, map(str, table))
        known = ", ".join(("row_id", *COLUMNS))
        raise TableError(f"{shown(path)}: no column {missing!r}{hint}; predictions have {known}")
    names = table["row_id"].str.strip()
    if names.duplicated().any():
        raise TableError(f"{shown(path)}: row {quoted(names[names.duplicated()].iloc[0])} occurs twice")
    found = pd.DataFrame(index=pd.Index(names, name="row"))
    for column, (quantity, unit) in COLUMNS.items():
        told = table[column].str.strip() if column in table else pd.Series("", index=table.index)
        number = pd.to_numeric(told, errors="coerce")
        wrong = (told != "") & ~(np.isfinite(number) & (number > 0))
        if wrong.any():
            row, value = names[wrong].iloc[0], told[wrong].iloc[0]
            raise TableError(f"{shown(path)}: row {quoted(row)}: {column} is {quoted(value)}; allowed: above 0")
        found[quantity] = (number * unit).to_numpy()
    return found


def predicted_by(table: pd.DataFrame, predictions: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Select the lines of the rows that a tool predicted too: with its numbers, and with our own."""
    ours = table[table["evaluated"] & table["row"].isin(predictions.index)]
    long = predictions.reset_index().melt(id_vars="row", var_name="quantity", value_name="theirs")
    theirs = ours.merge(long, on=["row", "quantity"], how="left")
    theirs = theirs.assign(predicted=theirs["theirs"], relative_error=theirs["theirs"] / theirs["measured"] - 1.0)
    bands = [name for name in ("predicted_p10", "predicted_p90") if name in theirs]
    return theirs[theirs["theirs"].notna()].drop(columns=["theirs", *bands]), ours
