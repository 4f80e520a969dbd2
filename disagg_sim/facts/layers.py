"""Layers of a model: the kinds of attention and of feed-forward parts, their sizes and their parameters.

``models/*.yaml`` names blocks of these kinds, and the runs of layers that use them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from disagg_sim.facts.schema import NotEmpty, OneKind, Range

Count = Annotated[int, Range(1, 10**7)]
CountOrNone = Annotated[int, Range(0, 10**7)]


class AttentionSpec(ABC):
    """One kind of attention as a model's file describes it; ``kind`` is its word there.

    A subclass is a frozen dataclass of the sizes; the class of the same ``kind`` in ``physics.blocks`` counts it.
    """

    __slots__ = ()
    kind: ClassVar[str]

    @abstractmethod
    def matmul_params(self, hidden: int) -> int:
        """Weights of the projections. [1]"""

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
    def cache_tensors(self) -> int:
        """Tensors in which engines keep the cache of a layer, such as keys and values apart. [1]"""
        return 1

    @property
    def window_tokens(self) -> int:
        """Tokens after which the cache of a sequence stops growing; 0 = never. [token]"""
        return 0

    def elements(self, tokens: float) -> float:
        """Elements that a sequence of ``tokens`` tokens keeps in one layer. [1]"""
        held = min(tokens, self.window_tokens) if self.window_tokens else tokens
        return self.cache_elements * held + self.state_elements


class FfnSpec(ABC):
    """One kind of feed-forward layer as a model's file describes it; see ``AttentionSpec``."""

    __slots__ = ()
    kind: ClassVar[str]
    routes: ClassVar[bool] = False  # whether tokens are sent to experts

    @abstractmethod
    def params(self, hidden: int, *, active: bool) -> int:
        """All parameters, or those that one token touches. [1]"""

    @abstractmethod
    def token_matmul_params(self, hidden: int) -> int:
        """Weights that one token is multiplied with. [1]"""


K = TypeVar("K", bound=type[AttentionSpec | FfnSpec])
#: Word of a kind in a file -> its spec; ``register`` adds one.
ATTENTION_KINDS: dict[str, type[AttentionSpec]] = {}
FFN_KINDS: dict[str, type[FfnSpec]] = {}


def register(spec: K) -> K:
    """Let files of models use a kind of attention or of feed-forward layer: a frozen dataclass, its keys marked."""
    if issubclass(spec, AttentionSpec):
        ATTENTION_KINDS[spec.kind] = spec
    elif issubclass(spec, FfnSpec):
        FFN_KINDS[spec.kind] = spec
    return spec


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class GqaAttention(AttentionSpec):
    """Grouped-query attention (MHA when ``kv_heads == q_heads``), optionally with a sliding window."""

    kind: ClassVar[str] = "gqa"
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    window: Annotated[int, Range(0, 10**9)] = 0  # sliding window [token]; 0 = full attention
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        """``ValueError`` unless the KV heads share the query heads evenly."""
        if self.q_heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide q_heads {self.q_heads}")

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
    def cache_tensors(self) -> int:
        """Keys and values. [1]"""
        return 2

    @property
    def window_tokens(self) -> int:
        """The sliding window. [token]"""
        return self.window


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention(AttentionSpec):
    """Multi-head latent attention (DeepSeek-V2/V3): one latent of ``kv_rank + rope_dim`` is cached."""

    kind: ClassVar[str] = "mla"
    q_heads: Count
    q_rank: Count
    kv_rank: Count
    nope_dim: Count
    rope_dim: Count
    value_dim: Count

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


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFfn(FfnSpec):
    """A dense feed-forward layer: 3 matrices with SwiGLU, 2 without gate."""

    kind: ClassVar[str] = "dense"
    width: Count
    matrices: Annotated[int, Range(2, 3)] = 3
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


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFfn(FfnSpec):
    """Routed experts (``top_k`` of ``experts`` per token), shared experts and the router."""

    kind: ClassVar[str] = "moe"
    routes: ClassVar[bool] = True
    experts: Count
    top_k: Count
    width: Count
    shared_experts: Annotated[int, Range(0, 100)] = 0
    shared_width: CountOrNone = 0
    router_bias: bool = False
    expert_bias: bool = False

    def __post_init__(self) -> None:
        """``ValueError`` where a token is sent to more experts than there are."""
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is above experts {self.experts}")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Names of the blocks of one layer."""

    attention: str
    ffn: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Layers that follow each other: ``count`` times one layer, or ``count`` times a pattern of several."""

    count: Annotated[int, Range(1, 10_000)]
    attention: str = ""
    ffn: str = ""
    pattern: Annotated[tuple[Part, ...], NotEmpty] = ()

    def __post_init__(self) -> None:
        """``ValueError`` unless exactly one of the two forms is there."""
        if (self.attention or self.ffn) if self.pattern else not (self.attention and self.ffn):
            raise ValueError("needs either 'attention' and 'ffn', or 'pattern'")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Layers that are repeated."""
        return self.pattern or (Part(attention=self.attention, ffn=self.ffn),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """What a model's file says of its layers: blocks by name, and the runs of layers that use them."""

    attention: Annotated[Mapping[str, Annotated[AttentionSpec, OneKind(ATTENTION_KINDS)]], NotEmpty]
    ffn: Annotated[Mapping[str, Annotated[FfnSpec, OneKind(FFN_KINDS)]], NotEmpty]
    layers: Annotated[tuple[Run, ...], NotEmpty]
