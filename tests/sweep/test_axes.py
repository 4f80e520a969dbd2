"""Axes of a sweep: what each does to a case, limits of links, further pools, and names of cases."""

import json
from dataclasses import replace
from fractions import Fraction
from math import inf
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.certainty.rows import rescore
from disagg_sim.cli.main import run as link_run
from disagg_sim.domain import Sharding
from disagg_sim.errors import InfeasibleError, InputError
from disagg_sim.physics.kv_transfer import KvLayout, kv_hand_over
from disagg_sim.physics.setup import setup
from disagg_sim.report.page.sweep import sweep_content
from disagg_sim.serving.points import pareto_front
from disagg_sim.serving.pool_frontier import GPUS
from disagg_sim.sweep.cases import cases_of
from disagg_sim.sweep.kv_links import LINK_COLUMNS, classes_of, handed_over, takers_of
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.results import SweepResult
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import MODES, ColocatedOptions, PointLimits, PoolSystems, SweepSpec, load_sweep, same_system
from disagg_sim.sweep.store import RunListener
from disagg_sim.sweep.traffic import Traffic

X, Y = "tokens_per_s_per_user", "tokens_per_s_per_gpu"
SMALL = SweepSpec(
    source="trial.yaml",
    name="trial",
    models=("llama_3_1_8b",),
    pools=(same_system("h100_sxm", "bf16"),),
    traffic=(Traffic(isl=2048, osl=256),),
    limits=(PointLimits(max_gpus=8),),
)


def run(spec: SweepSpec, root: Path, listener: RunListener | None = None) -> SweepResult:
    return run_sweep(plan_sweep(spec), root, jobs=1, listener=listener or Mock())


def left_out(root: Path, reason: str) -> list[tuple[str, str]]:
    """(case, mode) of the rows of ``infeasible.csv`` with this reason."""
    table = pd.read_csv(root / "infeasible.csv").query("reason == @reason")
    assert not table.isna().any().any()
    return list(zip(table["case"], table["mode"], strict=True))


def fronts(result: SweepResult) -> list[pd.DataFrame]:
    """Frontier of each case and mode, in order."""
    return [mode.frontier for case in result.cases for mode in case.modes]


def reaches(front: pd.DataFrame, other: pd.DataFrame, *, y: str = Y) -> bool:
    """Whether ``front`` is nowhere below ``other``."""
    return all(
        front[front[X] >= x * (1 - 1e-9)][y].max() >= value * (1 - 1e-9)
        for x, value in zip(other[X], other[y], strict=True)
    )


def test_names_tell_every_case_apart_and_show_what_varies():
    spec = replace(
        SMALL,
        models=("llama_3_1_8b", "deepseek_r1"),
        traffic=(Traffic(isl=2048, osl=256), Traffic(isl=6654, osl=740, law="log_normal_4096_512")),
        limits=tuple(PointLimits(ftl_s=ftl, nic_limit=nic) for ftl in (1.0, 10.0) for nic in (inf, 50e9)),
        ctx_gen_ratios=(None, Fraction(1, 2), Fraction(1, 3)),
        nvlink_domains=(None, 72),
        mla_forms=("auto", "naive"),
        sharing=ColocatedOptions(ttl_measure="p99", every_step_mixed=True),
    )
    names = [case.name for case in cases_of(spec)]
    assert len(names) == len(set(names)) == 2 * 4 * 3 * 2 * (1 + 2)
    assert names[0] == (
        "llama_3_1_8b-h100_sxm-bf16-measured-2048-256-ftl1-nic_none-ratio_optimal-domain_own-ttl_p99-every_step_mixed"
    )
    assert names[-1] == (
        "deepseek_r1-h100_sxm-bf16-measured-log_normal_4096_512-ftl10-nic50-ratio1to3-domain72-mla_naive"
        "-ttl_p99-every_step_mixed"
    )
    assert [case.name for case in cases_of(replace(SMALL, limits=(PointLimits(),)))] == [
        "llama_3_1_8b-h100_sxm-bf16-measured-2048-256"
    ]


def test_each_mode_says_what_stands_in_its_way(tmp_path):
    spec = replace(
        SMALL, modes=MODES, limits=(PointLimits(max_gpus=8, ftl_s=1e-4), PointLimits(max_gpus=8, ttl_s=1e-6))
    )
    slow_first, slow_steps = run(spec, tmp_path).cases
    for case, latency in ((slow_first, "FTL"), (slow_steps, "TTL")):
        told = dict(case.verdicts)
        assert list(told) == list(MODES)
        for text in told.values():
            assert f"meets the {latency} limit of" in text
            assert f"; the best {latency} is 0.0" in text
        assert not len(case.found)
    with pytest.raises(InfeasibleError, match="no case has a result"):
        run(spec, tmp_path).require()
    table = pd.read_csv(tmp_path / "infeasible.csv").query("reason == 'no result'")
    assert table["mode"].tolist() == [*MODES, *MODES]
    nowhere = run(replace(SMALL, models=("llama_3_1_405b",), modes=MODES[1:]), tmp_path / "large").cases[0]
    for mode in MODES[1:]:
        assert f"({mode}): the closest lacks" in dict(nowhere.verdicts)[mode]


def test_another_mode_leaves_the_stored_blocks_of_a_case_alone(tmp_path):
    run(SMALL, tmp_path)
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/*.parquet")}
    before = pd.read_csv(tmp_path / "frontier.csv")
    run(replace(SMALL, modes=MODES), tmp_path)
    assert {path: path.stat().st_mtime_ns for path in stored} == stored
    after = pd.read_csv(tmp_path / "frontier.csv")
    pd.testing.assert_frame_equal(after[after["mode"] == "disaggregated"], before, check_dtype=False)
    assert set(after["case"]) == set(before["case"])


def test_the_mla_form_is_a_case_of_models_that_have_one(tmp_path):
    spec = replace(
        SMALL,
        models=("llama_3_1_8b", "deepseek_r1"),
        pools=(same_system("b200_sxm", "nvfp4_fp8kv"),),
        traffic=(Traffic(isl=16384, osl=256),),
        mla_forms=("auto", "naive"),
        modes=("piggyback",),
        sharing=ColocatedOptions(every_step_mixed=True),
    )
    one, free, naive = fronts(run(spec, tmp_path))
    assert (set(one["mla_form"]), set(free["mla_form"]), set(naive["mla_form"])) == ({"auto"}, {"auto"}, {"naive"})
    assert set(one["mixed_step_share"]) == {1.0}
    assert reaches(free, naive)
    assert not reaches(naive, free)


@pytest.mark.parametrize(
    ("engine", "modes", "told"),
    [("vllm", ["colocated"], True), ("vllm", ["colocated", "piggyback"], False), ("sglang", ["colocated"], False)],
)
def test_colocated_alone_is_not_what_an_engine_does_that_mixes_prompts_into_decode_steps(tmp_path, engine, modes, told):
    noted = Mock()
    run(replace(SMALL, engine=engine, profile="measured", modes=tuple(modes)), tmp_path, noted)
    notes = [call.args[0] for call in noted.note.call_args_list if call.args[0].startswith("modes: ")]
    assert notes == ["modes: colocated stops decode for prompts; vLLM (V1) mixes both in a step: take engine"] * told


def test_pools_on_different_systems_per_usd(tmp_path):
    mixed = PoolSystems(system="h100_sxm", precision="bf16", prefill_system="a100_sxm_80gb", prefill_precision="bf16")
    spec = replace(
        SMALL, pools=(*SMALL.pools, mixed), modes=MODES, per="usd", prices=(("a100_sxm_80gb", 0.1), ("h100_sxm", 3.0))
    )
    noted, reason = Mock(), "pools that differ share no instance"
    same, both = run(spec, tmp_path, noted).cases
    notes = [call.args[0] for call in noted.note.call_args_list if "without" in call.args[0]]
    assert notes == [f"{both.plan.case.name}: without colocated and piggyback: {reason}"]
    assert left_out(tmp_path, reason) == [(both.plan.case.name, mode) for mode in MODES[1:]]
    assert [mode.mode for mode in same.modes] == list(MODES)
    assert [mode.mode for mode in both.modes] == ["disaggregated"]
    front = both.modes[0].frontier
    assert both.plan.case.name == (
        "llama_3_1_8b-a100_sxm_80gb-bf16-to-h100_sxm-bf16-measured-2048-256-instance8-per_usd"
    )
    assert (set(front["prefill_system"]), set(front["system"])) == ({"a100_sxm_80gb"}, {"h100_sxm"})
    prefill = front["prefill_instances"] * front["prefill_gpus"]
    cost = prefill * 0.1 + (front["total_gpus"] - prefill) * 3.0
    np.testing.assert_allclose(front["usd_per_hour"], cost, rtol=1e-12)
    tokens_per_usd = front[Y] * front["total_gpus"] * 3600 / cost
    np.testing.assert_allclose(front["tokens_per_usd"], tokens_per_usd, rtol=1e-12)
    assert len(pareto_front(front, throughput="tokens_per_usd")) == len(front)
    assert reaches(front, same.modes[0].frontier, y="tokens_per_usd")  # prefill at a thirtieth of the price


def test_each_limit_on_layouts_is_a_case_with_evidence_of_its_designs(tmp_path):
    """Llama-8B on H100 has served TP up to 8 GPUs; its pipelines nobody has."""
    several = tuple(
        replace(SMALL.limits[0], layouts=layouts, one_gpu_stages=single)
        for layouts, single in (("all", True), ("launchable", False), ("served", True))
    )
    result = run(replace(SMALL, limits=several), tmp_path)
    fronts = {case.plan.case.tags[1:]: case.modes[0].frontier for case in result.cases}
    assert set(fronts) == {
        ("all_layouts", "one_gpu_stages"),
        ("launchable_layouts", "larger_stages"),
        ("served_layouts", "one_gpu_stages"),
    }
    assert set(fronts["served_layouts", "one_gpu_stages"]["evidence"]) == {"served"}
    told = pd.read_csv(tmp_path / "infeasible.csv").groupby("reason")["count"].sum()
    assert told["pipeline stages of one GPU"] == 3
    assert told["launchable: PP of one-GPU stages never served"] == 3
    assert told["launchable: TP, PP never served"] == 3


@pytest.mark.long
def test_caches_and_prompts_are_shared_where_a_limit_asks_for_it(tmp_path):
    """Qwen3 30B has four KV heads, so two of eight GPUs would hold copies; a frontier read back gives its own times."""
    both = (PointLimits(max_gpus=8), PointLimits(max_gpus=8, max_dcp=8, max_pcp=2))
    spec = replace(SMALL, models=("qwen3_30b_a3b",), limits=both, traffic=(Traffic(isl=32_768, osl=2048),))
    at = setup("qwen3_30b_a3b", "h100_sxm", "bf16")
    decode, prefill = both[1].mappings(at), both[1].mappings(at, prefill=True)
    assert [set(degree.tolist()) for degree in (decode.dcp, decode.pcp)] == [{1, 2}, {1}]
    assert [set(degree.tolist()) for degree in (prefill.dcp, prefill.pcp)] == [{1}, {1, 2}]
    result = run(spec, tmp_path)
    assert [case.plan.case.tags[1:] for case in result.cases] == [("dcp1", "pcp1"), ("dcp8", "pcp2")]
    front = pd.read_csv(tmp_path / "frontier.csv")
    alone, shared = (front[front["max_dcp"] == most] for most in (1, 8))
    assert set(alone["decode_dcp"]) == {1}
    assert reaches(shared, alone)
    assert {1, 2} == set(shared["decode_dcp"]) | set(shared["prefill_pcp"])
    np.testing.assert_allclose(rescore(front)["ttl_s"], front["ttl_s"], rtol=1e-9)


SWEEP = """name: many
models: qwen3_5_35b_a3b
systems: {gb200_nvl72: nvfp4_fp8kv}
profile: ideal
traffic: [{isl: 4096, osl: 256}]
limits: {max_gpus: 4, gpu_cap: 32}
"""

IMAGES = "images: {images: 2, height: 1120, width: 1120}\n"


def ran(folder, text):
    (folder / "sweep.yaml").write_text(SWEEP + text)
    out = folder / "out"
    result = run_sweep(plan_sweep(load_sweep(str(folder / "sweep.yaml"))), out, jobs=1, listener=Mock(), overwrite=True)
    return result, out


def test_a_sweep_with_further_pools_writes_their_frontier_beside_that_of_two(tmp_path):
    result, out = ran(tmp_path, "pools: [encode, prefill, attention, ffn, decode]\n" + IMAGES)
    table = pd.read_csv(out / "pools.csv")
    assert len(table) == len(result.pools) > 3
    assert set(table["case"]) == {result.cases[0].plan.case.name}
    assert "encode-prefill-attention-ffn-decode" in table["case"][0]
    assert (table["encode_gpus"] > 0).all()
    shown = sweep_content(out, beside=0, breakdowns=False).tables["pools"]
    assert [name for name in GPUS if name in shown] == [name for name in GPUS if table[name].any()]
    both = result.frontier
    plain, out = ran(tmp_path, "")
    assert not (out / "pools.csv").exists()
    assert plain.pools.empty
    values = [name for name in plain.frontier if name != "case"]
    pd.testing.assert_frame_equal(both[values], plain.frontier[values])


@pytest.mark.parametrize("per", ["usd", "watt"])
def test_throughput_of_all_pools_is_counted_over_what_the_sweep_says(per, tmp_path):
    """Encode and prefill on a system that costs more: every row has the cost of its pools, and the front is over it."""
    pools = "pools: [encode, prefill, attention, ffn, decode]\n" + IMAGES
    prices = {"b200_sxm": 5.0, "h200_sxm": 2.0} if per == "usd" else {"b200_sxm": 1000.0, "h200_sxm": 700.0}
    text = SWEEP.replace("{gb200_nvl72: nvfp4_fp8kv}", "[{prefill: {b200_sxm: nvfp4_fp8kv}, decode: {h200_sxm: fp8}}]")
    own = f"prices: {{{', '.join(f'{name}: {price}' for name, price in prices.items())}}}\n" if per == "usd" else ""
    (tmp_path / "sweep.yaml").write_text(f"{text}{pools}per: {per}\n{own}")
    out = tmp_path / "out"
    run_sweep(plan_sweep(load_sweep(str(tmp_path / "sweep.yaml"))), out, jobs=1, listener=Mock())
    table = pd.read_csv(out / "pools.csv")
    total, over = ("usd_per_hour", "tokens_per_usd") if per == "usd" else ("tdp_watts", "tokens_per_joule")
    dear = table["encode_gpus"] + table["prefill_gpus"]
    cost = prices["b200_sxm"] * dear + prices["h200_sxm"] * (table["total_gpus"] - dear)
    assert table[total].to_numpy() == pytest.approx(cost.to_numpy())
    tokens = table["tokens_per_s_per_gpu"] * table["total_gpus"] * (3600.0 if per == "usd" else 1.0)
    assert table[over].to_numpy() == pytest.approx((tokens / cost).to_numpy())
    assert table[over].is_monotonic_decreasing
    assert table["tokens_per_s_per_user"].is_monotonic_increasing


LINKED = """
name: {name}
models: [llama_3_1_70b]
systems: {{h100_sxm: fp8}}
traffic: [{{isl: 8192, osl: 512}}]
modes: [disaggregated, colocated]
limits: {{max_gpus: 16, gpu_cap: 64, ftl_s: {ftl}}}
{more}
"""

LINKS = "kv_link: [none, {path: rail}, {path: rail, order: nhd, descriptor_us: 2.4}]"


@pytest.fixture(scope="module")
def link_fronts(swept, tmp_path_factory):
    folder = tmp_path_factory.mktemp("links")
    asked = {"links": (2.0, LINKS), "loose": (1e3, "kv_link: [none, {descriptor_us: 2.4}]")}
    texts = {name: LINKED.format(name=name, ftl=ftl, more=more) for name, (ftl, more) in asked.items()}
    return {name: pd.read_csv(swept(text, folder / name) / "frontier.csv") for name, text in texts.items()}


def of(front: pd.DataFrame, end: str) -> pd.DataFrame:
    mine = front[front["case"].str.endswith(end) & (front["mode"] == "disaggregated")]
    assert len(mine)
    return mine.reset_index(drop=True)


def test_without_a_link_nothing_is_handed_over(link_fronts):
    off = of(link_fronts["links"], "no_link")
    assert not off[[column.name for column in LINK_COLUMNS[:3]]].to_numpy().any()
    assert (off["ftl_with_hand_over_s"] == off["ftl_s"]).all()


def test_explain_of_a_row_tells_its_hand_over(link_fronts, tmp_path, capsys):
    """Of the row above, 97 % of 50 GB/s; a case without a link, and one instance for both phases, hand nothing over."""
    table, file = link_fronts["links"], tmp_path / "frontier.csv"
    table.to_csv(file, index=False)
    linked = table["case"].str.endswith("link_rail") & (table["mode"] == "disaggregated")
    row = int(table.index[linked & (table["prefill_gpus"] == 1) & (table["decode_pp"] == 1)][0])
    assert link_run(["explain", str(file), "--row", str(row), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["hand_over"]
    wire = 1.5175e-3 + 8192 * 163_840 / 48.5e9
    assert told == pytest.approx(
        {"link": "link_rail", "bandwidth": 48.5e9, "size": 8192 * 163_840, "descriptors": 512 * 160}
        | {"post": 512 * 160 * 2.4e-6, "wire": wire, "time": 512 * 160 * 2.4e-6 + wire}
        | {"ftl": table["ftl_s"][row] + 512 * 160 * 2.4e-6 + wire}
    )
    assert link_run(["explain", str(file), "--row", str(row)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1.34 GB a prompt over link_rail, 48.5 GB/s a GPU: 29.2 ms on the wire" in text
    assert "a GPU of the receiver posts 81,920 descriptors in 197 ms" in text
    plain = int(table.index[table["case"].str.endswith("no_link") & (table["mode"] == "disaggregated")][0])
    for other in (plain, int(table.index[table["mode"] == "colocated"][0])):
        assert handed_over(table.loc[other].to_dict()) is None


def test_rows_say_what_the_notebook_interface_says(link_fronts):
    at, layout = ds.setup("llama_3_1_70b", "h100_sxm", "fp8"), KvLayout(order="nhd")
    for row in of(link_fronts["links"], "nhd").to_dict("records"):
        ends = (
            Sharding(tp_attn=row[f"{side}_tp_attn"], tp_ffn=row[f"{side}_tp_ffn"], pp=row[f"{side}_pp"])
            for side in ("prefill", "decode")
        )
        over = kv_hand_over(at, *ends, 8192, path="rail", layout=layout, descriptor_s=2.4e-6)
        assert row["hand_over_s"] == pytest.approx(over.time, rel=1e-9)
        assert row["kv_descriptors"] == pytest.approx(over.descriptors)


def test_the_limit_holds_with_the_hand_over(link_fronts):
    """With tokens before heads a change of TP costs seconds: other layouts win, and none is better than without."""
    off, dear = of(link_fronts["links"], "no_link"), of(link_fronts["links"], "nhd")
    assert (dear["ftl_with_hand_over_s"] <= 2.0).all()
    assert (dear["ftl_s"] + dear["hand_over_s"]).to_numpy() == pytest.approx(dear["ftl_with_hand_over_s"].to_numpy())
    best = [
        off[off["tokens_per_s_per_user"] >= x * (1 - 1e-9)]["tokens_per_s_per_gpu"].max()
        for x in dear["tokens_per_s_per_user"]
    ]
    assert (dear["tokens_per_s_per_gpu"] <= np.array(best) * (1 + 1e-9)).all()
    assert dear["tokens_per_s_per_gpu"].max() < off["tokens_per_s_per_gpu"].max()


def test_a_limit_that_is_never_met_leaves_the_frontier_as_it_is(link_fronts):
    off, counted = of(link_fronts["loose"], "no_link"), of(link_fronts["loose"], "2.4us")
    for column in ("tokens_per_s_per_user", "tokens_per_s_per_gpu", "ftl_s"):
        assert counted[column].to_numpy() == pytest.approx(off[column].to_numpy(), rel=1e-12)


def test_receivers_of_one_class_have_equal_hand_overs():
    """The latent of DeepSeek-R1 is one piece whatever TP is, so stages alone tell receivers apart."""
    at = ds.setup("deepseek_r1", "h200_sxm", "fp8")
    mappings = ds.enumerate_mappings(at, max_gpus=32)
    takers = takers_of(mappings, at)
    kinds = classes_of(mappings, takers, at)
    assert len(takers) == len(np.unique(mappings.pp))
    assert (np.asarray(takers.pp)[kinds] == mappings.pp).all()


@pytest.mark.parametrize(("engine", "mode"), [("vllm", "piggyback"), ("sglang", "colocated")])
def test_an_engine_has_a_mode_of_its_own(engine, mode):
    """Chunked prefill of vLLM V1 is always on, mixed chunks of SGLang are off by default."""
    asked, named = (
        plan_sweep(replace(SMALL, engine=engine, modes=("disaggregated", each))).cases[0] for each in ("engine", mode)
    )
    assert [each.mode for each in asked.modes] == ["disaggregated", mode]
    assert [each.key for each in asked.blocks] == [each.key for each in named.blocks]


def test_a_profile_without_an_engine_has_no_mode_of_its_own():
    with pytest.raises(InputError, match="no engine that would choose"):
        plan_sweep(replace(SMALL, profile="ideal", modes=("engine",)))
