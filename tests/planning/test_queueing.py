"""Closed forms of queueing against what theory gives exactly."""

import math
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.planning.pieces import PromptLengths
from disagg_sim.planning.pools import PrefillChoice
from disagg_sim.planning.queueing import (
    Delay,
    Occupancy,
    Service,
    mean_wait,
    occupancy,
    share_that_waits,
    shortest_queue_delay,
)


def test_two_servers_by_hand():
    """M/M/2 at rho: C = 2*rho^2/(1 + rho)."""
    for rho in (0.1, 0.5, 0.9):
        assert share_that_waits(2, rho) == pytest.approx(2 * rho**2 / (1 + rho))


@given(st.floats(0.05, 0.95))
def test_one_server_has_the_mean_wait_of_pollaczek_and_khinchine(used):
    """M/D/1: E[W] = rho*s/(2*(1 - rho)), in parts: the rest of a service, and those before."""
    found = shortest_queue_delay(np.array([0.0]), np.array([1.0]), 1, used, Service(1.0))
    assert found.mean == pytest.approx(used / (2 * (1 - used)))


@given(st.integers(1, 50), st.floats(0.05, 0.98))
def test_shares_of_a_delay_add_up_and_percentiles_rise(servers, used):
    found = shortest_queue_delay(np.array([0.3, 0.9]), np.array([0.7, 0.3]), servers, used, Service(0.5, 0.2))
    assert found.calm_share.sum() + found.held_share.sum() == pytest.approx(1)
    assert found.at(0.5) <= found.at(0.9) <= found.at(0.99)
    assert found.late(found.at(0.9)) <= 0.1 + 2e-9


@pytest.mark.parametrize("digits", [1, 12])
@pytest.mark.parametrize("wait", [1e-3, 0.3, 20.0])
def test_a_percentile_of_many_values_is_that_of_all_of_them_sorted(wait, digits, monkeypatch):
    rng = np.random.default_rng(0)
    calm, held = rng.gamma(2.0, 1.0, 3000).round(digits), rng.gamma(3.0, 1.0, 2000).round(digits)
    shares = np.split(rng.dirichlet(np.full(5000, 0.3)), [3000])
    found = Delay(calm, shares[0], held, shares[1], wait)
    asked = (1e-4, 0.5, 0.9, 0.99, 1.0 - 1e-6)
    known = [found.at(share) for share in asked]
    monkeypatch.setattr("disagg_sim.planning.queueing.MANY_VALUES", 20)
    assert [found.at(share) for share in asked] == known
    for share, value in zip(asked, known, strict=True):
        for late in (1.0 - share + 1e-8, found.late(value), 1.0 - share - 1e-8):
            assert found.within(value, late) is (found.late(value) <= late)


def test_more_even_arrivals_wait_less():
    own = np.array([0.0]), np.array([1.0])
    late = [shortest_queue_delay(*own, 1, 0.7, Service(1.0, 0.0, even)).late(2.0) for even in (0.2, 0.5, 1.0, 2.0)]
    assert late == sorted(late)


def test_a_queue_without_end_is_late_for_everybody():
    found = shortest_queue_delay(np.array([0.1]), np.array([1.0]), 3, 1.0, Service(1.0))
    assert found.late(1e9) == 1.0
    assert math.isinf(found.at(0.5))
    assert math.isinf(mean_wait(3, 1.2, 1.0, 0.5))


def test_occupancy_of_one_server_that_shares_is_geometric():
    """A step twice as long with two sequences completes no more: M/M/1, P(n) = (1 - rho)*rho^n."""
    batch = np.arange(1.0, 201.0)
    found = occupancy(0.5, 1, 200, batch, np.ones(200))
    assert found.share[:4] == pytest.approx([0.5, 0.25, 0.125, 0.0625])
    assert found.mean == pytest.approx(1.0)


def test_seats_that_fill_are_counted():
    """Erlang's B turns into C where those beyond the seats wait: 2 seats of 1 s each at 1 request/s, C = 1/3."""
    batch = np.array([1.0, 2.0])
    assert occupancy(1.0, 1, 2, batch, batch).full == pytest.approx(1 / 3)
    assert occupancy(2.0, 1, 2, batch, batch).full == 1.0


def test_a_pool_in_steps_is_the_pool_one_by_one():
    """Beyond ``PLACES`` seats states are taken in steps: the mean and the spread stay those of Poisson."""
    batch = np.arange(1.0, 1001.0)
    found = occupancy(4000.0, 10, 1000, batch, batch)  # 10 instances: 4,000 requests of 1 s
    mean, wide = found.moments(10 * found.number)
    assert mean == pytest.approx(4000, rel=0.01)
    assert wide == pytest.approx(math.sqrt(4000), rel=0.05)


def test_pieces_of_steps_that_wait_are_followed_as_beside_steps_that_do_not():
    law = PromptLengths(np.array([500.0, 3000.0]), np.zeros(2), np.array([0.5, 0.5])).cut(
        np.array([512.0, 1024.0, 4096.0])
    )
    idle, further = np.array([0.1, 0.3, 0.9]), np.array([0.0, 2.0, 0.0])

    def followed(rooms):
        of = law.at(rooms)
        come = 0.2 * of.kinds
        return np.vstack(of.follow(idle[rooms], further[rooms])(of.kinds, come, come[0], come[1]))

    np.testing.assert_allclose(followed([0, 1, 2]), np.hstack([followed([room]) for room in range(3)]), rtol=1e-12)


@pytest.mark.parametrize(("servers", "most", "load"), [(1, 4, 0.4), (2, 8, 0.7), (8, 4, 0.7)])
def test_passes_of_unlike_prompts_are_met_where_they_are_long(servers, most, load):
    """Log-normal prompts of 1 s on average, c_v^2 = 0.8, and 0.1 s a pass, against the queue played request by request.

    As if alike, the first two means were 12 and 15 % too short.
    """
    times = np.exp(0.77 * np.array([NormalDist().inv_cdf(share) for share in (np.arange(40) + 0.5) / 40]))
    times /= times.mean()
    batch = np.unique([1.0, 2.0, most / 2, most])
    weights, busy = np.full(40, 1 / 40), 0.1 + batch
    rate = load * most / busy[-1] * servers
    choice = PrefillChoice(
        at=None, mapping=Sharding(), work=SimpleNamespace(dispersion=1.0), batch=batch, busy=busy, weights=weights,
        ftl=0.1 + np.outer(times, batch), spread=float(times.var() / (1 + 0.1 / most) ** 2), host=0.0,
        link_rate=math.inf, memory=0.0, bound="compute",
    )  # fmt: skip
    came, rng = np.cumsum(np.random.default_rng(1).exponential(1 / rate, 30_000)), np.random.default_rng(2)
    own, ttft = rng.choice(times, came.size), np.empty(came.size)
    queues: list[list[int]] = [[] for _ in range(servers)]
    ends, taken = np.zeros(servers), np.zeros(servers, dtype=int)

    def start(server: int, now: float) -> None:
        some, queues[server] = queues[server][:most], queues[server][most:]
        ends[server], taken[server] = now + 0.1 + own[some].sum(), len(some)
        ttft[some] = ends[server] - came[some]

    for each, now in enumerate(came):
        while taken.any() and (first := int(np.where(taken > 0, ends, np.inf).argmin())) >= 0 and ends[first] <= now:
            taken[first] = 0
            if queues[first]:
                start(first, ends[first])
        shortest = min(range(servers), key=lambda server: len(queues[server]) + taken[server])
        queues[shortest].append(each)
        if not taken[shortest]:
            start(shortest, now)
    steady = ttft[1000:-1000]
    found = choice.delay_anew(rate, servers)
    assert found.mean == pytest.approx(steady.mean(), rel=0.12)
    assert found.at(0.9) == pytest.approx(np.quantile(steady, 0.9), rel=0.12)


def test_a_quantile_that_a_sum_reaches_is_found_however_it_is_rounded():
    """Ten equal latencies 1 to 10: the share k/10 reaches k, though 0.1 + 0.1 + 0.1 is not 0.3."""
    ten, shares, none = np.arange(1.0, 11.0), np.full(10, 0.1), np.zeros(1)
    delay, number = Delay(ten, shares, none, none, 0.0), Occupancy(ten, shares, 0.0)
    assert [delay.at(share / 10) for share in range(1, 10)] == list(range(1, 10))
    assert [number.at(share / 10) for share in range(1, 10)] == list(range(1, 10))
