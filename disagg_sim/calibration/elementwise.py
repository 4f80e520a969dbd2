"""Fits of kernels that read and write activations: ``t0 + bytes/(e_memory*HBM)``, two numbers an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disagg_sim.calibration.robust import Parameter, fit_logarithm
from disagg_sim.facts.efficiency import ElementwiseFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.work import ACTIVATION_BYTES
from disagg_sim.units import US

if TYPE_CHECKING:
    import pandas as pd

_PARAMETERS = (Parameter("t0", 2 * US, 0.1 * US, 100 * US), Parameter("e_memory", 0.7, 0.01, 1.0))
#: Bytes that an operation writes for each element that it reads; "launch_*" are empty kernels of one element. [B]
_WRITTEN = {"scale_matrix": 1.0, "compute_scale": 0.0, "copy": 2.0, "launch_graph": 2.0, "launch_eager": 2.0}


def fit_elementwise(rows: pd.DataFrame, system: SystemSpec) -> list[ElementwiseFit]:
    """One fit an operation of the rows of one library of a quantize_ops table, ``latency`` in s."""
    return [_fit(rows[rows["op"] == op], system) for op in sorted(rows["op"].unique())]


def predict_elementwise(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[ElementwiseFit]) -> NDArray[np.float64]:
    """Time of each row of a quantize_ops table by the fit of its library and operation, NaN where none is. [s]"""
    result = np.full(len(rows), np.nan)
    for fit in fits:
        mine = ((rows["framework"] == fit.engine) & (rows["op"] == fit.op)).to_numpy()
        result[mine] = _times(rows[mine], system, fit.op, fit.t0, fit.e_memory)
    return result


def _fit(table: pd.DataFrame, system: SystemSpec) -> ElementwiseFit:
    first = table.iloc[0]

    def times(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return _times(table, system, first["op"], float(values[0]), float(values[1]))

    t0, share = fit_logarithm(times, table["latency"].to_numpy(dtype=float), _PARAMETERS).tolist()
    return ElementwiseFit(
        engine=first["framework"], version=first["version"], points=len(table), median_error=0.0, p90_error=0.0,
        parameters=len(_PARAMETERS), op=first["op"], t0=t0, e_memory=share,
        valid=tuple((size, float(table[size].min()), float(table[size].max())) for size in ("m", "k")),
    )  # fmt: skip


def _times(table: pd.DataFrame, system: SystemSpec, op: str, t0: float, share: float) -> NDArray[np.float64]:
    elements = table["m"].to_numpy(dtype=float) * table["k"].to_numpy(dtype=float)
    return np.asarray(t0 + elements * (ACTIVATION_BYTES + _WRITTEN[op]) / (share * system.hbm_bandwidth))
