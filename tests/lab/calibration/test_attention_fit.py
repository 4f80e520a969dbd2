"""Fits of attention kernels: known numbers are found again."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.facts.efficiency import DecodeAttentionFit, PrefillAttentionFit
from disagg_sim.units import US
from lab.calibration.kernels.attention import (
    CONTEXT,
    GENERATION,
    context_attention,
    decode_times,
    generation_attention,
    prefill_times,
)

H200 = ds.load_system("h200_sxm")
WORDS = {"system": "h200_sxm", "framework": "vllm", "version": "1", "kernel_source": "k", "compute_dtype": "bfloat16"}
BASE = {"engine": "vllm", "version": "1", "points": 0, "median_error": 0.0, "p90_error": 0.0, "kind": "gqa"}
PROMPTS = PrefillAttentionFit(**BASE, compute="bf16", cache="bf16", e_compute=0.6, t0=9 * US, e_io=0.4, tail=0.0)
TOKENS = [
    DecodeAttentionFit(
        **BASE,
        cache=cache,
        e_memory=share,
        t0=t0,
        block_time=block,
        serial_time=2.5 * US,
        serial_power=0.45,
        ramp=9 * US,
    )
    for cache, share, t0, block in (("bf16", 0.9, 8 * US, 2 * US), ("fp8", 0.7, 12 * US, 4 * US))
]


def rows_of(length: str, lengths: list[int], cache: str = "bfloat16") -> pd.DataFrame:
    shapes = product([1, 8, 64, 512], lengths, [(8, 1), (32, 8), (64, 8)])
    sizes = [{"batch": b, length: s, "q_heads": q, "kv_heads": k} for b, s, (q, k) in shapes]
    return pd.DataFrame(sizes).assign(**WORDS, kv_dtype=cache, head_dim=128)


def test_the_numbers_of_a_known_prefill_are_found_again():
    rows = rows_of("seq_len", [16, 128, 1024, 8192])
    rows["latency"] = prefill_times(context_attention(rows), PROMPTS, H200)
    (fit,) = CONTEXT.fit(rows, H200)
    assert fit.tail == PROMPTS.tail
    assert [fit.e_compute, fit.e_io, fit.t0] == pytest.approx([0.6, 0.4, 9 * US], rel=0.02)
    assert (fit.parameters, fit.points) == (3, len(rows))
    assert CONTEXT.predict(rows, H200, [fit]) == pytest.approx(rows["latency"].to_numpy(), rel=0.02)
    assert ("seq_len", 16.0, 8192.0) in fit.valid


def test_the_numbers_of_a_known_decode_are_found_again_and_shared_ones_are_counted_once():
    parts = [rows_of("kv_len", [2, 128, 2048, 32768], cache) for cache in ("bfloat16", "fp8")]
    known = [
        part.assign(latency=decode_times(generation_attention(part), fit, H200))
        for part, fit in zip(parts, TOKENS, strict=True)
    ]
    rows = pd.concat(known, ignore_index=True)
    fits = GENERATION.fit(rows, H200)
    for found, true in zip(fits, TOKENS, strict=True):
        for name in ("e_memory", "t0", "block_time", "serial_time", "ramp"):
            assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert [fit.parameters for fit in fits] == [5, 3]
    assert fits == GENERATION.fit(rows, H200)
    assert GENERATION.predict(rows, H200, fits) == pytest.approx(rows["latency"].to_numpy(), rel=0.02)


def test_rows_without_a_fit_are_predicted_as_nan_and_kernels_of_one_library_stay_apart():
    rows = rows_of("seq_len", [1024])
    named = replace(PROMPTS, kernel="k")
    others = [{"framework": "sglang"}, {"kernel_source": "other"}, {"kv_dtype": "fp8"}, {"compute_dtype": "fp8"}]
    assert np.isfinite(CONTEXT.predict(rows, H200, [named])).all()
    for change in others:
        assert np.isnan(CONTEXT.predict(rows.assign(**change), H200, [named])).all()


def test_an_arithmetic_that_the_system_lacks_is_not_fitted():
    rows = rows_of("seq_len", [64, 1024], "fp8").assign(compute_dtype="fp8", latency=1e-4)
    assert CONTEXT.fit(rows, ds.load_system("a100_sxm_80gb")) == []
    assert len(CONTEXT.fit(rows, H200)) == 1
