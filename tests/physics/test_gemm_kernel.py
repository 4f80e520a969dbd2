"""Dense and grouped GEMM: cases derived by hand, limits, and what may never happen."""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.facts.efficiency import ANY_REGIME, GemmFit, MoeFit
from disagg_sim.facts.load import load_efficiency, load_profile, load_system
from disagg_sim.physics.blocks import layer_of
from disagg_sim.physics.cost import expert_cost, kernel_cost
from disagg_sim.physics.experts import MoeRate, moe_cost
from disagg_sim.physics.gemm import GemmRate, gemm_cost
from disagg_sim.physics.rates import gemm_rate, moe_rate, resolve_rates
from disagg_sim.physics.roofline import Rate, operator_cost
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import ExpertRows, expert_rows, expert_work, gemm_work
from disagg_sim.techniques.experts.physics import ExpertRouting
from disagg_sim.units import US

H100 = load_system("h100_sxm")
ORIGIN = {"engine": "trtllm", "version": "1", "points": 1, "median_error": 0.0, "p90_error": 0.0}
#: 100 multiprocessors of 10 TFLOP/s each; no memory, no loop, unless a test adds them.
ARITHMETIC = GemmRate(1e15, np.inf, 0.0, 1.0, multiprocessors=100, split=1.0)
FULL = replace(ARITHMETIC, bandwidth=2e12, t0=4 * US, blend=2.0, step=0.5e-9, split=1 * US, reuse=400.0, cache=5e7)


def seconds(rate, m, n, k, *, element=2.0):
    return float(gemm_cost(m, n, k, gemm_work(m, n, k, weight_bytes=element), rate).time)


def test_kernels_of_few_rows_where_64_would_outlast_the_reading_of_their_weights():
    """H20: 148 TFLOP/s on 4 TB/s multiply 37 rows of bf16 while their weights are read; an H100 multiplies 295."""
    fit = GemmFit(**ORIGIN, format="bf16", e_compute=1.0, e_memory=1.0, t0=0.0, blend_q=20.0, tiled=True, k_split=1.0)
    h20, h100 = (gemm_rate(fit, load_system(name)) for name in ("h20_sxm", "h100_sxm"))
    assert (h20.tile_rows, h100.tile_rows) == (16, 64)
    read = 8192 * 8192 * 2 / 4e12
    assert seconds(h20, 1, 8192, 8192) == pytest.approx(read, rel=0.01)
    assert seconds(replace(h20, tile_rows=64), 1, 8192, 8192) > 1.5 * read
    assert seconds(h20, 64, 8192, 8192) == pytest.approx(2 * 64 * 8192**2 / 148e12, rel=0.1)


def test_without_multiprocessors_it_is_the_plain_roofline():
    plain = GemmRate(1e15, 2e12, 4 * US, 3.0)
    m, n, k = np.array([1.0, 100.0, 8192.0]), 4096, 8192
    work = gemm_work(m, n, k, weight_bytes=2)
    wanted = operator_cost(work, Rate(1e15, 2e12, 4 * US, 3.0))
    assert np.array_equal(gemm_cost(m, n, k, work, plain).time, wanted.time)


@pytest.mark.parametrize(
    ("m", "n", "waves"), [(64, 3200, 1), (1, 3200, 1), (64, 3201, 2), (65, 3200, 2), (640, 3200, 10), (1, 32, 1)]
)
def test_tiles_of_64_by_32_run_in_waves(m, n, waves):
    """A multiprocessor needs 2*64*32*1000 FLOP / 10 TFLOP/s = 0.4096 us for a tile of K = 1000; it splits no K here."""
    assert seconds(ARITHMETIC, m, n, 1000) == pytest.approx(waves * 0.4096 * US, rel=1e-12)


def test_k_is_split_where_multiprocessors_would_idle():
    """K = 10000 at 1 ns a step and 0.1 us a part: sqrt(10 us/0.1 us) = 10 parts, a loop of 1 + 0.9 us.

    Ten tiles leave room for the ten parts, 50 for two (5 + 0.1 us), 100 for one (10 us).
    """
    rate = replace(ARITHMETIC, flops=np.inf, step=1e-9, split=0.1 * US)
    loops = [seconds(rate, 1, 32 * tiles, 10_000) / US for tiles in (1, 10, 50, 100, 5000)]
    assert loops == pytest.approx([1.9, 1.9, 5.1, 10.0, 10.0], rel=1e-9)


def test_operands_beyond_the_cache_are_read_again():
    """A square of 10000 in bf16 on 2 TB/s: 3*200 MB once, and 1e12*2 B/400*(200/250) = 4 GB again; 2.3 ms."""
    rate = replace(FULL, flops=np.inf, t0=0.0, step=0.0)
    assert seconds(rate, 10_000, 10_000, 10_000) == pytest.approx(4.6e9 / 2e12, rel=1e-9)
    assert seconds(replace(rate, reuse=np.inf), 10_000, 10_000, 10_000) == pytest.approx(0.6e9 / 2e12, rel=1e-9)


def test_quantising_a_reads_bf16_and_writes_the_format_but_no_short_rows():
    """3 bytes an element at 1 TB/s: 1000 rows of 4000 in 12 us, of 1000 as long as of 2000: 6 us."""
    rate = replace(ARITHMETIC, flops=np.inf, quantise=1e12, least_row=2000.0, element=1.0)
    assert seconds(rate, 1000, 32, 4000, element=1.0) == pytest.approx(12 * US, rel=1e-9)
    assert seconds(rate, 1000, 32, 1000, element=1.0) == pytest.approx(6 * US, rel=1e-9)


def test_c_that_is_written_after_the_loop_adds_to_it_and_leaves_the_memory_of_the_loop():
    """64 x 3200 by K = 1000: 0.4096 us of arithmetic, then 409.6 kB of C at 0.1 TB/s, 4.096 us.

    With memory at 2 TB/s, A and W are 64*1000*2 + 3200*1000*2 B = 6.528 MB, 3.264 us beside the arithmetic.
    """
    rate = replace(ARITHMETIC, write=1e11)
    assert seconds(rate, 64, 3200, 1000) == pytest.approx((0.4096 + 4.096) * US, rel=1e-12)
    assert seconds(replace(rate, bandwidth=2e12), 64, 3200, 1000) == pytest.approx((0.4096 + 3.264 + 4.096) * US)


def gemm_fit(**values):
    given = {"format": "fp8", "e_compute": 0.7, "e_memory": 0.8, "t0": 12 * US, "blend_q": 2.0}
    return GemmFit(**ORIGIN | given | values)


def test_a_fit_without_tiles_is_the_form_of_old():
    assert gemm_rate(gemm_fit(), H100) == GemmRate(0.7 * 1978.9e12, 0.8 * 3.35e12, 12 * US, 2.0)
    tiled = gemm_rate(gemm_fit(tiled=True, k_step=1e-9, k_split=US, e_quantise=0.5, e_write=0.9), H100)
    assert (tiled.multiprocessors, tiled.element, tiled.quantise) == (132, 1.0, 0.5 * 3.35e12)
    assert tiled.write == 0.9 * 3.35e12
    assert np.isinf(tiled.reuse)


GLM = setup("glm_4_5", H100, "fp8")


def rates_with(profile="measured", **fits):
    """Rates with the fits of one or two operators instead of the shipped ones."""
    spec = replace(load_efficiency("h100_sxm"), **fits)
    return resolve_rates(GLM.model, H100, GLM.precision, load_profile(profile), spec)


def test_engines_fuse_quantising_and_overlap_the_loop_where_a_profile_sets_the_floor():
    fit = gemm_fit(tiled=True, k_step=1e-9, k_split=US, e_quantise=0.5)
    fits = (fit, replace(fit, format="bf16", e_quantise=None))
    measured, hopeful = (rates_with(profile, gemm=fits).gemm for profile in ("measured", "optimistic"))
    assert (measured["fp8"].t0, measured["fp8"].quantise) == (4 * US, np.inf)
    assert (hopeful["fp8"].t0, hopeful["fp8"].quantise) == (2 * US, np.inf)
    assert (measured["bf16"].t0, hopeful["bf16"].t0) == (12 * US, 2 * US)
    assert measured["fp8"].floor_is_all
    assert hopeful["bf16"].floor_is_all
    assert not measured["bf16"].floor_is_all
    assert seconds(measured["fp8"], 1, 32, 1000, element=1.0) < 5 * US < seconds(gemm_rate(fit, H100), 1, 32, 1000)


EXPERTS = MoeRate(1e15, 2e12, 10 * US, 1.0, least_rows=16.0, per_expert=0.1 * US, handling=1e12, element=1.0)


def grouped(rate, picks, distinct, experts, hidden=4000.0, width=1000.0):
    rows = ExpertRows(picks, distinct, experts, hidden, width)
    return moe_cost(rows, expert_work(rows, weight_bytes=rate.element), rate)


def test_routed_experts_by_hand():
    """100 rows on 50 of 200 experts of 4000 x 1000 in fp8, each padded from 2 rows to 16.

    Floor 10 + 20 us; weights 50*12 MB/2 TB/s = 300 us; 50*16 rows * 24 MFLOP = 19.2 us; a row moves
    4000*(2+4) + 1000*(2+8) = 34 kB: 3.4 us.
    """
    cost = grouped(EXPERTS, 100.0, 50.0, 200.0)
    assert float(cost.time) == pytest.approx((30 + 300 + 19.2 + 3.4) * US, rel=1e-9)
    assert float(cost.sums.compute) == pytest.approx((19.2 + 3.4) * US, rel=1e-9)
    assert float(cost.sums.memory) == pytest.approx(300 * US, rel=1e-9)
    assert float(cost.sums.latency) == pytest.approx(30 * US, rel=1e-9)


def test_rows_of_experts_are_handled_by_multiprocessors_not_by_hbm():
    """Gathers and sums go with SMs times clock: H200 as H100; H20, of 44 for 66.9 TFLOP/s in FP32, 1.5 times as long.

    An L40S has more of both than H100, but a quarter of its bandwidth: there rows pass HBM at twice it at most.
    """
    fit = moe_fit("rows", t0=10 * US, handling=0.03)
    rates = {name: moe_rate(fit, load_system(name)) for name in ("h100_sxm", "h200_sxm", "h20_sxm", "l40s")}
    assert rates["h100_sxm"].handling == rates["h200_sxm"].handling
    assert rates["h200_sxm"].handling == pytest.approx(0.03 * 66.9e12)
    assert rates["h20_sxm"].handling == pytest.approx(rates["h100_sxm"].handling * 44 / 66.9)
    assert (rates["l40s"].handling, rates["l40s"].passing) == (np.inf, 2 * 864e9)
    slower = grouped(replace(EXPERTS, handling=np.inf, passing=1e12), 100.0, 50.0, 200.0)
    assert float(slower.sums.memory) == pytest.approx(303.4 * US, rel=1e-9)


def test_experts_in_blocks_take_the_time_of_their_weights_picked_or_not():
    """200 experts take a block each, 256 picks two more: 202 * 12 MB at 2 TB/s = 1,212 us; without a pick 1,200 us."""
    blocks = replace(EXPERTS, flops=np.inf, block_rows=128.0)
    assert float(grouped(blocks, 256.0, 100.0, 200.0).time) == pytest.approx((30 + 1212 + 256 * 0.034) * US)
    assert float(grouped(blocks, 0.0, 0.0, 200.0).time) == pytest.approx((30 + 1200) * US)
    assert float(grouped(blocks, 0.0, 0.0, 100.0).sums.memory) == pytest.approx(600 * US)  # half of the experts, EP 2


def test_full_experts_are_not_padded_and_idle_ranks_pay_the_floor():
    free = replace(EXPERTS, handling=np.inf)
    full, double = (float(grouped(free, picks, 50.0, 50.0).sums.compute) for picks in (8000.0, 16000.0))
    assert (full, double) == pytest.approx((192 * US, 384 * US))
    assert float(grouped(EXPERTS, 0.0, 0.0, 8.0).time) == pytest.approx(10.8 * US)


def test_without_its_own_terms_it_is_the_plain_roofline():
    rate = MoeRate(1e15, 2e12, 10 * US, 2.5)
    rows = expert_rows(
        tokens=np.array([1.0, 99.0]), experts=64, top_k=4, hidden=4096, width=512.0, ep=4.0, imbalance=1.2
    )
    work = expert_work(rows, weight_bytes=2)
    plain = operator_cost(work, Rate(1e15, 2e12, 10 * US, 2.5)).time
    assert np.array_equal(moe_cost(rows, work, rate).time, plain)
    handled = moe_cost(rows, work, replace(rate, handling=np.array([np.inf, 1e12]))).time  # in one of two regimes
    moved = rows.picks[1] * (4096 * (4 + 4) + 512 * (4 + 8)) / 1e12
    assert handled == pytest.approx(plain + np.array([0.0, moved]), rel=1e-9)


def test_rows_of_the_fullest_rank():
    """128 tokens of 8 picks on 16 ranks with an imbalance of 1.5: 96 rows; all of 256 experts but e^-4 are hit."""
    rows = expert_rows(tokens=128.0, experts=256, top_k=8, hidden=7168, width=2048, ep=16.0, imbalance=1.5)
    assert float(rows.picks) == 96.0
    assert float(rows.experts) == 16.0
    assert float(rows.distinct) == pytest.approx(16 * (1 - np.exp(-4.0)), rel=0.01)
    alone = expert_rows(tokens=128.0, experts=256, top_k=8, hidden=7168, width=2048, ep=1.0, imbalance=1.5)
    assert float(alone.picks) == 1024.0


def moe_fit(kernel, **values):
    given = {
        "format": "fp8",
        "regime": ANY_REGIME,
        "picks": "T*k/ep",
        "e_compute": 0.5,
        "e_memory": 0.8,
        "blend_q": 2.0,
    }
    return MoeFit(kernel=kernel, **ORIGIN | given | values)


def test_one_fit_serves_every_regime_and_the_faster_kernel_counts():
    """A kernel with a low floor and slow memory, one with a high floor and fast memory; a floor of a profile is all."""
    fits = (
        moe_fit("early", t0=10 * US, e_memory=0.2, per_expert=0.1 * US),
        moe_fit("late", t0=90 * US, handling=0.025, least_rows=16.0),
    )
    rates = rates_with(moe=fits)
    assert len({id(kernels) for kernels in rates.moe.values()}) == 1
    kernels = rates.moe["tp"]
    assert kernels == (moe_rate(fits[0], H100), moe_rate(fits[1], H100))
    experts = layer_of(GLM.model.layers[-1]).ffn
    op = experts.routed(GLM.model, GLM.precision, Sharding(ep=8.0), np.array([1.0, 4.0, 4096.0]), ExpertRouting(1.0))
    times = [moe_cost(op.experts, op.work, kernel).time for kernel in kernels]
    together = expert_cost(op, np.float64(8.0), np.float64(1.0), replace(GLM, rates=rates)).time
    assert np.array_equal(together, np.minimum(*times))
    assert times[0][0] < times[1][0]
    assert times[0][-1] > times[1][-1]
    floors = {(kernel.t0, kernel.per_expert) for kernel in rates_with("optimistic", moe=fits).moe["single"]}
    assert floors == {(15 * US, 0.0)}


def test_tensorrt_llm_chooses_among_sound_kernels_and_its_own_in_other_libraries():
    """NVFP4 on GB200: cutlass and the generated kernels; ``min_latency`` misses by 64 % at p90 and is left out."""
    at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", engine="trtllm")
    taken = next(one for one in at.rates.used if one.what == "nvfp4 MoE GEMM (any)")
    assert {(fit.engine, fit.kernel) for fit in taken.fits} == {
        ("trtllm", "moe_torch_flow_cutlass"),
        ("sglang", "sglang_flashinfer_trtllm_moe"),
    }
    assert all(fit.p90_error < 0.5 for fit in taken.fits)
    on_hopper = setup("deepseek_r1", "h200_sxm", "fp8", engine="trtllm").rates.used
    fits = next(one.fits for one in on_hopper if one.what == "fp8_block MoE GEMM (any)")
    assert {fit.engine for fit in fits} == {"trtllm"}


@pytest.mark.parametrize("tp", [1.0, 8.0])
def test_absorbed_products_do_the_work_of_kv_b_head_by_head(tp):
    """128/tp heads, 64 tokens: 2*64*heads*128*512 FLOP each; weights and rows of every head in bf16."""
    at = setup("deepseek_r1", "gb200_nvl72", "fp8")
    attention = layer_of(at.model.kinds[0]).attention
    heads = 128 / tp
    plain = {op.name: op for op in attention.projections(at.model, at.precision, tp, 64.0)}
    served = {op.name: op for op in attention.served_projections(at.model, at.precision, tp, 64.0, 64.0)}
    assert set(plain) - set(served) == {"kv_b"}
    both = [served["kv_b into q"], served["kv_b out of values"]]
    for op in both:
        assert op.format == "bf16"
        assert op.work.flops == 2 * 64 * heads * 128 * 512
        assert op.work.hbm_bytes == 2 * heads * (128 * 512 + 64 * (128 + 512))
    assert sum(op.work.flops for op in both) == plain["kv_b"].work.flops
    assert [one.shape for one in both] == [(64.0, heads * 512, 128), (64.0, heads * 128, 512)]


def test_only_the_decodes_of_a_mixed_step_are_absorbed():
    at = setup("deepseek_r1", "gb200_nvl72", "fp8")
    attention = layer_of(at.model.kinds[0]).attention
    mixed = {op.name: op for op in attention.served_projections(at.model, at.precision, 1.0, 576.0, 64.0)}
    assert mixed["kv_b"].shape[0] == 512
    assert mixed["kv_b into q"].shape[0] == 64
    prompts = attention.served_projections(at.model, at.precision, 1.0, 512.0, 0.0)
    assert [op.name for op in prompts] == [op.name for op in attention.projections(at.model, at.precision, 1.0, 512.0)]


@pytest.mark.parametrize(("heads", "tokens", "measured"), [(128, 64, 14.0), (128, 512, 38.0)])
def test_absorbed_products_take_what_tensorrt_llm_took_on_gb200(heads, tokens, measured):
    """Both products of fp8 weights, as measured by version 1.3.0rc20 (it converts to bf16); 30 %. [us]"""
    at = setup("deepseek_r1", "gb200_nvl72", "fp8", engine="trtllm")
    attention = layer_of(at.model.kinds[0]).attention
    operators = attention.served_projections(at.model, at.precision, 128.0 / heads, float(tokens), float(tokens))
    times = [float(kernel_cost(op, at).time) for op in operators if op.name.startswith("kv_b")]
    assert sum(times) * 1e6 == pytest.approx(measured, rel=0.3)
