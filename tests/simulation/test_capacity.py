"""The search for the capacity, on answers whose capacity is known."""

from __future__ import annotations

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
    assert len(found.runs) <= 12
    assert [row.rate_scale for row in found.runs] == sorted(row.rate_scale for row in found.runs)


def test_a_start_near_the_capacity_takes_six_runs():
    assert len(serving_capacity(falling(1.3), attains(0.9), rate=1.0).runs) == 6


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
