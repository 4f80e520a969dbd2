"""Full attention and windows of unlike sizes (Gemma 4, MiMo-V2); layers that a search has thinned out (Nemotron)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg_sim.facts.faults import value_text
from disagg_sim.facts.hub.blocks import LAYER_TYPES, Block, Blocks, MoeTraits, gqa_block, moe_block
from disagg_sim.facts.hub.config import Config
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
