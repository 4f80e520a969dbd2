"""Synthetic sessions against what was recorded of the sessions whose quantiles they are drawn from."""

import numpy as np
import pytest

from disagg_sim.facts.load import load_traffic
from disagg_sim.workload.statistics import prefix_hit_rate
from disagg_sim.workload.synthetic import BLOCK_TOKENS, session_trace


@pytest.fixture(scope="module")
def drawn():
    return session_trace(load_traffic("coding_agent"), rate=0.1, sessions=1500, seed=3)


def test_means_are_those_of_the_recorded_sessions(drawn):
    """11.6 turns, prompts of 33,952 and answers of 1,351 tokens, 18.4 s between turns; 92.7 % of the prompts were read
    from the provider's cache, which an infinite cache of the drawn blocks must find from their lengths alone."""
    later = drawn.sessions.previous() >= 0
    assert len(drawn) / 1500 == pytest.approx(11.6, rel=0.02)
    assert drawn.input_tokens.mean() == pytest.approx(33_952, rel=0.04)
    assert drawn.output_tokens.mean() == pytest.approx(1351, rel=0.03)
    assert drawn.sessions.think_s[later].mean() == pytest.approx(18.4, rel=0.03)
    assert prefix_hit_rate(drawn.prefix) == pytest.approx(0.927, abs=0.01)


def test_a_prompt_begins_with_the_prompt_before_and_all_with_the_shared_start(drawn):
    ids, offsets, previous = drawn.prefix.ids, drawn.prefix.offsets, drawn.sessions.previous()
    shared = 15_825 // BLOCK_TOKENS
    for row in range(0, len(drawn), 97):
        own = ids[offsets[row] : offsets[row + 1]]
        assert own.size == drawn.input_tokens[row] // BLOCK_TOKENS
        assert own[:shared].tolist() == list(range(shared))
        if (before := previous[row]) >= 0:
            older = ids[offsets[before] : offsets[before + 1]]
            assert own[: older.size].tolist() == older.tolist()
            assert drawn.input_tokens[row] > drawn.input_tokens[before]
        else:
            assert np.sum(ids == own[-1]) >= 10  # its session alone has it, in all its turns


def test_sessions_begin_at_the_rate(drawn):
    begin = drawn.arrival[drawn.sessions.previous() < 0]
    assert begin.size / begin[-1] == pytest.approx(0.1, rel=0.08)  # three standard deviations of 1,500 events
