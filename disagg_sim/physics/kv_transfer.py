"""Size the KV transfer from prefill to decode: bytes, unique shards, bandwidth.

Physics page, section 8: equations (1) and (2) of arXiv 2506.05508 ("Beyond the Buzz") with pipelined rates.
"""

from __future__ import annotations

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.work import Numeric


def kv_bytes_per_request(model: ModelSpec, precision: Precision, isl: float) -> float:
    """Cache, and state, of one prompt, each element once. [B]"""
    return model.kv_elements(isl) * precision.cache.bytes


def unique_gpus(model: ModelSpec, mapping: Mapping, tokens: float | None = None) -> Numeric:
    """GPUs of an instance that hold distinct parts of the cache. [1]

    Every stage and DP rank is distinct; in a TP group min(tp, n_kv) GPUs are, and one for MLA. Where kinds of
    attention differ in this, a GPU sends the sum of its parts: ``sum(e_i)/sum(e_i/n_i)`` over the elements ``e_i`` of
    the kinds at ``tokens`` cached tokens (None = the longest context), each on ``n_i`` GPUs.
    """
    parts = [
        (count * layer.attention.spec.elements(model.max_context if tokens is None else tokens), layer.attention)
        for layer, count in layers_of(model)
    ]
    apart = [attention.distinct(mapping.tp_attn) for held, attention in parts if held]
    distinct: Numeric = apart[0] if apart else 1
    if any(np.any(other != distinct) for other in apart[1:]):
        sent = sum(held / attention.distinct(mapping.tp_attn) for held, attention in parts if held)
        distinct = sum(held for held, _ in parts) / sent
    return mapping.dp_attn * mapping.pp * distinct


def own_link_bandwidth(system: SystemSpec, profile: ProfileSpec, *, within_domain: bool) -> float:
    """What a GPU sends or receives of caches, one way: over NVLink inside one domain, else over its NIC. [B/s]"""
    return profile.p2p_efficiency * (system.nvlink_bandwidth if within_domain else system.nic_bandwidth)


def bandwidth_per_gpu(request_rate: Numeric, kv_bytes: Numeric, unique: Numeric) -> Numeric:
    """Egress or ingress of each GPU with distinct cache: ``rate*kv_bytes(ISL)/G_unique``. [B/s]

    With rate = b/busy this is Eq. (1) for any pipeline, with rate = B/(TTL*(OSL-1)) Eq. (2).
    """
    return request_rate * kv_bytes / unique
