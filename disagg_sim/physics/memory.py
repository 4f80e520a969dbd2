"""Count the bytes on the fullest GPU of an instance (physics page, section 4).

``M = M_w + M_kv + M_act + M_comm + M_rt <= u * M_usable``. With pipeline stages the fullest stage
counts; KV heads above n_kv are duplicated and the MLA latent is whole on every TP rank. An engine that lets the
cache fill a share f of what the rest leaves needs ``M_kv/f`` for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.physics.blocks import Layer, layers_of
from disagg_sim.physics.residents import CachedTokens, Prefilling, Residents, colocated_load, decode_load, prefill_load
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.stages import stage_table
from disagg_sim.physics.work import ACTIVATION_BYTES, LOGIT_BYTES, Numeric

#: Dispatch arrives in one byte per element, combine leaves in two (section 4, M_comm).
ALL_TO_ALL_BUFFER_BYTES = 3.0


def layer_weight_bytes(model: ModelSpec, layer: Layer, precision: Precision, mapping: Mapping) -> Numeric:
    """Weights of one layer on one GPU. [B]"""
    d, attention = model.hidden, layer.attention
    norms = (4 if model.layer_norm else 2) * d + attention.spec.other_params(d)
    projections = attention.matmul_params(d, mapping.tp_attn) * precision.projection(attention.spec.kind).bytes
    return projections + norms * ACTIVATION_BYTES + layer.ffn.weight_bytes(d, precision, mapping)


def weight_bytes(model: ModelSpec, precision: Precision) -> float:
    """All weights of the model, embedding and head included. [B]"""
    whole = Mapping()
    layers = layers_of(model)
    total = sum(float(layer_weight_bytes(model, layer, precision, whole)) * count for layer, count in layers)
    ends = model.embedding_params * precision.embedding.bytes
    return total + ends + (0 if model.tied_embeddings else model.head_params * precision.head.bytes)


def kv_duplication(model: ModelSpec, tp: Numeric) -> Numeric:
    """Copies of each cached element over a TP group: ``max(1, tp/n_kv)`` for GQA, tp for MLA; the mean of kinds. [1]"""
    held: Numeric = 0.0
    for layer, count in layers_of(model):
        held = held + count * layer.attention.cache_elements(tp)
    return held * tp / model.kv_elements_per_token()


def activation_bytes(model: ModelSpec, mapping: Mapping, residents: Residents, imbalance: float) -> Numeric:
    """Activations of the live layer and the logits. [B]"""
    tp, live = mapping.tp_attn, residents.live
    widest: Numeric = 0.0
    for layer, _ in layers_of(model):
        widest = np.maximum(widest, live * layer.attention.activation_width(tp))
        widest = np.maximum(widest, layer.ffn.widest(model.hidden, mapping, live, residents.live_total, imbalance))
    logits = residents.emitted * (model.vocab * LOGIT_BYTES) / tp
    return ACTIVATION_BYTES * (live * (4 * model.hidden) + widest) + logits


def communication_bytes(model: ModelSpec, mapping: Mapping, live: Numeric) -> Numeric:
    """Buffers of collectives: two all-reduce messages, and what an all-to-all receives. [B]"""
    d, tp = model.hidden, mapping.tp_attn
    total = np.where(np.asarray(tp) > 1, 2 * ACTIVATION_BYTES * d, 0.0) * live
    picks = max(layer.ffn.picks for layer, _ in layers_of(model))
    if not picks:
        return total
    exchanged = (np.asarray(mapping.dp_attn) > 1) & (np.asarray(mapping.ep) > 1)
    return total + np.where(exchanged, picks * d * ALL_TO_ALL_BUFFER_BYTES / tp, 0.0) * live


class _OfStage(NamedTuple):
    """What a GPU of one stage holds of its layers. [B]"""

    weights: Numeric
    cache: Numeric
    state: Numeric  # the number 0 where no layer keeps one

    @property
    def total(self) -> Numeric:
        """All of it. [B]"""
        held = self.weights + self.cache
        return held if np.ndim(self.state) == 0 and self.state == 0.0 else held + self.state


class MemoryParts(NamedTuple):
    """What fills the fullest GPU of an instance. [B]"""

    weights: Numeric
    cache: Numeric  # KV cache, latents and up-projected keys and values, and what the engine leaves free for them
    state: Numeric  # of the sequences: linear attention keeps one, whatever their length
    activations: Numeric  # of the live layer, and the logits
    communication: Numeric  # buffers of collectives
    runtime: Numeric  # context, graphs and libraries


def instance_bytes(at: Setup, mapping: Mapping, residents: Residents, imbalance: float = 1.0) -> Numeric:
    """Bytes on the fullest GPU of the fullest stage. [B]"""
    fullest: Numeric = 0.0
    for held in _stages(at, mapping, residents):
        fullest = np.maximum(fullest, held.total)
    activations, communication, runtime = _everywhere(at, mapping, residents, imbalance)
    return fullest + activations + communication + runtime


def instance_parts(at: Setup, mapping: Mapping, residents: Residents, imbalance: float = 1.0) -> MemoryParts:
    """Take ``instance_bytes`` apart; the parts are those of the fullest stage and add up to it.

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance. [1]
    residents
        What a rank holds: ``decode_load``, ``prefill_load`` or ``colocated_load``.
    imbalance
        Load of the fullest expert rank over the mean. [1]

    Returns
    -------
    MemoryParts
        Numbers, or arrays of the shape of the mapping. [B]
    """
    held, *others = _stages(at, mapping, residents)
    for more in others:
        fuller = more.total > held.total
        held = _OfStage(*(np.where(fuller, new, old) for new, old in zip(more, held, strict=True)))
    return MemoryParts(*held, *_everywhere(at, mapping, residents, imbalance))


def _stages(at: Setup, mapping: Mapping, residents: Residents) -> Iterator[_OfStage]:
    """What a GPU of every stage that may be the fullest holds of its layers. [B]"""
    model, precision = at.model, at.precision
    tp, d = mapping.tp_attn, model.hidden
    table = stage_table(model, mapping.pp)
    layers = [layer for layer, _ in layers_of(model)]
    of_layer = [layer_weight_bytes(model, layer, precision, mapping) for layer in layers]
    ends, final_norm = model.vocab * d / tp, (2 if model.layer_norm else 1) * d * ACTIVATION_BYTES
    tied_here = 1.0 - np.where(np.asarray(mapping.pp) == 1, float(model.tied_embeddings), 0.0)
    for counts, first, last in zip(table.layers, table.first, table.last, strict=True):
        weights = first * (ends + model.learned_positions * d) * precision.embedding.bytes
        weights = weights + last * (tied_here * ends * precision.head.bytes + final_norm)
        cache: Numeric = 0.0
        state: Numeric = 0.0
        per_token: Numeric = 0.0
        for index, layer in enumerate(layers):
            count, attention = counts[..., index], layer.attention
            weights = weights + count * of_layer[index]
            element = count * attention.cache_elements(tp) * precision.cache.bytes
            window = attention.spec.window_tokens
            if window:
                cache = cache + element * np.minimum(residents.tokens, residents.sequences * window)
            else:
                per_token = per_token + element
            if attention.spec.state_elements:
                state = state + count * attention.state_elements(tp) * precision.cache.bytes * residents.sequences
            if np.any(np.asarray(residents.expanded) > 0) and "cached" in attention.forms:
                cache = cache + count * attention.expanded_elements(tp) * precision.cache.bytes * residents.expanded
        whole = per_token * residents.tokens
        cache = whole if np.ndim(cache) == 0 and cache == 0.0 else cache + whole
        yield _OfStage(weights, cache / at.cache_share, state)


def _everywhere(
    at: Setup, mapping: Mapping, residents: Residents, imbalance: float
) -> tuple[Numeric, Numeric, Numeric]:
    """Activations, buffers of collectives and runtime, which every stage holds. [B]"""
    return (
        activation_bytes(at.model, mapping, residents, imbalance),
        communication_bytes(at.model, mapping, residents.live),
        at.profile.runtime_bytes + at.profile.communication_library_bytes,
    )


def decode_bytes(
    at: Setup, mapping: Mapping, batch: Numeric, *, cached: CachedTokens, mla_form: str = "auto"
) -> Numeric:
    """Bytes on the fullest GPU of a decode instance at its steady batch of sequences ``cached``. [B]

    The MLA form ``cached`` keeps the up-projected keys and values of every sequence.
    """
    residents = decode_load(at, mapping, batch, cached=cached, mla_form=mla_form)
    return instance_bytes(at, mapping, residents, at.profile.decode_imbalance)


def prefill_bytes(
    at: Setup, mapping: Mapping, batch: Numeric, *, prompt: CachedTokens, chunk_tokens: Numeric, mla_form: str = "auto"
) -> Numeric:
    """Bytes on the fullest GPU of a prefill instance: the caches of ``2*pp*b`` prompts, running and leaving. [B]

    The MLA form ``cached`` adds the up-projected keys and values of the pass that is in a stage.
    """
    residents = prefill_load(at, mapping, batch, prompt=prompt, chunk_tokens=chunk_tokens, mla_form=mla_form)
    return instance_bytes(at, mapping, residents, at.profile.prefill_imbalance)


def colocated_bytes(
    at: Setup, mapping: Mapping, batch: Numeric, *, cached: CachedTokens, prefilling: Prefilling, mla_form: str = "auto"
) -> Numeric:
    """Bytes on the fullest GPU of an instance that decodes ``batch`` requests and also prefills. [B]

    To the residents of a decode instance come the prompts in prefill, each with its whole cache. The MLA form
    ``cached`` adds their up-projected keys and values. No prompts is ``decode_bytes`` at the imbalance of prefill.
    """
    residents = colocated_load(at, mapping, batch, cached=cached, prefilling=prefilling, mla_form=mla_form)
    return instance_bytes(at, mapping, residents, at.profile.prefill_imbalance)
