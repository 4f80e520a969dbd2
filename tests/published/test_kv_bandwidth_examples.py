"""Worked examples E1-E5 of the "Beyond the Buzz" notes: KV-transfer bandwidth per GPU, Eq. (1) and (2).

Tolerance 0.2 %: the hand figures have three digits.
"""

import pytest

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_model, load_precision
from disagg_sim.physics.counts import prefill_work
from disagg_sim.physics.kv_transfer import bandwidth_per_gpu, kv_bytes_per_request, unique_gpus
from disagg_sim.units import GB, MS

ISL = 16_384
THREE_DIGITS = 0.002


def cache_of(name: str) -> tuple:
    model = load_model(name)
    return model, kv_bytes_per_request(model, load_precision("fp8").resolve(model), ISL)


def test_e1_llama_egress_at_tp8_and_tp16():
    model, cache = cache_of("llama_3_1_70b")
    assert cache == pytest.approx(2.684e9, rel=THREE_DIGITS)
    eight, sixteen = (unique_gpus(model, Sharding(tp_attn=n, tp_ffn=n)) for n in (8.0, 16.0))
    assert (eight, sixteen) == (8, 8)  # above 8 KV heads the shards repeat
    assert bandwidth_per_gpu(1 / 1.2, cache, eight) == pytest.approx(0.280 * GB, rel=THREE_DIGITS)
    assert bandwidth_per_gpu(1 / 0.9, cache, sixteen) == pytest.approx(0.373 * GB, rel=THREE_DIGITS)


def test_e2_r1_egress_under_dp_attention():
    model, cache = cache_of("deepseek_r1")
    unique = unique_gpus(model, Sharding(dp_attn=8.0, ep=8.0))
    assert bandwidth_per_gpu(32 / 2.0, cache, unique) == pytest.approx(1.151 * GB, rel=THREE_DIGITS)


def test_e3_r1_ingress_under_dp_attention():
    model, cache = cache_of("deepseek_r1")
    unique = unique_gpus(model, Sharding(dp_attn=32.0, ep=32.0))
    assert bandwidth_per_gpu(512 / (25 * MS * 2047), cache, unique) == pytest.approx(0.180 * GB, rel=THREE_DIGITS)


def test_e4_llama_ingress_at_tp8():
    model, cache = cache_of("llama_3_1_70b")
    unique = unique_gpus(model, Sharding(tp_attn=8.0, tp_ffn=8.0))
    assert bandwidth_per_gpu(64 / (20 * MS * 2047), cache, unique) == pytest.approx(0.525 * GB, rel=THREE_DIGITS)


def test_e5_the_smaller_model_needs_3_3_times_the_egress():
    """egress = k*rho/f(ISL): bytes per token over FLOP per token, at the same FLOP/s. 3.3 has two digits: 1.5 %."""
    per_flop = {}
    for name, flops_per_token in (("deepseek_r1", 1.12e11), ("llama_3_1_70b", 1.58e11)):
        model, cache = cache_of(name)
        work = prefill_work(model, isl=ISL).flops
        assert work / ISL == pytest.approx(flops_per_token, rel=0.005)
        per_flop[name] = cache / work
    assert per_flop["llama_3_1_70b"] / per_flop["deepseek_r1"] == pytest.approx(3.3, rel=0.015)
