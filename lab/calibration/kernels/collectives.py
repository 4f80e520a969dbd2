"""Fit collectives inside one domain: NCCL's ring in two protocols, the engines' all-reduce, calls outside graphs.

NCCL, each operation: ``latency + hop*(n-1)`` and the faster of its low-latency protocol (a plain bandwidth) and its
pipelined one (``ramp``): five numbers; one more for an all-reduce of 16 bit in a switch that can reduce. An engine: a
one-shot and, where it is worth them, a two-shot all-reduce, five numbers; beyond them it hands its message to NCCL.
Two more for calls outside a CUDA graph: the floor of the host, and a copy of the tensor into a registered buffer. The
number of ranks enters by these forms alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.facts.efficiency import COLLECTIVE_SIZES, EAGER, LARGE_MESSAGES, CollectiveFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.collectives import algorithm_of, fastest
from disagg_sim.units import US
from lab.calibration.kernels.robust import Array, Parameter, enough, origin, solved

#: Fields of a fit -> where their fit starts and ends.
_LATENCY = Parameter("latency", 6 * US, 0.5 * US, 100 * US)
_ONE_SHOT_LATENCY, _TWO_SHOT_LATENCY = replace(_LATENCY, start=4 * US), replace(_LATENCY, start=10 * US)
_HOP = Parameter("hop", 0.5 * US, 0.001 * US, 20 * US)
_SHARE = Parameter("e_bandwidth", 0.7, 0.02, 1.0)
_SLOW_SHARE = Parameter("e_bandwidth", 0.2, 0.005, 1.0)
_RAMP = Parameter("ramp", 5 * US, 0.01 * US, 1000 * US)
_FLOOR = Parameter("latency", 25 * US, US, 1000 * US)
#: Numbers of an engine's all-reduce, at most. [1]
MOST = 7
#: Type that no switch reduces.
_NOT_IN_SWITCH = "int8"
#: Type of the rows that are fitted where there are several: activations are reduced in 16 bit.
_FITTED_TYPES = ("half", "bfloat16")


def fit_collectives(rows: pd.DataFrame, system: SystemSpec) -> list[CollectiveFit]:
    """Fits of all libraries and operations among ``rows`` (a collectives table, ``latency`` in s), NCCL's first."""
    fits: list[CollectiveFit] = []
    order = sorted(rows["framework"].unique(), key=lambda name: (name != LARGE_MESSAGES, name))
    for framework in order:
        mine = rows[rows["framework"] == framework]
        for op in sorted(mine["op"].unique()):
            table = mine[mine["op"] == op]
            if framework == LARGE_MESSAGES or op != "all_reduce":
                fits += _fit_ring(table, system)
            else:
                fits += _fit_engine(table, system, [fit for fit in fits if fit.op == op])
    return fits


def predict_collectives(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[CollectiveFit]) -> Array:
    """Time of each row of a collectives table by the fits of its library and operation; NaN where there is none. [s]"""
    result = np.full(len(rows), np.nan)
    eager = _eager(rows)
    for engine, op in dict.fromkeys((fit.engine, fit.op) for fit in fits):
        mine = [fit for fit in fits if fit.engine == engine and fit.op == op]
        laws = [fit for fit in mine if fit.algorithm != EAGER]
        if not laws:
            continue
        here = ((rows["framework"] == engine) & (rows["op"] == op)).to_numpy()
        if engine != LARGE_MESSAGES:
            laws += [fit for fit in fits if fit.engine == LARGE_MESSAGES and fit.op == op]
        size, n = (rows.loc[here, column].to_numpy(dtype=float) for column in ("message_bytes", "num_gpus"))
        inside = _fastest(laws, system, size, n)
        if any(fit.algorithm == "in_switch" for fit in laws):
            unswitched = _fastest([fit for fit in laws if fit.algorithm != "in_switch"], system, size, n)
            inside = np.where(rows.loc[here, "dtype"] == _NOT_IN_SWITCH, unswitched, inside)
        outside = np.full(len(size), np.nan)
        for fit in mine:
            if fit.algorithm == EAGER:
                copied = inside + 2.0 * size / (fit.e_bandwidth * system.hbm_bandwidth)
                outside = np.maximum(fit.latency, copied)
        result[here] = np.where(eager[here], outside, inside)
    return result


def _fastest(laws: Sequence[CollectiveFit], system: SystemSpec, size: Array, n: Array) -> Array:
    link = system.nvlink_bandwidth
    return np.asarray(fastest([algorithm_of(fit, link).transfer(size, n) for fit in laws]).time)


def unit_of(fit: CollectiveFit) -> tuple[str, str, bool]:
    """Fits that predict together."""
    return fit.engine, fit.op, fit.algorithm == EAGER


def _eager(rows: pd.DataFrame) -> NDArray[np.bool_]:
    return np.asarray(rows["kernel_source"].str.endswith("eager"), dtype=bool)


def _fit_ring(table: pd.DataFrame, system: SystemSpec) -> list[CollectiveFit]:
    sixteen_bit = table[table["dtype"].isin(_FITTED_TYPES)]
    table = sixteen_bit if len(sixteen_bit) else table

    reduces = table["op"].iloc[0] == "all_reduce" and system.in_switch_reduction
    parameters = (_LATENCY, _HOP, _SLOW_SHARE, _SHARE, _RAMP, *((_SHARE,) if reduces else ()))

    def build(values: Array) -> list[CollectiveFit]:
        latency, hop, slow, fast, ramp, *switched = values.tolist()
        return [
            _fit(table, "ring", (latency, hop, fast, ramp), parameters=4),
            _fit(table, "ring_ll", (latency, hop, slow, 0.0), parameters=1),
            *(_fit(table, "in_switch", (latency, hop, share, ramp), parameters=1) for share in switched),
        ]

    return _solve(table, system, parameters, build)[1]


def _fit_engine(table: pd.DataFrame, system: SystemSpec, ring: Sequence[CollectiveFit]) -> list[CollectiveFit]:
    """Fit one-shot all-reduce, and two-shot where it improves the fit enough for its parameters."""
    eager = bool(_eager(table).any())
    large = [fit for fit in ring if fit.engine == LARGE_MESSAGES]
    tried = []
    for two_shot in (False, True):
        second = (_TWO_SHOT_LATENCY, _SHARE) if two_shot else ()
        parameters = (_ONE_SHOT_LATENCY, _HOP, _SHARE, *second, *((_FLOOR, _SHARE) if eager else ()))
        tried.append(_solve(table, system, parameters, partial(_engine, table, two_shot, eager), others=large))
    return enough(tried, MOST)


def _engine(table: pd.DataFrame, two_shot: bool, eager: bool, values: Array) -> list[CollectiveFit]:
    """Fits of an engine from its numbers, in the order of ``_fit_engine``."""
    latency, hop, share, *more = values.tolist()
    fits = [_fit(table, "one_shot", (latency, hop, share, 0.0), parameters=3)]
    if two_shot:
        fits.append(_fit(table, "two_shot", (more[0], hop, more[1], 0.0), parameters=2))
    if eager:
        fits.append(_fit(table, EAGER, (more[-2], 0.0, more[-1], 0.0), parameters=2))
    return fits


def _fit(
    table: pd.DataFrame, algorithm: str, values: tuple[float, float, float, float], *, parameters: int
) -> CollectiveFit:
    latency, hop, share, ramp = values
    return CollectiveFit(
        **origin(table, COLLECTIVE_SIZES),
        op=table["op"].iloc[0],
        gpus=0,
        latency=latency,
        e_bandwidth=share,
        algorithm=algorithm,
        hop=hop,
        ramp=ramp,
        parameters=parameters,
    )


def _solve(
    table: pd.DataFrame,
    system: SystemSpec,
    parameters: Sequence[Parameter],
    build: Callable[[Array], list[CollectiveFit]],
    others: Sequence[CollectiveFit] = (),
) -> tuple[float, list[CollectiveFit]]:
    """Loss and fits of a table, whose times ``others`` help to predict."""
    measured = table["latency"].to_numpy(dtype=float)
    return solved(build, lambda fits: predict_collectives(table, system, [*fits, *others]), measured, parameters)
