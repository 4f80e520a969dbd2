"""Families of models by the class that their ``config.json`` names, each with readers of its attention and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from disagg_sim.facts.hub.blocks import Blocks, MoeTraits, Traits, dense, experts, gqa, mla
from disagg_sim.facts.hub.config import Config
from disagg_sim.facts.hub.linear import gated_delta, kimi_delta, kimi_delta_and_sparse, latent_experts, mamba, mamba_ffn
from disagg_sim.facts.hub.mixed import gemma4, gemma4_ffn, mimo2, searched, searched_ffn
from disagg_sim.facts.hub.sparse import block_sparse, compressed, dsa_blocks

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
