"""Grids of blocks that another block has had scored, or that are scored beside others: the same points, once."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from disagg_sim.sweep import compute, grid_cache
from disagg_sim.sweep.plan import PREFILL, Block, plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep

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
