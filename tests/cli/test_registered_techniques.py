"""A technique of a few lines: one entry of the registry, and it is asked for and acts everywhere.

Steps of more than 64 sequences cost twice: what follows from that is worked out by hand.
"""

import importlib
import inspect
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_lines import json_of

import disagg_sim as ds
from disagg_sim.certainty.rows import rescore
from disagg_sim.cli import mcp_tools
from disagg_sim.cli.main import run
from disagg_sim.errors import InputError, SpecError
from disagg_sim.question import Ask, ExplainQuestion, PlanQuestion
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.techniques import registry
from disagg_sim.techniques.registry import Technique, asked_fields, chosen_in

CROWDING = Technique(
    name="crowding",
    title="Steps of more sequences than this cost twice.",
    kind=int,
    ask=Ask("Most sequences of a step that does not cost twice.", "N", low=1),
    stretch=lambda most, sequences: np.where(np.asarray(sequences) > most, 2.0, 1.0),
)
WHERE = "--model llama_3_1_8b --system h100_sxm"


@pytest.fixture(autouse=True)
def crowding(monkeypatch):
    monkeypatch.setattr(registry, "TECHNIQUES", (*registry.TECHNIQUES, CROWDING))


def setup(techniques=""):
    return ds.setup("llama_3_1_8b", "h100_sxm", "fp8", techniques=techniques)


def test_a_step_of_more_than_64_sequences_costs_twice_in_grids_and_mixed_steps():
    lengths, batches = ds.lengths(1024, 128), [1, 64, 65, 256]
    plain, crowded = (setup(said) for said in ("", "crowding=64"))
    steps = [ds.decode_grid(at, ds.Sharding(), lengths, batch=batches).latency for at in (plain, crowded)]
    assert (steps[1] / steps[0]).ravel().tolist() == [1.0, 1.0, 2.0, 2.0]
    options = ds.Colocation(batch=(64, 128), every_step_mixed=True)
    mixed = [ds.piggyback(at, ds.Sharding(), lengths, options=options) for at in (plain, crowded)]
    slower = {}
    for table in mixed:
        for batch, rows in table.groupby("decode_batch"):
            slower.setdefault(batch, []).append(rows["tokens_per_s_per_gpu"].max())
    assert slower[64][0] == slower[64][1]
    assert slower[128][0] / 2 <= slower[128][1] < slower[128][0]


def test_a_table_names_it_and_is_timed_again_with_it():
    points = ds.colocated(
        setup("crowding=64"), ds.Sharding(), ds.lengths(1024, 128), options=ds.Colocation(batch=(64, 128))
    )
    assert set(points["techniques"]) == {"crowding=64"}
    again = rescore(points)
    np.testing.assert_allclose(again["ttl_s"], points["ttl_s"], rtol=1e-9)


def test_a_sweep_has_it_as_an_axis(tmp_path, swept):
    head = "name: crowd\nmodels: llama_3_1_8b\nsystems: {h100_sxm: fp8}\ntraffic: [{isl: 1024, osl: 128}]\n"
    head += "limits: {max_gpus: 1, gpu_cap: 4}\n"
    both = pd.read_csv(swept(head + "crowding: [none, 8]\n", tmp_path / "both") / "frontier.csv")
    plain = pd.read_csv(swept(head, tmp_path / "plain") / "frontier.csv")
    off = both[both["techniques"] == "none"].drop(columns=["techniques", "case"]).reset_index(drop=True)
    pd.testing.assert_frame_equal(off, plain.drop(columns="case"), check_exact=True)
    step, on = dict(zip(off["decode_batch"], off["ttl_s"], strict=True)), both[both["techniques"] == "crowding=8"]
    pairs = zip(on["decode_batch"], on["ttl_s"], strict=True)
    told = {batch: ttl / step[batch] for batch, ttl in pairs if batch in step}
    assert {batch > 8 for batch in told} == {True, False}
    assert all(ratio == pytest.approx(1.0 + (batch > 8), rel=1e-9) for batch, ratio in told.items())
    file = tmp_path / "wrong.yaml"
    file.write_text(head + "crowding: [none, 0]\ncrowdin: 3\n")
    with pytest.raises(SpecError, match=r"crowding\[1\]: 0 is out of range(.|\n)*crowdin', did you mean 'crowding'"):
        load_sweep(str(file))


def test_explain_and_plan_take_it_as_an_option():
    plain, crowded = (json_of("explain", f"{WHERE} --batch 128 {more}") for more in ("", "--crowding 64"))
    parts = [[part["seconds"] for part in found["operators"]] for found in (plain, crowded)]
    np.testing.assert_allclose(parts[1], 2.0 * np.array(parts[0]), rtol=1e-9)
    assert json_of("explain", f"{WHERE} --batch 64 --crowding 64") == json_of("explain", f"{WHERE} --batch 64")
    # steps of two or more sequences cost twice, passes of prompts do not: up to half as much is served
    options = [ds.PlanOptions(techniques=said) for said in ("", "crowding=1", "none")]
    load, limits = ds.lengths(64, 256), {"ttft": "60 s", "tpot": "1 s"}
    plain, crowded, off = (
        ds.plan("llama_3_1_8b", "h100_sxm", load, gpus=1, options=each, **limits).best.rate for each in options
    )
    assert 0.5 <= crowded / plain < 0.6
    assert off == plain


def test_a_simulation_plays_it(tmp_path):
    """A hundred prompts at once: one pass of prompts alone, then 49 decode steps of a hundred sequences."""
    pytest.importorskip("numba")
    rows = "".join("0.0,16,50\n" for _ in range(100)) + "900.0,16,50\n"
    (tmp_path / "burst.csv").write_text("timestamp,prompt_tokens,completion_tokens\n" + rows)
    text = """name: burst
model: llama_3_1_8b
system: h100_sxm
precision: fp8
trace: {path: burst.csv}
slo: {ttft_s: 1.0, tpot_s: 0.05}
deployments: {one: {colocated: {}}}
policies: vllm
"""
    found = {}
    for said in ("", "crowding: 100\n", "crowding: 64\n"):
        file, out = tmp_path / "burst.yaml", tmp_path / f"out{len(found)}"
        file.write_text(text + said)
        assert run(["simulate", str(file), "--out", str(out)]) == 0
        found[said] = pd.read_csv(out / "summary.csv").iloc[0]
    plain, same, crowded = found.values()
    assert same["tpot_p50_s"] == plain["tpot_p50_s"]
    assert crowded["ttft_p50_s"] == plain["ttft_p50_s"]
    assert crowded["tpot_p50_s"] == pytest.approx(2 * plain["tpot_p50_s"], rel=1e-8)


def test_agents_and_schemas_have_it():
    for question, tool in ((PlanQuestion, mcp_tools.plan), (ExplainQuestion, mcp_tools.explain)):
        assert [each.flag for each in asked_fields(question)][-1] == "--crowding"
        argument = inspect.signature(mcp_tools.of_question(tool.__wrapped__)).parameters["crowding"]
        assert argument.default is None
        assert "Most sequences of a step" in json.dumps(str(argument.annotation))


def test_the_page_lists_it(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    listed = importlib.import_module("docs.computed.techniques").techniques()
    assert f"| crowding | {CROWDING.title} | `--crowding` | `crowding` | `--crowding` | `crowding` |" in listed


def test_wrong_values_are_told_in_a_line():
    assert chosen_in("crowding=64") == (("crowding", 64),)
    assert chosen_in("none, crowding = 64") == (("crowding", 64),)
    with pytest.raises(InputError, match="allowed: text such as"):
        chosen_in(None)
    wrong = (("crowdin=3", "did you mean 'crowding'"), ("crowding=0", "from 1"), ("crowding=x", "is no int"))
    for said, why in (*wrong, ("crowding=1,crowding=2", "given twice")):
        with pytest.raises(InputError, match=why):
            chosen_in(said)
