"""Grouped-query attention, with or without a sliding window. Physics page, section 2 (GQA attention)."""

from __future__ import annotations

import numpy as np

from disagg_sim.facts.attention import GqaAttention
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.physics.blocks.base import AttentionBlock, attention
from disagg_sim.physics.work import (
    AttentionShape,
    Numeric,
    Operator,
    Tokens,
    Work,
    causal_pairs,
    chunk_pairs,
    decode_pairs,
    gemm,
)


def gqa_prefill_work(
    *,
    sequences: Numeric,
    new: Numeric,
    past: Numeric,
    q_heads: Numeric,
    kv_heads: Numeric,
    head_dim: float,
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
        h, size of a head; the mean of key and value where these differ. [1]
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
    head_dim: float,
    window: float,
    cache_bytes: float,
    queries: Numeric = 1.0,
) -> Work:
    """Count scores and values of the new tokens of each sequence.

    ``4*n_q*h*ctx`` FLOP and ``2*n_kv*h*b_kv*ctx`` bytes for one (section 2). The cache is read once for all ``queries``
    of a sequence, so these have ``sum_i (ctx + i)`` pairs on ``ctx + q - 1`` cached tokens. Takes what
    ``gqa_prefill_work`` takes, the mean ``context`` [token], and the new tokens q of each sequence in decode; returns
    the work of one layer, of the broadcast shape of these three.

    The arithmetic intensity is ``2*n_q/(n_kv*b_kv)``, here 2 x 8 FLOP a byte, whatever the batch and the context:

    >>> sizes = {"q_heads": 8, "kv_heads": 1, "head_dim": 128, "window": 0, "cache_bytes": 1}
    >>> works = [gqa_decode_work(sequences=b, context=c, **sizes) for b, c in ((1, 1000), (64, 8192))]
    >>> [work.flops / work.hbm_bytes for work in works]
    [16.0, 16.0]
    """
    seen = np.minimum(context, window) if window else context
    pairs, read = decode_pairs(context, queries, window), seen + (queries - 1.0)
    return Work(
        sequences * pairs * (4 * head_dim * q_heads), sequences * read * (2 * kv_heads * head_dim * cache_bytes)
    )


@attention("gqa")
class Gqa(AttentionBlock[GqaAttention]):
    """Keys and values of ``kv_heads`` heads are cached; a GPU holds ``ceil(n_kv/tp)`` of them, at least one."""

    def kv_heads(self, tp: Numeric) -> Numeric:
        """KV heads that one GPU holds: ``ceil(n_kv/tp)`` (duplicated above n_kv). [1]"""
        return np.ceil(self.spec.kv_heads / tp)

    def columns(self, tp: Numeric) -> Numeric:
        """Columns of queries, gate, keys and values in one projection. [1]"""
        s = self.spec
        return (s.q_heads * s.head_dim + s.gate_params) / tp + self.kv_heads(tp) * (s.kv_columns / s.kv_heads)

    @property
    def mean_dim(self) -> float:
        """Mean size of a key and a value: a query-key pair costs 4 FLOP on each element of it. [1]"""
        return (self.spec.head_dim + self.spec.value_size) / 2.0

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        s, d, fmt = self.spec, model.hidden, precision.projection(self.spec.kind)
        return [gemm("qkv", tokens, self.columns(tp), d, fmt), gemm("o", tokens, d, s.q_heads / tp * s.value_size, fmt)]

    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As the base says. A chunk is a window for what is read; its pairs are counted chunk by chunk."""
        s, prompts, new, past = self.spec, tokens.prompts, tokens.new, tokens.past
        window = s.window_tokens
        sizes = self._sizes(precision, tp)
        work = gqa_prefill_work(sequences=prompts, new=new, past=past, window=window, **sizes)
        pairs = causal_pairs(new, past, window)
        if s.chunk:
            pairs = chunk_pairs(new, past, s.chunk)
            work = work._replace(flops=prompts * (4.0 * self.mean_dim) * sizes["q_heads"] * pairs)
        held = gqa_decode_work(sequences=prompts, context=past, window=window, **sizes).hbm_bytes
        shape = AttentionShape(prompts, new, past, sizes["q_heads"], sizes["kv_heads"], self.mean_dim, held, window)
        name, keys = "prefill attention", 2.0 * pairs / new
        return ([Operator(name, "prefill_attention", work, keys=keys, attention=shape, table="gqa")],)

    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As the base says. Contexts end anywhere in their last chunk, half of which is seen on average."""
        window = self.spec.window or self.spec.chunk / 2
        sizes, context, queries = self._sizes(precision, tp), tokens.context, tokens.queries
        work = gqa_decode_work(sequences=tokens.decodes, context=context, window=window, queries=queries, **sizes)
        shape = AttentionShape(
            tokens.decodes, queries, context - 1.0, sizes["q_heads"], sizes["kv_heads"], self.mean_dim, window=window
        )
        return ([Operator("decode attention", "decode_attention", work, attention=shape, table="gqa")],)

    def _sizes(self, precision: Precision, tp: Numeric) -> dict[str, Numeric]:
        """Heads of one GPU and their size, by the names that the counts give them."""
        return {
            "q_heads": self.spec.q_heads / tp,
            "kv_heads": self.kv_heads(tp),
            "head_dim": self.mean_dim,
            "cache_bytes": precision.cache.bytes,
        }

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        return hidden * (self.columns(tp) + self.spec.q_heads * self.spec.value_size / tp)

    def outward_params(self, hidden: int) -> int:
        return self.spec.q_heads * self.spec.value_size * hidden

    def activation_width(self, tp: Numeric) -> Numeric:
        s = self.spec
        return (s.q_heads * s.head_dim + s.gate_params + s.cache_elements) / tp

    def rejects(self, tp: int) -> str | None:
        if self.spec.q_heads % tp:
            return f"tp_attn does not divide {self.spec.q_heads} query heads"
        if tp % self.spec.kv_heads and self.spec.kv_heads % tp:
            return f"tp_attn neither divides {self.spec.kv_heads} KV heads nor is a multiple of them"
        return None
