"""Fits of dense and grouped GEMM: known numbers are found again."""

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from disagg_sim.facts.efficiency import ANY_REGIME, GemmFit, MoeFit
from disagg_sim.facts.load import load_system
from disagg_sim.units import US
from lab.calibration.kernels import moe
from lab.calibration.kernels.gemm import WRITE_SHARE, fit_gemm, predict_gemm
from lab.calibration.kernels.moe import (
    MeasuredRankLoad,
    drawn_between,
    fit_moe,
    heaviest_rank,
    hit_experts,
    predict_moe,
)

H200 = load_system("h200_sxm")
WORDS = {"system": "h200_sxm", "framework": "trtllm", "version": "1", "kernel_source": "k"}
BASE = {"engine": "trtllm", "version": "1", "points": 1, "median_error": 0.0, "p90_error": 0.0}
SHARED = {"blend_q": 2.5, "k_step": 1e-3 * US, "reuse": 400.0}
LAW = (
    GemmFit(**BASE, **SHARED, format="bf16", tiled=True, e_compute=0.8, e_memory=0.9, t0=3 * US, k_split=1 * US),
    GemmFit(
        **BASE,
        **SHARED,
        format="fp8",
        tiled=True,
        e_compute=0.6,
        e_memory=0.8,
        t0=8 * US,
        k_split=4 * US,
        e_quantise=0.4,
        least_row=3000.0,
    ),
)


def gemm_rows() -> pd.DataFrame:
    shapes = product(["bfloat16", "fp8"], [1, 16, 128, 1024, 16384], [512, 2048, 8192, 65536], [512, 2048, 8192])
    return pd.DataFrame(shapes, columns=["dtype", "m", "n", "k"]).assign(**WORDS)


def test_the_numbers_of_a_known_gemm_are_found_again_and_shared_ones_are_counted_once():
    rows = gemm_rows()
    rows["latency"] = predict_gemm(rows, H200, list(LAW))
    fits = fit_gemm(rows, H200)
    assert [(fit.format, fit.parameters, fit.points) for fit in fits] == [("bf16", 8, 60), ("fp8", 5, 60)]
    for fit, known in zip(fits, LAW, strict=True):
        own = ("e_compute", "e_memory", "t0", "k_split", *(("e_quantise", "least_row") if fit.e_quantise else ()))
        for name in (*own, *SHARED):
            assert getattr(fit, name) == pytest.approx(getattr(known, name), rel=0.08), name
        assert fit.valid == (("m", 1.0, 16384.0), ("n", 512.0, 65536.0), ("k", 512.0, 8192.0))
    assert predict_gemm(rows, H200, fits) == pytest.approx(rows["latency"].to_numpy(), rel=0.02)
    assert fit_gemm(rows, H200) == fits


def test_nvfp4_writes_c_after_the_loop_only_where_rows_show_it():
    """Rows made with a write, and rows whose loop hides it."""
    b200 = load_system("b200_sxm")
    rows = gemm_rows().query("dtype == 'fp8'").assign(dtype="nvfp4", system="b200_sxm")
    law = replace(LAW[1], format="nvfp4")
    for write in (WRITE_SHARE, None):
        rows["latency"] = predict_gemm(rows, b200, [replace(law, e_write=write)])
        (fit,) = fit_gemm(rows, b200)
        assert fit.e_write == write


def test_formats_that_a_system_cannot_multiply_are_left_out():
    rows = gemm_rows()
    rows["latency"] = 1e-4
    a100 = load_system("a100_sxm_80gb")
    assert [fit.format for fit in fit_gemm(rows, a100)] == ["bf16"]
    assert fit_gemm(rows[rows["dtype"] == "fp8"], a100) == []
    predicted = predict_gemm(rows, H200, list(LAW[:1]))
    assert np.array_equal(np.isnan(predicted), (rows["dtype"] == "fp8").to_numpy())


def moe_rows(**words: object) -> pd.DataFrame:
    shapes = product([(4096, 1536, 8, 128), (4096, 14336, 2, 8)], [(1, 1), (4, 1), (1, 2), (1, 8)], 4.0 ** np.arange(9))
    table = [(*model, tp, ep, int(tokens)) for model, (tp, ep), tokens in shapes]
    columns = ["hidden", "inter", "topk", "num_experts", "tp", "ep", "num_tokens"]
    return pd.DataFrame(table, columns=columns).assign(**WORDS, dtype="fp8", distribution="balanced").assign(**words)


EXPERTS = MoeFit(
    **BASE,
    kernel="k",
    format="fp8",
    regime=ANY_REGIME,
    picks="T*k/ep",
    e_compute=0.5,
    e_memory=0.9,
    t0=25 * US,
    blend_q=moe.BLEND_Q,
    least_rows=moe.LEAST_ROWS,
    per_expert=0.2 * US,
    handling=0.0287,
)


def test_the_numbers_of_a_known_grouped_gemm_are_found_again():
    rows = moe_rows()
    rows["latency"] = predict_moe(rows, H200, [EXPERTS])
    (fit,) = fit_moe(rows, H200)
    for field in fields(MoeFit):
        known = getattr(EXPERTS, field.name)
        if isinstance(known, float) and field.name not in ("p90_error", "median_error"):
            assert getattr(fit, field.name) == pytest.approx(known, rel=0.05), field.name
    assert (fit.parameters, fit.points) == (5, len(rows))
    assert predict_moe(rows, H200, [fit]) == pytest.approx(rows["latency"].to_numpy(), rel=0.02)
    other = moe_rows(distribution="balanced at times")
    assert np.isnan(predict_moe(other, H200, [EXPERTS])).all()


def given_to_rank_0(**row: object) -> tuple[float, float]:
    """Picks and distinct experts of the measured rank of one row."""
    sizes = {"hidden": 7168, "inter": 2048, "topk": 8, "num_experts": 256, "tp": 1, "num_tokens": 1024}
    words = WORDS | {"dtype": "fp8_block", "distribution": "balanced"}
    rows = MeasuredRankLoad(pd.DataFrame([sizes | words | row])).rows(0.0)
    return float(rows.picks[0]), float(rows.distinct[0])


@pytest.mark.parametrize(
    ("ep", "picks", "distinct"), [(1, 8192, 128), (2, 8192, 128), (8, 5120, 32), (64, 4224, 4), (256, 1024, 1)]
)
def test_a_router_limited_to_groups_takes_the_lowest_experts_in_a_tie(ep, picks, distinct):
    """4 of 8 picks a token go to experts 0 to 3, the other 4 to the first 128; a rank of one expert has 1 a token."""
    at_most = min(picks, 1024 * 256 // ep)
    assert given_to_rank_0(framework="vllm", ep=ep) == (at_most, distinct)
    assert given_to_rank_0(framework="trtllm", ep=ep) == (8192 / ep, 256 / ep)


def test_a_share_is_told_by_the_tokens_that_reach_a_rank():
    """Of 1024 tokens with 2 picks 768 meet a rank that gets half of all picks: 1 - 0.5^2."""
    row = {"topk": 2, "ep": 4, "distribution": "power_law_1.2_eplb", "num_slots": 256, "rank0_num_tokens": 768}
    picks, distinct = given_to_rank_0(**row)
    assert picks == pytest.approx(1024.0)
    assert 48 < distinct < 64  # the least loaded of the 64 experts get nothing


def test_a_single_token_picks_the_lowest_experts_of_a_large_group():
    """8 picks over 256 experts: no draw of a power law rounds to one, so experts 0 to 7 get one each, all on rank 0.

    Its 8 experts are 84 us of weights at 4.8 TB/s; the table has 132 us, of which a launch takes 30 to 40. A rank of
    one expert reads that one. With EPLB picks are spread: one token reaches rank 0 with one pick.
    """
    row = {"num_tokens": 1, "num_slots": 256, "rank0_num_tokens": 1}
    assert given_to_rank_0(**row, ep=32, distribution="power_law_1.01") == pytest.approx((8.0, 8.0))
    assert given_to_rank_0(**row, ep=256, distribution="power_law_1.01") == pytest.approx((1.0, 1.0))
    assert given_to_rank_0(**row, ep=32, distribution="power_law_1.01_eplb")[0] < 1.0


def test_a_rank_of_a_large_group_writes_a_row_for_each_token_of_the_layer():
    """4096 tokens of 7168 values in bf16 at the rate of handling, whatever the rank was picked for."""
    rows = moe_rows(framework="trtllm").assign(num_tokens=4096, ep=8)
    of_group = rows.assign(num_slots=rows["num_experts"], rank0_num_tokens=1)
    more = predict_moe(of_group, H200, [EXPERTS]) - predict_moe(rows, H200, [EXPERTS])
    written = 4096 * rows["hidden"].to_numpy() * 2 / (EXPERTS.handling * 66.9e12)
    assert more == pytest.approx(written)


@pytest.mark.parametrize(("exponent", "experts", "ep"), [(1.01, 256, 8), (1.2, 128, 4), (1.2, 8, 1)])
def test_the_heaviest_rank_agrees_with_draws_of_a_power_law(exponent, experts, ep):
    rng = np.random.default_rng(1)
    largest = 0.8 * 8192
    uniform = rng.random((2000, experts))
    loads = (1 + uniform * (largest ** (1 - exponent) - 1)) ** (1 / (1 - exponent))
    ranks = loads.reshape(2000, ep, -1).sum(axis=2)
    drawn = float(np.mean(ranks.max(axis=1) / ranks.mean(axis=1)))
    drawn_from = np.array([1.0]), np.array([largest])
    formula = heaviest_rank(exponent, drawn=drawn_from, experts=np.array([experts]), ep=np.array([ep]))
    assert formula[0] == pytest.approx(drawn, rel=0.2 if ep > 1 else 1e-9)


@pytest.mark.parametrize(("exponent", "tokens"), [(1.01, 4), (1.2, 32), (1.01, 64), (1.2, 2048)])
def test_experts_that_are_hit_agree_with_rounded_draws_of_a_power_law(exponent, tokens):
    """256 experts, 8 picks a token: draws are scaled to all picks and rounded; lacking picks go to empty experts."""
    rng, picks = np.random.default_rng(2), 8.0 * tokens
    sizes = {"tokens": np.array([tokens]), "top_k": np.array([8.0]), "experts": np.array([256.0])}
    low, high = drawn_between(**sizes)
    assert (low[0], high[0]) == ((0.01, 2.0) if tokens <= 32 else (1.0, 0.8 * tokens))
    power = 1.0 - exponent
    draws = (low**power + rng.random((2000, 256)) * (high**power - low**power)) ** (1.0 / power)
    loads = np.rint(draws * (picks / draws.sum(axis=1, keepdims=True)))
    hit = (loads > 0).sum(axis=1)
    hit = hit + np.minimum(np.maximum(picks - loads.sum(axis=1), 0.0), 256 - hit)
    formula = hit_experts(exponent, drawn=(low, high), picks=np.array([picks]), local=np.array([256.0]))[0]
    assert min(formula, picks) == pytest.approx(float(hit.mean()), rel=0.15)


def test_equal_draws_hit_as_many_experts_as_there_are_picks_for():
    even = np.array([1.0]), np.array([1.0 + 1e-9])
    for picks, hit in ((8.0, 8.0), (256.0, 64.0)):
        found = hit_experts(1.2, drawn=even, picks=np.array([picks]), local=np.array([64.0]))[0]
        assert min(found, picks) == pytest.approx(hit, rel=1e-4)
