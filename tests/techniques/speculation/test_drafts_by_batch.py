"""Gains of drafts by number and batch that NVIDIA, LMSYS and SGLang published (``docs/computed/speculation.py``).

Accepted lengths are the published ones. Known misses: SGLang's page states neither drafts nor acceptance; at 128
requests a rank LMSYS still gained 14 %, of which the model counts 1 %.
"""

from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.physics.passes.decode import decode_step
from docs.computed import speculation
from docs.computed.speculation import LMSYS, NVIDIA, SGLANG, STATEMENTS, gain_of

MISS = {said: gain_of(said) / said.gain - 1.0 for said in STATEMENTS}
FEW = [said for said in STATEMENTS if said.batch <= 32 and said.who != SGLANG]


@pytest.mark.parametrize("said", FEW, ids=lambda said: f"{said.who} {said.drafts}")
def test_gains_of_few_requests_are_those_published(said):
    assert abs(MISS[said]) < 0.06


def test_three_drafts_are_best_for_one_request_within_a_percent():
    """NVIDIA: 1.78, 2.25, 2.28, 2.21, 2.15."""
    ours = [gain_of(said) for said in STATEMENTS if said.who == NVIDIA]
    assert ours[2] > 0.99 * max(ours)
    assert ours[0] < ours[1] < ours[2]
    assert ours[4] < ours[3]


def test_what_is_not_stated_is_missed_by_a_tenth_at_most():
    assert all(abs(MISS[said]) < 0.1 for said in STATEMENTS if said.who == SGLANG)


def test_the_gain_of_a_large_batch_is_smaller_and_counted_too_small():
    few, large = (gain_of(STATEMENTS[place]) for place in (5, -1))
    assert STATEMENTS[-1].who == LMSYS
    assert 1.0 < large < few
    assert -0.15 < MISS[STATEMENTS[-1]] < -0.05


def test_half_of_that_step_is_exchange_which_a_draft_doubles():
    said = STATEMENTS[-1]
    at = ds.setup(*said.setup, speculation="deepseek_v3_mtp")
    load = {"batch": float(said.batch), "context": float(said.context)}
    plain, drafted = (decode_step(at, replace(said.mapping, draft_tokens=k), **load) for k in (0, 1))
    assert plain.sums.communication > 0.5 * plain.time
    assert drafted.sums.communication == pytest.approx(2 * plain.sums.communication, rel=0.05)


def test_drafts_stop_paying_where_the_step_is_bound_by_arithmetic():
    """The gain of one draft on eight H200 ends between 2,048 and 4,096 requests."""
    rows = [line.split(" | ")[2] for line in speculation.drafts_by_batch_r1().splitlines()[3:]]
    assert rows[-2].startswith("1: ")
    assert rows[-1] == "none"
