"""Any mix of kinds makes a model: what they multiply, hold and take is the sum of what each does alone.

Limits: layers split into their operators, a window as long as the context, chunks, sizes that are equal by default.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.facts.attention import GqaAttention, MlaAttention, NoAttention
from disagg_sim.facts.ffn import DenseFfn, MoeFfn, NoFfn
from disagg_sim.facts.layers import LayerKind
from disagg_sim.facts.load import load_model, load_precision
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.physics.blocks import layer_of
from disagg_sim.physics.counts import decode_work, prefill_work
from disagg_sim.physics.memory import instance_parts, weight_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.layers import attention_side
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.residents import decode_load, decode_residents
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import Tokens, chunk_pairs

BASE = load_model("llama_3_1_8b")
BF16 = load_precision("bf16")
GQA = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
DENSE = DenseFfn(width=14336)


def model_of(*layers):
    return replace(BASE, name="toy", layers=tuple(LayerKind(*layer) for layer in layers))


def at_of(model, **options):
    """Bare kernels on an H100, whose fits time them, without host."""
    at = replace(setup(model, "h100_sxm", "bf16", **options), overheads=None)
    return replace(at, profile=replace(at.profile, host=0.0))


def seconds(model) -> tuple[float, float]:
    """A decode step, and a prefill, on two GPUs."""
    at, cut = at_of(model), Sharding(tp_attn=2.0, tp_ffn=2.0)
    step = decode_step(at, cut, batch=16.0, context=3000.0).ttl
    return float(step), float(prefill_pass(at, cut, batch=2.0, isl=3000.0).ftl)


def test_layers_split_into_their_operators_take_as_long_and_weigh_as_much():
    """A layer of one part has half of the norms and residuals; a floor of elementwise kernels is one a layer."""
    whole = model_of(*[(GqaAttention(**GQA), DENSE)] * 4)
    split = model_of(*[(GqaAttention(**GQA), NoFfn()), (NoAttention(), DENSE)] * 4)
    assert split.total_params == whole.total_params
    floor = at_of(whole).profile.elementwise_latency
    for one, two in zip(seconds(whole), seconds(split), strict=True):
        assert two - one == pytest.approx(4 * floor, rel=1e-9)
    resolved = BF16.resolve(whole)
    assert weight_bytes(split, resolved) == pytest.approx(weight_bytes(whole, resolved), rel=1e-12)
    for count in (lambda model: prefill_work(model, isl=512), lambda model: decode_work(model, context=512, batch=8)):
        assert count(split).flops == count(whole).flops
        assert count(split).hbm_bytes == pytest.approx(count(whole).hbm_bytes, rel=1e-12)


def test_a_model_of_many_kinds_is_the_sum_of_its_layers():
    """Times of layers add up, ends apart, in whatever order they stand."""
    kinds = [
        (GqaAttention(**GQA), DENSE),
        (GqaAttention(**GQA, window=256), MoeFfn(experts=8, top_k=2, width=2048)),
        (NoAttention(), MoeFfn(experts=8, top_k=2, width=2048)),
        (GqaAttention(**GQA, output_gate="element"), NoFfn()),
    ]
    mixed = np.array(seconds(model_of(*kinds)))
    alone = sum(np.array(seconds(model_of(*[kind] * 4))) for kind in kinds)
    assert mixed == pytest.approx(alone / 4, rel=1e-12)
    assert seconds(model_of(*reversed(kinds))) == pytest.approx(mixed, rel=1e-12)


def test_a_layer_without_attention_caches_nothing_and_takes_any_degree():
    model = model_of((GqaAttention(**GQA), NoFfn()), *[(NoAttention(), DENSE)] * 3)
    assert model.kv_elements_per_token() == 2 * 8 * 128
    assert layer_of(model.kinds[1]).attention.rejects(7) is None
    parts = instance_parts(
        at_of(model), Sharding(), decode_load(at_of(model), Sharding(), 4, cached=decode_residents(100, 0))
    )
    assert float(parts.cache) == 4 * 100 * 2 * 8 * 128 * 2
    assert float(parts.state) == 0


# Every kind.


def attention_kinds():
    """A layer of every kind of attention with and without a window, and a model that has it."""
    models = [load_model(name) for name in list_specs("model")]
    layers = [(kind, model) for model in models for kind in model.kinds if kind.attention.kind != "none"]
    return {(kind.attention.kind, getattr(kind.attention, "window", 0) > 0): (kind, model) for kind, model in layers}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_sequences_and_drafts_add_up(phase):
    """Five sequences of three tokens each score as fifteen alone; caches are read once to three times for the three."""

    def works(block, precision, *counts):
        names = ("decodes", "queries", "context") if phase == "decode" else ("prompts", "new", "past")
        found = getattr(block, phase)(precision, 1.0, Tokens(**dict(zip(names, counts, strict=True))), "auto")[0]
        return np.array([(op.work.flops, op.work.hbm_bytes) for op in found if "kv_b" not in op.name]).T

    for kind, model in attention_kinds().values():
        block, precision = layer_of(kind).attention, load_precision("fp8").resolve(model)
        flops, moved = works(block, precision, 5.0, 3.0, 20_000.0)
        if phase == "prefill":
            one = works(block, precision, 1.0, 3.0, 20_000.0)
            assert np.array([flops, moved]) == pytest.approx(5 * one, rel=1e-12)
            continue
        alone = [works(block, precision, 1.0, 1.0, 20_000.0 + place) for place in range(3)]
        assert flops == pytest.approx(5 * sum(each[0] for each in alone), rel=1e-4)
        assert (5 * alone[0][1] <= moved).all()
        assert (moved <= 5 * sum(each[1] for each in alone)).all()


# Grouped queries.


@given(window=st.integers(1, 5000), context=st.integers(1, 5000), new=st.integers(1, 300))
def test_a_window_as_long_as_the_context_is_full_attention(window, context, new):
    full, cut = (layer_of(LayerKind(GqaAttention(**GQA, window=w), DENSE)).attention for w in (0, window))
    steps, prompts = (
        Tokens(decodes=4.0, context=float(context)),
        Tokens(prompts=2.0, new=float(new), past=float(context)),
    )
    works = [
        (
            block.decode(BF16.resolve(BASE), 1.0, steps, "auto")[0][0].work,
            block.prefill(BF16.resolve(BASE), 1.0, prompts, "auto")[0][0].work,
        )
        for block in (full, cut)
    ]
    for index, least in enumerate((context, context + new)):
        whole, seen = works[0][index], works[1][index]
        if window >= least:
            assert seen == whole
        else:
            assert seen.flops < whole.flops


@given(new=st.integers(1, 60), past=st.integers(0, 60), chunk=st.integers(1, 40))
def test_pairs_of_chunks_are_counted_token_by_token(new, past, chunk):
    assert chunk_pairs(new, past, chunk) == sum(position % chunk + 1 for position in range(past, past + new))


def test_a_chunk_sees_half_of_itself_in_decode_and_keeps_all_of_it():
    spec = GqaAttention(**GQA, chunk=8192)
    block = layer_of(LayerKind(spec, DENSE)).attention
    work = block.decode(BF16.resolve(BASE), 1.0, Tokens(decodes=1.0, context=100_000.0), "auto")[0][0].work
    assert work.hbm_bytes == 4096 * 2 * 8 * 128 * 2
    assert spec.sequence_bytes(100_000, 2.0) == 8192 * 2 * 8 * 128 * 2


def test_keys_and_values_of_unlike_size():
    """MiMo-V2-Flash at TP 4: one KV head of 192 + 128, 16 query heads; 2*16*(192 + 128) FLOP a pair."""
    spec = GqaAttention(q_heads=64, kv_heads=4, head_dim=192, value_dim=128)
    block, precision = layer_of(LayerKind(spec, DENSE)).attention, BF16.resolve(BASE)
    op = block.decode(precision, 4.0, Tokens(decodes=1.0, context=1000.0), "auto")[0][0]
    assert op.work.flops == 2 * 16 * 320 * 1000
    assert op.work.hbm_bytes == 320 * 1000 * 2
    qkv, out = block.projections(BASE, precision, 4.0, 10.0)
    assert qkv.shape == (10.0, 16 * 192 + 320, 4096)
    assert out.shape == (10.0, 4096, 16 * 128)
    assert block.matmul_params(4096, 4.0) == 4096 * (16 * 192 + 320 + 16 * 128)
    assert 4 * block.matmul_params(4096, 4.0) == spec.matmul_params(4096)


def test_an_output_gate_is_more_columns_of_the_first_projection():
    precision = BF16.resolve(BASE)
    columns = [
        layer_of(LayerKind(GqaAttention(**GQA, output_gate=gate), DENSE))
        .attention.projections(BASE, precision, 8.0, 1.0)[0]
        .shape[1]
        for gate in ("none", "head", "element")
    ]
    assert columns == [6 * 128, 6 * 128 + 4, 6 * 128 + 512]


def test_latent_attention_without_a_query_latent_and_with_a_gate():
    """Kimi Linear projects its 32 queries of 192 at once; Kimi K3 has a gate as wide as its values."""
    sizes = {"q_heads": 32, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    block = layer_of(LayerKind(MlaAttention(**sizes, q_rank=0, output_gate=True), DENSE)).attention
    at = setup("deepseek_r1", "h100_sxm", "bf16")
    ops = {op.name: op.shape for op in block.projections(at.model, at.precision, 4.0, 7.0)}
    assert ops["q, kv_a"] == (7.0, 8 * 192 + 576, 7168)
    assert ops["gate"] == (7.0, 8 * 128, 7168)
    assert "q_b" not in ops
    assert float(block.matmul_params(7168, 4.0)) == 7168 * 576 + (block.spec.matmul_params(7168) - 7168 * 576) / 4


def test_a_draft_passes_the_products_of_absorbed_attention_as_another_sequence_does():
    at = setup("deepseek_r1", "h200_sxm", "fp8")
    rows = (Tokens(decodes=count, queries=new, context=1000.0) for count, new in ((64.0, 2.0), (128.0, 1.0)))
    verified, decoded = (attention_side(at, 1.0, tokens, "auto", "decode", core=False).layers for tokens in rows)
    assert verified == decoded


# Experts.

LATENT = MoeFfn(experts=64, top_k=4, width=1024, latent=512, matrices=2, shared_experts=1, shared_width=2048)


def test_experts_of_two_matrices_in_a_latent():
    """4 picks x 2 matrices of 512 x 1024, a way into the latent and back, a shared expert of two matrices."""
    work = prefill_work(model_of((NoAttention(), LATENT)), isl=100)
    assert work["routed experts"].flops == 100 * 4 * 2 * 2 * 512 * 1024
    assert work["into latent"].flops == work["out of latent"].flops == 100 * 2 * 4096 * 512
    assert work["shared up"].flops == work["shared down"].flops == 100 * 2 * 4096 * 2048


def test_a_latent_is_what_goes_over_the_wire():
    """Nemotron-3-Super sends 1024 elements of a token instead of 4096: a fourth of the bytes."""
    wide, small = (replace(LATENT, latent=latent) for latent in (0, 1024))
    spread = Sharding(dp_attn=8.0, ep=8.0)
    wire = [
        float(
            decode_step(
                at_of(model_of((NoAttention(), ffn)), profile="ideal"), spread, batch=4096.0, context=1.0
            ).sums.communication
        )
        for ffn in (wide, small)
    ]
    assert wire[0] == pytest.approx(4 * wire[1], rel=1e-9)


def test_a_dense_layer_beside_the_experts_adds_its_weights_and_flop():
    plain, both = MoeFfn(experts=8, top_k=2, width=512), MoeFfn(experts=8, top_k=2, width=512, dense_width=2048)
    alone, more = (model_of((NoAttention(), ffn)) for ffn in (plain, both))
    added = 3 * 4096 * 2048
    assert more.total_params - alone.total_params == added
    assert prefill_work(more, isl=10).flops - prefill_work(alone, isl=10).flops == 10 * 2 * added
    resolved = BF16.resolve(alone)
    assert weight_bytes(more, resolved) - weight_bytes(alone, resolved) == 2 * added
    assert layer_of(more.kinds[0]).ffn.rejects(Sharding(tp_attn=3)) == "tp_attn does not divide the dense width 2048"


def test_residual_streams_are_read_and_written_by_each_part():
    """DeepSeek-V4 carries four: 2 parts x 4 streams x 4096 elements, read and written in bf16, 131 kB a token more."""
    one = model_of((GqaAttention(**GQA), DENSE))
    four = replace(one, residual_streams=4)
    works = [prefill_work(model, isl=10)["elementwise"].hbm_bytes for model in (one, four)]
    assert works[1] - works[0] == 10 * 2 * 4 * 4096 * 4
    assert four.total_params - one.total_params == 2 * (24 * (4 * 4096 + 1) + 3) + 4 * (4 * 4096 + 1) + 1
