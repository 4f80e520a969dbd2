"""Kinds of layers: parameters, cache and state counted by hand, patterns of layers, and what a wrong file is told."""

from pathlib import Path

import pytest

from disagg_sim.errors import SpecError
from disagg_sim.facts.attention import GqaAttention
from disagg_sim.facts.linear_attention import GdnAttention, KdaAttention
from disagg_sim.facts.model import model_of
from disagg_sim.facts.sparse_attention import CsaAttention, DsaAttention, HcaAttention
from disagg_sim.facts.yaml_text import parse_yaml

HEAD = """\
title: Toy
hidden: 64
vocab: 1000
tied_embeddings: false
max_context: 4096
max_context_sure: true
source: "a test"
attention:
  full: {kind: gqa, q_heads: 4, kv_heads: 2, head_dim: 16}
  mamba: {kind: mamba2, heads: 8, head_dim: 16, state_dim: 32, groups: 2}
ffn:
  dense: {kind: dense, width: 128}
  moe: {kind: moe, experts: 8, top_k: 2, width: 32}
"""


def toy(layers: str, **more: str):
    lines = "".join(f"{key}: {value}\n" for key, value in more.items())
    path = Path("toy.yaml")
    return model_of(path, parse_yaml(f"{HEAD}{lines}layers: {layers}\n"), "toy")


def test_a_pattern_mixes_any_kinds_and_may_leave_a_part_out():
    model = toy(
        "[{count: 2, pattern: [mamba + none, none + moe, full + dense]}, {count: 1, attention: full, ffn: none}]"
    )
    assert [(layer.attention.kind, layer.ffn.kind) for layer in model.layers] == [
        ("mamba2", "none"),
        ("none", "moe"),
        ("gqa", "dense"),
    ] * 2 + [("gqa", "none")]
    assert model.kind_counts == (2, 2, 2, 1)
    assert model.attention_kinds == ("mamba2", "gqa")


def test_a_layer_of_one_operator_has_one_norm():
    """Split into two layers, attention and FFN keep their parameters: one norm each either way."""
    whole, split = (
        toy("[{count: 3, attention: full, ffn: dense}]"),
        toy("[{count: 3, pattern: [full + none, none + dense]}]"),
    )
    assert split.total_params == whole.total_params
    assert split.linear_params_per_token == whole.linear_params_per_token
    assert split.kv_elements_per_token() == whole.kv_elements_per_token() == 3 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ("[{count: 1, pattern: [full dense]}]", "names no layer; allowed: 'ATTENTION + FFN', either may be 'none'"),
        ("[{count: 1, attention: none, ffn: none}]", "has neither attention nor ffn"),
        ("[{count: 1, attention: full}]", "needs either 'attention' and 'ffn', or 'pattern'"),
    ],
)
def test_a_wrong_layer_is_told_in_one_line(layers, fault):
    with pytest.raises(SpecError) as refusal:
        toy(layers)
    assert fault in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_keys_of_a_new_kind_are_checked_with_the_nearest():
    path = Path("toy.yaml")
    text = (
        HEAD.replace("state_dim: 32", "state_dims: 32, state: fp16")
        + "layers: [{count: 1, attention: full, ffn: dense}]\n"
    )
    with pytest.raises(SpecError) as refusal:
        model_of(path, parse_yaml(text), "toy")
    told = str(refusal.value)
    assert "attention.mamba: unknown key 'state_dims', did you mean 'state_dim'?" in told
    assert "attention.mamba.state: 'fp16' is unknown, did you mean 'bf16'?; allowed: fp32, bf16" in told


# Sizes of shipped checkpoints; each count stands beside its own arithmetic.


def test_gated_delta_net_of_qwen_3_5():
    """397B: qkvz 4096*(2*16*128 + 2*64*128), beta and decay 4096*128, out 8192*4096; state 64 matrices of 128x128."""
    spec = GdnAttention(key_heads=16, value_heads=64, key_dim=128, value_dim=128)
    assert spec.matmul_params(4096) == 4096 * (4096 + 16384) + 4096 * 128 + 8192 * 4096 == 117_964_800
    assert spec.other_params(4096) == 4 * 12_288 + 2 * 64 + 128
    assert spec.state_bytes == 4 * 64 * 128 * 128 + 2 * 3 * 12_288 == 4_194_304 + 73_728
    assert 45 * spec.state_bytes == 192_061_440
    half = GdnAttention(key_heads=16, value_heads=64, key_dim=128, value_dim=128, state="bf16")
    assert spec.state_bytes - half.state_bytes == 2 * 64 * 128 * 128
    assert spec.stores(1.0) == ()


def test_states_beside_published_figures():
    """A sequence of Qwen3.5-27B: 78.4 MB (LLMServingSim); five slots of Kimi-K3 at TP 8: 270 MB (AIConfigurator).

    The first keeps states in bf16, convolutions included; the second in fp32, convolutions apart.
    """
    small = GdnAttention(key_heads=16, value_heads=48, key_dim=128, value_dim=128, state="bf16")
    assert 48 * small.state_bytes == pytest.approx(78.4e6, rel=1e-3)
    large = KdaAttention(heads=96, head_dim=128)
    convolution = 3 * 3 * 96 * 128 * 2
    assert 5 * 69 * (large.state_bytes - convolution) / 8 == pytest.approx(270e6, rel=5e-3)


def test_the_indexer_of_deepseek_v3_2():
    """Queries 1536 x 64*128, a key 7168 x 128, weights of heads 7168 x 64; 656 B a token in fp8, 132 of index."""
    sizes = {"q_heads": 128, "q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    own, lent = (
        DsaAttention(**sizes, index_heads=64, index_dim=128, top_k=2048, shared_index=shared)
        for shared in (False, True)
    )
    assert own.matmul_params(7168) - lent.matmul_params(7168) == 1536 * 8192 + 7168 * (128 + 64)
    assert [store.token_bytes for store in own.stores(1.0)] == [656, 132]
    assert [store.token_bytes for store in own.stores(2.0)] == [1152, 132]
    assert [store.token_bytes for store in lent.stores(1.0)] == [656]
    assert 78 * 656 + 21 * 132 == 51_168 + 2_772  # GLM-5.2 in fp8


def test_compressed_attention_of_deepseek_v4():
    """V4-Pro at 262,144 tokens: 30 CSA and 31 HCA layers hold 1.43 GB, a window of 128 and entries of 576 B."""
    sizes = {"q_heads": 128, "q_rank": 1536, "head_dim": 512, "rope_dim": 64, "output_rank": 1024, "output_groups": 16}
    csa = CsaAttention(**sizes, window=128, ratio=4, index_heads=64, index_dim=128, top_k=1024)
    hca, window = (HcaAttention(**sizes, window=128, ratio=ratio) for ratio in (128, 0))
    tokens = 262_144
    cached = [spec.sequence_bytes(tokens, 1.0) - spec.state_bytes for spec in (csa, hca, window)]
    assert cached == [128 * 576 + tokens / 4 * (576 + 132), 128 * 576 + tokens / 128 * 576, 128 * 576]
    assert 30 * cached[0] + 31 * cached[1] == pytest.approx(1.433e9, rel=1e-3)
    shared = 7168 * (1536 + 512) + 1536 * 65_536 + 65_536 * 1024 + 16 * 1024 * 7168
    assert window.matmul_params(7168) == shared
    assert hca.matmul_params(7168) - shared == 2 * 7168 * 512
    assert csa.matmul_params(7168) - shared == 4 * 7168 * 512 + 1536 * 8192 + 4 * 7168 * 128 + 7168 * 64


def test_gates_and_value_sizes_of_grouped_queries():
    """MiMo caches 192 + 128 a KV head; Qwen's gate is as wide as the output, Step's one number a head."""
    mimo = GqaAttention(q_heads=64, kv_heads=4, head_dim=192, value_dim=128)
    assert mimo.cache_elements == 4 * 320
    assert mimo.matmul_params(4096) == 4096 * (64 * 192 + 4 * 320) + 64 * 128 * 4096
    plain, by_head, by_element = (
        GqaAttention(q_heads=32, kv_heads=2, head_dim=256, output_gate=gate).matmul_params(4096)
        for gate in ("none", "head", "element")
    )
    assert (by_head - plain, by_element - plain) == (4096 * 32, 4096 * 32 * 256)
    gemma = GqaAttention(q_heads=32, kv_heads=4, head_dim=512, values_from_keys=True)
    assert gemma.matmul_params(5376) == 5376 * (2 * 32 + 4) * 512
    assert gemma.cache_elements == 2 * 4 * 512
