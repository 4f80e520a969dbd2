"""Errors of served runs of which an engine's profile saw nothing: fits without a whole model, system or engine.

Held-out configurations are of models, systems and engines that the fit knows, those of a user are not always. So each
model and each system is left out of its engine's fit in turn, and all of its points are judged with what the others
tell. For an engine that nobody ran the fitted numbers are those of the other engines, each the geometric mean; so is
the stretch of the exchange where no row that is left tells it. The control is a fit of the same steps to all rows. Both
start at the shipped numbers, which saw what is left out: from the defaults of ``FITTED`` a fit costs four times that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.load import load_engine
from lab.calibration.served.engine_fit import FITTED, exchange_rows, fit_engine, fit_rows
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.groups import SERVED_FORMS, errors_of
from lab.calibration.served.rows import ServingRow

#: Engines of today with fits of their own.
ENGINES = ("sglang", "trtllm", "vllm")
#: Fewest points of a line. [1]
LEAST = 10
QUANTITIES = ("tpot", "ttft", "throughput")


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


def left_out(rows: Sequence[ServingRow], by: str) -> Iterator[Unseen]:
    """Judge each ``model`` or ``system``, or each ``engine``, by profiles that were fitted without it."""
    for engine in ENGINES:
        mine = [row for row in rows if row.engine == engine and row.form in SERVED_FORMS]
        seen = {getattr(row, by) for row in fit_rows(mine, engine)}
        if not seen:
            continue
        whole = fit_engine(rows, engine, again=True).engine
        for value in sorted(seen):
            judged = [row for row in mine if getattr(row, by) == value]
            rest = [row for row in rows if getattr(row, by) != value]
            if by == "engine":
                fitted = without_fit(engine)
            elif fit_rows(rest, engine):
                fitted = fit_engine(rest, engine, again=True).engine
                if not exchange_rows(rest, engine):
                    fitted = replace(fitted, exchange_stretch=without_fit(engine).exchange_stretch)
            else:
                continue
            yield from _lines(engine, str(value), judged, (load_engine(engine), whole, fitted))


def without_fit(engine: str) -> EngineSpec:
    """The profile of an engine with the fitted numbers of the others: the geometric mean of each."""
    others = [load_engine(name) for name in ENGINES if name != engine]
    names = (*FITTED, "exchange_stretch")
    means = {name: math.prod(getattr(each, name) for each in others) ** (1.0 / len(others)) for name in names}
    return replace(load_engine(engine), **means)


def _lines(engine: str, value: str, rows: Sequence[ServingRow], profiles: Sequence[EngineSpec]) -> Iterator[Unseen]:
    """The lines of a value; profiles are the shipped one, the one fitted to all rows, the one without the value."""
    tables = [_below(evaluate(rows, {engine: each})) for each in profiles]
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
