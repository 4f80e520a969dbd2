"""Speed of the co-located searches: design points a second on one core, from names to the table of points."""

from __future__ import annotations

import pytest

import disagg_sim as ds
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.piggyback import piggyback

#: A point is one (mapping, batch, pass size or chunk, MLA form or CPP chunk) whose time and memory were computed. [1/s]
LEAST_POINTS_PER_SECOND = 500_000
MODELS = ("deepseek_r1", "llama_3_1_70b")


@pytest.mark.parametrize("ttl_measure", ["mean", "p99"])
@pytest.mark.parametrize(("isl", "osl"), [(16384, 2048), (2048, 16384)])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("search", [colocated, piggyback])
def test_points_per_second(benchmark, search, model, isl, osl, ttl_measure):
    system = ds.load_system("gb200_nvl72")
    spec = ds.load_model(model)
    mappings = ds.enumerate_mappings(spec, system)
    table = benchmark.pedantic(
        search, (spec, system, mappings),
        {"isl": isl, "osl": osl, "precision": "nvfp4_fp8kv", "ttl_measure": ttl_measure},
        rounds=5, warmup_rounds=1,
    )  # fmt: skip
    points = table.attrs["design_points"]
    benchmark.extra_info["points"] = points
    benchmark.extra_info["points_per_second"] = round(points / benchmark.stats.stats.min)
    assert points / benchmark.stats.stats.min > LEAST_POINTS_PER_SECOND
