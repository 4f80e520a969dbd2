"""Shares of steps and times of tokens, against draws and by hand."""

import numpy as np
import pytest

from disagg_sim.serving.step_mixing import mixed_steps, own_step, token_time, token_times


@pytest.mark.parametrize("busy", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_steps_of_ranks_that_have_pieces_apart_from_each_other(busy, ranks):
    """Drawn rank by rank; a step lasts the longer the more ranks have a piece."""
    plain, one, every = 10.0, 14.0, 30.0
    some = (np.random.default_rng(1).random((200_000, ranks)) < busy).sum(axis=1)
    each = (every - one) / max(ranks - 1, 1)
    drawn = np.where(some > 0, (every if ranks == 1 else one) + each * (some - 1), plain)
    shares = mixed_steps(busy, ranks)
    assert shares.alone * one + shares.full * every + shares.plain * plain == pytest.approx(drawn.mean(), rel=2e-3)
    if ranks > 1 and busy:
        own = one + busy * (ranks - 1) * each
        assert own_step(one, every, busy) == pytest.approx(own)


def test_a_step_with_prompts_is_a_step_of_decodes_too_where_they_ride_along():
    """100 steps, 25 of them with prompts of others: 75 x 10 ms and 25 x 40 ms, or 100 x 10 ms and 25 x 40 ms."""
    assert token_time(0.010, 1.0, 100.0, 0.040) == pytest.approx((75 * 0.010 + 1.0) / 100)
    assert token_time(0.010, 1.0, 100.0) == pytest.approx((100 * 0.010 + 1.0) / 100)
    assert token_time(0.010, 5.0, 100.0, 0.040) == pytest.approx(0.050)  # more prompts than steps: they decide


def test_a_request_waits_for_all_prompts_but_its_own():
    assert token_times(0.010, 0.050, 0.050, 4, 100.0, idle=1.0, left=0.0)[1] == token_time(0.010, 3 * 0.050, 100.0)
