"""Mappings counted by hand, and the reasons of those refused."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from shared_data import shared_file

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_model, load_system
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.cost import all_reduce_cost
from disagg_sim.physics.setup import setup
from disagg_sim.search.mappings import _slots, degrees, enumerate_mappings, mappings_for
from lab.calibration.served.read import read_rows


def at(model, system):
    """A setup; mappings ask nothing of its precision."""
    return setup(model, system, "bf16")


def rows(model: str, system: str, **limits) -> set[tuple[int, int, int, int, int]]:
    table = enumerate_mappings(at(load_model(model), load_system(system)), **limits)
    assert len(table) == len(set(table))
    return {(m.tp_attn, m.dp_attn, m.tp_ffn, m.ep, m.pp) for m in table}


def test_dense_models_have_tp_times_pp():
    """Llama-70B on up to 8 GPUs: tp*pp in 1, 2, 4, 8: 1 + 2 + 3 + 4 mappings."""
    found = rows("llama_3_1_70b", "h100_sxm", max_gpus=8)
    by_hand = {(tp, 1, tp, 1, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8}
    assert len(by_hand) == 10
    assert found == by_hand


def test_every_product_of_a_moe_stage():
    """R1 on up to 4 GPUs: a stage of n = 1, 2, 4 GPUs has log2(n)+1 ways (tp, dp) and as many (tp_ffn, ep).

    1 + 4 + 9 = 14 flat ones, 5 with two stages of up to 2 GPUs, 1 with four stages: 20.
    """
    found = rows("deepseek_r1", "h100_sxm", max_gpus=4)
    by_hand = set()
    for pp, largest in ((1, 4), (2, 2), (4, 1)):
        for n in (1, 2, 4):
            if n <= largest:
                powers = [p for p in (1, 2, 4) if n % p == 0]
                by_hand |= {(tp, n // tp, n // ep, ep, pp) for tp in powers for ep in powers}
    assert len(by_hand) == 20
    assert found == by_hand


@pytest.mark.parametrize("model", ["deepseek_r1", "glm_4_5", "gpt_oss_120b", "llama_3_1_405b"])
@pytest.mark.parametrize("system", ["h100_sxm", "gb200_nvl72"])
def test_rules_of_every_mapping(model, system):
    spec, machine = load_model(model), load_system(system)
    odd = {3 * 2**k for k in range(6)} | {36, 72}
    for m in enumerate_mappings(at(spec, machine)):
        assert m.tp_attn * m.dp_attn == m.tp_ffn * m.ep
        assert max(m.tp_attn, m.tp_ffn) <= machine.nvlink_domain
        assert m.pp <= len(spec.layers)
        whole = 72 if machine.nvlink_domain == 72 else 64
        assert m.gpus <= (whole if m.pp == 1 else 128)
        for degree in (m.tp_attn, m.dp_attn, m.ep, m.pp):
            power = degree & (degree - 1) == 0
            assert power or (machine.nvlink_domain == 72 and degree in odd)
        for kind in spec.kinds:
            assert kind.attention.q_heads % m.tp_attn == 0
            if hasattr(kind.ffn, "experts"):
                assert (kind.ffn.experts + m.redundant_slots) % m.ep == 0
                assert 8 * m.redundant_slots <= kind.ffn.experts
                assert kind.ffn.width % m.tp_ffn == 0


def test_odd_degrees_stand_only_where_they_divide_and_only_on_nvl72():
    """GLM-4.5: 96 query and 8 KV heads, 160 experts: TP 24 and 48 divide the heads, TP 3-12 would cut a KV head.

    EP 3 divides neither 160 experts nor 160 and up to 20 redundant slots, but with 2 of them, 162.

    R1 (128 heads, 256 experts, width 2048, 61 layers) takes EP of such degrees with redundant slots alone.
    """
    found = rows("glm_4_5", "gb200_nvl72")
    assert {tp for tp, *_ in found if tp % 3 == 0} == {24, 48}
    assert all(tp * dp == ep for tp, dp, _, ep, _ in found if ep % 3 == 0)
    assert 72 not in {tp for tp, *_ in found}
    assert not any(degree % 3 == 0 for row in rows("glm_4_5", "h100_sxm") for degree in row)
    r1 = enumerate_mappings(at(load_model("deepseek_r1"), load_system("gb200_nvl72")))
    assert {m.redundant_slots for m in r1 if not any(degree % 3 == 0 for degree in (m.dp_attn, m.ep))} == {0}
    assert {(m.dcp, m.pcp) for m in r1} == {(1, 1)}  # only where asked for


def test_copies_of_experts_double_up_to_the_most():
    """A copy a rank more, two, four; 24 ranks need 8 beside the 256 experts to have as many each."""
    r1 = load_model("deepseek_r1")
    assert _slots(r1, Sharding(ep=32), 128) == (0, 32, 64, 128)
    assert _slots(r1, Sharding(ep=24, redundant_slots=8), 33) == (8, 32)


def test_a_domain_of_72_may_be_used_whole():
    """A model of 72 heads and 144 experts (width 2304) fills the domain: TP 72, EP 72 and 36 x 2."""
    base = load_model("gpt_oss_120b")
    kind = base.kinds[0]
    layer = replace(
        kind, attention=replace(kind.attention, q_heads=72, kv_heads=36), ffn=replace(kind.ffn, experts=144, width=2304)
    )
    model = replace(base, layers=(layer,) * 36)
    table = enumerate_mappings(at(model, load_system("gb200_nvl72")))
    flat = {(m.tp_attn, m.dp_attn, m.tp_ffn, m.ep) for m in table if m.pp == 1}
    assert {(72, 1, 72, 1), (1, 72, 1, 72), (36, 2, 2, 36), (2, 36, 1, 72)} <= flat
    assert max(m.gpus for m in table if m.pp == 1) == 72
    assert max(m.gpus for m in table) == 128
    small = enumerate_mappings(at(model, load_system("h100_sxm")))
    assert max(m.gpus for m in small if m.pp == 1) == 64


@pytest.mark.parametrize("model", ["deepseek_r1", "llama_3_1_405b"])
def test_mappings_of_a_smaller_domain_are_among_those_of_a_larger_one(model):
    spec, machine = load_model(model), load_system("gb200_nvl72")
    tables = [
        enumerate_mappings(at(spec, replace(machine, nvlink_domain=domain))) for domain in (8, 16, 36, 72, 144, 576)
    ]
    for smaller, larger in pairwise(tables):
        assert set(smaller) <= set(larger)
    assert [max(m.gpus for m in table if m.pp == 1) <= 64 for table in tables[:3]] == [True] * 3
    assert max(m.gpus for m in tables[-1] if m.pp == 1) > 128 or not spec.is_moe
    assert len(tables[-1]) < 1500


def test_tp_stays_inside_the_domain_and_the_rest_may_leave_it():
    found = rows("deepseek_r1", "h100_sxm")
    assert max(max(tp, tp_ffn) for tp, _, tp_ffn, _, _ in found) == 8
    assert (1, 64, 1, 64, 1) in found
    assert (8, 8, 1, 64, 1) in found
    assert any(tp == 8 and pp == 16 for tp, _, _, _, pp in found)


def test_refusals_have_reasons():
    refused = dict(enumerate_mappings(at(load_model("deepseek_r1"), load_system("gb200_nvl72"))).refused)
    assert refused["pp above 61 layers"] == 3  # 64, 72 and 128
    assert refused["pp 3 does not divide 61 layers"] == 1
    assert refused["ep does not divide 256 experts"] > 0
    assert refused["tp_attn does not divide 128 query heads"] > 0
    assert refused["more than 32 GPUs in a stage at pp 4"] > 0
    on_h100 = dict(enumerate_mappings(at(load_model("deepseek_r1"), load_system("h100_sxm"))).refused)
    assert on_h100["TP leaves the NVLink domain of 8"] > 0


def test_candidates_are_kept_or_refused_none_is_lost():
    """Llama-70B on H100, up to 8 GPUs: 4 degrees of pp times 4 of tp are 16 candidates; 10 stand, 6 are too large."""
    table = enumerate_mappings(at(load_model("llama_3_1_70b"), load_system("h100_sxm")), max_gpus=8)
    assert len(table) + sum(count for _, count in table.refused) == 16
    assert dict(table.refused) == {
        "more than 4 GPUs in a stage at pp 2": 1,
        "more than 2 GPUs in a stage at pp 4": 2,
        "more than 1 GPUs in a stage at pp 8": 3,
    }


def test_degrees():
    assert degrees(load_system("h100_sxm"), 72) == (1, 2, 4, 8, 16, 32, 64)
    assert degrees(load_system("gb200_nvl72"), 72) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 36, 48, 64, 72)
    odd = {3 * 2**k for k in range(8)} | {36 * 2**k for k in range(5)}
    wide = replace(load_system("gb200_nvl72"), nvlink_domain=576)
    assert degrees(wide, 576) == tuple(sorted(odd | {2**k for k in range(10)}))


@pytest.mark.parametrize("limit", [0, -3, 2.5, "all"])
def test_no_gpus_are_refused(limit):
    with pytest.raises(InputError, match=f"max_gpus {limit} is out of range; allowed: whole numbers from 1"):
        enumerate_mappings(at(load_model("llama_3_1_8b"), load_system("h100_sxm")), max_gpus=limit)


def test_table_of_single_mappings():
    one = Sharding(tp_attn=2, dp_attn=4, tp_ffn=1, ep=8, pp=2)
    table = Sharding.stack([one, Sharding()])
    assert list(table) == [one, Sharding()]
    assert table.gpus.tolist() == [16, 1]
    at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    assert mappings_for(at, table) is table
    assert list(mappings_for(at, one)) == [one]
    with pytest.raises(InputError, match="attention and FFN of a stage must use the same GPUs"):
        mappings_for(at, Sharding(tp_attn=4, ep=2))


def test_a_mapping_is_a_value_as_numbers_and_as_columns():
    table = Sharding.stack([Sharding(), Sharding(tp_attn=4, tp_ffn=4, pp=2, chunk_tokens=512)])
    assert table == table[[0, 1]]
    assert table != table[[1, 0]]
    assert len({Sharding(ep=8, dp_attn=8), Sharding(dp_attn=8, ep=8), Sharding()}) == 2
    assert (len(table), len(Sharding()), table[1].gpus, table[1].chunk_tokens) == (2, 1, 8, 512)
    assert table.for_grid().gpus.tolist() == [[1.0], [8.0]]


@pytest.mark.parametrize("degree", [0, -1, 2.5, float("nan"), "4"])
def test_degrees_are_whole_numbers_from_one(degree):
    with pytest.raises(InputError, match=f"tp_attn {degree} is out of range; allowed: whole numbers from 1"):
        Sharding(tp_attn=degree)


IMPOSSIBLE = [
    ("llama_3_1_70b", Sharding(tp_attn=3, tp_ffn=3), "tp_attn does not divide 64 query heads"),
    ("deepseek_r1", Sharding(dp_attn=128, tp_ffn=128), "expert TP after attention DP leaves the NVLink domain of 72"),
    ("llama_3_1_70b", Sharding(dp_attn=2, ep=2), "a dense model has neither dp_attn nor ep above 1"),
    ("llama_3_1_70b", Sharding(dp_attn=2, tp_ffn=2), "a dense model has neither dp_attn nor ep above 1"),
    ("llama_3_1_70b", Sharding(pp=100), "pp above 80 layers"),
    ("deepseek_r1", Sharding(dp_attn=3, ep=3), "ep does not divide 256 experts"),
    ("deepseek_r1", Sharding(dp_attn=48, ep=48, redundant_slots=8), "ep does not divide 256 experts and 8 redundant"),
    ("deepseek_r1", Sharding(redundant_slots=32), "redundant slots need expert parallelism"),
]


@pytest.mark.parametrize(("model", "mapping", "reason"), IMPOSSIBLE)
@pytest.mark.parametrize("score", [ds.prefill_grid, ds.decode_grid, ds.colocated, ds.piggyback])
def test_impossible_mappings_are_refused_with_the_reason(score, model, mapping, reason):
    with pytest.raises(InputError, match=f"is impossible for {model} on gb200_nvl72: {reason}"):
        score(setup(model, "gb200_nvl72", "nvfp4_fp8kv"), [Sharding(), mapping], ds.lengths(128, 16))


def test_pipelines_made_by_hand_may_be_uneven():
    """61 layers in 3 stages: 21, 20 and 20."""
    at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    assert list(mappings_for(at, Sharding(pp=3))) == [Sharding(pp=3)]


def test_enumerated_mappings_pass_the_check_of_those_made_by_hand():
    for name in ("llama_3_1_70b", "deepseek_r1", "gpt_oss_120b"):
        at = setup(name, "gb200_nvl72", "nvfp4_fp8kv")
        table = enumerate_mappings(at)
        assert len(mappings_for(at, list(table))) == len(table)


@pytest.mark.parametrize("mappings", [3, "tp4", [Sharding(), None]])
def test_what_is_no_mapping_is_refused(mappings):
    with pytest.raises(InputError, match="is not a mapping; allowed: a Sharding or a list of them"):
        mappings_for(setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), mappings)


def test_ep_over_48_gpus_holds_6_of_288_slots_each():
    """R1: 256 experts of 3*7168*2048 weights in 58 layers; 32 redundant slots over 48 ranks add 2/3 expert a GPU."""
    at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    wide = Sharding(dp_attn=48, ep=48, redundant_slots=32)
    layers = [layer for layer, _ in layers_of(at.model) if layer.ffn.picks]
    held = [layer.ffn.weight_bytes(at.model.hidden, at.precision, wide) for layer in layers]
    bare = [layer.ffn.weight_bytes(at.model.hidden, at.precision, replace(wide, redundant_slots=0)) for layer in layers]
    assert held[0] - bare[0] == pytest.approx(32 / 48 * 3 * 7168 * 2048 * 0.5625)
    one = ds.decode_grid(at, wide, ds.lengths(8192, 1024), batch=[48 * 64])
    assert np.isfinite(one.latency).all()
    assert one.mappings[0] == wide


def test_tp_leaves_the_domain_on_request_alone():
    """Llama-70B on H100: TP 16, 32 and 64 cross NICs; two hops of 7.5 us are added to the all-reduce inside a node."""
    at = setup("llama_3_1_70b", "h100_sxm", "fp8")
    found = enumerate_mappings(at, tp_over_nics=True)
    assert {m.tp_attn for m in found} == {1, 2, 4, 8, 16, 32, 64}
    assert {m.tp_attn for m in enumerate_mappings(at)} == {1, 2, 4, 8}
    message = 2.0 * at.model.hidden  # one token [B]
    across, inside = (float(all_reduce_cost(message, n, at).time) for n in (16.0, 8.0))
    assert across - inside == pytest.approx(2 * 7.5e-6, rel=0.01)  # 2 KB a GPU over the NIC, the rest is latency


def published_r1_layouts() -> set[tuple[str, str, Sharding]]:
    """System, phase and mapping of every worker of the published runs, as their file states it."""
    rows = [row for row in read_rows(shared_file("measured/inferencex_dsr1_runs.csv")) if row.workers]
    sides = [(row, "decode", row.workers) for row in rows] + [(row, "prefill", row.prefill) for row in rows]
    return {(row.system, phase, workers.mapping) for row, phase, workers in sides if workers}


def test_every_published_layout_of_r1_can_be_expressed_and_enumerated():
    """TP 16 and TEP 16 over two H100 nodes, EP 24 and EP 48 with redundant slots among them."""
    found = published_r1_layouts()
    tables = {
        system: set(enumerate_mappings(setup("deepseek_r1", system, "fp8"), tp_over_nics=True))
        for system in {system for system, *_ in found}
    }
    assert {(system, phase, m) for system, phase, m in found if m not in tables[system]} == set()
    named = {(system, phase, m.tp_attn, m.dp_attn, m.tp_ffn, m.ep, m.redundant_slots) for system, phase, m in found}
    assert {
        ("h100_sxm", "decode", 16, 1, 16, 1, 0),
        ("h100_sxm", "prefill", 16, 1, 16, 1, 0),
        ("h100_sxm", "decode", 16, 1, 1, 16, 0),
        ("gb200_nvl72", "decode", 1, 24, 1, 24, 8),
        ("gb200_nvl72", "decode", 1, 48, 1, 48, 32),
        ("gb300_nvl72", "decode", 1, 24, 1, 24, 8),
        ("gb300_nvl72", "decode", 1, 48, 1, 48, 32),
    } <= named
