"""Deployments by hand that ``evaluate`` judges, against text in git, to ten digits: screen and JSON.

``--update-baselines`` records them anew. What moves a number is named in the commit.
"""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from test_explain_baselines import cache_of_one
from test_plan_baselines import CONSTANT, as_recorded, questions_of, rounded, words
from typer.testing import CliRunner

from disagg_sim.cli import evaluate as command
from disagg_sim.cli.main import app

BASELINES = Path(__file__).parent / "planning" / "evaluated"
#: Name of a record -> what is asked.
ASKED = questions_of(Path(__file__).parent / "planning" / "evaluated.yaml")


def record(argv: list[str]) -> dict[str, object]:
    """All that is said, to people and to programs."""
    with patch.object(command, "evaluation_of", cache_of_one(command.evaluation_of)):
        shown, told = (CliRunner().invoke(app, ["evaluate", *argv, *more]) for more in ([], ["--json"]))
    assert shown.exit_code == told.exit_code == 0, shown.output
    answer = {key: value for key, value in json.loads(told.stdout).items() if key not in CONSTANT}
    return rounded({"screen": shown.stdout.splitlines(), "answer": answer})


@pytest.mark.parametrize("name", ASKED)
def test_a_deployment_is_judged_as_recorded(name, update_baselines):
    found = record(words(ASKED[name], Path()))
    as_recorded(BASELINES / f"{name}.json", found, json.dumps(found, indent=1) + "\n", update_baselines)


def test_every_deployment_is_recorded_and_nothing_else_is():
    assert {path.stem for path in BASELINES.glob("*")} == set(ASKED)
