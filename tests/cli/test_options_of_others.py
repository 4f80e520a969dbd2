"""Options of ``explain``, ``sweep``, ``simulate`` and ``launch``: what they change, or the value that arrives."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from command_lines import at, json_of
from test_explain_baselines import ASKED

from disagg_sim.cli import launch as launch_room
from disagg_sim.cli import simulate as simulate_room
from disagg_sim.cli import sweep as sweep_room
from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.question import ExplainQuestion, fields_of

ROOT = Path(__file__).parents[2]
BY_HAND = "--model llama_3_1_8b --system h100_sxm --precision fp8"
MIXED = f"{BY_HAND} --phase colocated --batch 16"
#: Option, a design, the same with the option, and what of the JSON has to be another.
CHANGES = [
    ("profile", BY_HAND, f"{BY_HAND} --profile ideal", "points.0.ttl_s"),
    ("failures", f"{MIXED} --availability 0.999", f"{MIXED} --availability 0.999 --failures rsc_1", "spares"),
]
#: Options whose designs are on record.
SAID = ("model", "system", "precision", "engine", "phase", "tp", "dp", "ep", "pp", "dcp", "pcp", "speculate", "batch")
SAID += ("acceptance", "isl", "osl", "traffic", "cached", "tiers", "rank_imbalance", "hold_prompts", "energy")
RECORDED = {name: f"--{name.replace('_', '-')} " for name in (*SAID, "availability")}
#: Of rows of a table and of files: in ``test_explain``; of pools without JSON: on record; of the hub: in its tests.
ELSEWHERE = {
    *("results", "row", "case", "best", "at_interactivity", "figure", "as_json"),
    *("ffn_gpus", "microbatches", "images"),
}


@pytest.mark.parametrize(("option", "base", "changed", "where"), CHANGES, ids=[each[0] for each in CHANGES])
def test_an_option_of_explain_changes_the_answer(option, base, changed, where):
    before, after = (json_of("explain", said) for said in (base, changed))
    assert at(after, where) is not None, option
    assert at(before, where) != at(after, where)


def test_no_option_of_explain_lacks_a_row():
    options = {each.name for each in fields_of(ExplainQuestion)}
    assert {each[0] for each in CHANGES} | {*RECORDED} | ELSEWHERE == options
    assert all(any(said in f"{asked} " for asked in ASKED.values()) for said in RECORDED.values())


# ---- sweep, simulate, launch: the value that arrives ----


@pytest.fixture
def caught(monkeypatch):
    """What a function of a room is given, in place of what it does."""

    def catch(room: Any, name: str, *said: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        names = list(inspect.signature(getattr(room, name)).parameters)

        def instead(*args: Any, **named: Any) -> Any:
            found.update(zip(names, args, strict=False), **named)
            raise InputError("caught")

        monkeypatch.setattr(room, name, instead)
        assert run(list(said)) == 2
        return found

    return catch


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        (["--profile", "ideal"], "profile", "ideal"),
        (["--engine", "sglang"], "engine", "sglang"),
        (["--price", "h100_sxm=2.5"], "prices", {"h100_sxm": 2.5}),
    ],
)
def test_an_option_of_sweep_reaches_its_spec(said, field, value, caught):
    assert caught(sweep_room, "load_sweep", "sweep", "smoke", "--dry-run", *said)[field] == value


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        (["--uncertainty"], "error_bars", True),
        ([], "error_bars", False),
        (["--overwrite"], "overwrite", True),
        (["--jobs", "3"], "workers", 3),
    ],
)
def test_an_option_of_sweep_reaches_its_run(said, field, value, caught, tmp_path):
    found = caught(sweep_room, "compute", "sweep", "smoke", "--out", str(tmp_path / "out"), *said)[field]
    assert getattr(found, "jobs", found) == value


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [(["--trace", "own.csv"], "trace", "own.csv"), (["--seed", "7"], "seed", 7), ([], "seed", None)],
)
def test_an_option_of_simulate_reaches_its_scenario(said, field, value, caught, tmp_path):
    given = ["simulate", "azure_conv_on_h100", "--out", str(tmp_path / "out"), *said]
    assert caught(simulate_room, "load_scenario", *given)[field] == value


def test_requests_of_simulate_reach_every_trace(caught, tmp_path):
    (tmp_path / "short.csv").write_text("arrival_s,input_tokens,output_tokens\n0,512,10\n1,64,20\n2,64,20\n")
    given = ["simulate", "azure_conv_on_h100", "--out", str(tmp_path / "out"), "--trace", str(tmp_path / "short.csv")]
    found = caught(simulate_room, "plan_scenario", *given, "--requests", "2")
    assert {each.requests for each in found["scenario"].traces} == {2}


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        (["--engine", "sglang"], "engine", "sglang"),
        (["--engine", "dynamo", "--backend", "vllm"], "backend", "vllm"),
        (["--engine", "vllm", "--checkpoint", "own/model"], "checkpoint", "own/model"),
        (["--engine", "vllm", "--node-gpus", "4"], "node_gpus", 4),
    ],
)
def test_an_option_of_launch_arrives(said, field, value, caught, tmp_path):
    text = (ROOT / "scenarios" / "azure_conv_on_h100.yaml").read_text()
    two = re.sub(r"deployments:\n  eight: (.*)\n", r"deployments:\n  eight: \1\n  other: \1\n", text)
    (tmp_path / "two.yaml").write_text(two)
    found = caught(launch_room, "launched", "launch", str(tmp_path / "two.yaml"), "--deployment", "other", *said)
    assert found["deployment"].name == "other"
    assert found[field] == value
