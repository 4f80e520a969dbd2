"""Grouped-query attention, with or without a sliding window. Physics page, section 2 (GQA attention)."""

from __future__ import annotations

import numpy as np

from disagg_sim.facts.layers import GqaAttention
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.physics.blocks.base import AttentionBlock, attention
from disagg_sim.physics.operators import Operator, Tokens, gemm
from disagg_sim.physics.work import AttentionShape, Numeric, Work, causal_pairs


def gqa_prefill_work(
    *,
    sequences: Numeric,
    new: Numeric,
    past: Numeric,
    q_heads: Numeric,
    kv_heads: Numeric,
    head_dim: int,
    window: float,
    cache_bytes: float,
) -> Work:
    """Count scores and values of ``sequences`` prompts: ``4*n_q*h*pairs`` FLOP, cache read and written once.

    Source: physics page, section 2 (GQA attention).

    Parameters
    ----------
    sequences
        Prompts of the call. [1]
    new, past
        Query tokens of each, and cached tokens before them. [token]
    q_heads, kv_heads
        n_q and n_kv, heads of one GPU. [1]
    head_dim
        h, size of a head. [1]
    window
        Of sliding attention; 0 = none. [token]
    cache_bytes
        Size of a cached element. [B]

    Returns
    -------
    Work
        Of one layer, of the broadcast shape of the sizes.

    Examples
    --------
    8 heads of 128 score 500 500 causal pairs; the new keys and values are written and read, 2 x 1000 x 2 x 128 B:

    >>> sizes = {"q_heads": 8, "kv_heads": 1, "head_dim": 128, "window": 0, "cache_bytes": 1}
    >>> work = gqa_prefill_work(sequences=1, new=1000, past=0, **sizes)
    >>> f"{work.flops / 1e9:.2f} GFLOP, {work.hbm_bytes / 1e3:.0f} kB"
    '2.05 GFLOP, 512 kB'
    """
    flops = sequences * (4.0 * head_dim) * q_heads * causal_pairs(new, past, window)
    seen = np.minimum(past, window) if window else past
    return Work(flops, sequences * (seen + 2 * new) * (2 * kv_heads * head_dim * cache_bytes))


def gqa_decode_work(
    *,
    sequences: Numeric,
    context: Numeric,
    q_heads: Numeric,
    kv_heads: Numeric,
    head_dim: int,
    window: float,
    cache_bytes: float,
) -> Work:
    """Count scores and values of one new token of each sequence.

    ``4*n_q*h*ctx`` FLOP and ``2*n_kv*h*b_kv*ctx`` bytes (section 2).

    Parameters
    ----------
    sequences
        In decode. [1]
    context
        Cached tokens of each, the mean. [token]
    q_heads, kv_heads
        n_q and n_kv, heads of one GPU. [1]
    head_dim
        h, size of a head. [1]
    window
        Of sliding attention; 0 = none. [token]
    cache_bytes
        b_kv, size of a cached element. [B]

    Returns
    -------
    Work
        Of one layer, of the broadcast shape of ``sequences`` and ``context``.

    Examples
    --------
    The arithmetic intensity is ``2*n_q/(n_kv*b_kv)``, here 2 x 8 FLOP a byte, whatever the batch and the context:

    >>> sizes = {"q_heads": 8, "kv_heads": 1, "head_dim": 128, "window": 0, "cache_bytes": 1}
    >>> works = [gqa_decode_work(sequences=b, context=c, **sizes) for b, c in ((1, 1000), (64, 8192))]
    >>> [work.flops / work.hbm_bytes for work in works]
    [16.0, 16.0]
    """
    seen = np.minimum(context, window) if window else context
    tokens = sequences * seen
    return Work(tokens * (4 * head_dim * q_heads), tokens * (2 * kv_heads * head_dim * cache_bytes))


@attention("gqa")
class Gqa(AttentionBlock[GqaAttention]):
    """Keys and values of ``kv_heads`` heads are cached; a GPU holds ``ceil(n_kv/tp)`` of them, at least one."""

    untimed = ("value_dim", "chunk", "output_gate", "values_from_keys")

    def kv_heads(self, tp: Numeric) -> Numeric:
        """KV heads that one GPU holds: ``ceil(n_kv/tp)`` (duplicated above n_kv). [1]"""
        return np.ceil(self.spec.kv_heads / tp)

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        d, fmt, heads = model.hidden, precision.projection("gqa"), self.spec.q_heads / tp
        columns = (heads + 2 * self.kv_heads(tp)) * self.spec.head_dim
        return [gemm("qkv", tokens, columns, d, fmt), gemm("o", tokens, d, heads * self.spec.head_dim, fmt)]

    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        spec, cache = self.spec, precision.cache.bytes
        prompts, new, past = tokens.prompts, tokens.new, tokens.past
        q_heads, kv_heads = spec.q_heads / tp, self.kv_heads(tp)
        work = gqa_prefill_work(
            sequences=prompts,
            new=new,
            past=past,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=spec.head_dim,
            window=spec.window,
            cache_bytes=cache,
        )
        keys = 2.0 * causal_pairs(new, past, spec.window) / new
        held = gqa_decode_work(
            sequences=prompts,
            context=past,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=spec.head_dim,
            window=spec.window,
            cache_bytes=cache,
        ).hbm_bytes
        shape = AttentionShape(prompts, new, past, q_heads, kv_heads, spec.head_dim, held, spec.window)
        name = "prefill attention"
        return ([Operator(name, "prefill_attention", work, keys=keys, attention=shape, table="gqa")],)

    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        spec, q_heads, kv_heads = self.spec, self.spec.q_heads / tp, self.kv_heads(tp)
        work = gqa_decode_work(
            sequences=tokens.decodes,
            context=tokens.context,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=spec.head_dim,
            window=spec.window,
            cache_bytes=precision.cache.bytes,
        )
        past = tokens.context - 1.0
        shape = AttentionShape(tokens.decodes, 1.0, past, q_heads, kv_heads, spec.head_dim, window=spec.window)
        return ([Operator("decode attention", "decode_attention", work, attention=shape, table="gqa")],)

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        return hidden * self.spec.head_dim * (2 * self.spec.q_heads / tp + 2 * self.kv_heads(tp))

    def activation_width(self, tp: Numeric) -> Numeric:
        return (self.spec.q_heads + 2 * self.spec.kv_heads) * self.spec.head_dim / tp

    def elementwise_width(self, tp: Numeric) -> Numeric:
        return self.activation_width(tp)

    def rejects(self, tp: int) -> str | None:
        if self.spec.q_heads % tp:
            return f"tp_attn does not divide {self.spec.q_heads} query heads"
        if tp % self.spec.kv_heads and self.spec.kv_heads % tp:
            return f"tp_attn neither divides {self.spec.kv_heads} KV heads nor is a multiple of them"
        return None
