"""Blocks of latent attention are the sum of a layer's operators."""

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.facts.efficiency import DecodeAttentionFit, GemmFit, PrefillAttentionFit
from disagg_sim.units import US
from lab.calibration.kernels.modules import predict_mla_bmm, predict_mla_module

H200 = ds.load_system("h200_sxm")
BASE = {"engine": "trtllm", "version": "1", "points": 0, "median_error": 0.0, "p90_error": 0.0}
GEMM = GemmFit(**BASE, format="bf16", e_compute=1.0, e_memory=1.0, t0=3 * US, blend_q=10.0)
DECODE = DecodeAttentionFit(**BASE, kind="mla", cache="bf16", e_memory=1.0, e_compute=1.0, t0=10 * US)
PREFILL = PrefillAttentionFit(**BASE, kind="mla", compute="bf16", cache="bf16", e_compute=1.0, t0=20 * US)


def block(phase: str, new: int, past: int, **changes: object) -> pd.DataFrame:
    row = {
        **{"framework": "trtllm", "phase": phase, "kv_dtype": "bfloat16", "gemm_dtype": "bfloat16", "batch": 1},
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


@pytest.mark.parametrize("changes", [{"framework": "vllm"}, {"kv_dtype": "fp8"}, {"gemm_dtype": "nvfp4"}])
def test_a_block_with_an_operator_that_has_no_fit_is_not_predicted(changes):
    rows = pd.concat([block("generation", 1, 100), block("generation", 1, 100, **changes)])
    times = predict_mla_module(rows, H200, [GEMM, DECODE, PREFILL])
    assert np.isfinite(times).tolist() == [True, False]


@pytest.mark.parametrize("op", ["mla_gen_pre", "mla_gen_post"])
def test_the_absorbed_products_read_their_weights_once(op):
    rows = pd.DataFrame([{"framework": "trtllm", "op": op, "num_tokens": 1, "heads": 128}])
    (time,) = predict_mla_bmm(rows, H200, [GEMM])
    assert time == pytest.approx(3 * US + 128 * 512 * 128 * 2 / 4.8e12, rel=0.02)
    assert np.isnan(predict_mla_bmm(rows.assign(framework="sglang"), H200, [GEMM])).all()
