"""Grids of many lengths that are scored at once: to the last digit as one by one."""

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.physics.passes.chunked import Chunks, chunk_plan
from disagg_sim.search import grid as grids
from disagg_sim.search.blocks import groups_of
from disagg_sim.search.grid import decode_grid, decode_grids, prefill_grid, prefill_grids
from disagg_sim.search.mappings import enumerate_mappings

ARRAYS = ("batch", "latency", "request_rate", "memory_bytes", "microbatches", "bound", "mla_form", "drafts")
#: Lengths that share prompts, contexts (2048 + 512/2 = 2240 + 128/2) or nothing, and some that go by themselves.
LOADS = [
    *(ds.lengths(isl, osl) for isl, osl in ((700, 64), (2048, 512), (2048, 1000), (2240, 128), (12_000, 300))),
    ds.lengths(8192, 512, cached=0.5),
    ds.lengths("log_normal_4096_512", rank_imbalance="least_load"),
]
SETUPS = [
    ("llama_3_1_8b", "h200_sxm", "fp8", {}),
    ("llama_3_1_70b", "h100_sxm", "fp8", {"engine": "vllm"}),
    ("deepseek_r1", "h200_sxm", "fp8", {"engine": "sglang", "speculation": "deepseek_r1_mtp"}),
    ("gpt_oss_120b", "h200_sxm", "fp8", {}),
]


@pytest.mark.parametrize(("model", "system", "precision", "more"), SETUPS)
@pytest.mark.parametrize(("one", "many"), [(decode_grid, decode_grids), (prefill_grid, prefill_grids)])
def test_many_lengths_are_scored_as_one_by_one(model, system, precision, more, one, many):
    at = ds.setup(model, system, precision, **more)
    table = enumerate_mappings(at, max_gpus=4)
    loads = LOADS if one is decode_grid else LOADS[:-1]  # prefill takes laws of lengths by themselves, and long
    for load, found in zip(loads, many(at, table, loads), strict=True):
        alone = one(at, table, load)
        assert found.lengths == alone.lengths
        assert found.mappings == alone.mappings
        for name in ARRAYS:
            assert getattr(found, name).tobytes() == getattr(alone, name).tobytes(), name


def test_prompts_that_are_equal_are_scored_once(monkeypatch):
    """Answers of other lengths take other decode instances, and the same prefill ones."""
    asked = []
    points = grids.prefill_points

    def counted(at, several, *more, **named):
        asked.extend(several.cases)
        return points(at, several, *more, **named)

    monkeypatch.setattr(grids, "prefill_points", counted)
    at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    loads = [ds.lengths(isl, osl) for isl in (1024, 2048) for osl in (128, 256, 512)]
    found = prefill_grids(at, ds.Sharding(), loads, batches=[[1, 2, 4]] * 6)
    assert [load.mean_isl for load in asked] == [1024, 2048]
    assert [grid.lengths.mean_osl for grid in found] == [128, 256, 512] * 2


def test_groups_hold_grids_whose_batches_are_the_first_of_the_longest():
    few, more, others = np.arange(1, 4), np.arange(1, 9), np.arange(2, 6)
    assert list(groups_of([5] * 4, [few, more, others, few], [True] * 4)) == [[1], [2], [0, 3]]
    assert list(groups_of([5] * 3, [few, more, few], [True] * 3)) == [[1, 0, 2]]
    assert list(groups_of([5] * 3, [few, more, few], [True, False, True])) == [[1], [0, 2]]
    assert list(groups_of([10_000] * 2, [more, more], [True] * 2)) == [[0], [1]]  # 80,000 points each


def test_chunks_lie_one_after_the_other():
    """A prompt of 1000 tokens in chunks of 512 and 256 tokens, 24 of each before it: two chunks and four."""
    size = np.array([[512.0], [256.0]])
    chunks = Chunks(chunk_plan(1000.0, size), (1.0, 1.0, 1.0, np.array([[1.0, 2.0, 3.0]]), 24.0))
    (rows,) = chunks.blocks()
    here = chunks.of(rows)
    assert here.tokens.new.ravel().tolist() == [512, 488, 256, 256, 256, 232]
    assert here.tokens.past.ravel().tolist() == [24, 536, 24, 280, 536, 792]
    assert here.tokens.latent.ravel().tolist() == [24, 0, 24, 0, 0, 0]
    total = here.tokens.new * here.tokens.prompts
    assert here.summed(total).tolist() == [[1000, 2000, 3000]] * 2
    assert here.at(total, here.full).tolist() == [[512, 1024, 1536], [256, 512, 768]]
    assert here.at(total, here.last).tolist() == [[488, 976, 1464], [232, 464, 696]]


def test_a_sum_over_chunks_does_not_depend_on_the_rows_beside_it():
    """Numbers are added in pairs, so zeros behind them would move the last digit."""
    rng, lone = np.random.default_rng(1), chunk_plan(64_000.0, np.array([[512.0], [4096.0]]))
    new = np.array([[64_000.0], [64_000.0], [200_000.0]])
    beside = chunk_plan(new, np.array([[512.0], [4096.0], [512.0]]))
    most = np.array([[125.0], [125.0], [391.0]])
    alone = Chunks(lone, (1.0, 1.0, 1.0, 1.0, 0.0)).of(slice(None))
    among = Chunks(beside, (1.0, 1.0, 1.0, 1.0, 0.0), most).of(slice(None))
    values = rng.random((among.row.size, 1))
    assert alone.row.size == 125 + 16
    assert among.summed(values)[:2].tolist() == alone.summed(values[: alone.row.size]).tolist()
