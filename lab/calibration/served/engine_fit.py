"""Fit the few overheads of an engine profile to served runs: the only numbers fitted end to end.

Kernels are fitted to kernel tables; this fit adds the time of the host per step and per request. It uses the fitted
part of the rows below saturation, one row per operating point, and minimises a robust loss of the logarithm of
predicted over measured TPOT (or latency of a static batch), and of TTFT if an instance has few requests. Afterwards
the time of a request before its prefill is set to the least median error of these TTFT over all operating points: it
enters no other quantity, and the median is robust against runs that include a warm-up. The stretch of the expert
exchange is set to the least mean error of TPOT over one row of each operating point whose decode exchanges experts
between ranks of attention DP, disaggregated runs included.

Some of the numbers alone are fitted to TPOT and TTFT of all closed loops, whatever their load, the others held.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.extras import extra
from disagg_sim.facts.engine import EngineSpec, engine_of
from disagg_sim.facts.load import load_efficiency, load_engine, load_system
from disagg_sim.facts.yaml_files import find_file, read_mapping
from disagg_sim.units import MS, US
from lab.calibration.files import Writer
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.groups import TTFT_CONCURRENCY, points
from lab.calibration.served.rows import ServingRow

with extra("calibrate"):
    from scipy.optimize import least_squares, minimize_scalar

#: Fitted parameters -> (least, start, largest) [s], the stretch of prefill [1].
FITTED = {
    "step_host": (0.0, 0.5 * MS, 20 * MS),
    "sequence_host": (0.0, 2 * US, 1000 * US),
    "rank_host": (0.0, 0.2 * MS, 10 * MS),
    "prefill_stretch": (1.0, 1.2, 3.0),
    "kernel_launch": (0.0, 15 * US, 60 * US),
    "request_host": (0.0, 20 * MS, 300 * MS),
}
#: Second start without CUDA graphs, where two readings of a slow step compete: launches, or work between steps. [s]
BETWEEN_STEPS = {"step_host": 5 * MS, "sequence_host": 200 * US, "rank_host": 2 * MS, "kernel_launch": 1.5 * US}
#: Range of the stretch of the expert exchange. [1]
STRETCHES = (1.0, 5.0)
#: Error beyond which a residual stops to count (Cauchy loss): TTFT of some runs holds a warm-up. [1]
SOFT = 0.1
#: Times that a loss is computed at most, not counting its derivatives; where a fit of nearly the same rows starts. [1]
STEPS, STEPS_AGAIN = 8, 4


#: Fitted parameter -> its unit in the file, and the digits after the point.
UNITS = {
    "step_host": ("ms", MS, 3),
    "sequence_host": ("us", US, 1),
    "rank_host": ("ms", MS, 4),
    "prefill_stretch": ("", 1.0, 3),
    "kernel_launch": ("us", US, 2),
    "request_host": ("ms", MS, 0),
    "exchange_stretch": ("", 1.0, 2),
}


#: The lines of rows (``evaluate``) under a profile.
Forecast = Callable[[Sequence[ServingRow], EngineSpec], pd.DataFrame]


def forecast(rows: Sequence[ServingRow], engine: EngineSpec) -> pd.DataFrame:
    """The lines of rows under a profile."""
    return evaluate(rows, {engine.name: engine})


@dataclass(frozen=True, slots=True)
class EngineFit:
    """A fitted profile and the data behind it."""

    engine: EngineSpec
    fitted: tuple[str, ...]  # parameters that the rows tell; the others are those of the shipped profile
    lines: int  # measured numbers that the fit saw [1]
    median_error: float  # of these [1]
    files: tuple[tuple[str, int], ...]  # name and digest of each file, and its rows that informed the fit


def _usable(rows: Sequence[ServingRow], engine: str, *loads: str) -> list[ServingRow]:
    """Rows of an engine under some loads that may inform its profile: of the fitted part, without flag."""
    return [
        row
        for row in rows
        if row.engine == engine and row.load in loads and not (row.reason or row.qa_flag or row.held_out)
    ]


def _checked(rows: Sequence[ServingRow], engine: str) -> None:
    """Refuse rows of systems whose kernels nobody timed on any GPU of their vendor: their error is no host time."""

    def vendor(name: str) -> str:
        fits = load_efficiency(name)
        return load_system(fits.measured_on).vendor if fits else ""

    systems = {row.system for row in _usable(rows, engine, "closed_loop", "static")}
    if strangers := sorted(name for name in systems if vendor(name) != load_system(name).vendor):
        told = ", ".join(strangers)
        raise InputError(f"kernels of {told} were never timed, so their rows inform no engine profile: leave them out")


def exchange_rows(rows: Sequence[ServingRow], engine: str) -> list[ServingRow]:
    """Rows that tell how long decode exchanges experts: one of each fitted point with attention DP and EP."""
    kept: dict[str, ServingRow] = {}
    for row in _usable(rows, engine, "closed_loop"):
        mapping = row.workers.mapping if row.workers else Sharding()
        if not row.speculative and mapping.dp_attn > 1 and mapping.ep > 1:
            kept[row.point] = row
    return list(kept.values())


def fit_rows(rows: Sequence[ServingRow], engine: str, *, loops: bool = False) -> list[ServingRow]:
    """Rows that may inform the times of a profile: one of each operating point, without speculation.

    Those of one instance; with ``loops`` closed loops alone, of split workers, too.
    """
    plain = (row for row in _usable(rows, engine, "closed_loop", "static") if not row.speculative)
    if loops:
        return list({row.point: row for row in plain if row.load == "closed_loop"}.values())
    kept = {(row.configuration, row.concurrency, row.batch): row for row in plain if row.mode == "aggregated"}
    return list(kept.values())


def fit_engine(
    rows: Sequence[ServingRow], name: str, *, again: bool = False, only: Sequence[str] = (), told: Forecast = forecast
) -> EngineFit:
    """Fit the host times of an engine to served rows; everything else of its shipped profile stays.

    Takes ``name`` (engine (``hw_specs/engines/``)), ``again`` (start at the shipped numbers, take the last loss alone
    and few steps: for fits of nearly the same rows), ``only`` (these of ``FITTED`` alone, from there with that loss, to
    TTFT of all loads) and ``told`` (what forecasts rows). Returns the profile (times in s), which of its numbers were
    fitted, the data behind them and their median error [1].
    """
    _checked(rows, name)
    steps, again = STEPS_AGAIN if again else STEPS, again or bool(only)
    start, used = load_engine(name), fit_rows(rows, name, loops=bool(only))
    if not used:
        raise InputError(f"no served rows of engine {name!r} in the fitted part")
    loops = any(row.load == "closed_loop" for row in used)  # a static batch has no requests over HTTP
    names = [key for key in only or FITTED if loops or key != "request_host"]
    least, scale, most = (np.array(column) for column in zip(*(FITTED[key] for key in names), strict=True))

    def spec(x: Floats) -> EngineSpec:
        return replace(start, **dict(zip(names, (x * scale).tolist(), strict=True)))

    def errors_of(engine: EngineSpec) -> Floats:
        table = told(used, engine)
        few = (table["quantity"] == "ttft") & (bool(only) | ~(table["concurrency"] > TTFT_CONCURRENCY))
        kept = table["evaluated"] & ~table["saturated"] & (table["quantity"].isin(["tpot", "latency"]) | few)
        error: Floats = np.log(np.where(kept, table["predicted"] / table["measured"], 1.0))
        return error

    def errors(x: Floats) -> Floats:
        return errors_of(spec(x))

    losses = ("cauchy",) if again else ("soft_l1", "cauchy")

    def fit_from(x: Floats) -> tuple[float, Floats]:
        """Loss at the end and parameters: the second loss has several minima, the first leads to a good one."""
        for loss in losses:
            found = least_squares(
                errors, x, bounds=(least / scale, most / scale), loss=loss, f_scale=SOFT, diff_step=0.05, max_nfev=steps
            )
            x = found.x
        return float(found.cost), x

    starts = [np.ones(len(names))]
    if again:
        inside = np.clip([getattr(start, key) for key in names], least + 1e-3 * (most - least), 0.999 * most)
        starts = [inside / scale]
    elif not start.decode_graphs:
        starts.append(np.array([BETWEEN_STEPS.get(key, FITTED[key][1]) for key in names]) / scale)
    _, x = min((fit_from(each) for each in starts), key=lambda end: end[0])
    engine = spec(x)
    if not only:
        engine = fit_exchange(rows, _with_request_host(rows, engine, told) if loops else engine, told)
    last = errors_of(engine)
    seen = last != 0.0
    files = sorted(Counter(f"{row.file} {row.digest}".rstrip() for row in used).items())
    error = float(np.median(np.abs(np.expm1(last[seen]))))
    if exchange_rows(rows, name) and not only:
        names.append("exchange_stretch")
    return EngineFit(engine, tuple(names), int(seen.sum()), error, tuple(files))


def _with_request_host(rows: Sequence[ServingRow], engine: EngineSpec, told: Forecast) -> EngineSpec:
    """The profile with the request time of least median TTFT error where an instance has few requests."""
    loops = _usable(rows, engine.name, "closed_loop")
    mine = [row for row in loops if row.workers and row.concurrency / row.workers.count <= TTFT_CONCURRENCY]
    table = told(mine, engine)
    table = points(table[table["evaluated"] & ~table["saturated"] & (table["quantity"] == "ttft")])
    if table.empty:
        return engine
    predicted, measured = table["predicted"].to_numpy(), table["measured"].to_numpy()
    tried = np.arange(0.0, FITTED["request_host"][2], MS)
    error = [np.median(np.abs((predicted - engine.request_host + each) / measured - 1)) for each in tried]
    return replace(engine, request_host=float(tried[int(np.argmin(error))]))


def fit_exchange(rows: Sequence[ServingRow], engine: EngineSpec, told: Forecast = forecast) -> EngineSpec:
    """The profile with the stretch of the expert exchange of least robust error of TPOT; as it is without rows."""
    mine = exchange_rows(rows, engine.name)
    if not mine:
        return engine

    def loss(stretch: float) -> float:
        table = told(mine, replace(engine, exchange_stretch=stretch))
        table = table[table["evaluated"] & ~table["saturated"] & (table["quantity"] == "tpot")]
        error = np.log(table["predicted"] / table["measured"]) / SOFT
        return float(np.mean(np.log1p(error**2)))

    found = minimize_scalar(loss, bounds=STRETCHES, method="bounded", options={"xatol": 0.01})
    return replace(engine, exchange_stretch=float(found.x))


def engine_text(fit: EngineFit, *, date: str) -> str:
    """Write the file of the profile that the fit started from, with the fitted numbers and their provenance.

    >>> engine = replace(load_engine("vllm"), step_host=0.004)
    >>> fit = EngineFit(engine, ("step_host",), lines=90, median_error=0.05, files=(("mine.csv", 45),))
    >>> print(next(line for line in engine_text(fit, date="2026-01").splitlines() if line.startswith("step_host")))
    step_host: 4 ms
    """
    files = ", ".join(f"{name} ({rows} rows)" for name, rows in fit.files)
    error = f"{fit.lines} numbers, median error {fit.median_error:.1%}"
    source = f"fitted end to end on {files}, fitted part alone: {error}; data of {date}".replace('"', "'")
    text = find_file("engine", fit.engine.name).read_text(encoding="utf-8")
    for key in fit.fitted:
        unit, scale, digits = UNITS[key]
        number = f"{round(getattr(fit.engine, key) / scale, digits):g} {unit}".rstrip()
        text = re.sub(rf"^{key}: .*$", f"{key}: {number}", text, flags=re.MULTILINE)
        text = re.sub(rf"^  {key}: .*$", f'  {key}: "{source}"', text, flags=re.MULTILINE)
    return text


#: Writes an engine profile.
write_engine = Writer(lambda path, part: engine_of(path, read_mapping(part), path.stem))
