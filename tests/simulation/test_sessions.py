"""Sessions: a turn comes when the one before it has ended and its user has thought."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.request_columns import Sessions
from disagg_sim.workload.trace import Trace
from tests.simulation.sites import SIMPLE, deployment, served

COLOCATED = deployment(colocated=2)
EVERY = deployment(prefill=2, decode=2, colocated=2, pairs=2)
SHIPPED = sorted(name for name, kind in policies().items() if kind.__module__.startswith("disagg_sim."))


def turns(rows: list[tuple[float, int, int, int, float]]) -> Trace:
    """Of (arrival, input, output, session, think)."""
    arrival, inputs, outputs, session, think = zip(*rows, strict=True)
    return Trace(
        arrival=arrival, input_tokens=inputs, output_tokens=outputs, sessions=Sessions(session=session, think_s=think)
    )


@st.composite
def sessions(draw) -> Trace:
    """Up to 6 sessions of up to 5 turns; arrivals as if served at once."""
    rows = []
    for number in range(draw(st.integers(1, 6))):
        at = draw(st.floats(0.0, 5.0))
        for turn in range(draw(st.integers(1, 5))):
            think = draw(st.floats(0.0, 3.0)) if turn else 0.0
            at += think
            rows.append((at, draw(st.integers(1, 3000)), draw(st.integers(1, 40)), number, think))
    return turns(sorted(rows, key=lambda row: row[0]))


def test_a_turn_comes_a_think_time_after_the_last_token_of_the_turn_before():
    """100 tokens take 10 + 10 ms, a token more 11 ms: turn 0 ends at 0.020 + 2 * 0.011 s, turn 1 comes 1.5 s later."""
    trace = turns([(0.0, 100, 3, 7, 0.0), (1.5, 200, 1, 7, 1.5)])
    found = served(trace, "vllm", COLOCATED, table=SIMPLE).requests
    assert found.finish_s[0] == pytest.approx(0.042)
    assert found.arrival_s[1] == pytest.approx(1.542)
    assert found.first_token_s[1] == pytest.approx(1.542 + 0.030)


@settings(max_examples=60)
@given(trace=sessions(), policy=st.sampled_from(SHIPPED))
def test_no_turn_starts_before_the_last_has_ended_under_any_policy(trace, policy):
    found = served(trace, policy, EVERY, table=SIMPLE, blocks=2000).requests
    assert (found.status == Outcome.COMPLETED).all()
    previous = trace.sessions.previous()
    later, first = previous >= 0, previous < 0
    waited = found.arrival_s[later] - found.finish_s[previous[later]]
    assert waited == pytest.approx(trace.sessions.think_s[later], abs=1e-9)
    assert np.array_equal(found.arrival_s[first], trace.arrival[first])


def test_a_session_ends_with_a_turn_that_is_rejected():
    """Turn 1 fits no memory, 100 blocks of 16 tokens: turns 2 and 3 never come, and count as rejected, too."""
    trace = turns([(t, 3000 if t == 1 else 100, 2, 0, 1.0) for t in range(4)] + [(5.0, 100, 2, 1, 0.0)])
    result = served(trace, "vllm", COLOCATED, table=SIMPLE, blocks=100)
    found = result.requests
    words = [Outcome(status).name for status in found.status]
    assert words == ["COMPLETED", "REJECTED", "REJECTED", "REJECTED", "COMPLETED"]
    assert np.isnan(found.arrival_s).tolist() == [False, False, True, True, False]
    assert result.duration_s == pytest.approx(found.finish_s[4])


def test_the_samples_end_with_the_last_turn():
    """The run goes on while a user thinks, though nothing is in the cluster."""
    trace = turns([(0.0, 100, 2, 0, 0.0), (100.0, 100, 2, 0, 100.0)])
    result = served(trace, "vllm", COLOCATED, table=SIMPLE, options=RunOptions(sample_s=1.0))
    assert result.samples.arrivals[50] == 1
    assert result.samples.time_s[-1] >= 100.0
    assert result.samples.arrivals[-1] == 2


@given(trace=sessions(), concurrency=st.integers(1, 3))
def test_a_closed_loop_of_sessions_holds_so_many_of_them(trace, concurrency):
    """The next session begins when one ends; think times count as part of a session."""
    options = RunOptions(concurrency=concurrency)
    found = served(trace, "vllm", COLOCATED, table=SIMPLE, blocks=2000, options=options).requests
    assert (found.status == Outcome.COMPLETED).all()
    numbers = trace.sessions.session
    begin = np.array([found.arrival_s[numbers == each].min() for each in np.unique(numbers)])
    end = np.array([found.finish_s[numbers == each].max() for each in np.unique(numbers)])
    there = [(begin <= at) & (at < end) for at in begin]
    assert max(int(each.sum()) for each in there) <= concurrency
    assert np.sort(begin)[: min(concurrency, begin.size)].max() == 0.0
    assert set(begin[begin > 0]) <= set(end)
