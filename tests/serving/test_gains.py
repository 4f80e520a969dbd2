"""What one frontier gains over another: step functions drawn by hand, and scaling."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.errors import InputError
from disagg_sim.serving.gains import Curve, gain, pointwise_gain, shared_range, where_it_pays

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
        (lambda: gain(A, B, low=-1), "0 < low <= high"),
        (lambda: gain(A, B, low=30, high=20), "0 < low <= high"),
        (lambda: where_it_pays(table("colocate", A, model="m")), "did you mean 'colocated'"),
        (lambda: where_it_pays(table("colocated", A).drop(columns="mode")), "missing column 'mode'"),
    ],
)
def test_wrong_input_is_one_line(call, said):
    with pytest.raises(InputError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
