"""Describe a model by its layers; count its parameters and cache bytes.

The counts follow section 2 of the model facts: matrix multiplies, norms, biases, routers, sinks
and positions, so that the totals of every shipped model are exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from disagg_sim.errors import InputError
from disagg_sim.notebook import Shown

if TYPE_CHECKING:
    from disagg_sim.facts.precision import Precision


class AttentionSpec:
    """One kind of attention as a model's file describes it; ``kind`` is its word there.

    A subclass is a frozen dataclass of the sizes; the class of the same ``kind`` in ``physics.blocks`` counts it.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def matmul_params(self, hidden: int) -> int:
        """Weights of the projections. [1]"""
        raise NotImplementedError

    def other_params(self, hidden: int) -> int:  # noqa: ARG002 - of kinds with biases of the hidden size
        """Biases, norms and the like. [1]"""
        return 0

    @property
    def cache_elements(self) -> int:
        """Cached elements of one token in one layer. [1]"""
        return 0

    @property
    def state_elements(self) -> int:
        """Elements kept of one sequence in one layer, whatever its length, in the format of the cache. [1]"""
        return 0

    @property
    def window_tokens(self) -> int:
        """Tokens after which the cache of a sequence stops growing; 0 = never. [token]"""
        return 0

    def elements(self, tokens: float) -> float:
        """Elements that a sequence of ``tokens`` tokens keeps in one layer. [1]"""
        held = min(tokens, self.window_tokens) if self.window_tokens else tokens
        return self.cache_elements * held + self.state_elements


class FfnSpec:
    """One kind of feed-forward layer as a model's file describes it; see ``AttentionSpec``."""

    __slots__ = ()
    kind: ClassVar[str]
    routes: ClassVar[bool] = False  # whether tokens are sent to experts

    def params(self, hidden: int, *, active: bool) -> int:
        """All parameters, or those that one token touches. [1]"""
        raise NotImplementedError

    def token_matmul_params(self, hidden: int) -> int:
        """Weights that one token is multiplied with. [1]"""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaAttention(AttentionSpec):
    """Grouped-query attention (MHA when ``kv_heads == q_heads``), optionally with a sliding window."""

    kind: ClassVar[str] = "gqa"
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int = 0  # sliding window [token]; 0 = full attention
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False

    def matmul_params(self, hidden: int) -> int:
        """Weights of qkv and output projections. [1]"""
        return hidden * (self.q_heads + 2 * self.kv_heads) * self.head_dim + self.q_heads * self.head_dim * hidden

    def other_params(self, hidden: int) -> int:
        """Biases, q/k norms and attention sinks. [1]"""
        bias = self.qkv_bias * (self.q_heads + 2 * self.kv_heads) * self.head_dim + self.output_bias * hidden
        return bias + self.qk_norm * 2 * self.head_dim + self.sinks * self.q_heads

    @property
    def cache_elements(self) -> int:
        """Cached elements of one token in one layer (keys and values of all heads). [1]"""
        return 2 * self.kv_heads * self.head_dim

    @property
    def window_tokens(self) -> int:
        """The sliding window. [token]"""
        return self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention(AttentionSpec):
    """Multi-head latent attention (DeepSeek-V2/V3): one latent of ``kv_rank + rope_dim`` is cached."""

    kind: ClassVar[str] = "mla"
    q_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def matmul_params(self, hidden: int) -> int:
        """Weights of q_a, q_b, kv_a, kv_b and output projections. [1]"""
        down = hidden * (self.q_rank + self.kv_rank + self.rope_dim)
        query = self.q_rank * self.q_heads * (self.nope_dim + self.rope_dim)
        up = self.kv_rank * self.q_heads * (self.nope_dim + self.value_dim)
        return down + query + up + self.q_heads * self.value_dim * hidden

    def other_params(self, hidden: int) -> int:  # noqa: ARG002 - as the base class asks
        """Norms of the two latents. [1]"""
        return self.q_rank + self.kv_rank

    @property
    def cache_elements(self) -> int:
        """Cached elements of one token in one layer: the latent, once for all heads. [1]"""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFfn(FfnSpec):
    """A dense feed-forward layer: 3 matrices with SwiGLU, 2 without gate."""

    kind: ClassVar[str] = "dense"
    width: int
    matrices: int = 3
    bias: bool = False

    def matmul_params(self, hidden: int) -> int:
        """Weights of the layer. [1]"""
        return self.matrices * hidden * self.width

    def other_params(self, hidden: int) -> int:
        """Biases. [1]"""
        return self.bias * (self.width + hidden)

    def params(self, hidden: int, *, active: bool) -> int:  # noqa: ARG002 - a token touches all of them
        """Weights and biases. [1]"""
        return self.matmul_params(hidden) + self.other_params(hidden)

    def token_matmul_params(self, hidden: int) -> int:
        """Weights of the layer. [1]"""
        return self.matmul_params(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFfn(FfnSpec):
    """Routed experts (``top_k`` of ``experts`` per token), shared experts and the router."""

    kind: ClassVar[str] = "moe"
    routes: ClassVar[bool] = True
    experts: int
    top_k: int
    width: int
    shared_experts: int = 0
    shared_width: int = 0
    router_bias: bool = False
    expert_bias: bool = False

    def expert_params(self, hidden: int) -> int:
        """Weights of one routed expert. [1]"""
        return 3 * hidden * self.width

    def expert_other_params(self, hidden: int) -> int:
        """Biases of one routed expert. [1]"""
        return self.expert_bias * (2 * self.width + hidden)

    def shared_params(self, hidden: int) -> int:
        """Weights of all shared experts. [1]"""
        return 3 * hidden * self.shared_width * self.shared_experts

    def router_params(self, hidden: int) -> int:
        """Weights of the router. [1]"""
        return hidden * self.experts

    def params(self, hidden: int, *, active: bool) -> int:
        """Experts (all, or ``top_k``), shared experts and router with their biases. [1]"""
        routed = (self.top_k if active else self.experts) * (
            self.expert_params(hidden) + self.expert_other_params(hidden)
        )
        return routed + self.shared_params(hidden) + self.router_params(hidden) + self.router_bias * self.experts

    def token_matmul_params(self, hidden: int) -> int:
        """Weights of ``top_k`` experts, the shared ones and the router. [1]"""
        return self.top_k * self.expert_params(hidden) + self.shared_params(hidden) + self.router_params(hidden)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One transformer layer: an attention and a feed-forward part."""

    attention: AttentionSpec
    ffn: FfnSpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Shown):
    """A decoder-only model as a pattern of layers.

    ``layers`` holds one ``LayerKind`` per layer, in order; equal layers are equal objects, so the
    pattern of DeepSeek-R1 is ``(dense,) * 3 + (moe,) * 58``.
    """

    name: str
    title: str
    hidden: int
    vocab: int
    layers: tuple[LayerKind, ...]
    tied_embeddings: bool
    layer_norm: bool  # LayerNorm with bias (OPT) instead of RMSNorm
    learned_positions: int  # rows of a learned position table, 0 with rotary [1]
    block_scaled_fp8: bool  # fp8 checkpoints carry 128x128 block scales (DeepSeek, Kimi)
    max_context: int  # input + output [token]
    max_context_sure: bool
    source: str

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Distinct layer kinds in order of first appearance."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kind_counts(self) -> tuple[int, ...]:
        """Layers of each kind of ``kinds``. [1]"""
        counts = Counter(self.layers)
        return tuple(counts[kind] for kind in self.kinds)

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return any(kind.ffn.routes for kind in self.kinds)

    @cached_property
    def attention_kinds(self) -> tuple[str, ...]:
        """Kinds of attention in order of first appearance; the fits of each time its own layers."""
        return tuple(dict.fromkeys(kind.attention.kind for kind in self.kinds))

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Sizes of sliding windows, least first: kinks of memory and of the time of a step. [token]"""
        return tuple(sorted({kind.attention.window_tokens for kind in self.kinds} - {0}))

    @property
    def linear_cache(self) -> bool:
        """Whether what a sequence keeps is proportional to its length: no windows, and no state."""
        return not self.windows and not any(kind.attention.state_elements for kind in self.kinds)

    @property
    def embedding_params(self) -> int:
        """Input embedding table. [1]"""
        return self.vocab * self.hidden

    @property
    def head_params(self) -> int:
        """Weights that the LM head multiplies (shared with the embedding when tied). [1]"""
        return self.vocab * self.hidden

    @property
    def total_params(self) -> int:
        """All parameters, embedding and head counted once each (once together when tied). [1]"""
        return self._count(active=False)

    @property
    def active_params(self) -> int:
        """Parameters that one token touches; the input embedding and head are counted whole. [1]"""
        return self._count(active=True)

    @property
    def linear_params_per_token(self) -> int:
        """P_lin: matrix-multiply weights of the layers per token; 2*P_lin FLOP each. [1]"""
        total = 0
        for kind, count in zip(self.kinds, self.kind_counts, strict=True):
            layer = kind.attention.matmul_params(self.hidden) + kind.ffn.token_matmul_params(self.hidden)
            total += count * layer
        return total

    def kv_elements_per_token(self) -> int:
        """Cached elements of one token over all layers, windows not yet full. [1]"""
        return sum(c * k.attention.cache_elements for k, c in zip(self.kinds, self.kind_counts, strict=True))

    def kv_elements(self, context: float) -> float:
        """Elements that a sequence of ``context`` tokens keeps: cache, of which windows saturate, and state. [1]"""
        layers = zip(self.kinds, self.kind_counts, strict=True)
        return sum((count * kind.attention.elements(context) for kind, count in layers), 0.0)

    def kv_bytes_per_token(self, precision: Precision) -> float:
        """Cache of one token over all layers, windows not yet full. [B]"""
        return self.kv_elements_per_token() * precision.cache.bytes

    def check_context(self, isl: float, osl: float, *, allow_long: bool = False) -> None:
        """Refuse a request beyond the context limit, unless ``allow_long``.

        Raises
        ------
        InputError
            When ``isl + osl`` exceeds ``max_context``.
        """
        if isl + osl > self.max_context and not allow_long:
            raise InputError(
                f"isl {isl:.0f} + osl {osl:.0f} = {isl + osl:.0f} tokens exceed the context limit of {self.name}, "
                f"{self.max_context} tokens (allow_long_context overrides)"
            )

    def _count(self, *, active: bool) -> int:
        d = self.hidden
        norm = 4 * d if self.layer_norm else 2 * d
        total = self.embedding_params * (1 if self.tied_embeddings else 2)
        total += norm // 2 + self.learned_positions * d
        for kind, count in zip(self.kinds, self.kind_counts, strict=True):
            layer = norm + kind.attention.matmul_params(d) + kind.attention.other_params(d)
            total += count * (layer + kind.ffn.params(d, active=active))
        return total
