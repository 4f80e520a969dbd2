"""Grids: the batch axis, points that do not fit, what may only grow the feasible set; Pareto fronts and areas."""

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.domain import BOUNDS, Sharding, Status
from disagg_sim.errors import InputError, UnknownNameError
from disagg_sim.physics.setup import setup
from disagg_sim.search import blocks, pareto
from disagg_sim.search.axes import batch_axis, batch_sizes
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.search.pareto import area, best_from, hypervolume, pareto_front, pareto_mask
from disagg_sim.search.phase_grid import CHOSEN_FORMS
from disagg_sim.workload.lengths import lengths

GB200 = setup("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv")
R1 = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
A100 = setup("llama_3_1_405b", "a100_sxm_80gb", "bf16")


def llama_decode(mappings, batch):
    return decode_grid(GB200, mappings, lengths(4096, 512), batch=batch)


def tensor_parallel(*degrees: int) -> list[Sharding]:
    return [Sharding(tp_attn=n, tp_ffn=n) for n in degrees]


def test_a_step_takes_as_long_however_many_drafts_are_accepted():
    one = Sharding(tp_attn=4, tp_ffn=4, draft_tokens=2)
    few, many = (
        decode_grid(setup("llama_3_1_70b", "h200_sxm", "fp8", speculation=said), one, lengths(4096, 512), batch=[8, 64])
        for said in ("draft_model llama_3_1_8b 0.6 0.5", "draft_model llama_3_1_8b 0.9 0.5")
    )
    assert few.step == pytest.approx(many.step, rel=1e-12)
    assert np.all(many.latency < few.latency)


def test_batches_are_four_a_doubling():
    assert batch_sizes(64).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert batch_sizes(1).tolist() == [1]
    for start in (8, 128, 4096):
        assert sum(start <= b < 2 * start for b in batch_sizes(10_000)) == 4


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_batch_axis_ends_at_the_memory_limit(phase):
    """The last batch fits on some mapping, the next step of the axis on none."""
    table = Sharding.stack([*tensor_parallel(1, 2, 4, 8), Sharding(pp=8)])
    axis = batch_axis(GB200, table, lengths(4096, 512), phase=phase)
    beyond = next(b for b in batch_sizes(4 * int(axis[-1])).tolist() if b > axis[-1])
    score = decode_grid if phase == "decode" else prefill_grid
    done = score(GB200, table, lengths(4096, 512), batch=[int(axis[-1]), beyond])
    assert done.feasible[:, 0].any()
    assert not done.feasible[:, 1].any()
    table = done.to_frame()
    assert np.array_equal(table["ttl_s" if phase == "decode" else "ftl_s"], np.ravel(done.latency))
    assert table[["gpus", "batch"]].to_numpy().tolist() == [[n, b] for n in done.gpus for b in done.batch]


def test_points_that_do_not_fit_keep_their_place():
    """Llama-405B in bf16 on one A100: nothing fits, and the grid says by how much."""
    done = decode_grid(A100, tensor_parallel(1, 8), lengths(1024, 128), batch=[1, 4096])
    assert done.latency.shape == done.status.shape == (2, 2)
    assert done.status[0].tolist() == [Status.OUT_OF_MEMORY] * 2
    assert np.all(np.isfinite(done.latency))
    assert np.all(done.latency > 0)
    assert done.memory_bytes[0, 0] > 2 * 400e9 > done.memory_limit
    assert done.memory_bytes[1, 0] > done.memory_limit  # 811 GB over 8 GPUs of 80 GB
    assert replace(done, memory_bytes=np.full((2, 2), done.memory_limit)).feasible.all()  # full to the last byte


def test_batch_axis_keeps_one_batch_when_nothing_fits():
    table = Sharding.stack(tensor_parallel(1))
    axis = batch_axis(A100, table, lengths(1024, 128), phase="decode")
    assert axis.tolist() == [1]


def test_blocks_do_not_change_the_grid(monkeypatch):
    args = (R1, enumerate_mappings(R1, max_gpus=16), lengths(2048, 256))
    whole = [score(*args, batch=[1, 8, 64]) for score in (decode_grid, prefill_grid)]
    monkeypatch.setattr(blocks, "BLOCK_POINTS", 7)
    cut = [score(*args, batch=[1, 8, 64]) for score in (decode_grid, prefill_grid)]
    for a, b in zip(whole, cut, strict=True):
        for name in ("latency", "request_rate", "memory_bytes"):  # the last digit hangs on the exponent's shape
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-14)
        for name in ("status", "bound", "microbatches"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name


def test_rates_follow_from_latencies():
    """Decode: B/(TTL*(OSL-1)). Prefill in one stage: b/FTL; in a pipeline more, since stages overlap."""
    done = llama_decode(tensor_parallel(2, 4), batch=[1, 8, 32])
    assert done.request_rate == pytest.approx(done.batch / (done.latency * 511), rel=1e-12)
    prefill = prefill_grid(GB200, [Sharding(), Sharding(pp=4)], lengths(4096, 512), batch=[1, 8])
    flat, deep = prefill.mappings.pp == 1, prefill.mappings.pp == 4
    assert prefill.request_rate[flat] == pytest.approx(prefill.batch / prefill.latency[flat], rel=1e-12)
    assert np.all(prefill.request_rate[deep] > prefill.batch / prefill.latency[deep])


def test_chunks_are_tried_on_pipelines_and_below_the_prompt_only():
    done = prefill_grid(
        GB200, [Sharding(), Sharding(pp=4)], lengths(4096, 512), batch=[1], chunk_tokens=[512, 2048, 4096, 8192]
    )
    assert list(zip(done.mappings.pp.tolist(), done.mappings.chunk_tokens.tolist(), strict=True)) == [
        (1, 0),
        (4, 0),
        (4, 512),
        (4, 2048),
    ]
    assert done.microbatches[:, 0].tolist() == [1, 1, 8, 2]
    assert done.mappings[2] == Sharding(pp=4, chunk_tokens=512)


def test_kept_keys_and_values_are_taken_only_where_they_fit_and_help():
    """A free MLA form: faster or equal to every forced one that fits, memory as counted for the form taken."""
    args = {"batch": [8, 64, 128], "chunk_tokens": [1024]}
    mappings = [Sharding(dp_attn=8, ep=8, pp=4), Sharding(dp_attn=4, ep=4, pp=16)]
    free, cached, naive = (
        prefill_grid(R1, mappings, lengths(65_536, 512), mla_form=form, **args) for form in ("auto", "cached", "naive")
    )
    chunked = free.mappings.chunk_tokens > 0
    kept = free.mla_form == CHOSEN_FORMS.index("cached")
    assert np.array_equal(kept, chunked[:, None] & (free.memory_bytes == cached.memory_bytes))
    assert kept.any()
    assert not kept[chunked].all()
    assert np.all(free.feasible[kept])
    assert np.all(free.request_rate[naive.feasible] >= naive.request_rate[naive.feasible] * (1 - 1e-12))
    both = cached.feasible & chunked[:, None]
    assert np.all(free.request_rate[both] >= cached.request_rate[both] * (1 - 1e-12))


def test_an_instance_is_a_point_as_a_value():
    done = llama_decode(tensor_parallel(2, 4), batch=[4, 16])
    one = done.instance(1, 0)
    assert (one.phase, one.batch, one.mapping) == ("decode", 4, Sharding(tp_attn=4, tp_ffn=4))
    assert one.latency_s == done.latency[1, 0]
    assert done.gpus.tolist() == [2, 4]
    assert done.unique_gpus.tolist() == [2, 4]
    assert done.kv_bytes_per_request == 4096 * 163_840


@pytest.mark.parametrize(
    ("model", "system", "precision", "profile", "mapping", "batch", "bound"),
    [
        ("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv", "ideal", Sharding(), 1, "memory"),  # reads its weights
        ("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv", "measured", Sharding(tp_attn=64, tp_ffn=64), 1, "latency"),
        # few tokens of context, many sequences: intensity 2*B*4/9 FLOP/B passes the ridge
        ("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv", "ideal", Sharding(), 16_384, "compute"),
        ("deepseek_r1", "h100_sxm", "fp8", "ideal", Sharding(dp_attn=64, ep=64), 65_536, "communication"),
    ],
)
def test_bound_names_the_largest_sum(model, system, precision, profile, mapping, batch, bound):
    done = decode_grid(setup(model, system, precision, profile), mapping, lengths(8, 2), batch=[batch])
    assert BOUNDS[done.bound[0, 0]] == bound


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"isl": 0}, "isl 0 is out of range"),
        ({"osl": 1}, "osl 1 is out of range.*one output token is prefill only"),
        ({"batch": [1, math.inf]}, "batch inf is out of range"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(change, message):
    args = {"model": "llama_3_1_70b", "isl": 128, "osl": 16, "batch": [1]} | change
    model, engine, isl, osl = (args.pop(name, None) for name in ("model", "engine", "isl", "osl"))
    with pytest.raises(InputError, match=message):
        decode_grid(setup(model, "gb200_nvl72", "nvfp4_fp8kv", engine=engine), Sharding(), lengths(isl, osl), **args)


def test_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(UnknownNameError, match="llama_3_1_70b"):
        setup("llama_3_1_70", "gb200_nvl72", "nvfp4_fp8kv")
    with pytest.raises(UnknownNameError, match="unknown engine 'trtlm', did you mean 'trtllm'"):
        setup("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv", engine="trtlm")


@pytest.mark.parametrize("chunk", [-5, "big", math.nan, 512.7])
def test_chunks_are_whole(chunk):
    with pytest.raises(InputError, match=f"chunk_tokens {chunk} is out of range; allowed: whole numbers from 0"):
        prefill_grid(GB200, Sharding(pp=2), lengths(128, 16), chunk_tokens=[64, chunk])


def test_sizes_of_an_array_keep_the_bounds_of_a_list():
    for values in ([8, 10**10], [0, 8]):
        with pytest.raises(InputError, match=r"batch .* is out of range; allowed: whole numbers from 1 to 1000000000"):
            decode_grid(GB200, Sharding(pp=2), lengths(128, 16), batch=np.array(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": "decod"}, "phase 'decod' is unknown, did you mean 'decode'"),
        ({"mappings": Sharding(pp=100)}, "pp above 80 layers"),
    ],
)
def test_bad_arguments_of_a_batch_axis_are_refused(change, message):
    args = {"mappings": [Sharding(tp_attn=4, tp_ffn=4)], "phase": "decode", "isl": 128, "osl": 16} | change
    with pytest.raises(InputError, match=message):
        batch_axis(GB200, args["mappings"], lengths(args["isl"], args["osl"]), phase=args["phase"])


small = st.integers(0, 6)

points = st.lists(st.tuples(small, small), max_size=30)


def beaten(pairs, i):
    """Whether a point is dominated, or repeats an earlier one, by comparing it with every other."""
    x, y = pairs[i]
    return any(
        (u >= x and v >= y and (u > x or v > y)) or ((u, v) == (x, y) and j < i) for j, (u, v) in enumerate(pairs)
    )


@given(points)
def test_mask_equals_pairwise_comparison(pairs):
    x, y = np.array(pairs, dtype=float).reshape(-1, 2).T
    assert pareto_mask(x, y).tolist() == [not beaten(pairs, i) for i in range(len(pairs))]


@given(points, st.integers(1, 9), st.integers(1, 9))
def test_a_first_look_at_some_points_changes_nothing(pairs, look, compared):
    x, y = np.array(pairs, dtype=float).reshape(-1, 2).T - 3.0
    whole = pareto_mask(x, y)
    with patch.multiple(pareto, FIRST_LOOK=look, COMPARED=compared):
        assert pareto_mask(x, y).tolist() == whole.tolist()


def test_unknown_values_are_never_on_the_front():
    assert pareto_mask([1.0, np.nan, 2.0, 3.0], [1.0, 9.0, np.nan, 0.5]).tolist() == [True, False, False, True]


def test_infinite_values_are_ordinary_values():
    assert pareto_mask([np.inf, 1.0, -np.inf], [-np.inf, 1.0, np.inf]).all()


def test_each_group_has_its_own_front_in_order_of_first_appearance():
    table = pd.DataFrame(
        {"kind": ["b", "a", "b", "a", "b"], "speed": [2.0, 1.0, 1.0, 2.0, 0.5], "load": [1.0, 9.0, 3.0, 8.0, 2.0]}
    )
    front = pareto_front(table, x="speed", y="load", by=("kind",))
    assert front["kind"].tolist() == ["b", "b", "a", "a"]
    assert front["speed"].tolist() == [1.0, 2.0, 1.0, 2.0]
    assert front["load"].tolist() == [3.0, 1.0, 9.0, 8.0]
    assert pareto_front(table, x="speed", y="load")["load"].tolist() == [9.0, 8.0]


def test_empty_table_has_an_empty_front():
    table = pd.DataFrame({"kind": [], "speed": [], "load": []})
    assert pareto_front(table, x="speed", y="load", by=("kind",)).empty
    assert pareto_front(table, x="speed", y="load").empty
    assert pareto_mask([], []).size == 0


some_points = st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.1, 50)), min_size=1, max_size=10).map(
    lambda pairs: np.array(pairs).T
)


@given(some_points, st.floats(0, 60))
def test_the_best_from_a_place_on_is_the_largest_of_those_that_reach_it(xy, at):
    reaching = [y for x, y in xy.T if x >= at]
    assert best_from(*xy, at) == max(reaching, default=0.0)


@given(some_points)
def test_beaten_points_change_no_area(xy):
    front = xy[:, pareto_mask(*xy)]
    assert hypervolume(*front) == pytest.approx(hypervolume(*xy), rel=1e-12)


@given(some_points, st.floats(0.1, 30), st.floats(0, 30), st.floats(0, 1), st.sampled_from(["linear", "log"]))
def test_areas_add_up_over_parts_of_a_range(xy, low, width, cut, axis):
    high, middle = low + width, low + cut * width
    parts = area(*xy, low=low, high=middle, axis=axis) + area(*xy, low=middle, high=high, axis=axis)
    assert parts == pytest.approx(area(*xy, low=low, high=high, axis=axis), rel=1e-9, abs=1e-9)


def test_a_log_axis_counts_every_doubling_the_same():
    """3 from 2 to 4, then 1 from 4 to 8."""
    assert area([4, 8], [3, 1], low=2, high=8, axis="log") == pytest.approx((3 + 1) * math.log(2))
    assert area([4, 8], [3, 1], low=2, high=8, axis="linear") == pytest.approx(3 * 2 + 1 * 4)


def test_no_points_have_no_area():
    assert hypervolume([], []) == 0
    assert best_from([], [], [1.0]).tolist() == [0]
