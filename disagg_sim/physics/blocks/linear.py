"""Linear attention: gated DeltaNet, Kimi delta attention, Mamba-2. Physics page, section 2 (linear attention).

A state of each sequence takes the place of the cache: read and written in every step of decode, walked over in chunks
in prefill, cut by heads over a TP group, handed over once.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

import numpy as np

from disagg_sim.facts.efficiency import CONVOLUTION, CONVOLUTION_STEP, SCAN, STEP
from disagg_sim.facts.linear_attention import GdnAttention, KdaAttention, LinearAttention, Mamba2Attention
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.physics.blocks.base import AttentionBlock, attention
from disagg_sim.physics.work import ACTIVATION_BYTES, AttentionShape, Numeric, Operator, Tokens, Work, gemm

L = TypeVar("L", bound=LinearAttention)


def delta_scan_flops(key: Numeric, value: Numeric, chunk: Numeric) -> Numeric:
    """Count the chunked scan of a delta rule for one token and head, tiles inside a chunk multiplied whole. [FLOP]

    ``6*d_k*d_v + 2*Q*(3*d_k + 2*d_v) + 2*Q^2/3``: scores of keys with keys and queries, the inverse of a unit lower
    triangle, its products with keys and values, and three products with the state (arXiv 2412.06464, equations 11-15).
    """
    return 6.0 * key * value + 2.0 * chunk * (3.0 * key + 2.0 * value) + 2.0 * chunk**2 / 3.0


class LinearBlock(AttentionBlock[L]):
    """A convolution, then a recurrence over a state: what all linear kinds have."""

    tables = ()
    parts = (SCAN, STEP, CONVOLUTION, CONVOLUTION_STEP)
    launches = 12
    #: Tokens of a chunk of the scan. [token]
    chunk: ClassVar[float] = 64.0

    @abstractmethod
    def scan_flops(self, tp: Numeric) -> Numeric:
        """Of the chunked scan, one token on one GPU. [FLOP]"""

    @abstractmethod
    def step_flops(self, tp: Numeric) -> Numeric:
        """Of the recurrent step, one token on one GPU. [FLOP]"""

    @abstractmethod
    def passed_elements(self, tp: Numeric) -> Numeric:
        """Elements of a token that the scan reads and writes on one GPU. [1]"""

    def channels(self, tp: Numeric) -> Numeric:
        """Channels of the convolution on one GPU. [1]"""
        return self.spec.conv_channels / tp

    def recurrent_bytes(self, tp: Numeric) -> Numeric:
        """State of a sequence on one GPU, without what the convolution remembers. [B]"""
        return self.spec.state_elements * self.spec.state_element_bytes / tp

    def remembered_bytes(self, tp: Numeric) -> Numeric:
        """What the convolution remembers of a sequence on one GPU. [B]"""
        return self.spec.conv_bytes / self.spec.conv_channels * self.channels(tp)

    def state_bytes(self, tp: Numeric) -> Numeric:
        return self.recurrent_bytes(tp) + self.remembered_bytes(tp)

    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """The convolution and the chunked scan; both read what the sequence has kept and write it anew."""
        prompts, every = tokens.prompts, tokens.prompts * tokens.new
        conv = Work(
            every * (2.0 * self.spec.conv_width * self.channels(tp)),
            every * (2.0 * ACTIVATION_BYTES * self.channels(tp)) + prompts * (2.0 * self.remembered_bytes(tp)),
        )
        scan = Work(
            every * self.scan_flops(tp),
            every * (ACTIVATION_BYTES * self.passed_elements(tp)) + prompts * (2.0 * self.recurrent_bytes(tp)),
        )
        return (
            [
                self._part("convolution", CONVOLUTION, conv, prompts, tokens.new),
                self._part("scan", SCAN, scan, prompts, tokens.new),
            ],
        )

    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """The convolution and a step of the recurrence for each query, whatever the context.

        A state is read once and written after every query, so that rejected drafts can be rolled back.
        """
        count, queries, moved = tokens.decodes, tokens.queries, 1.0 + tokens.queries
        every = count * queries
        conv = Work(
            every * (2.0 * self.spec.conv_width * self.channels(tp)), count * (moved * self.remembered_bytes(tp))
        )
        step = Work(every * self.step_flops(tp), count * (moved * self.recurrent_bytes(tp)))
        return (
            [
                self._part("convolution step", CONVOLUTION_STEP, conv, count, queries),
                self._part("recurrent step", STEP, step, count, queries),
            ],
        )

    def _part(self, name: str, part: str, work: Work, sequences: Numeric, new: Numeric) -> Operator:
        shape = AttentionShape(sequences, new, 0.0, self.spec.state_heads, 1.0, 0.0)
        return Operator(name, "attention_part", work, attention=shape, table=f"{self.spec.kind} {part}")

    def activation_width(self, tp: Numeric) -> Numeric:
        return self.channels(tp) + self.elementwise_width(tp)

    def rejects(self, tp: int) -> str | None:
        heads = self.spec.state_heads
        return f"tp_attn does not divide {heads} heads of a recurrent state" if heads % tp else None

    @staticmethod
    def sizes(shape: AttentionShape) -> dict[str, Numeric]:  # noqa: ARG004 - batch and length say all
        return {}


@attention("gdn")
class Gdn(LinearBlock[GdnAttention]):
    """Gated DeltaNet: value heads go with their key heads, which are cut over the TP group."""

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        s, d, fmt = self.spec, model.hidden, precision.projection(self.spec.kind)
        values = s.value_heads * s.value_dim / tp
        return [
            gemm("qkvz", tokens, self.channels(tp) + values, d, fmt),
            gemm("beta, decay", tokens, 2 * s.value_heads / tp, d, fmt),
            gemm("o", tokens, d, values, fmt),
        ]

    def scan_flops(self, tp: Numeric) -> Numeric:
        return self.spec.value_heads / tp * delta_scan_flops(self.spec.key_dim, self.spec.value_dim, self.chunk)

    def step_flops(self, tp: Numeric) -> Numeric:
        """Decay, ``S k``, the update of rank one, ``S q``."""
        return 7.0 * self.spec.state_elements / tp

    def passed_elements(self, tp: Numeric) -> Numeric:
        return (self.spec.conv_channels + self.spec.value_heads * self.spec.value_dim) / tp

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        return self.spec.matmul_params(hidden) / tp

    def elementwise_width(self, tp: Numeric) -> Numeric:
        """The gated norm of the output."""
        return self.spec.value_heads * self.spec.value_dim / tp


@attention("kda")
class Kda(LinearBlock[KdaAttention]):
    """Kimi delta attention: the first matrices of low-rank gates are whole on every rank."""

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        s, d, fmt = self.spec, model.hidden, precision.projection(self.spec.kind)
        wide, rank = s.heads * s.head_dim / tp, s.gate_rank or s.head_dim
        full = wide if s.full_rank_gate else 0.0
        latents = s.head_dim + (0 if s.full_rank_gate else rank)
        out = [] if s.full_rank_gate else [gemm("gate out of rank", tokens, wide, rank, fmt)]
        return [
            gemm("qkv, beta, gate", tokens, 3 * wide + full + s.heads / tp, d, fmt),
            gemm("decay and gate into rank", tokens, latents, d, fmt),
            gemm("decay out of rank", tokens, wide, s.head_dim, fmt),
            *out,
            gemm("o", tokens, d, wide, fmt),
        ]

    def scan_flops(self, tp: Numeric) -> Numeric:
        return self.spec.heads / tp * delta_scan_flops(self.spec.head_dim, self.spec.head_dim, self.chunk)

    def step_flops(self, tp: Numeric) -> Numeric:
        """As the gated DeltaNet, and a decay of each row."""
        return 8.0 * self.spec.state_elements / tp

    def passed_elements(self, tp: Numeric) -> Numeric:
        """Queries, keys, values, decays and outputs."""
        return 5.0 * self.spec.heads * self.spec.head_dim / tp

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        whole = self.spec.low_rank_params(hidden)[0]
        return whole + (self.spec.matmul_params(hidden) - whole) / tp

    def elementwise_width(self, tp: Numeric) -> Numeric:
        """The decay and the gated norm of the output."""
        return 2.0 * self.spec.heads * self.spec.head_dim / tp


@attention("mamba2")
class Mamba2(LinearBlock[Mamba2Attention]):
    """Mamba-2: heads are cut over the TP group; groups are copied where there are fewer of them than GPUs."""

    chunk = 128.0

    def groups(self, tp: Numeric) -> Numeric:
        """Groups that one GPU holds, at least one. [1]"""
        return np.ceil(self.spec.groups / tp)

    def channels(self, tp: Numeric) -> Numeric:
        return self.spec.inner / tp + 2.0 * self.groups(tp) * self.spec.state_dim

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        s, d, fmt = self.spec, model.hidden, precision.projection(self.spec.kind)
        inner = s.inner / tp
        return [
            gemm("in", tokens, inner + self.channels(tp) + s.heads / tp, d, fmt),
            gemm("out", tokens, d, inner, fmt),
        ]

    def scan_flops(self, tp: Numeric) -> Numeric:
        """``H*(4*P*N + 2*Q*P) + G*2*Q*N`` (arXiv 2405.21060, section 6)."""
        s = self.spec
        heads = s.heads / tp * (4.0 * s.head_dim * s.state_dim + 2.0 * self.chunk * s.head_dim)
        return heads + self.groups(tp) * (2.0 * self.chunk * s.state_dim)

    def step_flops(self, tp: Numeric) -> Numeric:
        """Decay, the update of rank one, ``S C``."""
        return 5.0 * self.spec.state_elements / tp

    def passed_elements(self, tp: Numeric) -> Numeric:
        return self.channels(tp) + self.spec.inner / tp

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        s = self.spec
        return hidden * (2.0 * s.inner / tp + self.channels(tp) + s.heads / tp)

    def elementwise_width(self, tp: Numeric) -> Numeric:
        """The gated norm of the output."""
        return self.spec.inner / tp
