"""Sparse and compressed attention by hand: DeepSeek-V3.2, GLM-5.2, MiniMax-M3 and DeepSeek-V4, and their limits.

The index goes on growing with the context, scores and values do not beyond what is chosen.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.facts.attention import GqaAttention, MlaAttention
from disagg_sim.facts.efficiency import AttentionPartFit
from disagg_sim.facts.ffn import DenseFfn, NoFfn
from disagg_sim.facts.layers import LayerKind
from disagg_sim.facts.load import load_model, load_precision, load_system
from disagg_sim.facts.sparse_attention import CsaAttention, DsaAttention, HcaAttention, MsaAttention
from disagg_sim.physics.attention_parts import PartRate, part_cost, part_rate
from disagg_sim.physics.blocks import layer_of
from disagg_sim.physics.kv_transfer import kv_bytes_per_request, unique_gpus
from disagg_sim.physics.memory import instance_parts
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.residents import decode_load, decode_residents
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import AttentionShape, Tokens, Work
from disagg_sim.search.mappings import enumerate_mappings

BASE = load_model("deepseek_r1")
FP8, BF16 = (load_precision(name).resolve(BASE) for name in ("fp8", "bf16"))
LATENT = {"q_heads": 128, "q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
DSA = DsaAttention(**LATENT, index_heads=64, index_dim=128, top_k=2048)
SHARED = DsaAttention(**LATENT, index_heads=64, index_dim=128, top_k=2048, shared_index=True)
MSA = MsaAttention(q_heads=64, kv_heads=4, head_dim=128, index_heads=4, index_dim=128, block=128, top_blocks=16)
V4 = {"q_heads": 128, "q_rank": 1536, "head_dim": 512, "rope_dim": 64, "output_rank": 1024, "output_groups": 16}
CSA = CsaAttention(**V4, window=128, ratio=4, index_heads=64, index_dim=128, top_k=1024)
HCA, WINDOW = (HcaAttention(**V4, window=128, ratio=ratio) for ratio in (128, 0))
KINDS = {"dsa": DSA, "shared": SHARED, "msa": MSA, "csa": CSA, "hca": HCA, "window": WINDOW}


def works(spec, precision=FP8, *, context=0.0, new=0.0, past=0.0, queries=1.0):
    """FLOP and bytes of index and of scores and values, of one sequence on one GPU."""
    block = layer_of(LayerKind(spec, NoFfn())).attention
    if new:
        operators = block.prefill(precision, 1.0, Tokens(prompts=1.0, new=new, past=past), "auto")[0]
    else:
        operators = block.decode(precision, 1.0, Tokens(decodes=1.0, context=context, queries=queries), "auto")[0]
    return {"index" if op.name == "index" else "main": op.work for op in operators}


def model_of(*specs, ffn=None):
    ffn = DenseFfn(width=2048) if ffn is None else ffn
    return replace(BASE, name="toy", layers=tuple(LayerKind(spec, ffn) for spec in specs), max_context=2_000_000)


def at_of(*specs, recipe="fp8", system="h200_sxm", profile="measured"):
    at = setup(model_of(*specs), system, recipe, profile=profile, engine="vllm")
    return replace(at, overheads=None, profile=replace(at.profile, host=0.0))


# DeepSeek sparse attention.


def test_a_token_of_deepseek_v3_2_at_65536():
    """Index 2*64*128 FLOP and 132 B a token; main 2*128*(1024 + 64) FLOP and 656 B for each of 2048."""
    found = works(DSA, context=65_536.0)
    assert found["index"].flops == 2 * 64 * 128 * 65_536 == pytest.approx(1.074e9, rel=1e-3)
    assert found["index"].hbm_bytes == 132 * 65_536 == pytest.approx(8.65e6, rel=1e-3)
    assert found["main"].flops == 2 * 128 * 1088 * 2048 == pytest.approx(0.570e9, rel=1e-3)
    assert found["main"].hbm_bytes == 656 * 2048 == pytest.approx(1.34e6, rel=3e-3)


@pytest.mark.parametrize(("context", "rows"), [(65_536.0, 3 * 2048), (2100.0, 2102)])
def test_queries_of_drafts_choose_apart_and_read_no_more_than_there_is(context, rows):
    """Three queries read 2048 latents each, or all 2,100 and those of the two drafts before the last."""
    found = works(DSA, context=context, queries=3.0)
    assert found["main"].flops == 3 * 2 * 128 * 1088 * 2048
    assert found["main"].hbm_bytes == 656 * rows


def test_a_chunk_of_4096_after_61440():
    """Every token chooses 2048 keys: 2.34 TFLOP, and 4.26 of the index."""
    found = works(DSA, new=4096.0, past=61_440.0)
    assert found["main"].flops == pytest.approx(2.34e12, rel=2e-3)
    assert found["index"].flops == pytest.approx(4.26e12, rel=2e-3)


@given(context=st.integers(1, 2048), new=st.integers(1, 1000))
def test_a_choice_of_all_tokens_is_dense_attention_but_for_the_index(context, new):
    """In bf16, whose latents have no scales."""
    dense, past = MlaAttention(**LATENT), max(0, context - new)
    new = min(new, 2048 - past)
    decode = works(DSA, BF16, context=float(context))["main"], works(dense, BF16, context=float(context))["main"]
    assert decode[0].flops == decode[1].flops
    assert decode[0].hbm_bytes == decode[1].hbm_bytes
    block = layer_of(LayerKind(dense, NoFfn())).attention
    tokens = Tokens(prompts=1.0, new=float(new), past=float(past))
    absorbed = block.prefill(BF16, 1.0, tokens, "absorbed")[0][0].work
    found = works(DSA, BF16, new=float(new), past=float(past))["main"]
    assert found.flops == pytest.approx(absorbed.flops, rel=1e-12)
    assert found.hbm_bytes == pytest.approx(absorbed.hbm_bytes, rel=1e-12)


def test_a_shared_index_costs_and_caches_nothing():
    """GLM-5.2: 57 of 78 layers take the choice of a layer before."""
    assert set(works(SHARED, context=10_000.0)) == {"main"}
    assert works(SHARED, context=10_000.0)["main"] == works(DSA, context=10_000.0)["main"]
    assert SHARED.sequence_bytes(1000, 1.0) == 656 * 1000
    assert DSA.sequence_bytes(1000, 1.0) == (656 + 132) * 1000


def test_the_indexer_is_whole_on_every_rank():
    block = layer_of(LayerKind(DSA, NoFfn())).attention
    plain = layer_of(LayerKind(MlaAttention(**LATENT), NoFfn())).attention
    for tp in (1.0, 8.0):
        added = float(block.matmul_params(7168, tp)) - float(plain.matmul_params(7168, tp))
        assert added == pytest.approx(1536 * 8192 + 7168 * (128 + 64), rel=1e-12)
    assert float(unique_gpus(model_of(DSA), Sharding(tp_attn=8.0, tp_ffn=8.0))) == 1


# Block-sparse attention.


def test_a_token_of_minimax_m3_at_131072():
    """Index 4 heads of 128 on bf16 keys: 134 MFLOP, 33.6 MB; main 64 heads on 2048 tokens: 67 MFLOP, 2.1 MB in fp8."""
    found = works(MSA, context=131_072.0)
    assert found["index"].flops == pytest.approx(134.2e6, rel=1e-3)
    assert found["index"].hbm_bytes == pytest.approx(33.6e6, rel=2e-3)
    assert found["main"].flops == pytest.approx(67.1e6, rel=1e-3)
    assert found["main"].hbm_bytes == pytest.approx(2.10e6, rel=2e-3)


@given(context=st.integers(1, 2048), new=st.integers(1, 2048))
def test_blocks_that_hold_the_whole_context_are_grouped_queries(context, new):
    dense = GqaAttention(q_heads=64, kv_heads=4, head_dim=128)
    assert works(MSA, context=float(context))["main"] == works(dense, context=float(context))["main"]
    sizes = {"new": float(min(new, context)), "past": float(max(context - new, 0))}
    assert works(MSA, **sizes)["main"] == works(dense, **sizes)["main"]


def test_index_heads_go_with_kv_heads_and_the_index_key_is_whole():
    """TP 4: 16 query heads, a KV head, an index head; a GPU keeps its KV head and the index key of every token."""
    at = at_of(MSA)
    block = layer_of(at.model.kinds[0]).attention
    assert float(block.columns(4.0)) == (16 + 2) * 128 + 2 * 128
    cut = Sharding(tp_attn=4.0, tp_ffn=4.0)
    parts = instance_parts(at, cut, decode_load(at, cut, 8, cached=decode_residents(1000, 0)))
    assert float(parts.cache) == pytest.approx(8 * 1000 * (2 * 128 + 256) / at.cache_share, rel=1e-12)
    sent = 2 * 128 + 256
    assert float(unique_gpus(at.model, cut, 1000, at.precision)) == pytest.approx((2 * 4 * 128 + 256) / sent)


# Compressed attention.


def test_a_token_of_deepseek_v4_pro_at_262144():
    """30 CSA and 31 HCA layers: 0.302 + 1.074 and 0.570 GFLOP each, 58.96 in all."""
    csa, hca = (works(spec, context=262_144.0) for spec in (CSA, HCA))
    assert csa["main"].flops == 4 * 128 * 512 * (128 + 1024) == pytest.approx(0.302e9, rel=1e-3)
    assert csa["index"].flops == pytest.approx(1.074e9, rel=1e-3)
    assert hca["main"].flops == pytest.approx(0.570e9, rel=2e-3)
    whole = 30 * (csa["main"].flops + csa["index"].flops) + 31 * hca["main"].flops
    assert whole == pytest.approx(58.96e9, rel=1e-3)
    assert csa["main"].hbm_bytes == (128 + 1024) * 576
    assert csa["index"].hbm_bytes == 65_536 * 132
    assert hca["main"].hbm_bytes == (128 + 2048) * 576


def test_tensor_parallelism_cuts_queries_and_output_groups():
    block = layer_of(LayerKind(CSA, NoFfn())).attention
    recipe = load_precision("bf16").resolve(model_of(CSA))
    shapes = {op.name: op.shape[1:] for op in block.projections(BASE, recipe, 8.0, 1.0)}
    assert shapes["q_a, kv, entries"] == (1536 + 512 + 4 * 512 + 4 * 128 + 64, 7168)
    assert shapes["q_b"] == (16 * 512, 1536)
    assert shapes["o_a"] == (16 * 1024 / 8, 128 * 512 / 16)
    assert shapes["o_b"] == (7168, 16 * 1024 / 8)
    held = sum(n * k for n, k in shapes.values())
    assert held == pytest.approx(float(block.matmul_params(7168, 8.0)), rel=1e-12)
    at = at_of(CSA)
    wide = replace(at, system=replace(at.system, nvlink_domain=32))
    assert any("16 output groups" in reason for reason, _ in enumerate_mappings(wide, max_gpus=32).refused)


# All of them.


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_do_the_flop_of_the_whole_prompt(kind):
    whole = works(KINDS[kind], new=8192.0, past=0.0)
    parts = [works(KINDS[kind], new=1024.0, past=1024.0 * step) for step in range(8)]
    for name, work in whole.items():
        assert sum(part[name].flops for part in parts) == pytest.approx(work.flops, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_alone_is_timed_everywhere_and_longer_is_never_faster(kind):
    at = at_of(KINDS[kind])
    times = [float(decode_step(at, Sharding(), batch=32.0, context=c).ttl) for c in (100.0, 1e3, 1e4, 1e5, 1e6)]
    assert times == sorted(times)
    first = [float(prefill_pass(at, Sharding(), batch=1.0, isl=n).ftl) for n in (100.0, 1e3, 1e4, 1e5)]
    assert first == sorted(first)
    pieces = chunked_prefill_pass(at, Sharding(), batch=1.0, isl=20_000.0, chunk_tokens=2048.0)
    assert float(pieces.ftl) > 0
    resolved = at.precision
    assert kv_bytes_per_request(at.model, resolved, 5000) == KINDS[kind].sequence_bytes(5000, 1.0)


# Time of the parts.


def part_seconds(rate, *, new=1.0, past=0.0, heads=64.0, flops=1e9, sequences=1.0):
    shape = AttentionShape(sequences, new, past, heads, 1.0, 0.0, chosen=2048.0)
    return float(part_cost(Work(flops, 0.0), shape, rate).time)


def test_an_index_runs_only_where_there_is_something_to_choose():
    """A start of 20 us and 1e9 FLOP at 1e14 FLOP/s: 30 us from 2049 tokens on, nothing before."""
    rate = PartRate(1e14, 1e12, choice=20e-6)
    assert part_seconds(rate, past=2047.0) == 0
    assert part_seconds(rate, past=2048.0) == pytest.approx(30e-6)
    assert part_seconds(replace(rate, choice_until=10_000.0), past=10_000.0) == pytest.approx(10e-6)
    assert part_seconds(replace(rate, choice=None), past=0.0) == pytest.approx(10e-6)


def test_kernels_pad_heads_and_queries_to_tiles():
    """A quarter of a tile takes as long as a whole one, a tile and a bit as long as two."""
    rate = PartRate(1e14, 1e12, head_tile=64.0)
    assert part_seconds(rate, heads=16.0, flops=0.25e9) == part_seconds(rate) == pytest.approx(10e-6)
    assert part_seconds(replace(rate, head_tile=0.0), heads=16.0, flops=0.25e9) == pytest.approx(2.5e-6)
    rows = PartRate(1e14, 1e12, query_tile=64.0)
    assert part_seconds(rows, new=80.0, flops=80e9) == pytest.approx(part_seconds(rows, new=128.0, flops=128e9))


def test_one_sequence_walks_its_keys_and_small_kernels_take_their_time_a_token():
    """20 ns a key: 21 ms after a million tokens, whatever is new; 0.1 us a token of any sequence."""
    walk = PartRate(1e15, 1e13, key_walk=20e-9)
    assert part_seconds(walk, past=1_048_575.0) == pytest.approx(20e-9 * 2**20)
    small = PartRate(1e15, 1e13, t0=40e-6, token=1e-7)
    assert part_seconds(small, new=1000.0, sequences=4.0, flops=0.0) == pytest.approx(440e-6)


def test_few_heads_on_an_fp8_cache_take_another_kernel():
    """vLLM on Hopper: below 32 heads a token takes 0.75 us, as its kernel reads the whole list of keys."""
    told = {"engine": "vllm", "version": "", "points": 0, "median_error": 0.0, "p90_error": 0.0, "t0": 0.0}
    fit = AttentionPartFit(**told, kind="dsa", part="chosen", e_compute=0.5, few_heads=32.0, few_token=7.5e-7)
    fp8, bf16 = (part_rate(fit, load_system("h200_sxm"), cache) for cache in ("fp8", "bf16"))
    assert part_seconds(fp8, new=1000.0, heads=16.0) == pytest.approx(750e-6)
    assert part_seconds(fp8, new=1000.0, heads=32.0) == part_seconds(bf16, new=1000.0, heads=16.0) < 10e-6
