"""Sparse and compressed attention: DeepSeek-V3.2 and V4, GLM-5, MiniMax-M3."""

from __future__ import annotations

from typing import Any

from disagg_sim.facts.hub.blocks import Block, Blocks, gqa_block, mla_block
from disagg_sim.facts.hub.config import Config

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
