"""CPU time of grids with every feature at the value that means nothing, over that of plain grids, in one run.

Run with ``pytest benchmarks/test_off_values.py -q``. Rounds of both alternate, so that a busy machine slows both; the
least of each counts, and may differ by a tenth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from disagg_sim.physics.setup import Setup, setup
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.workload.lengths import Lengths, lengths

SYSTEM, RECIPE = "gb200_nvl72", "nvfp4_fp8kv"
GRIDS = {"decode": decode_grid, "prefill": prefill_grid}
#: Rounds of each kind. [1]
ROUNDS = 7
#: Most CPU time with features off, over that without. [1]
BAR = 1.10

Row = tuple[str, str, int, float, float]  # grid, model, points, least CPU seconds plain, and off over plain


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Collects a row a grid and prints them when the module is done."""
    rows: list[Row] = []
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\n{'grid':<10}{'model':<15}{'points':>9}{'plain CPU s':>13}{'off / plain':>13}{'bar':>7}")
        for kind, model, points, plain, ratio in rows:
            print(f"{kind:<10}{model:<15}{points:>9,}{plain:>13.3f}{ratio:>13.3f}{BAR:>7.2f}")


def plain(model: str) -> tuple[Setup, Any, Lengths]:
    """As nobody who wants no feature writes more."""
    at = setup(model, SYSTEM, RECIPE)
    return at, enumerate_mappings(at), lengths(16_384, 2048)


def off(model: str) -> tuple[Setup, Any, Lengths]:
    """Every feature at its off-value: no drafter, nothing cached, even ranks, no skew, no shared tokens, no copies."""
    at = setup(model, SYSTEM, RECIPE, "measured_skew0", None, None)
    mappings = enumerate_mappings(at, max_dcp=1, max_pcp=1, max_redundant_experts=0)
    return at, mappings, lengths(16_384, 2048, cached=0.0, rank_imbalance="even")


def spent(task: Callable[[], Any]) -> float:
    begun = time.process_time()
    task()
    return time.process_time() - begun


@pytest.mark.parametrize("model", ["deepseek_r1", "llama_3_1_70b"])
@pytest.mark.parametrize("kind", GRIDS)
def test_features_at_their_off_value_cost_no_time(kind: str, model: str, table: list[Row]) -> None:
    score = GRIDS[kind]
    batch = np.arange(1, 201)
    asked = [maker(model) for maker in (plain, off)]
    grids = [score(*each, batch=batch) for each in asked]
    assert np.array_equal(grids[0].latency, grids[1].latency)
    rounds = [[spent(lambda given=given: score(*given, batch=batch)) for given in asked] for _ in range(ROUNDS)]
    least = np.min(rounds, axis=0)
    ratio = float(least[1] / least[0])
    table.append((kind, model, grids[0].latency.size, float(least[0]), ratio))
    assert ratio < BAR
