"""Kinds of layouts by hand, what engines refuse, and what served runs have checked."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.layouts import CheckedKind
from disagg_sim.facts.load import load_evidence, load_model, load_system
from disagg_sim.physics.setup import setup
from disagg_sim.search import layouts
from disagg_sim.search.layouts import broken_rules, class_of, evidence, family_of, layouts_of
from disagg_sim.serving.evidence import layout_evidence, level

R1 = ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")


@pytest.mark.parametrize(
    ("mapping", "kind"),
    [
        (Sharding(), "one GPU"),
        (Sharding(tp_attn=2, tp_ffn=2), "TP"),
        (Sharding(tp_attn=2, ep=2), "TP, EP"),
        (Sharding(dp_attn=2, ep=2), "DP, EP"),
        (Sharding(dp_attn=2, tp_ffn=2), "DP, expert TP"),
        (Sharding(tp_attn=2, dp_attn=2, tp_ffn=2, ep=2), "DP of TP groups, EP of TP groups"),
        (Sharding(tp_attn=2, tp_ffn=2, pp=2), "TP, PP"),
        (Sharding(tp_attn=2, tp_ffn=2, dcp=2), "TP, DCP"),
        (Sharding(tp_ffn=2, pcp=2), "TP, PCP"),
        (Sharding(pp=2), "PP of one-GPU stages"),
    ],
)
def test_kinds_of_layouts(mapping, kind):
    assert layouts_of(mapping).tolist() == [kind]


def test_families_and_classes_of_systems():
    assert [family_of(load_model(name)) for name in ("llama_3_1_70b", "gpt_oss_120b", "deepseek_r1")] == [
        "dense",
        "MoE",
        "MoE with MLA",
    ]
    assert class_of(load_system("gb300_nvl72")) == class_of(load_system("gb200_nvl72")) == "Blackwell, domain of 72"


def test_experts_of_qwen3_235b_are_cut_in_whole_blocks_of_128():
    """Width 1,536: 768 and 384 on 2 and 4 GPUs are multiples of 128, 192 on 8 is none; bf16 weights have no blocks."""
    cuts = Sharding.stack([Sharding(tp_attn=n, tp_ffn=n) for n in (2, 4, 8)])
    rule = "experts of width 1536 cut inside blocks of 128 of fp8_block"
    refused = layouts.why_not_launchable(setup("qwen3_235b_a22b", "h100_sxm", "fp8_block"), cuts)
    assert refused.tolist() == ["", "", rule]
    assert evidence(setup("qwen3_235b_a22b", "h100_sxm", "fp8_block"), cuts)[2] == f"not launchable: {rule}"
    assert set(layouts.why_not_launchable(setup("qwen3_235b_a22b", "h100_sxm", "bf16"), cuts)) == {""}


def test_shared_experts_are_cut_like_attention_and_routed_ones_are_not():
    """EP 16 leaves routed experts whole; of the shared one each of 16 GPUs of attention TP has 64 of 1,024 columns."""
    at, spread = setup("qwen3_5_397b_a17b", "gb200_nvl72", "fp8_block"), Sharding(tp_attn=16, tp_ffn=1, ep=16)
    (refused,) = layouts.why_not_launchable(at, Sharding.stack([spread]))
    assert refused == "shared experts of width 1024 cut inside blocks of 128 of fp8_block"


def test_what_each_engine_can_start():
    """vLLM: EP over all GPUs or none. TensorRT-LLM: attention DP over all GPUs or none. SGLang: any divisors."""
    mixed = Sharding(tp_attn=2, dp_attn=4, ep=8)
    grouped = Sharding(dp_attn=8, tp_ffn=2, ep=4)
    told = {name: rules.tolist() for name, rules in broken_rules(setup(*R1), Sharding.stack([mixed, grouped])).items()}
    assert told == {
        "sglang": ["", ""],
        "trtllm": ["attention DP over groups of GPUs", ""],
        "vllm": ["", "EP over groups of GPUs"],
    }


def test_no_engine_starts_a_draft_model_over_stages_and_two_no_module():
    """Rules act where instances draft; SGLang starts no draft model beside attention DP either."""
    two, ranks = Sharding(pp=2, draft_tokens=2), Sharding(dp_attn=2, draft_tokens=2)
    llama = setup("llama_3_1_70b", "h200_sxm", "fp8", speculation="draft_model llama_3_1_8b 0.8 0.6")
    rule = "drafts of draft_model over pipeline stages"
    assert evidence(llama, two).tolist() == [f"not launchable: {rule}"]
    assert evidence(llama, Sharding(pp=2)).tolist() != [f"not launchable: {rule}"]
    own = {name: str(rules[0]) for name, rules in broken_rules(llama, ranks).items()}
    assert own == {"sglang": "drafts of draft_model beside attention DP", "trtllm": "", "vllm": ""}
    module = setup(*R1, speculation="mtp 0.8 0.6")
    told = {name: str(rules[0]) for name, rules in broken_rules(module, two).items()}
    over = "drafts of mtp over pipeline stages"
    assert told == {"sglang": over, "trtllm": over, "vllm": ""}


def test_limits_of_layouts_nest_and_count_what_they_leave_out():
    at = setup("qwen3_235b_a22b", "h100_sxm", "fp8_block")
    tables = {name: ds.enumerate_mappings(at, max_gpus=16, layouts=name) for name in ("served", "launchable", "all")}
    assert set(tables["served"]) < set(tables["launchable"]) < set(tables["all"])
    for table in tables.values():
        assert len(table) + sum(count for _, count in table.refused) == len(tables["all"]) + sum(
            count for _, count in tables["all"].refused
        )
    counted = dict(tables["launchable"].refused)
    left_out = len(tables["all"]) - len(tables["launchable"])
    assert counted["not launchable: experts of width 1536 cut inside blocks of 128 of fp8_block"] == left_out > 0


def test_pipelines_of_single_gpus_are_left_out_on_request():
    at = setup("llama_3_1_70b", "h100_sxm", "fp8")
    with_them, without = (ds.enumerate_mappings(at, max_gpus=8, one_gpu_stages=each) for each in (True, False))
    assert set(with_them) - set(without) == {Sharding(pp=2), Sharding(pp=4), Sharding(pp=8)}
    assert dict(without.refused)["pipeline stages of one GPU"] == 3


def test_an_unknown_word_for_layouts_is_refused():
    with pytest.raises(
        InputError, match=r"layouts 'launchabel' is unknown, did you mean 'launchable'\?; allowed: served"
    ):
        ds.enumerate_mappings(setup(*R1), layouts="launchabel")


def kind(**values) -> CheckedKind:
    counted = {"most_gpus": 8, "rows": 3, "points": 3, "files": {"runs.csv": 3}}
    errors = {"judged_by": "tpot", "error": 0.1}
    named = {"family": "MoE with MLA", "systems": "Blackwell, domain of 72", "layout": "DP, EP"}
    return CheckedKind(**{**named, **counted, **errors, **values})


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ([], "launchable: DP, EP never served"),
        ([kind()], "served"),
        ([kind(most_gpus=4)], "launchable: DP, EP served up to 4 GPUs"),
        ([kind(error=0.5)], "served"),
        ([kind(error=0.7)], "launchable: DP, EP served, forecasts of a quarter of its runs more than 70% off"),
        ([kind(points=1)], "served"),
        ([kind(judged_by="nothing", error=None)], "served"),
        ([kind(systems="Hopper, domain of 8")], "launchable: DP, EP never served"),
    ],
)
def test_served_means_that_the_kind_was_run_in_this_size_and_its_forecast_not_far_off(known, said, monkeypatch):
    table = {(each.family, each.systems, each.layout): each for each in known}
    monkeypatch.setattr(layouts, "checked_kinds", lambda *_: table)
    assert evidence(setup(*R1), Sharding(dp_attn=8, ep=8)).tolist() == [said]


def test_runs_that_only_prefilled_count_for_prefill_alone():
    """Kimi-K3 prefilled on 16 stages of one GPU of GB200 (sgl-project/sglang issue 32592); nothing decoded so."""
    deep = Sharding.stack([Sharding(pp=4), Sharding(pp=16), Sharding(pp=32)])
    assert evidence(setup(*R1), deep, prefill=True).tolist() == [
        "served",
        "served",
        "launchable: PP of one-GPU stages served up to 16 GPUs",
    ]
    assert [level(text) for text in evidence(setup(*R1), deep)] == ["launchable"] * 3


@pytest.mark.parametrize(
    ("system", "mapping", "said"),
    [
        ("h100_sxm", Sharding(tp_attn=8, tp_ffn=8), ""),
        ("h100_sxm", Sharding(pp=8), ""),
        ("h100_sxm", Sharding(tp_attn=8, tp_ffn=8, pp=2), ""),  # a stage a node
        ("h100_sxm", Sharding(tp_attn=4, tp_ffn=4, pp=4), "stages of 4 GPUs over 2 NVLink domains of 8"),
        ("h100_sxm", Sharding(pp=16), "stages of 1 GPU over 2 NVLink domains of 8"),
        ("h100_sxm", Sharding(dp_attn=16, ep=16), ""),
        ("gb200_nvl72", Sharding(pp=16), ""),  # 4 trays of one domain
        ("gb200_nvl72", Sharding(dp_attn=36, ep=36), ""),
        ("gb200_nvl72", Sharding(dp_attn=3, ep=3), "3 GPUs on hosts of 4"),
        ("gb200_nvl72", Sharding(dp_attn=6, ep=6), "6 GPUs on hosts of 4"),
        ("gb200_nvl72", Sharding(dp_attn=6, ep=6, pp=2), "6 GPUs on hosts of 4"),  # a stage of a tray and a half
        ("gb200_nvl72", Sharding(dp_attn=64, ep=64, pp=2), "128 GPUs on NVLink domains of 72"),
        ("gh200", Sharding(pp=4), ""),  # every GPU is a host
    ],
)
def test_counts_that_an_operator_would_not_place(system, mapping, said):
    assert layouts.unsupported(setup("deepseek_r1", system, "bf16"), mapping).tolist() == [said]


def test_supported_layouts_are_launchable_ones_on_whole_hosts():
    at = setup(*R1)
    launchable, supported = (ds.enumerate_mappings(at, layouts=name) for name in ("launchable", "supported"))
    assert set(supported) < set(launchable)
    assert all(layouts.unsupported(at, mapping)[0] for mapping in set(launchable) - set(supported))
    assert any("not supported: " in reason for reason, _ in supported.refused)


def test_of_two_pools_the_weaker_counts():
    at, lengths = setup(*R1), ds.lengths(4096, 512)
    sides = Sharding(tp_attn=4, tp_ffn=4), Sharding(dp_attn=8, ep=8)
    grids = [
        grid(at, [*sides, Sharding(tp_attn=4, tp_ffn=4, pp=2)], lengths) for grid in (ds.prefill_grid, ds.decode_grid)
    ]
    points = ds.disaggregated(*grids, ftl_limit=10.0)
    told = layout_evidence(points, at)
    unserved = (points["prefill_pp"] > 1) | (points["decode_pp"] > 1)
    assert ((told == "served") == ~unserved.to_numpy()).all()
    assert {level(text) for text in told} == {"served", "launchable"}
    assert set(told[points["decode_pp"] > 1]) == {"launchable: decode TP, PP never served"}


def test_shipped_evidence_names_no_pipeline_of_one_gpu_stages_but_that_of_dense_models_on_a100():
    kinds = load_evidence("measured").kinds
    assert [(each.family, each.systems) for each in kinds if "one-GPU stages" in each.layout] == [
        ("dense", "Ampere, domain of 8")
    ]
    assert all(sum(each.files.values()) == each.rows >= each.points for each in kinds)


@settings(max_examples=40)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))
def test_evidence_of_columns_is_that_of_each_mapping(tp, dp, ep, pp):
    gpus = 2 ** (tp + dp)
    one = Sharding(tp_attn=2**tp, dp_attn=2**dp, tp_ffn=gpus // min(2**ep, gpus), ep=min(2**ep, gpus), pp=2**pp)
    at = cached()
    several = Sharding.stack([Sharding(), one, replace(one, pp=1)])
    each = np.concatenate([evidence(at, mapping) for mapping in several])
    assert evidence(at, several).tolist() == each.tolist()


def cached() -> ds.Setup:
    """A setup that is made once."""
    if not hasattr(cached, "made"):
        cached.made = setup(*R1)
    return cached.made
