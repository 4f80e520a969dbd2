"""Engines are started with the draft tokens of a plan, prefill with the drafter whose cache decode needs."""

from dataclasses import replace

import pytest
from test_launch_options import assert_takes

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_launcher
from disagg_sim.launch.engines import sglang_flags, trtllm_config, vllm_flags
from disagg_sim.launch.expressible import expressible
from disagg_sim.launch.workers import Weights, Workers, weights_of

AT = ds.setup("deepseek_r1", "h200_sxm", "fp8", engine="vllm", speculation="mtp 0.8 0.6 0.4")
R1 = Weights(checkpoint="deepseek-ai/DeepSeek-R1")


def workers(role: str, drafts: int = 0, **degrees: int) -> Workers:
    mapping = Sharding(**({"dp_attn": 8, "ep": 8} | degrees), draft_tokens=drafts)
    return Workers(role=role, mapping=mapping, instances=1, setup=AT, batch=64)


def test_decode_drafts_as_planned_and_prefill_holds_the_drafter():
    config = [vllm_flags(workers(*each), R1)["--speculative-config"] for each in (("prefill",), ("decode", 3))]
    assert [each["num_speculative_tokens"] for each in config] == [1, 3]
    assert {each["method"] for each in config} == {"mtp"}


def test_sglang_counts_the_models_own_token_among_the_drafts():
    flags = sglang_flags(workers("decode", 3), R1)
    named = ("--speculative-algorithm", "--speculative-num-steps", "--speculative-num-draft-tokens")
    assert [flags[name] for name in named] == ["EAGLE", 3, 4]


def test_trtllm_has_layers_of_its_module():
    assert trtllm_config(workers("decode", 2), R1)["speculative_config"] == {
        "decoding_type": "MTP",
        "num_nextn_predict_layers": 2,
    }


def test_no_speculation_no_flag():
    plain = replace(workers("decode"), setup=replace(AT, speculation=None))
    assert "--speculative-config" not in vllm_flags(plain, R1)
    assert "speculative_config" not in trtllm_config(plain, R1)


HEAD = ds.setup("kimi_k2_5", "h200_sxm", "fp8", speculation="kimi_k2_5_eagle3_thinking")
MODEL = ds.setup("llama_3_1_70b", "h200_sxm", "fp8", engine="vllm", speculation="draft_model llama_3_1_8b 0.8 0.6")
SETTINGS = {"vllm": vllm_flags, "sglang": sglang_flags, "trtllm": trtllm_config}


def drafting(at: ds.Setup, engine: str) -> dict:
    """What an engine is told of decode with two drafts, every key with a source that lets it stand."""
    tp = Sharding(tp_attn=4, tp_ffn=1 if at.model.is_moe else 4, ep=4 if at.model.is_moe else 1, draft_tokens=2)
    told = SETTINGS[engine](Workers(role="decode", mapping=tp, instances=1, setup=at, batch=64), weights_of(at))
    table = load_launcher(engine).options
    found = {name: told[name] for name in told if "speculative" in name or name == "disable_overlap_scheduler"}
    for name, value in found.items():
        nested = engine == "trtllm" and isinstance(value, dict)
        each = {f"{name}.{key}": one for key, one in value.items()} if nested else {name: value}
        for key, one in each.items():
            assert_takes(table[key], one)
    return found


def test_a_head_is_named_by_the_checkpoint_of_its_curve():
    """vLLM docs/features/speculative_decoding/eagle.md; SGLang advanced_features/speculative_decoding; TensorRT-LLM
    features/speculative-decoding: EAGLE 3.
    """
    head = "lightseekorg/kimi-k2.5-eagle3"
    assert drafting(HEAD, "vllm")["--speculative-config"] == {
        "method": "eagle3",
        "num_speculative_tokens": 2,
        "model": head,
        "draft_tensor_parallel_size": 4,
    }
    assert drafting(HEAD, "sglang") == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-num-steps": 2,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": 3,
        "--speculative-draft-model-path": head,
    }
    assert drafting(HEAD, "trtllm") == {
        "speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 2, "speculative_model": head}
    }


def test_a_draft_model_is_started_with_the_tp_of_the_model():
    """Published in fp8, as the recipe has it: nothing is quantised."""
    own = "nvidia/Llama-3.1-8B-Instruct-FP8"
    assert drafting(MODEL, "vllm")["--speculative-config"] == {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "model": own,
        "draft_tensor_parallel_size": 4,
    }
    sglang = drafting(MODEL, "sglang")
    assert (sglang["--speculative-algorithm"], sglang["--speculative-draft-model-path"]) == ("STANDALONE", own)
    assert drafting(MODEL, "trtllm") == {
        "disable_overlap_scheduler": True,
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 2, "speculative_model": own},
    }


def test_a_draft_model_in_bf16_is_quantised_as_the_recipe_says():
    at = ds.setup("qwen3_32b", "h200_sxm", "fp8", engine="vllm", speculation="draft_model qwen3_1_7b 0.7 0.5")
    config = drafting(at, "vllm")["--speculative-config"]
    assert (config["model"], config["quantization"]) == ("Qwen/Qwen3-1.7B", "fp8")
    assert drafting(at, "sglang")["--speculative-draft-model-quantization"] == "fp8"
    assert weights_of(at, quantises=False).drafter.checkpoint == "DRAFT_CHECKPOINT"  # TensorRT-LLM makes no fp8


@pytest.mark.parametrize("named", [True, False])
def test_a_head_of_which_no_checkpoint_is_known_has_a_place_holder_and_a_note(named):
    curve = ds.load_speculation("kimi_k2_5_eagle3_thinking")
    at = replace(HEAD, speculation=curve if named else replace(curve, checkpoint=""))
    one = Workers(role="colocated", mapping=Sharding(tp_attn=8, ep=8, draft_tokens=1), instances=1, setup=at)
    made = ds.launch([one], engine="vllm")
    assert ("DRAFT_CHECKPOINT" in made.files["colocated.sh"]) is not named
    assert any("no checkpoint of the eagle3 head" in note for note in made.notes) is not named


@pytest.mark.parametrize(
    ("engine", "each", "said"),
    [
        ("trtllm", workers("decode", 2, pp=2), "drafts of mtp over pipeline stages"),
        ("sglang", workers("decode", 2, pp=2), "drafts of mtp over pipeline stages"),
        (
            "vllm",
            replace(workers("decode", 2, dp_attn=1, ep=1, tp_attn=4, tp_ffn=4, pp=2), setup=MODEL),
            "drafts of draft_model over pipeline stages",
        ),
        ("sglang", replace(workers("decode", 2, ep=1), setup=MODEL), "drafts of draft_model beside attention DP"),
    ],
)
def test_what_an_engine_cannot_start_is_said(engine, each, said):
    assert any(said in reason for reason in expressible([each], engine))


def test_vllm_starts_a_module_over_stages():
    assert not [each for each in expressible([workers("decode", 2, pp=2)], "vllm") if "drafts" in each]
