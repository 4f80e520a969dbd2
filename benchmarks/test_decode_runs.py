"""The kernel alone: closed decode runs against single steps, on the same requests in one process.

Run with ``pytest benchmarks/test_decode_runs.py -q``. The table at the end gives requests a CPU second and how many
times faster the closed form is; its bar is 5.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.physical_site import kv_blocks

ROUNDS = 3


@pytest.fixture(scope="module")
def spec() -> InstanceSpec:
    at, mapping = setup("llama_3_1_70b", "h100_sxm", "fp8"), Sharding(tp_attn=4.0, tp_ffn=4.0)
    return InstanceSpec(table=StepTable.build(at, mapping), blocks=kv_blocks(at, mapping))


def played(spec: InstanceSpec, instances: int, requests: int, *, step_by_step: bool) -> tuple[float, Fleet]:
    """CPU seconds of an hour's conversations, in turn to each instance, and the fleet after them."""
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.gamma(0.7, 1 / (0.7 * 5.4), requests)).tolist()
    inputs = np.ceil(rng.lognormal(np.log(1155) - 0.5, 1.0, requests)).astype(int).tolist()
    outputs = np.ceil(rng.lognormal(np.log(211) - 0.25, 0.7, requests)).astype(int).tolist()
    fleet = Fleet([spec] * instances, step_by_step=step_by_step, capacity=requests)
    start = time.process_time()
    for request, now in enumerate(arrival):
        fleet.run_until(now)
        fleet.submit(request % instances, request, (0, inputs[request], outputs[request]), now)
    fleet.run_until(math.inf)
    return time.process_time() - start, fleet


@pytest.mark.long
@pytest.mark.parametrize(("instances", "requests"), [(2, 2_000), (16, 19_366)])
def test_closed_form_against_single_steps(spec, capsys, instances, requests):
    times = {}
    ends = []
    for step_by_step in (False, True):
        rounds = [played(spec, instances, requests, step_by_step=step_by_step) for _ in range(ROUNDS)]
        times[step_by_step] = min(seconds for seconds, _ in rounds)
        ends.append(rounds[0][1].segments.finish_s)
    np.testing.assert_allclose(*ends, rtol=1e-9)
    with capsys.disabled():
        print(
            f"\n{instances} instances, {requests:,} requests: {requests / times[False]:,.0f} requests/s closed, "
            f"{requests / times[True]:,.0f} step by step: {times[True] / times[False]:.1f} times"
        )
