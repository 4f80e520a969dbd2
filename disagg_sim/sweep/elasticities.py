"""Compute the sensitivity of a sweep's frontiers: ``sensitivity.csv``, and the search that capacity needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from disagg_sim.atomic import write_csv
from disagg_sim.certainty.elasticity import sensitivity
from disagg_sim.domain import ServingMode
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.serving.colocated import search_colocated
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.piggyback import search_piggyback
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.cases import Case, origin_of
from disagg_sim.sweep.fidelity import candidates
from disagg_sim.sweep.results import CaseResult, SweepResult
from disagg_sim.sweep.store import Store


def why_not(item: CaseResult) -> str:
    """Say why a case has no elasticities.

    Returns the reason; empty where it has some.

    >>> from types import SimpleNamespace
    >>> case = SimpleNamespace(per="usd")
    >>> why_not(SimpleNamespace(plan=SimpleNamespace(case=case), found=("colocated",)))
    'its frontier is one per usd, elasticities are of throughput per GPU'
    """
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


def sweep_elasticities(result: SweepResult, root: Path, *, jobs: int | Workers = 1) -> dict[str, pd.DataFrame]:
    """Compute the elasticities of every case that has some (``why_not``).

    Returns a table for each name of a case, with the columns of ``certainty.elasticity.sensitivity``.
    """
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
    search = search_colocated if mode == ServingMode.COLOCATED else search_piggyback
    return search(replace(case.shared, at=at), table[table.gpus <= limits.gpu_cap]).require().points
