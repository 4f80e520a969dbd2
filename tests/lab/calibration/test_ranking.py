"""Picks at equal interactivity, by hand: curves, the pick and its regret, heights, modes."""

import numpy as np
import pandas as pd
import pytest
from made_loads import made_lines

from lab.calibration.served.ranking import curve_at, heights, modes, ranked, served_points, summed
from lab.calibration.served.rows import UNKNOWN_START

GROUP = {"family": "dense", "model": "m", "system": "s", "engine": "e", "isl": 900.0, "osl": 100.0}


def runs(*points, mode="aggregated"):
    """Runs (configuration, interactivity and throughput measured, the two forecast) of one group."""
    names = ("configuration", "interactivity_measured", "throughput_measured")
    names += ("interactivity_forecast", "throughput_forecast")
    return pd.DataFrame([dict(zip(names, point, strict=True)) | GROUP | {"mode": mode} for point in points])


def test_a_curve_is_straight_in_logarithms_flat_at_its_slow_end_and_ends_at_its_fastest_run():
    x, y = np.array([40.0, 10.0]), np.array([25.0, 100.0])
    assert curve_at(x, y, (5.0, 10.0, 20.0, 40.0, 41.0)).tolist() == pytest.approx(
        [100, 100, 50, 25, np.nan], nan_ok=True
    )
    beaten = curve_at(np.array([10.0, 20.0]), np.array([30.0, 60.0]), (10.0, 20.0))  # by the one at 20, faster, too
    assert beaten.tolist() == [60.0, 60.0]


def test_the_pick_is_judged_by_what_was_measured():
    """At 20 A is measured 100 and B 80, forecast 90 and 120: B is picked, at 0.8 of the best; at 40 only B is left."""
    cells = ranked(runs(("A", 20.0, 100.0, 20.0, 90.0), ("B", 20.0, 80.0, 20.0, 120.0), ("B", 40.0, 30.0, 40.0, 40.0)))
    (cell,) = cells.to_dict("records")
    assert (cell["best"], cell["picked"], cell["right"]) == ("A", "B", False)
    assert (cell["tokens_per_s_per_user"], cell["configurations"]) == (20.0, 2)
    assert cell["relative_throughput"] == pytest.approx(0.8)
    assert (cell["pairs"], cell["pairs_right"]) == (1, 0)
    assert cell["height"] == pytest.approx(1.2)
    (total,) = summed(cells).to_dict("records")
    assert (total["groups"], total["cells"], total["best_picked"]) == (1, 1, 0.0)
    assert total["regret"] == pytest.approx(0.2)


def test_three_configurations_in_the_right_order_but_for_one_pair():
    """Measured 3 > 2 > 1, forecast 3 > 1 > 2: two of three pairs, and the best one is picked."""
    cells = ranked(runs(*((name, 10.0, m, 10.0, f) for name, m, f in (("A", 3, 3.3), ("B", 2, 1.0), ("C", 1, 2.0)))))
    assert cells[["right", "pairs", "pairs_right"]].to_numpy().tolist() == [[True, 3, 2]]
    assert cells["height"][0] == pytest.approx(1.1)


def test_where_nothing_is_forecast_to_be_so_fast_the_fastest_is_picked():
    cells = ranked(runs(("A", 20.0, 100.0, 15.0, 90.0), ("B", 20.0, 80.0, 18.0, 50.0)))
    assert cells["picked"].tolist() == ["B"]
    assert np.isnan(cells["height"][0])


def test_height_over_the_runs_of_the_measured_frontier():
    """At 10 the best forecast is 120 (of 100), at 20 66 (of 60): the run (10, 50) is on no frontier."""
    table = runs(("A", 10.0, 100.0, 10.0, 120.0), ("B", 20.0, 60.0, 20.0, 66.0), ("C", 10.0, 50.0, 10.0, 50.0))
    found = heights(table)
    assert found["tokens_per_s_per_user"].tolist() == [10.0, 20.0]
    assert found["height"].tolist() == pytest.approx([1.2, 1.1])


def test_modes_are_compared_where_both_reach():
    both = pd.concat(
        [runs(("A", 50.0, 10.0, 50.0, 10.0)), runs(("D", 20.0, 20.0, 20.0, 8.0), mode="disaggregated")],
        ignore_index=True,
    )
    found = modes(both, levels=(20.0, 40.0))
    assert found["tokens_per_s_per_user"].tolist() == [20.0]
    assert found[["gain_measured", "gain_forecast", "agree"]].to_numpy().tolist() == [[2.0, 0.8, False]]
    assert modes(both.head(1)).empty


def served_lines(throughput=True):
    told = {"tpot": (0.01, 0.02), "ttft": (1.0, 0.5)} | ({"throughput": (900.0, 800.0)} if throughput else {})
    same = GROUP | {"row": "r1", "recipe": "fp8_bf16kv", "concurrency": 8.0}
    return made_lines(*({"quantity": q, "measured": m, "predicted": p} for q, (m, p) in told.items()), **same)


def test_points_have_the_stated_throughput_or_that_of_the_loop():
    """8 requests of 900 + 100 tokens, 1 s + 99 * 10 ms each, on 4 GPUs; a mean that is not judged tells it, too."""
    (point,) = served_points(served_lines()).to_dict("records")
    assert (point["configuration"], point["interactivity_measured"]) == ("fp8 TP4", pytest.approx(100.0))
    assert (point["throughput_measured"], point["throughput_forecast"]) == (900.0, 800.0)
    lines = served_lines(throughput=False)
    late = lines["quantity"] == "ttft"
    doubted = lines.assign(evaluated=~late, relative_error=lines["relative_error"].where(~late))
    for table in (lines, doubted.assign(reason=np.where(late, UNKNOWN_START, ""))):
        (point,) = served_points(table).to_dict("records")
        assert point["throughput_measured"] == pytest.approx(8000 / 1.99 / 4)
        assert point["throughput_forecast"] == pytest.approx(8000 / 2.48 / 4)
    assert served_points(doubted.assign(reason="a warm-up")).empty


def test_without_a_closed_loop_there_is_nothing_to_rank():
    lines = served_lines().assign(saturated=True)
    assert served_points(lines).empty
    assert ranked(served_points(lines)).empty
    assert heights(served_points(lines)).empty
    assert modes(served_points(lines.head(0))).empty
