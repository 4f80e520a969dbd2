"""Simulated runs of every policy and of what a scenario may ask for, against text in git, to ten digits.

``--update-baselines`` records them anew. What moves a number is named in the commit.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from test_certainty_baselines import by_column, text_of
from test_plan_baselines import as_recorded, rounded

from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.scenario.plan import RUNS, plan_scenario
from disagg_sim.scenario.run import ScenarioResult, run_scenario
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.simulation.metrics import MEASURED
from disagg_sim.simulation.policies.registry import BUILT_IN, policies

BASELINES = Path(__file__).parent / "simulation" / "recorded"
GIVEN = read_mapping(Path(__file__).parent / "simulation" / "runs.yaml")
SCENARIOS = {name: {"name": name, **GIVEN["usual"], **own} for name, own in GIVEN["scenarios"].items()}
#: Decisions that are recorded in words; of all, the sums are.
WORDS = 12


def sums(table: pd.DataFrame) -> dict[str, Any]:
    """Of each column of numbers the sum, and that by row, which tells rows apart; of words how often each is there."""
    row = np.arange(1.0, len(table) + 1)
    found: dict[str, Any] = {}
    for name, column in table.items():
        if pd.api.types.is_numeric_dtype(column):
            values = column.to_numpy(float)
            found[str(name)] = [
                float(np.nansum(values)),
                float(np.nansum(values * row)),
                int(np.isfinite(values).sum()),
            ]
        else:
            found[str(name)] = {str(word): int(count) for word, count in sorted(column.value_counts().items())}
    return found


def record(name: str, folder: Path) -> dict[str, Any]:
    """All tables of a scenario, those of its requests, samples and instances as sums."""
    path = folder / "scenario.yaml"
    path.write_text(json.dumps(SCENARIOS[name]))
    plan = plan_scenario(load_scenario(str(path)))
    result: ScenarioResult = run_scenario(plan, folder / "out", jobs=1, listener=Mock())
    assert not result.faults
    found: dict[str, Any] = {"summary": by_column(result.summary.drop(columns=list(MEASURED)))}
    for table in ("classes", "models", "tiers", "capacity"):
        if len(rows := getattr(result, table)):
            found[table] = by_column(rows)
    for run in plan.runs:
        note = json.loads(result.store.note(run.key(RUNS)))
        decided = result.decisions[result.decisions["policy"] == run.choice.label]
        found[f"{run.choice.label} {run.source.name} {run.rate_scale:g}"] = {
            "requests": sums(result.requests(run)),
            "samples": sums(result.samples(run)),
            "instances": note.pop("instances"),
            "decisions": [len(decided), float(decided["tick_s"].sum()), *decided["wish"][:WORDS]],
            **note,
        }
    return json.loads(json.dumps(rounded(found)))


@pytest.mark.parametrize("name", SCENARIOS)
def test_runs_are_as_recorded(name, update_baselines, tmp_path):
    found = record(name, tmp_path)
    as_recorded(BASELINES / f"{name}.json", found, text_of(found), update_baselines)


def test_every_scenario_is_recorded_and_nothing_else_is():
    assert {path.stem for path in BASELINES.glob("*")} == set(SCENARIOS)
    asked = [each if isinstance(each, str) else each["kind"] for each in SCENARIOS["policies"]["policies"]]
    assert {policies()[name] for name in asked} == set(BUILT_IN)
