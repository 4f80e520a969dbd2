"""Host time of a request before its prefill: part of TTFT wherever an engine stands behind the setup."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_engine
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.simulate import simulate
from disagg_sim.workload.trace import Trace

HOST = 0.05
VLLM = replace(load_engine("vllm"), request_host=HOST)
ONE, GPUS = Sharding(), 4
WITH, WITHOUT = (
    setup("llama_3_1_8b", "h100_sxm", "fp8", engine=engine) for engine in (VLLM, replace(VLLM, request_host=0.0))
)


def deployment(at) -> ServedDeployment:
    part = (Replicas(mapping=ONE, instances=2),)
    return ServedDeployment(name="four", gpus=GPUS, colocated=part, prefill=part, decode=part, setup=at)


def equal(requests: int, prompt: int, output: int) -> Trace:
    return Trace(
        arrival=np.zeros(requests), input_tokens=np.full(requests, prompt), output_tokens=np.full(requests, output)
    )


@pytest.mark.parametrize("policy", ["vllm", "disaggregated"])
def test_requests_that_come_by_themselves_are_late_by_the_host_time_and_nothing_else_changes(policy):
    rng = np.random.default_rng(1)
    trace = Trace(
        arrival=np.cumsum(rng.exponential(0.02, 200)),
        input_tokens=rng.integers(10, 2000, 200),
        output_tokens=rng.integers(1, 50, 200),
    )
    late, soon = (simulate(deployment(at), trace, policy).frame() for at in (WITH, WITHOUT))
    for name in ("prefill_start_s", "first_token_s", "finish_s"):
        assert (late[name] - soon[name]).to_numpy() == pytest.approx(np.full(200, HOST), rel=1e-6)
    assert (late["arrival_s"] == soon["arrival_s"]).all()


@given(clients=st.integers(1, 12), prompt=st.integers(1, 900), output=st.integers(1, 60))
@settings(max_examples=20)
def test_little_s_law_counts_the_host_time(clients, prompt, output):
    """Requests there on average = rate * time in the system, over a run that starts and ends empty."""
    loop = RunOptions(concurrency=clients)
    found = simulate(deployment(WITH), equal(5 * clients, prompt, output), "vllm", options=loop).frame()
    spent = found["finish_s"] - found["arrival_s"]
    moments = np.sort(np.concatenate([found["arrival_s"], found["finish_s"]]))
    middle = 0.5 * (moments[1:] + moments[:-1])
    there = (found["arrival_s"].to_numpy() <= middle[:, None]) & (found["finish_s"].to_numpy() > middle[:, None])
    assert there.sum(axis=1).max() <= clients
    assert float(there.sum(axis=1) @ np.diff(moments)) == pytest.approx(spent.sum(), rel=1e-9)
    assert spent.min() > HOST
