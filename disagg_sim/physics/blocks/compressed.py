"""Attention of DeepSeek-V4 to a window and to entries of several tokens. Physics page, section 2 (compressed).

One head is key and value, whole on every TP rank; query heads are sharded. HCA attends to all entries, of many tokens
each; CSA to those that an index chooses among entries of few.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from disagg_sim.facts.efficiency import CHOSEN, INDEX, INDEX_STEP, LATENT_HEADS, SMALL_STEP
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.sparse_attention import CompressedAttention, CsaAttention, HcaAttention, fp8_key_bytes
from disagg_sim.physics.blocks.base import AttentionBlock, attention
from disagg_sim.physics.blocks.sparse import part_operator
from disagg_sim.physics.work import AttentionShape, Numeric, Operator, Tokens, Work, causal_pairs, gemm

C = TypeVar("C", bound=CompressedAttention)


class CompressedBlock(AttentionBlock[C]):
    """Queries through a latent, one shared head, output through groups; the entries are what kinds differ in."""

    tables = ("mla",)
    launches = 26

    def compressor_columns(self, hidden: int) -> Numeric:
        """Columns of the projections that make entries and index keys, whole on every rank. [1]"""
        return 0.0

    def entry_pairs(self, new: Numeric, past: Numeric) -> Numeric:
        """Pairs of queries and entries of one sequence. [1]"""
        return 0.0

    def entries_seen(self, context: Numeric) -> Numeric:
        """Entries that a query after ``context`` tokens attends to. [1]"""
        return 0.0

    def entries_shared(self, context: Numeric, queries: Numeric) -> Numeric:
        """Entries that the queries of a sequence in decode read together, each once. [1]"""
        return self.entries_seen(context)

    def entries_read(self, new: Numeric, past: Numeric) -> Numeric:
        """Entries that a prompt reads and writes. [1]"""
        return 0.0

    def index(self, part: str, sequences: Numeric, new: Numeric, past: Numeric) -> list[Operator]:
        """What chooses among the entries."""
        return []

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        s, d, fmt = self.spec, model.hidden, precision.projection(self.spec.kind)
        heads, group = s.q_heads / tp, s.q_heads * s.head_dim / s.output_groups
        ranks = s.output_groups * s.output_rank / tp
        return [
            gemm("q_a, kv, entries", tokens, s.q_rank + s.head_dim + self.compressor_columns(d), d, fmt),
            gemm("q_b", tokens, heads * s.head_dim, s.q_rank, fmt),
            gemm("o_a", tokens, ranks, group, fmt),
            gemm("o_b", tokens, d, ranks, fmt),
        ]

    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As so many decodes as there are new tokens, of whose entries each is read from memory once."""
        prompts, new, past = tokens.prompts, tokens.new, tokens.past
        pairs = causal_pairs(new, past, self.spec.window) + self.entry_pairs(new, past)
        rows = np.minimum(past, self.spec.window) + 2 * new + self.entries_read(new, past)
        work = self._attend(precision, tp, prompts * new, pairs / new, prompts * rows).work
        shape = AttentionShape(prompts, new, past, self.spec.q_heads / tp, 1.0, 0.0)
        main = part_operator("prefill attention", f"{self.spec.kind} {CHOSEN}", work, shape)
        return ([*self.index(INDEX, prompts, new, past), main],)

    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As the base says. The window and entries that several queries see are read once."""
        decodes, queries, context = tokens.decodes, tokens.queries, tokens.context
        window = np.minimum(context, self.spec.window)
        seen = window + self.entries_seen(context)
        rows = window + self.entries_shared(context, queries) + (queries - 1.0)
        main = self._attend(precision, tp, decodes * queries, seen, decodes * rows)
        return ([*self.index(INDEX_STEP, decodes, queries, context - 1.0), main],)

    def _attend(self, precision: Precision, tp: Numeric, queries: Numeric, keys: Numeric, rows: Numeric) -> Operator:
        s, heads = self.spec, self.spec.q_heads / tp
        work = Work(queries * keys * (4.0 * heads * s.head_dim), rows * s.entry_bytes(precision.cache.bytes))
        shape = AttentionShape(queries, 1.0, keys - 1.0, heads, 1.0, float(s.head_dim))
        return Operator("decode attention", "decode_attention", work, attention=shape, table="mla")

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        whole = hidden * (self.spec.q_rank + self.spec.head_dim + self.compressor_columns(hidden))
        whole = whole + self.index_query_params
        return whole + (self.spec.matmul_params(hidden) - whole) / tp

    @property
    def index_query_params(self) -> int:
        """Weights of the index queries, whole on every rank. [1]"""
        return 0

    def activation_width(self, tp: Numeric) -> Numeric:
        return 2 * self.spec.q_heads * self.spec.head_dim / tp

    def elementwise_width(self, tp: Numeric) -> Numeric:
        return self.spec.q_rank + self.spec.head_dim + self.compressor_columns(0)

    def rejects(self, tp: int) -> str | None:
        s = self.spec
        if s.q_heads % tp:
            return f"tp_attn does not divide {s.q_heads} query heads"
        return f"tp_attn does not divide {s.output_groups} output groups" if s.output_groups % tp else None

    @staticmethod
    def sizes(shape: AttentionShape) -> dict[str, Numeric]:
        return dict(zip(LATENT_HEADS, (shape.q_heads,), strict=True))


@attention("hca")
class Hca(CompressedBlock[HcaAttention]):
    """All entries are attended to: a hundredth of the tokens; with a ratio of 0 the window alone."""

    parts = (CHOSEN, SMALL_STEP)

    def compressor_columns(self, hidden: int) -> Numeric:
        return 2 * self.spec.head_dim if self.spec.ratio else 0

    def entry_pairs(self, new: Numeric, past: Numeric) -> Numeric:
        return causal_pairs(new, past) / self.spec.ratio if self.spec.ratio else 0.0

    def entries_seen(self, context: Numeric) -> Numeric:
        return context / self.spec.ratio if self.spec.ratio else 0.0

    def entries_read(self, new: Numeric, past: Numeric) -> Numeric:
        return (past + 2 * new) / self.spec.ratio if self.spec.ratio else 0.0

    def index(self, part: str, sequences: Numeric, new: Numeric, past: Numeric) -> list[Operator]:
        """Nothing is chosen; the small kernels of a decode step, which those of an index hold elsewhere."""
        if part == INDEX:
            return []
        shape = AttentionShape(sequences, new, past, 1.0, 1.0, 0.0)
        return [part_operator("small kernels", f"{self.spec.kind} {SMALL_STEP}", Work(0.0, 0.0), shape)]


@attention("csa")
class Csa(CompressedBlock[CsaAttention]):
    """``top_k`` entries are attended to, chosen by an index whose queries and keys are whole on every rank."""

    parts = (INDEX, CHOSEN, INDEX_STEP)
    launches = 34

    @property
    def index_query_params(self) -> int:
        return self.spec.q_rank * self.spec.index_heads * self.spec.index_dim

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        """Those of all compressed attention, and of the index."""
        s, fmt = self.spec, precision.projection(self.spec.kind)
        queries = gemm("index q", tokens, s.index_heads * s.index_dim, s.q_rank, fmt)
        return [*super().projections(model, precision, tp, tokens), queries]

    def compressor_columns(self, hidden: int) -> Numeric:
        return 4 * self.spec.head_dim + 4 * self.spec.index_dim + self.spec.index_heads

    def entry_pairs(self, new: Numeric, past: Numeric) -> Numeric:
        return causal_pairs(new, past, self.spec.top_k * self.spec.ratio) / self.spec.ratio

    def entries_seen(self, context: Numeric) -> Numeric:
        return np.minimum(context / self.spec.ratio, self.spec.top_k)

    def entries_shared(self, context: Numeric, queries: Numeric) -> Numeric:
        return np.minimum(context / self.spec.ratio, queries * self.spec.top_k)

    def entries_read(self, new: Numeric, past: Numeric) -> Numeric:
        return (past + 2 * new) / self.spec.ratio

    def index(self, part: str, sequences: Numeric, new: Numeric, past: Numeric) -> list[Operator]:
        s = self.spec
        flops = sequences * causal_pairs(new, past) / s.ratio * (2.0 * s.index_heads * s.index_dim)
        keys = (past + (new if part == INDEX_STEP else 2 * new)) / s.ratio
        work = Work(flops, sequences * keys * fp8_key_bytes(s.index_dim))
        shape = AttentionShape(sequences, new, past, 1.0, 1.0, 0.0, chosen=s.top_k * s.ratio)
        return [part_operator("index", f"{s.kind} {part}", work, shape)]
