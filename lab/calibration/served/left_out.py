"""Errors of served runs of which an engine's profile saw nothing: fits without a whole model, system or engine.

Held-out configurations are of models, systems and engines that the fit knows, those of a user are not always. So each
model and each system is left out of its engine's fit in turn, and all of its points are judged with what the others
tell. For an engine that nobody ran the fitted numbers are those of the other engines, each the geometric mean; so is
the stretch of the exchange where no row that is left tells it. The control is a fit of the same steps to all rows. Both
start at the shipped numbers, and take times as linear in each number (``Nearby``): a fit then costs next to nothing.
What is told of a fitted profile is forecast in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.load import load_engine
from disagg_sim.units import MS, US
from lab.calibration.served.engine_fit import FITTED, exchange_rows, fit_engine, fit_rows, forecast
from lab.calibration.served.groups import SERVED_FORMS, errors_of
from lab.calibration.served.rows import ServingRow

#: Engines of today with fits of their own.
ENGINES = ("sglang", "trtllm", "vllm")
#: Fewest points of a line. [1]
LEAST = 10
#: Name of all engines.
ALL = "all"
QUANTITIES = ("tpot", "ttft", "throughput")
#: By how much each number is moved for its slope [s], [1], and the least time that is told [s].
MOVES = {
    **{"step_host": 0.2 * MS, "sequence_host": 5 * US, "rank_host": 0.1 * MS, "prefill_stretch": 0.1},
    **{"kernel_launch": 1.5 * US, "request_host": 20 * MS, "exchange_stretch": 0.3},
}
SHORTEST = 1 * US


class Unseen(NamedTuple):
    """What was left out, and the errors of its points as shipped, fitted anew with it, and without it."""

    engine: str
    value: str  # the model or system; the engine itself where that is what was left out
    quantity: str
    points: int  # [1]
    shipped: float  # median error [1]
    refitted: float  # with nothing left out [1]
    median_error: float  # [1]
    p90_error: float  # [1]
    bias: float  # [1]


class Nearby:
    """The lines of rows under profiles near one: every time is linear in every fitted number."""

    def __init__(self, rows: Sequence[ServingRow], engine: EngineSpec) -> None:
        """Takes the profile ``engine`` that the others are near to: one forecast more for each number."""
        self.engine, self.table = engine, forecast(rows, engine)
        self.rates = (self.table["quantity"] == "throughput").to_numpy()
        self.times = self._times(self.table)
        moved = {name: replace(engine, **{name: getattr(engine, name) + step}) for name, step in MOVES.items()}
        times = {name: self._times(forecast(rows, other)) for name, other in moved.items()}
        self.slopes = {name: (times[name] - self.times) / step for name, step in MOVES.items()}
        self.places = self.table.groupby(["file", "row"], sort=False).indices

    def _times(self, table: pd.DataFrame) -> Floats:
        told = table["predicted"].to_numpy()
        return np.where(self.rates, 1.0 / told, told)

    def lines_of(self, rows: Sequence[ServingRow]) -> Ints:
        """Where the lines of some of the rows stand, in order."""
        return np.concatenate([self.places[row.file, row.row] for row in rows])

    def __call__(self, rows: Sequence[ServingRow], engine: EngineSpec) -> pd.DataFrame:
        """The lines of some of the rows, in order, under a profile."""
        at, times = self.lines_of(rows), self.times
        for name, slope in self.slopes.items():
            times = times + (getattr(engine, name) - getattr(self.engine, name)) * slope
        times = np.maximum(times[at], SHORTEST)
        lines = self.table.iloc[at]
        predicted = np.where(self.rates[at], 1.0 / times, times)
        error = np.where(lines["evaluated"], predicted / lines["measured"] - 1.0, np.nan)
        return lines.assign(predicted=predicted, relative_error=error).reset_index(drop=True)


def left_out(rows: Sequence[ServingRow], by: str) -> Iterator[Unseen]:
    """Judge each ``model``, ``system`` or ``engine`` by profiles that were fitted without it; families of models come
    last, over all engines, each point by the fit without its own.
    """
    pooled: list[list[pd.DataFrame]] = []
    for engine in ENGINES:
        mine = [row for row in rows if row.engine == engine and row.form in SERVED_FORMS]
        seen = {getattr(row, by) for row in fit_rows(mine, engine)}
        if not seen:
            continue
        near = Nearby(mine, load_engine(engine))
        whole = forecast(mine, fit_engine(mine, engine, again=True, told=near).engine)
        for value in sorted(seen):
            judged = [row for row in mine if getattr(row, by) == value]
            rest = [row for row in mine if getattr(row, by) != value]
            if by == "engine":
                fitted = without_fit(engine)
            elif fit_rows(rest, engine):
                fitted = fit_engine(rest, engine, again=True, told=near).engine
                if not exchange_rows(rest, engine):
                    fitted = replace(fitted, exchange_stretch=without_fit(engine).exchange_stretch)
            else:
                continue
            tables = (near(judged, near.engine), whole.iloc[near.lines_of(judged)], forecast(judged, fitted))
            pooled.append([_below(each) for each in tables])
            yield from _lines(engine, str(value), pooled[-1])
    every = [pd.concat(each) for each in zip(*pooled, strict=True)]
    for family in sorted({*every[0]["family"]}) if len(pooled) > 1 else ():
        yield from _lines(ALL, family, [each[each["family"] == family] for each in every])


def without_fit(engine: str) -> EngineSpec:
    """The profile of an engine with the fitted numbers of the others: the geometric mean of each."""
    others = [load_engine(name) for name in ENGINES if name != engine]
    names = (*FITTED, "exchange_stretch")
    means = {name: math.prod(getattr(each, name) for each in others) ** (1.0 / len(others)) for name in names}
    return replace(load_engine(engine), **means)


def _lines(engine: str, value: str, tables: Sequence[pd.DataFrame]) -> Iterator[Unseen]:
    """The lines of a value, as shipped, by the profile fitted to all rows, and by the one without the value."""
    for quantity in QUANTITIES:
        mine = [table[table["quantity"] == quantity] for table in tables]
        if mine[-1]["point"].nunique() >= LEAST:
            shipped, refitted, errors = (errors_of(each) for each in mine)
            numbers = (errors["median_error"], errors["p90_error"], errors["bias"])
            told = (shipped["median_error"], refitted["median_error"])
            yield Unseen(engine, value, quantity, errors["points"], *told, *numbers)


def _below(table: pd.DataFrame) -> pd.DataFrame:
    """Evaluated lines of closed loops below saturation."""
    return table[table["evaluated"] & ~table["saturated"] & (table["load"] == "closed_loop")]
