"""Fit kernels that read and write activations: ``t0 + bytes/(e_memory*HBM)``, one share of HBM per library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from disagg_sim.facts.efficiency import ElementwiseFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.work import ACTIVATION_BYTES
from disagg_sim.units import US
from lab.calibration.kernels.robust import Array, Parameter, by_fit, fit_logarithm, origin

_FLOOR, _SHARE = Parameter("t0", 2 * US, 0.1 * US, 100 * US), Parameter("e_memory", 0.7, 0.01, 1.0)
#: Bytes that an operation writes for each element that it reads; "launch_*" are empty kernels of one element. [B]
_WRITTEN = {"scale_matrix": 1.0, "compute_scale": 0.0, "copy": 2.0, "launch_graph": 2.0, "launch_eager": 2.0}


def fit_elementwise(rows: pd.DataFrame, system: SystemSpec) -> list[ElementwiseFit]:
    """One fit an operation of the rows of one library of a quantize_ops table, ``latency`` in s."""
    tables = {op: rows[rows["op"] == op] for op in sorted(rows["op"].unique()) if op in _WRITTEN}
    if not tables:
        return []

    def times(values: Array) -> Array:
        pairs = zip(tables.items(), values[1:].tolist(), strict=True)
        return np.concatenate([_times(table, system, op, t0, float(values[0])) for (op, table), t0 in pairs])

    measured = np.concatenate([table["latency"].to_numpy(dtype=float) for table in tables.values()])
    share, *floors = fit_logarithm(times, measured, [_SHARE] + [_FLOOR] * len(tables)).tolist()
    return [
        ElementwiseFit(**origin(table, ("m", "k")), parameters=1 if number else 2, op=op, t0=t0, e_memory=share)
        for number, ((op, table), t0) in enumerate(zip(tables.items(), floors, strict=True))
    ]


def predict_elementwise(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[ElementwiseFit]) -> Array:
    """Time of each row of a quantize_ops table by the fit of its library and operation, NaN where none is. [s]"""
    return by_fit(
        rows,
        fits,
        lambda fit: (rows["framework"] == fit.engine) & (rows["op"] == fit.op),
        lambda table, fit: _times(table, system, fit.op, fit.t0, fit.e_memory),
    )


def _times(table: pd.DataFrame, system: SystemSpec, op: str, t0: float, share: float) -> Array:
    elements = table["m"].to_numpy(dtype=float) * table["k"].to_numpy(dtype=float)
    return np.asarray(t0 + elements * (ACTIVATION_BYTES + _WRITTEN[op]) / (share * system.hbm_bandwidth))
