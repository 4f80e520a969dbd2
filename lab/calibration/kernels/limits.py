"""Compute the least possible time of a measured call from the vendor's peaks.

The limit counts only the FLOP and bytes that no kernel can avoid: bytes that fit into the L2 cache may stay there, a
token is sent once to each rank, experts that a skewed routing may leave out are not read. So a row below the limit is
wrong in shape, format or clock, not merely fast. Counts: physics page, sections 2, 3 and 5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.blocks.gqa import gqa_decode_work, gqa_prefill_work
from disagg_sim.physics.collectives import copies_per_rank, gather_bytes
from disagg_sim.physics.work import ACTIVATION_BYTES, causal_pairs, expected_distinct_experts

#: Type words of the tables -> (bytes of an element, arithmetic). Words that are absent name no type.
TYPES = {
    "bfloat16": (2.0, "bf16"),
    "half": (2.0, "bf16"),
    "fp8": (1.0, "fp8"),
    "fp8_block": (1.0, "fp8"),
    "nvfp4": (0.5625, "nvfp4"),
    "fp4": (0.5625, "nvfp4"),
    "int8_sq": (1.0, "int8"),
    "int8": (1.0, "int8"),
}
#: An exchange whose type is not told sends at least this. [B]
LEAST_WIRE_BYTES = 0.5
#: Elements of a cached token of latent attention, and of its rotated part, in the one size that was measured.
MLA_RANK, MLA_ROPE, MLA_NOPE, MLA_VALUE = 512, 64, 128, 128


def least_time(form: str, rows: pd.DataFrame, system: SystemSpec) -> NDArray[np.float64]:
    """Least time of each row of a table at the system's peaks; 0 where unknown. [s]"""
    if form == "collectives":
        size, n = column_of(rows, "message_bytes"), column_of(rows, "num_gpus")
        moved = np.where(rows["op"] == "all_reduce", size, gather_bytes(size, n))
        return np.asarray(moved / system.nvlink_bandwidth)
    if form == "moe_alltoall":
        return _exchange(rows, system)
    flops, moved, arithmetic = _COUNTS[form](rows)
    most = max(system.peak_flops.values())  # of a system that lacks an arithmetic, whose kernels compute in another
    peak = np.array([system.peak_flops.get(name, most) for name in arithmetic])
    seconds = np.maximum(flops / peak, np.maximum(moved - system.l2_capacity, 0.0) / system.hbm_bandwidth)
    return np.asarray(seconds)


def column_of(rows: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """A column as numbers, (rows,)."""
    return rows[name].to_numpy(dtype=float)


def _types(rows: pd.DataFrame, column: str) -> tuple[NDArray[np.float64], list[str]]:
    known = [TYPES.get(word, (LEAST_WIRE_BYTES, "nvfp4")) for word in rows[column]]
    return np.array([size for size, _ in known]), [arithmetic for _, arithmetic in known]


def _exchange(rows: pd.DataFrame, system: SystemSpec) -> NDArray[np.float64]:
    n, nodes = column_of(rows, "ep_size"), column_of(rows, "node_num")
    element = np.where(rows["phase"] == "dispatch", _types(rows, "dtype")[0], LEAST_WIRE_BYTES)
    token = column_of(rows, "num_tokens") * column_of(rows, "hidden") * element
    top_k = column_of(rows, "topk")
    inside = n <= system.nvlink_domain
    link = np.where(inside, system.nvlink_bandwidth, system.nic_bandwidth)
    copies = np.array([copies_per_rank(k, g) for k, g in zip(top_k, np.where(inside, n, nodes), strict=True)])
    return np.where(rows["phase"] == "prepare", 0.0, token * copies / link)


def _gemm(rows: pd.DataFrame) -> Any:
    m, n, k = (column_of(rows, name) for name in ("m", "n", "k"))
    size, arithmetic = _types(rows, "dtype")
    return 2.0 * m * n * k, (n * k + m * k) * size + m * n * ACTIVATION_BYTES, arithmetic


def _attention_types(rows: pd.DataFrame) -> tuple[NDArray[np.float64], list[str]]:
    """Bytes of a cached element, and the faster arithmetic of the two named: fp8 caches are multiplied in fp8."""
    cache, stored = _types(rows, "kv_dtype")
    _, labelled = _types(rows, "compute_dtype")
    return cache, ["fp8" if "fp8" in pair else "bf16" for pair in zip(stored, labelled, strict=True)]


def _heads(rows: pd.DataFrame) -> dict[str, Any]:
    heads = {name: column_of(rows, name) for name in ("q_heads", "kv_heads")}
    return heads | {"sequences": column_of(rows, "batch"), "head_dim": column_of(rows, "head_dim"), "window": 0.0}


def _context_attention(rows: pd.DataFrame) -> Any:
    _, arithmetic = _attention_types(rows)
    return *gqa_prefill_work(new=column_of(rows, "seq_len"), past=0.0, cache_bytes=1.0, **_heads(rows)), arithmetic


def _generation_attention(rows: pd.DataFrame) -> Any:
    size, arithmetic = _attention_types(rows)
    work = gqa_decode_work(context=column_of(rows, "kv_len"), cache_bytes=1.0, **_heads(rows))
    return work.flops, work.hbm_bytes * size, arithmetic


def _mla_context(rows: pd.DataFrame) -> Any:
    pairs = column_of(rows, "batch") * causal_pairs(column_of(rows, "seq_len"))
    _, arithmetic = _attention_types(rows)
    return 2.0 * (MLA_NOPE + MLA_ROPE + MLA_VALUE) * column_of(rows, "heads") * pairs, 0.0 * pairs, arithmetic


def _mla_generation(rows: pd.DataFrame) -> Any:
    size, arithmetic = _attention_types(rows)
    tokens = column_of(rows, "batch") * column_of(rows, "kv_len")
    flops = 2.0 * (2 * MLA_RANK + MLA_ROPE) * column_of(rows, "heads") * tokens
    return flops, tokens * size * (MLA_RANK + MLA_ROPE), arithmetic


def _mla_module(rows: pd.DataFrame) -> Any:
    """The cache alone, and in a prompt its arithmetic: how the projections are stored is one of many choices."""
    size, arithmetic = _attention_types(rows)
    new, past, batch = column_of(rows, "q_len"), column_of(rows, "past_len"), column_of(rows, "batch")
    flops = 2.0 * (MLA_NOPE + MLA_ROPE + MLA_VALUE) * column_of(rows, "heads") * batch * causal_pairs(new, past)
    return flops, batch * past * size * (MLA_RANK + MLA_ROPE), arithmetic


def _mla_bmm(rows: pd.DataFrame) -> Any:
    _, arithmetic = _types(rows, "dtype")
    flops = 2.0 * MLA_RANK * MLA_NOPE * column_of(rows, "num_tokens") * column_of(rows, "heads")
    return flops, 0.0 * flops, arithmetic


def _moe(rows: pd.DataFrame) -> Any:
    """All picks of the tokens spread over the ranks; every expert of the rank where routing is balanced."""
    size, arithmetic = _types(rows, "dtype")
    top_k, experts, ep = (column_of(rows, name) for name in ("topk", "num_experts", "ep"))
    tokens, hidden = column_of(rows, "num_tokens"), column_of(rows, "hidden")
    expert = 3.0 * hidden * column_of(rows, "inter") / column_of(rows, "tp")
    touched = expected_distinct_experts(tokens, experts, top_k) / ep
    moved = np.where(rows["distribution"] == "balanced", touched * expert * size, 0.0)
    return 2.0 * expert * tokens * top_k / ep, moved, arithmetic


def _quantize_ops(rows: pd.DataFrame) -> Any:
    elements = column_of(rows, "m") * column_of(rows, "k")
    written = np.where(rows["op"] == "scale_matrix", 1.0, 0.0)
    return 0.0 * elements, elements * (ACTIVATION_BYTES + written), ["bf16"] * len(rows)


def _linear_attention(rows: pd.DataFrame) -> Any:
    """States in and out in 16 bits, except those of a convolution."""
    state = column_of(rows, "batch") * column_of(rows, "v_heads") * column_of(rows, "v_dim") * column_of(rows, "k_dim")
    moved = np.where(rows["kernel_source"].str.contains("conv"), 0.0, 2.0 * ACTIVATION_BYTES * state)
    return 0.0 * state, moved, ["bf16"] * len(rows)


def _nothing(rows: pd.DataFrame) -> Any:
    """Of work that a skew may take away from rank 0, and of modules with an index whose layout is not told."""
    nothing = np.zeros(len(rows))
    return nothing, nothing, ["bf16"] * len(rows)


_COUNTS = {
    "gemm": _gemm,
    "context_attention": _context_attention,
    "generation_attention": _generation_attention,
    "mla_context": _mla_context,
    "mla_generation": _mla_generation,
    "mla_module": _mla_module,
    "mla_bmm": _mla_bmm,
    "moe": _moe,
    "moe_ep_compute": _nothing,
    "quantize_ops": _quantize_ops,
    "linear_attention": _linear_attention,
    "sparse_attention": _nothing,
}
