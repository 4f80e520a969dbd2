"""The fit of an engine's host times finds numbers back that made the data."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from made_loads import latencies, made_lines, made_run

from disagg_sim.cli.main import run
from disagg_sim.domain import Sharding
from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.load import load_engine
from lab.calibration.served import engine_fit, left_out
from lab.calibration.served.cells import instance
from lab.calibration.served.engine_fit import EngineFit, exchange_rows, fit_engine, fit_exchange
from lab.calibration.served.evaluate import drain_factor, drain_factors, evaluate
from lab.calibration.served.rows import ServingRow, WorkerGroup

TRUE = replace(
    load_engine("vllm"),
    step_host=1.2e-3,
    sequence_host=2e-5,
    rank_host=4e-4,
    kernel_launch=0.0,
    request_host=0.05,
    prefill_stretch=1.1,
)


def row_of(tp: int, isl: float, concurrency: float) -> ServingRow:
    words = {"file": "x", "form": "nvidia_gap", "framework": "vllm", "model": "llama_3_1_70b", "recipe": "fp8_bf16kv"}
    sizes = {"workers": WorkerGroup(mapping=instance(tp)), "isl": isl, "osl": 1000.0, "concurrency": concurrency}
    return made_run(f"{tp}-{isl}-{concurrency}", **words, **sizes, quantities=latencies(tpot=1.0, ttft=1.0), waves=10.0)


def measured_as(rows: list[ServingRow], engine: EngineSpec, times: float = 1.0) -> list[ServingRow]:
    """Rows of TPOT and TTFT as a profile tells them, each so many times as long."""
    told = times * evaluate(rows, {"vllm": engine})["predicted"].to_numpy().reshape(-1, 2)
    return [
        replace(row, quantities=tuple(replace(q, measured=v) for q, v in zip(row.quantities, both, strict=True)))
        for row, both in zip(rows, told, strict=True)
    ]


@pytest.mark.long
def test_known_host_times_are_found_again(monkeypatch):
    """Without noise half of the steps lead there."""
    monkeypatch.setattr(engine_fit, "STEPS", 4)
    rows = [row_of(tp, isl, n) for tp in (2, 8) for isl in (500.0, 900.0) for n in (1.0, 32.0)]
    found = fit_engine(measured_as(rows, TRUE), "vllm")
    assert found.median_error < 0.01
    assert found.engine.request_host == pytest.approx(TRUE.request_host, rel=0.1)
    both = [each.step_host + 2 * each.rank_host for each in (found.engine, TRUE)]  # what a TP4 step takes
    assert both[0] == pytest.approx(both[1], rel=0.1)
    assert found.lines < 2 * len(rows)  # the held-out part is not seen
    assert found.files == (("x", sum(not row.held_out for row in rows)),)


LINES = """row_id,model,gpu_family,hardware,framework,mode,tp,pp,attention_dp,moe_tp,moe_ep,gemm_quant,precision,isl,\
osl,concurrency,ttft_mean_ms,tpot_mean_ms
a,meta-llama/Llama-3.1-8B,H100,h100,vllm,aggregated,1,1,0,0,0,,,1000,500,1,60,7.4
b,meta-llama/Llama-3.1-8B,H100,h100,vllm,aggregated,1,1,0,0,0,,,1000,600,2,65,7.6
c,meta-llama/Llama-3.1-8B,H100,h100,vllm,aggregated,1,1,0,0,0,,,1000,700,4,80,7.9
d,meta-llama/Llama-3.1-8B,H100,h100,vllm,aggregated,1,1,0,0,0,,,1000,800,4,80,7.9
"""


@pytest.mark.long
def test_the_command_writes_the_same_profile_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine_fit, "STEPS", 1)  # a fit that is not at its end is written, too
    (tmp_path / "runs.csv").write_text(LINES)
    written = []
    for name in ("first", "second"):
        out = tmp_path / name / "vllm.yaml"
        arguments = ["calibrate", "engine", str(tmp_path / "runs.csv"), "--engine", "vllm", "--out", str(out)]
        assert run([*arguments, "--date", "2026-01"]) == 0
        written.append(out.read_bytes())
    assert written[0] == written[1]
    assert "numbers of" in capsys.readouterr().out
    spec, shipped = load_engine(tmp_path / "first" / "vllm.yaml"), load_engine("vllm")
    assert "runs.csv" in spec.sources["step_host"]
    assert "data of 2026-01" in spec.sources["step_host"]
    assert (spec.chunk_tokens, spec.memory_utilisation) == (shipped.chunk_tokens, shipped.memory_utilisation)
    assert str(tmp_path) not in written[0].decode()


def test_the_stretch_of_the_expert_exchange_is_found_again():
    """Rows of attention DP with EP tell it, disaggregated or not; rows of TP are left aside, and nothing else moves."""
    true = replace(load_engine("sglang"), exchange_stretch=2.4)
    wide = replace(row_of(8, 900.0, 64.0), model="deepseek_r1", system="h200_sxm", engine="sglang", recipe="fp8")
    layouts = [Sharding(dp_attn=8, ep=8), Sharding(dp_attn=16, ep=16), Sharding(dp_attn=4, tp_ffn=4), instance(8)]
    rows = [replace(wide, osl=length, workers=WorkerGroup(mapping=one)) for one in layouts for length in (800.0, 900.0)]
    table = evaluate(rows, {"sglang": true})
    tpot = table[table["quantity"] == "tpot"]["predicted"]
    rows = [
        replace(row, quantities=(replace(row.quantities[0], measured=value),))
        for row, value in zip(rows, tpot, strict=True)
    ]
    told = exchange_rows(rows, "sglang")
    assert {row.workers.mapping.ep for row in told} == {8, 16}
    found = fit_exchange(rows, load_engine("sglang"))
    assert found.exchange_stretch == pytest.approx(2.4, abs=0.03)
    assert replace(found, exchange_stretch=2.4) == true
    assert fit_exchange([row for row in rows if row not in told], true) == true


def test_a_run_drains_for_longer_the_more_its_requests_differ():
    assert drain_factor(1, 10, 0.1) == pytest.approx(1.0)
    assert drain_factor(64, 10, 0.0) == pytest.approx(1.0)
    assert 1.0 < drain_factor(64, 10, 0.1) < 1.1
    assert drain_factor(64, 10, 0.3) > drain_factor(64, 10, 0.1) > drain_factor(64, 100, 0.1)
    assert drain_factors(np.array([1.0, 64.0]), 10, 0.1) == pytest.approx([1.0, drain_factor(64, 10, 0.1)])


def test_what_is_left_out_of_a_fit_is_all_that_is_judged(monkeypatch):
    """Points of one model are twice as slow as the profile that the fit without them finds, so half as long as run."""
    shown: list[set[str]] = []

    def fitted(rows, name, *, again, told):
        assert again
        assert isinstance(told, left_out.Nearby)
        shown.append({row.model for row in rows})
        return EngineFit(TRUE, (), 0, 0.0, ())

    monkeypatch.setattr(left_out, "fit_engine", fitted)
    monkeypatch.setattr(left_out, "LEAST", 2)
    both = [row_of(2, isl, n) for isl in (500.0, 900.0) for n in (1.0, 32.0)]
    both += [replace(row, model="llama_3_1_8b", row=f"small {row.row}") for row in both]
    *found, tpot, ttft = left_out.left_out(measured_as(both, TRUE, 2.0), "model")
    assert [(each.engine, each.value, each.points) for each in (tpot, ttft)] == [("all", "dense", 8)] * 2
    whole, *without = shown
    assert whole == {"llama_3_1_70b", "llama_3_1_8b"}
    assert [whole - models for models in without] == [{each.value} for each in found[::2]]
    assert [(each.engine, each.quantity, each.points) for each in found] == [
        ("vllm", "tpot", 4),
        ("vllm", "ttft", 4),
    ] * 2
    assert [each.median_error for each in found] == pytest.approx([0.5] * 4)
    assert [each.refitted for each in found] == pytest.approx([0.5] * 4)


def test_times_near_a_profile_are_linear_in_its_numbers():
    """Numbers moved together by half of what the slopes are taken over: TPOT, TTFT, rate within 1 % of a forecast."""
    shipped = load_engine("vllm")
    rate = replace(latencies(throughput=1.0)[0], basis="total")
    told = (*latencies(tpot=1.0, ttft=1.0), rate)
    rows = [replace(row_of(tp, 900.0, n), quantities=told) for tp in (2, 8) for n in (1.0, 32.0)]
    near = left_out.Nearby(rows, shipped)
    moved = replace(shipped, **{name: getattr(shipped, name) + step / 2 for name, step in left_out.MOVES.items()})
    exact = engine_fit.forecast(rows, moved)
    assert near(rows, moved)["predicted"].to_numpy() == pytest.approx(exact["predicted"].to_numpy(), rel=0.01)
    assert (exact["predicted"] / near.table["predicted"] - 1.0).abs().max() > 0.1
    last = near(rows[::-1][:2], moved)
    assert last["row"].tolist() == [row.row for row in rows[::-1][:2] for _ in row.quantities]
    assert last["relative_error"].to_numpy() == pytest.approx(last["predicted"] / last["measured"] - 1.0)


def test_an_engine_that_nobody_ran_has_the_mean_of_the_others_numbers():
    """Two others: the root of the product of each number that is fitted; what is documented stays its own."""
    found, others = left_out.without_fit("vllm"), [load_engine(name) for name in ("sglang", "trtllm")]
    for name in ("exchange_stretch", *engine_fit.FITTED):
        one, other = (getattr(each, name) for each in others)
        assert getattr(found, name) ** 2 == pytest.approx(one * other), name
    assert (found.name, found.chunk_tokens, found.mixed_steps) == ("vllm", load_engine("vllm").chunk_tokens, True)


def made_errors(errors: list[float]) -> pd.DataFrame:
    """One point an error of TPOT; three lines more that are not judged, and one point too few of TTFT."""
    lines = [{"point": f"p{n}", "predicted": 1.0 + each} for n, each in enumerate(errors)]
    spared = [{"saturated": True}, {"load": "static"}, {"evaluated": False}]
    lines += [{"point": f"far {n}", "predicted": 10.0, **each} for n, each in enumerate(spared)]
    return made_lines(*lines, *({**line, "quantity": "ttft"} for line in lines[:9]))


def test_errors_of_what_is_left_out_are_those_below_saturation(monkeypatch):
    """Of 0, 0.1, ..., 0.9 and -1.0: median 0.5 of their sizes, p90 0.9, bias 0.4; as shipped and refitted 0.2."""
    errors = [-1.0, *(n / 10 for n in range(10))]

    shipped = load_engine("vllm")
    far = left_out.without_fit("vllm")
    monkeypatch.setattr(left_out, "forecast", lambda _, engine: made_errors(errors if engine == far else [0.2] * 11))
    monkeypatch.setattr(left_out.Nearby, "lines_of", lambda near, _: np.arange(len(near.table)))
    monkeypatch.setattr(left_out, "fit_engine", lambda *_, again, told: EngineFit(shipped, (), 0, 0.0, ()))
    (found,) = left_out.left_out([row_of(2, isl, 1.0) for isl in np.arange(100.0, 900.0, 100.0)], "engine")
    assert found[:4] == ("vllm", "vllm", "tpot", 11)
    assert found[4:] == pytest.approx((0.2, 0.2, 0.5, 0.9, 0.4))
    assert not list(left_out.left_out([row_of(2, 100.0, 1.0)], "model"))  # no other model to fit by


def test_a_fit_of_nearly_the_same_rows_starts_at_the_shipped_numbers(monkeypatch):
    """Steps of the host take ten times the shipped number, TPOT 8 % more: 4 steps of at most 7 evaluations go there."""
    shipped = load_engine("vllm")
    true = replace(shipped, step_host=1.5e-3, request_host=0.05)
    rows = [row_of(tp, isl, n) for tp in (2, 8) for isl in (500.0, 900.0) for n in (1.0, 32.0)]
    tried = []

    def noted(rows, engines):
        tried.append(engines["vllm"])
        return evaluate(rows, engines)

    monkeypatch.setattr(engine_fit, "evaluate", noted)
    found = fit_engine(measured_as(rows, true), "vllm", again=True)
    for name, (least, _, most) in engine_fit.FITTED.items():
        assert getattr(tried[0], name) == pytest.approx(getattr(shipped, name), abs=1.1e-3 * (most - least)), name
    assert len(tried) <= 4 * 7 + 2
    assert found.median_error < 0.03
    assert 2 * shipped.step_host < found.engine.step_host < true.step_host


def test_two_numbers_alone_are_fitted_to_ttft_of_all_loads():
    """At 32 requests a fit of all numbers would not look at TTFT; the others stay as they are."""
    true = replace(load_engine("vllm"), prefill_stretch=1.32, request_host=0.035)
    rows = [row_of(tp, isl, 32.0) for tp in (2, 8) for isl in (500.0, 900.0, 1300.0)]
    found = fit_engine(measured_as(rows, true), "vllm", only=["prefill_stretch", "request_host"])
    assert found.fitted == ("prefill_stretch", "request_host")
    assert found.engine.prefill_stretch == pytest.approx(1.32, abs=0.01)
    assert found.engine.request_host == pytest.approx(0.035, abs=0.002)
    assert replace(found.engine, prefill_stretch=1.32, request_host=0.035) == true


def test_the_command_writes_what_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(left_out, "LEAST", 4)
    (tmp_path / "runs.csv").write_text(LINES)
    arguments = ["validate", "serving", str(tmp_path / "runs.csv"), "--leave-out", "engine"]
    assert run([*arguments, "--out", str(tmp_path / "out")]) == 0
    table = pd.read_csv(tmp_path / "out" / "left_out.csv")
    assert table.iloc[:, :4].to_numpy().tolist() == [["vllm", "vllm", "tpot", 4]]
    assert "Each engine left out of the fit in turn" in capsys.readouterr().out
