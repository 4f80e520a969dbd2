"""Encoding of images: counts of a published tower by hand, limits."""

import pytest

import disagg_sim as ds
from disagg_sim.errors import InputError
from disagg_sim.facts.model import EncoderSpec
from disagg_sim.techniques.encode.physics import encoder_operators

KIMI = EncoderSpec(layers=27, hidden=1152, width=4304, patch=14, merge=2)


def test_weights_and_patches_by_hand():
    """27*(4*1152^2 + 2*1152*4304) = 411e6 weights; 1120 pixels are 80 patches or 40 tokens, 1121 are 41 tokens."""
    assert KIMI.matmul_params == 27 * (4 * 1152**2 + 2 * 1152 * 4304) == 411_070_464
    assert KIMI.patches(1120, 1120) == 6400
    assert KIMI.tokens(1120, 1120) == 1600
    assert KIMI.tokens(1121, 1120) == 41 * 40


def test_work_of_an_image_by_hand():
    """2*P_v*N = 5.26e12 in the matrices of the layers, 4*L*d*N^2 = 5.10e12 in attention."""
    flops = {op.name: op.work.flops * runs for op, runs in encoder_operators(KIMI, 7168, 6400)}
    matrices = sum(flops[name] for name in ("query, key, value", "output", "up", "down"))
    assert matrices == 2 * KIMI.matmul_params * 6400
    assert matrices == pytest.approx(5.26e12, rel=1e-3)
    assert flops["attention"] == pytest.approx(5.10e12, rel=1e-3)
    assert flops["join"] + flops["project"] == 2 * 1600 * 4608 * (4608 + 7168)


def test_embeddings_of_a_request_are_its_tokens_in_two_bytes():
    at = ds.setup("kimi_k2_5", "h200_sxm", "fp8", profile="ideal")
    step = ds.encode_step(at, images=1, height=1120, width=1120)
    assert step.embedding_bytes == 1600 * 7168 * 2 == pytest.approx(23e6, rel=0.01)
    assert step.transfer == pytest.approx(step.embedding_bytes / 50e9, rel=0.01)


def test_images_repeat_and_a_cache_multiplies_the_rate():
    at = ds.setup("kimi_k2_5", "h200_sxm", "fp8", profile="ideal")
    one, half = (ds.encode_step(at, images=2, height=560, width=560, cached=share) for share in (0.0, 0.5))
    assert half.request_rate == pytest.approx(2 * one.request_rate)
    assert half.latency == one.latency  # of a request whose images are new
    four = ds.encode_step(at, images=4, height=560, width=560)
    assert four.time == pytest.approx(2 * one.time)


def test_faults_name_what_is_wrong():
    text = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    with pytest.raises(InputError, match="llama_3_1_8b has no encoder"):
        ds.encode_step(text, images=1, height=560, width=560)
    at = ds.setup("kimi_k2_5", "h200_sxm", "fp8", profile="ideal")
    with pytest.raises(InputError, match="images"):
        ds.encode_step(at, images=0, height=560, width=560)
    with pytest.raises(InputError, match="is out of range"):
        ds.encode_step(at, images=1, height=560, width=560, cached=1.0)
