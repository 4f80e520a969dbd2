"""Compare kernel tables with the fits: every row with its verdict, and the errors by group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.errors import InputError
from disagg_sim.facts.efficiency import EfficiencySpec, Fit
from disagg_sim.facts.load import load_efficiency, load_system, load_uncertainty
from disagg_sim.facts.uncertainty import spread_of
from disagg_sim.facts.yaml_files import shown
from disagg_sim.units import US
from lab.calibration.kernels.limits import least_time
from lab.calibration.kernels.registry import OPERATORS
from lab.calibration.kernels.residuals import band, error_table, part_of
from lab.calibration.kernels.tables import IDENTITY, LATENCY, ROW_ID, KernelTable, TableForm, read_all

#: Columns of the verdicts, in order.
COLUMNS = (
    *("file", "row", "operator", "system", "framework", "version", "kernel_source", "shape", "measured_us"),
    *("predicted_us", "predicted_p10_us", "predicted_p90_us", "relative_error", "evaluated", "reason", "masked"),
    *("part", "held_out", "in_range"),
)
#: Keys of the summary.
GROUPS = ("operator", "framework", "system", "part")
#: Part of the range by which a size may pass its end and still count as inside. [1]
ROUNDING = 1e-9
#: Word for all systems together.
POOLED = "all"


def judge_kernels(
    paths: Sequence[Path], *, exclude: Path | None = None, efficiency: Path | None = None
) -> pd.DataFrame:
    """Predict every row of the tables: ``COLUMNS``. ``part`` is "new" for a table that no fit was made from (by its
    bytes); a ``reason`` says why a row is not ``evaluated``, or names a doubt where it is.
    """
    if efficiency is not None and not efficiency.is_dir():
        raise InputError(f"{shown(efficiency)}: no such directory of efficiency files")
    tables = read_all(paths, exclude, strict=False)
    parts = [
        _verdicts(table, rows, str(name), efficiency)
        for table in tables
        for name, rows in table.rows.groupby("system", sort=False)
    ]
    found = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(COLUMNS))
    found = found.sort_values(["file", "row"], kind="stable", ignore_index=True)
    return (found.assign(row=found[ROW_ID]) if parts else found)[list(COLUMNS)]


def summarise(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Summarise the errors of the evaluated, not masked rows by ``GROUPS`` and size, pooled and by system."""
    good = verdicts[verdicts["evaluated"] & (verdicts["masked"] == "")]
    columns = {"measured": "measured", "predicted": "predicted", "low": "predicted_p10", "high": "predicted_p90"}
    rows = good[list(GROUPS)].assign(**{name: good[f"{column}_us"] * US for name, column in columns.items()})
    return pd.concat([error_table(rows.assign(system=POOLED), GROUPS), error_table(rows, GROUPS)], ignore_index=True)


def _verdicts(table: KernelTable, rows: pd.DataFrame, system: str, efficiency: Path | None) -> pd.DataFrame:
    """Verdicts of the rows of one system in one table."""
    form, count = table.form, len(rows)
    columns = [*form.words, *form.sizes]
    reason = rows["fault"].to_numpy(dtype=object).copy()
    predicted, within, sigma = np.full(count, np.nan), np.zeros(count, dtype=bool), np.full(count, np.nan)
    sound = np.nonzero(reason == "")[0]
    file = system if efficiency is None else efficiency / f"{system}.yaml"
    spec = load_efficiency(file) if len(sound) and (isinstance(file, str) or file.is_file()) else None
    if len(sound) and (spec is None or form.name not in OPERATORS):
        reason[sound] = f"no fits of {system}" if spec is None else f"nothing predicts a {form.name} table"
    elif spec is not None:
        good = rows.iloc[sound]
        predicted[sound], within[sound], sigma[sound] = _predict(form, good, spec)
        missing = sound[~np.isfinite(predicted[sound])]
        reason[missing] = [f"no fit of {_words(form, row)}" for row in rows.iloc[missing].to_dict("records")]
        fast = least_time(form.name, good, load_system(system)) > good["latency"].to_numpy()
        reason[sound[fast & np.isfinite(predicted[sound])]] = "above the physical peak"
    measured = rows["latency"].to_numpy(dtype=float)
    low, high = band(predicted, sigma)
    known = spec is not None and any(each.sha256 == table.sha256 for each in spec.files)
    split = known and spec is not None and any(each.held_out for each in spec.files)
    unseen = rows["held_out"].to_numpy(dtype=bool) & split
    return rows[["row", "system", "framework", "version", "kernel_source", "masked"]].assign(
        **{ROW_ID: rows[ROW_ID] if ROW_ID in rows else rows["row"]},
        file=shown(table.path),
        operator=form.name,
        shape=[" ".join(map("=".join, zip(columns, row, strict=True))) for row in rows[columns].astype(str).to_numpy()],
        measured_us=measured / US,
        predicted_us=predicted / US,
        predicted_p10_us=low / US,
        predicted_p90_us=high / US,
        relative_error=predicted / measured - 1.0,
        evaluated=np.isfinite(predicted) & np.isfinite(measured),
        reason=reason,
        held_out=unseen,
        in_range=within,
        part=[part_of(bool(each)) if known else "new" for each in unseen],
    )


def _predict(form: TableForm, rows: pd.DataFrame, spec: EfficiencySpec) -> tuple[Any, Any, Any]:
    """Predicted times [s], whether each row lies in the range of the fit that it needs, s.d. of log time by it."""
    operator, system = OPERATORS[form.name], load_system(spec.system)
    fits = operator.fits_of(spec)
    predicted = operator.predict(rows, system, fits)
    number = operator.assign(rows, system, fits, predicted)
    within, sigma = np.zeros(len(rows), dtype=bool), np.full(len(rows), np.nan)
    spreads = load_uncertainty("measured")
    for index, members in enumerate(operator.units(fits)):
        mine = number == index
        if mine.any():
            within[mine] = _inside(rows[mine], members)
            sigma[mine] = max(spread_of(fit, spreads) for fit in members)
    if operator.fit is None:  # put together from the fits of others
        sigma[:] = spreads.composed.get(form.name, np.nan)
    return predicted, within, sigma


def _inside(rows: pd.DataFrame, fits: Sequence[Fit]) -> NDArray[np.bool_]:
    """Tell of each row whether it lies in the range of one of ``fits``; sizes that are no column do not count."""
    result = np.zeros(len(rows), dtype=bool)
    for fit in fits:
        here = np.ones(len(rows), dtype=bool)
        for size, low, high in fit.valid:
            if size in rows.columns:
                here &= rows[size].astype(float).between(low * (1.0 - ROUNDING), high * (1.0 + ROUNDING)).to_numpy()
        result |= here
    return result


def _words(form: TableForm, row: dict[str, Any]) -> str:
    """What a fit would have to be of: library, kernel and words of a row."""
    return " ".join(str(row[column]) for column in (*IDENTITY[1:], *form.words) if column not in (LATENCY, "version"))
