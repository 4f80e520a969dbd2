"""Match measured rows to the fit that predicts them; flag rows outside its range."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.facts.efficiency import Fit
from disagg_sim.facts.hardware import SystemSpec
from lab.calibration.kernels.registry import FittedOperator

#: Part of the range by which a size may pass its end and still count as inside: rounding. [1]
_ROUNDING = 1e-9


def units_of(operator: FittedOperator, fits: Sequence[Fit]) -> dict[Hashable, list[Fit]]:
    """Group the fits that predict together, in order of first appearance."""
    units: dict[Hashable, list[Fit]] = {}
    for fit in fits:
        units.setdefault(operator.unit(fit), []).append(fit)
    return units


def assign(
    operator: FittedOperator,
    rows: pd.DataFrame,
    system: SystemSpec,
    fits: Sequence[Fit],
    predicted: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Return the index of the fit group that predicts each row, -1 if none does.

    A row needs a group when it has a prediction with all fits and none without that group; of several such groups the
    one that fewest rows need counts. Takes ``predicted`` [s] of shape (rows,). Returns place in ``units_of(operator,
    fits)``; shape (rows,).
    """
    chosen = np.full(len(rows), -1)
    fewest = np.full(len(rows), len(rows) + 1)
    for number, (_, members) in enumerate(units_of(operator, fits).items()):
        mine = {id(fit) for fit in members}
        others = [fit for fit in fits if id(fit) not in mine]
        needs = np.isfinite(predicted) & ~np.isfinite(operator.predict(rows, system, others))
        better = needs & (needs.sum() < fewest)
        chosen[better], fewest[better] = number, needs.sum()
    return chosen


def inside(rows: pd.DataFrame, fits: Sequence[Fit]) -> NDArray[np.bool_]:
    """Tell of each row whether it lies in the range of one of ``fits``; sizes that are no column do not count."""
    result = np.zeros(len(rows), dtype=bool)
    for fit in fits:
        here = np.ones(len(rows), dtype=bool)
        for size, low, high in fit.valid:
            if size in rows.columns:
                value = rows[size].to_numpy(dtype=float)
                here &= (value >= low * (1.0 - _ROUNDING)) & (value <= high * (1.0 + _ROUNDING))
        result |= here
    return result
