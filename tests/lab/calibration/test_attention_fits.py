"""Fits of attention: known numbers are found again; modules are the sum of a layer's operators; rows without a fit."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from kernel_csv import write_lists

import disagg_sim as ds
from disagg_sim.facts.efficiency import AttentionPartFit, DecodeAttentionFit, GemmFit, PrefillAttentionFit
from disagg_sim.physics.blocks.linear import delta_scan_flops
from disagg_sim.units import US
from lab.calibration.kernels.attention import (
    CONTEXT,
    GENERATION,
    context_attention,
    decode_times,
    generation_attention,
    prefill_times,
)
from lab.calibration.kernels.fit import calibrate_kernels
from lab.calibration.kernels.modules import (
    fit_sparse_attention,
    predict_mla_bmm,
    predict_mla_module,
    predict_sparse_attention,
)
from lab.calibration.kernels.registry import OPERATORS
from lab.calibration.kernels.tables import read_tables

H200 = ds.load_system("h200_sxm")
WORDS = {"system": "h200_sxm", "framework": "vllm", "version": "1", "kernel_source": "k", "compute_dtype": "bfloat16"}
TOLD = {"engine": "vllm", "version": "1", "points": 0, "median_error": 0.0, "p90_error": 0.0}
GQA, DSA = ({**TOLD, "kind": kind} for kind in ("gqa", "dsa"))
PROMPTS = PrefillAttentionFit(**GQA, compute="bf16", cache="bf16", e_compute=0.6, t0=9 * US, e_io=0.4, tail=0.0)
TOKENS = [
    DecodeAttentionFit(
        **GQA,
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


GEMM = GemmFit(**TOLD, format="bf16", e_compute=1.0, e_memory=1.0, t0=3 * US, blend_q=10.0)
DECODE = DecodeAttentionFit(**TOLD, kind="mla", cache="bf16", e_memory=1.0, e_compute=1.0, t0=10 * US)
PREFILL = PrefillAttentionFit(**TOLD, kind="mla", compute="bf16", cache="bf16", e_compute=1.0, t0=20 * US)


def block(phase: str, new: int, past: int, **changes: object) -> pd.DataFrame:
    row = {
        **{"framework": "vllm", "phase": phase, "kv_dtype": "bfloat16", "gemm_dtype": "bfloat16", "batch": 1},
        **{"q_len": new, "past_len": past, "heads": 16},
    }
    return pd.DataFrame([row | changes])


def test_a_decoded_token_is_four_matrix_multiplies_and_an_attention():
    """16 of 128 heads: (1536 + 576)*7168 + 16*192*1536 + 16*256*512 + 7168*16*128 weights of 2 B at 4.8 TB/s."""
    weights = 2112 * 7168 + 16 * 192 * 1536 + 16 * 256 * 512 + 7168 * 16 * 128
    (time,) = predict_mla_module(block("generation", 1, 0), H200, [GEMM, DECODE, PREFILL])
    assert time == pytest.approx(4 * 3 * US + 10 * US + 2 * weights / 4.8e12, rel=0.01)


def test_a_prompt_with_a_past_projects_it_again():
    fresh, cached = (
        predict_mla_module(block("context", 1, past), H200, [GEMM, DECODE, PREFILL])[0] for past in (0, 4096)
    )
    again = 2 * 4096 * 512 * 16 * 256 / 989.4e12  # [s]
    read = 4096 * 16 * 320 * 2 / 4.8e12  # up-projected keys and values of 320 elements a head [s]
    assert cached - fresh > 3 * US + again
    assert cached - fresh == pytest.approx(3 * US + again + read, rel=0.2)


@pytest.mark.parametrize("changes", [{"framework": "sglang"}, {"kv_dtype": "fp8"}, {"gemm_dtype": "nvfp4"}])
def test_a_block_with_an_operator_that_has_no_fit_is_not_predicted(changes):
    rows = pd.concat([block("generation", 1, 100), block("generation", 1, 100, **changes)])
    times = predict_mla_module(rows, H200, [GEMM, DECODE, PREFILL])
    assert np.isfinite(times).tolist() == [True, False]


@pytest.mark.parametrize("op", ["mla_gen_pre", "mla_gen_post"])
def test_the_absorbed_products_read_their_weights_once(op):
    rows = pd.DataFrame([{"framework": "vllm", "op": op, "num_tokens": 1, "heads": 128}])
    (time,) = predict_mla_bmm(rows, H200, [GEMM])
    assert time == pytest.approx(3 * US + 128 * 512 * 128 * 2 / 4.8e12, rel=0.02)
    assert np.isnan(predict_mla_bmm(rows.assign(framework="sglang"), H200, [GEMM])).all()


LINEAR = "system,framework,version,kernel_source,kind,phase"
LINEAR += ",k_heads,k_dim,v_heads,v_dim,d_conv,batch,seq_len,latency_us"


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    """Rows of a scan and of a step of the gated DeltaNet by known rates: 6 us + max(F/9e13, B/1e12, 40 ns S)."""
    rows = []
    for heads in (8, 16, 32):
        state = 4.0 * heads * 128 * 128
        for batch in (1, 4, 16, 64, 256):
            for length in (2, 16, 64, 512, 2048, 8192):
                tokens = batch * length
                flops = tokens * heads * delta_scan_flops(128, 128, 64)
                moved = tokens * 2.0 * (2 * heads // 2 * 128 + 2 * heads * 128) + batch * 2 * state
                time = 6e-6 + max(flops / 9e13, moved / 1e12, 40e-9 * length)
                head = ["h200_sxm", "vllm", "1", "chunk_rule", "gdn", "context", heads // 2, 128, heads, 128, 4]
                rows.append([*head, batch, length, time * 1e6])
            step = ["h200_sxm", "vllm", "1", "recurrent", "gdn", "generation", heads // 2, 128, heads, 128, 4]
            rows.append([*step, batch, 1, (4e-6 + batch * 2 * state / 4e12) * 1e6])
    path = write_lists(tmp_path_factory.mktemp("rows") / "linear.csv", LINEAR, rows)
    return {fit.part: fit for fit in calibrate_kernels([path], "h200_sxm").fits["attention_parts"]}


def test_the_rates_of_a_scan_and_of_a_step_are_found_again(fits):
    fit = fits["scan"]
    assert fit.t0 == pytest.approx(6e-6, rel=0.03)
    assert fit.walk == pytest.approx(40e-9, rel=0.01)
    assert fit.e_compute * H200.peak_flops["bf16"] == pytest.approx(9e13, rel=0.02)
    assert fit.e_memory * H200.hbm_bandwidth == pytest.approx(1e12, rel=0.05)
    assert (fit.kind, fit.engine, fit.parameters) == ("gdn", "vllm", 4)
    assert fit.held_out_points > 0
    assert fit.held_out_median_error < 0.01
    assert fits["step"].e_memory * H200.hbm_bandwidth == pytest.approx(4e12, rel=0.02)
    assert fits["step"].e_compute is None


SPARSE = "system,framework,version,kernel_source,kind,phase,model,kv_dtype,gemm_dtype"
SPARSE += ",heads,tp_size,shared_index,batch,new_tokens,past_tokens,latency_us"
KNOWN = (
    AttentionPartFit(**DSA, part="chosen", t0=40e-6, token=1e-7, e_compute=0.4, e_memory=0.6, head_tile=64.0),
    AttentionPartFit(**DSA, part="index", t0=0.0, choice=3e-5, e_compute=0.5, e_memory=0.6),
)


def table(path, rows):
    return read_tables(write_lists(path, SPARSE, rows))[0].rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Prompts of DeepSeek-V3.2 on 16 and 64 heads, 1 to 65,536 cached tokens."""
    head = ["h200_sxm", "vllm", "1", "k", "dsa", "context", "deepseek_v3_2", "bfloat16", "fp8_block"]
    sizes = [
        (heads, tp, 0, batch, new, past, 1.0)
        for heads, tp in ((16, 8), (64, 2))
        for batch in (1, 4)
        for new in (16, 128, 1024, 4096)
        for past in (1, 1024, 8192, 65_536)
    ]
    return table(tmp_path_factory.mktemp("rows") / "sparse.csv", [head + list(size) for size in sizes])


@pytest.mark.long
def test_known_rates_come_back(rows):
    """Scores and values of 16 heads take the time of 64; the index runs beyond 2,048 tokens."""
    made = rows.assign(latency=predict_sparse_attention(rows, H200, KNOWN))
    assert np.isfinite(made["latency"]).all()
    chosen, index = sorted(fit_sparse_attention(made, H200), key=lambda fit: fit.part)
    assert (chosen.part, chosen.head_tile, index.query_tile) == ("chosen", 64, 0)
    assert [chosen.t0, chosen.token, chosen.e_compute] == pytest.approx([40e-6, 1e-7, 0.4], rel=0.05)
    assert [index.choice, index.e_compute] == pytest.approx([3e-5, 0.5], rel=0.1)
    units = {OPERATORS["sparse_attention"].unit(fit) for fit in (chosen, index)}
    assert len(units) == 1


def test_short_contexts_need_no_index(rows):
    times = predict_sparse_attention(rows, H200, KNOWN[:1])
    beyond = (rows["new_tokens"] + rows["past_tokens"] > 2048).to_numpy()
    assert np.isnan(times[beyond]).all()
    assert np.isfinite(times[~beyond]).all()
