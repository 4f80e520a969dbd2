"""``per: joule``: frontiers over what GPUs draw, and a row of one taken apart."""

import json

import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.certainty.energy import ENERGY_COLUMNS
from disagg_sim.cli.main import run
from disagg_sim.errors import SpecError
from disagg_sim.sweep.spec import load_sweep

SWEEP = """
name: thrift
models: [llama_3_1_8b]
systems: {h200_sxm: fp8}
traffic: [{isl: 1024, osl: 128}]
modes: [disaggregated, colocated]
limits: {max_gpus: 2, gpu_cap: 16}
per: joule
"""


@pytest.fixture(scope="module")
def results(swept, tmp_path_factory):
    return swept(SWEEP, tmp_path_factory.mktemp("thrift") / "out")


def test_the_frontier_is_the_best_in_tokens_for_a_joule_drawn(results):
    front = pd.read_csv(results / "frontier.csv")
    for _, rows in front.groupby("mode"):
        assert rows["tokens_per_s_per_user"].is_monotonic_increasing
        assert rows["tokens_per_drawn_joule"].is_monotonic_decreasing
    assert (front["tokens_per_drawn_joule"] > front["tokens_per_joule"]).all()  # no GPU draws its TDP


def test_a_sweep_says_what_the_notebook_interface_says(results):
    front = pd.read_csv(results / "frontier.csv")
    again = ds.with_energy(front)
    for column in ENERGY_COLUMNS:
        if column.dtype == "float64":
            assert again[column.name].to_numpy() == pytest.approx(front[column.name].to_numpy(), rel=1e-6, abs=1e-6)


def test_energy_of_the_parts_of_a_row_is_that_of_its_pass(results, capsys):
    front = pd.read_csv(results / "frontier.csv")
    row = int(front.index[front["mode"] == "disaggregated"][0])
    capsys.readouterr()
    assert run(["explain", str(results), "--row", str(row), "--energy", "--json"]) == 0
    parts = pd.DataFrame(json.loads(capsys.readouterr().out)["energy"])
    per_gpu = parts.groupby("step")["joules"].sum()
    one = front.loc[row]
    tokens = one["decode_batch"] * 128 / 127  # an output token of a request is 127/128 of a step
    decode = per_gpu["decode step"] * one["decode_gpus"] / tokens
    prefill = per_gpu["prefill pass"] * one["prefill_gpus"] / one["prefill_batch"] / 1024
    assert decode == pytest.approx(one["decode_joules_per_output_token"], rel=1e-6)
    assert prefill == pytest.approx(one["prefill_joules_per_prompt_token"], rel=1e-6)


def test_a_system_of_unknown_power_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("disagg_sim.facts.load.load_power", lambda _: None)
    (tmp_path / "thrift.yaml").write_text(SWEEP)
    with pytest.raises(SpecError, match=r"per: 'joule' needs hw_specs/power/h200_sxm\.yaml, which does not exist; use"):
        load_sweep(str(tmp_path / "thrift.yaml"))
