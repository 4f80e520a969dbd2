"""What a server holds beside weights and cache, each term by hand, with round numbers of an engine."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.errors import SpecError
from disagg_sim.facts.engine import EngineMemory, engine_of
from disagg_sim.facts.load import load_engine, load_model
from disagg_sim.facts.yaml_files import find_file, read_mapping
from disagg_sim.physics.memory import instance_bytes, instance_parts, non_torch_bytes, position_bytes, profiled_bytes
from disagg_sim.physics.residents import Residents
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.units import GB, GIB

IDLE = Residents(sequences=0.0, tokens=0.0, live=0.0, live_total=0.0, emitted=0.0)
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
