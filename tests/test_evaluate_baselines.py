"""Deployments by hand that ``evaluate`` judges, against text in git, to ten digits: screen and JSON.

``--update-baselines`` records them anew. What moves a number is named in the commit.
"""

import json
import math
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from test_explain_baselines import cache_of_one
from test_plan_baselines import BASELINES as PLANS
from test_plan_baselines import CONSTANT, as_recorded, questions_of, rounded, words
from typer.testing import CliRunner

from disagg_sim.cli import evaluate as command
from disagg_sim.cli.main import app
from disagg_sim.units import MS

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


#: Probabilities of a limit that may stand beside either end of a band: of 4,000 samples each group has one rate. [1]
EITHER = (0.88, 0.92)


def test_bands_of_first_tokens_end_within_their_limit_where_it_holds_in_nine_cases_of_ten():
    compared = 0
    for path in sorted([*PLANS.glob("*.json"), *BASELINES.glob("*.json")]):
        found = json.loads(path.read_text())
        sure, limit = found["answer"].get("assurance"), re.search(r"TTFT ([0-9.]+) (ms|s) \(p", found["screen"][0])
        if not sure or not sure["ttft_causes"] or EITHER[0] < sure["ttft_holds"] < EITHER[1]:
            continue
        end = math.inf if sure["ttft_s"][1] is None else sure["ttft_s"][1]
        seconds = float(limit[1]) * (MS if limit[2] == "ms" else 1.0)
        assert (end <= seconds) == (sure["ttft_holds"] > EITHER[1]), path.name
        compared += 1
    assert compared >= 60
