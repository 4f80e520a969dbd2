"""Energy of simulated runs, beside the analytic model."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.errors import InputError
from disagg_sim.planning.run_energy import instances_energy

ISL, OSL, ONE = 2048, 256, ds.Sharding()
LENGTHS = ds.lengths(ISL, OSL)


@pytest.fixture(scope="module")
def at():
    return ds.setup("llama_3_1_8b", "h200_sxm", "fp8")


def at_once(requests):
    sizes = np.full(requests, ISL), np.full(requests, OSL)
    return ds.Trace(arrival=np.zeros(requests), input_tokens=sizes[0], output_tokens=sizes[1])


def test_a_run_without_requests_in_flight_draws_idle_power(at):
    served = ds.ServedDeployment(name="two", gpus=2, colocated=(ds.Replicas(mapping=ONE, instances=2),), setup=at)
    trace = ds.Trace(arrival=np.array([0.0, 500.0]), input_tokens=np.array([16, 16]), output_tokens=np.array([2, 2]))
    found = ds.run_energy(ds.simulate(served, trace, "vllm"))
    assert found["watts"].to_numpy() == pytest.approx(700 * 0.192, rel=0.001)


def test_several_layouts_of_a_role_are_refused(at):
    parts = tuple(
        ds.Replicas(mapping=each, instances=1) for each in (ds.Sharding(tp_attn=2, tp_ffn=2), ds.Sharding(pp=2))
    )
    served = ds.ServedDeployment(name="mixed", gpus=4, colocated=parts, setup=at)
    result = ds.simulate(served, at_once(4), "vllm")
    with pytest.raises(InputError, match="'mixed': colocated has several layouts of 2 GPUs; energy is told of one"):
        ds.run_energy(result)


def test_each_instance_draws_for_the_sequences_of_its_own_steps(at):
    """Two alike, one with 3 sequences in a step and one with 64: what each draws is what it would draw alone."""
    two = (ds.Replicas(mapping=ONE, instances=2, batch=64),)
    served = ds.ServedDeployment(name="two", gpus=2, colocated=two, setup=at)
    held = ds.simulate(served, at_once(8), "vllm").records.instances
    tokens = held.decode_steps * np.array([3, 64])
    unlike = [replace(held, decode_tokens=each) for each in (tokens, tokens[::-1])]
    alone = [replace(held, decode_tokens=held.decode_steps * each) for each in (3, 64)]
    few, many = (instances_energy(each, served, at, LENGTHS)["joules"] for each in alone)
    assert many[0] > 1.02 * few[0]
    first, last = (instances_energy(each, served, at, LENGTHS)["joules"] for each in unlike)
    assert first.to_numpy() == pytest.approx([few[0], many[1]])
    assert last.to_numpy() == pytest.approx([many[0], few[1]])
