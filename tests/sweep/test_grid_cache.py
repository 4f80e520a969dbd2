"""Grids of blocks that another block has had scored, or that are scored beside others: the same points, once."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.errors import UnknownNameError
from disagg_sim.sweep import compute, grid_cache
from disagg_sim.sweep.fidelity import candidates
from disagg_sim.sweep.plan import PREFILL, Block, plan_sweep
from disagg_sim.sweep.results import GatheredFront, SweepResult
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import PointLimits, SweepSpec, load_sweep
from disagg_sim.sweep.store import Store

SWEEP = """
name: shared
models: [llama_3_1_8b]
systems: {h200_sxm: fp8}
traffic: [{isl: 4096, osl: 512}]
block_points: 400
limits: {max_gpus: 8, gpu_cap: 64, one_gpu_stages: [%s]}
"""


def blocks(folder: Path, stages: str) -> list[list[Block]]:
    """Blocks of the pools of each case, prefill first."""
    (folder / "shared.yaml").write_text(SWEEP % stages)
    return [list(case.modes[0].blocks) for case in plan_sweep(load_sweep(str(folder / "shared.yaml"))).cases]


@pytest.fixture(autouse=True)
def nothing_kept():
    grid_cache._kept.clear()


MANY = """
name: many
models: [llama_3_1_8b]
systems: {h200_sxm: fp8}
traffic:
%s
modes: [disaggregated]
limits: {max_gpus: 2, gpu_cap: 8}
"""
LENGTHS = [(isl, osl) for isl in (1024, 3000) for osl in (128, 256, 512, 1024)]


def many(folder: Path):
    (folder / "many.yaml").write_text(MANY % "\n".join(f"  - {{isl: {isl}, osl: {osl}}}" for isl, osl in LENGTHS))
    return plan_sweep(load_sweep(str(folder / "many.yaml")))


def test_small_grids_of_unlike_lengths_are_scored_together(tmp_path, monkeypatch):
    """Eight cases in groups of three: three evaluations of decode, each to the last digit as by itself."""
    decode = [block for block in many(tmp_path).blocks if block.key.table != PREFILL]
    alone = [grid_cache._new([block])[0] for block in decode]
    groups = grid_cache.groups(decode, 3)
    assert [len(group) for group in groups] == [3, 3, 2]
    asked = Mock(side_effect=grid_cache.decode_grids)
    monkeypatch.setattr(grid_cache, "decode_grids", asked)
    found = []
    for group in groups:
        grid_cache.score_group(group)
        found += [grid_cache.scored(block) for block in group]
    assert asked.call_count == 3
    for grid, expected in zip(found, alone, strict=True):
        assert grid.lengths == expected.lengths
        assert grid.latency.tobytes() == expected.latency.tobytes()
        assert grid.memory_bytes.tobytes() == expected.memory_bytes.tobytes()


def test_large_blocks_and_those_of_other_setups_are_computed_alone(tmp_path, monkeypatch):
    first, second, *_ = [block for block in many(tmp_path).blocks if block.key.table == PREFILL]
    assert grid_cache.groups([first, second], 4) == [[first, second]]
    monkeypatch.setattr(grid_cache, "BLOCK_POINTS", first.points - 1)
    assert grid_cache.groups([first, second], 4) == [[first], [second]]
    wide, narrow = blocks(tmp_path, "true, false")
    assert [len(group) for group in grid_cache.groups([wide[0], narrow[0]], 4)] == [1, 1]


def test_a_block_that_fails_takes_none_of_its_group_along(tmp_path, monkeypatch):
    plan, whole, listener = many(tmp_path), compute._compute, Mock()
    last = plan.cases[-1].modes[0].points[0].key

    def failing(task, block):
        if block.key == last:
            raise RuntimeError("no luck")
        return whole(task, block)

    monkeypatch.setattr(compute, "_compute", failing)
    result = run_sweep(plan, tmp_path / "out", jobs=1, listener=listener)
    (said,) = [call.args[0] for call in listener.warn.call_args_list]
    assert said.startswith(f"{last.relative}: failed 3 times: RuntimeError: no luck")
    assert [len(case.found) for case in result.cases] == [1] * 7 + [0]


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
