"""The frontier's matching against exhaustive search, hand-made numbers and its laws; gains of modes."""

import math

import numpy as np
import pandas as pd
import pytest
from exhaustive import best_match
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_grid, match

from disagg_sim.errors import InfeasibleError, InputError
from disagg_sim.parquet import read_parquet, write_parquet
from disagg_sim.serving.candidates import PrefillCandidates, prefill_candidates
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.gains import Curve, gain, pointwise_gain, shared_range, where_it_pays
from disagg_sim.serving.points import COLUMNS, pareto_front

LOOSE = 1e9  # an FTL limit that nothing misses [s]

sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
rates = st.one_of(st.floats(0.02, 20), st.sampled_from([0.1, 0.2, 0.3, 1.0, 1.5, 2.0]))
configurations = st.lists(st.tuples(sizes, rates), min_size=1, max_size=6)


def grids(prefill, decode, **settings_of_both):
    gp, p = zip(*prefill, strict=True)
    gd, r = zip(*decode, strict=True)
    return make_grid("prefill", gp, p, **settings_of_both), make_grid("decode", gd, r, **settings_of_both)


@settings(max_examples=150)
@given(configurations, configurations, st.integers(2, 48))
def test_exact_matching_equals_brute_force(prefill, decode, cap):
    table = match(*grids(prefill, decode), ftl_limit=LOOSE, gpu_cap=cap)
    expected = [best_match(prefill, gd, r, cap) for gd, r in decode]
    matched = [e for e in expected if e is not None]
    assert len(table) == len(matched)
    if matched:
        best, total = zip(*matched, strict=True)
        np.testing.assert_allclose(table["request_rate_per_s"] / table["total_gpus"], best, rtol=1e-11)
        assert table["total_gpus"].tolist() == list(total)


def test_paper_matching_is_the_smallest_pair_within_three_percent():
    rng = np.random.default_rng(7)
    r = 10 ** rng.uniform(-1.5, 1.5, 200)
    gd = rng.choice([1, 2, 4, 8], 200)
    prefill, decode = make_grid("prefill", [2, 4], [0.8, 2.0]), make_grid("decode", gd, r)
    cap = 64
    table = match(prefill, decode, ftl_limit=LOOSE, gpu_cap=cap, matching="paper")
    assert (table["prefill_gpus"] == 4).all()  # 2.0/4 beats 0.8/2 requests/s/GPU
    expected = []
    for g, rate in zip(gd, r, strict=True):
        pairs = [
            (n_p * 4 + n_d * g, n_p, n_d)
            for n_p in range(1, cap // 4 + 1)
            for n_d in range(1, (cap - 4 * n_p) // g + 1)
            if abs(n_p * 2.0 / (n_d * rate) - 1) <= 0.03
        ]
        if pairs:
            expected.append(min(pairs))
    assert (
        list(zip(table["total_gpus"], table["prefill_instances"], table["decode_instances"], strict=True)) == expected
    )
    assert len(expected) < 200


def test_worked_example_of_the_rate_matching():
    """P = 0.5 requests/s/GPU at 8 GPUs; decode 120 tokens/s/GPU at OSL 2048: 107 tokens/s/GPU."""
    R = 120 / 2047
    continuous = 2048 * 0.5 * R / (0.5 + R)
    assert continuous == pytest.approx(107, abs=0.6)
    prefill = make_grid("prefill", [8], [4.0], osl=2048)
    decode = make_grid("decode", [8], [8 * R], osl=2048)
    table = disaggregated(prefill, decode, ftl_limit=LOOSE)
    assert table["tokens_per_s_per_gpu"][0] == pytest.approx(continuous, rel=2e-3)
    assert table["tokens_per_s_per_gpu"][0] <= continuous
    assert table["ctx_gen_gpu_ratio"][0] == pytest.approx(R / 0.5, rel=5e-3)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(sizes, rates, st.floats(0.1, 20)), min_size=1, max_size=8),
    configurations,
    st.lists(st.floats(0.1, 25), min_size=2, max_size=2),
)
def test_ftl_limit_is_exact_and_loosening_it_never_lowers_the_frontier(prefill, decode, limits):
    gp, p, ftl = zip(*prefill, strict=True)
    _, decode_grid = grids([(1, 1.0)], decode)
    tight, loose = sorted(limits)
    prefill_grid = make_grid("prefill", gp, p, latency=ftl)
    if min(ftl) > tight:
        with pytest.raises(InfeasibleError, match=rf"the best FTL is {min(ftl):.4g} s".replace("+", r"\+")):
            disaggregated(prefill_grid, decode_grid, ftl_limit=tight)
        return
    low, high = (disaggregated(prefill_grid, decode_grid, ftl_limit=limit) for limit in (tight, loose))
    assert (low["ftl_s"] <= tight).all()
    assert (high["ftl_s"] <= loose).all()
    assert (low["tokens_per_s_per_gpu"] <= high["tokens_per_s_per_gpu"] * (1 + 1e-12)).all()
    assert not disaggregated(prefill_grid, decode_grid, ftl_limit=min(ftl)).empty  # the limit itself is allowed


def test_slow_and_infeasible_points_are_left_out():
    decode = make_grid(
        "decode", [4, 4], [[1.0, 2.0], [3.0, 4.0]], latency=[[0.01, 0.02], [0.03, 0.05]], status=[[0, 0], [0, 1]]
    )
    table = match(make_grid("prefill", [4], [1.0]), decode, ttl_limit=0.02)
    assert table["ttl_s"].tolist() == [0.01, 0.02]
    assert table["tokens_per_s_per_user"].tolist() == [100.0, 50.0]


def test_a_decode_grid_without_feasible_points_gives_an_empty_table():
    table = match(make_grid("prefill", [4], [1.0]), make_grid("decode", [4], [1.0], status=[[1]]))
    assert table.empty
    assert list(table.columns) == [c.name for c in COLUMNS]


def test_nic_limit_acts_inside_the_match():
    """Above the limit the fast prefill of 4 GPUs gives way to the slow one of the same size."""
    prefill = make_grid("prefill", [4, 4], [8.0, 2.0], kv_bytes=1e9)  # egress 2 and 0.5 GB/s
    decode = make_grid("decode", [4, 4, 4], [1.0, 3.0, 6.0], kv_bytes=1e9)  # ingress 0.25, 0.75, 1.5 GB/s
    free = match(prefill, decode)
    assert free["kv_egress_bytes_per_s_per_gpu"].tolist() == [2e9] * 3
    limited = match(prefill, decode, nic_limit=1e9)
    assert limited["kv_egress_bytes_per_s_per_gpu"].tolist() == [0.5e9] * 2
    assert limited["kv_ingress_bytes_per_s_per_gpu"].tolist() == [0.25e9, 0.75e9]
    with pytest.raises(InfeasibleError, match=r"NIC limit of 1e\+08 B/s per GPU; the least KV egress is 5e\+08 B/s"):
        disaggregated(prefill, decode, nic_limit=1e8)


def test_points_that_lose_their_only_fitting_prefill_to_the_nic_limit_are_left_out():
    prefill = make_grid("prefill", [2, 8], [8.0, 2.0], kv_bytes=1e9)  # egress 4 and 0.25 GB/s
    decode = make_grid("decode", [2, 8], [1.0, 1.0], kv_bytes=1e9)
    limited = match(prefill, decode, nic_limit=1e9, gpu_cap=12)
    assert limited["decode_gpus"].tolist() == [2]


def test_equal_throughput_goes_to_fewer_gpus_then_to_the_lexicographic_order():
    prefill = make_grid("prefill", [8, 4], [2.0, 1.0])
    decode = make_grid("decode", [4], [1.0])
    table = disaggregated(prefill, decode)
    assert (table["prefill_gpus"][0], table["total_gpus"][0]) == (4, 8)
    prefill = make_grid("prefill", [4, 4, 4], [1.0, 1.0, 0.5], tp=[4, 2, 1])
    assert disaggregated(prefill, decode)["prefill_tp_attn"][0] == 2


@settings(max_examples=60)
@given(
    st.lists(st.tuples(sizes, rates, st.floats(0.1, 20)), min_size=2, max_size=12, unique_by=lambda row: row[:2]),
    st.randoms(use_true_random=False),
)
def test_candidates_of_blocks_merge_to_those_of_the_whole_in_any_order(prefill, random):
    def candidates(rows):
        gp, p, ftl = zip(*rows, strict=True)
        return prefill_candidates(make_grid("prefill", gp, p, latency=ftl), ftl_limit=5.0)

    whole = candidates(prefill)
    parts = [candidates([row]) for row in prefill]
    random.shuffle(parts)
    merged = parts[0]
    for part in parts[1:]:
        merged = part.merge(merged)
    pd.testing.assert_frame_equal(merged.to_frame(), whole.to_frame())
    assert merged.header() == whole.header()


def test_candidates_survive_parquet(tmp_path):
    prefill = make_grid("prefill", [4, 8, 8], [1.0, 3.0, 2.5], latency=[1.0, 2.0, 20.0])
    decode = make_grid("decode", [4, 8], [1.3, 0.7])
    candidates = prefill_candidates(prefill, ftl_limit=10.0)
    write_parquet(candidates.to_frame(), tmp_path / "c.parquet", {})
    back = PrefillCandidates.from_frame(read_parquet(tmp_path / "c.parquet"), candidates.header())
    pd.testing.assert_frame_equal(disaggregated(back, decode), disaggregated(prefill, decode))
    assert back.feasible == 3


def test_candidates_say_what_does_not_fit():
    nothing = prefill_candidates(make_grid("prefill", [4], [1.0], status=[[1]]), ftl_limit=10.0)
    with pytest.raises(InfeasibleError, match="no prefill mapping fits in memory"):
        nothing.require()


def test_arguments_out_of_range_are_refused():
    prefill, decode = make_grid("prefill", [4], [1.0]), make_grid("decode", [4], [1.0])
    for faulty in ({"ftl_limit": -1.0}, {"gpu_cap": 1}, {"nic_limit": -1.0}, {"matching": math.inf}):
        with pytest.raises(InputError, match=next(iter(faulty))):
            disaggregated(prefill, decode, **faulty)
    with pytest.raises(InputError, match="decode grid"):
        disaggregated(prefill, prefill)
    with pytest.raises(InputError, match="isl: 1024 and 2048"):
        disaggregated(prefill, make_grid("decode", [4], [1.0], isl=2048))
    with pytest.raises(InputError, match="chosen under ftl_limit 5, not 10"):
        disaggregated(prefill_candidates(prefill, ftl_limit=5.0), decode)


def test_table_follows_the_schema_and_its_front_is_per_case():
    prefill = make_grid("prefill", [4], [1.0])
    tables = [
        disaggregated(prefill, make_grid("decode", [4, 4], [[1.0, 2.0], [0.5, 3.0]], osl=osl)) for osl in (64, 128)
    ]
    assert [(c.name, c.dtype) for c in COLUMNS] == [(n, str(t)) for n, t in tables[0].dtypes.items()]
    front = pareto_front(pd.concat(tables, ignore_index=True))
    assert front["osl"].drop_duplicates().tolist() == [64, 128]
    for osl, part in front.groupby("osl"):
        alone = pareto_front(tables[0] if osl == 64 else tables[1])
        assert part["ttl_s"].tolist() == alone["ttl_s"].tolist()
        assert part["tokens_per_s_per_user"].is_monotonic_increasing
        assert part["tokens_per_s_per_gpu"].is_monotonic_decreasing


# a: 12 up to 20 tokens/s/user, 6 up to 40, 1 up to 80.  b: 6 up to 10, 4 up to 40.
A = Curve(np.array([20.0, 40.0, 80.0]), np.array([12.0, 6.0, 1.0]))

B = Curve(np.array([10.0, 40.0]), np.array([6.0, 4.0]))

curves = st.lists(st.tuples(st.floats(1.0, 1e3), st.floats(1e-2, 1e4)), min_size=1, max_size=12).map(
    lambda points: Curve(*np.array(points).T)
)


def table(mode: str, curve: Curve, **columns: object) -> pd.DataFrame:
    points = {"tokens_per_s_per_user": curve.x, "tokens_per_s_per_gpu": curve.y}
    return pd.DataFrame({**columns, "mode": mode, **points})


def test_the_gain_at_a_point_is_that_of_the_best_point_beyond():
    found = pointwise_gain(A, B, [5, 10, 15, 20, 30, 40, 60, 100])
    assert found[:7].tolist() == [2, 2, 3, 3, 1.5, 1.5, math.inf]
    assert math.isnan(found[7])
    assert pointwise_gain(B, A, [60]).tolist() == [0]


def test_areas_by_hand():
    """From 20, where both have points, to 40: a = 6, b = 4. From 10: a = 12 then 6, b = 4; log widths ln 2 each."""
    assert shared_range(A, B) == (20, 40)
    assert gain(A, B).area_ratio == pytest.approx(1.5)
    linear = gain(A, B, low=10, axis="linear")
    assert linear.area_ratio == pytest.approx((12 * 10 + 6 * 20) / (4 * 30))
    log = gain(A, B, low=10, high=1000, axis="log")
    assert (log.low, log.high) == (10, 40)
    assert log.area_ratio == pytest.approx((12 + 6) / (4 + 4))


def test_the_hypervolume_credits_what_only_one_reaches():
    assert gain(A, B).hypervolume_ratio == pytest.approx((12 * 20 + 6 * 20 + 1 * 40) / (6 * 10 + 4 * 30))


def test_the_largest_gain_and_the_share_of_the_range_above_a_worth():
    found = gain(A, B, low=10, axis="linear", worth=2.0)
    assert (found.largest, found.largest_at) == (3, 20)
    assert found.share_above == pytest.approx(10 / 30)
    assert gain(A, B, low=10, axis="log", worth=2.0).share_above == pytest.approx(0.5)


def test_without_a_common_range_there_is_no_area_ratio():
    found = gain(A, B, low=50)
    assert math.isnan(found.area_ratio)
    assert math.isnan(found.low)
    assert found.hypervolume_ratio > 1


@given(curve=curves, factor=st.floats(0.01, 100), axis=st.sampled_from(["linear", "log"]))
def test_scaling_a_frontier_by_a_factor_gains_that_factor(curve, factor, axis):
    found = gain(Curve(curve.x, factor * curve.y), curve, axis=axis)
    for value in (found.area_ratio, found.hypervolume_ratio, found.largest):
        assert value == pytest.approx(factor, rel=1e-9)
    assert pointwise_gain(Curve(curve.x, factor * curve.y), curve, curve.x) == pytest.approx(factor, rel=1e-9)


def test_where_it_pays_takes_the_best_of_both_colocated_modes():
    piggyback = Curve(np.array([40.0]), np.array([3.0]))
    frontier = pd.concat([table("disaggregated", A), table("colocated", piggyback), table("piggyback", B)])
    (row,) = where_it_pays(frontier.assign(model="m", system="s", isl=8, osl=2), low=10).to_dict("records")
    assert (row["model"], row["system"], row["isl"], row["osl"]) == ("m", "s", 8, 2)
    assert row["area_ratio"] == pytest.approx((12 + 6) / (4 + 4))
    assert (row["low"], row["high"], row["disaggregated_reach"], row["colocated_reach"]) == (10, 40, 80, 40)
    assert row["pays"] == "everywhere"


@pytest.mark.parametrize(
    ("factor", "low", "said"),
    [(1.0, 10, "everywhere"), (0.5, 10, "mostly"), (0.5, 15, "partly"), (0.5, 25, "nowhere"), (0.1, 10, "nowhere")],
)
def test_the_verdict_follows_the_share_of_the_range(factor, low, said):
    """The gain is 3 up to 20 and 1.5 from there to 40, times the factor; from 10, ln 2 lies on either side."""
    frontier = pd.concat([table("disaggregated", Curve(A.x, factor * A.y)), table("colocated", B)])
    assert where_it_pays(frontier.assign(model="m"), low=low)["pays"].tolist() == [said]


def test_settings_are_told_apart_and_lonely_modes_said():
    frontier = pd.concat(
        [
            table("disaggregated", A, system="one"),
            table("colocated", B, system="one"),
            table("disaggregated", A, system="two"),
            table("piggyback", B, system="three"),
        ]
    )
    found = where_it_pays(frontier)
    assert found["system"].tolist() == ["one", "two", "three"]
    assert found["pays"].tolist() == ["everywhere", "disaggregated only", "colocated only"]
    assert where_it_pays(frontier[frontier["system"] == "one"], low=60)["pays"].tolist() == ["no common range"]


def test_cases_of_one_setting_under_other_limits_are_told_apart():
    pair = pd.concat([table("disaggregated", A), table("colocated", B)]).assign(model="m")
    found = where_it_pays(pd.concat([pair.assign(case="tight"), pair.assign(case="loose")]))
    assert found["case"].tolist() == ["tight", "loose"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: gain(A, B, axis="logg"), "did you mean 'log'"),
        (lambda: gain(A, B, low=30, high=20), "0 < low <= high"),
        (lambda: where_it_pays(table("colocate", A, model="m")), "did you mean 'colocated'"),
    ],
)
def test_wrong_input_is_one_line(call, said):
    with pytest.raises(InputError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
