"""Load caches from memory below HBM, or compute them again; what such memory holds.

Source: physics page, section 8 (Prefix reuse).
"""

from __future__ import annotations

import math

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.hardware import KvTier
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.physics.kv_transfer import kv_bytes_per_request, prefix_bytes, unique_gpus
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


def load_time(at: Setup, mapping: Sharding, *, batch: Numeric, past: float, tier: KvTier | None) -> Numeric:
    """Time until the pasts of a pass are in HBM.

    Each GPU loads its own part over its own link: ``t = latency + ceil(b/dp)*K(C)/(G_unique/dp*R)``. A part that
    several GPUs of a TP group hold is loaded by each.
    """
    if tier is None or past == 0:
        return 0.0
    size = loaded_bytes(at, past)
    return tier.latency_s + np.ceil(batch / mapping.dp_attn) * size / rank_bandwidth(at, mapping, past, tier)


def loaded_bytes(at: Setup, past: float, held: float = 0.0) -> float:
    """Size what is loaded of a past, each element once. [B]"""
    model, precision = at.cached_layers, at.precision
    there = kv_bytes_per_request(model, precision, held) - model.state_bytes if held else 0.0
    return kv_bytes_per_request(model, precision, past) - there


def rank_bandwidth(at: Setup, mapping: Sharding, past: float, tier: KvTier) -> Numeric:
    """Find how fast GPUs of one attention rank fill from a tier, each with its own part: ``G_unique/dp*R``. [B/s]

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8")
    >>> ranks = (Sharding(tp_attn=8, ep=8), Sharding(dp_attn=8, ep=8))
    >>> [f"{rank_bandwidth(at, each, 1000, at.system.tier('dram')) / 1e9:.0f} GB/s" for each in ranks]
    ['50 GB/s', '50 GB/s']
    """
    return unique_gpus(at.cached_layers, mapping, past, at.precision) / mapping.dp_attn * tier.bandwidth


def tier_tokens(at: Setup, mapping: Sharding, capacity: float | None, prompt: float) -> float:
    """Count the tokens that the share of an instance in a tier holds, of ``capacity`` B; None = all it needs. [token]

    Eight shares of 250 GB hold 12 million tokens of 164 kB:

    >>> from disagg_sim.physics.setup import setup
    >>> at, eight = setup("llama_3_1_70b", "h200_sxm", "fp8"), Sharding(tp_attn=8, tp_ffn=8)
    >>> f"{tier_tokens(at, eight, at.system.tier('dram').capacity, 8192) / 1e6:.1f} million"
    '12.2 million'
    """
    if capacity is None:
        return math.inf
    unique = float(unique_gpus(at.cached_layers, mapping, prompt, at.precision))
    return room_tokens(at.cached_layers, at.precision, unique * capacity, prompt)


def room_tokens(model: ModelSpec, precision: Precision, room: float, prompt: float) -> float:
    """Count the tokens of prompts that ``room`` B of memory hold, each once. [token]

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_70b", "h200_sxm", "fp8")
    >>> f"{room_tokens(at.cached_layers, at.precision, 20e9, 8192):,.0f}"
    '122,070'
    """
    return room / prefix_bytes(model, precision, prompt) * prompt


def break_even_bandwidth(at: Setup, past: float, recomputed_s: Numeric) -> Numeric:
    """Find the bandwidth above which an instance loads a prefix sooner than it computes it again. [B/s]

    ``R* = K(C)/t``: it falls as the prefix grows, as attention is quadratic in it.
    """
    return kv_bytes_per_request(at.cached_layers, at.precision, past) / recomputed_s
