"""Grids of blocks whose rows another block has had scored: the same points, and none scored twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from disagg_sim.domain import MAPPING_FIELDS
from disagg_sim.sweep import scored
from disagg_sim.sweep.plan import PREFILL, Block, plan_sweep
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
def nothing_kept() -> None:
    scored._kept.clear()


def test_fewer_mappings_take_the_points_of_more(tmp_path, monkeypatch):
    wide, narrow = blocks(tmp_path, "true, false")
    phases = [block.key.table for block in narrow]
    assert len({block.key.table for block in wide}) == 2
    assert phases.count(PREFILL) > 1  # so that rows come from several grids
    alone = [scored._new(block) for block in narrow]
    for block in wide:
        scored.scored(block)
    monkeypatch.setattr(scored, "_new", lambda block: pytest.fail("scored again"))
    for block, expected in zip(narrow, alone, strict=True):
        found = scored.scored(block)
        assert all(
            np.array_equal(getattr(found.mappings, name), getattr(expected.mappings, name)) for name in MAPPING_FIELDS
        )
        np.testing.assert_array_equal(found.batch, expected.batch)
        for name in ("latency", "request_rate", "memory_bytes", "microbatches", "bound", "mla_form", "drafts"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_a_row_that_no_grid_has_is_scored(tmp_path):
    narrow, wide = blocks(tmp_path, "false, true")
    for block in narrow:
        scored.scored(block)
    gpus = [scored.scored(block).mappings for block in wide]
    assert sum(map(len, gpus)) > sum(len(scored.scored(block).mappings) for block in narrow)
