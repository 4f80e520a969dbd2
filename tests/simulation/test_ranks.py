"""Attention ranks of an instance: a queue and memory for each, steps together. All numbers are worked out by hand."""

import math

import pytest
from sites import served

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import Mode, RankChoice
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.records import Outcome

#: A step of 1 ms, and 0.1 ms a token of the fullest rank, of prefill or decode.
TWO = StepTable.affine(step=1e-3, per_sequence=1e-4, per_token=1e-4, ranks=2, max_sequences=16)


def fleet_of(table, blocks=200, **limits):
    limits = {"token_budget": 4096, "max_sequences": 16, "watermark": 0.0, **limits}
    return Fleet([InstanceSpec(table=table, blocks=blocks, **limits)])


def ranks_of(fleet):
    return fleet.segments["rank"].tolist()


def test_a_request_needs_room_on_one_rank():
    """Two ranks of 10 blocks: 160 tokens fit, 161 do not although 20 blocks are free."""
    fleet = fleet_of(TWO, blocks=20)
    fleet.submit(0, 0, (0, 150, 11), 0.0)
    with pytest.raises(InputError, match="at most 160 tokens in all"):
        fleet.submit(0, 1, (0, 151, 11), 0.0)


def test_what_waits_counts_four_times_what_runs():
    """All wait: one each, in turn. Then rank 0 runs three and rank 1 none: 3 and 0, then 3 and 4, then 7 and 4."""
    fleet = fleet_of(TWO)
    for request in range(6):
        fleet.submit(0, request, (0, 16, 100), 0.0)
    assert ranks_of(fleet) == [0, 1, 0, 1, 0, 1]
    fleet = fleet_of(TWO)
    for request in range(6):  # those of rank 1 emit one token and are gone
        fleet.submit(0, request, (0, 16, 100 if request % 2 == 0 else 1), 0.0)
    fleet.run_until(0.02)
    for request in range(3):
        fleet.submit(0, request, (0, 16, 100), 0.02)
    assert ranks_of(fleet)[6:] == [1, 0, 1]


def test_ranks_in_turn_and_by_tokens():
    """SGLang takes the next one whatever it has; TensorRT-LLM that with the fewest prompt tokens, of equal numbers."""
    prompts = [100, 10, 10, 10, 10]
    chosen = {}
    for choice in (RankChoice.IN_TURN, RankChoice.FEWEST_TOKENS):
        fleet = fleet_of(TWO, rank_choice=choice)
        for request, prompt in enumerate(prompts):
            fleet.submit(0, request, (0, prompt, 100), 0.0)
        chosen[choice] = ranks_of(fleet)
    assert chosen[RankChoice.IN_TURN] == [0, 1, 0, 1, 0]
    # 1 and 1 requests: rank 1 has fewer tokens; then it has more requests than an even share, so rank 0
    assert chosen[RankChoice.FEWEST_TOKENS] == [0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("outputs", "time"),
    [((10,), 10 * 1.21), ((10, 10), 10 * 1.22), ((10, 10, 10, 1, 10), 1.65 + 9 * 1.64)],
    ids=["one", "one_each", "three_and_two_then_three_and_one"],
)
def test_an_idle_rank_goes_along_and_experts_work_on_the_tokens_of_all(outputs, time):
    """A step of 1 ms, 0.2 ms a sequence of the fullest rank, 0.01 ms a token of all ranks."""
    table = StepTable.affine(step=1e-3, per_sequence=2e-4, per_routed=1e-5, ranks=2, max_sequences=16)
    fleet = fleet_of(table, rank_choice=RankChoice.IN_TURN)
    for request, output in enumerate(outputs):
        fleet.submit(0, request, (16, 0, output), 0.0, last_token_s=0.0)
    fleet.run_until(math.inf)
    assert fleet.segments.finish_s.max() == pytest.approx(1e-3 * time)


@pytest.mark.parametrize("hold", [0, 5, 100])
def test_prompts_wait_until_every_rank_has_a_free_seat(hold):
    """Two ranks of two seats, steps of 1.2 ms: rank 0 has a free one after step 1, rank 1 after step 5. A pass of one
    prompt of 100 tokens a rank takes 11 ms."""
    fleet = fleet_of(TWO, mode=Mode.PREFILL_FIRST, max_sequences=4, hold_steps=hold, rank_choice=RankChoice.IN_TURN)
    for request, generate in enumerate((1, 5, 50, 50)):
        fleet.submit(0, request, (16, 0, generate), 0.0, last_token_s=0.0)
    for request in range(2):
        fleet.submit(0, 4 + request, (0, 100, 50), 0.0)
    fleet.run_until(0.05)
    started = fleet.segments.start_s[4:6]
    if hold == 0:  # each as soon as its rank has a seat: after one step, and after four more behind the first pass
        assert started.tolist() == pytest.approx([0.0012, 0.0012 + 0.011 + 4 * 0.0012])
    else:
        assert started.tolist() == pytest.approx([5 * 0.0012, 5 * 0.0012])


def test_prompts_wait_no_longer_than_they_may():
    """After step 1 a rank has a free seat; three more steps, and its prompt goes alone."""
    fleet = fleet_of(TWO, mode=Mode.PREFILL_FIRST, max_sequences=4, hold_steps=3, rank_choice=RankChoice.IN_TURN)
    for request, generate in enumerate((1, 9, 50, 50)):
        fleet.submit(0, request, (16, 0, generate), 0.0, last_token_s=0.0)
    for request in range(2):
        fleet.submit(0, 4 + request, (0, 100, 50), 0.0)
    fleet.run_until(0.05)
    assert fleet.segments.start_s[4:6].tolist() == pytest.approx([4 * 0.0012, 12 * 0.0012 + 0.011])


def test_prompts_wait_for_no_rank_where_nothing_decodes():
    fleet = fleet_of(TWO, mode=Mode.PREFILL_FIRST, max_sequences=4, hold_steps=100)
    fleet.submit(0, 0, (0, 100, 5), 0.0)
    fleet.run_until(0.05)
    assert fleet.segments.start_s.tolist() == [0.0]


def test_a_prompt_that_comes_for_the_other_rank_ends_the_wait():
    """Rank 0 decodes and could take the first prompt, which waits for one of rank 1: steps of 1.1 ms, and that comes
    within the fourth."""
    fleet = fleet_of(TWO, mode=Mode.PREFILL_FIRST, max_sequences=4, hold_steps=100, rank_choice=RankChoice.IN_TURN)
    fleet.submit(0, 0, (16, 0, 50), 0.0, last_token_s=0.0)
    fleet.submit(0, 1, (16, 0, 50), 0.0, last_token_s=0.0)
    fleet.submit(0, 2, (0, 100, 5), 0.0)
    fleet.run_until(0.0035)
    fleet.submit(0, 3, (0, 100, 5), 0.0035)
    fleet.run_until(0.05)
    assert fleet.segments.start_s[2:4].tolist() == pytest.approx([0.0044, 0.0044])


def test_a_wait_below_none_is_refused():
    with pytest.raises(InputError, match="hold_steps"):
        fleet_of(TWO, hold_steps=-1)


@pytest.mark.parametrize("batch", [7, 50])
def test_ranks_as_even_as_can_be_take_the_time_of_the_physics(batch):
    """The fullest rank has its share rounded up, experts the tokens of all; 50 sequences over 8 ranks: 7 and 50."""
    at, mapping = setup("deepseek_r1", "h200_sxm", "fp8"), Sharding(dp_attn=8, ep=8)
    fleet = fleet_of(StepTable.build(at, mapping, max_sequences=64), blocks=8 * 1000, max_sequences=64)
    for request in range(batch):
        fleet.submit(0, request, (2000, 0, 100), 0.0, last_token_s=0.0)
    fleet.run_until(math.inf)
    exact = decode_step(at, mapping, batch=float(batch), context=2050.5).ttl
    assert fleet.segments.finish_s.max() / 100 == pytest.approx(float(exact), rel=2e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vllm", {"router": "llm_d"}),
        ("vllm", {"router": "dynamo_kv"}),
        ("disaggregated", {"router": "prefix"}),
        ("arrow", {}),
        ("dynamo_load", {}),
        ("dopd", {}),
        ("dynaserve", {}),
    ],
)
def test_policies_serve_instances_of_several_ranks(name, options):
    """Rows of ranks follow those of instances in the view: every request ends, whatever a policy looks at."""
    parts = {"colocated": 2} if name in ("vllm", "dynaserve") else {"prefill": 2, "decode": 1}
    pools = {role: (Replicas(mapping=Sharding(dp_attn=2, ep=2), instances=count),) for role, count in parts.items()}
    two = ServedDeployment(name="ranks", gpus=2 * sum(parts.values()), **pools)
    arrivals = [(0.5 * n, 200 + 40 * (n % 3), 5 + n % 4) for n in range(800)]  # planners look every 3 minutes
    table = StepTable.affine(step=1e-3, per_sequence=1e-4, per_token=1e-4, ranks=2, max_sequences=512)
    found = served(arrivals, policy_named(name, **options), two, table=table)
    assert set(found.requests.status.tolist()) == {Outcome.COMPLETED}
