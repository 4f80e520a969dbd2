"""Worked example W7: chunked pipelined prefill, by hand.

Rates are flat here (one arithmetic rate, infinite bandwidth, no latency), so that a time is FLOP over a
rate and the hand figures hold without any efficiency.
"""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.facts.attention import GqaAttention
from disagg_sim.facts.ffn import DenseFfn
from disagg_sim.facts.layers import LayerKind
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.collectives import AllToAllRate, LinkCurve
from disagg_sim.physics.counts import prefill_work
from disagg_sim.physics.experts import MoeRate
from disagg_sim.physics.gemm import GemmRate
from disagg_sim.physics.memory import prefill_bytes
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.rates import AttentionRate
from disagg_sim.physics.residents import prompt_residents
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.units import GB, MS

FREE_LINK = LinkCurve(np.array([1.0]), np.array([0.0]), np.array([np.inf]))


def flat_rates(at: Setup, flops: float) -> Setup:
    """Every FLOP at the same rate; bytes and messages cost nothing."""
    attention = AttentionRate(flops, np.inf, 0.0, 0.0)
    exchange = dict.fromkeys(("prefill", "decode"), AllToAllRate(FREE_LINK, FREE_LINK))
    system, rates = replace(at.system, nvlink_bandwidth=np.inf, nic_bandwidth=np.inf), at.rates
    rates = replace(
        rates,
        gemm=dict.fromkeys(rates.gemm, GemmRate(flops, np.inf, 0.0, np.inf)),
        prefill_attention=dict.fromkeys(rates.prefill_attention, attention),
        decode_attention=dict.fromkeys(rates.decode_attention, attention),
        moe=dict.fromkeys(rates.moe, (MoeRate(flops, np.inf, 0.0, np.inf),)),
        elementwise_bandwidth=np.inf,
        all_reduce=FREE_LINK,
        all_gather=FREE_LINK,
        reduce_scatter=FREE_LINK,
        dispatch=exchange,
        combine=exchange,
    )
    return replace(at, system=system, rates=rates)


def test_four_stages_of_10_12_14_16_ms_give_100_ms():
    """Four one-layer stages; a chunk costs a floor plus 2 ms for every earlier chunk: FTL = 52 + 3*16 = 100 ms.

    Chunk i (from 0) of S tokens has S*S*(i + 1/2 + 1/(2S)) pairs; the floor (10 ms less the share of the
    chunk's own pairs) stands in the elementwise latency of the layer. Everything else is free.
    """
    size, heads, head_dim = 1000, 4, 16
    layer = LayerKind(GqaAttention(q_heads=heads, kv_heads=heads, head_dim=head_dim), DenseFfn(width=8))
    model = ModelSpec(
        name="four_layers",
        title="",
        hidden=8,
        vocab=8,
        layers=(layer,) * 4,
        tied_embeddings=False,
        layer_norm=False,
        learned_positions=0,
        block_scaled_fp8=False,
        max_context=10_000,
        max_context_sure=True,
        source="made up",
    )
    at = setup(model, "gb200_nvl72", "bf16", "ideal")
    per_past_chunk = 4 * heads * head_dim * size**2 / (2 * MS)  # FLOP/s that make an earlier chunk cost 2 ms
    flat = flat_rates(at, np.inf)
    flat = replace(
        flat,
        rates=replace(
            flat.rates, prefill_attention={"gqa": replace(flat.rates.prefill_attention["gqa"], flops=per_past_chunk)}
        ),
        profile=replace(at.profile, elementwise_latency=10 * MS - 2 * MS * (0.5 + 0.5 / size)),
    )
    mapping = Sharding(pp=4.0)
    done = chunked_prefill_pass(flat, mapping, batch=1.0, isl=4.0 * size, chunk_tokens=float(size))
    assert done.busy == pytest.approx((10 + 12 + 14 + 16) * MS, rel=1e-12)
    assert done.ftl == pytest.approx(100 * MS, rel=1e-12)


ISL = 262_144
RATE = 2.08e15  # what the paper's figure 5 comes to: 64 prompts on 64 GPUs in 91.5 s [FLOP/s]


@pytest.fixture(scope="module")
def r1():
    return setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", "ideal")


def r1_pass(at, pp: int, form: str, chunk: int = 0):
    flat, n = flat_rates(at, RATE), 64 // pp
    mapping = Sharding(dp_attn=float(n), ep=float(n), pp=float(pp))
    if not chunk:
        return prefill_pass(flat, mapping, batch=float(n), isl=float(ISL), mla_form=form)
    return chunked_prefill_pass(flat, mapping, batch=float(n), isl=float(ISL), chunk_tokens=float(chunk), mla_form=form)


def test_r1_256k_unchunked_takes_91_5_s(r1):
    assert prefill_work(r1.model, isl=ISL).flops == pytest.approx(1.904e17, rel=0.001)
    assert r1_pass(r1, 1, "cached").ftl == pytest.approx(91.5, rel=0.005)


def test_r1_256k_cached_in_32_stages_is_27_times_faster(r1):
    """3.35 s and a factor of 27 by hand (two digits); 64 slots for 61 layers cost 5 % of the throughput.

    By hand all 32 stages are as slow as those of two layers; the last chunk in fact meets 61 layers, 0.6 % sooner.
    """
    whole, piped = r1_pass(r1, 1, "cached"), r1_pass(r1, 32, "cached", 512)
    assert piped.ftl == pytest.approx(3.35, rel=0.007)
    assert whole.ftl / piped.ftl == pytest.approx(27, rel=0.02)
    # 64 GPUs take 64 prompts a pass unpiped, and 2 prompts a pass with two ranks of 32 stages.
    throughput = (2 / piped.busy) / (64 / whole.busy)
    assert throughput == pytest.approx(61 / 64, rel=0.002)


@pytest.mark.parametrize(
    ("chunk", "factor", "throughput"), [(512, 16, 0.58 * 61 / 64), (1024, 18.2, None), (2048, 17.7, None)]
)
def test_r1_256k_naive_reprojects_and_gains_less(r1, chunk, factor, throughput):
    """By hand 16, 18.2 and 17.7 times; 0.58 of the throughput, 0.55 with the uneven layers. 2 %: two digits."""
    whole, piped = r1_pass(r1, 1, "naive"), r1_pass(r1, 32, "naive", chunk)
    assert whole.ftl / piped.ftl == pytest.approx(factor, rel=0.02)
    if throughput is not None:
        assert (2 / piped.busy) / (64 / whole.busy) == pytest.approx(throughput, rel=0.01)


def test_r1_256k_naive_chunks_of_512_add_72_percent_of_arithmetic(r1):
    extra = [r1_pass(r1, 32, "naive", chunk).busy / r1_pass(r1, 32, "cached", chunk).busy - 1 for chunk in (512, 1024)]
    assert extra == pytest.approx([0.72, 0.36], rel=0.02)


def test_r1_256k_cached_needs_the_memory_of_eight_stages(r1):
    """Kept keys and values of one prompt: 333, 172, 86, 43, 21.5 GB at PP 2-32; on GB200 they fit from PP 8 on."""
    kept, fits = [], []
    for pp in (2, 4, 8, 16, 32):
        mapping = Sharding(dp_attn=64.0 / pp, ep=64.0 / pp, pp=float(pp))
        held = [
            float(
                prefill_bytes(
                    r1,
                    mapping,
                    64.0 / pp,
                    prompt=prompt_residents(ISL),
                    chunk_tokens=512.0,
                    mla_form="cached" if cached else "auto",
                )
            )
            for cached in (True, False)
        ]
        kept.append((held[0] - held[1]) / GB)
        fits.append(held[0] <= r1.memory_limit)
    assert kept == pytest.approx([333, 172, 86, 43, 21.5], rel=0.005)
    assert fits == [False, False, True, True, True]
