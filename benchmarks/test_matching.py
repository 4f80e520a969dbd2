"""Matching at 1,000 configurations a side: the frontier's enumeration and the integer program.

Run with ``pytest benchmarks/test_matching.py``. Grids are made up: rates near proportional to GPUs, with spread.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serving"))
from synthetic import make_grid

from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.points import pareto_front
from disagg_sim.serving.pool_program import MatchOptions
from disagg_sim.serving.pools import plan_pools

SIZES = np.array([1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36, 48, 64, 72, 96, 128])


def grids(rows, batches, sizes=SIZES):
    rng = np.random.default_rng(1)
    gp, gd = rng.choice(sizes, rows), rng.choice(sizes, rows)
    p = 0.5 * gp[:, None] * rng.uniform(0.3, 1.2, (rows, batches))
    r = 0.1 * gd[:, None] * rng.uniform(0.3, 1.2, (rows, batches))
    return make_grid("prefill", gp, p, latency=1.0), make_grid("decode", gd, r)


@pytest.mark.parametrize("matching", ["exact", "paper"])
def test_enumeration_of_1000_configurations_a_side(benchmark, matching):
    table = benchmark(disaggregated, *grids(100, 10), matching=matching)
    assert not table.empty


def test_enumeration_of_40000_decode_points_with_30_candidates(benchmark):
    sizes = np.array([*range(1, 16), 16, 18, 20, 24, 28, 32, 36, 40, 48, 56, 60, 64, 72, 96, 128])
    table = benchmark(disaggregated, *grids(1000, 40, sizes))
    assert len(table) == 40_000
    assert benchmark.stats is None or benchmark.stats["median"] < 0.3


def test_front_of_40000_points(benchmark):
    table = disaggregated(*grids(1000, 40))
    assert benchmark(pareto_front, table)["tokens_per_s_per_user"].is_monotonic_increasing


@pytest.mark.parametrize("budget", [24, 64, 128, 576])
def test_integer_program_over_1000_configurations_a_side(benchmark, budget):
    plan = benchmark(plan_pools, grids(100, 10), gpu_budget=budget)
    assert plan.status == "optimal"
    assert benchmark.stats is None or benchmark.stats["median"] < 0.5


def test_integer_program_with_two_configurations_a_pool(benchmark):
    plan = benchmark(plan_pools, grids(100, 10), gpu_budget=128, options=MatchOptions(max_configurations_per_pool=2))
    assert plan.status == "optimal"


def test_fewest_gpus_for_a_required_rate(benchmark):
    plan = benchmark(plan_pools, grids(100, 10), required_rate=50.0)
    assert plan.status == "optimal"
