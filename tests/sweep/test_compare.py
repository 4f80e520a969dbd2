"""Comparison of fronts, with columns that mean nothing."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.errors import InputError
from disagg_sim.serving.points import COLUMNS
from disagg_sim.sweep.compare import (
    FRONTIER,
    ColumnRoles,
    FrontChange,
    compare_frontiers,
    compare_fronts,
    read_frontier,
    require_same_cases,
)

TOY = ColumnRoles(group=("farm",), key=("crop", "row"), x="sugar", y="yield", derived=("baskets",))
BASE = pd.DataFrame(
    {
        "farm": ["hill"] * 3,
        "crop": [1, 1, 2],
        "row": [1, 2, 1],
        "sugar": [10.0, 20.0, 40.0],
        "yield": [8.0, 5.0, 2.0],
        "soil": ["clay", "clay", "sand"],
        "depth": [0.5, math.nan, 3.0],
        "baskets": [3, 7, 9],
    }
)


def compared(new: pd.DataFrame, old: pd.DataFrame = BASE, rtol: float = 1e-6) -> FrontChange:
    (front,) = compare_fronts(old, new, roles=TOY, rtol=rtol).fronts
    return front


def changed(at: int, column: str, value: object) -> pd.DataFrame:
    table = BASE.copy()
    table.loc[at, column] = value
    return table


def test_equal_fronts_in_any_order_are_the_same():
    front = compared(BASE.iloc[[2, 0, 1]])
    assert front.same
    assert front.same_points
    assert not front.worse
    assert front.area_change == 0


def test_areas_by_hand():
    """8 up to 10, 5 up to 20, 2 up to 40: 80 + 50 + 40. Without the middle point 2 from 10 on: 80 + 60."""
    front = compared(BASE.iloc[[0, 2]])
    assert front.areas == (170, 140)
    assert front.area_change == pytest.approx(140 / 170 - 1)
    assert front.points == (3, 2)


def test_a_lost_point_is_named_and_makes_the_front_worse():
    front = compared(BASE.iloc[[0, 2]])
    (lost,) = front.lost
    assert lost.key == (("crop", 1), ("row", 2))
    assert (lost.old, lost.new, lost.reached) == ((20, 5), None, False)
    assert (front.same, front.worse) == (False, True)


def test_a_new_point_beyond_the_old_front_is_a_change_but_not_worse():
    (new,) = compared(BASE, old=BASE.iloc[[0, 2]]).new
    assert (new.old, new.new, new.reached) == (None, (20, 5), False)
    front = compared(BASE, old=BASE.iloc[[0, 2]])
    assert (front.same, front.worse) == (False, False)


def test_one_of_two_equals_in_the_place_of_the_other_keeps_the_curve():
    front = compared(changed(1, "row", 9))
    assert front.lost[0].reached
    assert front.new[0].reached
    assert front.same
    assert not front.same_points


@pytest.mark.parametrize(("factor", "worse"), [(0.98, True), (1.02, False)])
def test_a_moved_value_is_named_with_old_new_and_change(factor, worse):
    front = compared(changed(1, "yield", 5 * factor))
    (moved,) = front.moved
    assert moved.key == (("crop", 1), ("row", 2))
    (move,) = moved.moves
    assert (move.column, move.old, move.new) == ("yield", 5, pytest.approx(5 * factor))
    assert move.relative == pytest.approx(factor - 1)
    assert (front.same, front.worse) == (False, worse)


def test_other_values_move_too_numbers_words_and_empty_cells():
    assert [m.column for m in compared(changed(0, "depth", 0.6)).moved[0].moves] == ["depth"]
    assert [m.column for m in compared(changed(1, "depth", 0.6)).moved[0].moves] == ["depth"]
    (move,) = compared(changed(0, "soil", "sand")).moved[0].moves
    assert (move.old, move.new) == ("clay", "sand")
    assert math.isnan(move.relative)
    (emptied,) = compared(changed(0, "soil", np.nan)).moved[0].moves
    assert (emptied.old, emptied.new) == ("clay", "")


def test_derived_columns_and_moves_within_the_tolerance_are_none():
    assert compared(changed(0, "baskets", 900)).same_points
    assert compared(changed(1, "yield", 5 * 0.98), rtol=0.021).same
    assert not compared(changed(1, "yield", 5 * 0.98), rtol=0.019).same


def test_an_empty_front_against_a_full_one_loses_all():
    front = compared(BASE.iloc[:0])
    assert len(front.lost) == 3
    assert front.worse
    assert front.areas[1] == 0
    assert len(compared(BASE, old=BASE.iloc[:0]).new) == 3


def test_points_with_the_same_key_are_paired_in_order_of_x():
    twins = BASE.assign(crop=1, row=1)
    front = compared(twins.assign(depth=[0.5, math.nan, 3.3]), old=twins)
    assert [(point.old, [move.column for move in point.moves]) for point in front.moved] == [((40, 2), ["depth"])]


def test_fronts_are_compared_group_by_group():
    """The valley's points would cover the hill's loss, were the two one front."""
    valley = BASE.assign(farm="valley", **{"yield": BASE["yield"] * 2})
    old, new = pd.concat([BASE, valley]), pd.concat([BASE.iloc[1:], valley])
    hill, other = compare_fronts(old, new, roles=TOY).fronts
    assert (hill.group, hill.worse, len(hill.lost)) == (("hill",), True, 1)
    assert (other.group, other.same_points) == (("valley",), True)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=8), st.floats(0.5, 0.999))
def test_a_front_scaled_down_moves_everywhere_and_is_worse(places, factor):
    x, y = np.array(places).T
    old = pd.DataFrame({"farm": "hill", "crop": 1, "row": np.arange(len(x)), "sugar": x, "yield": y})
    new = old.assign(**{"yield": y * factor})
    front = compared(new, old=old)
    assert len(front.moved) == len(x)
    assert front.worse
    assert front.area_change == pytest.approx(factor - 1)
    assert not compared(old, old=new).worse


# --- files -----------------------------------------------------------------------------------------------------


def frontier(**columns: object) -> pd.DataFrame:
    numbers = {name: [1, 2] for name in FRONTIER.key} | {FRONTIER.x: [10.0, 20.0], FRONTIER.y: [5.0, 4.0]}
    return pd.DataFrame({"case": "a", "mode": "m"} | numbers | columns)


def test_a_table_that_does_not_say_what_it_rests_on_compares_with_one_that_does(tmp_path):
    """The column came later; and its words follow from fits, whose change moves the numbers themselves."""
    words = [["fitted 90 %, assumed 10 %"] * 2, ["fitted 89 %, assumed 11 %"] * 2]
    tables = [frontier(), *(frontier(rests_on=each) for each in words)]
    fronts = [read_frontier(written(tmp_path / str(number), table)) for number, table in enumerate(tables)]
    assert all(compare_frontiers(fronts[0], other).same for other in fronts)
    assert compare_frontiers(fronts[1], fronts[2]).same


def written(path: Path, table: pd.DataFrame, cases: tuple[str, ...] = ()) -> Path:
    path.mkdir(exist_ok=True)
    if len(table):
        table.to_csv(path / "frontier.csv", index=False)
    if cases:
        (path / "manifest.json").write_text(json.dumps({"cases": [{"case": case} for case in cases]}))
    return path


def test_every_key_column_is_one_of_the_table_of_points():
    known = {column.name for column in COLUMNS} | {"case", "usd_per_hour", "tdp_watts", "rests_on"}
    assert {*FRONTIER.required, *FRONTIER.derived} <= known


def test_a_case_that_lost_its_last_point_is_a_regression_not_a_missing_case(tmp_path):
    old = read_frontier(written(tmp_path / "old", frontier(), ("a",)))
    new = read_frontier(written(tmp_path / "new", frontier().iloc[:0], ("a",)))
    require_same_cases(old, new)
    comparison = compare_frontiers(old, new)
    assert comparison.worse
    assert len(comparison.fronts[0].lost) == 2


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (frontier().drop(columns="decode_batch"), "missing column 'decode_batch'"),
        (frontier(decode_batch=["x", "y"]), "'decode_batch' is not all numbers"),
        (frontier(**{FRONTIER.y: [5.0, math.nan]}), "empty, infinite or not above 0"),
        (frontier(**{FRONTIER.y: [5.0, 0.0]}), "empty, infinite or not above 0"),
        (frontier(**{FRONTIER.x: [5.0, math.inf]}), "empty, infinite or not above 0"),
    ],
)
def test_a_table_that_is_no_frontier_is_refused(table, said, tmp_path):
    with pytest.raises(InputError, match=said):
        read_frontier(written(tmp_path / "results", table))


def test_cases_named_by_numbers_and_tables_without_rows_are_read(tmp_path):
    numbered = read_frontier(written(tmp_path / "numbered", frontier(case=[1, 1], mode=[2, 2])))
    assert numbered.cases == ("1",)
    header = tmp_path / "header.csv"
    frontier().iloc[:0].to_csv(header, index=False)
    assert read_frontier(header).cases == ()
    with pytest.raises(InputError, match="no case in common: 1"):
        compare_frontiers(numbered, read_frontier(header))


def test_files_that_cannot_be_compared_are_refused(tmp_path):
    old = read_frontier(written(tmp_path / "old", frontier()))
    with pytest.raises(InputError, match="alone has extra"):
        compare_frontiers(old, read_frontier(written(tmp_path / "more", frontier(extra=1))))
    other = read_frontier(written(tmp_path / "other", frontier(case="b")))
    with pytest.raises(InputError, match="no case in common"):
        compare_frontiers(old, other)
    with pytest.raises(InputError, match="1 of 1 cases not computed: a"):
        require_same_cases(old, other)
    both = read_frontier(written(tmp_path / "both", pd.concat([frontier(), frontier(case="b")])))
    with pytest.raises(InputError, match="1 of 2 cases without a baseline: b"):
        require_same_cases(old, both)
    with pytest.raises(InputError, match="rtol 1"):
        compare_frontiers(old, old, rtol=1.0)


@pytest.mark.parametrize(("rtol", "same"), [(0.0, False), (1e-6, False), (0.05, True)])
def test_a_word_that_swaps_at_a_tie_decides_at_the_default_tolerance_alone(rtol, same):
    table = changed(0, "soil", "sand")
    table.loc[0, "yield"] = 8.0 * (1 if rtol <= 1e-6 else 0.995)
    front = compared(table, rtol=rtol)
    (moved,) = front.moved  # told in any case
    assert [move.column for move in moved.moves] == ["soil"]
    assert (front.same, front.same_points, moved.words_alone) == (same, False, True)


@pytest.mark.parametrize("at", [0, 1])  # the second has no depth yet
def test_a_number_that_moves_beside_a_word_decides_at_any_tolerance(at):
    table = changed(at, "soil", "sand")
    table.loc[at, "depth"] = 0.6
    front = compared(table, rtol=0.05)
    assert (front.same, front.moved[0].words_alone) == (False, False)
