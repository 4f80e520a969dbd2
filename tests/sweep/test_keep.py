"""Frontiers grow as blocks arrive, and points that can never reach one need not be stored."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.errors import UnknownNameError
from disagg_sim.sweep.fidelity import candidates
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.results import GatheredFront, SweepResult
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import PointLimits, SweepSpec, load_sweep
from disagg_sim.sweep.store import Store

X, Y = "tokens_per_s_per_user", "tokens_per_s_per_gpu"
points = st.tuples(st.integers(1, 6), st.integers(1, 6))


@settings(max_examples=30)
@given(st.lists(st.lists(points, max_size=4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_blocks_may_arrive_in_any_order(blocks, dice):
    """By hand: no other point is as good in both and better in one, and of equal ones the first block's stays."""
    held = [(*point, number) for number, block in enumerate(blocks) for point in block]
    best = {
        min(other for other in held if other[:2] == point[:2])
        for point in held
        if not any(o[:2] != point[:2] and o[0] >= point[0] and o[1] >= point[1] for o in held)
    }
    front = GatheredFront(Y)
    order = list(enumerate(blocks))
    dice.shuffle(order)
    for number, block in order:
        front.add(number, pd.DataFrame({X: [p[0] for p in block], Y: [p[1] for p in block], "block": number}))
        front.rows()  # asked for in between, too
    found = front.rows()
    assert {tuple(row) for row in found.itertuples(index=False)} == best
    assert found.empty or found[X].is_monotonic_increasing


@pytest.fixture(scope="module")
def spec():
    smoke = load_sweep("smoke")
    return replace(
        smoke, pools=smoke.pools[:1], modes=("disaggregated",), block_points=4096, limits=(PointLimits(max_gpus=8),)
    )


def run(spec: SweepSpec, root: Path, keep: str) -> SweepResult:
    return run_sweep(plan_sweep(spec, keep=keep), root, jobs=1, listener=Mock())


def test_what_is_kept_changes_no_table(spec, tmp_path):
    """Neither the tables, nor the points that error bars and elasticities start from."""
    everything, near = (run(spec, tmp_path / keep, keep) for keep in ("points", "frontier"))
    for name in ("frontier.csv", "infeasible.csv"):
        assert (tmp_path / "frontier" / name).read_bytes() == (tmp_path / "points" / name).read_bytes()
    of_all, of_near = (
        candidates(result.cases[0], Store(tmp_path / keep), Y)
        for result, keep in ((everything, "points"), (near, "frontier"))
    )
    pd.testing.assert_frame_equal(of_all, of_near)
    sizes = [
        sum(len(Store(tmp_path / keep).read(block.key)) for block in result.plan.cases[0].modes[0].points)
        for result, keep in ((everything, "points"), (near, "frontier"))
    ]
    assert len(near.cases[0].modes[0].frontier) < sizes[1] < 0.7 * sizes[0]
    lost = near.plan.blocks[-1].key.relative  # as after a kill
    (tmp_path / "frontier" / lost).unlink()
    before = (tmp_path / "frontier" / "frontier.csv").read_bytes()
    again = Mock()
    run_sweep(near.plan, tmp_path / "frontier", jobs=1, listener=again)
    again.note.assert_called_with(f"{len(near.plan.blocks) - 1} of {len(near.plan.blocks)} blocks already stored")
    assert (tmp_path / "frontier" / "frontier.csv").read_bytes() == before


def test_an_unknown_word_for_what_to_keep_is_one_line(spec):
    with pytest.raises(UnknownNameError, match="unknown --keep 'frontiers', did you mean 'frontier'"):
        plan_sweep(spec, keep="frontiers")
