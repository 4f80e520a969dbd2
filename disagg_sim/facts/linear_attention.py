"""Linear attention: a layer keeps one state of each sequence, whatever its length, and no cache of tokens.

A short convolution of ``conv_width`` tokens goes before the recurrence; it remembers ``conv_width - 1`` columns.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from disagg_sim.facts.kinds import (
    CONVOLUTION_BYTES,
    STATE_FORMATS,
    AttentionSpec,
    Count,
    CountOrNone,
    StateFormat,
    register,
)
from disagg_sim.facts.schema import Range

_Width = Annotated[int, Range(2, 64)]  # of a convolution [token]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention(AttentionSpec):
    """What all linear kinds have: a state, and a convolution before it."""

    projected_as: ClassVar[str] = "gqa"
    scans: ClassVar[bool] = True
    conv_width: _Width = 4
    state: StateFormat = "fp32"

    @property
    @abstractmethod
    def state_elements(self) -> int:
        """Elements of the recurrent state of a sequence. [1]"""

    @property
    @abstractmethod
    def conv_channels(self) -> int:
        """Channels of the convolution. [1]"""

    @property
    @abstractmethod
    def state_heads(self) -> int:
        """Heads over which the state is cut. [1]"""

    @property
    def state_element_bytes(self) -> int:
        """Of an element of the recurrent state. [B]"""
        return STATE_FORMATS[self.state]

    @property
    def conv_bytes(self) -> int:
        """What the convolution remembers of a sequence. [B]"""
        return (self.conv_width - 1) * self.conv_channels * CONVOLUTION_BYTES

    @property
    def state_bytes(self) -> float:
        """Recurrent state and what the convolution remembers. [B]"""
        return float(self.state_elements * self.state_element_bytes + self.conv_bytes)

    @property
    def cache_parts(self) -> int:
        """Heads. [1]"""
        return self.state_heads


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class GdnAttention(LinearAttention):
    """Gated DeltaNet (Qwen3-Next, Qwen3.5): a matrix ``key_dim x value_dim`` of each value head.

    arXiv 2412.06464, section 3; projections as in ``qwen3_next`` of huggingface/transformers.
    """

    kind: ClassVar[str] = "gdn"
    key_heads: Count
    value_heads: Count
    key_dim: Count
    value_dim: Count

    def __post_init__(self) -> None:
        """``ValueError`` unless the key heads share the value heads evenly."""
        if self.value_heads % self.key_heads:
            raise ValueError(f"key_heads {self.key_heads} does not divide value_heads {self.value_heads}")

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values. [1]"""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """A matrix of each value head. [1]"""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def state_heads(self) -> int:
        """Key heads: with them go their value heads. [1]"""
        return self.key_heads

    def matmul_params(self, hidden: int) -> int:
        """Weights of qkvz, of beta and decay, and of the output projection. [1]"""
        values = self.value_heads * self.value_dim
        return hidden * (self.conv_channels + values + 2 * self.value_heads) + values * hidden

    def other_params(self, hidden: int) -> int:  # noqa: ARG002 - as the base class asks
        """Convolution, decay, bias of the time step, gated norm. [1]"""
        return self.conv_width * self.conv_channels + 2 * self.value_heads + self.value_dim


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class KdaAttention(LinearAttention):
    """Kimi Delta Attention (Kimi Linear, Kimi K3, GLM-5.3-Flash): a delta rule whose decay is a vector of each head.

    arXiv 2510.26692, equations 1 and 13.
    """

    kind: ClassVar[str] = "kda"
    heads: Count
    head_dim: Count
    gate_rank: CountOrNone = 0  # rank of the output gate; 0 = ``head_dim`` [1]
    full_rank_gate: bool = False  # the output gate is one matrix (Kimi K3)

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values. [1]"""
        return 3 * self.heads * self.head_dim

    @property
    def state_elements(self) -> int:
        """A matrix of each head. [1]"""
        return self.heads * self.head_dim**2

    @property
    def state_heads(self) -> int:
        """Heads. [1]"""
        return self.heads

    def low_rank_params(self, hidden: int) -> tuple[int, int]:
        """Weights of the decay's and the output gate's first matrices, and of their second ones. [1]"""
        wide, rank = self.heads * self.head_dim, self.gate_rank or self.head_dim
        gate = 0 if self.full_rank_gate else rank
        return hidden * (self.head_dim + gate), wide * (self.head_dim + gate)

    def matmul_params(self, hidden: int) -> int:
        """Weights of q, k, v and output, of decay, beta and output gate. [1]"""
        wide = self.heads * self.head_dim
        return (4 + self.full_rank_gate) * hidden * wide + sum(self.low_rank_params(hidden)) + hidden * self.heads

    def other_params(self, hidden: int) -> int:  # noqa: ARG002 - as the base class asks
        """Convolutions, decay, bias of the time step, gated norm. [1]"""
        wide = self.heads * self.head_dim
        return self.conv_width * self.conv_channels + self.heads + wide + self.head_dim


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Attention(LinearAttention):
    """Mamba-2 (Nemotron-H, Nemotron-3): ``heads`` of ``head_dim`` with a state of ``state_dim`` columns each.

    arXiv 2405.21060, sections 6 and 7; projections as in ``nemotron_h`` of huggingface/transformers.
    """

    kind: ClassVar[str] = "mamba2"
    heads: Count
    head_dim: Count
    state_dim: Count
    groups: Count = 1
    conv_bias: bool = True
    projection_bias: bool = False

    def __post_init__(self) -> None:
        """``ValueError`` unless the groups share the heads evenly."""
        if self.heads % self.groups:
            raise ValueError(f"groups {self.groups} does not divide heads {self.heads}")

    @property
    def inner(self) -> int:
        """Elements of a token over all heads. [1]"""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Inputs, and B and C of every group. [1]"""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def state_elements(self) -> int:
        """A matrix of each head. [1]"""
        return self.inner * self.state_dim

    @property
    def state_heads(self) -> int:
        """Heads. [1]"""
        return self.heads

    def matmul_params(self, hidden: int) -> int:
        """Weights of the input and the output projection. [1]"""
        return hidden * (self.inner + self.conv_channels + self.heads) + self.inner * hidden

    def other_params(self, hidden: int) -> int:
        """Convolution, decay, D, bias of the time step, gated norm and biases. [1]"""
        bias = self.projection_bias * (self.inner + self.conv_channels + self.heads + hidden)
        return self.conv_channels * (self.conv_width + self.conv_bias) + 3 * self.heads + self.inner + bias
