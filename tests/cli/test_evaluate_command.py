"""``disagg-sim evaluate``: pools as they are written, the screen, the JSON, and one line for what is wrong."""

import json
from dataclasses import fields

import jsonschema
import pytest

from disagg_sim.cli.evaluate import pool_of, pools_of_plan
from disagg_sim.cli.main import run
from disagg_sim.domain import Sharding
from disagg_sim.report.schemas import PLAN, json_schema

pytestmark = pytest.mark.usefixtures("without_changes")
QUESTION = "evaluate --model llama_3_1_8b --system h100_sxm --isl 2048 --osl 256 --rate 40 --ttft 1s --tpot 20ms"


@pytest.mark.parametrize(
    ("text", "mapping", "rest"),
    [
        ("decode", Sharding(), (1, None, None, None)),
        ("decode:tp=4,instances=2,batch=64", Sharding(tp_attn=4, tp_ffn=4), (2, 64, None, None)),
        ("prefill: tp=2, dp=4, ep=8", Sharding(tp_attn=2, dp_attn=4, ep=8), (1, None, None, None)),
        ("prefill:tp=2,pcp=2", Sharding(tp_attn=2, pcp=2, tp_ffn=4), (1, None, None, None)),
        ("colocated:dp=4,token_budget=8192,hold_steps=5", Sharding(dp_attn=4, tp_ffn=4), (1, None, 8192, 5)),
    ],
)
def test_a_pool_is_read_as_it_is_written(text, mapping, rest):
    role, pool = pool_of(text)
    assert role == text.partition(":")[0]
    assert pool.mapping == mapping
    assert (pool.instances, *pool.limits) == rest


def test_a_plan_that_was_written_is_a_deployment(tmp_path, capsys):
    assert run(["plan", *QUESTION.split()[1:], "--out", str(tmp_path / "plan")]) == 0
    capsys.readouterr()
    assert run([*QUESTION.split(), "--plan", str(tmp_path / "plan"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json_schema("evaluate"))
    written = json.loads((tmp_path / "plan" / "plan.json").read_text())["best"]
    assert (found["holds"], found["missed"], found["overloaded"]) == (True, [], [])
    assert found["design"]["gpus"] == written["gpus"] == found["planned"]["gpus"]
    assert found["design"]["tpot_s"] == pytest.approx(written["tpot_s"])
    assert found["capacity_per_s"] >= 40


def test_every_degree_of_a_planned_pool_is_read(tmp_path):
    """Another number for each: none is left out, none is taken for another."""
    names = [each.name for each in fields(Sharding) if each.name != "refused"]
    degrees = dict(zip(names, (4, 3, 6, 2, 5, 8, 2, 1, 512, 7), strict=True))
    limits = {"batch": 96, "token_budget": 4096, "hold_steps": 9}
    pool = {"role": "decode", "instances": 11, **degrees, **limits}
    (tmp_path / "plan.json").write_text(json.dumps({"schema": PLAN, "best": {"pools": [pool]}}))
    (found,) = pools_of_plan(tmp_path).values()
    assert {name: int(getattr(found.mapping, name)) for name in names} == degrees
    assert (found.instances, found.batch, found.token_budget, found.hold_steps) == (11, *limits.values())


def test_a_plan_keeps_its_precision_and_engine(tmp_path, capsys):
    """A plan in bf16 under vLLM is judged so; another precision is taken, another system is told."""
    model, load = ["--model", "llama_3_1_8b"], ["--isl", "1024", "--osl", "128", "--rate", "20", "--json"]

    def told(*argv):
        assert run([*argv, *model, *load]) == 0
        return json.loads(capsys.readouterr().out)

    written = ["--precision", "bf16", "--engine", "vllm", "--out", str(tmp_path)]
    best = told("plan", "--system", "h100_sxm", *written)["best"]
    judged = ["evaluate", "--plan", str(tmp_path), "--alone", "--system"]
    same = told(*judged, "h100_sxm")["design"]
    assert (same["ttft_s"], same["tpot_s"]) == (pytest.approx(best["ttft_s"]), pytest.approx(best["tpot_s"]))
    other = told(*judged, "h200_sxm", "--precision", "fp8")
    assert {(pool["precision"], pool["engine"]) for pool in other["design"]["pools"]} == {("fp8", "vllm")}
    assert other["said"][-1].endswith(" was planned on h100_sxm and is judged on h200_sxm")
