"""How often copies of experts are best placed anew: by hand, limits, and against every period."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.physics.rebalance import HOST_S, best_period, loss_at, rebalancing

SKEWED = ds.setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew1")
WIDE = ds.Mapping(dp_attn=32, ep=32, redundant_slots=32)


def test_a_period_by_hand():
    """a = 0.5, tau = 100 s, c = 100*0.5*(1 - 2/e): (1 + x) e^-x = 2/e at x = 1, so a move every 100 s.

    Passes lose 0.5*(1 - (1 - 1/e)) = 0.5/e to age and c/100 = 0.5 - 1/e to moves.
    """
    period, loss = best_period(50.0 * (1 - 2 / math.e), 0.5, 100.0)
    assert period == pytest.approx(100.0)
    assert loss == pytest.approx(0.5 / math.e + 0.5 - 1 / math.e)


def test_cheap_moves_come_at_the_root_of_their_cost():
    """As checkpoints do: T = sqrt(2 c tau/a)."""
    period, loss = best_period(1e-4, 0.2, 3600.0)
    assert period == pytest.approx(math.sqrt(2 * 1e-4 * 3600 / 0.2), rel=1e-3)
    assert loss == pytest.approx(2 * 1e-4 / period, rel=1e-2)


def test_limits():
    """No cost: always. No drift, copies that change nothing, or moves dearer than all they save: never."""
    assert best_period(0.0, 0.2, 60.0) == (0.0, 0.0)
    assert best_period(1.0, 0.2, math.inf) == (math.inf, 0.0)
    assert best_period(1.0, 0.0, 60.0) == (math.inf, 0.0)
    assert best_period(12.1, 0.2, 60.0) == (math.inf, 0.2)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-3, 10.0), st.floats(1e-3, 1.0), st.floats(1.0, 1e5))
def test_no_other_period_loses_less(move, growth, drift):
    period, loss = best_period(move, growth, drift)
    tried = np.geomspace(drift * 1e-5, drift * 1e3, 2000)
    assert loss <= loss_at(tried, move, growth, drift).min() * (1 + 1e-9)
    if math.isfinite(period):
        assert loss == pytest.approx(loss_at(period, move, growth, drift), rel=1e-6)


def test_a_move_takes_the_host_and_the_weights_of_a_rank():
    """9 of 288 slots of 58 layers, 3*7168*2048 B an expert in fp8, over a NIC of 50 GB/s."""
    found = rebalancing(SKEWED, WIDE, tokens=4096.0, seconds=0.05, drift=3600.0)
    weights = 9 * 58 * 3 * 7168 * 2048
    assert found.move == pytest.approx(HOST_S + weights / 50e9, rel=1e-6)
    assert 0 < found.loss < found.growth


def test_a_stage_of_a_pipeline_has_its_share_of_moves_and_of_growth():
    deep = ds.Mapping(dp_attn=32, ep=32, pp=2, redundant_slots=32)
    flat, half = (rebalancing(SKEWED, each, tokens=4096.0, seconds=0.05, drift=3600.0) for each in (WIDE, deep))
    assert half.growth == pytest.approx(flat.growth / 2)
    assert half.move - HOST_S == pytest.approx((flat.move - HOST_S) / 2)


def test_without_copies_or_skew_nothing_is_moved():
    even = ds.setup("deepseek_r1", "h200_sxm", "fp8")
    bare = ds.Mapping(dp_attn=32, ep=32)
    for at, mapping in ((even, WIDE), (SKEWED, bare)):
        found = rebalancing(at, mapping, tokens=4096.0, seconds=0.05, drift=3600.0)
        assert (found.period, found.loss) == (math.inf, 0.0)
