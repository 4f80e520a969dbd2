"""Simulated requests per CPU second of whole runs, tables built, KV blocks and histogram of gaps on.

Run with ``pytest benchmarks -q``. Nothing is asserted of the time; the table at the end puts the bar beside it, and the
rate over that on the fewest instances of the same policy. Lengths and arrivals are those of an hour of conversations:
5.4 requests/s in bursts, on more than 16 instances as many times more, log-normal lengths with means 1,155 and 211
(Azure 2023), so that no data set is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from made import conversations, deployment

from disagg_sim.domain import Slo
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.run import run

#: Bars of the policies that have one of their own; 35,000 for the others. [request/s]
BARS = {
    **{"vllm": 100_000, "disaggregated": 40_000, "arrow": 40_000},
    **{"dynamo_load": 20_000, "dynamo_sla": 20_000, "dopd": 20_000, "dynaserve": 15_000},
}
BAR = 35_000
#: Measured on few and many instances by ``make bench``, too.
EVERYWHERE = ("vllm", "disaggregated", "arrow")
SLO = Slo(ttft=2.0, tpot=0.15)
SIZES = {2: 2_000, 16: 19_366, 256: 20_000, 1_024: 20_000}  # instances -> requests

Row = tuple[str, int, int, float, float]  # policy, instances, requests, requests/s of the best and of the median round


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Collects a row a benchmark and prints them when the module is done."""
    rows: list[Row] = []
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        rates = f"{'best/s':>10}{'median/s':>10}{'bar/s':>10}{'ratio':>8}"
        print(f"\n\n{'policy':<15}{'instances':>10}{'requests':>10}{rates}")
        few = {policy: best for policy, _, _, best, _ in reversed(rows)}
        for policy, instances, requests, best, median in rows:
            bar = BARS.get(policy, BAR)
            rates = f"{best:>10,.0f}{median:>10,.0f}{bar:>10,}{best / few[policy]:>8.2f}"
            print(f"{policy:<15}{instances:>10}{requests:>10,}{rates}")


def measured() -> Iterator[Any]:
    """Every policy on 16 instances, three on few and on many; the others with ``-m ""``."""
    for policy in policies():
        for instances in SIZES:
            usual = instances == 16 or (policy in EVERYWHERE and instances in (2, 1_024))
            yield pytest.param(policy, instances, marks=() if usual else pytest.mark.long)


@pytest.mark.parametrize(("policy", "instances"), [*measured()])
def test_run(benchmark, table, policy, instances):
    """CPU seconds of the run itself, as its result has them: a shared machine moves the wall clock."""
    trace = conversations(SIZES[instances], instances)
    spent: list[float] = []

    place = deployment(instances)

    def once():
        result = run(trace, place, policy, at=place.setup, slo=SLO)
        spent.append(result.cpu_s)
        return result

    result = benchmark.pedantic(once, rounds=3, warmup_rounds=1)
    assert (result.requests.status == 0).all()
    best, median = len(trace) / min(spent[1:]), len(trace) / float(np.median(spent[1:]))
    benchmark.extra_info.update(best_requests_per_cpu_s=round(best), median_requests_per_cpu_s=round(median))
    table.append((policy, instances, len(trace), best, median))
