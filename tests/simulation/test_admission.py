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
