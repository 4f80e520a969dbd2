"""Prefill after a cached past: what it computes, and its limits."""

import pytest

from disagg_sim.domain import Sharding
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.passes.prompts import prompt_pass
from disagg_sim.physics.setup import setup

EIGHT = Sharding(tp_attn=8, tp_ffn=8)


@pytest.fixture(scope="module")
def llama():
    return setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")


@pytest.fixture(scope="module")
def r1():
    return setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal")


@pytest.mark.parametrize("past", [512, 8192, 58_976])
def test_prefix_and_rest_compute_as_much_as_the_whole(llama, past):
    """``pairs(C, 0) + pairs(S, C) = pairs(C + S, 0)``, and every token passes the layers once; each pass has a head."""
    whole, first, rest = (
        prefill_pass(llama, EIGHT, batch=1, isl=isl, past=before).sums.compute
        for isl, before in ((65_536, 0), (past, 0), (65_536, past))
    )
    head = 2 * 8192 * 128_256 / 8 / llama.system.peak_flops["bf16"]
    assert first + rest == pytest.approx(whole + head, rel=1e-5)


def test_one_token_after_a_past_is_a_decode_step(llama):
    """S = 1: the same matrices and the same cache; the prefill kernel writes the token's keys, too."""
    one = prefill_pass(llama, EIGHT, batch=64, isl=16_384, past=16_383)
    step = decode_step(llama, EIGHT, batch=64, context=16_384.0)
    assert one.ftl == pytest.approx(step.ttl, rel=1e-3)


def test_one_chunk_is_the_whole_pass(llama, r1):
    for at, mapping in ((llama, EIGHT), (r1, Sharding(dp_attn=8, ep=8))):
        passes = [
            prompt_pass(at, mapping, batch=8, isl=32_768, past=24_576, chunk_tokens=chunk).ftl for chunk in (0, 8192)
        ]
        assert passes[0] == pytest.approx(passes[1], rel=1e-9)


def test_kept_projections_of_a_prefix_are_made_once(r1):
    """A prefix cache holds latents: the form that keeps what it up-projects does so with the first chunk."""
    deep = Sharding(tp_attn=8, tp_ffn=8, pp=2)

    def compute(form, isl, past, chunk):
        done = prompt_pass(r1, deep, batch=1, isl=isl, past=past, chunk_tokens=chunk, mla_form=form)
        return done.sums.compute

    naive, kept = (compute(form, 65_536, 32_768, 32_768) for form in ("naive", "cached"))
    assert naive == pytest.approx(kept, rel=1e-9)  # one chunk: both project the prefix once
    assert compute("naive", 65_536, 32_768, 4096) > compute("cached", 65_536, 32_768, 4096)
    second_half = compute("cached", 65_536, 0, 4096) - compute("cached", 32_768, 0, 4096)
    again = 61 * 32_768 * 2 * 512 * 128 * (128 + 128) / 8 / r1.system.peak_flops["fp8"]
    assert compute("cached", 65_536, 32_768, 4096) - second_half == pytest.approx(again, rel=0.02)
