"""Split a setup with speculation into what the drafter adds: its layers behind those of the model, and its passes.

Speculation page, "What is counted". An MTP module joins the hidden state and the embedding of a token (2d to d) in
front of one layer of the model's kind and shares embedding and head (arXiv 2412.19437, section 2.2). EAGLE-3 joins the
hidden states of three layers (3d to d) once a step; its layer reads hidden state and embedding side by side, and its
head is its own (arXiv 2503.01840).

A draft model is a model of its own (arXiv 2211.17192): it has the formats of the recipe and the TP of attention, as
engines ask for (vllm/v1/spec_decode/draft_model.py; SGLang gives it the TP group of the model), a cache of its own for
every token, prompts too, and takes nothing of the model but tokens. It stands on the last pipeline stage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import ACTIVATION_BYTES, Numeric, Operator, gemm
from disagg_sim.techniques.speculation.facts import JOINED, Speculation


@lru_cache(maxsize=64)
def with_draft_layers(at: Setup) -> Setup:
    """Make the setup of the model and its draft layers, of its own width: what prefill passes, and what memory holds.

    The result comes without speculation; ``at`` itself where it has none, or a draft model, which ``draft_model_of``
    finds.
    """
    if at.speculation is None or at.speculation.drafter is not None:
        return at
    return replace(at, model=at.cached_layers, speculation=None)


def draft_model_of(at: Setup) -> Setup | None:
    """Find the setup of the draft model, on the same GPUs.

    Returns None without one: no speculation, or draft layers behind those of the model.

    >>> from disagg_sim.physics.setup import setup
    >>> said = "draft_model llama_3_1_8b 0.7 0.5"
    >>> own = draft_model_of(setup("llama_3_1_70b", "h200_sxm", "fp8", speculation=said))
    >>> own.model.name, own.speculation
    ('llama_3_1_8b', None)
    """
    return of_drafter(at) if at.speculation is not None and at.speculation.drafter is not None else None


@lru_cache(maxsize=64)
def of_drafter(at: Setup) -> Setup:
    """Make the setup of the draft layers alone, of which ``at`` must have some, or of the draft model.

    The module of DeepSeek-R1 repeats a layer of experts, 11.5e9 parameters of it (arXiv 2412.19437, section 2.2):

    >>> from disagg_sim.physics.setup import setup
    >>> own = of_drafter(setup("deepseek_r1", "h200_sxm", "fp8", speculation="deepseek_r1_mtp")).model
    >>> ends = own.embedding_params + own.head_params
    >>> len(own.layers), f"{(own.total_params - ends) / 1e9:.1f}e9"
    (1, '11.5e9')
    """
    model, speculation = at.model, at.speculation
    assert speculation is not None
    if speculation.drafter is None:
        vocab = model.vocab if speculation.layer is None else speculation.layer.vocab
        model = replace(model, layers=speculation.layers_on(model), vocab=vocab)
    return replace(at, model=speculation.drafter or model, speculation=None)


def drafts_of(at: Setup, mapping: Sharding) -> Numeric:
    """Find the draft tokens of a step: those of the mapping, the number 0 where none has any. [token]

    Returns 0, or of the shape of ``mapping.draft_tokens``.

    >>> from disagg_sim.physics.setup import setup
    >>> drafts_of(setup("llama_3_1_8b", "h200_sxm", "fp8"), Sharding(draft_tokens=2))
    Traceback (most recent call last):
    disagg_sim.errors.InputError: a mapping has 2 draft tokens and its setup no speculation; give setup() one
    """
    drafts = mapping.draft_tokens
    most = float(np.max(drafts)) if np.size(drafts) else 0.0
    if most == 0:
        return 0
    if at.speculation is None:
        raise InputError(f"a mapping has {most:g} draft tokens and its setup no speculation; give setup() one")
    at.speculation.trying((int(most),))
    return drafts


def joining(at: Setup, tp: Numeric, tokens: Numeric, *, first: bool) -> list[Operator]:
    """List the matrix multiplies in front of a draft layer, whole on every rank where they join hidden states.

    The result is in the format of the head; none for a draft model, which takes tokens alone.

    The module of DeepSeek-R1 multiplies 2 x 7168 by 7168 elements:

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", speculation="deepseek_r1_mtp")
    >>> [op.shape for op in joining(at, 1, 64, first=True)]
    [(64, 7168, 14336)]
    """
    speculation, d, fmt = at.speculation, at.model.hidden, at.precision.head
    assert speculation is not None
    if speculation.drafter is not None:
        return []
    joined = gemm("join hidden states", tokens, d, JOINED[speculation.method] * d, fmt)
    if speculation.layer is None:
        return [joined]
    columns = _embedding_columns(speculation)
    beside = gemm("qkv of the embedding", tokens, columns / tp, d, fmt)
    return [joined, beside] if first else [beside]


def joining_bytes(at: Setup, tp: Numeric) -> Numeric:
    """Size what a drafter has beside its layers on one GPU: the matrices of ``joining``, and a head of its own. [B]

    The result is of the shape of ``tp``; 0 without speculation, and with a draft model, whose weights are its own.

    2 x 7168^2 elements of two bytes:

    >>> from disagg_sim.physics.setup import setup
    >>> f"{joining_bytes(setup('deepseek_r1', 'h200_sxm', 'fp8', speculation='deepseek_r1_mtp'), 8) / 1e6:.0f} MB"
    '206 MB'
    """
    speculation, d = at.speculation, at.model.hidden
    if speculation is None or speculation.drafter is not None:
        return 0.0
    params: Numeric = JOINED[speculation.method] * d * d
    if speculation.layer is not None:
        params = params + (_embedding_columns(speculation) + speculation.layer.vocab) * d / tp
    return params * at.precision.head.bytes


def _embedding_columns(speculation: Speculation) -> int:
    """Columns of queries, keys and values that an EAGLE-3 layer makes of the embedding. [1]"""
    layer = speculation.layer
    return 0 if layer is None else (layer.q_heads + 2 * layer.kv_heads) * layer.head_dim


def handed_bytes(at: Setup, isl: float) -> float:
    """Size what a prefill instance hands over of one prompt, each element once: caches, states, and to a drafter. [B]

    A drafter takes its own cache and the hidden state of the last token, of three layers for EAGLE-3, of none for a
    draft model. Engines hand over the drafter's cache with that of the model (sglang/srt/disaggregation/prefill.py:
    draft_token_to_kv_pool; vLLM's NIXL connector registers its layers as all others).
    """
    cache = at.cached_layers.kv_bytes(isl, at.precision)
    if at.speculation is None or at.speculation.drafter is not None:
        return cache
    return cache + (JOINED[at.speculation.method] if at.speculation.layer else 1) * at.model.hidden * ACTIVATION_BYTES
