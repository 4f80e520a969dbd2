"""Families of models by the class that their ``config.json`` names, each with readers of its attention and layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from disagg_sim.facts.faults import value_text
from disagg_sim.facts.hub.blocks import (
    LAYER_TYPES,
    Block,
    Blocks,
    MoeTraits,
    Traits,
    dense,
    experts,
    gqa,
    gqa_block,
    mla,
    moe_block,
)
from disagg_sim.facts.hub.config import Config
from disagg_sim.facts.hub.linear import (
    block_sparse,
    compressed,
    dsa_blocks,
    gated_delta,
    kimi_delta,
    kimi_delta_and_sparse,
    latent_experts,
    mamba,
    mamba_ffn,
)
from disagg_sim.facts.layers import NONE

#: Widths of layers that a search has found are rounded up to multiples of so many. [1]
_WIDTH_STEP = 256


def gemma4(config: Config) -> Blocks:
    """Windows, and every few layers full attention with larger heads whose values are their keys."""
    window = config.count("sliding_window")
    sliding = gqa_block(config) | {"qk_norm": True, "window": window}
    full = sliding | {
        "kv_heads": config.count("num_global_key_value_heads", "num_key_value_heads"),
        "head_dim": config.count("global_head_dim", "head_dim"),
    }
    del full["window"]
    if config.flag("attention_k_eq_v"):
        full |= {"values_from_keys": True}
    types = config.words("layer_types", tuple(LAYER_TYPES), length=config.layers)
    return Blocks({"sliding": sliding, "full": full}, ["sliding" if LAYER_TYPES[each] else "full" for each in types])


def gemma4_ffn(config: Config) -> Blocks:
    """A dense layer, and with ``enable_moe_block`` experts beside it in every layer."""
    width = config.count("intermediate_size")
    if not config.flag("enable_moe_block"):
        return Blocks({"dense": {"kind": "dense", "width": width}}, ["dense"] * config.layers)
    block = moe_block(config, MoeTraits(width=("moe_intermediate_size", "expert_intermediate_size")))
    return Blocks({"moe": block | {"dense_width": width, "router_scale": True}}, ["moe"] * config.layers)


def mimo2(config: Config) -> Blocks:
    """Full attention and windows, each with heads, value sizes and sinks of its own."""
    full = gqa_block(config) | {"value_dim": config.count("v_head_dim")}
    sliding: dict[str, Any] = {
        "kind": "gqa",
        "q_heads": config.count("swa_num_attention_heads", "num_attention_heads"),
        "kv_heads": config.count("swa_num_key_value_heads", "num_key_value_heads"),
        "head_dim": config.count("swa_head_dim", "head_dim"),
        "value_dim": config.count("swa_v_head_dim", "v_head_dim"),
        "window": config.count("sliding_window", "sliding_window_size"),
    }
    config.find("attention_chunk_size")  # the window once more
    for block, key in ((full, "add_full_attention_sink_bias"), (sliding, "add_swa_attention_sink_bias")):
        block |= {"sinks": True} if config.flag(key) else {}  # noqa: PLW2901 - changed in place
    pattern = config.switches("hybrid_layer_pattern", length=config.layers)
    return Blocks({"full": full, "sliding": sliding}, ["sliding" if each else "full" for each in pattern])


def searched(config: Config) -> Blocks:
    """Attention of layers that a search has thinned out (Llama-Nemotron): some have none (``block_configs``)."""
    q_heads, layers, known = config.count("num_attention_heads"), [], dict[str, Block]()
    for where, part in _parts(config, "attention"):
        if part.get("no_op"):
            layers.append(NONE)
            continue
        group = config.whole(f"{where}.n_heads_in_group", part.get("n_heads_in_group"))
        window = config.whole(f"{where}.window_length", part.get("window_length") or 0, least=0)
        if q_heads % group:
            raise config.fault(f"{where}.n_heads_in_group: {group} does not divide num_attention_heads {q_heads}")
        name = f"gqa_{q_heads // group}" + (f"_window_{window}" if window else "")
        known[name] = gqa_block(config) | {"kv_heads": q_heads // group} | ({"window": window} if window else {})
        layers.append(name)
    return Blocks(known, layers)


def searched_ffn(config: Config) -> Blocks:
    """Gated layers of unlike widths, multiples of the hidden size; some layers have none."""
    layers, known = [], dict[str, Block]()
    for where, part in _parts(config, "ffn"):
        if part.get("no_op"):
            layers.append(NONE)
            continue
        multiple = part.get("ffn_mult")
        if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 < multiple < 1e3:
            raise config.fault(f"{where}.ffn_mult: {value_text(multiple)} is not a number from 0 to 1000")
        width = int(2 * multiple * config.hidden / 3)
        width += -width % _WIDTH_STEP
        known[f"dense_{width}"] = {"kind": "dense", "width": width}
        layers.append(f"dense_{width}")
    return Blocks(known, layers)


def _parts(config: Config, part: str) -> list[tuple[str, Mapping[str, Any]]]:
    """One part of each layer of ``block_configs``, with its place; what makes it no layer of ours is refused."""
    found = []
    for index, layer in enumerate(config.series("block_configs", length=config.layers)):
        where = f"block_configs[{index}].{part}"
        inner = layer.get(part) if isinstance(layer, Mapping) else None
        if not isinstance(inner, Mapping):
            raise config.fault(f"{where}: {value_text(inner)} is not 'key: value' pairs")
        for key in ("replace_with_linear", "sparsify"):
            if inner.get(key):
                raise config.fault(f"{where}.{key}: {value_text(inner[key])}: not modelled")
        found.append((where, inner))
    return found


Reader = Callable[[Config], Blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Readers of one class of models."""

    attention: Reader
    ffn: Reader = dense
    whole: Callable[[Config], dict[str, Any]] = lambda _: {}  # keys of the whole model
    tied: bool = False  # whether embeddings are tied where no key says it


def _gqa(**traits: object) -> Reader:
    return partial(gqa, traits=Traits(**traits))  # type: ignore[arg-type]


def _moe(**traits: object) -> Reader:
    return partial(experts, traits=MoeTraits(**traits))  # type: ignore[arg-type]


def _streams(config: Config) -> dict[str, Any]:
    """Streams of hyper-connections."""
    count = config.count("hc_mult", default=1)
    config.find("mhc", "hc_sinkhorn_iters")
    return {"residual_streams": count} if count > 1 else {}


def _post_norms(_: Config) -> dict[str, Any]:
    return {"post_norms": True}


_QWEN2 = Family(attention=_gqa(qkv_bias=True, output_bias=False, window="switched"))
_QWEN3 = Family(attention=_gqa(qk_norm=True, window="switched"))
_DEEPSEEK = Family(attention=mla, ffn=_moe(router_bias="topk_method"))
_DEEPSEEK_V4 = Family(attention=compressed, ffn=_moe(router_bias="topk_method"), whole=_streams)
_QWEN3_NEXT = Family(attention=gated_delta, ffn=_moe(shared_width="shared_expert_intermediate_size", shared_gate=True))
_MINIMAX_M3 = Family(
    attention=block_sparse,
    ffn=_moe(
        dense_width=("dense_intermediate_size",),
        shared_width="shared_intermediate_size",
        router_bias="use_routing_bias",
    ),
)

#: Class of a model -> its family.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(attention=_gqa()),
    "MistralForCausalLM": Family(attention=_gqa(window="all")),
    "MixtralForCausalLM": Family(attention=_gqa(window="all"), ffn=_moe()),
    "Llama4ForCausalLM": Family(
        attention=_gqa(window="chunked"),
        ffn=_moe(width=("intermediate_size",), dense_width=("intermediate_size_mlp",), always_shared=True),
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": _QWEN2,
    "Qwen2MoeForCausalLM": Family(
        attention=_gqa(qkv_bias=True, output_bias=False, window="switched"),
        ffn=_moe(shared_width="shared_expert_intermediate_size", shared_gate=True),
    ),
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": Family(attention=_gqa(qk_norm=True, window="switched"), ffn=_moe()),
    "GemmaForCausalLM": Family(attention=_gqa(), tied=True),
    "GptOssForCausalLM": Family(
        attention=_gqa(sinks=True, window="typed"),
        ffn=_moe(width=("intermediate_size",), router_bias=True, expert_bias=True),
    ),
    "Glm4MoeForCausalLM": Family(attention=_gqa(output_bias=False, qk_norm="use_qk_norm"), ffn=_moe(router_bias=True)),
    "MiniMaxM2ForCausalLM": Family(
        attention=_gqa(qk_norm_all_heads="use_qk_norm", window="listed"),
        ffn=_moe(width=("intermediate_size",), router_bias="use_routing_bias"),
    ),
    "MiniMaxM3ForCausalLM": _MINIMAX_M3,
    "MiniMaxM3SparseForCausalLM": _MINIMAX_M3,
    "MiMoV2FlashForCausalLM": Family(attention=mimo2, ffn=_moe(router_bias="topk_method")),
    "MuseGlimmerForCausalLM": Family(attention=_gqa(window="typed"), whole=_post_norms),
    "Gemma2ForCausalLM": Family(attention=_gqa(window="every_other"), whole=_post_norms, tied=True),
    "Gemma3ForCausalLM": Family(attention=_gqa(qk_norm=True, window="every_sixth"), whole=_post_norms, tied=True),
    "Gemma4ForCausalLM": Family(attention=gemma4, ffn=gemma4_ffn, whole=_post_norms, tied=True),
    "DeciLMForCausalLM": Family(attention=searched, ffn=searched_ffn),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": Family(attention=gated_delta),
    "Qwen3_5MoeForCausalLM": _QWEN3_NEXT,
    "NemotronHForCausalLM": Family(attention=mamba, ffn=mamba_ffn),
    "KimiLinearForCausalLM": Family(
        attention=kimi_delta,
        ffn=latent_experts,
        whole=lambda config: {"attention_residuals": True} if config.has("attn_res_block_size") else {},
    ),
    "Glm5NextForCausalLM": Family(attention=kimi_delta_and_sparse, ffn=_moe(router_bias="topk_method"), whole=_streams),
    "GlmMoeDsaForCausalLM": Family(attention=dsa_blocks, ffn=_moe(router_bias="topk_method")),
    "DeepseekV32ForCausalLM": Family(attention=dsa_blocks, ffn=_moe(router_bias="topk_method")),
    "DeepseekV4ForCausalLM": _DEEPSEEK_V4,
    "DeepseekV41ForCausalLM": _DEEPSEEK_V4,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
}

#: Class of a model with more than text -> that of its text.
TEXT_OF: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Glm5NextForConditionalGeneration": "Glm5NextForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "KimiK3ForConditionalGeneration": "KimiLinearForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration": "MiniMaxM3SparseForCausalLM",
    "MuseGlimmerForConditionalGeneration": "MuseGlimmerForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
}
#: Keys under which a model with more than text keeps its text model.
TEXT_KEYS = ("text_config", "llm_config", "language_config")
