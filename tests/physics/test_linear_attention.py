"""Linear attention: a state of each sequence in place of a cache, by hand for Qwen3.5, Kimi K3 and Nemotron-3."""

from dataclasses import replace

import pytest

from disagg_sim.domain import Sharding
from disagg_sim.facts.attention import GqaAttention
from disagg_sim.facts.ffn import DenseFfn, NoFfn
from disagg_sim.facts.layers import LayerKind
from disagg_sim.facts.linear_attention import GdnAttention, KdaAttention, Mamba2Attention
from disagg_sim.facts.load import load_model, load_precision
from disagg_sim.facts.sparse_attention import CsaAttention, HcaAttention
from disagg_sim.physics.blocks import layer_of
from disagg_sim.physics.blocks.linear import delta_scan_flops
from disagg_sim.physics.counts import decode_work, prefill_work
from disagg_sim.physics.kv_transfer import checkpoint_tokens, descriptors, kv_bytes_per_request, unique_gpus
from disagg_sim.physics.memory import instance_parts
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.residents import decode_load, decode_residents
from disagg_sim.physics.setup import setup
from disagg_sim.search.mappings import enumerate_mappings

BASE = load_model("llama_3_1_8b")
GDN = GdnAttention(key_heads=16, value_heads=64, key_dim=128, value_dim=128)  # Qwen3.5-397B
KDA = KdaAttention(heads=96, head_dim=128, full_rank_gate=True)  # Kimi K3
MAMBA = Mamba2Attention(heads=128, head_dim=64, state_dim=128, groups=8)  # Nemotron-3-Super
KINDS = {"gdn": GDN, "kda": KDA, "mamba2": MAMBA}
FULL = GqaAttention(q_heads=32, kv_heads=2, head_dim=128)
STATE = 4 * 64 * 128 * 128 + 2 * 3 * 12_288  # of a GDN layer and sequence [B]


def model_of(*specs, ffn=None):
    ffn = DenseFfn(width=4096) if ffn is None else ffn
    return replace(BASE, name="toy", layers=tuple(LayerKind(spec, ffn) for spec in specs), max_context=1_048_576)


def at_of(*specs, profile="measured", system="h200_sxm", engine="vllm"):
    at = setup(model_of(*specs), system, "bf16", profile=profile, engine=engine)
    return replace(at, overheads=None, profile=replace(at.profile, host=0.0))


@pytest.mark.parametrize(
    ("kind", "step", "scan"),
    [
        ("gdn", 7 * 64 * 128 * 128, 64 * 182_954.67),
        ("kda", 8 * 96 * 128 * 128, 96 * 182_954.67),
        ("mamba2", 5 * 128 * 64 * 128, 128 * (4 * 64 * 128 + 2 * 128 * 64) + 8 * 2 * 128 * 128),
    ],
)
def test_flop_of_a_token(kind, step, scan):
    """The recurrence costs a few FLOP an element of the state; a chunked scan costs more of them on tensor cores."""
    model = model_of(KINDS[kind], ffn=NoFfn())
    one, many = (decode_work(model, context=length, batch=3) for length in (10, 100_000))
    assert one["recurrent step"].flops == many["recurrent step"].flops == 3 * step
    assert prefill_work(model, isl=1000)["scan"].flops == pytest.approx(1000 * scan, rel=1e-6)


def test_a_scan_reads_and_writes_what_passes_through_it_and_its_state_twice():
    """In bf16: queries, keys, values and outputs; of KDA a decay of each row, too. States of 64 prompts in fp32."""
    passed = {"gdn": 2 * 16 * 128 + 2 * 64 * 128, "kda": 5 * 96 * 128}
    for kind, elements in passed.items():
        scan = prefill_work(model_of(KINDS[kind], ffn=NoFfn()), isl=1000, batch=64)["scan"]
        states = 64 * KINDS[kind].state_elements * 4
        assert scan.hbm_bytes == pytest.approx(64_000 * 2 * elements + 2 * states, rel=1e-12)


def test_a_chunk_of_one_token_is_nearly_the_recurrence():
    assert delta_scan_flops(128, 128, 1) / (6 * 128 * 128) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_moves_every_state_twice_and_nothing_else(kind):
    """Bytes of the recurrence and of the convolution are the state in and out, whatever the context."""
    model = model_of(KINDS[kind], ffn=NoFfn())
    work = decode_work(model, context=50_000, batch=7)
    moved = work["recurrent step"].hbm_bytes + work["convolution step"].hbm_bytes
    assert moved == pytest.approx(7 * 2 * KINDS[kind].state_bytes, rel=1e-12)


def test_an_ideal_step_of_64_sequences_takes_the_time_of_their_states():
    """45 layers of Qwen3.5-397B: 64 x 192 MB in and out at 4.8 TB/s are 5.1 ms, at TP 8 an eighth of it."""
    at = at_of(*[GDN] * 45, profile="ideal")
    alone = replace(at, rates=replace(at.rates, adjust=lambda op, cost: cost * float(op.kind == "attention_part")))
    times = [
        float(decode_step(alone, Sharding(tp_attn=tp, tp_ffn=tp), batch=64.0, context=1e4).ttl) for tp in (1.0, 8.0)
    ]
    assert times[0] == pytest.approx(64 * 2 * 45 * STATE / at.system.hbm_bandwidth, rel=1e-9)
    assert times[0] == pytest.approx(5.1e-3, rel=0.01)
    assert times[1] == pytest.approx(times[0] / 8, rel=1e-9)


def test_few_sequences_wait_for_the_walk_over_their_chunks():
    """One prompt of 32,768 tokens under FlashInfer's kernel: some 47 ns a token, four times what 64 heads multiply."""
    at = at_of(GDN)
    (scan,) = [rate for name, rate in at.rates.attention_parts.items() if name == "gdn scan"]
    assert 20e-9 < scan.walk < 100e-9
    alone = replace(at, rates=replace(at.rates, adjust=lambda op, cost: cost * float(op.name == "scan")))
    one, four = (float(prefill_pass(alone, Sharding(), batch=b, isl=32_768.0).ftl) for b in (1.0, 2.0))
    assert one == pytest.approx(scan.t0 + 32_768 * scan.walk, rel=1e-9)
    assert four < 2 * one


# Memory, hand-over, mappings.


def test_states_are_of_a_sequence_and_caches_of_a_token():
    at, tokens = at_of(GDN, GDN, GDN, FULL), 5000
    cache = 2 * 2 * 128 * 2  # of the one layer of full attention in bf16 [B a token]
    assert kv_bytes_per_request(at.model, at.precision, tokens) == 3 * STATE + cache * tokens
    assert at.model.kv_bytes_per_token(at.precision) == cache
    assert at.model.state_bytes == 3 * STATE
    assert not at.model.linear_cache
    load = decode_load(at, Sharding(), 16, cached=decode_residents(4000, 0))
    parts = instance_parts(at, Sharding(), load)
    assert float(parts.state) == pytest.approx(16 * 3 * STATE, rel=1e-12)
    assert float(parts.cache) == pytest.approx(16 * 4000 * cache / at.cache_share, rel=1e-12)


def test_a_sequence_has_a_descriptor_for_each_state_beside_its_blocks():
    assert descriptors(model_of(GDN, GDN, GDN, FULL), 160, 16) == 3 + 2 * 10


@pytest.mark.parametrize("tp", [1, 4, 16])
def test_states_are_cut_by_heads(tp):
    """2 KV heads fill two GPUs, the states of 16 key heads all 16: each sends its own part."""
    at = at_of(GDN, GDN, GDN, FULL)
    cut = Sharding(tp_attn=float(tp), tp_ffn=float(tp))
    parts = instance_parts(at, cut, decode_load(at, cut, 16, cached=decode_residents(4000, 0)))
    assert float(parts.state) == pytest.approx(16 * 3 * STATE / tp, rel=1e-12)
    cache = 2 * 2 * 128 * 2 * 4000
    sent = 3 * STATE / tp + cache / min(tp, 2)
    assert float(unique_gpus(at.model, cut, 4000, at.precision)) == pytest.approx((3 * STATE + cache) / sent, rel=1e-12)


def test_groups_of_mamba_are_copied_where_there_are_fewer_than_gpus():
    block = layer_of(LayerKind(MAMBA, NoFfn())).attention
    assert float(block.channels(8.0)) == 8192 / 8 + 2 * 128
    assert float(block.channels(16.0)) == 8192 / 16 + 2 * 128
    assert float(block.state_bytes(16.0)) == 4 * 8192 * 128 / 16 + 2 * 3 * (8192 / 16 + 2 * 128)


def test_mappings_ask_the_key_heads():
    at = at_of(GDN, FULL)
    wide = replace(at, system=replace(at.system, nvlink_domain=32))
    table = enumerate_mappings(wide, max_gpus=32)
    assert {m.tp_attn for m in table} == {1, 2, 4, 8, 16}
    assert any(reason == "tp_attn does not divide 16 heads of a recurrent state" for reason, _ in table.refused)


def test_projections_of_kimi_k3_on_eight_gpus():
    """12 of 96 heads: 5 x 1536 columns with the gate of full rank, beta 12; the decay's first matrix is whole."""
    block = layer_of(LayerKind(KDA, NoFfn())).attention
    precision = load_precision("bf16").resolve(model_of(KDA))
    model = replace(BASE, hidden=7168)
    shapes = {op.name: op.shape[1:] for op in block.projections(model, precision, 8.0, 1.0)}
    assert shapes["qkv, beta, gate"] == (4 * 1536 + 12, 7168)
    assert shapes["decay and gate into rank"] == (128, 7168)
    assert shapes["decay out of rank"] == (1536, 128)
    held = sum(n * k for n, k in shapes.values())
    assert held == pytest.approx(float(block.matmul_params(7168, 8.0)), rel=1e-12)


# Prefixes.


def test_entries_of_several_tokens_are_cached_whole():
    v4 = {"q_heads": 64, "q_rank": 512, "head_dim": 512, "rope_dim": 64, "output_rank": 512, "output_groups": 8}
    csa = CsaAttention(**v4, window=128, ratio=4, index_heads=8, index_dim=128, top_k=64)
    hca = HcaAttention(**v4, window=128, ratio=128)
    at = setup(model_of(csa, hca), "h200_sxm", "bf16", profile="ideal")
    assert checkpoint_tokens(at.model, at.precision) == 128
