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

from disagg_sim.facts.speculation import JOINED, Speculation
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric, Operator, gemm


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
    if at.draft_model is not None:
        return at.draft_model
    model, speculation = at.model, at.speculation
    assert speculation is not None
    vocab = model.vocab if speculation.layer is None else speculation.layer.vocab
    return replace(at, model=replace(model, layers=speculation.layers_on(model), vocab=vocab), speculation=None)


def joining(at: Setup, tp: Numeric, tokens: Numeric, *, first: bool) -> list[Operator]:
    """List matrix multiplies, whole on every rank, before a draft layer that joins hidden states to tokens.

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
