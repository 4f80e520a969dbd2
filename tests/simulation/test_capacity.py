"""The search for the capacity, on answers whose capacity is known."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import made_requests, made_run

from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.simulation.capacity import TOLERANCE, WIDEST, attains, p99_inside, serving_capacity
from disagg_sim.simulation.metrics import summary

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
