"""Deployments by hand that ``evaluate`` judges, against text in git, to ten digits: screen and JSON.

``--update-baselines`` records them anew. What moves a number is named in the commit.
"""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from test_explain_baselines import cache_of_one
from test_plan_baselines import CONSTANT, as_recorded, rounded, words
from typer.testing import CliRunner

from disagg_sim.cli import evaluate as command
from disagg_sim.cli.main import app

BASELINES = Path(__file__).parent / "planning" / "evaluated"
LLAMA = "--model llama_3_1_8b --system h100_sxm --isl 2048 --osl 256 --ttft 1s --tpot 20ms"
LARGE = "--model llama_3_1_70b --system h200_sxm --isl 4096 --osl 512 --rate 8"
SPARSE = "--model mixtral_8x7b --system h100_sxm --precision fp8 --isl 2048 --osl 256 --rate 60"
#: Name of a record -> what is asked.
ASKED = {
    "planned": f"{LLAMA} --rate 40 --engine vllm --pool colocated:tp=2,instances=4,batch=96,token_budget=4096",
    "no_plan": f"{LLAMA} --rate 10 --tpot 1ms --pool colocated:instances=2",
    "overloaded": f"{LLAMA} --rate 400 --alone --pool prefill:instances=2 --pool decode:instances=2,batch=32",
    "late": f"{LLAMA} --rate 5 --ttft 60ms@p99 --tpot 5ms@p50 --alone --pool colocated:batch=16",
    "seats": f"{LLAMA} --rate 12 --ttft 9s --alone --pool prefill --pool decode:batch=16",
    "stages": f"{LARGE} --alone --engine vllm --pool colocated:tp=2,pp=2,instances=3,batch=64,chunk_tokens=1024",
    "two_systems": f"{LARGE} --prefill-system b200_sxm --price h200_sxm=3 --price b200_sxm=5 --alone --rate 6"
    " --pool prefill:tp=2,batch=4 --pool decode:tp=4,instances=2,batch=128",
    "drafts": f"{LARGE} --alone --speculate 2 --acceptance 'draft_model llama_3_1_8b 0.8 0.6'"
    " --pool colocated:tp=4,instances=3",
    "tiers": f"{LARGE} --alone --cached 0.5 --tiers hbm=0.5,remote=0.5 --max-nic 20"
    " --pool prefill:tp=4 --pool decode:tp=4",
    "ranks": f"{SPARSE} --alone --expert-skew 0.5 --pool colocated:dp=4,ep=4,instances=2,hold_steps=8",
    "ranks_cached": f"{SPARSE} --alone --cached 0.5 --tiers dram --ttft 1s@p99"
    " --pool prefill:dp=2,ep=2,instances=3,batch=8 --pool decode:dp=4,ep=4,batch=128,instances=2",
    "drafted_ranks": f"{SPARSE} --alone --speculate 2 --acceptance 'draft_model mixtral_8x7b 0.8 0.6' --tpot 30ms@p99"
    " --rate 20 --pool colocated:dp=4,ep=4,instances=3,batch=64,token_budget=2048",
    "chunks": f"{LARGE} --alone --cached 0.3 --tiers hbm=0.5,remote=0.5 --max-nic 10 --speculate 1"
    " --acceptance 'draft_model llama_3_1_8b 0.8' --pool prefill:pp=4,chunk_tokens=1024,batch=2,instances=2"
    " --pool decode:tp=8,batch=96",
    "many": "--model llama_3_1_8b --system h100_sxm --traffic azure_2023_conversation --rate 60 --alone"
    " --pool prefill:instances=3 --pool decode:instances=3",
    "launched": f"{LARGE} --alone --launch 'colocated: 3 x vllm serve m --tensor-parallel-size 4 --max-num-seqs 64"
    " --max-num-batched-tokens 8192 --swap-space 4'",
}


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
