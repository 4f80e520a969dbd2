"""Families of models by the class that their ``config.json`` names, each with readers of its attention and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from disagg_sim.facts.hub.blocks import Blocks, MoeTraits, Traits, dense, experts, gqa, mla
from disagg_sim.facts.hub.config import Config

Reader = Callable[[Config], Blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Readers of one class of models; ``said`` holds what stands in its code alone."""

    attention: Reader
    ffn: Reader = dense
    tied: bool = False  # whether embeddings are tied where no key says it


def _gqa(**traits: object) -> Reader:
    return partial(gqa, traits=Traits(**traits))  # type: ignore[arg-type]


def _moe(**traits: object) -> Reader:
    return partial(experts, traits=MoeTraits(**traits))  # type: ignore[arg-type]


_QWEN2 = Family(attention=_gqa(qkv_bias=True, output_bias=False, window="switched"))
_QWEN3 = Family(attention=_gqa(qk_norm=True, window="switched"))
_DEEPSEEK = Family(attention=mla, ffn=_moe(router_bias="topk_method"))

#: Class of a model -> its family.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(attention=_gqa()),
    "MistralForCausalLM": Family(attention=_gqa(window="all")),
    "MixtralForCausalLM": Family(attention=_gqa(window="all"), ffn=_moe()),
    "Llama4ForCausalLM": Family(
        attention=_gqa(),
        ffn=_moe(width=("intermediate_size",), dense_width=("intermediate_size_mlp",), always_shared=True),
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": _QWEN2,
    "Qwen2MoeForCausalLM": Family(
        attention=_gqa(qkv_bias=True, output_bias=False, window="switched"),
        ffn=_moe(shared_width="shared_expert_intermediate_size"),
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
        attention=_gqa(qk_norm="use_qk_norm"), ffn=_moe(width=("intermediate_size",), router_bias="use_routing_bias")
    ),
    "MuseGlimmerForCausalLM": Family(attention=_gqa(window="typed")),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
}

#: Class of a model with more than text -> that of its text.
TEXT_OF: dict[str, str] = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "MuseGlimmerForConditionalGeneration": "MuseGlimmerForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
}
#: Keys under which a model with more than text keeps its text model.
TEXT_KEYS = ("text_config", "llm_config", "language_config")
