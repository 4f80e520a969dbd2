"""Pools on different systems, matched per GPU, per USD and per W: hand-made cases, exhaustive search, limits."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from exhaustive import best_match, fewest_gpus
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import SETUP, SYSTEM, make_grid, match

import disagg_sim as ds
from disagg_sim.errors import InputError
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.costs import usd_per_gpu_hour, with_cost
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.points import COLUMNS, COST_COLUMNS, pareto_front
from disagg_sim.serving.pool_program import MatchOptions
from disagg_sim.serving.pools import plan_pools

LEFT = replace(SYSTEM, name="left", tdp=300.0)
RIGHT = replace(SYSTEM, name="right", tdp=1200.0)


def with_setup(grid, **changes):
    """A grid whose setup is another in some of its parts."""
    return replace(grid, setup=replace(grid.setup, **changes))


def on(system, grid):
    return with_setup(grid, system=system)


def recipe(name, cache):
    """A recipe of that name that stores its cache in a format."""
    precision = SETUP.precision
    return replace(precision, name=name, cache=replace(precision.cache, name=cache))


LOOSE = 1e9  # an FTL limit that nothing misses [s]

sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
rates = st.one_of(st.floats(0.02, 20), st.sampled_from([0.1, 0.2, 0.3, 1.0, 1.5, 2.0]))
configurations = st.lists(st.tuples(sizes, rates), min_size=1, max_size=6)
gpu_prices = st.one_of(st.floats(0.05, 20), st.sampled_from([0.5, 1.0, 2.0, 3.5]))


def grids(prefill, decode, **common):
    """Prefill on LEFT, decode on RIGHT; from (gpus, rate) pairs."""
    (gp, p), (gd, r) = zip(*prefill, strict=True), zip(*decode, strict=True)
    return (on(LEFT, make_grid("prefill", gp, p, **common)), on(RIGHT, make_grid("decode", gd, r, **common)))


def prices_of(left, right):
    return {"left": left, "right": right}


@settings(max_examples=80)
@given(configurations, configurations, st.integers(2, 48), gpu_prices, gpu_prices)
def test_matching_per_usd_equals_brute_force(prefill, decode, cap, left, right):
    table = match(*grids(prefill, decode), ftl_limit=LOOSE, gpu_cap=cap, per=prices_of(left, right))
    expected = [best_match(prefill, gd, r, cap, left, right) for gd, r in decode]
    matched = [e for e in expected if e is not None]
    assert len(table) == len(matched)
    if matched:
        best, total = zip(*matched, strict=True)
        np.testing.assert_allclose(table["request_rate_per_s"] / table["usd_per_hour"], best, rtol=1e-11)
        np.testing.assert_allclose(table["tokens_per_usd"], np.array(best) * 101 * 3600, rtol=1e-11)
        assert table["total_gpus"].tolist() == list(total)


def test_decode_twice_as_dear_takes_fewer_decode_instances():
    """p = 1, r = 0.65 on 3 GPUs. Per GPU 1/3 (1 + 2) beats 0.65/2 (1 + 1); at prices 1 and 2, 0.65/3 beats 1/5."""
    both = grids([(1, 1.0)], [(1, 0.65)])
    row = disaggregated(*both, gpu_cap=3, ftl_limit=LOOSE).iloc[0]
    assert (row["prefill_instances"], row["decode_instances"]) == (1, 2)
    row = disaggregated(*both, gpu_cap=3, ftl_limit=LOOSE, per=prices_of(1.0, 2.0)).iloc[0]
    assert (row["prefill_instances"], row["decode_instances"], row["usd_per_hour"]) == (1, 1, 3.0)
    assert row["tokens_per_usd"] == pytest.approx(0.65 * 101 * 3600 / 3)
    assert row["tokens_per_s_per_gpu"] == pytest.approx(0.65 * 101 / 2)


def test_rows_name_both_sides():
    prefill, decode = grids([(1, 1.0)], [(2, 1.0)])
    profile = replace(prefill.setup.profile, name="optimistic")
    prefill = with_setup(prefill, precision=recipe("fp8", "fp8"), profile=profile, engine="a")
    decode = with_setup(decode, precision=recipe("nvfp4_fp8kv", "fp8"))
    row = disaggregated(prefill, decode, ftl_limit=LOOSE).iloc[0]
    own = ("system", "precision", "profile", "engine")
    assert row[list(own)].tolist() == ["right", "nvfp4_fp8kv", "measured", ""]
    assert row[[f"prefill_{name}" for name in own]].tolist() == ["left", "fp8", "optimistic", "a"]
    same = disaggregated(make_grid("prefill", [1], [1.0]), make_grid("decode", [2], [1.0]), ftl_limit=LOOSE).iloc[0]
    assert same[[f"prefill_{name}" for name in own]].tolist() == same[list(own)].tolist()


def test_a_cache_in_another_format_is_refused_in_one_line():
    prefill, decode = grids([(1, 1.0)], [(2, 1.0)])
    prefill = with_setup(prefill, precision=recipe("fp8", "fp8"))
    decode = with_setup(decode, precision=recipe("fp8_bf16kv", "bf16"))
    text = r"cache in fp8 \(precision fp8\) and decode reads bf16 \(precision fp8_bf16kv\)"
    with pytest.raises(InputError, match=text) as refused:
        disaggregated(prefill, decode)
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match=text):
        plan_pools([prefill, decode], gpu_budget=8)


def test_cost_columns_are_there_when_asked_for_and_never_empty():
    both = grids([(1, 1.0)], [(2, 1.0), (4, 1.5)])
    names = [column.name for column in COLUMNS]
    for per, columns in COST_COLUMNS.items():
        table = disaggregated(*both, ftl_limit=LOOSE, per=prices_of(1.0, 2.0) if per == "usd" else per)
        assert list(table.columns) == [*names, *(column.name for column in columns)]
        assert not table.isna().any().any()
        nothing = replace(both[1], status=np.ones_like(both[1].status))
        empty = disaggregated(both[0], nothing, per=prices_of(1.0, 2.0) if per == "usd" else per)
        assert empty.dtypes.to_dict() == table.dtypes.to_dict()


def test_an_unknown_price_names_its_key_and_the_way_out():
    both = grids([(1, 1.0)], [(2, 1.0)])
    with pytest.raises(InputError, match=r"usd_per_gpu_hour of right is not known; give .* \{'right': \.\.\.\}"):
        disaggregated(*both, per={"left": 1.0})
    for faulty, text in (
        ({"lefft": 1.0}, "'lefft' is not a system, did you mean 'left'"),
        (prices_of(1.0, float("nan")), "right must be above 0 USD/h, got nan"),
    ):
        with pytest.raises(InputError, match=text):
            disaggregated(*both, per=faulty)


def test_the_price_is_the_middle_of_the_market_unless_given():
    h100 = ds.load_system("h100_sxm")
    low, high = h100.usd_per_gpu_hour
    assert low < usd_per_gpu_hour("h100_sxm") == (low + high) / 2 < high
    assert usd_per_gpu_hour(h100, {"h100_sxm": 2.5}) == 2.5
    with pytest.raises(InputError, match="usd_per_gpu_hour of gb200_nvl72 is not known"):
        usd_per_gpu_hour("gb200_nvl72")


def test_fronts_per_gpu_and_per_usd_differ():
    """Decode A: 1 GPU of 1 USD/h; decode B is as fast a user and twice the throughput, at four times the price."""
    prefill = on(LEFT, make_grid("prefill", [1], [1.0]))
    cheap, dear = (
        on(system, make_grid("decode", [1], [rate], latency=[0.02])) for rate, system in ((0.5, LEFT), (1.0, RIGHT))
    )
    points = pd.concat(
        [disaggregated(prefill, d, ftl_limit=LOOSE, per=prices_of(1.0, 4.0)) for d in (cheap, dear)], ignore_index=True
    )
    assert len(pareto_front(points)) == 2  # a case each
    case = ("model", "isl", "osl")
    assert pareto_front(points, by=case)["system"].tolist() == ["right"]
    assert pareto_front(points, by=case, throughput="tokens_per_usd")["system"].tolist() == ["left"]
    with pytest.raises(InputError, match="no column 'token_per_usd', did you mean 'tokens_per_usd'"):
        pareto_front(points, throughput="token_per_usd")


@pytest.fixture(scope="module")
def shipped():
    """Llama-3.1-8B: prefill on H100 in fp8, decode on GB200 in nvfp4, both with an fp8 cache; few mappings."""
    grid = {}
    for phase, scored, system, precision in (
        ("prefill", ds.prefill_grid, "h100_sxm", "fp8"),
        ("decode", ds.decode_grid, "gb200_nvl72", "nvfp4_fp8kv"),
        ("home", ds.decode_grid, "h100_sxm", "fp8"),
    ):
        at = ds.setup("llama_3_1_8b", system, precision)
        grid[phase] = scored(at, ds.enumerate_mappings(at, max_gpus=4), ds.lengths(2048, 256))
    return grid


def test_cost_of_one_system_can_be_added_afterwards(shipped):
    plain = disaggregated(shipped["prefill"], shipped["home"])
    for per in ("usd", "watt"):
        asked = disaggregated(shipped["prefill"], shipped["home"], per=per)
        pd.testing.assert_frame_equal(with_cost(plain, per), asked)
    assert with_cost(plain, "gpu") is plain


def test_cost_of_co_located_points():
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    mappings, options = ds.enumerate_mappings(at, max_gpus=2), ds.Colocation(batch=(1, 8))
    points = colocated(at, mappings, ds.lengths(1024, 64), options=options)
    priced = with_cost(points, {"h100_sxm": 2.5})
    np.testing.assert_allclose(priced["usd_per_hour"], 2.5 * points["total_gpus"])
    np.testing.assert_allclose(priced["tokens_per_usd"], points["tokens_per_s_per_gpu"] * 3600 / 2.5)


def test_a_plan_says_on_which_system_each_instance_runs(shipped):
    plan = plan_pools([shipped["prefill"], shipped["decode"]], gpu_budget=24)
    assert plan.status == "optimal"
    assert plan.total_gpus == plan.deployment.prefill.gpus + plan.deployment.decode.gpus <= 24
    for pool, system in ((plan.deployment.prefill, "h100_sxm"), (plan.deployment.decode, "gb200_nvl72")):
        assert {instance.system for instance, _ in pool.members} == {system}
        assert f"system='{system}'" in repr(pool)
        assert f"{pool.gpus} {pool.members[0][0].phase} GPUs of {system}" in plan.message


@settings(max_examples=30)
@given(configurations, configurations, st.floats(0.1, 8), gpu_prices, gpu_prices)
def test_lowest_cost_on_two_systems_equals_enumeration(prefill, decode, required, left, right):
    plan = plan_pools(
        grids(prefill, decode),
        ftl_limit=LOOSE,
        required_rate=required,
        per=prices_of(left, right),
        options=MatchOptions(mixing_gain=0.0),
    )
    n_p, n_d = (fewest_gpus(side, required, most=7000) for side in (prefill, decode))
    assert plan.cost == pytest.approx(n_p * left + n_d * right, rel=1e-9)
    assert plan.total_gpus == n_p + n_d
