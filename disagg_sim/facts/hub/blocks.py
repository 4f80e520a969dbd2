"""Attention and feed-forward blocks of models whose keys every family writes alike: GQA, MLA, dense layers, experts.

Each reader returns ``Blocks``: descriptions by name, as ``models/*.yaml`` writes them, and the name that each layer
uses. What a family's code does without a key of its own is a ``Traits`` or ``MoeTraits``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from disagg_sim.facts.faults import value_text
from disagg_sim.facts.hub.config import Config

Block = Mapping[str, Any]
#: Name of a layer's type -> whether it has a sliding window.
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Descriptions by name, and the name of each layer's."""

    known: Mapping[str, Block]
    layers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the code of a family with grouped-query attention does; a text is the key that says it."""

    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    qk_norm: bool | str = False
    qk_norm_all_heads: bool | str = False  # one norm over all heads
    sinks: bool = False
    window: str = "no"  # which layers have one: a key of ``WINDOWS``


def gqa(config: Config, traits: Traits = Traits()) -> Blocks:
    """Grouped-query attention, with windows on all layers, some or none."""
    full = gqa_block(config)
    config.find("attention_bias")
    for flag in ("qkv_bias", "output_bias", "qk_norm", "qk_norm_all_heads", "sinks"):
        full |= {flag: True} if _holds(config, getattr(traits, flag)) else {}
    windows = WINDOWS[traits.window](config)
    key, local = ("chunk", "chunked") if traits.window == "chunked" else ("window", "sliding")
    one = len({*windows}) == 1
    named = {size: "gqa" if one else local if size else "full" for size in windows}
    known = {name: full | ({key: size} if size else {}) for size, name in named.items()}
    return Blocks(known, [named[size] for size in windows])


def gqa_block(config: Config) -> dict[str, Any]:
    """Heads of one layer with grouped-query attention."""
    q_heads = config.count("num_attention_heads")
    return {
        "kind": "gqa",
        "q_heads": q_heads,
        "kv_heads": config.count("num_key_value_heads", default=q_heads),
        "head_dim": head_dim(config, q_heads),
    }


def head_dim(config: Config, q_heads: int) -> int:
    """Size of a head: its key, or the hidden size cut by the heads."""
    if config.has("head_dim", "attention_head_dim"):
        return config.count("head_dim", "attention_head_dim")
    if config.hidden % q_heads:
        raise config.fault(f"num_attention_heads: {q_heads} does not divide hidden_size {config.hidden}; give head_dim")
    return config.hidden // q_heads


def _holds(config: Config, trait: bool | str) -> bool:
    return config.flag(trait) if isinstance(trait, str) else trait


def _all(config: Config) -> list[int]:
    """A window on every layer that the file does not leave out."""
    return [config.count("sliding_window", default=0, least=0)] * config.layers


def _switched(config: Config) -> list[int]:
    """Windows from some layer on, if a switch is on (Qwen)."""
    first, size = config.count("max_window_layers", default=0, least=0), _all(config)[0]
    on = config.flag("use_sliding_window")
    return [size if on and layer >= first else 0 for layer in range(config.layers)]


def _typed(config: Config, every: int = 0) -> list[int]:
    """Windows by the type of each layer; without types every so many layers have full attention."""
    size = config.count("sliding_window", default=0, least=0)
    if config.has("layer_types"):
        types = config.words("layer_types", tuple(LAYER_TYPES), length=config.layers)
        return [size if LAYER_TYPES[each] else 0 for each in types]
    if not every:
        raise config.fault("missing key 'layer_types'")
    every = config.count("sliding_window_pattern", default=every)
    config.assume(f"layer_types: one layer of {every} has full attention, as the family's code does")
    return [size if (layer + 1) % every else 0 for layer in range(config.layers)]


def _chunked(config: Config) -> list[int]:
    """Chunks in layers with rotary positions: all but every fourth, unless a list says which (Llama 4)."""
    size, every = (
        config.count("attention_chunk_size", default=0, least=0),
        config.count("no_rope_layer_interval", default=4),
    )
    config.find("use_qk_norm")  # without weights
    listed = config.find("no_rope_layers")[1]
    rotary = config.switches("no_rope_layers", length=config.layers) if listed else None
    return [size if (rotary[layer] if rotary else (layer + 1) % every) else 0 for layer in range(config.layers)]


def _listed(config: Config) -> list[int]:
    """No windows; a list may say that a layer is linear, which is refused (MiniMax)."""
    for index, each in enumerate(config.series("attn_type_list") if config.has("attn_type_list") else ()):
        if each != 1:
            raise config.fault(f"attn_type_list[{index}]: {value_text(each)}: lightning attention is not modelled")
    return [0] * config.layers


#: Word of ``Traits.window`` -> window, or chunk, of each layer; 0 = none. [token]
WINDOWS: dict[str, Callable[[Config], list[int]]] = {
    "no": lambda config: [0] * config.layers,
    "all": _all,
    "switched": _switched,
    "typed": _typed,
    "every_other": partial(_typed, every=2),
    "every_sixth": partial(_typed, every=6),
    "chunked": _chunked,
    "listed": _listed,
}


def mla(config: Config) -> Blocks:
    """Multi-head latent attention."""
    return Blocks({"mla": mla_block(config)}, ["mla"] * config.layers)


def mla_block(config: Config) -> dict[str, Any]:
    """Sizes of one layer with multi-head latent attention."""
    config.find("num_key_value_heads", "head_dim")  # of the heads before they share a latent
    return {
        "kind": "mla",
        "q_heads": config.count("num_attention_heads"),
        "q_rank": config.count("q_lora_rank", default=0, least=0),
        "kv_rank": config.count("kv_lora_rank"),
        "nope_dim": config.count("qk_nope_head_dim"),
        "rope_dim": config.count("qk_rope_head_dim", least=0),
        "value_dim": config.count("v_head_dim"),
    }


def dense(config: Config) -> Blocks:
    """Gated feed-forward layers of one width."""
    return Blocks({"dense": {"kind": "dense", "width": config.count("intermediate_size")}}, ["dense"] * config.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTraits:
    """What the code of a family with experts does; a text is the key that says it."""

    width: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    dense_width: tuple[str, ...] = ("intermediate_size",)
    shared: tuple[str, ...] = ("n_shared_experts", "num_shared_experts")  # how many there are
    shared_width: str = ""  # of all of them; "" = as wide as routed ones
    always_shared: bool = False
    shared_gate: bool = False
    router_bias: bool | str = False
    expert_bias: bool = False


def experts(config: Config, traits: MoeTraits = MoeTraits()) -> Blocks:
    """Routed and shared experts, and dense layers between them."""
    sparse = sparse_layers(config)
    known: dict[str, Block] = {}
    config.find(*traits.dense_width)
    if not all(sparse):
        known["dense"] = {"kind": "dense", "width": config.count(*traits.dense_width)}
    if any(sparse):
        known["moe"] = moe_block(config, traits)
    return Blocks(known, ["moe" if each else "dense" for each in sparse])


def moe_block(config: Config, traits: MoeTraits) -> dict[str, Any]:
    """Sizes of one layer with experts."""
    width = config.count(*traits.width)
    block: dict[str, Any] = {
        "kind": "moe",
        "experts": config.count("n_routed_experts", "num_local_experts", "num_experts"),
        "top_k": config.count("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
        "width": width,
    }
    if traits.shared_width:
        shared, shared_width = 1, config.count(traits.shared_width, default=0, least=0)
        config.find(*traits.shared)
    else:
        shared = config.count(*traits.shared, default=int(traits.always_shared), least=0)
        shared_width = width
    if shared and shared_width:
        block |= {"shared_experts": shared, "shared_width": shared_width}
        block |= {"shared_gate": True} if traits.shared_gate else {}
    bias = traits.router_bias  # of each expert, added to its score
    if config.word("topk_method") == "noaux_tc" if bias == "topk_method" else _holds(config, bias):
        block["router_bias"] = True
    if traits.expert_bias:
        block["expert_bias"] = True
    return block


def sparse_layers(config: Config) -> list[bool]:
    """Whether each layer has experts, by whichever of the keys are there."""
    layers = config.layers
    if config.has("mlp_layer_types"):
        config.find("first_k_dense_replace", "moe_layer_freq")
        return [each == "sparse" for each in config.words("mlp_layer_types", ("dense", "sparse"), length=layers)]
    if isinstance(config.find("moe_layer_freq")[1], list):
        config.find("first_k_dense_replace")
        return config.switches("moe_layer_freq", length=layers)
    first = config.count("first_k_dense_replace", default=0, least=0)
    every = config.count("moe_layer_freq", default=1)
    step = config.count("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    without = config.layer_numbers("mlp_only_layers") if config.has("mlp_only_layers") else set()
    return [
        layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in without
        for layer in range(layers)
    ]
