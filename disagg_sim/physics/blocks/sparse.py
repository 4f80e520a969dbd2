"""Attention to tokens that an index chooses: DeepSeek's DSA and MiniMax's MSA. Physics page, section 2 (sparse).

Scores and values cost no more than those of the chosen tokens, however long the context is; the index, which scores
every cached token, goes on growing. A context within the choice is dense attention but for the index.
"""

from __future__ import annotations

import numpy as np

from disagg_sim.facts.efficiency import CHOSEN, INDEX, INDEX_STEP
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.sparse_attention import BF16_BYTES, DsaAttention, MsaAttention
from disagg_sim.physics.blocks.base import AttentionBlock, attention
from disagg_sim.physics.blocks.gqa import Gqa, gqa_decode_work, gqa_prefill_work
from disagg_sim.physics.blocks.mla import LatentBlock, absorbed_shape
from disagg_sim.physics.work import AttentionShape, Numeric, Operator, Tokens, Work, causal_pairs, gemm


def part_operator(name: str, table: str, work: Work, shape: AttentionShape) -> Operator:
    """Make the operator of a part of sparse attention that fits of its own time."""
    return Operator(name, "attention_part", work, attention=shape, table=table)


@attention("dsa")
class Dsa(LatentBlock[DsaAttention]):
    """DeepSeek sparse attention: absorbed MLA over the chosen tokens; indexer and index keys whole on every rank."""

    tables = ("mla",)
    parts = (INDEX, CHOSEN, INDEX_STEP)
    launches = 28

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        """Those of MLA, and of the indexer."""
        s, fmt = self.spec, precision.projection(self.spec.kind)
        own = super().projections(model, precision, tp, tokens)
        if s.shared_index:
            return own
        return [
            *own,
            gemm("index q", tokens, s.index_heads * s.index_dim, s.q_rank, fmt),
            gemm("index k", tokens, s.index_params(1) - s.q_rank * s.index_heads * s.index_dim, model.hidden, fmt),
        ]

    def served_projections(
        self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric, absorbed: Numeric
    ) -> list[Operator]:
        """All tokens are absorbed: each query has its own set of keys."""
        return super().served_projections(model, precision, tp, tokens, tokens)

    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As so many decodes as there are new tokens, of whose latents each row is read from memory once."""
        prompts, new, past = tokens.prompts, tokens.new, tokens.past
        pairs = causal_pairs(new, past, self.spec.top_k)
        rows = np.minimum(past + 2 * new, 2 * new * self.spec.top_k)
        work = self._attend(precision, tp, prompts * new, pairs / new, prompts * rows).work
        shape = AttentionShape(prompts, new, past, self.spec.q_heads / tp, 1.0, 0.0)
        main = part_operator("prefill attention", f"{self.spec.kind} {CHOSEN}", work, shape)
        return ([*self._index(INDEX, prompts, new, past), main],)

    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As the base says. Each query has its own set of keys; of those that sets share, one is read."""
        decodes, queries, context = tokens.decodes, tokens.queries, tokens.context
        seen = np.minimum(context, self.spec.top_k)
        rows = np.minimum(queries * seen, context + (queries - 1.0))
        main = self._attend(precision, tp, decodes * queries, seen, decodes * rows)
        return ([*self._index(INDEX_STEP, decodes, queries, context - 1.0), main],)

    def decode_share(
        self, precision: Precision, tp: Numeric, dcp: Numeric, tokens: Tokens, form: str
    ) -> tuple[list[Operator], ...]:
        """As the base says, but for the index: every rank scores all keys and takes what it holds of the choice."""
        decodes, queries, context = tokens.decodes, tokens.queries, tokens.context
        seen = np.maximum(np.minimum(context, self.spec.top_k) / dcp, 1.0)
        rows = np.minimum(queries * seen, context / dcp + (queries - 1.0))
        main = self._attend(precision, tp / dcp, decodes * queries, seen, decodes * np.maximum(rows, seen))
        return ([*self._index(INDEX_STEP, decodes, queries, context - 1.0), main],)

    def _attend(self, precision: Precision, tp: Numeric, queries: Numeric, keys: Numeric, rows: Numeric) -> Operator:
        """Scores and values of ``queries`` in latent space, ``keys`` each, on ``rows`` latents of the cache."""
        dims, element = self.dims(tp, precision.cache.bytes), precision.cache.bytes
        flops = queries * keys * (2 * dims.heads * (dims.latent + dims.kv_rank))
        shape = absorbed_shape(dims, queries, 1.0, keys - 1.0)
        work = Work(flops, rows * self.spec.latent_bytes(element))
        return Operator("decode attention", "decode_attention", work, attention=shape, table="mla")

    def _index(self, part: str, sequences: Numeric, new: Numeric, past: Numeric) -> list[Operator]:
        """Scores of every pooled key: ``2*n_I*d_I`` FLOP a pair; keys read once and new ones written."""
        s = self.spec
        if s.shared_index:
            return []
        pairs = causal_pairs(new, past) / s.index_pool
        flops = sequences * pairs * (2.0 * s.index_heads * s.index_dim)
        keys = past + (new if part == INDEX_STEP else 2 * new)
        work = Work(flops, sequences * keys * s.index_bytes)
        shape = AttentionShape(sequences, new, past, 1.0, 1.0, 0.0, chosen=s.top_k)
        return [part_operator("index", f"{s.kind} {part}", work, shape)]

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        whole = self.spec.index_params(hidden)
        return super().matmul_params(hidden, tp) + whole - whole / tp


@attention("msa")
class Msa(AttentionBlock[MsaAttention]):
    """MiniMax sparse attention: grouped queries over chosen blocks; index heads go with KV heads, the key is whole."""

    tables = ("gqa",)
    parts = (INDEX, CHOSEN, INDEX_STEP)
    launches = 15

    def heads_per_gpu(self, tp: Numeric) -> tuple[Numeric, Numeric]:
        """KV heads and index heads of one GPU, at least one each. [1]"""
        return np.ceil(self.spec.kv_heads / tp), np.ceil(self.spec.index_heads / tp)

    def columns(self, tp: Numeric) -> Numeric:
        """Columns of queries, keys, values and index in one projection. [1]"""
        s, (kv_heads, index_heads) = self.spec, self.heads_per_gpu(tp)
        return (s.q_heads / tp + 2 * kv_heads) * s.head_dim + (index_heads + 1) * s.index_dim

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        d, fmt = model.hidden, precision.projection(self.spec.kind)
        wide = self.spec.q_heads / tp * self.spec.head_dim
        return [gemm("qkv, index", tokens, self.columns(tp), d, fmt), gemm("o", tokens, d, wide, fmt)]

    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As attention in a window of as many tokens as the chosen blocks have; the blocks are read from anywhere."""
        s, prompts, new, past = self.spec, tokens.prompts, tokens.new, tokens.past
        sizes = self._sizes(precision, tp)
        work = gqa_prefill_work(sequences=prompts, new=new, past=past, window=s.chosen, **sizes)
        shape = AttentionShape(prompts, new, past, sizes["q_heads"], sizes["kv_heads"], s.head_dim)
        main = part_operator("prefill attention", f"{s.kind} {CHOSEN}", work, shape)
        return ([self._index(INDEX, tp, prompts, (new, past)), main],)

    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As the base says. Each query has its own blocks; of those that several chose, one is read."""
        s, sizes, past, queries = self.spec, self._sizes(precision, tp), tokens.context - 1.0, tokens.queries
        work = gqa_decode_work(sequences=tokens.decodes, context=tokens.context, window=s.chosen, **sizes)
        seen = np.minimum(tokens.context, s.chosen)
        shared = np.minimum(queries * seen, tokens.context + (queries - 1.0)) / seen
        work = Work(work.flops * queries, work.hbm_bytes * shared)
        shape = AttentionShape(
            tokens.decodes, queries, past, sizes["q_heads"], sizes["kv_heads"], s.head_dim, window=float(s.chosen)
        )
        main = Operator("decode attention", "decode_attention", work, attention=shape, table="gqa")
        return ([self._index(INDEX_STEP, tp, tokens.decodes, (queries, past)), main],)

    def _sizes(self, precision: Precision, tp: Numeric) -> dict[str, Numeric]:
        s = self.spec
        heads = {"q_heads": s.q_heads / tp, "kv_heads": self.heads_per_gpu(tp)[0]}
        return heads | {"head_dim": s.head_dim, "cache_bytes": precision.cache.bytes}

    def _index(self, part: str, tp: Numeric, sequences: Numeric, tokens: tuple[Numeric, Numeric]) -> Operator:
        """Scores of every token's index key in bf16, of which the best of a block counts."""
        s, (new, past) = self.spec, tokens
        flops = sequences * causal_pairs(new, past) * (2.0 * self.heads_per_gpu(tp)[1] * s.index_dim)
        keys = past + (new if part == INDEX_STEP else 2 * new)
        shape = AttentionShape(sequences, new, past, 1.0, 1.0, 0.0, chosen=s.chosen)
        work = Work(flops, sequences * keys * (s.index_dim * BF16_BYTES))
        return part_operator("index", f"{s.kind} {part}", work, shape)

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        return hidden * (self.columns(tp) + self.spec.q_heads / tp * self.spec.head_dim)

    def activation_width(self, tp: Numeric) -> Numeric:
        return self.columns(tp)

    rejects = Gqa.rejects
    sizes = Gqa.sizes
