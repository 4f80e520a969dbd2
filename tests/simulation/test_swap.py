"""Preemption by swap: what gives way goes to the host's memory, and the steps that move it wait."""

import math
from dataclasses import replace

import pytest
from sites import SIMPLE, deployment, site, trace

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.physical_site import Expected, swap_times
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.run import serve
from disagg_sim.simulation.run_options import RunOptions

#: One block takes 5 ms over the host link, after 1 ms.
SLOW_HOST = (0.005, 0.001)


def two_that_do_not_fit(swap_s):
    """Two requests of 30 + 20 tokens in four blocks of 16; steps of 10 ms, 1 ms a decode, 0.1 ms a prompt token."""
    engine, options = Engine(0), RunOptions(first_token="prefill")
    here = site(engine, deployment(colocated=1), table=SIMPLE, blocks=4, options=options)
    here = replace(here, swap_s=swap_s)
    return serve(trace([(0.0, 30, 20), (0.0, 30, 20)]), policy_named("vllm"), here, engine, options)


def test_a_sequence_is_swapped_out_and_back_by_hand():
    """The first prompt takes 13 ms, the second 14 ms beside a decode; at 39 ms both fill two blocks, and none is free.

    The second gives way with two tokens: 1 + 2 x 5 ms, and 11 ms for the fourth token of the first, up to 61 ms; its
    other 16 take until 237 ms. Then the second comes back in 11 ms, and 18 steps of 11 ms follow.
    """
    result = two_that_do_not_fit(lambda mapping: SLOW_HOST)
    r = result.requests
    assert r.first_token_s.tolist() == pytest.approx([0.013, 0.027])
    assert r.finish_s.tolist() == pytest.approx([0.237, 0.446])
    assert r.preemptions.tolist() == [0, 1]
    assert result.instances.prefill_tokens.tolist() == [60]  # nothing is computed again
    assert result.instances.busy_s.tolist() == pytest.approx([0.446])
    assert result.itl_counts.sum() == 38
    longest = result.itl_edges[result.itl_counts.nonzero()[0][-1]]
    assert longest == pytest.approx(0.220, rel=0.011)  # of the second, from 39 to 259 ms


def test_steps_that_move_blocks_alone_are_no_steps_with_prefill():
    """Both prompts in one step of 16 ms, two steps of 12; each swap is 11 ms, and 17 steps of 11 ms follow it."""
    limits = {"token_budget": 2048, "max_sequences": 8, "watermark": 0.0}
    fleet = Fleet(
        [InstanceSpec(table=SIMPLE, blocks=4, swap_block_s=SLOW_HOST[0], swap_first_s=SLOW_HOST[1], **limits)]
    )
    for request in range(2):
        fleet.submit(0, request, (0, 30, 20), 0.0)
    fleet.run_until(math.inf)
    assert fleet.segments.finish_s.tolist() == pytest.approx([0.238, 0.436])
    assert fleet.arrays.inst["passes"].tolist() == [1]


def test_without_swap_its_tokens_are_computed_again():
    """All 32 in a step of 13.2 ms that emits the third token, once the first request has ended at 226 ms."""
    result = two_that_do_not_fit(None)
    assert result.requests.finish_s.tolist() == pytest.approx([0.226, 0.226 + 0.0132 + 17 * 0.011])
    assert result.instances.prefill_tokens.tolist() == [60 + 32]


def test_each_gpu_swaps_its_own_part_over_its_own_link():
    """131,072 B a token of Llama-3.1-8B in bf16 over 50 GB/s a GPU of an H100: 42 us a block of 16, a half with TP2."""
    at = ds.setup("llama_3_1_8b", "h100_sxm", "bf16")
    expected = Expected(1000.0, 100.0, 2000, 1500, 0.0)
    one, two = (swap_times(at, expected, Sharding(tp_attn=tp, tp_ffn=tp)) for tp in (1, 2))
    assert one == (pytest.approx(16 * 131_072 / 50e9), 20e-6)
    assert two[0] == pytest.approx(one[0] / 2)


def simulated(system, **options):
    """300 requests that Llama-3.1-8B on one GPU cannot hold at once."""
    requests = ds.synthetic_trace(rate=200.0, requests=300, lengths=(1500, 1000))
    part = (ds.Replicas(mapping=Sharding(), instances=1),)
    served = ds.ServedDeployment(name="one", gpus=1, setup=ds.setup("llama_3_1_8b", system, "bf16"), colocated=part)
    return ds.simulate(served, requests, "vllm", options=RunOptions(scheduler="vllm_v0_2024", **options))


def test_the_option_of_a_run_swaps():
    swapped, again = (simulated("h100_sxm", preemption=each) for each in ("swap", "recompute"))
    for result in (swapped.records, again.records):
        assert result.requests.preemptions.sum() > 0
        assert (result.requests.output_tokens == 1000).all()
    assert swapped.records.instances.prefill_tokens.sum() == 300 * 1500
    assert again.records.instances.prefill_tokens.sum() > 300 * 1500


def test_what_cannot_be_swapped_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"a100_sxm_80gb has no tier 'dram'"):
        simulated("a100_sxm_80gb", preemption="swap")
    with pytest.raises(InputError, match=r"'swap' with prefix_cache"):
        RunOptions(preemption="swap", prefix_cache=True)
    ranks = StepTable.build(ds.setup("mixtral_8x7b", "h100_sxm", "bf16"), Sharding(dp_attn=2, ep=2), max_sequences=8)
    with pytest.raises(InputError, match=r"2 attention ranks with preemption by swap; allowed: one rank"):
        InstanceSpec(table=ranks, blocks=100, max_sequences=8, swap_block_s=1e-4)
