"""Terms of the memory of a GPU, each by hand, and that of servers at their start."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from cases import cached_setting

from disagg_sim.domain import Sharding
from disagg_sim.errors import SpecError
from disagg_sim.facts.engine import EngineMemory, engine_of
from disagg_sim.facts.load import load_engine, load_model, load_precision
from disagg_sim.facts.yaml_files import find_file, read_mapping
from disagg_sim.physics.blocks import layer_of
from disagg_sim.physics.memory import (
    activation_bytes,
    communication_bytes,
    decode_bytes,
    instance_bytes,
    instance_parts,
    layer_weight_bytes,
    non_torch_bytes,
    position_bytes,
    prefill_bytes,
    profiled_bytes,
)
from disagg_sim.physics.residents import CachedTokens, Residents, decode_load, decode_residents, prompt_residents
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.units import GB, GIB

IDLE = Residents(sequences=0.0, tokens=0.0, live=0.0, live_total=0.0, emitted=0.0)
FIXED = 3.9 * GB  # runtime and communication library


def weights(name: str, recipe: str, **degrees: float) -> float:
    """Bytes of an instance that serves nothing, without the fixed part. [B]"""
    return float(instance_bytes(setup(name, "gb200_nvl72", recipe, "ideal"), Sharding(**degrees), IDLE)) - FIXED


@pytest.mark.parametrize(
    "name", ["llama_3_1_70b", "deepseek_r1", "gpt_oss_120b", "opt_30b", "qwen3_32b", "glm_4_5", "qwen3_5_35b_a3b"]
)
def test_bf16_weights_on_one_gpu_are_two_bytes_a_parameter(name):
    """To the last one: the norm before the head and the biases of routers, too."""
    assert weights(name, "bf16") == pytest.approx(2 * load_model(name).total_params, rel=1e-12)


def test_the_last_stage_holds_the_final_norm():
    """Llama-70B over 80 stages: 8,192 bf16 weights beside one layer and the head, as at the first beside the table."""
    model = load_model("llama_3_1_70b")
    layer = (2 * 8192 * 64 * 128 + 2 * 8192 * 8 * 128 + 3 * 8192 * 28_672 + 2 * 8192) * 2
    assert weights("llama_3_1_70b", "bf16", pp=80.0) == layer + 2 * model.vocab * 8192 + 2 * 8192


def test_fp8_checkpoint_of_llama_keeps_embedding_and_head_in_bf16():
    """68.45e9*1 + 2*1.0507e9*2 = 72.65e9 B."""
    assert weights("llama_3_1_70b", "fp8") == pytest.approx(72.65e9, rel=1e-4)


def test_an_encoder_of_images_lies_on_the_first_stage_in_bf16():
    """438,958,080 parameters of Mistral Small 3.1, sharded by TP; the fullest of two stages is the last, with norm."""
    name, encoder = "mistral_small_3_1_24b", 2 * 438_958_080
    model = load_model(name)
    assert weights(name, "bf16") == pytest.approx(2 * model.total_params + encoder, rel=1e-12)
    half = 2 * (model.total_params - 2 * model.embedding_params - model.hidden) / 2 + 2 * model.embedding_params
    assert weights(name, "bf16", pp=2.0) == pytest.approx(half + encoder, rel=1e-12)
    norms = 2 * model.hidden * (2 * len(model.layers) + 1)  # whole on both ranks
    assert weights(name, "bf16", tp_attn=2.0, tp_ffn=2.0) == pytest.approx(model.total_params + norms / 2 + encoder / 2)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_cuts_everything_but_norms(tp):
    norms = (80 * 2 + 1) * 8192 * 2
    whole, rank = weights("llama_3_1_70b", "fp8"), weights("llama_3_1_70b", "fp8", tp_attn=tp, tp_ffn=tp)
    assert rank == pytest.approx((whole - norms) / tp + norms, rel=1e-12)


def test_tensor_parallelism_above_the_kv_heads_repeats_their_projections():
    model = load_model("llama_3_1_70b")
    layer, precision = layer_of(model.kinds[0]), load_precision("fp8").resolve(model)
    at_8, at_16 = (layer_weight_bytes(model, layer, precision, Sharding(tp_attn=n, tp_ffn=n)) for n in (8, 16))
    norms, one_kv_head = 2 * 8192 * 2, 2 * 128 * 8192
    assert at_16 == pytest.approx((at_8 - norms - one_kv_head) / 2 + one_kv_head + norms, rel=1e-12)


def test_r1_under_dp_attention_and_ep64():
    """Attention whole 11.4 GB (fp8), experts 5.75, shared and dense 2.1, head and embedding 3.7, routers 0.2."""
    held = weights("deepseek_r1", "nvfp4_fp8kv", dp_attn=64.0, ep=64.0)
    by_hand = (
        61 * 187_105_280
        + 0.5625 * (58 * 4 * 44_040_192 + 58 * 44_040_192 + 3 * 3 * 7168 * 18_432)
        + 2 * (2 * 129_280 * 7168 + 58 * (7168 + 1) * 256 + 61 * (2 * 7168 + 2048) + 7168)
    )
    assert held == pytest.approx(by_hand, rel=1e-12)


def test_expert_tensor_parallelism_cuts_experts_like_ep():
    by_ep = weights("deepseek_r1", "fp8", dp_attn=8.0, ep=8.0)
    by_tp = weights("deepseek_r1", "fp8", dp_attn=8.0, tp_ffn=8.0)
    mixed = weights("deepseek_r1", "fp8", dp_attn=8.0, ep=4.0, tp_ffn=2.0)
    assert by_ep == by_tp == mixed


def test_the_fullest_stage_counts():
    """80 layers in 4 stages of 20, embedding on the first and head on the last: a quarter of the layers and one end."""
    table, head = 2 * 8192 * 128_256, 2 * 8192 * (128_256 + 1)  # with the final norm
    layers = weights("llama_3_1_70b", "fp8") - table - head
    assert weights("llama_3_1_70b", "fp8", pp=4.0) == pytest.approx(layers / 4 + head, rel=1e-12)


def test_tied_embeddings_are_held_once_or_at_both_ends():
    """OPT-30B ties head and embedding; a pipeline needs the table on its first and on its last stage."""
    model = load_model("opt_30b")
    layers = 2 * (model.total_params - model.embedding_params - 2050 * 7168)
    table, positions = 2 * 50_272 * 7168, 2 * 2050 * 7168
    assert weights("opt_30b", "bf16") == pytest.approx(layers + table + positions, rel=1e-5)
    assert weights("opt_30b", "bf16", pp=2.0) == pytest.approx(layers / 2 + table + positions, rel=1e-5)


def test_activations_of_an_8k_step_of_llama_at_tp4():
    """8192*2*(4*8192 + 2*28,672/4) = 0.77 GB."""
    live = Residents(sequences=1.0, tokens=0.0, live=8192.0, live_total=8192.0, emitted=0.0)
    mapping = Sharding(tp_attn=4.0, tp_ffn=4.0)
    assert float(activation_bytes(load_model("llama_3_1_70b"), mapping, live, 1.0)) == 8192 * 2 * (32_768 + 14_336)


def test_logits_are_four_bytes_a_word():
    some = Residents(sequences=0.0, tokens=0.0, live=0.0, live_total=0.0, emitted=16.0)
    mapping = Sharding(tp_attn=8.0, tp_ffn=8.0)
    assert float(activation_bytes(load_model("llama_3_1_70b"), mapping, some, 1.0)) == 16 * 128_256 * 4 / 8


def test_routed_activations_of_r1():
    """1024 tokens a rank on EP 8: 8192*8*1.2/8 picks of (2*2048 + 7168) elements on the fullest rank."""
    live = Residents(sequences=1.0, tokens=0.0, live=1024.0, live_total=8192.0, emitted=0.0)
    mapping = Sharding(dp_attn=8.0, ep=8.0)
    by_hand = 2 * (1024 * 4 * 7168 + 8192 * 8 * 1.2 / 8 * (2 * 2048 + 7168))
    assert float(activation_bytes(load_model("deepseek_r1"), mapping, live, 1.2)) == pytest.approx(by_hand, rel=1e-12)


def test_expanded_heads_of_r1_where_one_rank_alone_has_tokens():
    """1024 tokens on one of 8 ranks: queries and keys of 128 + 64 elements and values of 128, on each of 128 heads."""
    live = Residents(sequences=1.0, tokens=0.0, live=1024.0, live_total=1024.0, emitted=0.0)
    mapping = Sharding(dp_attn=8.0, ep=8.0)
    by_hand = 2 * 1024 * (4 * 7168 + 128 * (2 * (128 + 64) + 128))
    assert float(activation_bytes(load_model("deepseek_r1"), mapping, live, 1.2)) == by_hand


def test_buffers_of_collectives():
    """Two all-reduce messages under TP; under DP attention with EP k*d*3 bytes a token; none on one GPU."""
    llama, r1 = load_model("llama_3_1_70b"), load_model("deepseek_r1")
    assert float(communication_bytes(llama, Sharding(), 1000.0)) == 0
    assert float(communication_bytes(llama, Sharding(tp_attn=8.0, tp_ffn=8.0), 1000.0)) == 1000 * 2 * 2 * 8192
    assert float(communication_bytes(r1, Sharding(dp_attn=8.0, ep=8.0), 1000.0)) == 1000 * 8 * 7168 * 3
    assert float(communication_bytes(r1, Sharding(tp_attn=8.0, ep=8.0), 1000.0)) == 1000 * 2 * 2 * 7168


def test_tokens_of_steady_decode():
    """64 sequences of 4096 + 512: 64*4352 + 2*8*512/sqrt(12) = 280,893; one sequence is capped at 4608."""
    law = decode_residents(4096, 512)
    assert float(law.of(64.0, 2.0)) == pytest.approx(280_893, abs=1)
    assert float(law.of(1.0, 1.0)) == pytest.approx(4352 + 147.8, abs=0.1)
    assert float(law.of(1.0, 2.0)) == 4608
    assert float(law.of(64.0, 0.0)) == 64 * 4352
    assert float(prompt_residents(4096).of(7.0, 2.0)) == 7 * 4096


@pytest.mark.parametrize("tp", [1, 4, 16])
def test_latent_cache_is_whole_on_every_tp_rank(tp):
    latent, heads = (layer_of(load_model(name).kinds[-1]).attention for name in ("deepseek_r1", "llama_3_1_70b"))
    assert [float(here) for _, here in latent.stores(1.0, tp)] == [576]
    assert [float(here) for _, here in heads.stores(1.0, tp)] == [2 * 128 * max(8 / tp, 1)]


def test_sliding_windows_hold_at_most_the_window():
    """gpt-oss-120b in bf16: of one more sequence of 4096+2 tokens 18 layers hold 128, 18 hold all: 1024*2*18 B each."""
    at = cached_setting("gpt_oss_120b", "a100_sxm_80gb", "ideal")
    mapping = Sharding()
    long, short = (float(decode_bytes(at, mapping, 1.0, cached=decode_residents(isl, 2))) for isl in (8192, 4096))
    assert long - short == pytest.approx(1024 * 2 * 18 * 4096, rel=1e-6)


def test_prefill_holds_two_passes_of_prompts_per_stage():
    """Llama-70B: running and leaving prompts, 2*b at pp 1; in 4 stages 8*b of a quarter of the layers each."""
    at = cached_setting("llama_3_1_70b", "gb200_nvl72", "ideal")
    cache = 4096 * 163_840
    for pp, prompts in ((1.0, 2), (4.0, 8)):
        batch = 4.0
        held = float(prefill_bytes(at, Sharding(pp=pp), batch, prompt=prompt_residents(4096), chunk_tokens=512.0))
        base = weights("llama_3_1_70b", "nvfp4_fp8kv", pp=pp) + FIXED
        live = batch * 512 * 2 * (4 * 8192 + 2 * 28_672) + batch * 128_256 * 4
        assert held - base - live == pytest.approx(prompts * batch * cache / pp, rel=1e-9)


def test_the_share_of_memory_is_the_engines():
    """vLLM fills nine tenths of what it sees of the GPU; TensorRT-LLM nine tenths of what its weights leave."""
    bare, vllm, trtllm = (
        setup("llama_3_1_70b", "h100_sxm", "fp8", engine=name) for name in ("kernels", "vllm", "trtllm")
    )
    whole, seen = bare.system.hbm_reported, bare.system.hbm_visible
    assert [at.memory_limit for at in (bare, vllm, trtllm)] == pytest.approx([0.9 * whole, 0.9 * seen, whole])
    mapping, loaded = (
        Sharding(tp_attn=4.0, tp_ffn=4.0),
        Residents(sequences=8.0, tokens=80_000.0, live=8.0, live_total=8.0, emitted=8.0),
    )
    cache = 80_000 * 80 * 2 * 2 * 128  # two of eight KV heads, one byte an element
    parts = [instance_parts(at, mapping, loaded) for at in (bare, vllm, trtllm)]
    assert [float(part.cache) for part in parts] == pytest.approx([cache, cache, cache / 0.9])
    assert parts[0].weights == parts[2].weights


def test_keeping_expanded_keys_and_values_in_decode_costs_their_memory():
    """R1, fp8 cache: 128 heads x 320 B a token and layer beside the latent; one sequence of 1,000 + 2 tokens."""
    at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", engine="vllm")
    one = Sharding(dp_attn=64.0, ep=64.0)
    latent, expanded = (
        decode_bytes(at, one, 64.0, cached=decode_residents(1000, 2), mla_form=form) for form in ("auto", "cached")
    )
    tokens = 1000 + 1 + 2 * 2 / 12**0.5  # mean and two standard deviations, at most 1002
    assert expanded - latent == pytest.approx(61 * 128 * 320 * min(tokens, 1002), rel=1e-9)


@pytest.mark.parametrize("model", ["llama_3_1_70b", "deepseek_r1", "gpt_oss_120b"])
@pytest.mark.parametrize("form", ["auto", "cached"])
def test_parts_of_the_fullest_gpu_add_up_to_its_bytes(model, form):
    """Uneven stages, too: their weights and caches are those of the one that is fullest."""
    at = setup(model, "h100_sxm", "bf16")
    mapping = Sharding(
        tp_attn=np.array([1.0, 4.0, 8.0]), tp_ffn=np.array([1.0, 4.0, 8.0]), pp=np.array([1.0, 3.0, 2.0])
    )
    batch, cached = np.array([4.0, 37.0, 512.0]), decode_residents(8192, 1024)
    residents = decode_load(at, mapping, batch, cached=cached, mla_form=form)
    parts = instance_parts(at, mapping, residents, at.profile.decode_imbalance)
    held = decode_bytes(at, mapping, batch, cached=cached, mla_form=form)
    assert np.allclose(sum(parts), held, rtol=1e-12)
    empty = decode_load(at, mapping, batch, cached=CachedTokens(mean=0.0, deviation=0.0, most=0.0), mla_form=form)
    assert np.all(instance_parts(at, mapping, empty).cache == 0.0)
    assert np.all(parts.cache > 0.0)


NUMBERS = {
    "hidden_widths": 3.0,
    "stage_widths": 2.0,
    "sampler_word": 14.0,
    "sampler_row": 4.0,
    "activation_base": 1000.0,
    "position_entry": 2.0,
    "non_torch": 1.0 * GB,
    "non_torch_tp2": 2.0 * GB,
    "non_torch_tp4": 3.0 * GB,
    "non_torch_stages": 0.5 * GB,
    "graphs": 1.0 * GB,
    "context": 0.5 * GB,
}

HELD = EngineMemory(**NUMBERS, fitted_on=(), sources=dict.fromkeys(NUMBERS, "by hand"))


def served(name: str = "llama_3_1_8b", recipe: str = "bf16", **changes: object) -> Setup:
    """On H100 by an engine of 8,192 tokens and 1,024 sequences a step."""
    engine = replace(load_engine("vllm"), memory=HELD, chunk_tokens=8192, max_running=1024, **changes)
    return setup(name, "h100_sxm", recipe, engine=engine)


def profiled(at: Setup, mapping: Sharding | None = None, *, last: bool = True) -> float:
    return float(profiled_bytes(at, mapping or Sharding(), IDLE, 1.0, last=last)) - 1000.0


def test_sampling_binds_where_the_vocabulary_is_large_whatever_tp():
    """Hidden states of 8,192 tokens and 1,024 sequences; 14 B a word and sequence, 4 B a word and each of 132 SMs."""
    by_hand = 2 * (8192 + 1024) * 4096 + 128_256 * (1024 * 14 + 132 * 4)
    assert profiled(served()) == by_hand
    assert profiled(served(), Sharding(tp_attn=4, tp_ffn=4)) == by_hand


def test_the_forward_pass_binds_where_it_is_small_and_on_stages_that_do_not_sample():
    """Three hidden states of each token, gate and up and their product; a stage holds two hidden states more."""
    at = served("codellama_7b")
    assert profiled(at) == 2 * 8192 * (3 * 4096 + 3 * 11_008)
    assert profiled(at, Sharding(tp_attn=2, tp_ffn=2), last=False) == 2 * 8192 * (3 * 4096 + 3 * 11_008 / 2)
    assert profiled(at, Sharding(pp=2), last=False) == 2 * 8192 * (5 * 4096 + 3 * 11_008)


def test_workspaces_of_experts_come_on_top():
    """8,192 tokens pick 8 experts of width 768: rows of 2,048 out, and rows of 2 x 768 or 2,048 between."""
    at = served("qwen3_30b_a3b")
    sampling = 2 * (8192 + 1024) * 2048 + 151_936 * (1024 * 14 + 132 * 4)
    assert profiled(at) == sampling + 2 * 8192 * 8 * (2048 + 2048)
    wide = served("qwen1_5_moe_a2_7b")  # 2 x 1,408 are more than 2,048, but not on two GPUs
    whole, halves = profiled(wide), profiled(wide, Sharding(tp_attn=2, tp_ffn=2))
    assert whole - halves == 2 * 8192 * 4 * (2 * 1408 - 2048)


def test_a_larger_step_than_the_engines_own_counts():
    at = served("codellama_7b")
    more = replace(IDLE, live=16_384.0, live_total=16_384.0)
    assert float(profiled_bytes(at, Sharding(), more, 1.0)) - 1000.0 == 2 * profiled(at)


def test_tables_of_positions_are_as_long_as_the_context_and_whole_on_every_gpu():
    assert position_bytes(HELD, load_model("llama_4_scout")) == 2.5 * GIB  # 10,485,760 x 128 x 2 B
    assert position_bytes(HELD, load_model("deepseek_r1")) == 163_840 * 64 * 2
    assert position_bytes(HELD, load_model("opt_30b")) == 0  # learned positions are weights
    window_and_full = 2 * 131_072 * 256 * 2
    assert position_bytes(HELD, load_model("gemma_3_4b")) == window_and_full
    plain = replace(HELD, position_entry=0.0)
    at = served()
    without = at.changed(overheads=replace(at.overheads, memory=plain))
    for mapping in (Sharding(), Sharding(tp_attn=4, tp_ffn=4), Sharding(pp=2)):
        more = instance_bytes(at, mapping, IDLE) - instance_bytes(without, mapping, IDLE)
        assert float(more) == pytest.approx(131_072 * 128 * 2, abs=64)


def test_libraries_take_what_they_took_at_the_nearest_tp_below():
    columns = Sharding(tp_attn=np.array([1, 2, 3, 4, 8, 1, 4]), pp=np.array([1, 1, 1, 1, 1, 2, 2]))
    assert (non_torch_bytes(HELD, columns) / GB).tolist() == [1, 2, 2, 3, 3, 0.5, 3]


def test_the_budget_is_a_share_of_what_a_process_sees_and_leaves_room_for_graphs():
    at = served(memory_utilisation=0.9)
    visible = at.system.hbm_visible or at.system.hbm_reported
    assert at.memory_limit == 0.9 * visible
    assert served(memory_utilisation=1.0).memory_limit == visible - 1.5 * GB
    small = replace(at.system, hbm_visible=70 * GB)
    assert at.changed(system=small).memory_limit == pytest.approx(63 * GB)


def test_an_engine_whose_memory_is_not_known_counts_as_the_profile_assumes():
    at = setup("llama_3_1_8b", "h100_sxm", "bf16", engine=replace(load_engine("vllm"), memory=None))
    parts = instance_parts(at, Sharding(), IDLE)
    assert parts.runtime == 3.9 * GB
    assert at.memory_limit == at.overheads.memory_utilisation * at.system.hbm_reported


def test_parts_add_up():
    at, mapping = served("deepseek_v2_lite"), Sharding(tp_attn=2, tp_ffn=2, pp=3)
    residents = Residents(sequences=8.0, tokens=80_000.0, live=512.0, live_total=512.0, emitted=8.0)
    parts = instance_parts(at, mapping, residents)
    assert float(sum(parts)) == pytest.approx(float(instance_bytes(at, mapping, residents)), rel=1e-12)
    assert parts.communication == 0  # buffers of the all-reduce are part of the libraries


def test_every_number_needs_a_source():
    file = read_mapping(find_file("engine", "sglang"))
    held = {field.name: f"{NUMBERS[field.name]} B" for field in fields(EngineMemory) if field.name in NUMBERS}
    held |= {"hidden_widths": 3, "stage_widths": 2, "fitted_on": ["llama_3_1_8b"]}
    told = dict.fromkeys(NUMBERS, "by hand")
    good = engine_of(Path("mine.yaml"), file | {"memory": held | {"sources": told}}, "mine")
    assert replace(good.memory, fitted_on=()) == HELD
    told.pop("graphs")
    with pytest.raises(SpecError, match=r"mine.yaml: memory: sources: missing key 'graphs'"):
        engine_of(Path("mine.yaml"), file | {"memory": held | {"sources": told}}, "mine")
    with pytest.raises(SpecError, match=r"memory.hidden_widths: 101 is out of range; allowed: from 0 to 100"):
        engine_of(Path("mine.yaml"), file | {"memory": held | {"hidden_widths": 101, "sources": told}}, "mine")
