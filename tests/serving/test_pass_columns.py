"""Columns of co-located searches: what batches share between searches."""

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import setup
from disagg_sim.serving import pass_columns
from disagg_sim.serving.colocation import ColocatedCase, Colocation, groups
from disagg_sim.serving.slot_turnover import refill_passes
from disagg_sim.workload.lengths import lengths

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
