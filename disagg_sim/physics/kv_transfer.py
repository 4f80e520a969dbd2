"""Size the KV transfer from prefill to decode: bytes, unique shards, bandwidth.

Physics page, section 8: equations (1) and (2) of arXiv 2506.05508 ("Beyond the Buzz") with pipelined rates.
"""

from __future__ import annotations

import math

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.work import ACTIVATION_BYTES, Numeric

#: Decimals of a count of GPUs that follows from a division.
ROUNDED = 9
#: Blocks of attention are enlarged by so many tokens at a time. [token]
BLOCK_STEP = 16


def kv_bytes_per_request(model: ModelSpec, precision: Precision, isl: float) -> float:
    """Size the cache, and the state, of one prompt, each element once. [B]

    Llama-3.1-70B in fp8: 80 layers x 2 x 8 KV heads x 128 x 1 B = 164 kB a token.
    """
    return model.kv_bytes(isl, precision)


def checkpoint_tokens(model: ModelSpec, precision: Precision) -> int:
    """Find how far apart the places are at which a cached prefix can be taken up again. [token]

    A recurrent state can be taken up only where it was saved: vLLM keeps states in blocks of the KV pool and enlarges
    the blocks of attention until one of them is as large as a state, and saves a state at each of their ends
    (``--mamba-cache-mode align``). Compressed attention goes on at the end of an entry. Returns 1 where every token
    will do.
    """
    specs = [kind.attention for kind in model.kinds]
    entries = math.lcm(*(spec.entry_tokens for spec in specs))
    states = [spec.recurrent_bytes for spec in specs if spec.recurrent_bytes]
    if not states:
        return entries
    cached = [sum(store.token_bytes for store in spec.stores(precision.cache.bytes)) for spec in specs]
    if not any(cached):
        return model.max_context
    block = math.ceil(max(states) / min(each for each in cached if each) / BLOCK_STEP) * BLOCK_STEP
    return math.lcm(block, entries)


def prefix_bytes(model: ModelSpec, precision: Precision, tokens: float) -> float:
    """Size a cached prefix of so many tokens with the states that were saved along it. [B]"""
    saved = tokens // checkpoint_tokens(model, precision)
    return model.kv_bytes(tokens, precision) - model.state_bytes + saved * model.recurrent_bytes


def checkpoint_cost(model: ModelSpec, precision: Precision) -> int:
    """Count the cached tokens that take as much memory as the states of one checkpoint. [token]

    Rounded up; 0 without recurrent states, and without any cache of tokens.
    """
    token = model.kv_bytes_per_token(precision)
    return math.ceil(model.recurrent_bytes / token) if token else 0


def unique_gpus(
    model: ModelSpec, mapping: Sharding, tokens: float | None = None, precision: Precision | None = None
) -> Numeric:
    """Count the GPUs of an instance that hold distinct parts of the cache. [1]

    Every stage and DP rank is distinct; in a TP group min(tp, n_kv) GPUs are, and one for MLA. Where kinds of attention
    differ in this, a GPU sends the sum of its parts: ``sum(e_i)/sum(e_i/n_i)`` over the bytes ``e_i`` of the kinds at
    ``tokens`` cached tokens (None = the longest context), each on ``n_i`` GPUs. Under DCP each of the GPUs that share
    the tokens of a KV head has its own; copies over PCP ranks count once.
    """
    length, tp = model.max_context if tokens is None else tokens, mapping.tp_attn
    apart = {n for kind in model.kinds for n in kind.attention.distinct_parts}
    distinct: Numeric = np.minimum(tp, min(apart, default=1))
    shared = bool(np.any(np.asarray(mapping.dcp) > 1))
    if shared or any(np.any(np.minimum(tp, other) != distinct) for other in apart):
        element = ACTIVATION_BYTES if precision is None else precision.cache.bytes
        whole: Numeric = 0.0
        sent: Numeric = 0.0
        for layer, count in layers_of(model):
            whole = whole + count * layer.attention.spec.sequence_bytes(length, element)
            sent = sent + count * layer.attention.sent(length, element, tp, mapping.dcp)
        distinct = np.round(whole / sent, ROUNDED) if shared else whole / sent
    return mapping.dp_attn * mapping.pp * distinct


def descriptors(model: ModelSpec, tokens: int, block_tokens: int) -> int:
    """Count the pieces of memory that hold a cache: a block of each tensor of each layer, and each state. [1]"""
    total = 0
    for layer, count in layers_of(model):
        spec = layer.attention.spec
        blocks = sum(store.tensors * -(-int(store.tokens(tokens)) // block_tokens) for store in spec.stores(1.0))
        total += int(count) * (blocks + bool(spec.state_bytes))
    return total


def own_link_bandwidth(system: SystemSpec, profile: ProfileSpec, *, within_domain: bool) -> float:
    """Find what a GPU sends or receives of caches, one way: over NVLink inside one domain, else over its NIC. [B/s]

    >>> from disagg_sim.facts.load import load_profile, load_system
    >>> ideal, h200 = load_profile("ideal"), load_system("h200_sxm")
    >>> [f"{own_link_bandwidth(h200, ideal, within_domain=near) / 1e9:.0f} GB/s" for near in (True, False)]
    ['450 GB/s', '50 GB/s']
    """
    return profile.p2p_efficiency * (system.nvlink_bandwidth if within_domain else system.nic_bandwidth)


def bandwidth_per_gpu(request_rate: Numeric, kv_bytes: Numeric, unique: Numeric) -> Numeric:
    """Find egress or ingress of each GPU with distinct cache: ``rate*kv_bytes(ISL)/G_unique``. [B/s]

    With rate = b/busy this is Eq. (1) for any pipeline, with rate = B/(TTL*(OSL-1)) Eq. (2). Takes
    ``request_rate`` [req/s]. The result is of the broadcast shape.
    """
    return request_rate * kv_bytes / unique
