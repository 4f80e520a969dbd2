"""Softmax attention over all cached tokens, or a window of them: grouped queries and the latents of DeepSeek."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from disagg_sim.facts.kinds import AttentionSpec, Count, CountOrNone, SharedRows, Window, register
from disagg_sim.facts.schema import OneOf

#: Sizes of a gate on the output of attention: none, a number of each head, a number of each element.
NO_GATE, BY_HEAD, BY_ELEMENT = "none", "head", "element"
#: Norms of queries and keys: none, of each head (its weights shared by the heads), of all heads together.
NO_NORM, ONE_HEAD, ALL_HEADS = "none", "head", "all"
_Gate = Annotated[str, OneOf((NO_GATE, BY_HEAD, BY_ELEMENT))]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAttention(AttentionSpec):
    """A layer that has a feed-forward part alone."""

    kind: ClassVar[str] = "none"
    norms: ClassVar[int] = 0

    def matmul_params(self, hidden: int) -> int:  # noqa: ARG002 - as the base class asks
        """Nothing. [1]"""
        return 0


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class GqaAttention(AttentionSpec):
    """Grouped-query attention (MHA when ``kv_heads == q_heads``), optionally with a sliding window or in chunks."""

    kind: ClassVar[str] = "gqa"
    cache_tensors: ClassVar[int] = 2
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    value_dim: CountOrNone = 0  # size of a value; 0 = that of a key, ``head_dim`` [1]
    window: Window = 0  # sliding window [token]; 0 = full attention
    chunk: Window = 0  # attention inside chunks of so many tokens (Llama 4) [token]; 0 = no chunks
    output_gate: _Gate = NO_GATE  # gate on the output: none, head, element
    values_from_keys: bool = False  # values come out of the projection of keys (Gemma 4); both are cached
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_all_heads: bool = False  # the norms are over all heads together (MiniMax M2)
    sinks: bool = False

    def __post_init__(self) -> None:
        """``ValueError`` unless the KV heads share the query heads evenly and at most one rule limits the keys."""
        if self.q_heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide q_heads {self.q_heads}")
        if self.window and self.chunk:
            raise ValueError(f"window {self.window} and chunk {self.chunk} exclude each other")
        if self.values_from_keys and self.value_size != self.head_dim:
            raise ValueError(f"values_from_keys needs a value_dim of head_dim {self.head_dim}, not {self.value_dim}")

    @property
    def value_size(self) -> int:
        """Size of a value of one head. [1]"""
        return self.value_dim or self.head_dim

    @property
    def gate_params(self) -> int:
        """Columns of the gate on the output. [1]"""
        return {NO_GATE: 0, BY_HEAD: self.q_heads, BY_ELEMENT: self.q_heads * self.value_size}[self.output_gate]

    @property
    def kv_columns(self) -> int:
        """Columns of the projection to keys and values. [1]"""
        return self.kv_heads * (self.head_dim + (0 if self.values_from_keys else self.value_size))

    def matmul_params(self, hidden: int) -> int:
        """Weights of qkv, gate and output projections. [1]"""
        columns = self.q_heads * self.head_dim + self.kv_columns + self.gate_params
        return hidden * columns + self.q_heads * self.value_size * hidden

    def other_params(self, hidden: int) -> int:
        """Biases, q/k norms and attention sinks. [1]"""
        bias = self.qkv_bias * (self.q_heads * self.head_dim + self.kv_columns) + self.output_bias * hidden
        normed = self.q_heads + self.kv_heads if self.qk_norm_all_heads else 2 * self.qk_norm
        return bias + normed * self.head_dim + self.sinks * self.q_heads

    @property
    def cache_elements(self) -> int:
        """Cached elements of one token in one layer (keys and values of all heads). [1]"""
        return self.kv_heads * (self.head_dim + self.value_size)

    @property
    def cache_parts(self) -> int:
        """KV heads. [1]"""
        return self.kv_heads

    @property
    def rotary_dim(self) -> int:
        """All of a head: how much of it is rotated, the file does not say. [1]"""
        return self.head_dim

    @property
    def window_tokens(self) -> int:
        """The sliding window, or the chunk. [token]"""
        return self.window or self.chunk

    @property
    def shared_rows(self) -> SharedRows | None:
        """Heads, but for a window: that is short, and engines keep it whole."""
        return None if self.window_tokens else SharedRows(self.q_heads, self.head_dim, self.value_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(AttentionSpec):
    """Sizes of multi-head latent attention, dense or sparse."""

    q_heads: Count
    q_rank: CountOrNone  # 0 = queries are projected at once [1]
    kv_rank: Count
    nope_dim: Count
    rope_dim: CountOrNone
    value_dim: Count
    output_gate: bool = False  # an element-wise gate on the output (Kimi K3)

    def matmul_params(self, hidden: int) -> int:
        """Weights of q_a, q_b (or q), kv_a, kv_b, gate and output projections. [1]"""
        first = self.q_rank or self.q_heads * (self.nope_dim + self.rope_dim)
        queries = self.q_rank * self.q_heads * (self.nope_dim + self.rope_dim)  # 0 without a latent
        down = hidden * (first + self.kv_rank + self.rope_dim)
        up = self.kv_rank * self.q_heads * (self.nope_dim + self.value_dim)
        return down + queries + up + (1 + self.output_gate) * self.q_heads * self.value_dim * hidden

    def other_params(self, hidden: int) -> int:  # noqa: ARG002 - as the base class asks
        """Norms of the two latents. [1]"""
        return self.q_rank + self.kv_rank

    @property
    def rotary_dim(self) -> int:
        """The part of a key that all heads share. [1]"""
        return self.rope_dim

    @property
    def cache_elements(self) -> int:
        """Cached elements of one token in one layer: the latent, once for all heads. [1]"""
        return self.kv_rank + self.rope_dim

    @property
    def shared_rows(self) -> SharedRows:
        """Queries and outputs in latent space."""
        return SharedRows(self.q_heads, self.kv_rank + self.rope_dim, self.kv_rank)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention(LatentAttention):
    """Multi-head latent attention (DeepSeek-V2/V3): one latent of ``kv_rank + rope_dim`` is cached."""

    kind: ClassVar[str] = "mla"
