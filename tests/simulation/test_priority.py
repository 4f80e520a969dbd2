"""Queues by priority, as vLLM's ``scheduling_policy: priority`` has them."""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import Mode, Scheduling
from disagg_sim.simulation.kernel.step_table import StepTable

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


def fleet_of(**changes):
    return Fleet([replace(SPEC, **changes)], priority=PRIORITY)


@pytest.mark.parametrize(("scheduling", "first_token"), [(Scheduling.PRIORITY, 0.22), (Scheduling.FCFS, 51 * 0.11)])
def test_a_backlog_of_low_priority_costs_others_the_step_in_progress(scheduling, first_token):
    """Fifty prompts of a step each wait. One that comes at 50 ms is next when the first has ended, at 110 ms."""
    fleet = fleet_of(scheduling=scheduling)
    for request in range(50):
        fleet.submit(0, request, (0, 100, 1), 0.0)
    fleet.run_until(0.05)
    urgent = fleet.submit(0, 100, (0, 100, 1), 0.05)
    fleet.run_until(np.inf)
    assert fleet.segments.first_token_s[urgent] == pytest.approx(first_token)


def test_batches_of_a_policy_keep_their_order():
    fleet = fleet_of(mode=Mode.MANUAL)
    for request in (0, 100):
        fleet.submit(0, request, (0, 100, 1), 0.0)
    fleet.run_until(np.inf)
    assert fleet.segments.finish_s.tolist() == pytest.approx([0.11, 0.22])


def test_a_request_that_begins_again_keeps_its_priority():
    fleet = fleet_of()
    fleet.begin_again(np.array([100]), [200])
    fleet.submit(0, 0, (0, 100, 1), 0.0)
    fleet.run_until(0.05)
    for request in (1, 200):
        fleet.submit(0, request, (0, 100, 1), 0.05)
    fleet.run_until(np.inf)
    assert fleet.segments.finish_s.tolist() == pytest.approx([0.11, 0.33, 0.22])
