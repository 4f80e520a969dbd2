"""What a model is made of, and how many parameters and cache bytes that is.

The counts follow section 2 of the model facts: matrix multiplies, norms, biases, routers, sinks
and positions, so that the totals of every shipped model are exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from disagg_sim.errors import InputError
from disagg_sim.notebook import Shown

if TYPE_CHECKING:
    from disagg_sim.facts.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaAttention:
    """Grouped-query attention (MHA when ``kv_heads == q_heads``), optionally with a sliding window."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention:
    """Multi-head latent attention (DeepSeek-V2/V3): one latent of ``kv_rank + rope_dim`` is cached."""

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

    def other_params(self, hidden: int) -> int:  # noqa: ARG002 - same signature as GqaAttention
        """Norms of the two latents. [1]"""
        return self.q_rank + self.kv_rank

    @property
    def cache_elements(self) -> int:
        """Cached elements of one token in one layer: the latent, once for all heads. [1]"""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFfn:
    """A dense feed-forward layer: 3 matrices with SwiGLU, 2 without gate."""

    width: int
    matrices: int = 3
    bias: bool = False

    def matmul_params(self, hidden: int) -> int:
        """Weights of the layer. [1]"""
        return self.matrices * hidden * self.width

    def other_params(self, hidden: int) -> int:
        """Biases. [1]"""
        return self.bias * (self.width + hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFfn:
    """Routed experts (``top_k`` of ``experts`` per token), shared experts and the router."""

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


Attention = GqaAttention | MlaAttention
Ffn = DenseFfn | MoeFfn


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One transformer layer: an attention and a feed-forward part."""

    attention: Attention
    ffn: Ffn


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
        return any(isinstance(kind.ffn, MoeFfn) for kind in self.kinds)

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return isinstance(self.layers[0].attention, MlaAttention)

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
            total += count * kind.attention.matmul_params(self.hidden)
            if isinstance(kind.ffn, MoeFfn):
                ffn = kind.ffn
                total += count * (ffn.top_k * ffn.expert_params(self.hidden) + ffn.shared_params(self.hidden))
                total += count * ffn.router_params(self.hidden)
            else:
                total += count * kind.ffn.matmul_params(self.hidden)
        return total

    def kv_elements_per_token(self) -> int:
        """Cached elements of one token over all layers, windows not yet full. [1]"""
        return sum(c * k.attention.cache_elements for k, c in zip(self.kinds, self.kind_counts, strict=True))

    def kv_elements(self, context: float) -> float:
        """Cached elements of a sequence of ``context`` tokens; sliding windows saturate. [1]"""
        total = 0.0
        for kind, count in zip(self.kinds, self.kind_counts, strict=True):
            window = getattr(kind.attention, "window", 0)
            total += count * kind.attention.cache_elements * (min(context, window) if window else context)
        return total

    def kv_bytes_per_token(self, precision: Precision | str) -> float:
        """Cache of one token over all layers, windows not yet full; takes a recipe or its name. [B]"""
        if isinstance(precision, str):
            from disagg_sim.facts.load import load_precision

            precision = load_precision(precision).resolve(self)
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
            if isinstance(kind.ffn, MoeFfn):
                ffn = kind.ffn
                routed = ffn.top_k if active else ffn.experts
                layer += routed * (ffn.expert_params(d) + ffn.expert_other_params(d)) + ffn.shared_params(d)
                layer += ffn.router_params(d) + ffn.router_bias * ffn.experts
            else:
                layer += kind.ffn.matmul_params(d) + kind.ffn.other_params(d)
            total += count * layer
        return total
