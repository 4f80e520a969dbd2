"""Every option of ``plan``: the value that reaches the planner, or what it changes in the answer, as ``--json``."""

import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from command_lines import arguments, words
from test_plan_baselines import QUESTIONS

from disagg_sim.cli import plan as plan_room
from disagg_sim.cli.main import run
from disagg_sim.domain import ServingMode
from disagg_sim.errors import InputError
from disagg_sim.planning.limits import limit_of
from disagg_sim.question import PlanQuestion, fields_of
from disagg_sim.units import GB
from disagg_sim.workload.named import traffic_case

FIELDS = {each.name: each for each in fields_of(PlanQuestion)}
SMALL = "--model llama_3_1_8b --system h100_sxm"
LENGTHS = f"{SMALL} --isl 1024 --osl 128"
RATE = f"{LENGTHS} --rate 40"
EXPERTS = "--model mixtral_8x7b --system h100_sxm --isl 1024 --osl 128 --rate 40"
POOLS = "--model qwen3_5_35b_a3b --system h200_sxm --isl 4096 --osl 256 --gpus 16 --tpot 30ms"
ENCODE = f"{POOLS} --pools encode,prefill,decode --images 1x1120x1120"
SPLIT = "--model qwen3_30b_a3b --system h200_sxm --isl 4096 --osl 256 --gpus 32 --pools prefill,attention,ffn"
TRACE = "timestamp,prompt_tokens,completion_tokens\n" + "".join(
    f"{place / 8},{400 + 37 * place % 500},{20 + 11 * place % 40}\n" for place in range(400)
)


class Reached(NamedTuple):
    """What a planner was given."""

    args: tuple[Any, ...]
    named: dict[str, Any]

    def of(self, field: str) -> Any:
        """The value under a name: an argument, an option, a length, or a limit."""
        options = self.named["options"]
        if field in ("ttft", "tpot"):
            limit = limit_of(self.named[field], field)
            return limit.seconds, limit.share
        if field in ("rate", "gpus"):
            return self.named[field]
        if field in ("model", "system"):
            return self.args[("model", "system").index(field)]
        if field.startswith("lengths."):
            return getattr(self.args[2], field.partition(".")[2])
        return getattr(options, field)


@pytest.fixture
def reached(monkeypatch):
    """What planners are given, which do nothing."""
    found: list[Reached] = []

    def caught(*args: Any, **named: Any) -> Any:
        found.append(Reached(args, named))
        raise InputError("caught")

    monkeypatch.setattr(plan_room, "planned", caught)
    return found


class Row(NamedTuple):
    """An option, what is said, and what has to reach the planner."""

    option: str
    said: str  # beside the base
    field: str
    value: Any
    base: str = RATE


REACHED = [
    Row("model", "", "model", "llama_3_1_8b"),
    Row("system", "", "system", "h100_sxm"),
    Row("prefill_system", "--prefill-system b200_sxm", "prefill_system", "b200_sxm"),
    Row("isl", "", "lengths.mean_isl", 1024.0),
    Row("osl", "", "lengths.mean_osl", 128.0),
    Row("cached", "--cached 90%", "lengths.mean_new", 1024 - 912.0),
    Row("cached", "--cached 0.5", "lengths.mean_new", 512.0),
    Row("rank_imbalance", "--rank-imbalance random", "rank_imbalance", "random"),
    Row("ttft", "--ttft '500 ms@p99'", "ttft", (0.5, 0.99)),
    Row("ttft", "--ttft 1.5", "ttft", (1.5, 0.9)),
    Row("ttft", "", "ttft", (2.0, 0.9)),
    Row("tpot", "--tpot 20ms", "tpot", (0.02, 0.9)),
    Row("tpot", "--tpot 0.03", "tpot", (0.03, 0.9)),
    Row("tpot", "", "tpot", (0.05, 0.9)),
    Row("rate", "--rate 600/min", "rate", 10.0, LENGTHS),
    Row("rate", "--rate 7.5", "rate", 7.5, LENGTHS),
    Row("gpus", "--gpus 8", "gpus", 8, LENGTHS),
    Row("users", "--users 50", "users", 50, LENGTHS),
    Row("objective", "--objective watt", "objective", "watt"),
    Row("engine", "--engine sglang", "engine", "sglang"),
    Row("precision", "--precision bf16", "precision", "bf16"),
    Row("max_dcp", "--max-dcp 4", "max_dcp", 4),
    Row("max_pcp", "--max-pcp 2", "max_pcp", 2),
    Row("max_redundant_experts", "--max-redundant-experts 8 --expert-skew 0.4", "max_redundant_experts", 8, EXPERTS),
    Row("expert_skew", "--expert-skew 0.4", "expert_skew", 0.4, EXPERTS),
    Row("hold_prompts", "--hold-prompts none", "hold_prompts", "none"),
    Row("headroom", "--headroom 20%", "headroom", 0.2),
    Row("max_nic", "--max-nic 25", "max_nic", 25 * GB),
    Row("max_nic", "--max-nic '400 Gbit/s'", "max_nic", 50 * GB),
    Row("price", "--price h100_sxm=2.5", "prices", {"h100_sxm": 2.5}),
    Row("price", "--price 'h100_sxm=$2.5/h'", "prices", {"h100_sxm": 2.5}),
    Row("availability", "--availability 99.9%", "availability", 0.999),
    Row("failures", "--failures rsc_1", "failures", "rsc_1"),
    Row("emit", "--emit vllm", "engine", "vllm"),
    Row("emit", "--emit dynamo", "engine", None),
    Row("pools", "", "pools", ("encode", "prefill", "decode"), ENCODE),
    Row("availability", "--availability 99.9%", "availability", 0.999, ENCODE),
    Row("failures", "--availability 0.9 --failures rsc_1", "failures", "rsc_1", SPLIT),
    Row("objective", "--objective joule", "objective", "joule", SPLIT),
    Row("users", "--users 50", "users", 50, ENCODE.replace("--gpus 16 ", "")),
    Row("ffn_system", "--ffn-system h100_sxm", "ffn_system", "h100_sxm", SPLIT),
]


@pytest.mark.parametrize("row", REACHED, ids=lambda row: f"{row.option} {row.said}")
def test_a_value_reaches_the_planner_in_si_units(row, reached):
    assert run(["plan", *words(f"{row.base} {row.said}")]) == 2
    assert reached[0].of(row.field) == (pytest.approx(row.value) if isinstance(row.value, float) else row.value)


OF_TOOLS = [row for row in REACHED if FIELDS[row.option].ask.agents is not None]


@pytest.mark.parametrize("row", OF_TOOLS, ids=lambda row: f"{row.option} {row.said}")
def test_a_value_of_a_tool_reaches_the_planner_as_that_of_the_option(row, reached):
    pytest.importorskip("mcp")
    from test_mcp import called

    assert called("plan", **arguments(PlanQuestion, f"{row.base} {row.said}")).is_error
    assert reached[0].of(row.field) == (pytest.approx(row.value) if isinstance(row.value, float) else row.value)


def test_prices_of_a_tool_are_a_mapping_too(reached):
    pytest.importorskip("mcp")
    from test_mcp import called

    assert called("plan", **arguments(PlanQuestion, RATE), prices={"h100_sxm": 2.5}, ttft=None).is_error
    assert (reached[0].of("prices"), reached[0].of("ttft")) == ({"h100_sxm": 2.5}, (2.0, 0.9))


def test_images_of_further_pools_reach_the_planner(reached):
    assert run(["plan", *words(ENCODE.replace("1x1120x1120", "2x560x1120@25%".replace("25%", "0.25")))]) == 2
    images = reached[0].of("images")
    assert (images.images, images.height, images.width, images.cached) == (2, 560, 1120, 0.25)


def test_drafts_and_tiers_reach_the_planner(reached):
    said = "--speculate 2 --acceptance 'mtp 0.8 0.6' --cached 0.5 --tiers hbm=25%,dram=0.75"
    assert run(["plan", *words(f"{RATE} {said}")]) == 2
    drafter = reached[0].of("speculation")
    assert (drafter.acceptance, drafter.choices) == ((0.8, 0.6), (2,))
    assert dict(reached[0].of("lengths.cached").reuse.tiers) == {"hbm": 0.25, "dram": 0.75}
    assert run(["plan", *words(f"{RATE} --cached 0.5 --tiers hbm=0,dram=1")]) == 2
    assert dict(reached[1].of("lengths.cached").reuse.tiers)["dram"] == 1.0


def test_a_trace_and_a_traffic_reach_the_planner(reached, tmp_path):
    (tmp_path / "log.csv").write_text(TRACE)
    assert run(["plan", *words(f"{SMALL} --trace {tmp_path / 'log.csv'}")]) == 2
    assert reached[0].args[2].input_tokens[:2].tolist() == [400, 437]
    assert reached[0].of("rate") == pytest.approx(8.0, rel=0.01)
    assert np.array_equal(reached[0].of("trace").arrival, np.arange(400) / 8)
    assert run(["plan", *words(f"{SMALL} --traffic azure_2023_code --rate 40")]) == 2
    assert reached[1].args[2] == traffic_case("azure_2023_code")


#: Options whose answers are on record, whole, and how they are said.
SAID = ("traffic", "trace", "tiers", "speculate", "acceptance", "confidence", "utilisation", "energy", "images", "seed")
RECORDED = {**{name: f"--{name}" for name in SAID}, "proof": "--simulate"}
#: Told apart below; what is asked of the hub, in ``tests/facts/test_hub_names.py``.
OTHERS = {"out", "as_json"}


def test_no_option_of_plan_lacks_a_row():
    """What the planner does with a value that reaches it, ``tests/planning`` holds."""
    assert {row.option for row in REACHED} | {*RECORDED} | OTHERS == {*FIELDS}
    assert all(any(said in asked for asked in QUESTIONS.values()) for said in RECORDED.values())


@pytest.fixture
def brief(monkeypatch):
    """Plans without what comes behind their answer, which takes most of the time."""
    monkeypatch.setattr(plan_room, "changes_of", lambda _: None)
    monkeypatch.setattr(plan_room, "assurance", lambda *_, **__: None)
    return monkeypatch


@pytest.mark.usefixtures("brief")
def test_a_plan_is_written_and_printed_as_it_is_told(tmp_path, capsys):
    assert run(["plan", *words(RATE), "--out", str(tmp_path / "out"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (file,) = (tmp_path / "out").glob("*.json")
    assert json.loads(file.read_text()) == answer
    assert run(["plan", *words(RATE)]) == 0
    text = capsys.readouterr().out
    assert ServingMode(answer["best"]["mode"]) == ServingMode.COLOCATED
    assert "CO-LOCATE: 1 GPU serves 40 requests/s" in text
    assert math.isclose(answer["question"]["rate_per_s"], 40.0)
