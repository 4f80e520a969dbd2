"""Decode over attention and feed-forward ranks: the law of the ping-pong, its limits, and the halves of a layer."""

from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.collectives import copies_with_own
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.techniques.split.physics import Halves, Split, halves, ping_pong, split_bytes, split_step

MICRO = 1e-6


def played(attention, ffn, crossing, layers, microbatches):
    """The end of a step in which every rank takes what has waited longest; half of the crossing each way."""
    free, ready, end = [0.0, 0.0], [(0.0, batch, 0) for batch in range(microbatches)], 0.0
    while ready:
        time, batch, half = heappop(ready)
        side = half % 2
        start = max(time, free[side])
        done = start + (attention, ffn)[side]
        free[side] = done
        if half + 1 < 2 * layers:
            heappush(ready, (done + crossing / 2, batch, half + 1))
        end = max(end, done + crossing / 2)
    return end


def law(attention, ffn, crossing, layers, microbatches):
    return ping_pong(Halves((attention,), (ffn,), (crossing,), 0.0), (layers,), 0, microbatches)[0]


times = st.floats(0.0, 300.0)


@settings(max_examples=200)
@given(times, times, times, st.integers(1, 20), st.integers(1, 6))
def test_the_law_is_what_ranks_do_that_take_what_waited_longest(attention, ffn, crossing, layers, microbatches):
    assert law(attention, ffn, crossing, layers, microbatches) == pytest.approx(
        played(attention, ffn, crossing, layers, microbatches), rel=1e-9, abs=1e-9
    )


def test_a_full_pipeline_by_hand():
    """58 layers of 210 and 150 us, 60 us each way: three micro-batches fill it (3*210 >= 210 + 150 + 120), and
    0.48 ms + 0.21 ms * (3*58 - 1) = 36.8 ms. The feed-forward ranks work 150 of 210 us: idle 29 %."""
    ttl = law(210 * MICRO, 150 * MICRO, 120 * MICRO, 58, 3)
    assert ttl == pytest.approx(480 * MICRO + 210 * MICRO * (3 * 58 - 1))
    assert ttl * 1e3 == pytest.approx(36.8, abs=0.05)
    assert 1 - 3 * 58 * 150 * MICRO / ttl == pytest.approx(0.29, abs=0.005)


def test_one_micro_batch_waits_for_every_half():
    assert law(210.0, 150.0, 120.0, 58, 1) == pytest.approx(58 * 480.0)


def test_an_endlessly_fast_feed_forward_pool_leaves_attention_alone():
    """One rank after the other has all micro-batches in attention, and never waits."""
    assert law(210.0, 0.0, 0.0, 58, 4) == pytest.approx(4 * 58 * 210.0)


def test_bytes_of_a_crossing_by_hand():
    """DeepSeek-V3 on 16 ranks: 6.45 of 8 picks are on distinct ranks; 7168 elements of 1.03 and of 2 bytes."""
    at = ds.setup("deepseek_v3", "h200_sxm", "fp8", profile="ideal")
    copies, hidden = copies_with_own(8, 16), at.model.hidden
    assert copies * hidden * at.precision.dispatch_bytes == pytest.approx(47.6e3, rel=2e-3)
    assert copies * hidden * at.precision.combine_bytes == pytest.approx(92.5e3, rel=2e-3)


@pytest.fixture(scope="module")
def r1():
    return ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", profile="ideal")


def test_the_halves_of_a_layer_add_up_to_the_layer_without_its_exchange(r1):
    """As many attention as feed-forward ranks, each with the tokens of one rank: the same kernels, on other GPUs."""
    profile = replace(r1.profile, shared_expert_overlaps_dispatch=False)
    at, wide = r1.changed(profile=profile), Sharding(dp_attn=16, ep=16)
    times = halves(at, at, Split(wide, wide, 1), sequences=64.0, context=4096.0)
    without_exchange = decode_step(at, wide, batch=16 * 64, context=4096.0).sums
    own = sum(count * (times.attention[kind] + times.ffn[kind]) for kind, (_, count) in enumerate(layers_of(at.model)))
    whole = decode_step(at, wide, batch=16 * 64, context=4096.0).ttl - without_exchange.communication
    assert own + times.ends == pytest.approx(whole, rel=1e-9)


def test_memory_of_the_pools_is_that_of_a_whole_instance(r1):
    """Weights, caches and the rest of 16 + 16 GPUs: one runtime a GPU more than on 16 that do both, and the router."""
    wide = Sharding(dp_attn=16, ep=16)
    lengths = ds.lengths(4096, 512)
    held = split_bytes(r1, r1, Split(wide, wide, 1), sequences=64.0, cached=lengths.resident)
    whole = ds.decode_grid(r1, wide, lengths, batch=[16 * 64]).memory_bytes[0, 0]
    runtime = r1.profile.runtime_bytes + r1.profile.communication_library_bytes
    assert sum(held) - runtime == pytest.approx(whole, rel=0.01)


def test_a_split_over_two_domains_uses_the_nic(r1):
    near, far = (Split(Sharding(dp_attn=n, ep=n), Sharding(dp_attn=16, ep=16), 1) for n in (32, 64))
    crossing = [split_step(r1, r1, split, sequences=64.0, context=4096.0).crossing for split in (near, far)]
    assert crossing[1] > 5 * crossing[0]


def test_attention_takes_as_long_as_its_fullest_rank_and_the_rest_as_long_as_all_tokens():
    at = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    split, context = Split(Sharding(dp_attn=8, ep=8), Sharding(dp_attn=8, ep=8), 2), 4096.0
    even, fuller = (halves(at, at, split, sequences=each, context=context) for each in (64.0, 96.0))
    uneven = halves(at, at, split, sequences=64.0, context=context, fullest=96.0)
    assert (uneven.attention, uneven.ends) == (fuller.attention, fuller.ends)
    assert (uneven.ffn, uneven.crossing) == (even.ffn, even.crossing)
    times = [split_step(at, at, split, sequences=64.0, context=context, fullest=each).ttl for each in (64.0, 96.0)]
    assert times[0] == split_step(at, at, split, sequences=64.0, context=context).ttl < times[1]


def test_a_grid_counts_unequal_ranks_as_whole_decode_instances_do():
    """Of the rank that a step waits for: its sequences at their context; one rank has no other to wait for."""
    at, chat = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), "log_normal_4096_512"
    even, random = (
        ds.split_grid(at, ds.lengths(chat, rank_imbalance=each), max_gpus=16) for each in ("even", "random")
    )
    alone = even.splits.attention.dp_attn == 1
    assert np.array_equal(even.latency[alone], random.latency[alone])
    assert (random.latency[~alone] >= even.latency[~alone]).all()
    assert (random.attention_bytes[~alone] >= even.attention_bytes[~alone]).all()
    row = int(np.flatnonzero((even.splits.attention.dp_attn == 8) & (even.splits.microbatches == 2))[0])
    lengths, sequences = ds.lengths(chat, rank_imbalance="random"), even.sequences[3]
    load = lengths.on_ranks(2.0 * 8 * sequences, 8.0)
    split = Split(even.splits.attention[row], even.splits.ffn[row], 2)
    step = split_step(at, at, split, sequences=float(sequences), context=load.context, fullest=load.batch / 2)
    assert random.latency[row, 3] == pytest.approx(float(step.ttl), rel=1e-12)
