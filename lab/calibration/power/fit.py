"""Fit the power of kernels, the equation of ``physics.power`` to rows of one class, engine and form, and write it.

Robust least squares of the logarithm of the power (``lab.calibration.kernels.robust``). Classes whose work is not
counted have the power of a kernel by its time alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.errors import StoreError
from disagg_sim.facts.efficiency import DataFile
from disagg_sim.facts.load import load_power
from disagg_sim.facts.power import PowerLaw, PowerSpec, power_of
from disagg_sim.facts.uncertainty import HALF
from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.physics.power import kernel_power
from disagg_sim.units import US
from lab.calibration.files import Writer
from lab.calibration.kernels.efficiency_yaml import file_line, fit_line, number_text, plain_word
from lab.calibration.kernels.robust import Parameter, by_name, error_quantiles, ranges, solved
from lab.calibration.power.table import KINDS, PowerTable

#: A GPU that waits draws what the least drawing of these shares of all rows draws. [1]
IDLE_QUANTILE = 0.01
#: Rows that a law needs. [1]
FEWEST = 15
_BY_TIME = (Parameter("base", 0.3, 1e-3, 2.0), Parameter("gap", 20 * US, 0.1 * US, 2000 * US))
_BY_WORK = (
    Parameter("compute", 0.9, 1e-3, 5.0),
    Parameter("compute_power", 0.7, 0.2, 1.5),
    Parameter("memory", 0.7, 1e-3, 5.0),
    Parameter("memory_power", 0.7, 0.2, 1.5),
)


@dataclass(frozen=True, slots=True)
class PowerFit:
    """Laws of one system, and how they do on every row."""

    table: PowerTable
    idle: float  # share of the limit [1]
    laws: tuple[PowerLaw, ...]
    file: DataFile
    rows: pd.DataFrame  # of the table that have a law, with ``predicted`` [W]


def calibrate_power(table: PowerTable) -> PowerFit:
    """Fit one law a class, engine and form."""
    rows = table.rows.assign(predicted=np.nan)
    kept = rows[rows["dropped"] == ""]
    idle = float(kept["watts"].quantile(IDLE_QUANTILE)) / table.limit
    laws: list[PowerLaw] = []
    few = "fewer rows of its class, engine and form than a law needs"
    for (law, engine, form), mine in kept.groupby(["law", "framework", "form"], sort=True):
        seen = mine[~mine["held_out"]]
        if len(seen) < FEWEST:
            rows.loc[mine.index, "dropped"] = few
            continue
        fitted = _fit(seen, str(law), str(form), str(engine), idle, table.limit)
        rows.loc[mine.index, "predicted"] = _watts(fitted, mine, idle, table.limit)
        unseen = mine[mine["held_out"]]
        laws.append(_judged(fitted, unseen, idle, table.limit) if len(unseen) else fitted)
    dropped = rows[rows["dropped"] != ""].groupby("dropped").size().to_dict()
    used = rows[rows["dropped"] == ""]
    unseen_rows = int(used["held_out"].sum())
    file = DataFile(
        name=table.name,
        sha256=table.sha256,
        rows=len(rows),
        fitted=len(used) - unseen_rows,
        held_out=unseen_rows,
        dropped={str(reason): int(count) for reason, count in dropped.items()},
    )
    return PowerFit(table, idle, tuple(laws), file, used)


def _watts(law: PowerLaw, rows: pd.DataFrame, idle: float, limit: float) -> NDArray[np.float64]:
    compute, memory, time = (rows[name].to_numpy(dtype=float) for name in ("compute", "memory", "time"))
    return np.asarray(limit * kernel_power(law, compute=compute, memory=memory, time=time, idle=idle))


def _fit(rows: pd.DataFrame, kind: str, form: str, engine: str, idle: float, limit: float) -> PowerLaw:
    """The law of rows of one class, engine and form."""
    counted = any(each.law == kind and each.work for each in KINDS.values())
    numbers = (*_BY_TIME, *(_BY_WORK if counted else ()))
    same: dict[str, Any] = {"kind": kind, "form": form, "engine": engine, "version": rows["version"].iloc[0]}
    same |= {"points": len(rows), "median_error": 0.0, "p90_error": 0.0, "parameters": len(numbers)}
    same["valid"] = ranges(rows, ("compute", "memory", "time") if counted else ("time",))

    def law(values: NDArray[np.float64]) -> PowerLaw:
        return PowerLaw(**same, **by_name(numbers, values))

    watts = rows["watts"].to_numpy(dtype=float)
    _, found = solved(law, lambda each: _watts(each, rows, idle, limit), watts, numbers)
    median, p90 = error_quantiles(_watts(found, rows, idle, limit), watts)
    return replace(found, median_error=median, p90_error=p90)


def _judged(law: PowerLaw, rows: pd.DataFrame, idle: float, limit: float) -> PowerLaw:
    """The law with its errors on rows that it did not see."""
    watts = rows["watts"].to_numpy(dtype=float)
    predicted = _watts(law, rows, idle, limit)
    median, p90 = error_quantiles(predicted, watts)
    logs = np.log(watts / predicted)
    sigma = float(np.median(np.abs(logs - np.median(logs))) / HALF)
    return replace(
        law, held_out_points=len(rows), held_out_median_error=median, held_out_p90_error=p90, sigma_log=sigma
    )


def power_text(fit: PowerFit, *, data: str, date: str) -> str:
    """Write the YAML of a calibration as text."""

    lines = [
        f"# Fitted power of kernels of the {fit.table.system.title}: shares of the power limit of one GPU.",
        "# Written by 'disagg-sim calibrate power': robust least squares of the logarithm of the power (soft L1).",
        "# Errors are shares of the measured power; held_out_* and sigma_log are those of shapes that were held out.",
        f"system: {fit.table.system.name}",
        f"data: {plain_word(data)}",
        f"date: {plain_word(date)}  # of the data",
        f"limit: {number_text(fit.table.limit)} W  # under which the rows were measured",
        f"idle: {number_text(fit.idle)}  # of a GPU that waits: 1 % of the rows draw less",
        "",
        "files:",
        f"  - {file_line(fit.file)}",
        "",
        "# the form of disagg_sim/physics/power.py",
        "laws:",
        *(f"  - {fit_line(law)}" for law in fit.laws),
    ]
    return "\n".join(lines) + "\n"


def _parent(name: str) -> PowerSpec:
    spec = load_power(name)
    if spec is None:
        raise StoreError(f"no power file of {name!r}, whose laws should be inherited")
    return spec


#: Writes a power file.
write_power = Writer(lambda path, part: power_of(path, read_mapping(part), _parent))
