"""Plans of forty questions against text in git, to ten digits: whatever moves one of them shows in a diff.

``pytest tests/test_plan_baselines.py --update-baselines`` records them anew. What moves a plan is named in the commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import disagg_sim.cli.plan as command
from disagg_sim.cli.main import app
from disagg_sim.planning.flips import Changes

BASELINES = Path(__file__).parent / "planning" / "recorded"
DIGITS = 10
#: Relative difference that processors may make: of the same sums 1e-9, of searches that end at a width
#: (``planning.users.NARROW``) thirty times that, of latencies near full load.
ALIKE = 3e-6
LLAMA, LLAMA_70B = "--model llama_3_1_8b --system h100_sxm", "--model llama_3_1_70b --system h200_sxm"
GPT, MIXTRAL = "--model gpt_oss_120b --system b200_sxm", "--model mixtral_8x7b --system h100_sxm"
CHAT, LONG, SHORT = "--isl 2048 --osl 256", "--isl 16384 --osl 512", "--isl 512 --osl 64"

#: Name of a question -> what is asked. TRACE stands for a file of a bursty trace.
QUESTIONS = {
    # the size, three ways
    "rate": f"{LLAMA} {CHAT} --rate 40",
    "rate_high": f"{LLAMA} {CHAT} --rate 4000",
    "gpus": f"{LLAMA} {CHAT} --gpus 16",
    "gpus_two_modes": f"{LLAMA_70B} --isl 4096 --osl 512 --gpus 32",
    "gpus_experts": f"{MIXTRAL} {CHAT} --gpus 8",
    "users": f"{LLAMA} {CHAT} --users 500",
    "users_of_few_tokens": f"{LLAMA} --isl 2048 --osl 8 --users 200",
    # limits
    "loose": f"{LLAMA_70B} {CHAT} --rate 20 --ttft 8s --tpot 100ms",
    "tight_tpot": f"{LLAMA_70B} {CHAT} --rate 20 --tpot 15ms",
    "tight_ttft": f"{LLAMA_70B} {CHAT} --rate 20 --ttft 300ms",
    "p99": f"{LLAMA_70B} {CHAT} --rate 20 --ttft 2s@p99 --tpot 40ms@p99",
    "p50": f"{LLAMA_70B} {CHAT} --rate 20 --ttft 1s@p50 --tpot 30ms@p50",
    "infeasible": f"{LLAMA_70B} {CHAT} --rate 20 --tpot 1ms",
    "headroom": f"{LLAMA_70B} {CHAT} --rate 20 --headroom 0.25",
    "confidence": f"{LLAMA} {CHAT} --rate 200 --confidence 0.9",
    # lengths and arrivals
    "long_prompts": f"{LLAMA_70B} {LONG} --rate 4 --ttft 5s",
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
    "watt": f"{LLAMA_70B} {CHAT} --rate 20 --objective watt --energy",
    "joule": f"{LLAMA} {CHAT} --rate 40 --objective joule",
    "spares": f"{LLAMA_70B} {CHAT} --rate 20 --availability 0.999",
    # proof, and what would change the answer
    "simulated": f"{LLAMA} {CHAT} --rate 40 --simulate",
    "changes": f"{LLAMA_70B} --isl 4096 --osl 512 --rate 20",
}
#: What is recorded of runners-up, and of how sure a plan is.
OF_OTHERS = ("mode", "gpus", "rate_per_s", "ttft_s", "tpot_s")
OF_ASSURANCE = ("probability", "holds", "most", "capacity", "gain", "tpot")
#: Questions whose changes are recorded; of the others they are not asked for.
CHANGED = ("changes",)


def words(argv: str, trace: Path) -> list[str]:
    quoted = argv.replace("TRACE", str(trace)).split("'")
    return [word for place, part in enumerate(quoted) for word in ([part] if place % 2 else part.split())]


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
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


def design(found: dict[str, Any]) -> dict[str, Any]:
    pools = [
        {key: value for key, value in pool.items() if value not in (0, 1, None) or key == "instances"}
        for pool in found["pools"]
    ]
    return {**found, "pools": pools}


def record(argv: list[str]) -> dict[str, Any]:
    shown = CliRunner().invoke(app, ["plan", *argv, "--json"])
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    found = json.loads(shown.stdout)
    kept: dict[str, Any] = {
        key: found[key]
        for key in ("status", "binds", "gain", "flips", "limit_costs", "drawn", "usd_per_million_tokens", "simulated")
        if found.get(key)
    }
    if found["best"] is not None:
        kept["best"] = design(found["best"])
        kept["runners_up"] = [{key: each[key] for key in OF_OTHERS} for each in found["runners_up"]]
        kept["assurance"] = {key: found["assurance"][key] for key in OF_ASSURANCE}
    return rounded(kept)


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


@pytest.mark.parametrize("name", QUESTIONS)
def test_plan_is_as_recorded(name, trace, update_baselines, monkeypatch):
    if name not in CHANGED:
        monkeypatch.setattr(command, "changes_of", lambda _: Changes(flips=(), limits=(), aside=None))
    path, found = BASELINES / f"{name}.json", record(words(QUESTIONS[name], trace))
    if update_baselines:
        path.write_text(json.dumps(found, indent=1) + "\n")
        pytest.skip(f"recorded {path.name}: read the diff before committing it")
    lines = list(moved(json.loads(path.read_text()), found))
    assert not lines, f"plan {name} moved: " + "; ".join(lines[:8])


def test_every_question_is_recorded_and_nothing_else_is():
    assert {path.stem for path in BASELINES.glob("*")} == set(QUESTIONS)
    assert len(QUESTIONS) >= 40
