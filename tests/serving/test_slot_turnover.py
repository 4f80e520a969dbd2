"""Passes that fill free seats: counted over all outcomes, and in the limits that are known."""

from itertools import product
from math import comb

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import setup
from disagg_sim.serving import pass_columns
from disagg_sim.serving.colocation import ColocatedCase, Colocation, groups
from disagg_sim.serving.slot_turnover import refill_passes, worth_room
from disagg_sim.workload.lengths import lengths

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


RANKS = [Sharding(tp_attn=8, tp_ffn=8), Sharding(dp_attn=8, ep=8)]


def columns(isl: int, osl: int, **options):
    at = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal")
    case = ColocatedCase(at=at, lengths=lengths(isl, osl), ftl_limit=10.0, options=Colocation(**options))
    found = list(groups(case, RANKS))
    return case, found, pass_columns.pass_columns(case, found)


def fresh(*arguments, **options):
    pass_columns._worth_trying.cache_clear()
    pass_columns._kept_passes.clear()
    return columns(*arguments, **options)


@pytest.mark.parametrize("hold", [(), (16,), None])
@pytest.mark.parametrize("before", [(64, 256), (32_768, 256), (512, 32)])
def test_columns_are_the_same_after_other_searches(before, hold):
    """Shorter and longer batch axes of the same answers, other answers, and other waits."""
    _, _, alone = fresh(2048, 256, hold_steps=hold)
    fresh(*before, hold_steps=hold)
    columns(2048, 256, hold_steps=(3,))
    _, _, after = columns(2048, 256, hold_steps=hold)
    for one, other in zip(alone, after, strict=True):
        assert one.together.size > 0
        for name in ("batch_index", "together", "hold_steps", "sizes", "lone", "longest"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        for name in ("each", "own", "passes", "idle", "left"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_given_sizes_are_not_taken_for_those_worth_trying():
    fresh(2048, 256)
    case, found, given = columns(2048, 256, prefill_batch=(3,), batch=(2, 16, 64))
    for group, own in zip(found, given, strict=True):
        np.testing.assert_array_equal(group.batch[own.batch_index], [16, 64])
        expected = refill_passes(np.array([16, 64]), group.dp, np.array([3, 3]), 1 / case.lengths.gaps)
        np.testing.assert_allclose(own.passes, expected.passes, rtol=1e-13)


def test_means_weigh_the_passes_that_knots_stand_for():
    """Times affine in prompts, and twice as long where all are on one rank: what the knots give, summed one by one."""
    case, found, own = fresh(2048, 256)
    for group, each in zip(found, own, strict=True):
        times = np.concatenate([1.0 + each.sizes, [np.nan] * 2, 2.0 * (1.0 + each.lone[::-1])])[None, :]
        mean, _ = each.mean(times)
        filled = refill_passes(group.batch[each.batch_index], group.dp, each.together, 1 / case.lengths.gaps)
        expected = (filled.each * np.where(filled.lone, 2.0, 1.0) * (1.0 + filled.prompts)).sum(axis=1)
        np.testing.assert_allclose(mean[0], expected, rtol=1e-12)


def test_what_a_batch_has_depends_on_no_other_to_the_last_digit():
    """Axes are kept at their longest for all searches, so that which search came first moves no digit."""
    batch = np.repeat([8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024], 4)
    most = np.minimum(np.tile([4, 8, 16, 32], 14), batch)
    whole = refill_passes(batch, np.full(batch.size, 4), most, 1 / 255)
    for stop in range(16, batch.size):
        part = refill_passes(batch[:stop], np.full(stop, 4), most[:stop], 1 / 255)
        for name in ("prompts", "each", "own", "passes"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[:stop])
