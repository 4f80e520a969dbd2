"""Whole passes against hand sums: what is exchanged, who computes which tokens, what a first chunk pays."""

import pytest
from cases import cached_setting

from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks.gqa import gqa_prefill_work
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass

HIDDEN, LINK, MOE_LAYERS = 7168, 900e9, 58


@pytest.fixture(scope="module")
def ideal_r1():
    return cached_setting("deepseek_r1", "gb200_nvl72", "ideal")


def test_tep_reduces_twice_a_layer_and_exchanges_nothing(ideal_r1):
    """61 layers, two all-reduces of B*d*2 bytes over 8 ranks in the switch: (1 + 1/8) of the message each."""
    mapping = Sharding(tp_attn=8.0, ep=8.0)
    step = decode_step(ideal_r1, mapping, batch=64.0, context=1000.0)
    by_hand = 61 * 2 * 64 * HIDDEN * 2 * 1.125 / LINK
    assert float(step.sums.communication) == pytest.approx(by_hand, rel=1e-12)


def test_dep_exchanges_the_tokens_of_each_rank(ideal_r1):
    """64 sequences on 8 ranks: 8 tokens a rank to 7*(1-(7/8)^8) others, out at 1.03 B and back at 2 B."""
    mapping = Sharding(dp_attn=8.0, ep=8.0)
    step = decode_step(ideal_r1, mapping, batch=64.0, context=1000.0)
    by_hand = MOE_LAYERS * 8 * HIDDEN * 7 * (1 - (7 / 8) ** 8) * (1.03 + 2) / LINK
    assert float(step.sums.communication) == pytest.approx(by_hand, rel=1e-12)


def test_a_mixture_reduces_inside_its_attention_groups_and_exchanges_slices(ideal_r1):
    """TP 2 x DP 4, EP 8: 16 sequences a group; two all-reduces of two ranks, and 8 tokens a GPU exchanged."""
    mapping = Sharding(tp_attn=2.0, dp_attn=4.0, ep=8.0)
    step = decode_step(ideal_r1, mapping, batch=64.0, context=1000.0)
    reduced = 61 * 2 * 16 * HIDDEN * 2 * 1.0
    exchanged = MOE_LAYERS * 8 * HIDDEN * 7 * (1 - (7 / 8) ** 8) * (1.03 + 2)
    assert float(step.sums.communication) == pytest.approx((reduced + exchanged) / LINK, rel=1e-12)


def test_idle_ranks_send_no_tokens_to_the_experts(ideal_r1):
    """One prompt on 64 DP ranks: the experts see ISL tokens; with 64 prompts, 64 times as many."""
    mapping, isl = Sharding(dp_attn=64.0, ep=64.0), 4096.0
    one, all_of_them = (prefill_pass(ideal_r1, mapping, batch=b, isl=isl).sums.compute for b in (1.0, 64.0))
    routed = MOE_LAYERS * 63 * isl * 8 * 6 * HIDDEN * 2048 / 64 / ideal_r1.system.peak_flops["nvfp4"]
    assert float(all_of_them - one) == pytest.approx(routed, rel=1e-9)


def test_a_chunk_under_a_sliding_window_reads_the_window_only():
    """100 tokens after 5000 with a window of 128: 128 read, 100 written and read, 2*4*64 elements each."""
    sizes = {"sequences": 1.0, "new": 100.0, "q_heads": 8, "kv_heads": 4, "head_dim": 64, "cache_bytes": 1.0}
    assert gqa_prefill_work(past=5000.0, window=128, **sizes).hbm_bytes == (128 + 200) * 512
    assert gqa_prefill_work(past=5000.0, window=0, **sizes).hbm_bytes == (5000 + 200) * 512
