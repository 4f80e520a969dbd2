"""Write what the instances of the runs of a scenario drew: ``energy.csv``, and a row a run for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.atomic import write_csv
from disagg_sim.planning.run_energy import instances_energy, several_models
from disagg_sim.scenario.plan import RUNS, Run
from disagg_sim.scenario.run import NAMES, ScenarioResult
from disagg_sim.simulation.records import EncodeUse, Instances
from disagg_sim.sweep.store import BlockState
from disagg_sim.units import HOUR
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.stream import in_memory

ENERGY_FILE = "energy.csv"
#: Columns of the table for people.
ENERGY_HEADER = (*NAMES[:3], "rate", "kWh", "of it waiting", "W a GPU", "J a request", "output tokens/J")
KILO = 1000.0


def write_run_energy(result: ScenarioResult, root: Path) -> list[tuple[str, ...]]:
    """Write ``energy.csv``: a row an instance of a run, what it held and drew."""
    whole = [run for run in result.plan.runs if result.store.state(run.key(RUNS)) is BlockState.STORED]
    tables = [_of_run(run, json.loads(result.store.note(run.key(RUNS)))) for run in whole]
    if not tables:
        return []
    write_csv(root / ENERGY_FILE, pd.concat(tables, ignore_index=True), digits=9)
    sums = result.summary.set_index(list(NAMES))
    return [_line(table, sums.loc[tuple(table[name].iloc[0] for name in NAMES)]) for table in tables]


def _of_run(run: Run, note: dict[str, Any]) -> pd.DataFrame:
    """What the instances of one run drew."""
    if note["gpus_by_model"]:
        raise several_models(run.deployment)
    scenario, scale = run.scenario, 1.0 if run.rate_scale is None else run.rate_scale
    held = Instances(**{name: np.array(values) for name, values in note["instances"].items()})
    law = lengths(in_memory(run.source.at_rate(scenario.seed, scale)))
    use = note.get("encode")
    encode = None if use is None else EncodeUse(**use)
    found = instances_energy(held, run.deployment, scenario.setup, law, encode)
    names: tuple[Any, ...] = (run.choice.label, run.deployment.name, run.source.name, scale)
    return found.assign(**dict(zip(NAMES, names, strict=True)))[[*NAMES, *found.columns]]


def _line(table: pd.DataFrame, summary: pd.Series) -> tuple[str, ...]:
    """A run in words: energy, share of waiting, mean power of a GPU, joules of a request, tokens of a joule."""
    joules, waiting = table["joules"].sum(), table["waiting_joules"].sum()
    completed, tokens = summary["completed"], summary["throughput_tokens_per_s"] * summary["duration_s"]
    return (
        *(str(table[name].iloc[0]) for name in NAMES[:3]),
        f"x{table[NAMES[3]].iloc[0]:g}",
        f"{joules / HOUR / KILO:.3g}",
        f"{waiting / joules:.0%}",
        f"{joules / (table['gpus'] * table['held_s']).sum():.0f}",
        f"{joules / completed:,.3g}" if completed else "",
        f"{tokens / joules:.3g}",
    )
