"""Simulated requests per CPU second of whole runs, tables built, KV blocks and histogram of gaps on.

Run with ``pytest benchmarks -q``. Nothing is asserted of the time; the table at the end puts the bar beside it, and the
rate over that on the fewest instances of the same policy. Lengths and arrivals are those of an hour of conversations:
5.4 requests/s in bursts, on more than 16 instances as many times more, log-normal lengths with means 1,155 and 211
(Azure 2023), so that no data set is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from disagg_sim.domain import Mapping, Slo
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.run import run
from disagg_sim.workload.trace import Trace

#: Bars of the policies that have one of their own; 35,000 for the others. [request/s]
BARS = {"vllm": 100_000, "dynamo_load": 20_000, "dynamo_sla": 20_000, "dopd": 20_000, "dynaserve": 15_000}
BAR = 35_000
SLO = Slo(ttft=2.0, tpot=0.15)
FOUR = Mapping(tp_attn=4, tp_ffn=4)
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


def conversations(requests: int, instances: int) -> Trace:
    """Gamma arrivals and log-normal lengths."""
    rng, rate = np.random.default_rng(0), 5.4 * max(instances / 16, 1)
    return Trace(
        arrival=np.cumsum(rng.gamma(0.7, 1 / (0.7 * rate), requests)),
        input_tokens=np.ceil(rng.lognormal(np.log(1155) - 0.5, 1.0, requests)).astype(int),
        output_tokens=np.ceil(rng.lognormal(np.log(211) - 0.25, 0.7, requests)).astype(int),
        name="conversations",
    )


def deployment(instances: int) -> ServedDeployment:
    half, whole = (Replicas(mapping=FOUR, instances=n) for n in (instances // 2, instances))
    return ServedDeployment(
        name="bench", gpus=4 * instances, prefill=(half,), decode=(half,), colocated=(whole,), pairs=(whole,)
    )


@pytest.fixture(scope="module")
def llama():
    return setup("llama_3_1_70b", "h100_sxm", "fp8", "measured")


@pytest.mark.parametrize("instances", SIZES)
@pytest.mark.parametrize("policy", list(policies()))
def test_run(benchmark, table, llama, policy, instances):
    """CPU seconds of the run itself, as its result has them: a shared machine moves the wall clock."""
    trace = conversations(SIZES[instances], instances)
    spent: list[float] = []

    def once():
        result = run(trace, deployment(instances), policy, at=llama, slo=SLO)
        spent.append(result.cpu_s)
        return result

    result = benchmark.pedantic(once, rounds=5, warmup_rounds=1)
    assert (result.requests.status == 0).all()
    best, median = len(trace) / min(spent[1:]), len(trace) / float(np.median(spent[1:]))
    benchmark.extra_info.update(best_requests_per_cpu_s=round(best), median_requests_per_cpu_s=round(median))
    table.append((policy, instances, len(trace), best, median))
