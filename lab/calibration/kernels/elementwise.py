"""Fit kernels that read and write activations: ``t0 + bytes/(e_memory*HBM)``, one share of HBM per library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.facts.efficiency import ElementwiseFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.work import ACTIVATION_BYTES
from disagg_sim.units import US
from lab.calibration.kernels.robust import Array, Parameter, by_fit, joint_fits, origin

_FLOOR, _SHARE = Parameter("t0", 2 * US, 0.1 * US, 100 * US), Parameter("e_memory", 0.7, 0.01, 1.0)
#: Bytes that an operation writes for each element that it reads; "launch_*" are empty kernels of one element. [B]
_WRITTEN = {"scale_matrix": 1.0, "compute_scale": 0.0, "copy": 2.0, "launch_graph": 2.0, "launch_eager": 2.0}


def fit_elementwise(rows: pd.DataFrame, system: SystemSpec) -> list[ElementwiseFit]:
    """One fit an operation of the rows of one library of a quantize_ops table, ``latency`` in s."""
    tables = {op: rows[rows["op"] == op] for op in sorted(rows["op"].unique()) if op in _WRITTEN}
    if not tables:
        return []

    def fit(op: str, numbers: dict[str, Any]) -> ElementwiseFit:
        return ElementwiseFit(**origin(tables[op], ("m", "k")), op=op, **numbers)

    own = dict.fromkeys(tables, ("t0",))
    return joint_fits(tables, (_FLOOR, _SHARE), own, fit, lambda op, fit: _times(tables[op], fit, system))[1]


def predict_elementwise(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[ElementwiseFit]) -> Array:
    """Time of each row of a quantize_ops table by the fit of its library and operation, NaN where none is. [s]"""
    words = {"engine": rows["framework"], "op": rows["op"]}
    return by_fit(rows, fits, words, lambda table, fit: _times(table, fit, system))


def _times(table: pd.DataFrame, fit: ElementwiseFit, system: SystemSpec) -> Array:
    elements = table["m"].to_numpy(dtype=float) * table["k"].to_numpy(dtype=float)
    moved = elements * (ACTIVATION_BYTES + _WRITTEN[fit.op])
    return np.asarray(fit.t0 + moved / (fit.e_memory * system.hbm_bandwidth))
