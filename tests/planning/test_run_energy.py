"""Energy of simulated runs beside the analytic model, and queues of plans beside simulated ones."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.planning.choices import prompts_of_ranks
from disagg_sim.planning.counts import gpus_of
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.prove import deployed
from disagg_sim.planning.replayed import drawn_requests, policy_of, slo_of
from disagg_sim.planning.run_energy import instances_energy
from disagg_sim.simulation.simulate import simulate
from disagg_sim.workload.synthetic import synthetic_trace

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


@pytest.mark.parametrize("rate", [1.85, 40.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_as_many_requests_are_judged_as_the_rate_says(rate, seed):
    work = Demand(lengths=ds.lengths(2048, 256), ttft=Limit(1.0), tpot=Limit(0.05))
    trace, begin = drawn_requests(work, (2048, 256), rate, seed)
    judged = trace.arrival[trace.arrival >= begin]
    assert len(judged) >= 2_000
    assert (len(judged) - 1) / (judged[-1] - judged[0]) == pytest.approx(rate, rel=1e-9)
    gaps = np.diff(judged)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1.0, abs=0.1)  # Poisson


def test_ranks_of_a_pass_wait_for_the_longest_prompt():
    """Of two prompts of a pass the longer counts: a pool that is sized for even ranks has a queue without end."""
    chat, same = ds.lengths("log_normal_4096_512"), ds.lengths(4096, 512)
    at, wide = ds.setup("llama_4_maverick", "gb200_nvl72", "fp8"), ds.Sharding(dp_attn=4, ep=4)
    even, own = (ds.prefill_grid(at, wide, law, batch=[4]).request_rate[0, 0] for law in (chat, prompts_of_ranks(chat)))
    assert own < 0.7 * even
    assert prompts_of_ranks(same).rank_loads is None
    said = ds.lengths("log_normal_4096_512", rank_imbalance="random")
    assert prompts_of_ranks(said) is said


@pytest.fixture(scope="module")
def pools_of_prefill():
    """A disaggregated design, and prefill choices of one GPU: one prompt, few dear and many cheap ones a pass."""
    designs = []
    for isl, most in ((4096, 1), (4096, 8), (512, 32)):
        found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(isl, 32), ttft="4 s", tpot="50 ms", rate=20)
        design = next(each for each in (found.best, *found.runners_up) if each.mode.value == "disaggregated")
        choice = next(each for each in found.cases[0].inside[0] if gpus_of(each) == 1)
        some = int(np.count_nonzero(choice.batch <= most))
        passes = {"batch": choice.batch[:some], "busy": choice.busy[:some], "ftl": choice.ftl[:, :some]}
        designs.append((design, replace(choice, **passes), (isl, 32)))
    return designs


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "instances", "load"),
    [(0, 1, 0.3), (0, 8, 0.85), (1, 1, 0.85), (1, 8, 0.5), (1, 32, 0.7), (2, 2, 0.7), (2, 8, 0.85)],
)
def test_a_prefill_pool_is_as_fast_as_its_simulation(pools_of_prefill, place, instances, load):
    """Each request joins the shortest queue of the pool, and a pass takes all who wait, up to a batch.

    Of 32 instances at a load of 0.85 whose passes gain little by a second prompt p99 is 1.6 times as long as simulated.
    """
    pytest.importorskip("numba")
    design, choice, tokens = pools_of_prefill[place]
    rate = load * instances * float(choice.batch[-1] / choice.busy[-1])
    takers = replace(design.pools[1], instances=8 * instances, rate=rate)
    sized = replace(design, pools=(replace(design.pools[0], choice=choice, instances=instances, rate=rate), takers))
    trace = synthetic_trace(rate=rate, requests=10_000, lengths=tokens, seed=3)
    table = simulate(deployed(sized), trace, policy_of(sized), slo=slo_of(sized)).frame()[500:]
    taken = (table["prefill_end_s"] - table["arrival_s"]).to_numpy()
    law = choice.delay(rate, instances)
    assert law.mean == pytest.approx(taken.mean(), rel=0.15)
    assert law.at(0.9) == pytest.approx(np.quantile(taken, 0.9), rel=0.2)
    assert law.at(0.99) == pytest.approx(np.quantile(taken, 0.99), rel=0.3)
