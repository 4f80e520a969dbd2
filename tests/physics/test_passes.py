"""Whole passes against hand sums, passes over a past, and tables of passes."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from cases import cached_setting
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks.gqa import gqa_prefill_work
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.passes.prompts import prompt_pass
from disagg_sim.physics.roofline import GridSums, Sums, chosen_sums, sums_at
from disagg_sim.physics.setup import setup
from disagg_sim.physics.tabulate import MANY, SMALL, DistinctCounts, distinct, distinct_rows, tabulate

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


@dataclass(frozen=True)
class Counted:
    """A function of a degree and a token count that remembers its calls."""

    calls: list[int] = field(default_factory=list, compare=False)

    def __call__(self, degree, tokens):
        self.calls.append(np.broadcast(degree, tokens).size)
        return np.sqrt(tokens) / degree, Sums(compute=tokens * degree, memory=0.25 * tokens)


def column(values):
    return np.array(values, dtype=float)[:, None]


DEGREES = st.lists(st.sampled_from([1.0, 2.0, 8.0]), min_size=1, max_size=4)

BATCHES = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(DEGREES, BATCHES)
def test_a_table_is_what_the_function_finds_at_every_point(degrees, batches):
    function, tokens = Counted(), np.ceil(np.array([batches]) / column(degrees))
    time, sums = tabulate(function, (column(degrees),), DistinctCounts(tokens))
    assert len(function.calls) == 1
    assert function.calls[0] <= len(set(degrees)) * len(np.unique(tokens))
    np.testing.assert_array_equal(time, np.sqrt(tokens) / column(degrees))
    np.testing.assert_array_equal(sums.compute, tokens * column(degrees))


@given(DEGREES, BATCHES)
def test_what_a_function_takes_beside_tokens_may_differ_by_row_or_by_point(degrees, batches):
    """A number goes to the function as it is; a column is one more degree; points are one more count."""
    tokens = np.ceil(np.array([batches]) / column(degrees))
    for own in (3.0, column(range(len(degrees))), tokens + np.arange(tokens.shape[1])):
        (found,) = tabulate(lambda d, t, other: (t / d + 100 * other,), (column(degrees),), DistinctCounts(tokens), own)
        np.testing.assert_array_equal(found, tokens / column(degrees) + 100 * own)


def test_pairs_of_counts_are_looked_up_once_each():
    calls = []

    def both(first, second):
        calls.append(first.size)
        return (10 * first + second,)

    first, second = np.array([[1, 1, 2]]), np.array([[3, 3, 4], [3, 4, 4]])
    (found,) = tabulate(both, (), DistinctCounts(first, second))
    assert found.tolist() == [[13, 13, 24], [13, 14, 24]]
    assert calls == [3]


def test_sums_at_points_are_those_of_the_whole_grid():
    function, tokens = Counted(), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    _, sums = tabulate(function, (column([1, 2]),), DistinctCounts(tokens))
    more = chosen_sums(tokens > 2, Sums(latency=1.0).plus(sums, column([1, 3])), sums)
    assert isinstance(more, GridSums)
    np.testing.assert_array_equal(sums.plus(Sums(latency=1.0)).latency, sums.latency + 1.0)
    rows, columns = np.array([0, 1, 1]), np.array([2, 0, 2])
    for whole, few in zip(more, sums_at(more, (rows, columns)), strict=True):
        np.testing.assert_array_equal(np.broadcast_to(whole, tokens.shape)[rows, columns], few)


RANDOM = np.random.default_rng(7)

KINDS = {
    "few": RANDOM.choice([0.5, 3.0, 7.25], (3, 5)),
    "many whole": RANDOM.integers(0, 40, (8, MANY)).astype(float),
    "many whole, counted": RANDOM.integers(0, 40, (2, MANY)),
    "many broken": RANDOM.choice(RANDOM.random(90) * 1e4, (8, MANY)),
    "many large": RANDOM.choice([1.0, 2.0 * SMALL, 3.0], (8, MANY)),
    "none": np.zeros((0, 4)),
}


@pytest.mark.parametrize("numbers", KINDS.values(), ids=KINDS)
def test_values_rise_and_places_find_them(numbers):
    values, place = distinct(numbers)
    expected, inverse = np.unique(numbers, return_inverse=True)
    assert values.dtype == numbers.dtype
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(place, inverse.reshape(numbers.shape))


def test_rows_are_numbered_as_they_come():
    first, place = distinct_rows([np.array([4, 1, 4, 4]), np.array([2, 2, 2, 3])])
    assert first.tolist() == [0, 1, 3]
    assert place.tolist() == [0, 1, 0, 2]


EIGHT = Sharding(tp_attn=8, tp_ffn=8)


@pytest.fixture(scope="module")
def llama():
    return setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")


@pytest.fixture(scope="module")
def r1():
    return setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal")


@pytest.mark.parametrize("past", [512, 8192, 58_976])
def test_prefix_and_rest_compute_as_much_as_the_whole(llama, past):
    """``pairs(C, 0) + pairs(S, C) = pairs(C + S, 0)``, and every token passes the layers once; each pass has a head."""
    whole, first, rest = (
        prefill_pass(llama, EIGHT, batch=1, isl=isl, past=before).sums.compute
        for isl, before in ((65_536, 0), (past, 0), (65_536, past))
    )
    head = 2 * 8192 * 128_256 / 8 / llama.system.peak_flops["bf16"]
    assert first + rest == pytest.approx(whole + head, rel=1e-5)


def test_one_token_after_a_past_is_a_decode_step(llama):
    """S = 1: the same matrices and the same cache; the prefill kernel writes the token's keys, too."""
    one = prefill_pass(llama, EIGHT, batch=64, isl=16_384, past=16_383)
    step = decode_step(llama, EIGHT, batch=64, context=16_384.0)
    assert one.ftl == pytest.approx(step.ttl, rel=1e-3)


def test_one_chunk_is_the_whole_pass(llama, r1):
    for at, mapping in ((llama, EIGHT), (r1, Sharding(dp_attn=8, ep=8))):
        passes = [
            prompt_pass(at, mapping, batch=8, isl=32_768, past=24_576, chunk_tokens=chunk).ftl for chunk in (0, 8192)
        ]
        assert passes[0] == pytest.approx(passes[1], rel=1e-9)


def test_kept_projections_of_a_prefix_are_made_once(r1):
    """A prefix cache holds latents: the form that keeps what it up-projects does so with the first chunk."""
    deep = Sharding(tp_attn=8, tp_ffn=8, pp=2)

    def compute(form, isl, past, chunk):
        done = prompt_pass(r1, deep, batch=1, isl=isl, past=past, chunk_tokens=chunk, mla_form=form)
        return done.sums.compute

    naive, kept = (compute(form, 65_536, 32_768, 32_768) for form in ("naive", "cached"))
    assert naive == pytest.approx(kept, rel=1e-9)  # one chunk: both project the prefix once
    assert compute("naive", 65_536, 32_768, 4096) > compute("cached", 65_536, 32_768, 4096)
    second_half = compute("cached", 65_536, 0, 4096) - compute("cached", 32_768, 0, 4096)
    again = 61 * 32_768 * 2 * 512 * 128 * (128 + 128) / 8 / r1.system.peak_flops["fp8"]
    assert compute("cached", 65_536, 32_768, 4096) - second_half == pytest.approx(again, rel=0.02)
