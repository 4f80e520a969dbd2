"""Count FLOP and HBM bytes of operators on one GPU: kernels, collectives, and what they work on.

1 multiply-accumulate = 2 FLOP. Counts know no hardware: a layer's operators come from its blocks (``physics.blocks``),
``cost.py`` turns them into time. Every size may be a number or an array; arrays broadcast. ``tp`` shards attention and
the dense and shared FFN; ``tokens`` are those of this GPU's attention (DP) rank. Source: physics page, sections 2, 3
and 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Format, Precision

#: A number or a float array; all physics broadcasts over it.
Numeric = Any

#: Bytes of activations, norms, softmax and residual in every recipe. [B]
ACTIVATION_BYTES = 2.0
#: Bytes of a logit. [B]
LOGIT_BYTES = 4.0


class Work(NamedTuple):
    """What an operator multiplies and moves on one GPU."""

    flops: Numeric  # [FLOP]
    hbm_bytes: Numeric  # [B]


def gemm_work(m: Numeric, n: Numeric, k: Numeric, *, weight_bytes: float) -> Work:
    """Work of ``C[m,n] = A[m,k] @ W[k,n]``, of the broadcast shape of the sizes on one GPU [1].

    ``2*m*n*k`` FLOP, and each matrix crosses HBM once: A in the format of W (``weight_bytes`` an element [B]), C in
    bf16.

    >>> gemm_work(1, 8192, 8192, weight_bytes=1).flops
    134217728
    """
    return Work(m * (2 * n * k), m * (k * weight_bytes + n * ACTIVATION_BYTES) + n * k * weight_bytes)


def causal_pairs(new: Numeric, past: Numeric = 0.0, window: float = 0.0) -> Numeric:
    """Query-key pairs of ``new`` tokens after ``past`` cached ones, causal. [1]

    S tokens after C have ``S*C + S*(S+1)/2`` of one sequence and head, of the broadcast shape; with a sliding window w
    [token] every token sees min(position, w) keys, all where it is 0.

    Four tokens see 1 + 2 + 3 + 4 keys; after two cached ones and in a window of three, 3 each:

    >>> float(causal_pairs(4)), float(causal_pairs(4, 2, window=3))
    (10.0, 12.0)
    """
    if not window:
        return new * past + new * (new + 1) / 2
    growing = np.clip(window - past, 0.0, new)
    return growing * past + growing * (growing + 1) / 2 + (new - growing) * window


def decode_pairs(context: Numeric, queries: Numeric, window: float = 0.0) -> Numeric:
    """Count query-key pairs of the ``queries`` new tokens of a sequence in decode, the first of which sees ``context``.

    ``sum_{i<q} (ctx + i)`` of one sequence and head, each at most the window (0 = none), of the broadcast shape [1].
    The context of the first query includes itself; q is 1 + k where a step verifies k drafts. All are in tokens.

    Three queries after nine tokens see 10 + 11 + 12 keys, in a window of 11 tokens 10 + 11 + 11:

    >>> float(decode_pairs(10, 3)), float(decode_pairs(10, 3, window=11))
    (33.0, 32.0)
    """
    if np.ndim(queries) == 0 and queries == 1:
        return np.minimum(context, window) if window else context
    if not window:
        return queries * context + queries * (queries - 1) / 2.0
    growing = np.clip(np.floor(window - context) + 1.0, 0.0, queries)
    return growing * context + growing * (growing - 1) / 2.0 + (queries - growing) * window


def chunk_pairs(new: Numeric, past: Numeric, chunk: float) -> Numeric:
    """Query-key pairs of ``new`` tokens after ``past`` cached ones, each inside its own chunk of the sequence. [1]

    A token at position i of its chunk sees i keys: n tokens from the start of a sequence have
    ``floor(n/c)*c*(c+1)/2 + r*(r+1)/2`` pairs, r of them in the last chunk. Of one sequence and head, of the broadcast
    shape of ``new`` and ``past``; all are in tokens.

    In chunks of three, five tokens see 1 + 2 + 3 and 1 + 2 keys:

    >>> float(chunk_pairs(5, 0, 3)), float(chunk_pairs(2, 3, 3))
    (9.0, 3.0)
    """

    def until(tokens: Numeric) -> Numeric:
        whole = np.floor(tokens / chunk)
        rest = tokens - whole * chunk
        return whole * (chunk * (chunk + 1) / 2) + rest * (rest + 1) / 2

    return until(past + new) - until(past)


class AttentionShape(NamedTuple):
    """Sizes of one attention call on one GPU."""

    sequences: Numeric
    new: Numeric  # query tokens of each sequence [token]
    past: Numeric  # cached tokens before them [token]
    q_heads: Numeric
    kv_heads: Numeric  # 1 for absorbed MLA: one latent serves all heads
    head_dim: float  # mean of key and value size of a head: a query-key pair costs 4*q_heads*head_dim FLOP
    past_bytes: Numeric = 0.0  # of the cached past, all sequences [B]
    window: float = 0.0  # of sliding attention; 0 = none [token]
    chosen: Numeric = 0.0  # longest context all of whose keys are chosen, of sparse attention [token]

    @property
    def longest(self) -> Numeric:
        """Keys that the last query sees. [token]"""
        seen = self.past + self.new
        return np.minimum(seen, self.window) if self.window else seen

    @property
    def shortest(self) -> Numeric:
        """Cached keys that every query sees, or as many: all of the past, or a window of it. [token]"""
        return np.minimum(self.past, self.window) if self.window else self.past


def at_least_one(trials: Numeric, chance: Numeric) -> Numeric:
    """Chance that something of ``chance`` happens in at least one of ``trials``: ``1-(1-p)^n``. [1]

    >>> float(at_least_one(2, 0.5)), float(at_least_one(3, 1.0))
    (0.75, 1.0)
    """
    with np.errstate(divide="ignore"):
        return -np.expm1(trials * np.log1p(-chance))


def expected_distinct_experts(tokens: Numeric, experts: Numeric, top_k: Numeric) -> Numeric:
    """Experts that at least one of ``tokens`` tokens picks, each token choosing k of E at random. [1]

    ``E_act = E*(1-(1-k/E)^T)`` (physics page, section 6; R1 at T = 8, 64, 256: 57.4, 222.4, 255.9).

    Parameters
    ----------
    tokens
        T, of all ranks. [token]
    experts, top_k
        E, experts of a layer, and k of them that a token picks. [1]

    Returns
    -------
    numeric
        Between k and E from one token on, of the broadcast shape. [1]

    Examples
    --------
    >>> round(float(expected_distinct_experts(8, 256, 8)), 1)
    57.4
    """
    return experts * at_least_one(tokens, top_k / experts)


class ExpertRows(NamedTuple):
    """What the routed experts of one rank are given."""

    picks: Numeric  # rows over all experts of the rank [1]
    distinct: Numeric  # experts with at least one row [1]
    experts: Numeric  # experts of the rank [1]
    hidden: Numeric  # [1]
    width: Numeric  # of an expert, after expert TP [1]
    matrices: int = 3  # of an expert; 2 without gate [1]


def expert_rows(
    *, tokens: Numeric, experts: int, top_k: int, hidden: int, width: Numeric, ep: Numeric, imbalance: float
) -> ExpertRows:
    """Count rows of the fullest of ``ep`` ranks: T*k/ep*imbalance picks on the expected distinct experts of a rank.

    Source: physics page, sections 2 and 6.

    Parameters
    ----------
    tokens
        T, of all ranks. [token]
    experts, top_k
        Experts of a layer, and k of them that a token picks. [1]
    hidden, width
        Of an expert, the width after expert TP. [1]
    ep
        Expert ranks. [1]
    imbalance
        Load of the fullest rank over the mean. [1]

    Returns
    -------
    ExpertRows
        Of the broadcast shape.

    Examples
    --------
    64 tokens pick 8 of 256 experts each: 64 picks on each of 8 ranks, on 28 of its 32 experts.

    >>> rows = expert_rows(tokens=64, experts=256, top_k=8, hidden=7168, width=2048, ep=8, imbalance=1.0)
    >>> float(rows.picks), round(float(rows.distinct)), rows.experts
    (64.0, 28, 32.0)
    """
    picks = tokens * (top_k * fullest_rank(imbalance, ep) / ep)
    distinct = expected_distinct_experts(tokens, experts, top_k) / ep
    return ExpertRows(picks, distinct, experts / ep, hidden, width)


def expert_work(rows: ExpertRows, *, weight_bytes: float) -> Work:
    """Count what the routed experts of one rank multiply and read.

    Three matrices: ``F = 6*d*d_e*picks``, two without a gate: ``4*d*d_e*picks``; the weights of the distinct experts
    cross HBM once (section 2), ``weight_bytes`` an element [B]. Of one layer, of the broadcast shape of ``rows``.

    One pick of an expert of 7168 x 2048 at one byte: 6 FLOP an element of a matrix, and three matrices read.

    >>> work = expert_work(ExpertRows(picks=1, distinct=1, experts=256, hidden=7168, width=2048), weight_bytes=1)
    >>> f"{work.flops / 1e6:.0f} MFLOP, {work.hbm_bytes / 1e6:.0f} MB"
    '88 MFLOP, 44 MB'
    """
    matrix = rows.hidden * rows.width
    return Work(rows.picks * (2.0 * rows.matrices * matrix), rows.distinct * (rows.matrices * weight_bytes * matrix))


def fullest_rank(imbalance: float, ep: Numeric) -> Numeric:
    """Load of the fullest expert rank over the mean: ``imbalance``, and 1 where one rank has all experts. [1]"""
    return np.where(np.asarray(ep) > 1, imbalance, 1.0)


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
