"""Speed of the co-located searches: design points a second on one core, from specs to the table of points.

Run with ``pytest benchmarks/test_colocated.py -q``. Nothing is asserted of the time; the table at the end puts the bar
beside it. A point is one (mapping, batch, pass size or chunk, CPP chunk, MLA form) whose time and memory were computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from disagg_sim.physics.setup import setup
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.serving.colocated import search_colocated
from disagg_sim.serving.colocation import ColocatedCase, Colocation
from disagg_sim.serving.piggyback import search_piggyback
from disagg_sim.workload.lengths import lengths

SYSTEM, RECIPE = "gb200_nvl72", "nvfp4_fp8kv"
BAR = 5e5  # [points/s]

Row = tuple[str, str, str, int, float, float]  # mode, model, lengths and measure, points, points/s of best and median


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Collects a row a benchmark and prints them when the module is done."""
    rows: list[Row] = []
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\n{'mode':<11}{'model':<15}{'case':<18}{'points':>10}{'best/s':>12}{'median/s':>12}{'bar/s':>10}")
        for mode, model, case, points, best, median in rows:
            print(f"{mode:<11}{model:<15}{case:<18}{points:>10,}{best:>12,.0f}{median:>12,.0f}{BAR:>10,.0f}")


@pytest.mark.parametrize("ttl_measure", ["tpot", "p99"])
@pytest.mark.parametrize(("isl", "osl"), [(16384, 2048), (2048, 16384)])
@pytest.mark.parametrize("model", ["deepseek_r1", "llama_3_1_70b"])
@pytest.mark.parametrize("search", [search_colocated, search_piggyback])
def test_points_per_second(benchmark, table, search, model, isl, osl, ttl_measure):
    at, options = setup(model, SYSTEM, RECIPE), Colocation(ttl_measure=ttl_measure)
    case = ColocatedCase(at=at, lengths=lengths(isl, osl), ftl_limit=10.0, options=options)
    found = benchmark.pedantic(search, (case, enumerate_mappings(at)), rounds=3, warmup_rounds=1)
    points, seconds = found.tally.design_points, benchmark.stats.stats
    assert points > 0
    table.append(
        (search.__name__, model, f"{isl}/{osl} {ttl_measure}", points, points / seconds.min, points / seconds.median)
    )
