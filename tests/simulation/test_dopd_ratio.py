"""Equations (11)-(15) of DOPD on numbers worked out by hand."""

import pytest

from disagg_sim.errors import InputError
from disagg_sim.physics.memory import weight_bytes
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.policies.dopd.sizes import decode_concurrency, prefill_decode_ratio

AT = setup("llama_3_1_70b", "h100_sxm", "fp8_bf16kv")


def test_weights_are_fp8_with_16_bit_ends():
    """68.45e9 in fp8, two tables of 1.05e9 in 2 B: 72.65 GB (norms aside)."""
    assert weight_bytes(AT.model, AT.precision) == pytest.approx(68_451_041_280 + 4 * 1_050_673_152, rel=1e-3)


def test_memory_is_what_the_weights_leave_of_two_gpus():
    found = decode_concurrency(AT, tp=2, isl=1000, osl=150, tpot_limit=0.08)
    assert found.memory_bytes == pytest.approx(2 * 0.9 * 79.65 * 2**30 - 72.65e9, rel=1e-3)
    assert found.bandwidth_bytes == pytest.approx(0.08 * 0.6 * 2 * 3.35e12)
    assert found.requests == pytest.approx(found.memory_bytes / (1075 * 327_680))
    assert found.memory_bound


def test_bandwidth_limits_a_tight_token_limit():
    tight = decode_concurrency(AT, tp=2, isl=1000, osl=150, tpot_limit=0.01)
    assert not tight.memory_bound
    physical = decode_concurrency(AT, tp=2, isl=1000, osl=150, tpot_limit=0.03, reads_weights=True)
    assert physical.bandwidth_bytes == pytest.approx(0.03 * 0.6 * 2 * 3.35e12 - weight_bytes(AT.model, AT.precision))


def test_the_ratio_balances_both_sides():
    """100 requests decode 50 tokens in 50 * 20 ms = 1 s; a prefill of 30 ms serves 33.3 of them in that time: 3."""
    assert prefill_decode_ratio(100, prefill_time=0.03, step_time=0.02, osl=50) == pytest.approx(3.0)
    assert prefill_decode_ratio(1000, prefill_time=0.03, step_time=0.02, osl=50) == pytest.approx(2.56 * 3.0)


def test_lengths_must_be_above_zero():
    with pytest.raises(InputError, match="isl must be above 0"):
        decode_concurrency(AT, tp=2, isl=0, osl=150, tpot_limit=0.08)
