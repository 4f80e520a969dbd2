"""Attention kernels: cases derived by hand, limits, and what may never happen."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.physics.attention import AttentionRate, decode_attention_cost, prefill_attention_cost
from disagg_sim.physics.blocks.gqa import gqa_decode_work, gqa_prefill_work
from disagg_sim.physics.blocks.mla import MlaDims, absorbed_shape, expanded_shape, mla_work
from disagg_sim.physics.rates import SOFTMAX
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import AttentionShape, Work
from disagg_sim.units import US

PREFILL = AttentionRate(1e15, 2e12, 10 * US, s_half=128.0, multiprocessors=100, io_bandwidth=1e12, tail=0.4)
DECODE = AttentionRate(
    1e15, 2e12, 10 * US, multiprocessors=100, block_time=2 * US, serial_time=3 * US, serial_power=0.5, ramp=4 * US
)


def prefill(rate=PREFILL, *, sequences=1.0, new=1024.0, past=0.0, q_heads=8.0, kv_heads=2.0, window=0.0):
    sizes = {"sequences": sequences, "new": new, "past": past, "q_heads": q_heads, "kv_heads": kv_heads}
    work = gqa_prefill_work(**sizes, head_dim=128, window=window, cache_bytes=2)
    held = gqa_decode_work(
        sequences=sequences,
        context=past,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=128,
        window=window,
        cache_bytes=2,
    ).hbm_bytes
    shape = AttentionShape(sequences, new, past, q_heads, kv_heads, 128, held, window)
    return prefill_attention_cost(work, shape, work.flops / (sequences * q_heads * 256 * new), rate).time


def decode(rate=DECODE, *, sequences=8.0, context=4096.0, q_heads=32.0, kv_heads=8.0, cache_bytes=2):
    work = gqa_decode_work(
        sequences=sequences,
        context=context,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=128,
        window=0.0,
        cache_bytes=cache_bytes,
    )
    return decode_attention_cost(work, AttentionShape(sequences, 1.0, context - 1, q_heads, kv_heads, 128), rate).time


def test_a_prefill_by_hand():
    """2.1496 GFLOP at 1 PFLOP/s and 1 + 128/1025: 2.418 us; 10240 rows of 512 B at 1 TB/s: 5.243 us.

    The longest block multiplies 128 rows with 1024 keys, 67.1 MFLOP at 10 TFLOP/s: 6.711 us, 0.4 of which shows.
    """
    assert prefill() == pytest.approx(20.345 * US, rel=1e-4)


def test_a_lone_long_prompt_of_few_heads_takes_as_long_as_its_longest_block():
    balanced = dataclasses.replace(PREFILL, tail=0.0)
    longest = 128 * 512 * 8192 / 1e13
    assert prefill(balanced, new=8192.0, q_heads=1.0, kv_heads=1.0) == pytest.approx(10 * US + longest, rel=1e-12)


@pytest.mark.parametrize(
    ("arithmetic", "heads", "tflops", "others", "tflops_of_others"),
    [
        ("bf16", 64, 497, 128, 648),  # FlashAttention-3 on an H100, 16k tokens (arXiv:2407.08608, figure 5)
        ("fp8", 64, 613, 256, 1171),  # the same (figure 7); no share was set by it
        ("bf16", 64, 1225, 128, 1613),  # FlashAttention-4 on a B200 (pull request 2605; its paper); nor by this
    ],
)
def test_small_heads_take_longer_than_their_multiplies_tell(arithmetic, heads, tflops, others, tflops_of_others):
    """Time of a score goes as 4*h FLOP over the published FLOP/s."""

    def of_a_score(head_dim):
        shape = AttentionShape(1.0, 65536.0, 0.0, 32.0, 32.0, head_dim)
        work = Work(4.0 * 32 * head_dim * 65536.0**2 / 2, 0.0)
        rate = replace(PREFILL, softmax=SOFTMAX[arithmetic], io_bandwidth=np.inf)
        return prefill_attention_cost(work, shape, 65536.0, rate).time

    published = (heads / tflops) / (others / tflops_of_others)
    assert of_a_score(heads) / of_a_score(others) == pytest.approx(published, rel=0.02)


def test_a_decode_by_hand():
    """134.2 MB of cache and 0.13 MB of queries and outputs at 2 TB/s: 67.17 us; 64 blocks of 2 us on 100: 1.28 us.

    4096 keys: 3 us * 4**0.5 = 6 us; the ramp 4 us * 134.2/174.2 = 3.082 us. Multiplying 16 rows for 4: 2.1 us, hidden.
    """
    assert decode() == pytest.approx((10 + 3.0816 + np.sqrt(67.1744**2 + 1.28**2 + 6.0**2)) * US, rel=1e-5)


def test_without_tiles_and_blocks_both_are_the_plain_roofline():
    plain = AttentionRate(1e15, 2e12, 10 * US, s_half=500.0)
    flops = 4 * 128 * 8 * 1024 * 1025 / 2
    assert prefill(plain) == pytest.approx(10 * US + flops / 1e15 * (1 + 500 / 1025), rel=1e-12)
    assert decode(plain) == pytest.approx(10 * US + 134217728 / 2e12, rel=1e-12)


#: A key takes a block of 128 rows 65536 FLOP, 6.5536 ns at 1/100 of 1 PFLOP/s.
KEY = 4 * 128 * 128 / 1e13
ALONE = AttentionRate(1e15, np.inf, 0.0, s_half=128.0, multiprocessors=100, io_bandwidth=np.inf)
SHARED = replace(ALONE, splits_keys=True)


def new_part(new):
    """Keys that a multiprocessor walks for 8 heads of new tokens alone: S(S+1)/2 pairs, tiles on the diagonal whole."""
    return 8 * new * (new + 1 + 128) / 2 / 128 / 100


def test_blocks_on_a_past_run_in_whole_rounds():
    """8 heads of 12 tiles are 96 blocks on 100 multiprocessors, one round; of 13 tiles 104, two rounds of the past."""
    one, two = (prefill(ALONE, new=128.0 * tiles, past=1e6) for tiles in (12, 13))
    assert one == pytest.approx((1e6 + 12 * 128) * KEY, rel=1e-9)
    assert two == pytest.approx((2e6 + new_part(13 * 128)) * KEY, rel=1e-9)


def test_a_tail_is_that_of_the_new_keys():
    """Blocks pass a past in whole rounds; what sticks out at the end of a grid comes of their unequal new keys."""
    times = [prefill(replace(ALONE, tail=tail), new=1664.0, past=1e6) for tail in (0.0, 0.4)]
    assert times[1] - times[0] == pytest.approx(0.4 * 1664 * KEY, rel=1e-6)


def test_few_tokens_on_a_past_take_as_long_as_a_tile():
    assert prefill(ALONE, new=1.0, past=99_999.0) == pytest.approx(100_000 * KEY, rel=1e-12)
    assert prefill(ALONE, new=128.0, past=99_872.0) == pytest.approx(100_000 * KEY, rel=1e-12)


@pytest.mark.parametrize(
    ("new", "parts", "rounds"),
    [
        (32, 46, 1),  # 4 heads share a tile: 2 tiles on 100 multiprocessors, 1000/ceil(22) parts
        (128, 12, 1),  # 8 tiles: 1000/ceil(88)
        (640, 3, 2),  # 40 tiles: 1000/ceil(440); 120 blocks are two rounds
        (1248, 2, 2),  # 78 tiles: 1000/ceil(858)
        (1280, 1, 1),  # 80 tiles fill 0.8 of them
    ],
)
def test_keys_are_split_over_the_multiprocessors_that_tiles_leave_idle(new, parts, rounds):
    """2 KV heads of 4 query heads on 128000 keys, 1000 blocks of 128."""
    time = prefill(SHARED, new=float(new), past=128_000.0 - new)
    keys = max(128_000 / parts, rounds * (128_000 - new) / parts + new_part(new))
    assert time == pytest.approx(keys * KEY, rel=1e-9)


def test_partial_outputs_are_written_and_read():
    """64 tokens of 8 heads of 128 elements are 524288 B a part, written and read; 4 tiles are split into 23 parts."""
    moved = replace(SHARED, io_bandwidth=1e12)
    exchange = 10 * 64 * 512 / 1e12
    parts = 23 * 64 * 8 * 128 * 8 / 1e12
    computed = (100_000 / 23 + new_part(64)) * KEY
    assert prefill(moved, new=64.0, past=100_000.0) == pytest.approx(computed + exchange + parts, rel=1e-9)


def test_a_window_bounds_the_longest_block_and_the_serial_time():
    wide, narrow = (AttentionShape(1.0, 512.0, 7680.0, 8.0, 8.0, 128, 0.0, window) for window in (0.0, 1024.0))
    assert (wide.longest, narrow.longest) == (8192.0, 1024.0)
    assert (wide.shortest, narrow.shortest) == (7680.0, 1024.0)


def test_no_tokens_take_the_launch_alone():
    nothing = AttentionShape(0.0, 512.0, 0.0, 8.0, 2.0, 128)
    assert prefill_attention_cost(Work(0.0, 0.0), nothing, 513.0, PREFILL).time == PREFILL.t0


def test_a_form_that_is_ruled_out_takes_forever_and_leaves_its_sums_without_nan():
    """The absorbed form of a prompt without a past multiplies for ever, so that the naive one is the cheaper."""
    cost = decode_attention_cost(Work(np.inf, 1e6), AttentionShape(1.0, 512.0, 0.0, 16.0, 1.0, 544), DECODE)
    assert np.isinf(cost.time)
    assert not np.isnan(cost.sums).any()


@pytest.mark.parametrize("heads", [8.0, 128.0])
@pytest.mark.parametrize(("form", "shape_of"), [("cached", expanded_shape), ("absorbed", absorbed_shape)])
def test_a_query_key_pair_of_latent_attention_costs_four_flop_an_element(form, shape_of, heads):
    dims = MlaDims(heads, 512, 128, 64, 128, 1.0)
    shape = shape_of(dims, 4.0, 300.0, 0.0)
    flops = mla_work(form, dims, sequences=4.0, new=300.0, past=0.0).flops
    assert 4 * shape.q_heads * shape.head_dim * 4 * 300 * 301 / 2 == pytest.approx(flops, rel=1e-12)


def test_blackwell_blocks_take_two_tiles_of_128_rows():
    rates = [setup("llama_3_1_70b", name, "bf16").rates for name in ("a100_sxm_80gb", "h100_sxm", "b200_sxm")]
    assert [rate.prefill_attention["gqa"].s_half for rate in rates] == [128.0, 128.0, 256.0]


def one_call(
    rate: AttentionRate, cache: float = 1.0, flops: float = 0.0, group: float = 1.0, keys: float = 1.0, new: float = 1.0
) -> float:
    """One sequence of ``group`` query heads on one KV head. [s]"""
    shape = AttentionShape(1.0, new, keys - 1, group, 1.0, 128)
    return float(decode_attention_cost(Work(flops, cache), shape, rate).time)


FREE = AttentionRate(np.inf, np.inf, 0.0, multiprocessors=1.0)


@pytest.mark.parametrize(("group", "filled"), [(1, 16), (16, 16), (17, 32), (24, 32), (32, 32), (33, 48)])
def test_query_rows_of_a_decode_are_multiplied_in_tiles_of_16(group, filled):
    """1 GFLOP at 1 TFLOP/s is 1 ms; a KV head with 24 query heads multiplies 32 rows: 1.333 ms."""
    slow = replace(FREE, flops=1e12)
    assert one_call(slow, flops=1e9, group=float(group)) == pytest.approx(1e-3 * filled / group, rel=1e-12)


@pytest.mark.parametrize(
    ("group", "new", "blocks"), [(1, 1, 1), (64, 1, 1), (65, 1, 2), (128, 1, 2), (129, 1, 3), (32, 4, 2)]
)
def test_a_block_of_a_decode_takes_64_query_rows(group, new, blocks):
    """Of each new token its heads: 32 that verify three drafts are 128."""
    time = one_call(replace(FREE, block_time=3 * US), group=float(group), new=float(new))
    assert time == pytest.approx(blocks * 3 * US, rel=1e-12)


def test_half_of_the_ramp_is_paid_at_a_cache_of_40_megabytes():
    assert one_call(replace(FREE, ramp=10 * US), cache=40e6) == pytest.approx(5 * US, rel=1e-12)
    assert one_call(replace(FREE, ramp=10 * US), cache=120e6) == pytest.approx(7.5 * US, rel=1e-12)


def test_the_serial_time_is_that_of_1024_keys_and_grows_with_a_power_of_them():
    """0.45 under split KV: 4,096 keys take 4^0.45 = 1.866 times as long."""
    rate = replace(FREE, serial_time=2 * US)
    assert rate.serial_power == 0.45
    assert one_call(rate, keys=1024.0) == pytest.approx(2 * US, rel=1e-12)
    assert one_call(rate, keys=4096.0) == pytest.approx(2 * 1.866066 * US, rel=1e-6)


def test_a_cache_that_l2_holds_is_read_four_times_as_fast():
    """Half of a cache of the resident size counts a quarter: 0.625; of one half as large 1/257 counts whole: 0.2529."""
    rate = replace(FREE, bandwidth=1e12, resident=30e6)
    queries = 512.0  # bytes of one query and output row of 128
    assert one_call(rate, cache=30e6) == pytest.approx((0.625 * 30e6 + queries) / 1e12, rel=1e-12)
    share = 1 / 257 + 256 / 257 / 4
    assert one_call(rate, cache=15e6) == pytest.approx((share * 15e6 + queries) / 1e12, rel=1e-12)


def test_a_prompt_of_one_token_moves_four_tenths_of_a_tile_of_queries():
    """8 query heads of 0.4*128 rows and 2 KV heads of one row, 512 B each at 1 TB/s."""
    rate = AttentionRate(np.inf, np.inf, 0.0, 128.0, multiprocessors=100.0, io_bandwidth=1e12)
    assert prefill(rate, new=1.0) == pytest.approx((8 * 51.2 + 2) * 512 / 1e12, rel=1e-12)
