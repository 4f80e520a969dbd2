"""What engines ask for before they admit a prompt, what they take then, and what a preempted one finds again."""

import math

import pytest

from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import AdmissionRule
from disagg_sim.simulation.kernel.step_table import StepTable

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


@pytest.mark.parametrize(
    ("keeps", "blocks", "second", "again"),
    [
        (False, 10, 64, 81),
        (True, 10, 64, 81 - 3 * 16),  # the first takes 2 of the 5 blocks, the last of them first, until its end
        (True, 11, 64, 81 - 4 * 16),  # a block that was free before is taken first
        (True, 11, 72, 89 - 4 * 16),  # of 6 blocks, 5 of them full, that which is not full goes first
    ],
)
def test_a_preempted_segment_finds_the_blocks_that_nobody_took(keeps, blocks, second, again):
    """The second has its prompt and 16 tokens in blocks, and one not yet cached, when no block is left."""
    fleet = fleet_of(AdmissionRule.PROMPT_FITS, blocks=blocks, budget=160, keeps_preempted=keeps)
    for request, prompt in enumerate((64, second)):
        fleet.submit(0, request, (0, prompt, 40), 0.0)
    fleet.run_until(math.inf)
    assert fleet.views.prefill_tokens[0] == 64 + second + again
    assert fleet.segments.preemptions.tolist() == [0, 1]


def test_a_prompt_that_grows_chunk_by_chunk_preempts_itself_last():
    """Both are admitted by their first chunks of 32; the newer one, a prompt, gives way to the older one."""
    fleet = fleet_of(AdmissionRule.FIRST_CHUNK, blocks=10, budget=64)
    fleet.submit(0, 0, (0, 112, 30), 0.0)
    fleet.submit(0, 1, (0, 112, 30), 0.0)
    fleet.run_until(math.inf)
    segments = fleet.segments
    assert segments.preemptions[0] == 0
    assert segments.preemptions[1] > 0
    assert segments.finish_s[0] < segments.finish_s[1]
