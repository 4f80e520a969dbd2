"""JSON of every command keeps its schema, and the schema refuses what is not such JSON."""

import json
from typing import Any

import jsonschema
import pytest

from disagg_sim.cli.main import run
from disagg_sim.report.schemas import SCHEMAS, json_schema

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
    for command in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(json_schema(command))


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
