"""Count the bytes on the fullest GPU of an instance (physics page, section 4).

``M = M_w + M_kv + M_act + M_comm + M_rt <= u * M_usable``. With pipeline stages the fullest stage
counts; KV heads above n_kv are duplicated and the MLA latent is whole on every TP rank. An engine that lets the
cache fill a share f of what the rest leaves needs ``M_kv/f`` for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.physics.blocks import Layer, layers_of
from disagg_sim.physics.passes.mixed import chunk_share
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.stages import stage_table
from disagg_sim.physics.work import ACTIVATION_BYTES, LOGIT_BYTES, Numeric

#: Dispatch arrives in one byte per element, combine leaves in two (section 4, M_comm).
ALL_TO_ALL_BUFFER_BYTES = 3.0
#: The MLA form that keeps up-projected keys and values beside the latent.
EXPANDED = "cached"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """What a rank holds and works on while it serves."""

    sequences: Numeric  # whose cache is resident [1]
    tokens: Numeric  # their cached tokens [token]
    live: Numeric  # tokens of one forward pass on this rank [token]
    live_total: Numeric  # the same over all DP ranks [token]
    emitted: Numeric  # sequences of this rank that emit a token in a pass [1]
    expanded: Numeric = 0.0  # tokens whose up-projected MLA keys and values are kept [token]


class Live(NamedTuple):
    """What one forward pass works on, for which activations, logits and buffers are kept."""

    tokens: Numeric  # of the fullest DP rank [token]
    total: Numeric  # of all DP ranks [token]
    emitted: Numeric  # sequences of the fullest rank that emit a token [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Distribution of the cached tokens of one resident request; those of several are independent."""

    mean: float  # [token]
    deviation: float  # standard deviation [token]
    most: float  # [token]

    def of(self, requests: Numeric, deviations: float) -> Numeric:
        """What ``requests`` hold: the mean of the sum plus ``deviations`` of its own, at most ``most`` each. [token]"""
        held = requests * self.mean + deviations * np.sqrt(requests) * self.deviation
        return np.minimum(held, requests * self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilling:
    """Prompts that an instance prefills while it decodes."""

    prompts: Numeric  # over all DP ranks [1]
    prompt: CachedTokens  # length of each
    new: Numeric  # prefill tokens of the fullest rank that are live in one forward pass [token]
    mixed: bool  # whether in one pass together with the decodes, or in one of their own


def prefilling_in_passes(
    mapping: Mapping, prompts: Numeric, prompt: CachedTokens, chunk_tokens: Numeric, deviations: float
) -> Prefilling:
    """Prompts that are prefilled in passes of their own, decode waiting.

    Parameters
    ----------
    mapping, prompts
        Sharding, and prompts of a pass over all DP ranks. [1]
    prompt, deviations
        Length of a prompt, and standard deviations that a sum of them may lie above its mean. [1]
    chunk_tokens
        Of each prompt; 0 = whole prompts. [token]
    """
    own = np.ceil(prompts / mapping.dp_attn)
    whole = prompt.of(np.ceil(own / np.minimum(mapping.pp, own)), deviations)
    new = np.where(np.asarray(chunk_tokens) > 0, own * chunk_tokens, whole)
    return Prefilling(prompts=prompts, prompt=prompt, new=new, mixed=False)


def prefilling_in_pieces(
    mapping: Mapping, prompts: Numeric, prompt: CachedTokens, chunk_tokens: Numeric, batch: Numeric
) -> Prefilling:
    """Prompts that are prefilled in pieces of ``chunk_tokens`` over all DP ranks, in the steps of ``batch`` decodes."""
    new = chunk_share(chunk_tokens / np.minimum(mapping.pp, batch), mapping.dp_attn)
    return Prefilling(prompts=prompts, prompt=prompt, new=new, mixed=True)


def decode_residents(isl: float, osl: float) -> CachedTokens:
    """Cache of one sequence in steady decode: ages are uniform, so ``ISL + OSL/2`` with deviation ``OSL/sqrt(12)``."""
    return CachedTokens(mean=isl + osl / 2, deviation=osl / math.sqrt(12.0), most=isl + osl)


def prompt_residents(isl: float) -> CachedTokens:
    """Cache of one prompt of ``isl`` tokens in prefill, counted whole from its start."""
    return CachedTokens(mean=isl, deviation=0.0, most=isl)


def decode_live(mapping: Mapping, batch: Numeric) -> Live:
    """A micro-batch of a decode step: with pp stages, ``min(pp, batch)`` of them follow each other."""
    own = np.ceil(np.ceil(batch / np.minimum(mapping.pp, batch)) / mapping.dp_attn)
    return Live(own, np.minimum(own * mapping.dp_attn, batch), own)


def prefill_live(
    mapping: Mapping, batch: Numeric, prompt: CachedTokens, chunk_tokens: Numeric, deviations: float
) -> Live:
    """A micro-batch of whole prompts of a pass, or, with CPP, a chunk of every prompt of a rank.

    Parameters
    ----------
    mapping, batch
        Sharding, and prompts of a pass over all DP ranks. [1]
    prompt, deviations
        Length of a prompt, and standard deviations that a sum of them may lie above its mean. [1]
    chunk_tokens
        Of each prompt; 0 = whole prompts. [token]
    """
    prompts = np.ceil(batch / mapping.dp_attn)
    microbatch = np.ceil(prompts / np.minimum(mapping.pp, prompts))
    chunk = np.minimum(prompts * chunk_tokens, prompt.of(prompts, deviations))
    own = np.where(chunk_tokens > 0, chunk, prompt.of(microbatch, deviations))
    total = np.minimum(own * mapping.dp_attn, prompt.of(batch, deviations))
    return Live(own, total, np.where(chunk_tokens > 0, prompts, microbatch))


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


def decode_load(
    at: Setup, mapping: Mapping, batch: Numeric, *, cached: CachedTokens, mla_form: str = "auto"
) -> Residents:
    """What a rank of a decode instance holds at its steady batch. Arguments as in ``decode_bytes``."""
    sequences = np.ceil(batch / mapping.dp_attn)
    tokens = cached.of(sequences, at.profile.resident_deviations)
    live = decode_live(mapping, batch)
    return Residents(
        sequences=sequences,
        tokens=tokens,
        live=live.tokens,
        live_total=live.total,
        emitted=live.emitted,
        expanded=tokens if mla_form == EXPANDED else 0.0,
    )


def decode_bytes(
    at: Setup, mapping: Mapping, batch: Numeric, *, cached: CachedTokens, mla_form: str = "auto"
) -> Numeric:
    """Bytes on the fullest GPU of a decode instance at its steady batch of sequences ``cached``. [B]

    The MLA form ``cached`` keeps the up-projected keys and values of every sequence.
    """
    residents = decode_load(at, mapping, batch, cached=cached, mla_form=mla_form)
    return instance_bytes(at, mapping, residents, at.profile.decode_imbalance)


def prefill_load(
    at: Setup, mapping: Mapping, batch: Numeric, *, prompt: CachedTokens, chunk_tokens: Numeric, mla_form: str = "auto"
) -> Residents:
    """What a rank of a prefill instance holds. Arguments as in ``prefill_bytes``."""
    deviations = at.profile.resident_deviations
    prompts = np.ceil(batch / mapping.dp_attn)
    live = prefill_live(mapping, batch, prompt, chunk_tokens, deviations)
    resident = 2.0 * mapping.pp * prompts
    return Residents(
        sequences=resident,
        tokens=prompt.of(resident, deviations),
        live=live.tokens,
        live_total=live.total,
        emitted=live.emitted,
        expanded=prompt.of(prompts, deviations) if mla_form == EXPANDED else 0.0,
    )


def prefill_bytes(
    at: Setup, mapping: Mapping, batch: Numeric, *, prompt: CachedTokens, chunk_tokens: Numeric, mla_form: str = "auto"
) -> Numeric:
    """Bytes on the fullest GPU of a prefill instance: the caches of ``2*pp*b`` prompts, running and leaving. [B]

    The MLA form ``cached`` adds the up-projected keys and values of the pass that is in a stage.
    """
    residents = prefill_load(at, mapping, batch, prompt=prompt, chunk_tokens=chunk_tokens, mla_form=mla_form)
    return instance_bytes(at, mapping, residents, at.profile.prefill_imbalance)


def colocated_load(
    at: Setup, mapping: Mapping, batch: Numeric, *, cached: CachedTokens, prefilling: Prefilling, mla_form: str = "auto"
) -> Residents:
    """What a rank of an instance that does both phases holds. Arguments as in ``colocated_bytes``."""
    deviations = at.profile.resident_deviations
    prompt, prompts, new = prefilling.prompt, prefilling.prompts, prefilling.new
    sequences, own = np.ceil(batch / mapping.dp_attn), np.ceil(prompts / mapping.dp_attn)
    decodes = np.ceil(np.ceil(batch / np.minimum(mapping.pp, batch)) / mapping.dp_attn)
    together = np.add if prefilling.mixed else np.maximum
    decodes_total = np.minimum(decodes * mapping.dp_attn, batch)
    new_total = np.minimum(new * mapping.dp_attn, prompt.of(prompts, deviations))
    whole = prompt.of(own, deviations)
    return Residents(
        sequences=sequences + own,
        tokens=cached.of(sequences, deviations) + whole,
        live=together(decodes, new),
        live_total=together(decodes_total, new_total),
        emitted=together(decodes, own),
        expanded=whole if mla_form == EXPANDED else 0.0,
    )


def colocated_bytes(
    at: Setup, mapping: Mapping, batch: Numeric, *, cached: CachedTokens, prefilling: Prefilling, mla_form: str = "auto"
) -> Numeric:
    """Bytes on the fullest GPU of an instance that decodes ``batch`` requests and also prefills. [B]

    To the residents of a decode instance come the prompts in prefill, each with its whole cache. The MLA form
    ``cached`` adds their up-projected keys and values. No prompts is ``decode_bytes`` at the imbalance of prefill.
    """
    residents = colocated_load(at, mapping, batch, cached=cached, prefilling=prefilling, mla_form=mla_form)
    return instance_bytes(at, mapping, residents, at.profile.prefill_imbalance)
