"""Count what a server of an engine holds beside weights and cache, as its start-up profile measures it.

``A = max(sampler, forward) + experts + base`` of one full step of T tokens and S sequences (physics page, section 4):

    sampler = b*(T + S)*d + S*V*w_s + n_SM*V*w_r        hidden states kept, logits and their copies, buffers
    forward = b*T*(c_h*d + widest)                      hidden states alive at once, and the widest part of a layer
    experts = b*rows*(max(f, d) + max(2*f, d))          workspaces of a fused MoE kernel, which stay allocated

b = 2 B, V the vocabulary, f the width of an expert on this GPU. The vocabulary is gathered on every rank, so TP
shortens ``forward`` alone. Constants are those of ``facts.engine``.
"""

from __future__ import annotations

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.engine import EngineMemory
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.residents import Residents
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import ACTIVATION_BYTES, Numeric


def profiled_bytes(
    at: Setup, mapping: Sharding, residents: Residents, imbalance: float, *, last: bool = True
) -> Numeric:
    """Size the activations that a server's profile of a full step finds. [B]

    The step of ``residents`` counts where it is larger than the engine's own full step; ``last`` is whether the stage
    samples, which the others of a pipeline do not.
    """
    engine = at.overheads
    assert engine is not None and engine.memory is not None, "the engine's memory is not known"  # noqa: PT018
    held, model, d = engine.memory, at.model, at.model.hidden
    whole = float(engine.chunk_tokens)
    tokens = _at_least(residents.live, whole)
    everywhere = _at_least(residents.live_total, whole * np.asarray(mapping.dp_attn, dtype=float))
    sampled = np.minimum(_at_least(residents.emitted, float(engine.max_running)), tokens)
    widest: Numeric = 0.0
    experts: Numeric = 0.0
    for layer, _ in layers_of(model):
        widest = np.maximum(widest, layer.attention.activation_width(mapping.tp_attn))
        widest = np.maximum(widest, layer.ffn.live_width(mapping))
        experts = np.maximum(experts, layer.ffn.workspace(d, mapping, everywhere, imbalance))
    passed = np.where(np.asarray(mapping.pp) > 1, held.stage_widths, 0.0)
    step = ACTIVATION_BYTES * tokens * ((held.hidden_widths + passed) * d + widest)
    if last:
        words = sampled * held.sampler_word + at.system.sm_count * held.sampler_row
        step = np.maximum(step, ACTIVATION_BYTES * (tokens + sampled) * d + model.vocab * words)
    return step + ACTIVATION_BYTES * experts + held.activation_base


def _at_least(values: Numeric, floor: Numeric) -> Numeric:
    """The larger of both; the floor alone, which has fewer elements, where no value lies above it."""
    return floor if np.all(values <= floor) else np.maximum(values, floor)


def non_torch_bytes(held: EngineMemory, mapping: Sharding) -> Numeric:
    """Size runtime and collective libraries of a GPU; a TP degree that nobody measured takes the nearest below. [B]

    The result is of the shape of the degrees.
    """
    tp, alone = np.asarray(mapping.tp_attn), np.where(np.asarray(mapping.pp) > 1, held.non_torch_stages, held.non_torch)
    return np.where(tp >= 4, held.non_torch_tp4, np.where(tp >= 2, held.non_torch_tp2, alone))


def position_bytes(held: EngineMemory, model: ModelSpec) -> float:
    """Size the tables of rotary positions, one of each kind of attention as long as the context, on every GPU. [B]"""
    if model.learned_positions:
        return 0.0
    widths = sum(attention.rotary_dim for attention in dict.fromkeys(kind.attention for kind in model.kinds))
    return held.position_entry * model.max_context * widths
