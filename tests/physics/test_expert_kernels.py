"""Which kernels time experts in a format that no table of measurements holds."""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.certainty.trust import Trust, trust_of
from disagg_sim.facts.load import load_efficiency, load_system
from disagg_sim.facts.precision import MXFP4
from disagg_sim.physics.experts import moe_cost
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import ExpertRows, expert_work


@pytest.mark.parametrize(
    ("system", "engine", "library", "like"),
    [
        ("h200_sxm", "trtllm", "vllm", "bf16"),  # W4A16: Triton
        ("h200_sxm", "sglang", "sglang", "bf16"),
        ("b200_sxm", "trtllm", "vllm", "fp8"),  # W4A8: generated kernels, MXFP8 activations
        ("gb300_nvl72", "vllm", "vllm", "fp8"),
    ],
)
def test_experts_in_mxfp4_run_as_each_engine_multiplies_them_on_each_system(system, engine, library, like):
    (kernel,) = setup("gpt_oss_120b", system, "mxfp4", engine=engine).rates.moe["tp"]
    (fit,) = [row for row in load_efficiency(system).moe if (row.engine, row.format) == (library, like)]
    share = 0.49 if like == "bf16" else fit.e_compute  # of weights that the kernel expands in its loop
    assert (kernel.flops, kernel.t0) == (share * load_system(system).peak_flops[like], fit.t0)
    assert kernel.element == {"bf16": 2.0, "fp8": 1.0}[like]  # of an activation
    assert setup("gpt_oss_120b", system, "mxfp4", "ideal").rates.moe["tp"][0].flops >= kernel.flops


@pytest.mark.parametrize(
    ("engine", "width", "padded"),
    [
        ("trtllm", 2880.0, 2944 * (2 * 3072 + 2944) / (3 * 2880**2)),  # hidden read: 6 * 512; the others: 23 * 128
        ("trtllm", 360.0, 384 * (2 * 3072 + 2944) / (3 * 2880 * 360)),  # a shard of TP8: 3 * 128
        ("vllm", 2880.0, 3072**2 / 2880**2),  # all: 12 * 256
    ],
)
def test_experts_are_multiplied_with_their_padding(engine, width, padded):
    """gpt-oss on a B200: hidden size and width of 2,880. Where arithmetic binds, time grows with what is multiplied."""
    (rate,) = setup("gpt_oss_120b", "b200_sxm", "mxfp4", engine=engine).rates.moe["tp"]
    rate = replace(rate, bandwidth=1e30, t0=0.0, handling=np.inf, per_expert=0.0)
    rows = ExpertRows(picks=1e6, distinct=128.0, experts=128.0, hidden=2880.0, width=width)
    work = expert_work(rows, weight_bytes=MXFP4.bytes)
    assert moe_cost(rows, work, rate).time == pytest.approx(padded * work.flops / rate.flops, rel=1e-9)


@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm", "h20_sxm"])
def test_a_kernel_that_was_timed_with_a_bad_tactic_gives_way_to_one_that_stands_for_it(system):
    """vLLM's experts in fp8 with a scale a tensor: its kernels of scaled blocks, told and labelled as assumed."""
    rates = setup("llama_4_maverick", system, "fp8", engine="vllm").rates
    blocks = setup("deepseek_r1", system, "fp8", engine="vllm").rates
    assert rates.moe == blocks.moe
    taken = next(each for each in rates.used if each.kind == "experts")
    assert "stands for W8A8, a scale for each tensor or channel" in taken.text
    assert trust_of(taken.fits) == Trust.ASSUMED
    own = next(each for each in blocks.used if each.kind == "experts")
    assert "stands for" not in own.text
    assert trust_of(own.fits) in (Trust.FITTED, Trust.INHERITED)


def test_a_format_without_rows_or_a_word_runs_as_its_dense_kernels_do():
    """A100: no table holds MXFP4 and nothing is said of it: the experts of bf16, weights expanded."""
    plain, packed = (
        setup("gpt_oss_120b", "a100_sxm_80gb", name, engine="vllm").rates.moe["tp"] for name in ("bf16", "mxfp4")
    )
    assert plain == packed


def test_scaled_blocks_are_multiplied_where_the_gpu_can():
    assert MXFP4.fastest({"bf16", "fp8", "nvfp4"}) == "fp8"
    assert MXFP4.fastest({"bf16", "fp8"}) == "bf16"
    assert MXFP4.bytes * 32 == 32 * 0.5 + 1  # 32 values of 4 bits and one scale of 8
