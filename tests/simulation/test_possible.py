"""What is refused before anything runs: parts, GPUs, memory, and limits that nothing can meet."""

from dataclasses import replace

import pytest

from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InfeasibleError
from disagg_sim.physics.setup import setup
from disagg_sim.search.deployment import Deployment, Instance, Pool
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.simulation.deployment import Replicas, ServedDeployment, served
from disagg_sim.simulation.physical_site import least_latencies, require_possible
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.trace import Trace

WHAT = setup("llama_3_1_8b", "h100_sxm", "fp8")
TRACE = Trace(arrival=[0.0, 1.0], input_tokens=[512, 2048], output_tokens=[2, 100], name="two")


def of(tp: int, instances: int) -> tuple[Replicas, ...]:
    return (Replicas(mapping=Sharding(tp_attn=tp, tp_ffn=tp), instances=instances),)


EIGHT = ServedDeployment(name="eight", gpus=8, prefill=of(2, 2), colocated=of(1, 9))


def test_colocated_instances_pair_up_where_no_pairs_are_given():
    assert EIGHT.part("pairs") == EIGHT.colocated
    assert EIGHT.gpus_of("prefill") == 4


def test_the_least_latencies_are_those_of_the_grids_at_batch_one():
    least = least_latencies(WHAT, of(2, 1), TRACE)
    mapping = of(2, 1)[0].mapping
    prefill = prefill_grid(WHAT, mapping, lengths(512, 2), batch=[1])
    host = WHAT.overheads.request_host
    assert least.ttft == pytest.approx(host + prefill.latency.min(), rel=1e-12)
    # the grid's step is at the mean context ISL + OSL/2
    decode = decode_grid(WHAT, mapping, lengths(511, 2), batch=[1])
    assert least.tpot == pytest.approx(decode.latency.min(), rel=1e-12)


def test_chunks_that_follow_each_other_through_the_stages_of_a_pipeline_are_sooner_than_a_whole_prompt():
    """16 chunks over 8 stages take at least 16 + 7 of the 16 x 8 parts of a whole pass."""
    long = Trace(arrival=[0.0], input_tokens=[8192], output_tokens=[2], name="long")
    whole, cut = (
        least_latencies(WHAT, [Replicas(mapping=Sharding(pp=8, chunk_tokens=chunk), instances=1)], long).ttft
        for chunk in (0, 512)
    )
    assert 23 / 128 < cut / whole < 0.5


@pytest.mark.parametrize(
    ("slo", "said"),
    [(Slo(ttft=1e-4, tpot=1.0), "ttft_s 0.0001; the least TTFT"), (Slo(ttft=9.0, tpot=1e-4), "the least TPOT on")],
)
def test_limits_that_nothing_can_meet_name_the_least(slo, said):
    with pytest.raises(InfeasibleError, match=said):
        require_possible(WHAT, EIGHT, ("colocated",), TRACE, slo)


def test_a_planned_deployment_keeps_its_mappings_batches_and_counts():
    """Three prompts of 1,000.5 tokens on average are 3,002 tokens a pass."""
    prefill = Instance(
        phase="prefill",
        mapping=Sharding(tp_attn=2, tp_ffn=2),
        batch=3,
        latency_s=1.0,
        request_rate_per_s=1.0,
        memory_bytes=1.0,
        lengths=lengths([1000, 1001], [10, 10]),
    )
    decode = replace(prefill, phase="decode", batch=64)
    found = served(Deployment(Pool(((prefill, 3),)), Pool(((decode, 1), (decode, 2)))))
    assert found.gpus == 12
    assert found.prefill == (Replicas(mapping=prefill.mapping, instances=3, batch=3, token_budget=3002),)
    assert [(each.instances, each.batch, each.token_budget) for each in found.decode] == [(1, 64, None), (2, 64, None)]
