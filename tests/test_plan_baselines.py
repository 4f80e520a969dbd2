"""Plans of seventy questions against text in git, to ten digits: whatever moves one of them shows in a diff.

``pytest tests/test_plan_baselines.py --update-baselines`` records them anew. What moves a plan is named in the commit.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from disagg_sim.cli.main import app

BASELINES = Path(__file__).parent / "planning" / "recorded"
DIGITS = 10
#: Relative difference that processors may make: of the same sums 1e-9, of searches that end at a width
#: (``planning.answer.NARROW``) thirty times that, of latencies near full load.
ALIKE = 3e-6
LLAMA, LLAMA_70B = "--model llama_3_1_8b --system h100_sxm", "--model llama_3_1_70b --system h200_sxm"
GPT, MIXTRAL = "--model gpt_oss_120b --system b200_sxm", "--model mixtral_8x7b --system h100_sxm"
HALVES = "--model deepseek_r1 --system gb200_nvl72 --isl 4096 --osl 512 --tpot 100ms --pools prefill,attention,ffn"
IMAGES = (
    "--model qwen3_5_35b_a3b --system h200_sxm --isl 4096 --osl 256 --pools encode,prefill,decode --images 2x1120x1120"
)
CHAT, LONG, SHORT = "--isl 2048 --osl 256", "--isl 16384 --osl 512", "--isl 512 --osl 64"
ALONE = "--isl 60000 --osl 300 --rate 0.5"

#: Name of a question -> what is asked. TRACE stands for a file of a bursty trace.
QUESTIONS = {
    # the size, three ways
    "rate": f"{LLAMA} {CHAT} --rate 40",
    "rate_high": f"{LLAMA} {CHAT} --rate 4000",
    "gpus": f"{LLAMA} {CHAT} --gpus 16",
    "gpus_two_modes": f"{LLAMA_70B} --isl 4096 --osl 512 --gpus 32",
    "gpus_experts": f"{MIXTRAL} {CHAT} --gpus 8",
    "nearly_as_cheap": f"{LLAMA} --isl 8192 --osl 128 --rate 400 --tpot 40ms",
    "users": f"{LLAMA} {CHAT} --users 500",
    "users_of_few_tokens": f"{LLAMA} --isl 2048 --osl 8 --users 200",
    # limits
    "loose": f"{LLAMA_70B} {CHAT} --rate 20 --ttft 8s --tpot 100ms",
    "tight_tpot": f"{LLAMA_70B} {CHAT} --rate 20 --tpot 15ms",
    "tight_ttft": f"{LLAMA_70B} {CHAT} --rate 20 --ttft 300ms",
    "p99": f"{LLAMA_70B} {CHAT} --rate 20 --ttft 2s@p99 --tpot 40ms@p99",
    "p50": f"{LLAMA_70B} {CHAT} --rate 20 --ttft 1s@p50 --tpot 30ms@p99",
    "one_mode": f"--model llama_3_1_8b --system l40s {CHAT} --gpus 4 --ttft 210ms",
    "infeasible": f"{LLAMA_70B} {CHAT} --rate 20 --tpot 1ms --ttft 5ms",
    "headroom": f"{LLAMA_70B} {CHAT} --rate 20 --headroom 0.25",
    "confidence": f"{LLAMA} {CHAT} --rate 200 --confidence 0.9",
    "confidence_few": f"{LLAMA} {CHAT} --rate 30 --tpot 15ms --confidence 0.9",
    "confidence_sized": f"{LLAMA} {CHAT} --rate 100 --tpot 20ms --confidence 0.97",
    "confidence_high": f"{LLAMA_70B} {CHAT} --users 20 --tpot 12ms --confidence 0.99",
    "infeasible_queues": f"{LLAMA} {CHAT} --rate 40 --ttft 55ms",
    "infeasible_prefill": f"{LLAMA} {CHAT} --rate 40 --ttft 50ms",
    "infeasible_gpus": "--model llama_3_1_70b --system h100_sxm --precision bf16 --isl 2048 --osl 256 --gpus 1",
    # lengths and arrivals
    "long_prompts": f"{LLAMA_70B} {LONG} --rate 4 --ttft 5s",
    "long_cached": f"{LLAMA} {ALONE} --ttft 10s --cached 0.3 --tiers dram",
    "long_drafts": f"{LLAMA} --isl 60000 --osl 30 --rate 0.2 --ttft 20s --speculate auto"
    " --acceptance 'draft_model llama_3_1_8b 0.8 0.6'",
    "short": f"{LLAMA} {SHORT} --rate 400",
    "one_token_prompts": f"{LLAMA} --isl 1 --osl 64 --rate 100",
    "traffic": f"{LLAMA} --traffic azure_2023_conversation --rate 40",
    "trace": f"{LLAMA} --trace TRACE",
    "trace_rate": f"{LLAMA} --trace TRACE --rate 60",
    # caches
    "cached": f"{LLAMA} {LONG} --cached 0.5 --rate 40",
    "cached_dram": f"{LLAMA} {LONG} --cached 0.5 --tiers dram --rate 40",
    "cached_remote": f"{LLAMA} {LONG} --cached 0.5 --tiers hbm=0.5,remote=0.5 --rate 40",
    "sessions": f"{LLAMA} --traffic coding_agent --tiers hbm=8GB,dram --rate 20 --ttft 4s",
    "nic": f"{LLAMA_70B} {LONG} --rate 4 --ttft 5s --max-nic 5",
    # layouts
    "experts": f"{MIXTRAL} {CHAT} --rate 120",
    "experts_fp4": f"{GPT} --isl 4096 --osl 1024 --rate 30",
    "held_none": f"{MIXTRAL} {CHAT} --rate 120 --hold-prompts none",
    "copies": "--model qwen3_30b_a3b --system h100_sxm --isl 2048 --osl 512 --rate 100 --expert-skew 1"
    " --max-redundant-experts 16",
    "ranks": f"{MIXTRAL} {CHAT} --rate 60 --rank-imbalance random",
    "dcp": f"{LLAMA_70B} {LONG} --rate 4 --ttft 5s --max-dcp 4",
    "pcp": f"{LLAMA_70B} {LONG} --rate 4 --ttft 5s --max-pcp 2 --engine sglang",
    "drafts": f"{LLAMA_70B} {CHAT} --rate 20 --speculate auto --acceptance 'draft_model llama_3_1_8b 0.8 0.6'",
    "engine": f"{LLAMA_70B} {CHAT} --rate 20 --engine vllm --precision bf16",
    # systems, money, energy, spares
    "systems": f"--model llama_3_1_70b --system h100_sxm,h200_sxm,b200_sxm {CHAT} --rate 20 --objective usd",
    "prices": f"--model llama_3_1_70b --system h100_sxm,h200_sxm {CHAT} --rate 20 --objective usd --price h100_sxm=1"
    " --price h200_sxm=3 --utilisation 0.5",
    "two_systems": f"--model llama_3_1_70b --system h100_sxm --prefill-system b200_sxm {CHAT} --rate 20",
    "tokens": f"{LLAMA} {CHAT} --rate 40 --cached 0.5 --utilisation 0.6",
    "tokens_two_pools": f"{LLAMA} --isl 8192 --osl 64 --rate 20 --tpot 10ms --utilisation 0.6 --objective usd"
    " --emit sglang",
    "left_out": f"--model llama_3_1_8b --system trainium2,h100_sxm {CHAT} --rate 20 --objective usd --tpot 10ms",
    "watt": f"{LLAMA_70B} {CHAT} --rate 20 --objective watt --energy",
    "joule": f"{LLAMA} {CHAT} --rate 40 --objective joule",
    "joule_gpus": f"{LLAMA} {SHORT} --gpus 4 --objective joule",
    "joule_spares": f"{LLAMA} {SHORT} --rate 200 --objective joule --availability 0.99999",
    "users_spares": f"{LLAMA} {SHORT} --users 60 --availability 0.99999",
    "users_joule": f"{LLAMA} {SHORT} --users 20 --objective joule --availability 0.999",
    "unpriced": f"--model llama_3_1_8b --system l40s {CHAT} --rate 10",
    "spares": f"{LLAMA_70B} {CHAT} --rate 20 --availability 0.999",
    # more pools
    "halves": f"{HALVES} --gpus 64",
    "halves_ffn": f"{HALVES} --rate 20 --engine sglang --ffn-system h200_sxm --objective usd --price gb200_nvl72=5"
    " --energy",
    "encode": f"{IMAGES} --rate 20",
    "encode_priced": f"{IMAGES}@0.5 --gpus 16 --objective usd --utilisation 0.6 --energy",
    "encode_cached": f"{IMAGES} --rate 60 --cached 0.75 --tiers hbm=0.4,dram=0.3,remote=0.3 --ttft 3s@p99"
    " --headroom 0.2",
    "encode_nic": f"{IMAGES} --rate 20 --max-nic 0.3",
    "encode_two_systems": f"{IMAGES} --rate 20 --prefill-system h100_sxm",
    "encode_infeasible": f"{IMAGES} --rate 20 --tpot 1ms",
    "encode_simulated": f"{IMAGES} --rate 20 --simulate",
    # proof, and what would change the answer
    "simulated": f"{LLAMA} {CHAT} --rate 40 --simulate",
    "simulated_one": f"{LLAMA} --isl 128 --osl 16 --gpus 1 --simulate --seed 7",
    "simulated_grown": f"{LLAMA_70B} --isl 8192 --osl 64 --rate 30 --tpot 15ms --simulate --max-nic 1.5",
    "simulated_failing": f"{LLAMA_70B} {CHAT} --rate 20 --tpot 20ms --simulate --availability 0.99999",
    "simulated_gpus": f"{LLAMA} --traffic azure_2023_code --gpus 3 --simulate",
    "split": f"{LLAMA_70B} --isl 8192 --osl 256 --gpus 32 --tpot 20ms --max-nic 20",
    "changes": f"{LLAMA_70B} --isl 4096 --osl 512 --rate 20",
    "changes_nic": f"{LLAMA} --isl 8192 --osl 128 --rate 20 --tpot 8ms --max-nic 0.5",
}
#: What every answer has alike.
CONSTANT = ("schema", "labels")
#: Questions whose changes are recorded; of the others they are not asked for.
CHANGED = ("changes", "changes_nic", "split", "tight_ttft", "nic", "prices", "two_systems")
#: Questions that take longest, each beside a shorter one of the same feature.
LONG = {
    *("rate_high", "loose", "confidence_high", "infeasible_prefill", "rate", "short", "one_token_prompts"),
    *("joule_gpus", "users_spares", "simulated_grown", "split", "users_of_few_tokens", "confidence", "nic", "prices"),
}
#: Those that take some seconds, and the quicker question that moves with what they alone would show.
RARE = {
    "gpus_experts": "experts",
    "tight_ttft": "tight_tpot",
    "traffic": "sessions",
    "trace_rate": "trace",
    "simulated_gpus": "simulated",
}


def words(argv: str, trace: Path) -> list[str]:
    quoted = argv.replace("TRACE", str(trace)).split("'")
    return [word for place, part in enumerate(quoted) for word in ([part] if place % 2 else part.split())]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A trace of 3,000 requests, 40 a second, half of which come in every fourth ten seconds."""
    rng = np.random.default_rng(31)
    second = np.arange(75.0)
    rate = np.where(second % 40 < 10, 80.0, 80.0 / 3)
    counts = rng.poisson(rate)
    arrivals = np.sort(np.concatenate([at + rng.uniform(size=n) for at, n in zip(second, counts, strict=True)]))
    lengths = rng.integers(256, 4096, arrivals.size), rng.integers(32, 512, arrivals.size)
    lines = [f"{at:.4f},{isl},{osl}" for at, isl, osl in zip(arrivals, *lengths, strict=True)]
    path = tmp_path_factory.mktemp("traces") / "bursty.csv"
    path.write_text("\n".join(["arrival,isl,osl", *lines]) + "\n")
    return path


def rounded(value: Any) -> Any:
    """Numbers to ten digits; everything else as it is."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def numbers(value: str) -> float | str:
    """A cell of a table."""
    try:
        return float(value)
    except ValueError:
        return value


def record(argv: list[str], out: Path) -> dict[str, Any]:
    """All that a plan says: its JSON, its screen, and the table of its designs."""
    shown = CliRunner().invoke(app, ["plan", *argv, "--json", "--out", str(out)])
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    found = {key: value for key, value in json.loads(shown.stdout).items() if key not in CONSTANT}
    with (out / "designs.csv").open() as file:
        rows = [{key: numbers(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return rounded({"answer": found, "screen": (out / "plan.txt").read_text().splitlines(), "designs": rows})


def moved(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """What differs, a line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from moved(old.get(key), new.get(key), f"{where}.{key}".strip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, pair in enumerate(zip(old, new, strict=True)):
            yield from moved(*pair, f"{where}[{place}]")
    elif old != new and not (isinstance(old, float) and new == pytest.approx(old, rel=ALIKE)):
        yield f"{where}: {old} -> {new}"


def as_recorded(path: Path, found: Any, text: str, update: bool) -> None:
    """Compare what was found with its record, or write its text there."""
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.skip(f"recorded {path.name}: read the diff before committing it")
    lines = list(moved(json.loads(path.read_text()), found))
    assert not lines, f"{path.stem} moved: " + "; ".join(lines[:8])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in LONG) + [pytest.mark.rare] * (name in RARE))
        for name in QUESTIONS
    ],
)
def test_plan_is_as_recorded(name, trace, update_baselines, request, tmp_path):
    if name not in CHANGED:
        request.getfixturevalue("without_changes")
    found = record(words(QUESTIONS[name], trace), tmp_path / "out")
    as_recorded(BASELINES / f"{name}.json", found, json.dumps(found, indent=1) + "\n", update_baselines)


def test_every_question_is_recorded_and_nothing_else_is():
    assert {path.stem for path in BASELINES.glob("*")} == set(QUESTIONS)
    assert len(QUESTIONS) >= 40
    assert {*RARE} | {*RARE.values()} <= {*QUESTIONS}
