"""Ten million design points: matching, frontiers and the integer program; and a whole sweep of a million and a half.

Run with ``pytest benchmarks/test_scale.py``. Each of the first three has a bar of 5 CPU seconds.
"""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
from made import grids, sweep

from disagg_sim.search.pareto import pareto_mask
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.serving.pools import plan_pools
from disagg_sim.sweep.run import run_sweep

POINTS, BAR_S = 1e7, 5.0


@pytest.fixture(scope="module")
def both():
    return grids(POINTS)


def within_the_bar(benchmark) -> None:
    assert benchmark.stats is None or benchmark.stats["min"] < BAR_S


def test_frontier_of_matched_points(benchmark, both):
    found = benchmark.pedantic(match_pools, (*both, Rules(keep="frontier")), rounds=3, warmup_rounds=1)
    assert found.decode_points == both[1].latency.size
    assert found.points["tokens_per_s_per_user"].is_monotonic_increasing
    within_the_bar(benchmark)


def test_integer_program(benchmark, both):
    plan = benchmark.pedantic(plan_pools, (both,), {"gpu_budget": 576, "ttl_limit": 0.03}, rounds=3, warmup_rounds=1)
    assert plan.status == "optimal"
    within_the_bar(benchmark)


def test_pareto_frontier(benchmark):
    rng = np.random.default_rng(0)
    x = rng.uniform(1.0, 300.0, round(POINTS))
    y = np.exp(-x / 60.0) * rng.uniform(0.1, 1.0, x.size)
    assert benchmark.pedantic(pareto_mask, (x, y), rounds=3).sum() > 1_000
    within_the_bar(benchmark)


def test_whole_sweep(benchmark, tmp_path):
    """Planned, computed in three modes, stored, tables written; the specs are read once."""
    plan = sweep(1e6, tmp_path)
    runs = iter(range(10))
    benchmark.pedantic(
        lambda: run_sweep(plan, tmp_path / str(next(runs)), jobs=1, listener=Mock()), rounds=2, warmup_rounds=1
    )
    benchmark.extra_info.update(points=sum(block.points for block in plan.blocks))
