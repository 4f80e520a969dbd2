"""Models from ``config.json``: what is read, what is told of it, and one clear line for what is none."""

import json

import pytest
import yaml

from disagg_sim.cli.main import run
from disagg_sim.errors import InputError, SpecError
from disagg_sim.facts.hub.files import is_config
from disagg_sim.facts.hub.imported import import_model
from disagg_sim.facts.load import load_model, load_system
from disagg_sim.planning.question import PlanOptions, setups_of, usual_precision

LLAMA = yaml.safe_load("""{
  architectures: [LlamaForCausalLM], hidden_size: 4096, intermediate_size: 14336, max_position_embeddings: 131072,
  num_attention_heads: 32, num_hidden_layers: 32, num_key_value_heads: 8, tie_word_embeddings: false, vocab_size:
  128256
}""")
QWEN_MOE = yaml.safe_load("""{
  architectures: [Qwen3MoeForCausalLM], head_dim: 128, hidden_size: 2048, intermediate_size: 6144,
  max_position_embeddings: 40960, moe_intermediate_size: 768, num_attention_heads: 32, num_experts: 128,
  num_experts_per_tok: 8, num_hidden_layers: 48, num_key_value_heads: 4, sliding_window: 4096, use_sliding_window:
  false, vocab_size: 151936
}""")
GPT_OSS = yaml.safe_load("""{
  architectures: [GptOssForCausalLM], attention_bias: true, head_dim: 64, hidden_size: 2880, intermediate_size: 2880,
  max_position_embeddings: 131072, num_attention_heads: 64, num_experts_per_tok: 4, num_hidden_layers: 36,
  num_key_value_heads: 8, num_local_experts: 128, sliding_window: 128, vocab_size: 201088, quantization_config:
  {quant_method: mxfp4, modules_to_not_convert: ["model.layers.*.self_attn", "model.layers.*.mlp.router", lm_head]}
}""") | {"layer_types": ["sliding_attention", "full_attention"] * 18}
DEEPSEEK = yaml.safe_load("""{
  architectures: [DeepseekV3ForCausalLM], first_k_dense_replace: 3, hidden_size: 7168, intermediate_size: 18432,
  kv_lora_rank: 512, max_position_embeddings: 163840, moe_intermediate_size: 2048, moe_layer_freq: 1,
  n_routed_experts: 256, n_shared_experts: 1, num_attention_heads: 128, num_experts_per_tok: 8, num_hidden_layers: 61,
  num_key_value_heads: 128, num_nextn_predict_layers: 1, q_lora_rank: 1536, qk_nope_head_dim: 128, qk_rope_head_dim:
  64, topk_method: noaux_tc, v_head_dim: 128, vocab_size: 129280, quantization_config: {quant_method: fp8,
  weight_block_size: [128, 128]}
}""")
SHIPPED = {"llama_3_1_8b": LLAMA, "qwen3_30b_a3b": QWEN_MOE, "gpt_oss_120b": GPT_OSS, "deepseek_r1": DEEPSEEK}


@pytest.fixture
def place(tmp_path):
    """Write files of a model's directory, and give its path."""

    def write(config, name="some-model", **others):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        for file, content in {"config.json": config, **others}.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (directory / file).write_text(text, encoding="utf-8")
        return directory

    return write


def refusal(call, *arguments):
    with pytest.raises((SpecError, InputError)) as error:
        call(*arguments)
    return str(error.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_config_gives_the_shipped_model(name, place):
    """All that counts; the title and the source are words, and of fp8 checkpoints a bf16 one tells nothing."""
    model, shipped = import_model(place(SHIPPED[name])).model, load_model(name)
    told = ("block_scaled_fp8",) if model.recipe != "bf16" else ()
    for each in ("layers", "hidden", "vocab", "tied_embeddings", "max_context", *told, "total_params"):
        assert getattr(model, each) == getattr(shipped, each), each


def test_the_yaml_is_the_model(place, tmp_path):
    found = import_model(place(GPT_OSS))
    path = found.write(tmp_path / "models")
    assert path.name == "some_model.yaml"
    assert load_model(path) == found.model
    assert "there already" in refusal(found.write, path)


def test_a_path_of_a_config_is_the_name_of_a_model(place):
    directory = place(LLAMA, name="Llama-3.1-8B")
    for way in (directory, str(directory), directory / "config.json", str(directory / "config.json")):
        assert load_model(way).name == "llama_3_1_8b"
        assert load_model(way).total_params == 8_030_261_248


def test_a_directory_is_found_by_its_bare_name_but_a_shipped_model_comes_first(place, monkeypatch):
    monkeypatch.chdir(place(LLAMA | {"num_hidden_layers": 2}, name="mine").parent)
    place(LLAMA | {"num_hidden_layers": 2}, name="llama_3_1_8b")
    assert len(load_model("mine").layers) == len(load_model("./llama_3_1_8b").layers) == 2
    assert len(load_model("llama_3_1_8b").layers) == 32


def test_a_head_is_the_hidden_size_cut_by_the_heads(place):
    """4,096 / 32 = 128 where no key says it."""
    assert import_model(place(LLAMA)).model.layers[0].attention.head_dim == 128
    assert import_model(place(LLAMA | {"head_dim": 64})).model.layers[0].attention.head_dim == 64


def test_windows_are_those_of_the_layer_types(place):
    layers = import_model(place(GPT_OSS)).model.layers
    assert [layer.attention.window for layer in layers] == [128, 0] * 18
    switched = QWEN_MOE | {"use_sliding_window": True, "max_window_layers": 40}
    assert [layer.attention.window for layer in import_model(place(switched)).model.layers] == [0] * 40 + [4096] * 8


def test_dense_layers_are_those_that_the_keys_name(place):
    """Layer i has experts if (i + 1) is a multiple of the step and i is not listed."""
    config = QWEN_MOE | {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    routed = [layer.ffn.routes for layer in import_model(place(config)).model.layers]
    assert routed == [False, True, False, False, False, True, False, True]


def test_qwen2_has_biases_and_a_gate_of_its_shared_expert(place):
    """Qwen1.5-MoE-A2.7B has 14.3e9 parameters: attention, 60 experts, a shared one with its gate, router, norms."""
    config = QWEN_MOE | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_hidden_layers": 24,
        "moe_intermediate_size": 1408,
    }
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}
    config |= {"shared_expert_intermediate_size": 5632}
    attention, experts = 4 * 2048**2 + 3 * 2048, 60 * 3 * 2048 * 1408
    shared, router, norms = 3 * 2048 * 5632 + 2048, 2048 * 60, 2 * 2048
    layers = 24 * (attention + experts + shared + router + norms)
    assert import_model(place(config)).model.total_params == layers + 2 * 151936 * 2048 + 2048 == 14_315_784_192


def test_the_text_model_of_a_model_that_sees(place):
    text = {key: value for key, value in QWEN_MOE.items() if key != "architectures"}
    outer = {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 2},
    }
    found = import_model(place(outer | {"tie_word_embeddings": True}))
    assert found.model.layers == load_model("qwen3_30b_a3b").layers
    assert found.model.tied_embeddings
    assert found.assumed == ("text_config: the text model alone; vision_config left out",)


def test_what_was_assumed_and_what_was_not_understood_is_told(place):
    found = import_model(place(DEEPSEEK | {"engram_of_a_kind": 3, "use_cache": True, "off": False}))
    assert found.unknown == ("engram_of_a_kind",)
    assert found.assumed == ("num_nextn_predict_layers: modules that predict further tokens are left out",)


# ---- quantisation ----

INT8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}}}}
NVFP4 = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}


@pytest.mark.parametrize(
    ("config", "beside", "recipe"),
    [
        (LLAMA, None, "bf16"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, None, "fp8_bf16kv"),
        (LLAMA, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8"),
        (LLAMA, NVFP4, "nvfp4_fp8kv"),
        (DEEPSEEK, None, "fp8_bf16kv"),
        (GPT_OSS, None, "mxfp4"),
    ],
)
def test_the_recipe_of_a_checkpoint(config, beside, recipe, place):
    found = import_model(place(config, **({"hf_quant_config.json": beside} if beside else {})))
    assert (found.recipe, found.recipe_differs) == (recipe, ())


def test_a_plan_takes_the_recipe_of_a_checkpoint_or_refuses_in_one_line(place):
    nvfp4 = load_model(place(QWEN_MOE, **{"hf_quant_config.json": NVFP4}))
    assert usual_precision(nvfp4, load_system("b200_sxm")) == "nvfp4_fp8kv"
    with pytest.raises(InputError, match=r"h200_sxm does not run nvfp4_fp8kv; .* instead, of fp8, bf16"):
        usual_precision(nvfp4, load_system("h200_sxm"))
    with pytest.raises(InputError, match="does not run nvfp4_fp8kv with a KV cache in bf16"):
        usual_precision(nvfp4, load_system("b200_sxm"), "bf16")
    own = load_model(place(LLAMA | {"quantization_config": {"quant_method": "fp8"}}, name="fp8"))
    assert usual_precision(own, load_system("b200_sxm")) == "fp8_bf16kv"
    assert usual_precision(load_model(place(LLAMA, name="bf16")), load_system("h200_sxm")) == "bf16"
    for quantised, format_ in (({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"), (INT8, "int8")):
        path = place(LLAMA | {"quantization_config": quantised}, name=f"Own-{quantised['quant_method']}")
        with pytest.raises(InputError, match=f"^the checkpoint own_.*: {format_} is no format of a recipe; say the"):
            usual_precision(load_model(path), load_system("h200_sxm"))
        asked = PlanOptions(precision="fp8")
        assert setups_of(path, load_system("h200_sxm"), asked)[0].precision.name == "fp8"


def test_groups_that_stay_in_16_bit_are_told(place):
    """Of 48 layers 40 keep their attention: the group counts as left out; 4 of 48 would not."""

    def excluded(layers):
        names = [f"model.layers.{layer}.self_attn*" for layer in range(layers)]
        quantisation = {**NVFP4["quantization"], "exclude_modules": ["lm_head", *names]}
        return import_model(place(QWEN_MOE, **{"hf_quant_config.json": {"quantization": quantisation}}))

    assert excluded(4).recipe_differs == ()
    assert excluded(40).quantisation.formats.attention_projection == "bf16"
    assert any(line.startswith("attention projections bf16") for line in excluded(40).recipe_differs) or (
        excluded(40).recipe != "nvfp4_fp8kv"
    )


def test_a_method_that_no_recipe_has_is_named(place):
    found = import_model(place(LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}))
    assert found.recipe == ""
    assert ("recipe", "none: quant_method 'awq' is no format of a recipe") in list(found.lines())


# ---- published figures ----


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("Qwen3-30B-A3B", 30e9),
        ("Qwen3.8-2.4T-A95B-FP8", 2.4e12),
        ("Llama-4-Maverick-17B-128E", None),  # 17B are active
    ],
)
def test_the_published_figure_in_a_name(name, figure, place):
    found = import_model(place(LLAMA | {"_name_or_path": f"org/{name}"}, name=name))
    assert (found.published and found.published.params) == figure


def test_the_index_of_the_weights_and_the_card_come_before_the_name(place):
    card = {"README.md": "# Model\n- Number of Parameters: 8.03B\n"}
    index = {"model.safetensors.index.json": {"metadata": {"total_parameters": 8_030_261_248}}}
    named = {"_name_or_path": "org/Some-7B"}
    assert import_model(place(LLAMA | named, **card)).published == (8.03 * 1e9, "its card", 1e7)
    found = import_model(place(LLAMA | named, **card, **index))
    assert found.published == (8_030_261_248, "index of its weights", 1)
    assert ("parameters", "8,030,261,248; +0.00% against 8.03026e9 in index of its weights") in list(found.lines())


# ---- what is no model ----


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "broken JSON: line 1, column 2: Expecting property name enclosed in double quotes"),
        ("{}", "not a model's config.json: missing key 'architectures'"),
        ("[" * 100_000, "broken JSON: nested too deeply"),
    ],
)
def test_a_file_that_is_no_config(content, said, place):
    assert refusal(import_model, place(content)).endswith(f"config.json: {said}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "4096 "}, "hidden_size: '4096 ' is not a whole number"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: 1000000 is out of range; allowed: from 1 to 10000"),
        ({"num_attention_heads": 30}, "num_attention_heads: 30 does not divide hidden_size 4096; give head_dim"),
        ({"num_key_value_heads": 5}, "attention.gqa: kv_heads 5 does not divide q_heads 32"),
        ({"mlp_bias": True}, "mlp_bias: true: biases of gated layers are not modelled"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_its_key(change, said, place):
    assert refusal(import_model, place(LLAMA | change)).endswith(f"config.json: {said}")


def test_a_missing_key_names_its_other_spellings(place):
    config = {key: value for key, value in QWEN_MOE.items() if key != "num_experts"}
    assert refusal(import_model, place(config)).endswith(
        "missing key 'n_routed_experts' (or 'num_local_experts', 'num_experts')"
    )


def test_paths_that_lead_nowhere(tmp_path):
    assert refusal(load_model, tmp_path / "config.json").endswith("config.json: no such file")
    assert "a directory without config.json" in refusal(import_model, tmp_path)
    assert not is_config("llama_3_1_8b")
    assert not is_config("x" * 5000)
    assert not is_config("a\x00b")


# ---- commands ----


def test_the_command_prints_the_yaml_or_writes_it(place, capsys, tmp_path, monkeypatch):
    directory = place(QWEN_MOE, name="Qwen3-30B-A3B")
    assert run(["model", "import", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "30,532,122,624" in text
    assert "moe: {kind: moe, experts: 128, top_k: 8, width: 768}" in text
    monkeypatch.chdir(tmp_path)
    assert run(["model", "import", str(directory), "--out", "models", "--name", "mine"]) == 0
    assert capsys.readouterr().out.endswith("written: models/mine.yaml\n")
    assert run(["specs", "show", "model", "models/mine.yaml"]) == 0
    assert run(["specs", "show", "model", str(directory / "config.json")]) == 0
    assert run(["model", "import", str(tmp_path)]) == 2
    assert "directory without config.json" in capsys.readouterr().err
