"""Count the bytes on the fullest GPU of an instance (physics page, section 4).

``M = M_w + M_kv + M_act + M_comm + M_rt <= u * M_usable``. With pipeline stages the fullest stage
counts; KV heads above n_kv are duplicated and the MLA latent is whole on every TP rank. An engine that lets the
cache fill a share f of what the rest leaves needs ``M_kv/f`` for it.

A server of an engine measures M_act at its start-up, by one full step of T tokens and S sequences:

    A = max(sampler, forward) + experts + base
    sampler = b*(T + S)*d + S*V*w_s + n_SM*V*w_r        hidden states kept, logits and their copies, buffers
    forward = b*T*(c_h*d + widest)                      hidden states alive at once, and the widest part of a layer
    experts = b*rows*(max(f, d) + max(2*f, d))          workspaces of a fused MoE kernel, which stay allocated

b = 2 B, V the vocabulary, f the width of an expert on this GPU. The vocabulary is gathered on every rank, so TP
shortens ``forward`` alone. Constants are those of ``facts.engine``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.engine import EngineMemory
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.blocks.base import Layer
from disagg_sim.physics.passes.engine_time import stage_table
from disagg_sim.physics.residents import (
    EXPANDED,
    CachedTokens,
    Prefilling,
    Residents,
    colocated_load,
    decode_load,
    prefill_load,
)
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import is_one
from disagg_sim.physics.work import ACTIVATION_BYTES, LOGIT_BYTES, Numeric
from disagg_sim.techniques.speculation.physics import joining_bytes

#: Dispatch arrives in one byte per element, combine leaves in two (section 4, M_comm).
ALL_TO_ALL_BUFFER_BYTES = 3.0
#: Bytes of a weight that mixes residual streams: fp32. [B]
STREAM_BYTES = 4.0


def layer_weight_bytes(model: ModelSpec, layer: Layer, precision: Precision, mapping: Sharding) -> Numeric:
    """Weights of one layer on one GPU. [B]"""
    d, attention = model.hidden, layer.attention
    norms = model.norm_params(layer.kind) + attention.spec.other_params(d)
    others = norms * ACTIVATION_BYTES + model.stream_params(layer.kind) * STREAM_BYTES
    projections = attention.weight_bytes(d, precision, mapping.tp_attn)
    return projections + others + layer.ffn.weight_bytes(d, precision, mapping)


def weight_bytes(model: ModelSpec, precision: Precision) -> float:
    """Size all weights of the model, embedding and head included. [B]

    Llama-3.1-70B in fp8: 70.6e9 parameters of one byte, and of the 2.1e9 of embedding and head a second one.
    """
    whole = Sharding()
    layers = layers_of(model)
    total = sum(float(layer_weight_bytes(model, layer, precision, whole)) * count for layer, count in layers)
    ends = model.embedding_params * precision.embedding.bytes
    return total + ends + (0 if model.tied_embeddings else model.head_params * precision.head.bytes)


def kv_duplication(model: ModelSpec, tp: Numeric) -> Numeric:
    """Copies of a byte cached in bf16 over a TP group: ``max(1, tp/n_kv)`` for GQA, tp for MLA; mean of kinds. [1]"""
    held: Numeric = 0.0
    whole = 0.0
    for layer, count in layers_of(model):
        for store, here in layer.attention.stores(ACTIVATION_BYTES, tp):
            held, whole = held + count * here, whole + count * store.token_bytes
    return held * tp / whole


def activation_bytes(model: ModelSpec, mapping: Sharding, residents: Residents, imbalance: float) -> Numeric:
    """Activations of the live layer and the logits. [B]"""
    tp, live = mapping.tp_attn, residents.live
    widest: Numeric = 0.0
    for layer, _ in layers_of(model):
        widest = np.maximum(widest, live * layer.attention.activation_width(tp))
        widest = np.maximum(widest, layer.ffn.widest(model.hidden, mapping, live, residents.live_total, imbalance))
    logits = residents.emitted * (model.vocab * LOGIT_BYTES) / tp
    return ACTIVATION_BYTES * (live * (4 * model.hidden) + widest) + logits


def communication_bytes(model: ModelSpec, mapping: Sharding, live: Numeric) -> Numeric:
    """Buffers of collectives: two all-reduce messages, and ``exchange_bytes``. [B]"""
    d, tp = model.hidden, mapping.tp_attn
    total = np.where(np.asarray(tp) > 1, 2 * ACTIVATION_BYTES * d, 0.0) * live
    return total + exchange_bytes(model, mapping, live)


def exchange_bytes(model: ModelSpec, mapping: Sharding, live: Numeric) -> Numeric:
    """What an all-to-all of experts receives, and keys and values of a layer that PCP gathers; 0 without both. [B]"""
    d, tp, (_, pcp) = model.hidden, mapping.tp_attn, mapping.shares
    gathered: Numeric = 0.0
    if not is_one(pcp):
        rows = [sum(here for _, here in layer.attention.stores(ACTIVATION_BYTES, tp)) for layer, _ in layers_of(model)]
        gathered = np.where(pcp > 1, np.maximum.reduce(np.broadcast_arrays(*rows)), 0.0) * (live * pcp)
    received = max(layer.ffn.picks * layer.ffn.wire_width(d) for layer, _ in layers_of(model))
    if not received:
        return gathered
    exchanged = (np.asarray(mapping.token_ranks) > 1) & (np.asarray(mapping.ep) > 1)
    return np.where(exchanged, received * ALL_TO_ALL_BUFFER_BYTES / tp, 0.0) * live + gathered


class _OfStage(NamedTuple):
    """What a GPU of one stage holds of its layers. [B]"""

    weights: Numeric
    cache: Numeric
    state: Numeric  # the number 0 where no layer keeps one

    @property
    def total(self) -> Numeric:
        """All of it. [B]"""
        return self.weights + self.cache + self.state


class MemoryParts(NamedTuple):
    """What fills the fullest GPU of an instance. [B]"""

    weights: Numeric
    cache: Numeric  # KV cache, latents and up-projected keys and values, and what the engine leaves free for them
    state: Numeric  # of the sequences: linear attention keeps one, whatever their length
    activations: Numeric  # of the live layer, and the logits
    communication: Numeric  # buffers of collectives
    runtime: Numeric  # context, graphs and libraries


def instance_bytes(at: Setup, mapping: Sharding, residents: Residents, imbalance: float = 1.0) -> Numeric:
    """Size what lies on the fullest GPU of the fullest stage. [B]"""
    activations, communication, runtime = _everywhere(at, mapping, residents, imbalance)
    return _fullest(at, mapping, residents) + activations + communication + runtime


def _fullest(at: Setup, mapping: Sharding, residents: Residents) -> Numeric:
    """What a GPU of the fullest stage holds of its layers. [B]"""
    return reduce(np.maximum, (held.total for held in _stages(at, mapping, residents)))


def instance_parts(at: Setup, mapping: Sharding, residents: Residents, imbalance: float = 1.0) -> MemoryParts:
    """Take ``instance_bytes`` apart; the parts are those of the fullest stage and add up to it."""
    held, *others = _stages(at, mapping, residents)
    for more in others:
        fuller = more.total > held.total
        held = _OfStage(*(np.where(fuller, new, old) for new, old in zip(more, held, strict=True)))
    return MemoryParts(*held, *_everywhere(at, mapping, residents, imbalance))


def _stages(at: Setup, mapping: Sharding, residents: Residents) -> Iterator[_OfStage]:
    """What a GPU of every stage that may be the fullest holds of its layers, those of a drafter included. [B]

    A draft model stands on the last stage.
    """
    model, precision = at.with_draft_layers.model, at.precision
    tp, d = mapping.tp_attn, model.hidden
    table = stage_table(at.with_draft_layers, mapping.pp)
    drafter = at.draft_model
    own = None if drafter is None else next(_stages(drafter, replace(mapping, pp=1), residents))
    layers = [layer for layer, _ in layers_of(model)]
    of_layer = [layer_weight_bytes(model, layer, precision, mapping) for layer in layers]
    if at.sharing.decode == "helix" and not is_one(dcp := mapping.shares[0]):
        copies = [layer.attention.inward_copies(d, precision, tp, dcp) for layer in layers]
        of_layer = list(map(operator.add, of_layer, copies))
    joined = joining_bytes(at, tp)
    ends, final_norm = model.vocab * d / tp, (2 if model.layer_norm else 1) * d * ACTIVATION_BYTES
    tied_here = 1.0 - np.where(np.asarray(mapping.pp) == 1, float(model.tied_embeddings), 0.0)
    tables = 0.0 if at.server_memory is None else position_bytes(at.server_memory, model)
    for counts, first, last in zip(table.layers, table.first, table.last, strict=True):
        weights = first * (ends + model.learned_positions * d) * precision.embedding.bytes
        weights = weights + last * (tied_here * ends * precision.head.bytes + final_norm + joined) + tables
        if model.encoder_params:
            weights = weights + first * (model.encoder_params * ACTIVATION_BYTES / tp)
        cache: Numeric = 0.0
        state: Numeric = 0.0
        per_token: Numeric = 0.0
        for index, layer in enumerate(layers):
            count, attention = counts[index], layer.attention
            if np.ndim(count) == 0 and count == 0:
                continue
            weights = weights + count * of_layer[index]
            for store, here in attention.stores(precision.cache.bytes, tp, mapping.dcp):
                token = count * here
                if store.window:
                    cache = cache + token * np.minimum(residents.tokens, residents.sequences * store.window)
                else:
                    per_token = per_token + token
            if attention.spec.state_bytes:
                saved = residents.saved if attention.spec.recurrent_bytes else 0.0
                kept = residents.sequences * residents.states + saved
                state = state + count * attention.state_bytes(tp) * kept
            if np.any(np.asarray(residents.expanded) > 0) and "cached" in attention.forms:
                cache = cache + count * attention.expanded_elements(tp) * precision.cache.bytes * residents.expanded
        whole = per_token * residents.tokens
        cache = whole if np.ndim(cache) == 0 and cache == 0.0 else cache + whole
        held = _OfStage(weights, cache / at.cache_share, state)
        yield held if own is None else _OfStage(*(one + last * more for one, more in zip(held, own, strict=True)))


def _everywhere(
    at: Setup, mapping: Sharding, residents: Residents, imbalance: float
) -> tuple[Numeric, Numeric, Numeric]:
    """Activations, buffers of collectives and runtime, which every stage holds. [B]"""
    if (held := at.server_memory) is not None:
        activations = profiled_bytes(at, mapping, residents, imbalance)
        return activations, exchange_bytes(at.model, mapping, residents.live), non_torch_bytes(held, mapping)
    return (
        activation_bytes(at.model, mapping, residents, imbalance),
        communication_bytes(at.model, mapping, residents.live),
        at.profile.runtime_bytes + at.profile.communication_library_bytes,
    )


def decode_bytes(
    at: Setup, mapping: Sharding, batch: Numeric, *, cached: CachedTokens, mla_form: str = "auto"
) -> Numeric:
    """Size what lies on the fullest GPU of a decode instance at its steady batch of sequences ``cached``. [B]

    The form ``cached`` of MLA keeps the up-projected keys and values of every sequence; the others need the same.
    """
    residents = decode_load(at, mapping, batch, cached=cached, mla_form=mla_form)
    return instance_bytes(at, mapping, residents, at.profile.decode_imbalance)


def prefill_bytes(
    at: Setup, mapping: Sharding, batch: Numeric, *, prompt: CachedTokens, chunk_tokens: Numeric, mla_form: str = "auto"
) -> Numeric:
    """Size what lies on the fullest GPU of a prefill instance. [B]

    It holds the caches of ``2*pp*b`` prompts, running and leaving. The form ``cached`` of MLA adds the up-projected
    keys and values of the pass that is in a stage; 0 chunk tokens are whole prompts.
    """
    residents = prefill_load(at, mapping, batch, prompt=prompt, chunk_tokens=chunk_tokens, mla_form=mla_form)
    return instance_bytes(at, mapping, residents, at.profile.prefill_imbalance)


def colocated_bytes(
    at: Setup, mapping: Sharding, batch: Numeric, *, cached: CachedTokens, prefilling: Prefilling
) -> Numeric:
    """Size what lies on the fullest GPU of an instance that decodes ``batch`` requests and also prefills. [B]

    To the residents of a decode instance come the prompts in prefill, each with its whole cache. No prompts is
    ``decode_bytes`` at the imbalance of prefill.

    A prompt of 8192 tokens beside 64 decodes: 8192 x 20.5 kB = 0.17 GB of cache, and activations of a chunk.
    """
    (held,) = colocated_bytes_of(at, mapping, batch, cached=cached, prefilling=prefilling, mla_forms=("auto",))
    return held


def colocated_bytes_of(
    at: Setup,
    mapping: Sharding,
    batch: Numeric,
    *,
    cached: CachedTokens,
    prefilling: Prefilling,
    mla_forms: Sequence[str],
) -> list[Numeric]:
    """Size what ``colocated_bytes`` does under several forms of MLA, which differ in the caches of prompts. [B]

    Keys and values of 128 heads in place of one latent, of a prompt of 8192 tokens in 61 layers: 20 GB more.

    >>> from disagg_sim.physics.residents import decode_residents, prefilling_in_pieces, prompt_residents
    >>> from disagg_sim.physics.setup import setup
    >>> at, wide = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), Sharding(dp_attn=8, ep=8)
    >>> cached, pieces = decode_residents(8192, 1024), prefilling_in_pieces(wide, 8, prompt_residents(8192), 512, 64)
    >>> forms = ("auto", "cached")
    >>> plain, kept = colocated_bytes_of(at, wide, 64, cached=cached, prefilling=pieces, mla_forms=forms)
    >>> f"{(kept - plain) / 1e9:.0f} GB"
    '20 GB'
    """
    kept = colocated_load(at, mapping, batch, cached=cached, prefilling=prefilling, mla_form=EXPANDED)
    everywhere = _everywhere(at, mapping, kept, at.profile.prefill_imbalance)
    found: dict[bool, Numeric] = {}
    for expanded in dict.fromkeys(form == EXPANDED for form in mla_forms):
        total = _fullest(at, mapping, kept if expanded else replace(kept, expanded=0.0))
        for more in everywhere:
            total = total + more
        found[expanded] = total
    return [found[form == EXPANDED] for form in mla_forms]


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
    """Size runtime and collective libraries of a GPU; a TP degree that nobody measured takes the nearest below. [B]"""
    tp, alone = np.asarray(mapping.tp_attn), np.where(np.asarray(mapping.pp) > 1, held.non_torch_stages, held.non_torch)
    return np.where(tp >= 4, held.non_torch_tp4, np.where(tp >= 2, held.non_torch_tp2, alone))


def position_bytes(held: EngineMemory, model: ModelSpec) -> float:
    """Size the tables of rotary positions, one of each kind of attention as long as the context, on every GPU. [B]"""
    if model.learned_positions:
        return 0.0
    widths = sum(attention.rotary_dim for attention in dict.fromkeys(kind.attention for kind in model.kinds))
    return held.position_entry * model.max_context * widths
