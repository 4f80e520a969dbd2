"""The search for the capacity on known answers, loads that policies compare, and queues of theory."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import made_requests, made_run
from sites import arrays_of

from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.simulation.capacity import TOLERANCE, WIDEST, attains, p99_inside, serving_capacity
from disagg_sim.simulation.kernel.addresses import addresses_of
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import InstanceRecord, Mode, dtype_of
from disagg_sim.simulation.kernel.ranking import Rankings
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.metrics import summary
from disagg_sim.simulation.policies.loads import InTurn, fewest_requests, least_decode, least_prefill, shortest_queue

ONE = summary(made_run(made_requests([0.0], [1.0], [2.0], [11])), Slo(ttft=1.0, tpot=0.1))


def falling(capacity: float):
    """Attainment falls through 0.9 at the rate scale ``capacity``."""
    return lambda scale: replace(ONE, rate_scale=scale, slo_attainment=min(1.0, 0.9 * capacity / scale))


@given(capacity=st.floats(1 / WIDEST, WIDEST))
def test_the_capacity_is_found_to_the_tolerance_from_below_in_few_runs(capacity):
    found = serving_capacity(falling(capacity), attains(0.9), rate=3.0)
    assert found.rate_scale <= capacity * (1 + 1e-9)
    assert found.above >= capacity * (1 - 1e-9)
    assert found.above <= found.rate_scale * (1 + TOLERANCE) or math.isinf(found.above)
    assert found.requests_per_s == pytest.approx(3.0 * found.rate_scale)
    assert found.met_again == 0
    assert len(found.runs) <= 15
    assert [row.rate_scale for row in found.runs] == sorted(row.rate_scale for row in found.runs)


def test_a_start_near_the_capacity_takes_six_runs_and_three_checks():
    """1 is met, 2 is not, four bisections; a half and a quarter of 1.297 and twice 1.354 were not tried yet."""
    assert len(serving_capacity(falling(1.3), attains(0.9), rate=1.0, checked=False).runs) == 6
    assert len(serving_capacity(falling(1.3), attains(0.9), rate=1.0).runs) == 9


def stretches(*edges: float):
    """The aim is met below the first edge, missed up to the second, met again up to the third, and so on."""

    def run(scale: float):
        inside = sum(scale > edge for edge in edges) % 2 == 0
        return replace(ONE, rate_scale=scale, slo_attainment=0.95 if inside else 0.17)

    return run


def test_an_aim_met_again_above_the_boundary_is_told_and_does_not_raise_the_answer():
    """Met up to 1.3, missed up to 2.5, met up to 4: twice the first miss, 2.7, meets it."""
    found = serving_capacity(stretches(1.3, 2.5, 4.0), attains(0.9), rate=2.0)
    assert 1.3 / (1 + TOLERANCE) <= found.rate_scale <= 1.3 <= found.above <= 1.3 * (1 + TOLERANCE)
    assert found.met_again == pytest.approx(2 * found.above)
    assert found.met_again > 0
    assert "NOT MONOTONE: " in found.message
    assert "misses the aim (17.0% of the requests are inside the SLO), 2.7" in found.message


@given(st.lists(st.floats(1 / WIDEST, WIDEST), max_size=6), st.floats(0.1, 10.0))
def test_whatever_the_curve_every_rate_tried_up_to_the_answer_meets_the_aim(edges, start):
    found = serving_capacity(stretches(*edges), attains(0.9), rate=1.0, start=start)
    met = {row.rate_scale: row.slo_attainment >= 0.9 for row in found.runs}
    assert all(inside for scale, inside in met.items() if scale <= found.rate_scale)
    assert found.above == min((scale for scale, inside in met.items() if not inside), default=math.inf)
    assert (found.met_again == 0) == all(not inside for scale, inside in met.items() if scale > found.above)


@given(low=st.floats(0.2, 8.0), width=st.floats(2.0 * (1 + TOLERANCE) ** 2, 4.0), start=st.floats(0.1, 10.0))
def test_no_dip_of_an_octave_hides_within_two_octaves_below_the_answer(low, width, start):
    found = serving_capacity(stretches(low, low * width, 20.0), attains(0.9), rate=1.0, start=start)
    assert not (found.rate_scale / 4 <= low and low * width <= found.rate_scale)


def test_an_aim_that_no_rate_meets_says_so_with_the_best():
    found = serving_capacity(lambda scale: replace(ONE, rate_scale=scale, slo_attainment=0.3), attains(0.9), rate=1.0)
    assert (found.rate_scale, found.requests_per_s) == (0.0, 0.0)
    assert found.message.startswith("no rate meets the aim: at 0.01562 times the trace's rate 30.0% of the requests")


def test_an_aim_that_every_rate_meets_says_so():
    found = serving_capacity(lambda scale: replace(ONE, rate_scale=scale), attains(0.9), rate=1.0)
    assert found.rate_scale == WIDEST
    assert found.message == "every rate up to 64 times the trace's meets the aim"


def test_the_99th_percentiles_must_both_be_inside_and_nothing_lost():
    slo = Slo(ttft=1.0, tpot=0.1)
    aim = p99_inside(slo)
    assert aim(ONE)
    assert not aim(replace(ONE, ttft_p99_s=1.01))
    assert not aim(replace(ONE, tpot_p99_s=0.101))
    assert not aim(replace(ONE, requests=2))


def test_a_share_is_a_share():
    with pytest.raises(InputError, match=r"share 1\.5 is out of range"):
        attains(1.5)


AMONG = np.array([1, 3, 4])


def view(**columns):
    """Instances with these columns, idle but for them."""
    inst = np.zeros(5, dtype_of(InstanceRecord))
    served = {name: np.array(columns.pop(name, [7] * 5)) for name in ("prefill_rate", "seats")}
    for name, values in columns.items():
        inst[name] = values
    arrays = arrays_of(inst)
    rankings = Rankings(addresses_of(arrays))

    def least(load, among, served, own=0, arrays=arrays):  # which lie where home says
        return rankings.least(load, among, served, own, 0.0)

    return SimpleNamespace(refresh=lambda: None, least=least, input_tokens=(1,), **served)  # they are the present ones


@pytest.mark.parametrize(
    ("choice", "columns", "wanted"),
    [
        (fewest_requests, {"queued_requests": [0, 2, 0, 0, 1], "running_requests": [0, 0, 0, 3, 1]}, 1),
        (fewest_requests, {"running_requests": [0, 5, 0, 5, 4]}, 4),
        (shortest_queue, {"queued_requests": [0, 2, 0, 1, 1], "running_requests": [0, 0, 0, 3, 1]}, 1),
        (least_prefill, {"queued_prompt_tokens": [0, 9, 0, 8, 8]}, 3),
        (least_decode, {"running_tokens": [0, 100, 0, 90, 95], "coming_tokens": [0, 0, 0, 20, 0]}, 4),
    ],
)
def test_the_least_loaded_of_some_wins_and_the_first_of_equals(choice, columns, wanted):
    assert choice(view(**columns), AMONG) == wanted


def test_caches_that_wait_for_memory_count_as_much_as_the_mean_of_those_that_run():
    """Instance 1: 100 tokens of 2 requests and 3 in wait, 250 in all; instance 3: 240 of them; 4: more."""
    columns = {
        "running_tokens": [0, 100, 0, 240, 300],
        "running_requests": [0, 2, 0, 4, 3],
        "queued_requests": [0, 3, 0, 0, 0],
    }
    assert least_decode(view(**columns), AMONG) == 3


@pytest.mark.parametrize(
    ("choice", "queued", "served"),
    [
        (fewest_requests, "running_requests", "seats"),
        (shortest_queue, "queued_requests", "prefill_rate"),
        (least_prefill, "queued_prompt_tokens", "prefill_rate"),
        (least_decode, "running_tokens", "seats"),
    ],
)
def test_an_instance_that_serves_eight_times_as_much_gets_eight_times_as_much(choice, queued, served):
    """Nine requests of one token: instance 3, eight times the others, takes the first eight of them but for one."""
    columns = {queued: [0] * 5, served: [1, 1, 1, 8, 1], "running_requests": [0] * 5}
    given = []
    for _ in range(10):
        given.append(choice(view(**columns), AMONG, 0))
        columns[queued][given[-1]] += 1
    assert given == [3] * 7 + [1, 3, 4]


def test_round_robin_goes_round():
    turn = InTurn()
    assert [turn(view(), AMONG) for _ in range(4)] == [1, 3, 4, 1]


MEAN_SERVICE = 0.1  # [s]

TOKENS = 10_000  # mean length of a prompt on the fleet, so that whole tokens do not show [token]

BATCHES = 40


def waits_on_fleet(gaps, services):
    """Prompts whose length is their service time, one a pass."""
    table = StepTable.affine(per_token=MEAN_SERVICE / TOKENS)
    fleet = Fleet([InstanceSpec(table=table, blocks=2**40, mode=Mode.PREFILL_FIRST, max_prompts=1, token_budget=2**40)])
    prompts = np.maximum(np.round(services / MEAN_SERVICE * TOKENS), 1).astype(int).tolist()
    arrivals = np.cumsum(gaps).tolist()
    for k, (time, prompt) in enumerate(zip(arrivals, prompts, strict=True)):
        while fleet.run_until(time)[0] != -1:
            pass
        fleet.submit(0, k, (0, prompt, 1), time)
    fleet.run_until(1e12)
    return fleet.segments.start_s - fleet.segments.submit_s


def gamma(rng, mean, squared_variation, n):
    """Gamma variates of a mean and a squared coefficient of variation; the mean alone where that is 0."""
    if squared_variation == 0:
        return np.full(n, mean)
    return rng.gamma(1 / squared_variation, mean * squared_variation, n)


def mean_and_error(waits):
    """Mean of the second half on, and its standard error by batch means (waits of neighbours go together)."""
    batches = waits[waits.size % BATCHES :].reshape(BATCHES, -1).mean(axis=1)[2:]
    return batches.mean(), batches.std(ddof=1) / np.sqrt(batches.size)


@pytest.mark.parametrize("squared_variation", [1.0, 0.0, 2.5], ids=["M/M/1", "M/D/1", "M/G/1"])
def test_poisson_arrivals_wait_as_pollaczek_and_khinchine_say(squared_variation):
    rho, n = 0.7, 100_000
    rng = np.random.default_rng(11)
    gaps = rng.exponential(MEAN_SERVICE / rho, n)
    mean, error = mean_and_error(waits_on_fleet(gaps, gamma(rng, MEAN_SERVICE, squared_variation, n)))
    expected = rho / (1 - rho) * (1 + squared_variation) / 2 * MEAN_SERVICE
    assert error < 0.1 * expected
    assert abs(mean - expected) < 3.5 * error
