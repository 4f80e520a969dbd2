"""Write the tables on uncertainty and extrapolation next to ``frontier.csv``.

``outside_calibration.csv`` is written for every sweep with fitted efficiencies, ``uncertainty.csv`` and ``gain.csv``
where error bars were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.atomic import remove, write_csv
from disagg_sim.certainty.error_bars import QUANTILES, near_frontier, uncertainty
from disagg_sim.domain import ServingMode
from disagg_sim.facts.load import load_profile
from disagg_sim.serving.points import INTERACTIVITY
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.cases import assumed_columns, origin_of
from disagg_sim.sweep.results import CaseResult, SweepResult
from disagg_sim.sweep.store import Store

#: Interactivities at which the gain of disaggregation is told. [token/s]
GAIN_AT = (10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 150.0, 200.0)
#: Those at which a summary compares modes. [token/s]
SPEEDS = (20.0, 50.0, 100.0)
#: Draws of an error bar. [1]
SAMPLES = 1000
_NOTHING = pd.DataFrame()


@dataclass(frozen=True, kw_only=True, eq=False)
class CaseFidelity:
    """One case; tables are empty where nothing was asked for or there is nothing to tell."""

    case: str
    outside: pd.DataFrame  # mode, interactivity [token/s], throughput, words of every frontier point
    bands: pd.DataFrame  # every frontier point with its quantiles, and those of the frontier itself
    gain: pd.DataFrame  # of disaggregation, at ``GAIN_AT``


@dataclass(frozen=True, kw_only=True, eq=False)
class _CaseEvidence:
    """A case with frontiers, and what their points rest on."""

    item: CaseResult
    words: pd.Series
    store: Store
    error_bars: bool
    seed: int


def fidelity_of(
    result: SweepResult, root: Path, *, error_bars: bool, seed: int = 0, jobs: int | Workers = 1
) -> tuple[CaseFidelity, ...]:
    """Tell what the frontiers of every case rest on and, where asked for, their error bars.

    The result is in order of the cases; tables are empty where a case has no frontier, or no fitted profile.
    """
    fitted = [case for case in result.cases if case.found and load_profile(case.plan.case.profile).fitted]
    told = [
        _CaseEvidence(
            item=case,
            words=pd.concat([mode.outside for mode in case.found], ignore_index=True),
            store=Store(root.absolute()),
            error_bars=error_bars,
            seed=seed,
        )
        for case in fitted
    ]
    found = {each.case: each for each in run_tasks(_of_case, told, jobs=jobs if error_bars else 1)}
    names = (case.plan.case.name for case in result.cases)
    return tuple(
        found[name] if name in found else CaseFidelity(case=name, outside=_NOTHING, bands=_NOTHING, gain=_NOTHING)
        for name in names
    )


def write_fidelity(found: Sequence[CaseFidelity], root: Path) -> None:
    """Write ``outside_calibration.csv``, and ``uncertainty.csv`` and ``gain.csv`` where there are error bars."""

    for name, tables in (
        ("outside_calibration", [each.outside.assign(case=each.case) for each in found]),
        ("uncertainty", [each.bands.assign(case=each.case) for each in found]),
        ("gain", [each.gain.assign(case=each.case) for each in found]),
    ):
        full = [table[["case", *table.columns.drop("case")]] for table in tables if len(table)]
        path = root / f"{name}.csv"
        if full:
            write_csv(path, pd.concat(full, ignore_index=True), digits=10)
        else:
            remove(path)


def _of_case(told: _CaseEvidence) -> CaseFidelity:
    """What the frontiers of a case, one below another, rest on; and their error bars."""
    item, case = told.item, told.item.plan.case
    column = case.throughput
    keys: list[str] = ["mode", INTERACTIVITY]
    front = pd.concat([mode.frontier[[*keys, column, "ttl_s", "ftl_s"]] for mode in item.found], ignore_index=True)
    assert len(told.words) == len(front), "the sweep was run without ``outside``"
    outside = front[[*keys, column]].assign(outside_calibration=told.words)
    if not told.error_bars:
        return CaseFidelity(case=case.name, outside=outside, bands=_NOTHING, gain=_NOTHING)
    near = candidates(item, told.store, column)
    found = uncertainty(near, samples=SAMPLES, seed=told.seed, throughput=column, origin=origin_of(case))
    envelope = found.frontier().rename(columns={f"{column}_{q}": f"frontier_{q}" for q in QUANTILES})
    bands = found.bands().drop_duplicates(keys)
    bands = bands[[*keys, *bands.columns[list(bands.columns).index(f"{column}_p10") :]]]
    joined = front.astype({"mode": str}).merge(bands.astype({"mode": str}), on=keys)
    joined = joined.merge(envelope.drop(columns=column), on=keys)
    both = len(item.found) > 1 and item.found[0].mode == ServingMode.DISAGGREGATED
    return CaseFidelity(
        case=case.name, outside=outside, bands=joined, gain=found.gain(GAIN_AT).dropna() if both else _NOTHING
    )


def candidates(item: CaseResult, store: Store, column: str) -> Any:
    """The points of all modes that may come to lie on a frontier, with what they assume, read block by block."""
    parts = []
    for mode in item.found:
        near = mode.frontier
        for block in mode.plan.points:
            points = store.read(block.key)
            if len(points):
                near = near_frontier(pd.concat([near[points.columns], points], ignore_index=True), throughput=column)
        parts.append(near.drop_duplicates())
    return pd.concat(parts, ignore_index=True).assign(**assumed_columns(item.plan.case))
