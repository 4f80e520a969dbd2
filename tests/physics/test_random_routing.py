"""Fullest expert rank under random picks, against the draw itself, and kernels of experts."""

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

from disagg_sim.certainty.trust import Trust, trust_of
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_efficiency, load_system
from disagg_sim.facts.precision import MXFP4
from disagg_sim.launch.engines import environment_of
from disagg_sim.launch.workers import Workers
from disagg_sim.physics.experts import moe_cost
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import ExpertRows, expert_work
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.techniques.experts.physics import (
    MOST_SUMMED,
    ExpertRouting,
    fullest_load,
    fullest_of_random,
    largest_normal,
    lasting_imbalance,
    packed,
    placement,
    popularity,
)


@pytest.mark.parametrize(
    ("mean", "table"),
    [
        (1.0, (2.06, 2.58, 3.06, 3.52, 3.96)),
        (4.0, (1.53, 1.76, 1.97, 2.16, 2.34)),
        (16.0, (1.26, 1.37, 1.47, 1.55, 1.63)),
        (64.0, (1.13, 1.18, 1.23, 1.27, 1.31)),
        (256.0, (1.07, 1.09, 1.11, 1.13, 1.15)),
    ],
)
def test_the_fullest_of_poisson_ranks_agrees_with_the_table(mean, table):
    """Expected largest of 4 to 64 independent Poisson counts over their mean, by the sum over their distribution."""
    ranks = np.array([4.0, 8.0, 16.0, 32.0, 64.0])
    assert fullest_of_random(mean, ranks) == pytest.approx(np.array(table), abs=0.012)


def test_largest_of_normal_deviates():
    """Closed forms: 1/sqrt(pi) of two, 3/(2 sqrt(pi)) of three."""
    assert largest_normal(1.0) == pytest.approx(0.0, abs=1e-6)
    assert largest_normal(2.0) == pytest.approx(np.pi**-0.5, rel=1e-5)
    assert largest_normal(3.0) == pytest.approx(1.5 * np.pi**-0.5, rel=1e-5)
    assert largest_normal(256.0) == pytest.approx(2.827, abs=0.003)


def alike(skew: float) -> ExpertRouting:
    """Experts of one popularity for what is hit and for how ranks fill."""
    return ExpertRouting(skew=skew, rank_skew=skew)


def test_the_sum_of_poisson_counts_meets_its_normal_limit():
    below, above = fullest_of_random(np.array([MOST_SUMMED * 0.999, MOST_SUMMED * 1.001]), 64.0)
    assert float(below) == pytest.approx(float(above), rel=2e-3)


def test_the_worked_example_of_r1_on_32_ranks():
    """64 tokens of 8 picks: 16 picks a rank, 1.55 times as many on the fullest; a mean of 7 of 8 experts is hit."""
    load = fullest_load(64.0, experts=256, top_k=8, ep=32.0, routing=alike(0.0))
    assert float(load.picks) == pytest.approx(16 * 1.55, rel=0.005)
    hit = 1 - (1 - 8 / 256) ** 64
    assert float(load.distinct) == pytest.approx(min(8.0, 8 * hit + 2.070 * np.sqrt(8 * hit * (1 - hit))), rel=1e-3)


def test_skew_fills_one_rank_and_hits_fewer_experts():
    share = popularity(256, 1.0)
    assert share.sum() == pytest.approx(1.0)
    assert share.std() / share.mean() == pytest.approx(0.964, abs=0.001)  # the tail beyond 256 quantiles is cut
    assert placement(256, 256, 1, 1.0).fullest == placement(256, 256, 32, 0.0).fullest == 1.0
    assert placement(256, 256, 256, 1.0).fullest == pytest.approx(256 * share[0])  # alone on its rank
    even, skewed = (fullest_load(32.0, experts=256, top_k=8, ep=8.0, routing=alike(v)) for v in (0.0, 1.0))
    assert skewed.picks > even.picks
    assert skewed.distinct < even.distinct


def test_ranks_fill_by_a_skew_that_hits_no_fewer_experts():
    """The default of text: of a million tokens the fullest of 8 ranks has 1.29 times its share.

    Of 32 tokens as many experts are hit as of equal popularity. Copies placed by popularity even the ranks out.
    """
    text = ExpertRouting(rank_skew=1.1)
    many = fullest_load(1e6, experts=256, top_k=8, ep=8.0, routing=text)
    assert float(many.picks) == pytest.approx(1.29e6, rel=0.005)
    few, even = (fullest_load(32.0, experts=256, top_k=8, ep=8.0, routing=each) for each in (text, ExpertRouting()))
    assert float(few.distinct) == float(even.distinct)
    assert few.picks > even.picks
    ranks, copies = np.array([[1], [8], [32]]), np.array([[0, 32]])
    found = lasting_imbalance(256, ranks, copies, 1.1)
    by_hand = [[placement(256, 256 + spare, each, 1.1).fullest for spare in (0, 32)] for each in (1, 8, 32)]
    assert found.tolist() == by_hand
    assert found[:, 1] == pytest.approx(1.0, abs=0.02)
    assert lasting_imbalance(256, ranks, copies, 0.0).tolist() == [[1.0, 1.0]] * 3


def test_any_order_of_experts_is_the_mean_of_all_orders():
    """Six experts on two and on three ranks: 20 ways to fill the first of two, 90 to fill three with pairs."""
    share = popularity(6, 1.0)
    two = [max(sum(part), 1.0 - sum(part)) for part in combinations(share.tolist(), 3)]
    assert placement(6, 6, 2, 1.0).fullest == pytest.approx(2 * np.mean(two), rel=0.01)
    order = np.array(list(permutations(share.tolist())))
    three = order.reshape(-1, 3, 2).sum(axis=-1).max(axis=-1)
    assert placement(6, 6, 3, 1.0).fullest == pytest.approx(3 * three.mean(), rel=0.01)


def test_one_rank_and_many_picks_are_balanced():
    assert fullest_of_random(3.0, 1) == 1.0
    assert float(fullest_of_random(1e8, 64)) == pytest.approx(1.0, abs=1e-3)


def test_copies_of_the_heaviest_expert_by_hand():
    """Loads 4, 2, 1, 1 on two ranks. Two slots each: 4 + 1 against 2 + 1, 5/4 of the mean. One more slot each: both
    spare ones take copies of the first; 2 + 4/3 + 1 = 13/3 against 3*4/3 - 4/3 + 1 = 11/3.
    """
    share = np.array([4.0, 2.0, 1.0, 1.0]) / 8
    assert packed(share, 4, 2).fullest == 5 / 4
    assert packed(share, 6, 2).fullest == pytest.approx(13 / 12)


def test_redundant_experts_are_searched_for_every_mapping():
    """R1 (256 experts) with at most 32 copies: one, two and four on each of 8 ranks, one and two on each of 16.

    Copies pay where some experts are popular, and cost memory alone where all are alike.
    """
    at = setup("deepseek_r1", "h200_sxm", "fp8")
    at = at.changed(profile=replace(at.profile, rank_skew=0.0))
    without, some = (enumerate_mappings(at, max_gpus=16, max_redundant_experts=most) for most in (0, 32))
    tried = {(m.ep, m.redundant_slots) for m in some}
    assert {slots for ep, slots in tried if ep == 8} == {0, 8, 16, 32}
    assert {slots for ep, slots in tried if ep == 16} == {0, 16, 32}
    assert {*without} <= {*some}
    assert {m.redundant_slots for m in without} == {0}
    skewed = at.changed(profile=replace(at.profile, rank_skew=1.0))
    wide = [Sharding(dp_attn=8, ep=8, redundant_slots=slots) for slots in (0, 8)]
    for one, gains in ((at, False), (skewed, True)):
        plain, copied = (float(decode_step(one, each, batch=4096.0, context=2000.0).ttl) for each in wide)
        assert (copied < plain) == gains


def test_random_routing_slows_small_batches_most():
    random = setup("deepseek_r1", "h200_sxm", "fp8", engine="trtllm")
    at = random.changed(profile=replace(random.profile, random_routing=False))
    mapping = Sharding(tp_attn=8.0, tp_ffn=1.0, ep=8.0)
    slower = []
    for batch in (4.0, 64.0, 1024.0):
        both = [decode_step(one, mapping, batch=batch, context=2000.0).ttl for one in (random, at)]
        slower.append(float(both[0] / both[1] - 1))
    assert slower[0] > slower[1] > slower[2] >= 0
    whole = Sharding(tp_attn=8.0, tp_ffn=8.0)
    same = [decode_step(one, whole, batch=4.0, context=2000.0).ttl for one in (random, at)]
    assert float(same[0]) == pytest.approx(float(same[1]), rel=1e-12)


@pytest.mark.parametrize(
    ("system", "engine", "library", "like"),
    [
        ("h200_sxm", "sglang", "sglang", "bf16"),  # W4A16: Triton
        ("b200_sxm", "trtllm", "vllm", "fp8"),  # W4A8: generated kernels, MXFP8 activations
        ("gb300_nvl72", "vllm", "vllm", "fp8"),
    ],
)
def test_experts_in_mxfp4_run_as_each_engine_multiplies_them_on_each_system(system, engine, library, like):
    (kernel,) = setup("gpt_oss_120b", system, "mxfp4", engine=engine).rates.moe["tp"]
    (fit,) = [row for row in load_efficiency(system).moe if (row.engine, row.format) == (library, like)]
    share = 0.49 if like == "bf16" else fit.e_compute  # of weights that the kernel expands in its loop
    assert (kernel.flops, kernel.t0) == (share * load_system(system).peak_flops[like], fit.t0)
    assert kernel.element == {"bf16": 2.0, "fp8": 1.0}[like]  # of an activation
    assert setup("gpt_oss_120b", system, "mxfp4", "ideal").rates.moe["tp"][0].flops >= kernel.flops


@pytest.mark.parametrize(("engine", "share", "start"), [("trtllm", 0.35, 80e-6), ("vllm", 0.295, 23.8e-6)])
def test_kernels_whose_served_runs_tell_start_and_share_have_them(engine, share, start):
    (kernel,) = setup("gpt_oss_120b", "h200_sxm", "mxfp4", engine=engine).rates.moe["tp"]
    peak = load_system("h200_sxm").peak_flops["bf16"]
    assert (kernel.flops, kernel.t0) == pytest.approx((share * peak, start))


@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm", "b200_sxm"])
def test_vllm_is_told_to_take_the_kernel_of_the_forecast(system):
    """Marlin on Hopper: sizes rounded up, and the variable that asks for it."""
    at = setup("gpt_oss_120b", system, "mxfp4", engine="vllm")
    (kernel,) = at.rates.moe["tp"]
    one = Workers(role="colocated", mapping=Sharding(), instances=1, setup=at)
    hopper = system != "b200_sxm"
    assert environment_of("vllm", [one]) == ({"VLLM_MXFP4_USE_MARLIN": "1"} if hopper else {})
    assert not environment_of("vllm", [replace(one, setup=setup("gpt_oss_120b", system, "bf16", engine="vllm"))])
    if hopper:
        assert (kernel.input_multiple, kernel.multiple) == (256, 128)


@pytest.mark.parametrize(
    ("engine", "width", "padded"),
    [
        ("trtllm", 2880.0, 2944 * (2 * 3072 + 2944) / (3 * 2880**2)),  # hidden read: 6 * 512; the others: 23 * 128
        ("trtllm", 360.0, 384 * (2 * 3072 + 2944) / (3 * 2880 * 360)),  # a shard of TP8: 3 * 128
        ("vllm", 2880.0, 3072**2 / 2880**2),  # all: 12 * 256
    ],
)
def test_experts_are_multiplied_with_their_padding(engine, width, padded):
    """gpt-oss on a B200: hidden size and width of 2,880. Where arithmetic binds, time grows with what is multiplied."""
    (rate,) = setup("gpt_oss_120b", "b200_sxm", "mxfp4", engine=engine).rates.moe["tp"]
    rate = replace(rate, bandwidth=1e30, t0=0.0, handling=np.inf, per_expert=0.0)
    rows = ExpertRows(picks=1e6, distinct=128.0, experts=128.0, hidden=2880.0, width=width)
    work = expert_work(rows, weight_bytes=MXFP4.bytes)
    assert moe_cost(rows, work, rate).time == pytest.approx(padded * work.flops / rate.flops, rel=1e-9)


@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm", "h20_sxm"])
def test_a_kernel_that_was_timed_with_a_bad_tactic_gives_way_to_one_that_stands_for_it(system):
    """vLLM's experts in fp8 with a scale a tensor: its kernels of scaled blocks, told and labelled as assumed."""
    rates = setup("llama_4_maverick", system, "fp8", engine="vllm").rates
    blocks = setup("deepseek_r1", system, "fp8", engine="vllm").rates
    assert rates.moe == blocks.moe
    taken = next(each for each in rates.used if each.kind == "experts")
    assert "stands for W8A8, a scale for each tensor or channel" in taken.text
    assert trust_of(taken.fits) == Trust.ASSUMED
    own = next(each for each in blocks.used if each.kind == "experts")
    assert "stands for" not in own.text
    assert trust_of(own.fits) in (Trust.FITTED, Trust.INHERITED)


def test_a_format_without_rows_or_a_word_runs_as_its_dense_kernels_do():
    """A100: no table holds MXFP4 and nothing is said of it: the experts of bf16, weights expanded."""
    plain, packed = (
        setup("gpt_oss_120b", "a100_sxm_80gb", name, engine="vllm").rates.moe["tp"] for name in ("bf16", "mxfp4")
    )
    assert plain == packed


def test_scaled_blocks_are_multiplied_where_the_gpu_can():
    assert MXFP4.fastest({"bf16", "fp8", "nvfp4"}) == "fp8"
    assert MXFP4.fastest({"bf16", "fp8"}) == "bf16"
    assert MXFP4.bytes * 32 == 32 * 0.5 + 1  # 32 values of 4 bits and one scale of 8
