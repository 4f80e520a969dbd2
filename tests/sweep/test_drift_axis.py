"""The drift of the popularity of experts as an axis of sweeps: by a scan of periods, its limits, and off."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.certainty.designs import cycle_of, scores_of, times_of
from disagg_sim.certainty.grid_points import design_of
from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.cli.main import run
from disagg_sim.domain import SHARDING
from disagg_sim.errors import SpecError
from disagg_sim.facts.load import load_system
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.launch.engines import sglang_flags
from disagg_sim.launch.weights import Weights
from disagg_sim.launch.workers import workers_of
from disagg_sim.physics.kv_tiers import load_time, tier_of
from disagg_sim.physics.passes.prompts import prompt_pass
from disagg_sim.physics.rebalance import loss_at, rebalancing, staleness
from disagg_sim.search.aging import aged
from disagg_sim.sweep.cases import cases_of
from disagg_sim.sweep.spec import load_sweep

SWEEP = """
name: {name}
models: [{model}]
systems: {{h200_sxm: fp8}}
traffic: [{{isl: 4096, osl: 1024}}]
limits: {{max_gpus: 8, gpu_cap: 64, max_redundant_experts: 16}}
expert_skew: 1.0
{more}
"""
DRIFT = 600.0
WEIGHTS = Weights(checkpoint="deepseek-ai/DeepSeek-R1")


def written(folder: Path, name: str, more: str, model: str = "deepseek_r1") -> str:
    (folder / f"{name}.yaml").write_text(SWEEP.format(name=name, more=more, model=model))
    return str(folder / f"{name}.yaml")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("drift"), {}
    for name, more in {"plain": "", "drifts": f"popularity_drift_s: [none, {DRIFT}, 1.0e+9]"}.items():
        found[name] = folder / name
        asked = ["sweep", written(folder, name, more), "--out", str(found[name]), "--jobs", "1", "--no-figures"]
        assert run(asked) == 0
    return found


@pytest.fixture(scope="module")
def table(results: dict[str, Path]) -> pd.DataFrame:
    return pd.read_csv(results["drifts"] / "frontier.csv")


def at_drift(table: pd.DataFrame, drift: float) -> pd.DataFrame:
    return table[table["popularity_drift_s"] == drift].reset_index(drop=True)


def test_without_drift_a_case_has_the_numbers_of_the_sweep_without_the_key(
    results: dict[str, Path], table: pd.DataFrame
) -> None:
    plain, off = pd.read_csv(results["plain"] / "frontier.csv"), at_drift(table, math.inf)
    assert off[plain.columns].drop(columns="case").equals(plain.drop(columns="case"))
    assert np.isinf(off[["prefill_rebalance_s", "decode_rebalance_s"]].to_numpy()).all()


def test_a_step_is_longer_by_the_least_loss_of_all_periods(table: pd.DataFrame) -> None:
    """Of 20,000 periods from a second to 30 time constants the best one, against the step with copies just placed."""
    copied = at_drift(table, DRIFT)
    row = copied[copied["decode_redundant_slots"] > 0].iloc[0]
    at = ds.setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew1")
    mapping = ds.Mapping(**{name: int(row[f"decode_{name}"]) for name in SHARDING})
    lengths, batch = ds.lengths(4096, 1024), int(row["decode_batch"])
    fresh = float(ds.decode_grid(at, mapping, lengths, batch=[batch]).latency[0, 0])
    found = rebalancing(at, mapping, tokens=float(batch), seconds=fresh, drift=DRIFT)
    periods = np.geomspace(1.0, 30 * DRIFT, 20_000)
    losses = loss_at(periods, float(found.move), float(found.growth), DRIFT)
    assert row["ttl_s"] / fresh - 1.0 == pytest.approx(losses.min(), rel=1e-4)
    assert row["decode_rebalance_s"] == pytest.approx(periods[losses.argmin()], rel=0.05)  # of the longer step


def test_faster_drift_is_never_better_and_slow_drift_is_none(table: pd.DataFrame) -> None:
    still, slow, fast = (at_drift(table, drift) for drift in (math.inf, 1e9, DRIFT))
    for better, worse in ((still, slow), (slow, fast)):
        for x, y in worse[["tokens_per_s_per_user", "tokens_per_s_per_gpu"]].to_numpy():
            reached = better[better["tokens_per_s_per_user"] >= x * (1 - 1e-9)]["tokens_per_s_per_gpu"].max()
            assert y <= reached * (1 + 1e-9)
    assert slow["tokens_per_s_per_gpu"].max() == pytest.approx(still["tokens_per_s_per_gpu"].max(), rel=1e-3)
    assert fast["tokens_per_s_per_gpu"].max() < still["tokens_per_s_per_gpu"].max()


def test_where_no_move_pays_copies_lie_anywhere() -> None:
    """Within a second all placements are stale: a step takes what it takes with copies anywhere."""
    at = ds.setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew1")
    copied = ds.Mapping(dp_attn=8, ep=8, redundant_slots=8)
    grid = ds.decode_grid(at, copied, ds.lengths(4096, 1024), batch=[1024])
    found = rebalancing(at, copied, tokens=1024.0, seconds=float(grid.latency[0, 0]), drift=1.0)
    assert np.isinf(found.period)
    ratio = aged(grid, 1.0).latency[0, 0] / grid.latency[0, 0]
    assert ratio == pytest.approx(1.0 + float(found.growth))
    assert ratio > 1.0
    assert aged(grid, math.inf) is grid


def test_parts_of_a_row_add_up_with_its_age(results: dict[str, Path], table: pd.DataFrame, capsys) -> None:
    rows = table[(table["popularity_drift_s"] == DRIFT) & (table["decode_redundant_slots"] > 0)]
    capsys.readouterr()
    assert run(["explain", str(results["drifts"]), "--row", str(rows.index[0]), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for name in ("ttl", "ftl"):
        parts = [part for part in told["operators"] if part["latency"] == name]
        assert sum(part["seconds"] for part in parts) == pytest.approx(rows[f"{name}_s"].iloc[0], rel=1e-9)
    ages = {part["latency"]: part["share"] for part in told["operators"] if "age" in part["operator"]}
    assert 0 < ages["ttl"] < 0.2


@pytest.fixture(scope="module", params=["colocated", "piggyback"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    folder = tmp_path_factory.mktemp(request.param)
    more = f"popularity_drift_s: [none, {DRIFT}, 1.0e+9]\nmodes: [{request.param}]"
    asked = ["sweep", written(folder, "both", more), "--out", str(folder / "out"), "--jobs", "1", "--no-figures"]
    assert run(asked) == 0
    return folder / "out", pd.read_csv(folder / "out" / "frontier.csv")


def test_an_instance_of_both_phases_has_one_period(shared: tuple[Path, pd.DataFrame], capsys) -> None:
    """Slow drift costs nothing, fast drift does; rows timed again have their numbers, and parts add up to them."""
    out, table = shared
    still, slow, fast = (at_drift(table, drift) for drift in (math.inf, 1e9, DRIFT))
    assert slow["tokens_per_s_per_gpu"].max() == pytest.approx(still["tokens_per_s_per_gpu"].max(), rel=1e-3)
    copied = fast[fast["decode_redundant_slots"] > 0]
    assert copied["decode_rebalance_s"].between(10.0, 10 * DRIFT).all()
    assert copied["prefill_rebalance_s"].equals(copied["decode_rebalance_s"])
    assert fast["tokens_per_s_per_gpu"].max() < still["tokens_per_s_per_gpu"].max()
    capsys.readouterr()
    row = table.index[(table["popularity_drift_s"] == DRIFT) & (table["decode_redundant_slots"] > 0)][0]
    assert run(["explain", str(out), "--row", str(row), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for name in ("ttl", "ftl"):
        parts = [part for part in told["operators"] if part["latency"] == name]
        assert sum(part["seconds"] for part in parts) == pytest.approx(table.loc[row, f"{name}_s"], rel=1e-9)
    ages = {part["latency"]: part["share"] for part in told["operators"] if "age" in part["operator"]}
    assert 0 < ages["ttl"] < 0.2


def test_files_of_a_row_move_copies_as_often_as_it_says(table: pd.DataFrame) -> None:
    """Periods over the time of a decode step and of a pass with copies just placed; never, where no move pays."""
    copied = at_drift(table, DRIFT)
    row = copied[copied["decode_redundant_slots"] > 0].iloc[[0]]
    prefill, decode = workers_of(row)
    at, one = ds.setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew1"), row.iloc[0]
    grid = ds.decode_grid(at, decode.mapping, ds.lengths(4096, 1024), batch=[decode.batch])
    assert decode.moved_after == round(one["decode_rebalance_s"] * one["decode_pp"] / grid.latency[0, 0])
    assert sglang_flags(decode, WEIGHTS)["--eplb-rebalance-num-iterations"] == decode.moved_after
    assert (prefill.moved_after is None) == (one["prefill_redundant_slots"] == 0)
    never = workers_of(row.assign(decode_rebalance_s=math.inf))[-1]
    assert never.moved_after == 0
    assert "--enable-eplb" not in sglang_flags(never, WEIGHTS)
    still = at_drift(table, math.inf)
    assert workers_of(still[still["decode_redundant_slots"] > 0].iloc[[0]])[-1].moved_after is None


def test_an_instance_of_both_phases_counts_its_steps_and_passes(shared: tuple[Path, pd.DataFrame]) -> None:
    """Between two moves: the steps that its requests need, and at most a pass for each of them where decode waits."""
    _, table = shared
    copied = at_drift(table, DRIFT)
    row = copied[(copied["decode_redundant_slots"] > 0) & (copied["hold_steps"] == 0)].iloc[[0]]
    (worker,), one = workers_of(row), row.iloc[0]
    requests = one["request_rate_per_s"] * one["decode_rebalance_s"]
    steps = requests * 1023 / one["decode_batch"] * one["decode_pp"]  # a micro-batch a stage
    assert steps <= worker.moved_after * 1.05  # of the longer steps
    assert worker.moved_after <= 1.05 * (steps + requests * (one["mode"] == "colocated"))


@pytest.mark.parametrize(("serve", "measure"), [(ds.colocated, "mean"), (ds.piggyback, "mean"), (ds.colocated, "p99")])
def test_steps_and_passes_age_together_at_the_best_of_all_periods(serve, measure) -> None:
    """Of a scan of periods of the whole cycle, whose parts grow by themselves."""
    at, copied = ds.setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew1"), ds.Mapping(dp_attn=8, ep=8)
    copied, lengths = replace(copied, redundant_slots=16), ds.lengths(4096, 1024)
    options = ds.Colocation(batch=(512,), prefill_batch=(8,), every_step_mixed=True, ttl_measure=measure)
    asked = options, replace(options, popularity_drift=DRIFT)
    (still, drifts) = (serve(at, copied, lengths, options=each) for each in asked)
    (fresh,) = designs_of(still, Origin(lengths=lengths))
    cycle = cycle_of(fresh, times_of(fresh))
    more = [float(np.squeeze(staleness(at, copied, tokens)[0])) for tokens in (cycle.decodes, cycle.piece)]
    decoding, spent = float(np.squeeze(cycle.steps * cycle.step)), float(np.squeeze(cycle.spent))
    growth = (decoding * more[0] / float(cycle.step[0]) + spent * more[1] / float(cycle.stage[0])) / (decoding + spent)
    move = float(np.squeeze(staleness(at, copied, 1.0)[1]))
    losses = loss_at(np.geomspace(1.0, 30 * DRIFT, 20_000), move, growth, DRIFT)
    longer = {name: drifts[name].item() / still[name].item() - 1.0 for name in ("ttl_mean_s", "ftl_s", "ttl_s")}
    assert longer["ttl_mean_s"] == pytest.approx(losses.min(), rel=1e-3)
    assert min(longer.values()) > 0


TIERED = """
name: tiered
models: deepseek_r1
systems: {h200_sxm: fp8}
modes: [disaggregated, colocated, piggyback]
limits: {max_gpus: 8, gpu_cap: 16, layouts: served, max_redundant_experts: 8}
traffic: [{isl: 2048, osl: 256, cached: {share: 0.9, tiers: {hbm: 0.5, dram: 0.5}}}]
expert_skew: 1.5
popularity_drift_s: 6000
"""


@pytest.mark.long
def test_points_whose_experts_age_have_error_bars_and_a_report(tmp_path: Path, capsys) -> None:
    """Points of every mode are timed again with their age, also where pasts come from DRAM: medians lie beside them."""
    (tmp_path / "tiered.yaml").write_text(TIERED)
    asked = ["sweep", str(tmp_path / "tiered.yaml"), "--out", str(tmp_path / "out"), "--jobs", "1", "--no-figures"]
    assert run([*asked, "--uncertainty"]) == 0
    front, bars = (pd.read_csv(tmp_path / "out" / f"{name}.csv") for name in ("frontier", "uncertainty"))
    assert set(front[front["decode_redundant_slots"] > 0]["mode"]) == {"disaggregated", "colocated", "piggyback"}
    assert set(bars["mode"]) == set(front["mode"])
    for name in ("ttl", "ftl"):
        assert (bars[f"{name}_p50_s"] / bars[f"{name}_s"]).between(0.9, 1.15).all()
    assert run(["report", str(tmp_path / "out"), "--no-breakdowns"]) == 0
    capsys.readouterr()


def test_loads_of_pasts_do_not_age() -> None:
    """Every step mixed, a first token is later by the age of its steps alone: its past comes from DRAM as before."""
    at, copied = ds.setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew1"), ds.Mapping(dp_attn=8, ep=8)
    half = Reuse(share=ConstantShare(share=0.5), tiers=(("dram", 1.0),))
    copied, lengths = replace(copied, redundant_slots=16), ds.lengths(8192, 256, cached=half)
    options = ds.Colocation(batch=(512,), every_step_mixed=True, ttl_measure="mean")
    still, drifts = (
        ds.piggyback(at, copied, lengths, options=each) for each in (options, replace(options, popularity_drift=DRIFT))
    )
    load = float(np.squeeze(load_time(at, copied, batch=8, past=4096.0, tier=tier_of(at.system, "dram"))))
    longer = drifts["ttl_mean_s"].item() / still["ttl_mean_s"].item()
    assert longer > 1.0005
    assert load > 1e-3 * still["ftl_s"].item()
    assert drifts["ftl_s"].item() - load == pytest.approx(longer * (still["ftl_s"].item() - load), rel=1e-9)


@pytest.mark.parametrize("gigabytes", [5.0, 1.0])
def test_loads_of_pasts_do_not_age_in_pools_of_prefill(gigabytes: float) -> None:
    """A pass is longer by the age of what it computes; an SSD of 1 GB/s feeds slower than it computes, aged or not."""
    system = load_system("h200_sxm")
    ssd = replace(system.kv_tiers["ssd"], bandwidth=gigabytes * 1e9)
    system = replace(system, kv_tiers=dict(system.kv_tiers) | {"ssd": ssd})
    at, copied = ds.setup("deepseek_r1", system, "fp8", "measured_skew1"), ds.Mapping(dp_attn=8, ep=8)
    most = Reuse(share=ConstantShare(share=0.9), tiers=(("ssd", 1.0),))
    copied, batch = replace(copied, redundant_slots=16), np.array([8.0, 32.0])
    still = ds.prefill_grid(at, copied, ds.lengths(8192, 256, cached=most), batch=batch.astype(int))
    drifts = aged(still, DRIFT)
    past = still.lengths.cached.mean_past
    tier = tier_of(at.system, "ssd")
    load = np.array([float(np.squeeze(load_time(at, copied, batch=each, past=past, tier=tier))) for each in batch])
    computed, later = (grid.latency[0] - load for grid in (still, drifts))
    fresh = prompt_pass(at, copied, batch=batch, isl=8192.0, past=past, chunk_tokens=0, tier=None, mla_form="naive")
    assert computed == pytest.approx(np.asarray(fresh.ftl), rel=1e-9)
    growth = rebalancing(at, copied, tokens=batch * (8192.0 - past), seconds=np.asarray(fresh.busy), drift=DRIFT).loss
    assert later == pytest.approx(computed * (1.0 + growth), rel=1e-9)
    assert (growth > 1e-3).all()
    assert (load < fresh.busy).all() == (gigabytes == 5.0)
    slower = np.maximum(np.asarray(fresh.busy) * (1.0 + growth), load)
    assert drifts.request_rate[0] == pytest.approx(batch / slower, rel=1e-9)
    for column in (0, 1):  # timed again as designs
        one = replace(design_of(still, 0, column), drift=DRIFT)
        scores = scores_of(one, times_of(one))
        assert float(scores.ftl[0]) == pytest.approx(drifts.latency[0, column], rel=1e-9)
        assert float(scores.throughput[0]) == pytest.approx(drifts.request_rate[0, column] * 8192 / 8, rel=1e-9)


def test_further_pools_have_no_drift(capsys) -> None:
    """One line: attention and feed-forward ranks, or an encode pool, are planned with experts just placed."""
    asked = ["plan", "--model", "deepseek_r1", "--system", "h200_sxm", "--isl", "2048", "--osl", "256", "--rate", "10"]
    asked += [
        "--expert-skew",
        "1",
        "--max-redundant-experts",
        "16",
        "--popularity-drift",
        "600",
        "--pools",
        "prefill,attention,ffn",
    ]
    assert run(asked) == 2
    assert "popularity_drift: 600.0 is of plans of prefill and decode alone" in capsys.readouterr().err


def test_where_experts_are_equally_popular_there_is_one_case(tmp_path: Path) -> None:
    text = written(tmp_path, "even", f"popularity_drift_s: [60, {DRIFT}]").replace(".yaml", "")
    keys = Path(f"{text}.yaml").read_text().replace("expert_skew: 1.0", "expert_skew: [0, 1.0]")
    Path(f"{text}.yaml").write_text(keys)
    assert [case.served.drift for case in cases_of(load_sweep(f"{text}.yaml"))] == [math.inf, 60.0, DRIFT]


def test_models_without_experts_have_one_case(tmp_path: Path) -> None:
    text = written(tmp_path, "dense", f"popularity_drift_s: [none, {DRIFT}]", "deepseek_r1, llama_3_1_8b")
    assert [case.model for case in cases_of(load_sweep(text))] == ["deepseek_r1"] * 2 + ["llama_3_1_8b"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("popularity_drift_s: 0", "popularity_drift_s: 0 is out of range"),
        (
            "popularity_drift_s: 60\nexpert_skew: 0",
            "acts with 'expert_skew' and 'limits.max_redundant_experts' above 0",
        ),
    ],
)
def test_faults_are_named(more: str, said: str, tmp_path: Path) -> None:
    text = SWEEP.format(name="wrong", more=more, model="deepseek_r1")
    (tmp_path / "wrong.yaml").write_text(text.replace("expert_skew: 1.0\n", "") if "expert_skew: 0" in more else text)
    with pytest.raises(SpecError) as caught:
        load_sweep(str(tmp_path / "wrong.yaml"))
    assert said in str(caught.value)
