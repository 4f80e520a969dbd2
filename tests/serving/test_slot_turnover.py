"""Passes that fill free seats: counted over all outcomes, and in the limits that are known."""

from itertools import product
from math import comb

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg_sim.serving.slot_turnover import refill_passes, worth_room

HOST, RANK, PROMPT = 2.0, 3.0, 0.5  # of a pass, of each prompt of its fullest rank, of each prompt [s]


def pass_time(fullest, prompts):
    return HOST + RANK * fullest + PROMPT * prompts


def found(batch, ranks, most, ending):
    """What a prompt costs, the pass that it is in [s], and passes a prompt, by the weights."""
    weights = refill_passes(np.array([batch]), ranks, np.array([most]), ending)
    fullest = np.where(weights.lone, weights.prompts, -(-weights.prompts // ranks))
    times = pass_time(fullest, weights.prompts)
    return (weights.each * times).sum(), (weights.own * times).sum(), weights.passes[0]


def by_hand(batch, ranks, most, ending):
    """The same, over every number of free seats of every rank."""
    seats = [batch // ranks + (rank < batch % ranks) for rank in range(ranks)]
    room = max(most // ranks, 1)
    time = own = passes = prompts = 0.0
    for free in product(*(range(n + 1) for n in seats)):
        chance = np.prod([comb(n, k) * ending**k * (1 - ending) ** (n - k) for n, k in zip(seats, free, strict=True)])
        left = np.array(free)
        while left.any():
            taken = np.minimum(left, room)
            turns = [taken.sum()] if most >= min(ranks, batch) else _turns(int(taken.sum()), most)
            for turn in turns:
                lasts = pass_time(taken.max(), turn)
                time, own, passes = time + chance * lasts, own + chance * turn * lasts, passes + chance
            prompts += chance * taken.sum()
            left = left - taken
    return time / prompts, own / prompts, passes / prompts


def _turns(prompts, most):
    return [most] * (prompts // most) + [prompts % most] * (prompts % most > 0)


@pytest.mark.parametrize(
    ("batch", "ranks", "most"),
    [(6, 1, 1), (6, 1, 2), (7, 2, 2), (7, 2, 4), (8, 4, 4), (6, 4, 8), (3, 4, 3), (3, 4, 4), (4, 4, 1), (8, 4, 2)],
)
@pytest.mark.parametrize("ending", [0.01, 0.3, 1.0])
def test_all_outcomes_counted(batch, ranks, most, ending):
    """Where ranks of two numbers of seats take turns, the law has as many seats on each."""
    assert found(batch, ranks, most, ending) == pytest.approx(by_hand(batch, ranks, most, ending), rel=1e-9)


@given(st.integers(1, 500), st.integers(1, 16), st.integers(1, 64), st.floats(1e-6, 1.0))
@example(batch=32, ranks=1, most=1, ending=0.9999999999999999)
@settings(max_examples=25)
def test_what_always_holds(batch, ranks, most, ending):
    most = min(most, batch)
    weights = refill_passes(np.array([batch]), ranks, np.array([most]), ending)
    assert (weights.own > -1e-12).all()
    assert (weights.each > -1e-12).all()
    assert weights.own.sum() == pytest.approx(1.0)  # a prompt is in one pass
    assert weights.each.sum() == pytest.approx(weights.passes[0])
    assert (weights.each * weights.prompts).sum() == pytest.approx(1.0)  # and passes have one prompt each time
    assert 1.0 / most * (1 - 1e-9) <= weights.passes[0] <= 1.0 + 1e-9
    one, own, _ = found(batch, ranks, most, ending)
    assert one <= own * (1 + 1e-9) <= pass_time(-(-most // ranks), most) * (1 + 1e-6)  # no pass is longer than one of b


def test_long_answers_end_alone():
    """Seats become free one by one, whatever a pass may take."""
    assert found(64, 8, 64, 1e-9) == pytest.approx((pass_time(1, 1), pass_time(1, 1), 1.0), rel=1e-6)


def test_more_residents_end_together_more_often():
    costs = [found(batch, 8, 8, 1 / 1000)[0] for batch in (8, 64, 512, 4096)]
    assert np.all(np.diff(costs) < 0)
    assert costs[-1] > pass_time(1, 8) / 8


def test_room_is_tried_where_several_seats_of_a_rank_become_free():
    """Two of 8 seats of a rank end together 28 times in a million steps, of 512 seats in one of ten."""
    assert worth_room(np.array([64, 4096]), 8, np.array([2, 4]), 1 / 1000).tolist() == [[False, False], [True, True]]
