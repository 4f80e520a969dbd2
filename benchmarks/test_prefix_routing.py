"""CPU time of requests that are routed by what instances remember of their prompts, over the number of instances.

Run with ``pytest benchmarks/test_prefix_routing.py -q``. Nothing is asserted of the time; the table at the end has
microseconds a request, best of three runs, and how many times that of 16 instances they are. Conversations of ten turns
share a system prompt of 1,024 tokens; a turn adds 512. ``least`` is the same run by the load alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from disagg_sim.domain import Sharding, Slo
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.trace import Trace

INSTANCES = (16, 256, 1_024)
ROUTERS = ("least", "prefix", "dynamo_kv", "llm_d")
OPTIONS = RunOptions(prefix_cache=True)
TURNS, BLOCK, ROUNDS = 10, 512, 3
REQUESTS = 4_000


def conversations(instances: int) -> Trace:
    """Turns of conversations in random order, at one request a second for each instance."""
    rng = np.random.default_rng(0)
    number = rng.permutation(np.repeat(np.arange(REQUESTS // TURNS), TURNS))
    turn = np.zeros(REQUESTS, int)
    seen = np.zeros(REQUESTS // TURNS, int)
    for request, own in enumerate(number):
        turn[request], seen[own] = seen[own], seen[own] + 1
    ids = [[0, 1, *(2 + own * TURNS + np.arange(last + 1))] for own, last in zip(number, turn, strict=True)]
    lengths = np.array([len(each) for each in ids])
    return Trace(
        arrival=np.cumsum(rng.exponential(1 / instances, REQUESTS)),
        input_tokens=lengths * BLOCK + 100,
        output_tokens=rng.integers(20, 200, REQUESTS),
        prefix=PrefixBlocks(
            offsets=np.cumsum([0, *lengths]), ids=np.concatenate(ids).astype(np.int64), block_tokens=BLOCK
        ),
    )


@pytest.mark.long
def test_cost_of_a_request_over_instances(capsys):
    at, times = setup("llama_3_1_8b", "h100_sxm", "fp8"), {}
    for router in ROUTERS:
        for instances in INSTANCES:
            trace = conversations(instances)
            parts = (Replicas(mapping=Sharding(), instances=instances),)
            here = ServedDeployment(name="bench", gpus=instances, colocated=parts)
            policy = policy_named("vllm", router=router)
            results = [
                run(trace, here, policy, at=at, slo=Slo(ttft=2.0, tpot=0.1), options=OPTIONS) for _ in range(ROUNDS)
            ]
            times[router, instances] = min(result.cpu_s for result in results) / REQUESTS * 1e6
            assert (results[0].requests.status == 0).all()
    with capsys.disabled():
        print("\n\nprompts remembered in free memory [us/request]")
        for router in ROUTERS:
            own = [times[router, instances] for instances in INSTANCES]
            print(f"{router:<10}" + "".join(f"{each:>8.0f}" for each in own) + f"{own[-1] / own[0]:>7.1f} times")
