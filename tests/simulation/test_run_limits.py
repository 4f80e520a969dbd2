"""No period, count or length makes a run hang or take all memory: each has a limit and one clear line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from sites import SIMPLE, deployment, served, trace

from disagg_sim.errors import InputError, PolicyError
from disagg_sim.simulation import collect
from disagg_sim.simulation.policies.loads import ByRole, Whole, fewest_requests
from disagg_sim.simulation.policy import Limits, Parts, Role, system_named
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run import RunOptions
from disagg_sim.workload.trace import Trace

ONE = deployment(colocated=1)
TEN = [(float(i), 100, 10) for i in range(10)]
YEARS = 3e8  # a pause of ten years [s]


@dataclass(frozen=True)
class Watchful:
    """A system of a user that looks every ``period_s`` and does nothing."""

    needs: ClassVar[tuple[str, ...]] = ("colocated",)
    period_s: float = 1.0

    def build(self, site):
        class Roles:
            period_s = self.period_s

            def flips(self, view):
                return ()

        limits = Limits()
        return Parts(
            start=site.instances(("colocated", Role.BOTH)), routing=Whole(fewest_requests),
            steps=ByRole(prefill=limits, decode=limits), roles=Roles(),
        )  # fmt: skip


@pytest.mark.parametrize("sample_s", [1e-7, 0.0, -1.0, float("nan")])
def test_samples_are_a_millisecond_apart_at_least(sample_s):
    with pytest.raises(InputError, match=r"sample_s .* is out of range; allowed: from 0.001 s"):
        RunOptions(sample_s=sample_s)


@pytest.mark.parametrize("period", [1e-7, 0.0, -1.0, float("nan")])
def test_a_period_of_any_policy_is_a_millisecond_at_least(period):
    with pytest.raises(PolicyError, match=r"look every .* is impossible: allowed: from 0.001 s"):
        served(TEN, Watchful(period_s=period), ONE, table=SIMPLE)


def test_a_trace_of_years_has_no_more_samples_than_memory_holds():
    said = r"sample_s 10: trace trace lasts 3e\+08 s, 30,000,000 samples; allowed: up to 1,000,000 .* from 300 s"
    with pytest.raises(InputError, match=said):
        RunOptions().check_samples(trace([*TEN, (YEARS, 100, 10)]))


def test_a_trace_of_years_has_no_more_looks_than_patience():
    said = r"lasts 3e\+08 s, 300,000,000 looks; allowed: up to 10,000,000 looks, every 30 s"
    with pytest.raises(PolicyError, match=said):
        served([*TEN, (YEARS, 100, 10)], Watchful(), ONE, table=SIMPLE, options=RunOptions(sample_s=1e6))


@pytest.mark.parametrize("options", [RunOptions(sample_s=1e6), RunOptions(sample_s=1.0, until_s=100.0)])
def test_a_pause_of_years_costs_nothing_where_nobody_looks(options):
    """An instance that is idle has no step, so the clock jumps; and what lies beyond the cut does not count."""
    requests, begun = [*TEN, (YEARS, 100, 10)], time.monotonic()
    options.check_samples(trace(requests))
    result = served(requests, system_named("vllm"), ONE, table=SIMPLE, options=options)
    assert time.monotonic() - begun < 60  # the first run compiles
    assert (result.requests.status == Outcome.COMPLETED).sum() == (11 if options.until_s > YEARS else 10)


def test_a_run_that_outlasts_its_trace_thins_its_samples(monkeypatch):
    """Of every full lot each second sample stays; the times stay even."""
    monkeypatch.setattr(collect, "MOST_SAMPLES", 8)
    result = served([(0.0, 100, 400)], system_named("vllm"), ONE, table=SIMPLE, options=RunOptions(sample_s=0.1))
    times = result.samples.time_s
    assert 4 <= times.size <= 9
    assert result.requests.finish_s[0] == pytest.approx(times[-1], abs=1.0)
    assert np.ptp(np.diff(times)) == pytest.approx(0.0, abs=1e-9)


def test_a_closed_loop_of_more_places_than_requests_holds_them_all():
    begun = time.monotonic()
    result = served(TEN, system_named("vllm"), ONE, table=SIMPLE, options=RunOptions(concurrency=10**9))
    assert (result.requests.status == Outcome.COMPLETED).all()
    assert result.requests.arrival_s.tolist() == [0.0] * 10
    assert time.monotonic() - begun < 60


def test_an_array_of_clock_times_is_refused_before_it_runs():
    with pytest.raises(InputError, match="counted from the first arrival"):
        Trace(arrival=[1.7e12, 1.7e12 + 5], input_tokens=[9, 9], output_tokens=[9, 9])
