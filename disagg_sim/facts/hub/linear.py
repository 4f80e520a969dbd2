"""Linear attention: Qwen3-Next, Kimi Linear and K3, Nemotron-H and 3, GLM-5.3-Flash; sparse: DeepSeek, GLM, MiniMax."""

from __future__ import annotations

from typing import Any

from disagg_sim.facts.hub.blocks import Block, Blocks, MoeTraits, experts, gqa_block, mla_block, moe_block
from disagg_sim.facts.hub.config import Config
from disagg_sim.facts.layers import NONE

#: Tokens of an entry at which DeepSeek-V4 chooses entries by an index; entries of more tokens are all attended to.
CHOSEN_RATIO, WHOLE_RATIO = 4, 128


def dsa_blocks(config: Config) -> Blocks:
    """Latent attention over tokens that an indexer chooses; some layers may reuse the choice of one before."""
    full = mla_block(config) | {
        "kind": "dsa",
        "index_heads": config.count("index_n_heads"),
        "index_dim": config.count("index_head_dim"),
        "top_k": config.count("index_topk"),
    }
    pool = config.count("index_kpool", default=1)
    if pool > 1:
        full |= {"index_pool": pool}
        config.find("index_kpool_compress", "index_kpool_always_select_tail")
    if not config.has("indexer_types"):
        return Blocks({"sparse": full}, ["sparse"] * config.layers)
    types = config.words("indexer_types", ("full", "shared"), length=config.layers)
    for key in ("index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration"):
        config.find(key)  # the list of types says which layers share
    if config.has("layer_types"):
        config.find("layer_types")
    names = {"full": "sparse", "shared": "sparse_shared"}
    return Blocks({"sparse": full, "sparse_shared": full | {"shared_index": True}}, [names[each] for each in types])


def block_sparse(config: Config) -> Blocks:
    """Grouped-query attention over blocks that an index chooses, dense in some layers (MiniMax-M3)."""
    inner = config.section("sparse_attention_config")
    dense = gqa_block(config) | ({"qk_norm": True} if config.flag("use_qk_norm") else {})
    if config.flag("attention_output_gate"):
        raise config.fault("attention_output_gate: true: a gate of block-sparse attention is not modelled")
    if not inner.flag("use_sparse_attention"):
        return Blocks({"gqa": dense}, ["gqa"] * config.layers)
    sparse = dense | {
        "kind": "msa",
        "index_heads": inner.count("sparse_num_index_heads"),
        "index_dim": inner.count("sparse_index_dim"),
        "block": inner.count("sparse_block_size"),
        "top_blocks": inner.count("sparse_topk_blocks"),
    }
    layers = inner.switches("sparse_attention_freq", length=config.layers)
    return Blocks({"gqa": dense, "sparse": sparse}, ["sparse" if each else "gqa" for each in layers])


def compressed(config: Config) -> Blocks:
    """Windows, and beside them compressed entries: some chosen by an index, or all (DeepSeek-V4)."""
    common: dict[str, Any] = {
        "q_heads": config.count("num_attention_heads"),
        "q_rank": config.count("q_lora_rank"),
        "head_dim": config.count("head_dim"),
        "rope_dim": config.count("qk_rope_head_dim"),
        "output_rank": config.count("o_lora_rank"),
        "output_groups": config.count("o_groups"),
        "window": config.count("sliding_window"),
    }
    config.find("num_key_value_heads")
    known: dict[str, Block] = {
        "window": {"kind": "hca", **common, "ratio": 0},
        "entries": {"kind": "hca", **common, "ratio": WHOLE_RATIO},
        "chosen": {
            "kind": "csa",
            **common,
            "ratio": CHOSEN_RATIO,
            "index_heads": config.count("index_n_heads"),
            "index_dim": config.count("index_head_dim"),
            "top_k": config.count("index_topk"),
        },
    }
    names, layers = {0: "window", WHOLE_RATIO: "entries", CHOSEN_RATIO: "chosen"}, []
    for index, ratio in enumerate(config.series("compress_ratios", length=config.layers)):
        tokens = config.whole(f"compress_ratios[{index}]", ratio, least=0)
        if tokens not in names:
            raise config.fault(f"compress_ratios[{index}]: {tokens} is not modelled; allowed: 0, 4, 128")
        layers.append(names[tokens])
    if config.count("num_hash_layers", default=0, least=0):
        config.assume("num_hash_layers: layers that choose experts by the token count as the others")
    return Blocks(known, layers)


#: Word of a number format in a ``config.json`` -> that of a model's file.
_STATE_FORMATS = {"float32": "fp32", "bfloat16": "bf16"}
#: Letter of a layer in ``hybrid_override_pattern``, and its word in ``layers_block_type``.
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


def _state(config: Config, key: str) -> str:
    """Number format of the recurrent state."""
    word = config.word(key, "float32")
    if word not in _STATE_FORMATS:
        raise config.fault(f"{key}: {word!r} is not understood; known: {', '.join(_STATE_FORMATS)}")
    return _STATE_FORMATS[word]


def gated_delta(config: Config) -> Blocks:
    """Gated DeltaNet, and every few layers gated attention over all tokens (Qwen3-Next, Qwen3.5)."""
    linear: Block = {
        "kind": "gdn",
        "key_heads": config.count("linear_num_key_heads"),
        "value_heads": config.count("linear_num_value_heads"),
        "key_dim": config.count("linear_key_head_dim"),
        "value_dim": config.count("linear_value_head_dim"),
        "conv_width": config.count("linear_conv_kernel_dim"),
        "state": _state(config, "mamba_ssm_dtype"),
    }
    full = gqa_block(config) | {"qk_norm": True}
    if config.flag("attn_output_gate", default=True):
        full |= {"output_gate": "element"}
    every = config.count("full_attention_interval", default=4)
    layers = ["linear" if (layer + 1) % every else "full" for layer in range(config.layers)]
    if config.has("layer_types"):
        types = config.words("layer_types", ("linear_attention", "full_attention"), length=config.layers)
        layers = [each.removesuffix("_attention") for each in types]
    return Blocks({"linear": linear, "full": full}, layers)


def kimi_delta(config: Config) -> Blocks:
    """Kimi Delta Attention, and latent attention in the layers that ``linear_attn_config`` lists, counted from 1."""
    inner = config.section("linear_attn_config")
    full_layers = inner.layer_numbers("full_attn_layers")
    inner.find("kda_layers")
    latent = mla_block(config)
    if config.flag("mla_use_output_gate"):
        latent |= {"output_gate": True}
    config.flag("mla_use_nope")
    known = {"linear": _kda(inner), "latent": latent}
    return Blocks(known, ["latent" if layer + 1 in full_layers else "linear" for layer in range(config.layers)])


def _kda(inner: Config) -> dict[str, Any]:
    """Sizes of Kimi Delta Attention, of ``linear_attn_config``."""
    block: dict[str, Any] = {
        "kind": "kda",
        "heads": inner.count("num_heads"),
        "head_dim": inner.count("head_dim"),
        "conv_width": inner.count("short_conv_kernel_size"),
    }
    return block | ({"full_rank_gate": True} if inner.flag("use_full_rank_gate") else {})


def kimi_delta_and_sparse(config: Config) -> Blocks:
    """Kimi Delta Attention and DeepSeek Sparse Attention, by ``layer_types`` (GLM-5.3-Flash)."""
    types = config.words("layer_types", ("linear_attention", "deepseek_sparse_attention"), length=config.layers)
    inner = config.section("linear_attn_config")
    for key in ("linear_conv_kernel_dim", "linear_head_dim", "linear_lower_bound", "linear_num_heads", "mla_use_nope"):
        config.find(key)  # said in linear_attn_config, too
    sparse = dsa_blocks(config)
    known = {"linear": _kda(inner), **sparse.known}
    names = zip(types, sparse.layers, strict=True)
    return Blocks(known, ["linear" if each == "linear_attention" else name for each, name in names])


def _mixers(config: Config) -> list[str]:
    """Kind of each layer of one operator."""
    if config.has("layers_block_type"):
        found = config.words("layers_block_type", tuple(_LETTERS.values()))
        config.find("num_hidden_layers")
        return found
    pattern = config.word("hybrid_override_pattern")
    if not pattern:
        raise config.fault("missing key 'layers_block_type' (or 'hybrid_override_pattern')")
    if unknown := set(pattern) - set(_LETTERS):
        said = f"{min(unknown)!r} is not understood; known: {', '.join(_LETTERS)}"
        raise config.fault(f"hybrid_override_pattern: {said}")
    if len(pattern) != config.layers:
        raise config.fault(f"hybrid_override_pattern: {len(pattern)} letters for {config.layers} layers")
    return [_LETTERS[letter] for letter in pattern]


def mamba(config: Config) -> Blocks:
    """Mamba-2 and attention in layers of one operator (Nemotron-H, Nemotron-3)."""
    mixers, known = _mixers(config), dict[str, Block]()
    if "mamba" in mixers:
        known["mamba"] = {
            "kind": "mamba2",
            "heads": config.count("mamba_num_heads"),
            "head_dim": config.count("mamba_head_dim"),
            "state_dim": config.count("ssm_state_size"),
            "groups": config.count("n_groups"),
            "conv_width": config.count("conv_kernel"),
            "conv_bias": config.flag("use_conv_bias", default=True),
            "projection_bias": config.flag("mamba_proj_bias", "use_bias"),
            "state": _state(config, "mamba_ssm_cache_dtype"),
        }
        for key in ("expand", "chunk_size"):  # heads are given; the chunk is the kernel's
            config.find(key)
    if "attention" in mixers:
        known["full"] = gqa_block(config)
    names = {"mamba": "mamba", "attention": "full"}
    return Blocks(known, [names.get(each, NONE) for each in mixers])


def mamba_ffn(config: Config) -> Blocks:
    """Layers of one operator without gate: dense, or experts that may work in a latent width."""
    mixers, known = _mixers(config), dict[str, Block]()
    if "mlp" in mixers:
        known["dense"] = {"kind": "dense", "width": config.count("intermediate_size"), "matrices": 2}
    if "moe" in mixers:
        traits = MoeTraits(
            width=("moe_intermediate_size",), shared_width="moe_shared_expert_intermediate_size", router_bias=True
        )
        known["moe"] = moe_block(config, traits) | {"matrices": 2} | _latent(config, "moe_latent_size")
        config.find("intermediate_size")
    names = {"mlp": "dense", "moe": "moe"}
    return Blocks(known, [names.get(each, NONE) for each in mixers])


def _latent(config: Config, key: str) -> dict[str, int]:
    latent = config.count(key, default=0, least=0)
    return {"latent": latent} if latent else {}


def latent_experts(config: Config) -> Blocks:
    """Experts in a latent width, with a norm of it behind them (Kimi K3), beside dense layers."""
    found = experts(config, MoeTraits(router_bias="topk_method"))
    latent: dict[str, Any] = _latent(config, "routed_expert_hidden_size")
    if latent and config.flag("latent_moe_use_norm"):
        latent |= {"latent_norm": True}
    known = {name: {**block, **(latent if block["kind"] == "moe" else {})} for name, block in found.known.items()}
    return Blocks(known, found.layers)
