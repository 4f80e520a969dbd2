"""Write the tables on uncertainty and extrapolation next to ``frontier.csv``.

``outside_calibration.csv`` is written for every sweep with fitted efficiencies, ``uncertainty.csv`` and ``gain.csv``
where error bars were asked for, ``sensitivity.csv`` where elasticities were, with the search that capacity needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.atomic import remove, write_csv
from disagg_sim.certainty.elasticity import sensitivity
from disagg_sim.certainty.error_bars import QUANTILES, near_frontier, uncertainty
from disagg_sim.domain import ServingMode
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_profile
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.points import INTERACTIVITY
from disagg_sim.serving.shared_laws import SHARED_LAWS
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.cases import Case, assumed_columns, origin_of
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


def fidelity_of(
    result: SweepResult, root: Path, *, error_bars: bool, jobs: int | Workers = 1
) -> tuple[CaseFidelity, ...]:
    """Tell what the frontiers of every case, in order, rest on and, where asked for, their error bars."""
    fitted = [case for case in result.cases if case.found and load_profile(case.plan.case.profile).fitted]
    told = [
        _CaseEvidence(
            item=case,
            words=pd.concat([mode.outside for mode in case.found], ignore_index=True),
            store=Store(root.absolute()),
            error_bars=error_bars,
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
    found = uncertainty(near, samples=SAMPLES, throughput=column, origin=origin_of(case))
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


def why_not(item: CaseResult) -> str:
    """Say why a case has no elasticities."""
    case = item.plan.case
    if not item.found:
        return "no result"
    if case.per != "gpu":
        return f"its frontier is one per {case.per}, elasticities are of throughput per GPU"
    return "its frontier counts spares, elasticities are of the GPUs that serve" * case.served.columns_of_spares


def _elasticities(task: tuple[CaseResult, Store]) -> tuple[str, pd.DataFrame]:
    """Name and elasticities of a case of the sweep in a store."""
    item, store = task
    case, near = item.plan.case, candidates(item, store, "tokens_per_s_per_gpu")
    return case.name, sensitivity(near, search=partial(_search, item), origin=origin_of(case))


def write_elasticities(tables: Mapping[str, pd.DataFrame], root: Path) -> None:
    """Write ``sensitivity.csv``: the tables of all cases below one another, the case in front."""
    joined = pd.concat([table.assign(case=name) for name, table in tables.items()], ignore_index=True)
    write_csv(root / "sensitivity.csv", joined[["case", *joined.columns.drop("case")]], digits=6)


def sweep_elasticities(result: SweepResult, root: Path, *, jobs: int | Workers) -> dict[str, pd.DataFrame]:
    """Compute the elasticities of every case that has some (``why_not``)."""
    store = Store(root.absolute())
    tasks = [(item, store) for item in result.cases if not why_not(item)]
    found = dict(run_tasks(_elasticities, tasks, jobs=jobs))
    return {item.plan.case.name: found[item.plan.case.name] for item, _ in tasks}


def _search(item: CaseResult, systems: Mapping[str, SystemSpec]) -> pd.DataFrame:
    """Points of all modes of a case, searched on other systems of the same names."""
    case = item.plan.case
    tables = [_points(case, mode.mode, systems) for mode in item.found]
    return pd.concat(tables, ignore_index=True)


def _points(case: Case, mode: str, systems: Mapping[str, SystemSpec]) -> pd.DataFrame:
    limits, lengths = case.limits, case.lengths
    at = case.setup_of(systems[case.decode_system.name], case.pools.precision)
    table = limits.mappings(at)
    if mode == ServingMode.DISAGGREGATED:
        prefill_at = case.setup_of(systems[case.prefill_system.name], case.pools.prefill_precision)
        first = limits.mappings(prefill_at, prefill=True)
        return disaggregated(
            prefill_grid(prefill_at, first, lengths, mla_form=case.mla_form, allow_long_context=True),
            decode_grid(at, table, lengths, allow_long_context=True),
            ftl_limit=limits.ftl_s,
            ttl_limit=None if limits.ttl_s == float("inf") else limits.ttl_s,
            gpu_cap=limits.gpu_cap,
            matching=case.ctx_gen_ratio or case.matching,
            nic_limit=None if limits.nic_limit == float("inf") else limits.nic_limit,
        )
    within = table[table.gpus <= limits.gpu_cap]
    return SHARED_LAWS[mode].search(replace(case.shared, at=at), within).require().points
