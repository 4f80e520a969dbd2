"""Queues by priority, as vLLM's ``scheduling_policy: priority`` has them."""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import RESERVE, Mode, Scheduling
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


def test_equal_priorities_go_in_order_of_arrival():
    """Low ones at 0, high ones behind them: after the step in progress all high ones, then the rest."""
    fleet = fleet_of()
    for request in (0, 1, 2, 100, 101):
        fleet.submit(0, request, (0, 100, 1), 0.0)
    fleet.run_until(np.inf)
    ends = dict(zip(fleet.segments.request.tolist(), fleet.segments.finish_s.tolist(), strict=True))
    assert sorted(ends, key=ends.__getitem__) == [100, 101, 0, 1, 2]


def test_where_blocks_lack_the_lowest_priority_is_preempted_even_if_it_came_first():
    """Two sequences of 20 tokens in 4 blocks: the first that needs a third block takes those of the other."""
    for scheduling, expected in ((Scheduling.PRIORITY, [1, 0]), (Scheduling.FCFS, [0, 1])):
        fleet = fleet_of(blocks=4, scheduling=scheduling)
        for request in (0, 100):
            fleet.submit(0, request, (0, 20, 30), 0.0)
        fleet.run_until(np.inf)
        order = np.argsort(fleet.segments.request)
        assert fleet.segments.preemptions[order].tolist() == expected
        assert fleet.segments.emitted.tolist() == [30, 30]


def test_a_cache_of_low_priority_that_finds_no_blocks_holds_no_prompt_of_higher_priority_up():
    """30 of 40 blocks are taken; a reservation of 20 waits. A prompt of 5 blocks passes it, if it is preferred."""
    for request, waits in ((100, False), (1, True)):
        fleet = fleet_of(blocks=40, token_budget=1000)
        fleet.submit(0, 0, (0, 480, 10), 0.0)
        fleet.run_until(0.1)
        fleet.submit(0, 2, (320, 0, 5), 0.1, flags=RESERVE)
        segment = fleet.submit(0, request, (0, 80, 1), 0.1)
        fleet.run_until(0.55)  # the first ends at 0.58
        assert np.isnan(fleet.start_s(segment)) == waits


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
