"""What the GPUs of a plan draw at its rate."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.cli.main import run
from disagg_sim.facts.load import load_power
from disagg_sim.physics import power
from disagg_sim.planning.energy import drawn

LENGTHS = ds.lengths(2048, 256)


@pytest.fixture(scope="module")
def designs():
    plan = ds.plan("llama_3_1_8b", "h200_sxm", LENGTHS, tpot="20 ms", rate=40)
    assert plan.best is not None
    assert plan.other is not None
    return plan.best, plan.other


def test_gpus_whose_kernels_draw_nothing_draw_idle_power(designs, monkeypatch):
    spec = load_power("h200_sxm")
    nothing = {"base": 0.0, "compute": 0.0, "memory": 0.0}
    quiet = replace(spec, laws=tuple(replace(law, **nothing) for law in spec.laws))
    monkeypatch.setattr(power, "load_power", lambda _: quiet)
    for design in designs:
        assert drawn(design).watts == pytest.approx(design.gpus * 700 * spec.idle)


def test_both_modes_draw_between_waiting_and_the_tdp(designs):
    idle = 700 * load_power("h200_sxm").idle
    for design in designs:
        assert design.gpus * idle < drawn(design).watts < design.gpus * 700


def test_a_plan_at_its_full_rate_draws_what_the_frontier_says(designs):
    """A disaggregated design at the rate of its slower pool, and the same pools as a row of a table."""
    design = next(each for each in designs if each.mode == "disaggregated")
    prefill, decode = design.pools
    grids = (
        ds.prefill_grid(prefill.setup, prefill.mapping, LENGTHS, batch=[prefill.batch]),
        ds.decode_grid(decode.setup, decode.mapping, LENGTHS, batch=[max(1, round(decode.sequences))]),
    )
    row = ds.with_energy(ds.disaggregated(*grids, gpu_cap=64)).iloc[0]
    own = drawn(design)
    per_request = 2048 * row["prefill_joules_per_prompt_token"] + 256 * row["decode_joules_per_output_token"]
    idle = own.watts / design.rate - per_request  # what pools draw that wait, at a rate below the full one
    assert 0 < idle < 0.5 * own.watts / design.rate


def test_the_plan_tells_energy_only_where_it_is_asked_for(capsys):
    ask = ["plan", "--model", "llama_3_1_8b", "--system", "h200_sxm", "--isl", "2048", "--osl", "256", "--rate", "40"]
    assert run(ask) == 0
    plain = capsys.readouterr().out
    assert run([*ask, "--energy"]) == 0
    told = capsys.readouterr().out
    assert run([*ask, "--energy", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "drawn" not in plain
    assert "fitted: power of kernels" in told
    assert answer["drawn"]["rests_on"] == "fitted"
    assert f"{answer['drawn']['watts']:,.0f} W of all GPUs" in told
    assert answer["drawn"]["facility_watts"] > answer["drawn"]["watts"]
