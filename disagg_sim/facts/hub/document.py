"""Turn a ``config.json`` into the keys of ``models/*.yaml``: sizes, blocks, and the runs of layers that use them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.faults import value_text
from disagg_sim.facts.hub.config import Config
from disagg_sim.facts.hub.families import FAMILIES, TEXT_KEYS, TEXT_OF, Family
from disagg_sim.facts.hub.files import ModelFiles
from disagg_sim.facts.layers import AND, NONE

#: Keys of modules for prediction of further tokens, which are left out.
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp")
#: What a model's file says of some keys.
_COMMENTS = {
    "max_context": "input + output tokens",
    "block_scaled_fp8": "fp8 checkpoints carry 128x128 block scales",
    "recipe": "of this checkpoint; plans take it unless another is named",
}
#: Longest context that a file may state. [token]
MOST_CONTEXT = 10**9
#: Longest pattern of layers that is looked for. [1]
_LONGEST_PATTERN = 24
#: Keys of training, generation, numerics, positions and files, which move no tensor's size.
_NO_SIZE = """
    _attn_implementation_autoset _name_or_path architectures attention_dropout auto_map aux_loss_alpha
    attention_value_scale base_model_ep_plan base_model_tp_plan bad_words_ids
    begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size ep_size exponential_decay_length_penalty
    final_logit_softcapping attn_logit_softcapping finetuning_task for_llm_compressor forced_bos_token_id
    forced_eos_token_id gate_lower_bound head_dtype hidden_act hidden_activation hidden_dropout id2label
    initial_context_length initializer_range is_decoder label2id length_penalty logits_scaling
    max_length max_window_layers min_length mamba_hidden_act mlp_hidden_act moe_renormalize
    moe_router_activation_func moe_router_dtype n_group no_repeat_ngram_size norm_topk_prob
    num_beam_groups num_beams num_expert_group num_logits_to_keep num_return_sequences original_max_position_embeddings
    output_attentions output_hidden_states output_multiplier output_router_logits output_scores partial_rotary_factor
    prefix pretraining_tp problem_type pruned_heads qk_head_dim qk_scale_factor query_pre_attn_scalar
    remove_invalid_values repetition_penalty rescale_prenorm_residual residual_in_fp32 return_dict
    return_dict_in_generate rotary_dim routed_scaling_factor router_aux_loss_coef router_jitter_noise
    scoring_func seq_aux suppress_tokens swiglu_alpha swiglu_limit swa_rope_theta temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p topk_group torch_dtype torchscript transformers_version
    typical_p unsloth_version unsloth_fixed use_bfloat16 use_bidirectional_attention use_cache use_grouped_topk
    use_mamba_kernels use_mrope vocab_size_per_layer_input attention_type attn_temperature_tuning floor_scale attn_scale
    cache_implementation no_rope_layers no_rope_layer_interval bos_token eos_token
    activation_situ_beta activation_situ_linear_beta layer_rope_theta compress_rope_theta
    time_step_floor time_step_limit time_step_max time_step_min time_step_rank quantization_config
    kv_cache_scheme use_gemma_norm model_type qk_norm_type output_gate_type moe_shared_expert_overlap
"""
_WITHOUT_SIZE = frozenset(_NO_SIZE.split())
#: The same by how they begin or end.
_NO_SIZE_BEGINS = ("mtp_", "rope_", "initializer_", "rms_norm_", "layer_norm_eps", "layernorm_eps", "indexer_rope_")
_NO_SIZE_ENDS = ("_token_id", "_token_ids", "_eps", "_epsilon", "_token_index", "_dropout", "_loss_coef")

#: Key -> the values that can be expressed, and what any other would mean.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_encoder_decoder": ((False,), "encoders are not modelled"),
    "add_cross_attention": ((False,), "cross attention is not modelled"),
    "mlp_bias": ((False,), "biases of gated layers are not modelled"),
    "num_kv_shared_layers": ((0,), "caches that layers share are not modelled"),
    "hidden_size_per_layer_input": ((0,), "embeddings of each layer are not modelled"),
    "use_double_wide_mlp": ((False,), "layers of double width are not modelled"),
    "engram_layer_ids": (([],), "tables of n-grams are not modelled"),
}
#: Keys of an encoder's size, and what the families call them.
_ENCODER_NAMES = {
    "layers": ("depth", "vt_num_hidden_layers"),
    "hidden": ("hidden_size", "vt_hidden_size"),
    "width": ("intermediate_size", "vt_intermediate_size"),
    "patch": ("patch_size",),
    "merge": ("spatial_merge_size", "merge_kernel_size"),
}
#: Keys of towers that are not plain: heads wider than the model, layers of windows, embeddings for later layers.
_OTHERWISE = ("qkv_hidden_size", "layer_types", "deepstack_visual_indexes", "fullatt_block_indexes", "window_size")


def text_config(files: ModelFiles) -> tuple[Config, str]:
    """The keys of the text model, and its class."""
    data = files.data
    config = Config(files.path, data)
    name = _class(config)
    inner = next((key for key in TEXT_KEYS if isinstance(data.get(key), dict)), None)
    if name is None and inner is not None:
        name = _class(Config(files.path, data[inner]))
    if name is None:
        known = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "model_type"} & {*data}
        said = "missing key 'architectures'" if known else "not a model's config.json: missing key 'architectures'"
        raise config.fault(said)
    text = TEXT_OF.get(name, name)
    if text not in FAMILIES:
        known_names = (*FAMILIES, *TEXT_OF)
        raise config.fault(f"architectures: {quoted(name)} is unknown{nearest(name, known_names)}")
    if inner is None:
        return config, text
    outer = {key: value for key, value in data.items() if key in ("tie_word_embeddings", "quantization_config")}
    found = Config(files.path, outer | data[inner])
    vision = data.get("vision_config")
    found.encoder = encoder_of(vision) if isinstance(vision, dict) else None
    left = [key for key in ("vision_config", "audio_config") if data.get(key)]
    left = left if found.encoder is None else left[1:]
    said = "; vision_config as encoder" if found.encoder is not None else ""
    found.assume(f"{inner}: the text model alone{said}" + (f"; {' and '.join(left)} left out" if left else ""))
    return found, text


def _class(config: Config) -> str | None:
    names = config.find("architectures")[1]
    config.find("model_type")
    if names is None:
        return None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.fault(f"architectures: {value_text(names)} is not a list of class names")
    return names[0]


def encoder_of(vision: Mapping[str, Any]) -> dict[str, int] | None:
    """The encoder of a ``vision_config``; None for a tower of another kind than ``EncoderSpec`` describes."""
    gated = "gelu" not in str(vision.get("hidden_act", "gelu"))
    if gated or any(vision.get(key) for key in _OTHERWISE):
        return None
    found: dict[str, int] = {}
    for key, names in _ENCODER_NAMES.items():
        value = next((vision[name] for name in names if name in vision), None)
        if isinstance(value, list) and len({*map(str, value)}) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return None
        found[key] = value
    return found


def document_of(config: Config, family: Family) -> dict[str, Any]:
    """The keys of a model's file, ``title`` and ``source`` apart."""
    for key, (allowed, reason) in _ONLY.items():
        value = config.find(key)[1]
        if value is not None and value not in allowed:
            raise config.fault(f"{key}: {value_text(value)}: {reason}")
    attention, ffn = family.attention(config), family.ffn(config)
    layers = tuple(zip(attention.layers, ffn.layers, strict=True))
    document: dict[str, Any] = {
        "hidden": config.hidden,
        "vocab": config.count("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=family.tied),
        **family.whole(config),
        "block_scaled_fp8": False,
        "max_context": config.count("max_position_embeddings", most=MOST_CONTEXT),
        "max_context_sure": True,
        "attention": {name: attention.known[name] for name in dict.fromkeys(attention.layers) if name != NONE},
        "ffn": {name: ffn.known[name] for name in dict.fromkeys(ffn.layers) if name != NONE},
        "layers": runs_of(layers),
    }
    if config.encoder is not None:
        document["encoder"] = config.encoder
    modules = [key for key in _MTP if config.find(key)[1] not in (None, 0, False)]
    if modules:
        config.assume(f"{modules[0]}: modules that predict further tokens are left out")
    return document


def unread_keys(config: Config) -> list[str]:
    """Keys with a value that no reader asked for, and that are not known to move no size."""
    return sorted(
        key
        for key, value in config.data.items()
        if value not in (None, False, 0, "", [], {})
        and key not in config.read
        and key not in _WITHOUT_SIZE
        and not key.startswith(_NO_SIZE_BEGINS)
        and not key.endswith(_NO_SIZE_ENDS)
    )


def runs_of(layers: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Write layers as runs: one layer, or a pattern of several, so many times."""
    found, start = [], 0
    while start < len(layers):
        # of equal reach the shortest pattern; one that is not repeated is no pattern
        size, times = max(
            ((size, _repeats(layers, start, size)) for size in range(1, _LONGEST_PATTERN + 1)),
            key=lambda each: (each[0] * each[1] if each[1] > 1 or each[0] == 1 else 0, -each[0]),
        )
        unit = layers[start : start + size]
        one = dict(zip(("attention", "ffn"), unit[0], strict=True))
        found.append({"count": times} | (one if size == 1 else {"pattern": [f" {AND} ".join(names) for names in unit]}))
        start += size * times
    return found


def _repeats(layers: Sequence[tuple[str, str]], start: int, size: int) -> int:
    """How often the ``size`` layers from ``start`` follow each other; 0 where there are not so many."""
    unit, times = layers[start : start + size], 0
    while len(unit) == size and layers[start + times * size : start + (times + 1) * size] == unit:
        times += 1
    return times


def model_yaml(document: Mapping[str, Any]) -> str:
    """Write the text of a model's file."""
    lines = []
    for key, value in document.items():
        if value is False and key != "tied_embeddings":  # as without the key
            continue
        if isinstance(value, list):
            lines += [f"{key}:", *(f"  - {_flow(run)}" for run in value)]
        elif isinstance(value, Mapping):
            lines += [f"{key}:", *(f"  {name}: {_flow(block)}" for name, block in value.items())]
        else:
            said = f"        # {_COMMENTS[key]}" if key in _COMMENTS else ""
            lines.append(f"{key}: {_text(value) if key in ('title', 'source', 'no_recipe') else _flow(value)}{said}")
    return "\n".join([*lines, ""])


def _text(value: str) -> str:
    """A text, in quotation marks unless it is plain words."""
    if re.fullmatch(r"[A-Za-z][\w .-]*", value) and "config.json" not in value and len(value) > 3:
        return value
    return json.dumps(value, ensure_ascii=False)


def _flow(value: object) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
