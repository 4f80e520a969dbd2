"""Fit the efficiencies of one system to kernel tables, with residuals and provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError
from disagg_sim.facts.efficiency import LIBRARIES, SECTIONS, DataFile, Fit, PrefillKeys, with_keys
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_system
from disagg_sim.facts.yaml_files import is_path, shown
from disagg_sim.units import US
from lab.calibration.kernels.limits import least_time
from lab.calibration.kernels.registry import OPERATORS, FittedOperator, LeftOut
from lab.calibration.kernels.tables import LISTED_FAULTS, KernelTable, read_all, spec_name

#: Digits to which fitted numbers are written; their errors are those of the rounded numbers.
DIGITS = 5
#: Standard deviations within which 80 % of a normal distribution lie, by which ``sigma_log`` of every efficiency file
#: was divided; ``facts.uncertainty.EIGHTY`` has one digit more, and would move the last digit of those. [1]
EIGHTY_PERCENT = 1.2816


@dataclass(frozen=True)
class Calibration:
    """Fits of one system; ``residuals`` has each measured row with ``measured`` and ``predicted`` [s], NaN without a
    fit.
    """

    system: SystemSpec
    fits: Mapping[str, tuple[Fit, ...]]  # by section of the efficiency file
    files: tuple[DataFile, ...]
    residuals: pd.DataFrame
    left_out: tuple[LeftOut, ...] = ()  # fits that are not shipped


def calibrate_kernels(
    paths: Sequence[Path],
    system: str,
    *,
    exclude: Path | None = None,
    split: bool = True,
    prefill_keys: Sequence[PrefillKeys] = (),
) -> Calibration:
    """Fit everything that the tables measure of a system."""

    spec = load_system(system if is_path(system) else spec_name(system))
    tables = read_all(paths, exclude, faults_of=partial(beyond_physics, system=spec))
    forms = {form: _rows_of(tables, form, spec) for form in OPERATORS}

    fits: dict[str, tuple[Fit, ...]] = {}
    left: list[LeftOut] = []
    unseen = 0
    for form, operator in OPERATORS.items():
        if operator.fit is not None and forms[form] is not None:
            rows = forms[form]
            usable = rows[(rows["masked"] == "") & rows["framework"].isin(LIBRARIES)]
            fitted = usable[~usable["held_out"]] if split else usable
            unseen += len(usable) - len(fitted)
            raw = [_rounded(fit) for fit in with_keys(operator.fit_rows(fitted, spec), prefill_keys)]
            section = operator.sections[0]
            shipped, others = operator.select(_judged(operator, raw, usable, spec, split=split), fitted)
            fits[section] = (*fits.get(section, ()), *shipped)
            left += others
    if not any(fits.values()):
        held = f"; {unseen} rows are of shapes that are held out, --no-split fits them, too" if unseen else ""
        files = ", ".join(shown(path) for path in paths)
        raise InputError(f"no row of {spec.name} that can be fitted in {files}{held}")
    told = tuple(_data_file(table, spec, fits, split=split) for table in tables)
    by_section = {key: fits.get(key, ()) for key in SECTIONS}
    return Calibration(spec, by_section, told, _residuals(forms, fits, spec, split), tuple(left))


def beyond_physics(table: KernelTable, system: SystemSpec) -> list[str]:
    """A line for each row of the system, not masked, that is faster than the vendor's peaks allow."""
    rows = table.rows[(table.rows["system"] == system.name) & (table.rows["masked"] == "")]
    if not len(rows):
        return []
    least = least_time(table.form.name, rows, system)
    wrong = rows[rows["latency"].to_numpy() < least]
    lines = [
        f"{shown(table.path)}: line {row}: latency_us {measured:g} is above the physical peak of {system.name}, "
        f"which allows {bound / US:.5g} at least"
        for row, measured, bound in zip(
            wrong["row"], wrong["latency_us"], least[rows["latency"].to_numpy() < least], strict=True
        )
    ]
    more = [f"{shown(table.path)}: and {len(lines) - LISTED_FAULTS} more rows above the peak"]
    return lines[:LISTED_FAULTS] + (more if len(lines) > LISTED_FAULTS else [])


def _rows_of(tables: Sequence[KernelTable], form: str, system: SystemSpec) -> Any:
    """Rows of one form and system out of all files, None where there are none."""
    found = [table.rows[table.rows["system"] == system.name] for table in tables if table.form.name == form]
    rows = pd.concat(found, ignore_index=True) if found else None
    return rows if rows is not None and len(rows) else None


def _rounded(fit: Fit) -> Fit:
    """A fit with its free numbers as they will be written."""
    numbers: dict[str, Any] = {
        field.name: float(f"{value:.{DIGITS}g}")
        for field in fields(fit)
        if isinstance(value := getattr(fit, field.name), float)
    }
    return replace(fit, **numbers)


def _judged(
    operator: FittedOperator, fits: list[Fit], rows: pd.DataFrame, system: SystemSpec, *, split: bool
) -> tuple[Fit, ...]:
    """The fits with their errors on the rows that they saw and on those that they did not."""
    predicted = operator.predict(rows, system, fits)
    number = operator.assign(rows, system, fits, predicted)
    measured = rows["latency"].to_numpy(dtype=float)
    unseen = rows["held_out"].to_numpy(dtype=bool) & split
    judged: dict[int, Fit] = {}
    for index, members in enumerate(operator.units(fits)):
        mine = number == index
        seen, apart = (_errors(predicted, measured, mine & part) for part in (~unseen, unseen))
        spread = (apart if apart["points"] else seen).pop("sigma_log")
        told = seen | {f"held_out_{name}": apart[name] for name in ("points", "median_error", "p90_error")}
        for fit in members:
            judged[id(fit)] = replace(fit, **told | {"sigma_log": spread})
    return tuple(judged[id(fit)] for fit in fits)


def _errors(predicted: Floats, measured: Floats, mine: NDArray[np.bool_]) -> dict[str, Any]:
    """Rows, median and 90 % quantile of the relative error, and the s.d. of the normal distribution without bias whose
    80 % band holds 80 % of its logarithms, as fits name them.
    """
    if not mine.any():
        return {"points": 0, "median_error": 0.0, "p90_error": 0.0, "sigma_log": 0.0}
    ratio = predicted[mine] / measured[mine]
    errors = np.abs(ratio - 1.0)
    spread = float(np.quantile(np.abs(np.log(ratio)), 0.8)) / EIGHTY_PERCENT
    numbers = {"median_error": np.median(errors), "p90_error": np.quantile(errors, 0.9), "sigma_log": spread}
    return {"points": int(mine.sum())} | {name: round(float(number), DIGITS) for name, number in numbers.items()}


def _data_file(table: KernelTable, system: SystemSpec, fits: Mapping[str, tuple[Fit, ...]], *, split: bool) -> DataFile:
    """What became of the rows of a table."""
    rows = table.rows[table.rows["system"] == system.name]
    fate = np.where(rows["held_out"].to_numpy(dtype=bool) & split, "held out", "fitted").astype(object)
    operator = OPERATORS.get(table.form.name)
    if operator is None or operator.fit is None:
        fate[:] = "no fit is made of this table"
    else:
        known = [fit for section in operator.sections for fit in fits.get(section, ())]
        fate[~np.isfinite(operator.predict(rows, system, known))] = "no fit of this kind of row is shipped"
    fate[~rows["framework"].isin(LIBRARIES).to_numpy()] = "another framework"
    masked = rows["masked"].to_numpy(dtype=object)
    fate = np.where(masked != "", masked, fate)
    counts = Counter(fate.tolist())
    return DataFile(
        name=table.path.name,
        sha256=table.sha256,
        rows=len(rows),
        fitted=counts.pop("fitted", 0),
        held_out=counts.pop("held out", 0),
        dropped=dict(sorted(counts.items())),
    )


def _residuals(
    forms: Mapping[str, Any], fits: Mapping[str, tuple[Fit, ...]], system: SystemSpec, split: bool
) -> pd.DataFrame:
    parts: list[pd.DataFrame] = []
    for form, rows in forms.items():
        if rows is not None:
            known = [fit for section in OPERATORS[form].sections for fit in fits.get(section, ())]
            part = rows[["framework", "system", "masked", "held_out"]].assign(
                operator=form, measured=rows["latency"], predicted=OPERATORS[form].predict(rows, system, known)
            )
            parts.append(part.assign(held_out=part["held_out"] & split))
    return pd.concat(parts, ignore_index=True)
