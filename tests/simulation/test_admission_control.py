"""What is admitted: control and memory of instances, priorities, and what is refused before anything runs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InfeasibleError
from disagg_sim.physics.setup import setup
from disagg_sim.search.deployment import Deployment, Instance, Pool
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.simulation.admission import Busy, PredictedTtft
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.deployment import served as deployment_of
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import AdmissionRule, Mode, Scheduling
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.metrics import summary
from disagg_sim.simulation.physical_site import least_latencies, require_possible
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.trace import Trace
from tests.simulation.sites import SIMPLE, deployment, served

ONE = deployment(colocated=1)
LIMITS = Slo(ttft=2.0, tpot=0.1)


def overload(factor: float, count: int = 400):
    """Prompts of 1,000 tokens and a single output, at a multiple of the 9 a second that one instance prefills."""
    return [(each / (9.0 * factor), 1000, 1) for each in range(count)]


def goodput(rows, policy, admission, parts=ONE) -> float:
    options, fast = RunOptions(admission=admission), {"link_bandwidth": 131_072e6}  # 1 ms a cache of 1,000 tokens
    result = served(rows, policy, parts, table=SIMPLE, slo=LIMITS, options=options, **fast)
    return summary(result, LIMITS).goodput_requests_per_s


@pytest.mark.parametrize(("policy", "parts"), [("vllm", ONE), ("disaggregated", deployment(prefill=1, decode=1))])
def test_goodput_rises_under_overload(policy, parts):
    """At three times what it serves a queue grows by two of three requests: after 3 s all that follow are late. With
    admission the cluster goes on serving what it can in time: some 9 requests a second."""
    rows = overload(3.0)
    assert goodput(rows, policy, None, parts) < 3.0
    for admission in (PredictedTtft(share=0.8), Busy(prefill_tokens=10_000)):
        assert goodput(rows, policy, admission, parts) > 7.0


def test_without_overload_nothing_is_rejected():
    for admission in (PredictedTtft(), Busy()):
        result = served(overload(0.8), "vllm", ONE, table=SIMPLE, slo=LIMITS, options=RunOptions(admission=admission))
        assert (result.requests.status == Outcome.COMPLETED).all()


def test_the_threshold_of_tokens_is_that_of_every_instance():
    """Two instances, 2,500 tokens each: at time 0 the third prompt finds one with 1,000, the sixth both above."""
    rows = [(0.0, 1000, 2)] * 10
    options = RunOptions(admission=Busy(prefill_tokens=2500))
    found = served(rows, "vllm", deployment(colocated=2), table=SIMPLE, options=options).requests
    assert np.flatnonzero(found.status == Outcome.REJECTED).tolist() == [6, 7, 8, 9]


def test_full_memory_turns_requests_away():
    """40 blocks are 640 tokens: a request of 500 and 100 of output uses 0.8 of them and more while it decodes."""
    rows = [(0.0, 500, 100), (0.5, 20, 2), (5.0, 20, 2)]
    options = RunOptions(admission=Busy(decode_blocks=0.5))
    found = served(rows, "vllm", ONE, table=SIMPLE, blocks=40, options=options).requests
    assert [Outcome(each).name for each in found.status] == ["COMPLETED", "REJECTED", "COMPLETED"]
    never = replace(options, admission=Busy(decode_blocks=1.0))
    assert (served(rows, "vllm", ONE, table=SIMPLE, blocks=40, options=never).requests.status == 0).all()


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 4000), st.integers(1, 20)), min_size=1, max_size=40),
    share=st.floats(0.05, 2.0),
)
def test_every_request_is_served_or_rejected_at_its_arrival(rows, share):
    options = RunOptions(admission=PredictedTtft(share=share))
    found = served(sorted(rows), "vllm", ONE, table=SIMPLE, slo=LIMITS, blocks=2000, options=options).requests
    rejected = found.status == Outcome.REJECTED
    assert ((found.status == Outcome.COMPLETED) | rejected).all()
    assert np.isnan(found.first_token_s[rejected]).all()
    assert (found.segments[rejected] == 0).all()


#: 10 ms a step and 1 ms a token of prefill; blocks hold 16 tokens.
TABLE = StepTable.affine(step=0.010, per_token=0.001)

EVERY = pytest.mark.parametrize("admission", list(AdmissionRule))


def fleet_of(admission, *, blocks=10, budget=64, **options):
    options = {"watermark": 0.0} | options
    return Fleet([InstanceSpec(table=TABLE, blocks=blocks, token_budget=budget, admission=admission, **options)])


@EVERY
def test_a_prompt_takes_the_blocks_of_its_first_chunk_or_all(admission):
    """64 of 96 tokens are 4 blocks, all are 6; the other half of a budget of 64 is the next step's."""
    fleet = fleet_of(admission)
    fleet.submit(0, 0, (0, 96, 5), 0.0)
    fleet.run_until(0.05)
    assert fleet.views.free_blocks[0] == (4 if admission == AdmissionRule.PROMPT else 6)
    fleet.run_until(0.1)
    assert fleet.views.free_blocks[0] == 4


@EVERY
def test_who_waits_for_memory(admission):
    """Beside 96 tokens in 6 of 10 blocks, 80 do not fit, their first 32 do: 30 ms after a first step of 74 ms."""
    fleet = fleet_of(admission)
    fleet.submit(0, 0, (0, 96, 20), 0.0)
    fleet.submit(0, 1, (0, 80, 20), 0.0)
    fleet.run_until(math.inf)
    first_is_done = fleet.segments.finish_s[0]
    started = 0.074 if admission == AdmissionRule.FIRST_CHUNK else first_is_done
    assert fleet.segments.start_s[1] == pytest.approx(started)
    assert fleet.segments.finish_s[1] > first_is_done


@EVERY
def test_only_room_for_the_outputs_rules_out_preemption(admission):
    """Two times 64 + 39 tokens end in 14 of 10 blocks: whoever counts prompts alone admits both."""
    fleet = fleet_of(admission, budget=128)
    for request in range(2):
        fleet.submit(0, request, (0, 64, 40), 0.0)
    fleet.run_until(math.inf)
    counts_outputs = admission == AdmissionRule.OUTPUT_FITS
    assert fleet.views.preemptions[0] == (0 if counts_outputs else 1)
    assert (fleet.segments.start_s[1] == 0.0) != counts_outputs


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
    found = deployment_of(Deployment(Pool(((prefill, 3),)), Pool(((decode, 1), (decode, 2)))))
    assert found.gpus == 12
    assert found.prefill == (Replicas(mapping=prefill.mapping, instances=3, batch=3, token_budget=3002),)
    assert [(each.instances, each.batch, each.token_budget) for each in found.decode] == [(1, 64, None), (2, 64, None)]


#: A step of 100 prompt tokens takes 110 ms.
SPEC = InstanceSpec(
    table=StepTable.affine(step=0.010, per_token=0.001, max_sequences=16),
    blocks=1000,
    token_budget=100,
    max_sequences=16,
    watermark=0.0,
    scheduling=Scheduling.PRIORITY,
)

#: Requests from 100 on are preferred.
PRIORITY = np.where(np.arange(200) >= 100, 1, 0)


def by_priority(**changes):
    return Fleet([replace(SPEC, **changes)], priority=PRIORITY)


@pytest.mark.parametrize(("scheduling", "first_token"), [(Scheduling.PRIORITY, 0.22), (Scheduling.FCFS, 51 * 0.11)])
def test_a_backlog_of_low_priority_costs_others_the_step_in_progress(scheduling, first_token):
    """Fifty prompts of a step each wait. One that comes at 50 ms is next when the first has ended, at 110 ms."""
    fleet = by_priority(scheduling=scheduling)
    for request in range(50):
        fleet.submit(0, request, (0, 100, 1), 0.0)
    fleet.run_until(0.05)
    urgent = fleet.submit(0, 100, (0, 100, 1), 0.05)
    fleet.run_until(np.inf)
    assert fleet.segments.first_token_s[urgent] == pytest.approx(first_token)


def test_batches_of_a_policy_keep_their_order():
    fleet = by_priority(mode=Mode.MANUAL)
    for request in (0, 100):
        fleet.submit(0, request, (0, 100, 1), 0.0)
    fleet.run_until(np.inf)
    assert fleet.segments.finish_s.tolist() == pytest.approx([0.11, 0.22])


def test_a_request_that_begins_again_keeps_its_priority():
    fleet = by_priority()
    fleet.begin_again(np.array([100]), [200])
    fleet.submit(0, 0, (0, 100, 1), 0.0)
    fleet.run_until(0.05)
    for request in (1, 200):
        fleet.submit(0, request, (0, 100, 1), 0.05)
    fleet.run_until(np.inf)
    assert fleet.segments.finish_s.tolist() == pytest.approx([0.11, 0.33, 0.22])
