"""Sentences of a plan from values put in by hand, and schemas of the JSON of commands."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

import disagg_sim as ds
from disagg_sim.cli import plan as command
from disagg_sim.cli.main import run
from disagg_sim.domain import ServingMode
from disagg_sim.launch.launch import launch
from disagg_sim.planning.flips import AnswerFlip, Changes, LimitCost
from disagg_sim.planning.prove import Failing, Proof, ProofRun
from disagg_sim.planning.ranking import passed_over
from disagg_sim.report.plan import proof_lines
from disagg_sim.report.plan_rows import change_lines, flip_lines, law_words
from disagg_sim.report.schemas import SCHEMAS, json_schema

JOINT, SPLIT = ServingMode.COLOCATED, ServingMode.DISAGGREGATED


@pytest.fixture(scope="module", params=["rate", "gpus"])
def plan(request):
    size = {"rate": {"rate": 40.0}, "gpus": {"gpus": 6}}[request.param]
    return ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), ttft="1 s", tpot="20 ms", **size)


def flip(axis, factor, before, value, mode=JOINT, system="h200_sxm"):
    return AnswerFlip(axis=axis, factor=factor, before=before, value=value, mode=mode, system=system)


def test_flips_in_words(plan):
    """A value, and the last one asked at which nothing changes, on the way to it."""
    found = flip_lines(
        plan,
        (
            flip("ttft", 1.5, 1.25, 1.5),
            flip("tpot", 0.5, 0.8, 0.01, mode=None, system=""),
            flip("isl", 2.0, 1.5, 4096.0, mode=SPLIT),
            flip("nic", 0.25, 0.5, 12.5e9),
            flip("osl", 4.0, 3.0, 1024.0),  # one too many
        ),
    )
    assert found == [
        "TTFT limit up to 1.5 s: co-located (at 1.25 s still the same)",
        "TPOT limit down to 10 ms: no deployment (at 16 ms still the same)",
        "prompts up to 4,096 tokens: disaggregated (at 3,072 tokens still the same)",
        "KV bandwidth of a GPU down to 12 GB/s: co-located (at 25 GB/s still the same)",
    ]
    assert flip_lines(plan, (flip("price", 0.8, 1.0, 1.6),)) == [
        "price of h200_sxm down to 1.60 USD a GPU hour: as good as the best"
    ]
    assert flip_lines(replace(plan, cases=()), ()) == [
        "no other answer was found up to 1/4 and 4 times each limit and length"
    ]


@pytest.mark.parametrize(
    ("model", "cached", "said"),
    [
        ("qwen3_5_35b_a3b", 0.5, "0 % of a prompt cached (in whole pieces of 2,096 tokens)"),
        ("qwen3_5_35b_a3b", 0.75, "51.2 % of a prompt cached (in whole pieces of 2,096 tokens)"),
        ("deepseek_v4_flash", 0.3, "28.1 % of a prompt cached (in whole pieces of 128 tokens)"),
        ("llama_3_1_70b", 0.5, "50 % of a prompt cached"),
    ],
)
def test_what_is_cached_in_pieces_says_so(model, cached, said):
    """A state is saved every 2,096 tokens, an entry of compressed attention holds 128: only whole ones are found."""
    law = ds.lengths(4096, 512, cached=cached)
    at = ds.setup(model, "h200_sxm", "fp8")
    found = law_words(law.at_checkpoints(at), None, at)
    assert found.removeprefix("4096 + 512 tokens with ") == said


def test_a_flip_names_its_system_where_several_compete(plan):
    other = replace(plan.cases[0], at=replace(plan.cases[0].at, system=ds.load_system("h200_sxm")))
    two = replace(plan, cases=(*plan.cases, other))
    assert flip_lines(two, (flip("osl", 4.0, 3.0, 1024.0),)) == [
        "answers up to 1,024 tokens: co-located on h200_sxm (at 768 tokens still the same)"
    ]


@pytest.mark.parametrize("more", [1.02, 2.0])
def test_what_limits_cost_and_what_was_set_aside_in_words(plan, more):
    """By GPUs for a rate, by rate for GPUs; forecasts tell 3 % apart."""
    aside = replace(plan.runners_up[0], rate=plan.best.rate * more, cost=plan.best.cost)
    told = Changes(flips=(), limits=(LimitCost(axis="tpot", value=0.03, gpus=2, rate=77.7, cost=0.5),), aside=aside)
    _, limit, last = change_lines(plan, told)
    by_rate = plan.size.gpus is None
    saved = f"2 GPUs in place of {plan.best.gpus}" if by_rate else f"77.7 requests/s in place of {plan.best.rate:.4g}"
    assert limit == f"TPOT limit of 30 ms in place of 20 ms: {saved}"
    gpus = f"{aside.gpus} GPUs in place of {plan.best.gpus}"
    rate = f"{aside.rate:.4g} requests/s in place of {plan.best.rate:.4g}"
    assert last.startswith("set aside: ")
    why = passed_over(plan.best, aside)
    alike = "less than forecasts tell apart, and " if more < 1.03 else ""
    assert last.endswith(f", {gpus if by_rate else rate}: {alike}{why}")


@pytest.mark.parametrize(("rate", "cost", "said"), [(0.98, 1.2, "20% dearer"), (0.9, 1.05, "serves 10% less")])
def test_the_larger_of_two_drawbacks_is_named(plan, rate, cost, said):
    """Users meet each design at a rate of its own, so a dearer one may also serve a little less."""
    best = plan.best
    assert passed_over(best, replace(best, rate=best.rate * rate, cost=best.cost * cost)) == said


def run_of(counts, rate, ttft, tpot, **more):
    tails = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
    held = {"holds_ttft": ttft <= 1.0, "holds_tpot": tpot <= 0.02, "hand_over": 0.0, "lost": 0}
    ends = {"ttft": {**tails, "p90": ttft}, "tpot": {**tails, "p90": tpot}}
    return ProofRun(counts=counts, rate=rate, requests=2345, **ends, **(held | more))


def test_a_proof_in_words(plan):
    first, last = run_of((3, 1), 40.0, 1.2, 0.019), run_of((4, 1), 39.0, 0.9, 0.018)
    held = "simulated on Poisson arrivals, 2,345 requests: holds the limits; TTFT p90 900 ms, TPOT p90 18 ms"
    assert proof_lines(plan, Proof(planned=last, final=last, design=plan.best, runs=1)) == [held]
    assert proof_lines(plan, Proof(planned=first, final=last, design=plan.best, runs=5)) == [
        held,
        "adapted from 3 + 1 instances at 40 requests/s, which missed them to 4 + 1 at 39, in 5 simulations",
    ]
    lost = run_of((4, 1), 39.0, 0.9, 0.021, lost=7)
    failing = Failing(run=lost, failed=(2, 1), moved=11)
    two = next(each for each in (plan.best, plan.other) if len(each.pools) == 2)
    assert proof_lines(plan, Proof(planned=lost, final=lost, design=two, runs=1, failing=failing)) == [
        "simulated on Poisson arrivals, 2,345 requests: MISSES the limits; TTFT p90 900 ms, TPOT p90 21 ms, 7 requests"
        " lost",
        "with 2 prefill + 1 decode instances failed at once, as many as there are spares: MISSES the limits; TTFT p90"
        " 900 ms, TPOT p90 21 ms, 11 requests began again, 7 lost",
    ]


def test_a_runner_up_is_started_where_the_engine_cannot_express_the_best(plan, monkeypatch):
    """The first that it can, and the note counts from 1."""
    best, _, second, *_ = (plan.best, *plan.runners_up)
    none = {id(each): ["too new"] for each in (best, plan.runners_up[0])}
    monkeypatch.setattr(command, "expressible", lambda design, engine: none.get(id(design), []) if engine else None)
    made = command.start(plan, "vllm")
    assert made.notes[0] == "starts runner-up 2; of the best: too new"
    assert made.files == launch(second, engine="vllm").files
    none.clear()
    assert command.start(plan, "vllm") == launch(best, engine="vllm")


CASE = ("--model", "llama_3_1_8b", "--system", "h100_sxm", "--isl", "1024", "--osl", "128")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command prints, held against the schema that it names."""
    capsys.readouterr()
    code = run(arguments)
    found = json.loads(capsys.readouterr().out)
    assert code == (2 if found.get("status") == "infeasible" else 0)
    assert found["schema"] == SCHEMAS[arguments[0]][0]
    jsonschema.validate(found, json_schema(arguments[0]))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small sweep, of which one case has no result."""
    folder = tmp_path_factory.mktemp("sweep")
    text = "name: small\nmodels: [llama_3_1_8b, llama_3_1_405b]\nsystems: {h100_sxm: bf16}\n"
    text += "traffic: [{isl: 1024, osl: 128}]\nmodes: [disaggregated, colocated]\nlimits: {max_gpus: 2}\n"
    (folder / "small.yaml").write_text(text)
    return folder


def test_every_schema_is_a_schema():
    for name in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(json_schema(name))


@pytest.mark.parametrize("limit", ["50 ms", "1 ms"])
def test_plans_keep_their_schema(limit, capsys):
    found = printed(capsys, "plan", *CASE, "--rate", "40", "--tpot", limit, "--json")
    assert (found["best"] is None) == (found["status"] == "infeasible") == (limit == "1 ms")
    if found["best"]:
        pools = found["assurance"]["pools"]
        assert all(sum(each["rests_on"].values()) == pytest.approx(1.0) for each in pools)
        assert set(pools[0]["rests_on"]) <= set(found["labels"])


@pytest.mark.usefixtures("without_changes")
def test_plans_keep_it_with_tiers_spares_and_joules(capsys):
    asked = ("--cached", "0.5", "--tiers", "hbm=0.5,dram=0.5", "--availability", "0.999", "--objective", "joule")
    found = printed(capsys, "plan", *CASE, "--rate", "40", *asked, "--json")
    assert {"tiers", "joules_per_output_token", "fewest_gpus", "drawn"} <= found.keys()


def test_sweeps_explanations_and_comparisons_keep_theirs(results, capsys):
    out = str(results / "out")
    found = printed(capsys, "sweep", str(results / "small.yaml"), "--out", out, "--jobs", "1", "--json")
    small, large = found["cases"]
    best = {mode["mode"]: mode["best"][0]["point"]["tokens_per_s_per_gpu"] for mode in small["modes"]}
    assert small["gain"]["0"] == pytest.approx(best["disaggregated"] / best["colocated"])
    assert [each["at_least"] for each in small["modes"][0]["best"]] == [None, 20.0, 50.0, 100.0]
    assert large["modes"] == []
    assert "disaggregated" in large["verdict"] or "memory" in large["verdict"]
    one = printed(capsys, "explain", out, "--best", "--json")
    assert {each["latency"] for each in one["trust"]} == {"ttl", "ftl"}
    same = printed(capsys, "compare", out, out, "--json", "-")
    assert same["same"] is True
    assert same["inputs"] == []


def test_simulations_keep_theirs(tmp_path, capsys):
    pytest.importorskip("numba")
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + "0,100,5\n" * 5 + "1,100,5\n")
    (tmp_path / "one.yaml").write_text(
        "{name: one, model: llama_3_1_8b, system: h100_sxm, precision: fp8, trace: {path: trace.csv}, "
        "slo: {ttft_s: 0.5, tpot_s: 0.05}, deployments: {one: {colocated: {instances: 1}}}, policies: [vllm]}"
    )
    out = str(tmp_path / "out")
    found = printed(capsys, "simulate", str(tmp_path / "one.yaml"), "--out", out, "--json", "--jobs", "1")
    assert [each["policy"] for each in found["runs"]] == ["vllm"]


def test_a_schema_refuses_other_json(capsys):
    for wrong in ({}, {"schema": "disagg-sim/plan/2"}, {"schema": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, json_schema("plan"))
    assert run(["specs", "schema", "plann"]) == 2
    assert "no JSON of a command 'plann', did you mean 'plan'?" in capsys.readouterr().err
    assert run(["specs", "schema", "compare"]) == 0
    assert json.loads(capsys.readouterr().out)["$id"] == "disagg-sim/compare/1"
