"""Designs by hand that ``explain`` takes apart, against text in git, to ten digits: operators, fits, memory, energy.

``--update-baselines`` records them anew. What moves a part is named in the commit.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from test_plan_baselines import CONSTANT, as_recorded, rounded, words
from typer.testing import CliRunner

from disagg_sim.cli import explain as command
from disagg_sim.cli.main import app

BASELINES = Path(__file__).parent / "certainty" / "recorded"
PHASES = DECODE, PREFILL, COLOCATED, PIGGYBACK = "decode", "prefill", "colocated", "piggyback"
DENSE = "--model llama_3_1_70b --system h200_sxm --precision fp8 --isl 4096 --osl 512 --tp 4 --batch 16"
SPARSE = "--model mixtral_8x7b --system h100_sxm --precision fp8 --isl 2048 --osl 256 --dp 4 --ep 4 --batch 32"
LATENT = "--model deepseek_r1 --system gb200_nvl72 --precision nvfp4_fp8kv --isl 4096 --osl 512 --batch 64"
#: Technique -> designs by hand, and the phases that know it.
DESIGNS = {
    "energy": (f"{DENSE} --energy", PHASES),
    "stages": (f"{DENSE} --pp 2 --engine vllm", PHASES),
    "experts": (f"{SPARSE} --energy --availability 0.999", PHASES),
    "gathered": (f"{SPARSE} --ep 1 --engine sglang", (DECODE, PIGGYBACK)),
    "varied": (f"{SPARSE} --traffic log_normal_4096_512 --rank-imbalance random", (PREFILL, PIGGYBACK)),
    "ranks": (f"{SPARSE} --rank-imbalance random", PHASES),
    "drafts": (f"{DENSE} --speculate 2 --acceptance 'draft_model llama_3_1_8b 0.8 0.6'", (DECODE, COLOCATED)),
    "tiers": (f"{DENSE} --cached 0.5 --tiers hbm=0.5,remote=0.5", (PREFILL, COLOCATED, PIGGYBACK)),
    "held": (f"{SPARSE} --hold-prompts tuned", (COLOCATED,)),
    "dcp": (f"{LATENT} --tp 8 --dcp 4", (DECODE,)),
    "pcp": (f"{DENSE} --tp 2 --pcp 2 --engine sglang", (PREFILL,)),
    "latent": (f"{LATENT} --dp 8 --ep 8", (DECODE, PREFILL, COLOCATED)),
    "indexer": (
        "--model glm_5_3_flash --system gb200_nvl72 --precision nvfp4_fp8kv_bf16_projections --tp 4 --isl 32768",
        (DECODE, PREFILL),
    ),
    "linear": (
        "--model qwen3_5_35b_a3b --system h200_sxm --precision fp8 --tp 2 --isl 8192 --batch 8",
        (DECODE, PREFILL),
    ),
}
#: Further pools, which are told to people alone.
POOLS = {
    "attention_ffn": f"{LATENT} --dp 8 --ffn-gpus 16 --microbatches 2 --energy",
    "encode": "--model qwen3_5_35b_a3b --system h200_sxm --precision fp8 --images 2x1120x1120 --energy",
}
#: Name of a record -> what is asked.
ASKED = {f"{name}_{phase}": f"{argv} --phase {phase}" for name, (argv, phases) in DESIGNS.items() for phase in phases}
ASKED |= {phase: f"{argv} --phase {phase}" for phase, argv in POOLS.items()}


def explained(argv: list[str]) -> str:
    shown = CliRunner().invoke(app, ["explain", *argv])
    assert shown.exit_code == 0, shown.output
    return re.sub(r"(\.yaml):\d+ *", r"\1 ", shown.stdout)  # files change without their numbers


def cache_of_one(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compute once what is told twice."""
    kept: list[Any] = []
    return lambda asked: kept[0] if kept else kept.append(call(asked)) or kept[0]


def record(argv: list[str]) -> dict[str, Any]:
    """All that is said, to people and to programs; of each part what is not 0."""
    with patch.object(command, "explained", cache_of_one(command.explained)):
        screen = explained(argv).splitlines()
        if argv[-1] in POOLS:
            return {"screen": screen}
        answer = json.loads(explained([*argv, "--json"]))
    found = {key: value for key, value in answer.items() if key not in CONSTANT}
    for key, rows in found.items():
        if isinstance(rows, list):
            found[key] = [{name: value for name, value in row.items() if value not in (0, "", None)} for row in rows]
    return rounded({"screen": screen, **found})


def text_of(found: dict[str, Any]) -> str:
    """JSON with a line for each line, operator, fit and part of memory."""
    parts = []
    for key, value in found.items():
        lines = ",\n ".join(map(json.dumps, value)) if isinstance(value, list) else json.dumps(value)
        parts.append(f"{json.dumps(key)}: {f'[{lines}]' if isinstance(value, list) else lines}")
    return "{" + ",\n".join(parts) + "}\n"


@pytest.mark.parametrize("name", ASKED)
def test_a_design_is_taken_apart_as_recorded(name, update_baselines):
    found = record(words(ASKED[name], Path()))
    as_recorded(BASELINES / f"{name}.json", found, text_of(found), update_baselines)


def test_every_design_is_recorded_and_nothing_else_is():
    assert {path.stem for path in BASELINES.glob("*")} == set(ASKED)
