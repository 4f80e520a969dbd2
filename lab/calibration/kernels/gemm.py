"""Fit dense matrix multiplies: the equation of ``physics.gemm`` to rows of one library and version.

Every format has a few parameters of its own (``_OWN``; those for quantising A only if the format quantises). All
formats of a library share the parameters of the loop along K, of overlap and of repeated reads, because these depend
on the build of the library. A library with many formats also shares either the share of the HBM bandwidth or the time
of a split, whichever raises the error less, so that it has at most ``MOST`` parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.facts.efficiency import GEMM_SIZES, GemmFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.precision import FORMATS
from disagg_sim.physics.gemm import gemm_cost
from disagg_sim.physics.rates import gemm_rate
from disagg_sim.physics.work import gemm_work
from disagg_sim.units import US
from lab.calibration.kernels.robust import Parameter, by_fit, enough, joint_fits, origin

#: Type words of the tables -> weight formats.
FORMAT_OF = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int8_sq": "int8"}
_NUMBERS = (
    Parameter("e_compute", 0.7, 0.02, 1.0),
    Parameter("e_memory", 0.8, 0.1, 1.0),
    Parameter("t0", 4 * US, 0.5 * US, 100 * US),
    Parameter("e_quantise", 0.5, 0.02, 2.0),
    Parameter("k_split", 3 * US, 0.02 * US, 50 * US),
    Parameter("k_step", 5e-4 * US, 2e-5 * US, 1e-2 * US),
    Parameter("blend_q", 2.0, 1.0, 10.0),
    Parameter("reuse", 500.0, 100.0, 1e5),
    Parameter("least_row", 2000.0, 256.0, 8192.0),
)
#: Which of them each format may have to itself.
_OWN = (
    ("e_compute", "t0", "e_quantise", "e_memory"),
    ("e_compute", "t0", "e_quantise", "k_split"),
    ("e_compute", "t0", "e_quantise", "e_memory", "k_split"),
)
#: Numbers of all formats of a library together, at most. [1]
MOST = 20
#: The format whose write of C may follow the loop, the share of the HBM bandwidth at which it does (fitted: 0.98 on
#: B200, 0.94 on GB200), and by how much it has to lower the loss. [1]
_WRITTEN, WRITE_SHARE, _WORTH = "nvfp4", 0.96, 0.02
#: Numbers that a library without quantised rows lacks.
_QUANTISING = ("e_quantise", "least_row")


def fit_gemm(rows: pd.DataFrame, system: SystemSpec) -> list[GemmFit]:
    """One fit a format of the rows of one library, together; shared numbers count as parameters of the first."""
    formats = rows["dtype"].map(FORMAT_OF)
    tables = {name: rows[formats == name] for name in sorted(formats.dropna().unique())}
    tables = {name: table for name, table in tables.items() if FORMATS[name].arithmetic in system.peak_flops}
    if not tables:
        return []
    loss, plain = _best_form(tables, system, write=False)
    if _WRITTEN not in tables:
        return plain
    less, apart = _best_form(tables, system, write=True)
    return apart if (1.0 + _WORTH) * less < loss else plain


def _best_form(tables: dict[str, pd.DataFrame], system: SystemSpec, *, write: bool) -> tuple[float, list[GemmFit]]:
    """Loss and fits of the best form of at most ``MOST`` numbers."""
    tried = [_fit_jointly(tables, system, own, write=write) for own in _OWN]
    best = enough(tried, MOST, worth=0.0)
    return next((loss, fits) for loss, fits in tried if fits == best)


def _fit_jointly(
    tables: dict[str, pd.DataFrame], system: SystemSpec, names: Sequence[str], *, write: bool
) -> tuple[float, list[GemmFit]]:
    """Loss and fits where each format has the numbers ``names`` to itself."""
    quantised = any(name != "bf16" for name in tables)
    numbers = [p for p in _NUMBERS if quantised or p.name not in _QUANTISING]
    plain = [name for name in names if name not in _QUANTISING]
    own = {name: plain if name == "bf16" else names for name in tables}

    def fit(name: str, values: dict[str, Any]) -> GemmFit:
        share = WRITE_SHARE if write and name == _WRITTEN else None
        return GemmFit(**origin(tables[name], GEMM_SIZES), format=name, tiled=True, e_write=share, **values)

    return joint_fits(tables, numbers, own, fit, lambda name, fit: _times(tables[name], fit, system))


def predict_gemm(rows: pd.DataFrame, system: SystemSpec, fits: list[GemmFit]) -> NDArray[np.float64]:
    """Time of each row of a gemm table by the fit of its framework and format; NaN where there is none. [s]"""
    words = {"engine": rows["framework"], "format": rows["dtype"].map(FORMAT_OF)}
    return by_fit(rows, fits, words, lambda table, fit: _times(table, fit, system))


def _times(table: pd.DataFrame, fit: GemmFit, system: SystemSpec) -> NDArray[np.float64]:
    m, n, k = (table[size].to_numpy(dtype=float) for size in GEMM_SIZES)
    work = gemm_work(m, n, k, weight_bytes=FORMATS[fit.format].bytes)
    return np.asarray(gemm_cost(m, n, k, work, gemm_rate(fit, system)).time)
