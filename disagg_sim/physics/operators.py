"""Operators of a pass, as counts of one GPU: kernels, collectives, and what they work on.

A layer's operators come from its blocks (``physics.blocks``); ``cost.py`` turns them into time. ``tp`` shards attention
heads and the dense and shared FFN; ``tokens`` are those of this GPU's attention (DP) rank. Source: physics page,
sections 2, 3 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Format, Precision
from disagg_sim.physics.work import ACTIVATION_BYTES, AttentionShape, ExpertRows, Numeric, Work, gemm_work

#: Sizes of an operator that is no attention.
NO_ATTENTION = AttentionShape(0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
#: Rows of an operator that is no expert GEMM.
NO_EXPERTS = ExpertRows(0.0, 0.0, 0.0, 0.0, 0.0)

#: Kinds of operators: kernels, then transfers.
KINDS = (
    "gemm",
    "prefill_attention",
    "decode_attention",
    "attention_part",
    "experts",
    "elementwise",
    "copy",
    "all_reduce",
    "gather",
    "all_to_all",
    "hop",
)


class Operator(NamedTuple):
    """One kernel, or one collective, of a layer on one GPU."""

    name: str
    kind: str  # one of KINDS
    work: Work
    format: str = ""  # of a GEMM
    keys: Numeric = 0.0  # mean key length times two of a prefill attention [token]
    size: Numeric = 0.0  # full tensor of a collective [B]; tokens of experts, or of a rank in an all-to-all [token]
    ranks: Numeric = 1.0  # of a collective, or over which experts are spread [1]
    domains: Numeric = 1.0  # NVLink domains over which an all-to-all is spread [1]
    runs: Numeric = 1.0  # 0 where a GEMM is not launched; share of the elementwise kernels of a layer [1]
    shape: tuple[Numeric, Numeric, Numeric] = (0.0, 0.0, 0.0)  # m, n, k of a GEMM on this GPU [1]
    experts: ExpertRows = NO_EXPERTS  # of a grouped GEMM
    attention: AttentionShape = NO_ATTENTION  # its sizes
    table: str = ""  # kind of attention whose fits time it, of an attention; with its part, of an attention's part


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What one attention rank works on in one pass: prompts in prefill and sequences in decode."""

    prompts: Numeric = 0.0  # [1]
    new: Numeric = 0.0  # new tokens of each prompt [token]
    past: Numeric = 0.0  # cached tokens before them [token]
    latent: Numeric = 0.0  # of the past of each, cached as a latent even where MLA keeps what it up-projects [token]
    decodes: Numeric = 0.0  # sequences in decode [1]
    context: Numeric = 0.0  # their mean cached length [token]
    queries: Numeric = 1.0  # new tokens of each: 1, or the drafts that a step verifies and one more [token]
    emitted: Numeric = 0.0  # tokens that pass through the head: of each prompt one, of each sequence its new ones [1]
    projected: Numeric | None = None  # of the past of each, what MLA up-projects again; None = all of it [token]
    dcp: Numeric = 1.0  # GPUs that share the cached tokens of a KV head [1]
    pcp: Numeric = 1.0  # attention ranks that share the new tokens of a prompt [1]

    @property
    def linear(self) -> Numeric:
        """Tokens that pass through the matrix multiplies. [token]"""
        return self.prompts * self.new / self.pcp + self.decodes * self.queries

    @property
    def of_one(self) -> Tokens:
        """Prompts as one of ``pcp`` ranks has them: a piece from the front of each and its mirror from the back.

        Of 2*pcp equal pieces each rank takes two that together have the mean past, so all have as many pairs.
        """
        if np.ndim(self.pcp) == 0 and self.pcp == 1.0:
            return self
        shared, piece = np.asarray(self.pcp) > 1, self.new / (2.0 * self.pcp)
        others = self.new - 2.0 * piece  # new tokens whose keys and values come from other ranks
        return replace(
            self,
            prompts=np.where(shared, 2.0 * self.prompts, self.prompts),
            new=np.where(shared, piece, self.new),
            past=np.where(shared, self.past + (self.new - piece) / 2.0, self.past),
            latent=np.where(shared, (self.latent + others) / 2.0, self.latent),
            projected=np.where(shared, (self.past + others) / 2.0, self.past),
            pcp=1.0,
        )


def gemm(name: str, m: Numeric, n: Numeric, k: Numeric, fmt: Format) -> Operator:
    """A matrix multiply ``C[m,n] = A[m,k] @ W[k,n]`` in a weight format."""
    return Operator(name, "gemm", gemm_work(m, n, k, weight_bytes=fmt.bytes), fmt.dense, shape=(m, n, k))


def all_reduce(name: str, tokens: Numeric, model: ModelSpec, precision: Precision, tp: Numeric) -> Operator:
    """All-reduce over ``tp`` ranks of the hidden states of ``tokens`` tokens."""
    size = tokens * (model.hidden * precision.combine_bytes)
    return Operator(name, "all_reduce", Work(0.0, 0.0), size=size, ranks=tp)


def head(model: ModelSpec, precision: Precision, tp: Numeric, emitted: Numeric) -> Operator:
    """LM head for the sequences that emit a token."""
    return gemm("head", emitted, model.vocab / tp, model.hidden, precision.head)


def embedding(model: ModelSpec, precision: Precision, tokens: Numeric) -> Operator:
    """Embedding look-up: one row read and written per token."""
    row = model.hidden * (precision.embedding.bytes + ACTIVATION_BYTES)
    return Operator("embedding", "copy", Work(0.0, tokens * row))
