"""Design points scored per second on one core: all operators, memory and bound included.

Run with ``pytest benchmarks -q``. Nothing is asserted of the time; the table at the end puts the bar beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import setup
from disagg_sim.search.axes import batch_axis
from disagg_sim.search.grid import decode_grid, decode_grids, prefill_grid, prefill_grids
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.workload.lengths import lengths

SYSTEM, RECIPE, LENGTHS = "gb200_nvl72", "nvfp4_fp8kv", lengths(16_384, 2048)
MODELS = ("deepseek_r1", "llama_3_1_70b")
LEAST_POINTS = 100_000
BARS = {  # [points/s]
    "decode": 2e6,
    "prefill": 1e6,
    "chunked prefill": 2e5,
    "small decode": 2e6,
    "small prefill": 2e6,
    "64 prompts": 2e6,
}
#: A set of small grids, about 1,300 points of decode and 2,700 of prefill each: lengths of prompts and of answers.
SMALL = "llama_3_1_8b", "h200_sxm", "fp8"
ISL, OSL = (512, 1024, 2048, 3000, 4096, 8192, 16_384, 32_768), range(64, 576, 64)

Row = tuple[str, str, int, float, float]  # kind, model, points, points/s of the best and of the median round


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Collects a row a benchmark and prints them when the module is done."""
    rows: list[Row] = []
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\n{'grid':<17}{'model':<15}{'points':>9}{'best/s':>12}{'median/s':>12}{'bar/s':>12}")
        for kind, model, points, best, median in rows:
            print(f"{kind:<17}{model:<15}{points:>9,}{best:>12,.0f}{median:>12,.0f}{BARS[kind]:>12,.0f}")


def dense_batches(rows: int) -> np.ndarray:
    """1, 2, 3, ... so many that ``rows`` mappings make a grid of at least ``LEAST_POINTS``. [request]"""
    return np.arange(1, -(-LEAST_POINTS // rows) + 1)


def mappings_of(model: str) -> Sharding:
    return enumerate_mappings(setup(model, SYSTEM, RECIPE))


def report(benchmark, table: list[Row], kind: str, model: str, points: int) -> None:
    best, median = points / benchmark.stats.stats.min, points / benchmark.stats.stats.median
    benchmark.extra_info.update(
        points=points, best_points_per_s=round(best), median_points_per_s=round(median), bar_points_per_s=BARS[kind]
    )
    table.append((kind, model, points, best, median))


@pytest.mark.parametrize("model", MODELS)
def test_decode(benchmark, table, model):
    mappings = mappings_of(model)
    batch = dense_batches(len(mappings))
    grid = benchmark(decode_grid, setup(model, SYSTEM, RECIPE), mappings, LENGTHS, batch=batch)
    assert grid.latency.size >= LEAST_POINTS
    report(benchmark, table, "decode", model, grid.latency.size)


@pytest.mark.parametrize("model", MODELS)
def test_unchunked_prefill(benchmark, table, model):
    mappings = mappings_of(model)
    batch = dense_batches(len(mappings))
    grid = benchmark(prefill_grid, setup(model, SYSTEM, RECIPE), mappings, LENGTHS, batch=batch, chunk_tokens=[])
    assert not grid.mappings.chunk_tokens.any()
    report(benchmark, table, "prefill", model, grid.latency.size)


@pytest.mark.parametrize("model", MODELS)
def test_chunked_prefill(benchmark, table, model):
    """Chunks of 512 tokens and more; counts the chunked points only, though the unchunked rows are scored too."""
    mappings = mappings_of(model)
    deep = mappings[mappings.pp > 1]
    sizes = (512, 1024, 2048, 4096, 8192)
    batch = dense_batches(len(deep) * len(sizes))
    grid = benchmark(prefill_grid, setup(model, SYSTEM, RECIPE), deep, LENGTHS, batch=batch, chunk_tokens=sizes)
    chunked = int(np.sum(grid.mappings.chunk_tokens > 0)) * grid.batch.size
    assert chunked >= LEAST_POINTS
    report(benchmark, table, "chunked prefill", model, chunked)


def small_grids(benchmark, table, kind, cases, phase):
    """Score a set of grids as sweeps do, their batches given."""
    at = setup(*SMALL)
    mappings = enumerate_mappings(at)
    batches = [batch_axis(at, mappings, each, phase=phase) for each in cases]
    score = decode_grids if phase == "decode" else prefill_grids
    grids = benchmark(score, at, mappings, cases, batches=batches)
    assert len(grids) == 64
    report(benchmark, table, kind, SMALL[0], sum(grid.latency.size for grid in grids))


def test_small_decode_grids(benchmark, table):
    small_grids(benchmark, table, "small decode", [lengths(isl, osl) for isl in ISL for osl in OSL], "decode")


def test_small_prefill_grids(benchmark, table):
    """Eight lengths of prompts: grids that differ in the answers alone are one."""
    small_grids(benchmark, table, "small prefill", [lengths(isl, osl) for isl in ISL for osl in OSL], "prefill")


def test_small_prefill_grids_of_unlike_prompts(benchmark, table):
    cases = [lengths(isl, 256) for isl in np.geomspace(512, 32_768, 64).astype(int).tolist()]
    small_grids(benchmark, table, "64 prompts", cases, "prefill")
