"""Dynamo's planners and what they share with DOPD: forecasts, knapsack, budgets, sizes by hand."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sites import deployment, site
from sites import served as slowly_linked

from disagg_sim.domain import Sharding, Slo
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.dopd.sizes import greedy
from disagg_sim.simulation.policies.dynamo import load
from disagg_sim.simulation.policies.dynamo.load import LoadPlanner, Planner2025, stepping
from disagg_sim.simulation.policies.dynamo.sla import decode_instances, prefill_instances
from disagg_sim.simulation.policies.pools import LEAST, Arima, Arma, Pools, Sizes, within
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.synthetic import synthetic_trace

#: 10 ms a step, 1 ms a sequence that decodes, 0.1 ms a prompt token.
TABLE = StepTable.affine(step=0.010, per_sequence=0.001, per_token=0.0001)
#: 1P + 1D, and eight GPUs in all.
ROOM = deployment(prefill=1, decode=1, colocated=6)
WIDE = deployment(prefill=4, decode=4)
BUSY = [(k * 0.05, 800, 20) for k in range(800)]  # 20 prompts/s of 90 ms: 1.8 prefill instances' work
IDLE = [(k * 1.0, 100, 5) for k in range(60)]


def served(requests, policy, served_by, **more):
    """A run whose network is no limit."""
    return slowly_linked(requests, policy, served_by, link_bandwidth=1e15, **more)


@pytest.mark.parametrize(("free", "started"), [(3, 3), (7, 4), (8, 2), (9, 3), (100, 5)])
def test_planners_start_as_many_instances_as_free_gpus_hold(free, started):
    """Two more of four GPUs each for prefill are wanted, then three of one for decode."""
    four, one = (Replicas(mapping=Sharding(tp_attn=gpus, tp_ffn=gpus), instances=1) for gpus in (4, 1))
    own = ServedDeployment(name="unlike", gpus=128, prefill=(four,), decode=(one,))
    view = SimpleNamespace(
        prefill=np.array([0]), decode=np.array([1]), starting=lambda _: [], free_gpus_for=lambda _: free
    )
    wishes = Pools(site(Engine(0), own, table=TABLE)).steps(view, Sizes(3, 4), "more load")
    assert len(wishes) == started


# --- forecasts ------------------------------------------------------------------------------------------------------


def test_an_arma_forecast_by_hand():
    """Mean 10, x = 11, 12, 14: e1 = 2 - 0.5*1 = 1.5, e2 = 4 - (0.5*2 + 0.25*1.5) = 2.625; next 10 + 0.5*4 + 0.25*e2."""
    assert Arma(10.0, (0.5,), (0.25,)).forecast([11.0, 12.0, 14.0]) == pytest.approx(12.65625)


def test_arima_stands_on_the_last_value_until_it_has_points_enough():
    arima = Arima()
    assert np.isnan(arima.next())
    for k in range(LEAST - 1):
        arima.observe(100.0 + k)
        assert arima.next() == 100.0 + k
    assert arima.fits == 0


def test_arima_learns_a_process_and_is_fitted_anew_only_after_two_bad_forecasts():
    rng = np.random.default_rng(0)
    series = [100.0]
    for _ in range(60):
        series.append(100 + 0.8 * (series[-1] - 100) + rng.normal(0, 2))
    arima, errors, naive = Arima(), [], []
    for value in series:
        if arima.fits:
            errors.append(value - arima.next())
        arima.observe(value)
    naive = np.diff(series)[-len(errors) :]
    assert arima.fits == 1
    assert np.std(errors) < 1.15 * np.std(naive)
    arima.observe(300.0)
    assert arima.fits == 1
    arima.observe(20.0)
    assert arima.fits == 2


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=80))
def test_a_forecast_is_always_a_number_from_zero(series):
    arima = Arima()
    for value in series:
        arima.observe(value)
        assert 0.0 <= arima.next() < np.inf


# --- knapsack and budgets -------------------------------------------------------------------------------------------


def test_the_knapsack_takes_the_densest_and_passes_over_what_does_not_fit():
    """Densities 0.025, 0.02, 0.0143, 0.02: the 40 and then the 30; 70 and 50 do not fit into the other 30."""
    assert greedy([1.0, 0.6, 1.0, 1.0], [40, 30, 70, 50], 100) == [0, 1]


@pytest.mark.parametrize(
    ("wanted", "gpus", "budget", "expected"),
    [
        (Sizes(2, 1), Sizes(1, 2), 8, Sizes(2, 1)),  # fits
        (Sizes(6, 4), Sizes(1, 2), 8, Sizes(4, 2)),  # 14 GPUs: 3.4 and 2.3, and of the one left a prefill instance
        (Sizes(40, 1), Sizes(1, 2), 8, Sizes(6, 1)),  # decode keeps one
        (Sizes(0, 0), Sizes(1, 2), 8, Sizes(1, 1)),
    ],
)
def test_sizes_are_cut_in_proportion(wanted, gpus, budget, expected):
    assert within(wanted, gpus, budget) == expected


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.integers(8, 64))
def test_sizes_stay_inside_the_budget(prefill, decode, first, second, budget):
    found = within(Sizes(prefill, decode), Sizes(first, second), budget)
    assert found.prefill * first + found.decode * second <= budget
    assert found.prefill >= 1
    assert found.decode >= 1


# --- SLA planner ----------------------------------------------------------------------------------------------------


def test_prefill_instances_by_hand():
    """3,000 tokens in two chunks: 2*0.01 + 0.3 s = 0.32 s, so 10 requests/s are 3.2 instances; 2.7 limits of 0.12 s."""
    slo = Slo(ttft=2.0, tpot=0.1)
    assert prefill_instances(TABLE, 10.0, 3000.0, slo, 2048) == 4
    assert prefill_instances(TABLE, 0.1, 3000.0, Slo(ttft=0.12, tpot=0.1), 2048) == 3


def test_decode_instances_by_hand():
    """10 ms + 1 ms a sequence within 50 ms: 40 sequences, 40/(100*0.05) = 8 requests/s; 10 in 20 ms are 5."""
    slo = Slo(ttft=2.0, tpot=0.05)
    assert decode_instances(TABLE, 20.0, 500.0, 100.0, slo, tokens=10**6, most=256) == 3
    assert decode_instances(TABLE, 20.0, 500.0, 100.0, slo, tokens=5500, most=256) == 4


def test_the_sla_planner_sizes_both_pools_for_the_forecast():
    """20 requests/s of 90 ms: 2 prefill instances; their decode needs no more than one."""
    options = RunOptions(start_up_s=2.0)
    result = served(BUSY, policy_named("dynamo_sla", window_s=10.0), ROOM, table=TABLE, options=options)
    first = result.decisions[0]
    assert (first.time_s, first.kind, first.wish) == (10.0, "start", "start of a prefill instance (tp 1)")
    assert first.reason == "20 requests/s of 800/20 tokens: 1P + 1D to 2P + 1D"
    assert result.instances.start_s[2] == 10.0
    late = result.requests.prefill_instance == 2
    assert result.requests.prefill_start_s[late].min() >= 12.0


@pytest.mark.parametrize(("policy", "more"), [("dynamo_sla", {}), ("dopd", {"action_s": 20.0, "sizing": "little"})])
def test_attainment_rises_with_the_load_where_no_headroom_is_left(policy, more):
    """A prompt takes 110 ms: one instance is busy for 0.98 of the time at 8.9 requests/s, and at 9.6 there are two."""

    def inside(rate, headroom):
        trace = synthetic_trace(rate=rate, lengths=(1000, 10), requests=round(400 * rate))
        planner = policy_named(policy, window_s=20.0, forecast="constant", headroom=headroom, **more)
        room = deployment(prefill=1, decode=1, colocated=4)
        found = served(trace, planner, room, table=TABLE, options=RunOptions(start_up_s=1.0)).requests
        late = found.arrival_s > 60.0
        return float((found.first_token_s - found.arrival_s <= 1.0)[late].mean())

    assert inside(9.6, 0.0) > inside(8.9, 0.0) + 0.05
    assert inside(9.6, 0.3) <= inside(8.9, 0.3) + 0.01
    assert inside(8.9, 0.3) > 0.95


def test_the_floor_holds_where_an_instance_starts_at_the_time_of_the_decision():
    """20 requests/s of 90 ms need 2 prefill instances. The load planner starts one at 3 and at 8 s, for 4 s each.

    So one is on its way at 5 and at 10 s, when the other planner decides. Once the queue is gone one stops, no other.
    """
    policy = policy_named("dynamo_sla", window_s=5.0, load=True, load_period_s=1.0)
    found = served(BUSY, policy, ROOM, table=TABLE, options=RunOptions(start_up_s=4.0)).decisions
    assert [each.reason.rpartition(" to ")[2] for each in found] == ["2P + 1D", "3P + 1D", "2P + 1D"]


# --- the router's queue ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queue", "first_s"), [("shared", [0.02, 0.04, 0.06]), ("instances", [0.02, 0.05, 0.05])])
def test_the_router_holds_back_what_no_worker_has_room_for(queue, first_s):
    """A threshold of 0 gives no worker a second prompt: three of 100 tokens go one by one, 20 ms each.

    At the worker the last two would share a step of 30 ms.
    """
    policy = policy_named("dynamo_load", queue=queue, queue_threshold=0.0)
    r = served([(0.0, 100, 2)] * 3, policy, deployment(prefill=1, decode=1), table=TABLE).requests
    assert r.first_token_s.tolist() == pytest.approx(first_s)


def test_below_the_threshold_nothing_is_held_back():
    """Two steps of 2,048 tokens: the first three prompts of 2,000 are sent at once, the fourth waits for the first."""
    policy = policy_named("dynamo_load", queue_threshold=2.0, period_s=1e3)
    result = served([(0.0, 2000, 1)] * 4, policy, deployment(prefill=1, decode=1), table=TABLE)
    assert (result.requests.status == Outcome.COMPLETED).all()
    assert result.requests.first_token_s[3] == pytest.approx(4 * 0.01 + 0.8)  # steps stay full


# --- load planner ---------------------------------------------------------------------------------------------------


def kinds(result):
    return [decision.kind for decision in result.decisions]


def test_the_load_planner_adds_one_at_a_time_and_waits_for_its_start():
    policy, slo = policy_named("dynamo_load", period_s=1.0), Slo(ttft=1.0, tpot=0.1)
    result = served(BUSY, policy, ROOM, table=TABLE, slo=slo, options=RunOptions(start_up_s=3.5))
    times = [decision.time_s for decision in result.decisions if decision.kind == "start"]
    assert times
    assert all(later - sooner >= 4.0 for sooner, later in pairwise(times))
    assert (result.requests.status == Outcome.COMPLETED).all()


def test_the_estimate_is_that_of_the_next_prompt():
    """3,000 tokens wait and prompts have 800: 3,800 in steps of 2,048 and 1,752, 20 ms and 380 ms."""
    here = site(Engine(), ROOM, table=TABLE)
    options = policy_named("dynamo_load")
    planner = LoadPlanner(options, here, stepping(here, options.token_budget, options.max_sequences))
    planner._prompt = 800.0
    assert planner._ttft(3000.0) == pytest.approx(0.4)
    assert planner._ttft(0.0) == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("waiting", "step"), [([0, 131_072], 1), ([0, 131_071], 0), ([13_107, 13_107], -1), ([13_107, 13_108], 0)]
)
def test_queues_count_in_contexts(waiting, step):
    """Of 131,072 tokens: an instance more where one queue is as long, one less where all are below a tenth."""
    here = site(Engine(), ROOM, table=TABLE)
    options = policy_named("dynamo_load", mode="throughput")
    planner = LoadPlanner(options, here, stepping(here, options.token_budget, options.max_sequences))
    view = {"prefill": np.arange(2), "waiting_prompt_tokens": np.array(waiting), "shared_prompt_tokens": 0}
    assert planner._prefill_step(SimpleNamespace(**view)) == step


def test_the_load_planner_shrinks_to_its_floor_when_idle():
    result = served(IDLE, policy_named("dynamo_load", least=2), WIDE, table=TABLE)
    assert kinds(result) == ["stop"] * 4
    assert result.decisions[0].time_s == 5.0
    assert result.decisions[-1].time_s == 10.0


def planner_of_2025():
    """With at least one instance of each pool."""
    return Planner2025(site(Engine(), ROOM, table=TABLE), look_s=10.0, between_s=180.0, least=1, drain=True)


EIGHT_GPUS = SimpleNamespace(gpus_for=lambda mapping: 8)


@pytest.mark.parametrize(
    ("there", "prompts", "use", "wanted"),
    [
        (Sizes(2, 2), [0, 0, 0, 0, 0], 0.7, Sizes(1, 2)),  # 0 is below 0.2
        (Sizes(2, 2), [0, 1, 0, 0, 0], 0.7, Sizes(2, 2)),  # 0.2 is not
        (Sizes(2, 2), [6, 6, 6], 0.7, Sizes(3, 2)),  # above 5, and 6 + 3 x 0 as well
        (Sizes(2, 2), [9, 7, 8], 0.7, Sizes(2, 2)),  # 8 + 3 x (8 - 9) = 5 is not above 5
        (Sizes(2, 2), [1] * 3, 0.49, Sizes(2, 1)),
        (Sizes(2, 2), [1] * 3, 0.5, Sizes(2, 2)),
        (Sizes(2, 2), [1] * 3, 0.91, Sizes(2, 3)),
        (Sizes(2, 2), [0] * 3, 0.91, Sizes(1, 3)),  # each pool by itself
        (Sizes(4, 3), [9] * 3, 0.91, Sizes(5, 3)),  # prefill takes the last GPU
        (Sizes(6, 2), [9] * 3, 0.3, Sizes(7, 1)),  # one that decode gives up
        (Sizes(1, 1), [0] * 3, 0.1, Sizes(1, 1)),  # at least one of each
    ],
)
def test_thresholds_of_2025_by_hand(there, prompts, use, wanted):
    assert planner_of_2025()._decide(EIGHT_GPUS, there, prompts, float(np.mean(prompts)), use) == wanted


def test_the_planner_of_2025_keeps_a_new_decode_worker_for_three_decisions():
    planner = planner_of_2025()
    sizes = [Sizes(1, 1)]
    for use in (0.95, 0.1, 0.1, 0.1, 0.1):
        sizes.append(planner._decide(EIGHT_GPUS, sizes[-1], [1], 1.0, use))
    assert [each.decode for each in sizes] == [1, 2, 2, 2, 2, 1]


def test_the_planner_of_2025_looks_at_means_and_waits_for_its_starts():
    """20 prompts/s, of which an instance serves 11.1: the queue grows by 8.9 a second, until two serve from 12.5 s on.

    A tick later, at 13 s, the planner looks again, and decides at 23 s: still more than 80 wait, about 20 fewer than at
    the first look, 80 - 3 x 20 > 5. With the third, from 25.5 s on, the queue falls by 13 a second until it is empty:
    at 36 s its projection is negative, and its mean is above 0.2.
    """
    policy = policy_named("dynamo_load", mode="v2025", look_s=1.0, period_s=10.0, queue_threshold=0.0)
    result = served(BUSY, policy, ROOM, table=TABLE, options=RunOptions(start_up_s=2.5))
    found = [(each.time_s, each.reason.rpartition(": ")[2]) for each in result.decisions]
    assert found == [(10.0, "1P + 1D to 2P + 1D"), (23.0, "2P + 1D to 3P + 1D")]
    assert (result.requests.status == Outcome.COMPLETED).all()


def test_what_waits_for_decode_counts_as_a_fiftieth_of_its_memory():
    """600 of 1,000 blocks are taken, and 5 requests wait: 0.6 + 0.1; 100 and one: 0.1 + 0.02."""
    view = SimpleNamespace(
        prefill=np.array([0]),
        decode=np.array([1, 2]),
        free_blocks=np.array([0, 400, 900]),
        total_blocks=np.array([1, 1000, 1000]),
        queued_requests=np.array([0, 5, 1]),
        shared_requests=7,
    )
    assert load._look(view) == (7, pytest.approx((0.6 + 0.1 + 0.1 + 0.02) / 2), Sizes(1, 2))


def test_without_projection_sizes_swing_more():
    """Two decode instances at 70 % of the limit each: one alone would be over it, so only the fault goes down."""
    slow = StepTable.affine(step=0.010, per_sequence=0.010, per_token=1e-6)
    steady = [(k * 0.1, 10, 90) for k in range(600)]
    wide, slo, stops = deployment(prefill=1, decode=2, colocated=2), Slo(ttft=2.0, tpot=0.6), {}
    for project in (True, False):
        policy = policy_named("dynamo_load", project=project, period_s=5.0)
        stops[project] = kinds(served(steady, policy, wide, table=slow, slo=slo)).count("stop")
    assert stops[True] < stops[False]
