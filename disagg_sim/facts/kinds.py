"""What a kind of attention and of feed-forward part says of itself: parameters, cache, state.

The words of the kinds in ``models/*.yaml``, and their keys, are in ``facts.attention``, ``facts.linear_attention``,
``facts.sparse_attention`` and ``facts.ffn``; ``register`` adds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from disagg_sim.facts.schema import OneOf, Range

Count = Annotated[int, Range(1, 10**7)]
CountOrNone = Annotated[int, Range(0, 10**7)]
Window = Annotated[int, Range(0, 10**9)]  # [token]; 0 = none

#: Bytes of an element of a recurrent state, by its word in a file. [B]
STATE_FORMATS = {"fp32": 4, "bf16": 2}
StateFormat = Annotated[str, OneOf(STATE_FORMATS)]
#: Bytes of an element of what a short convolution remembers. [B]
CONVOLUTION_BYTES = 2


class LayerCache(NamedTuple):
    """What one layer caches of each token of a sequence."""

    token_bytes: float  # of one token [B]
    window: int = 0  # tokens after which it grows no more; 0 = never [token]
    parts: int = 1  # GPUs of a TP group that can hold distinct shares, such as KV heads [1]
    tensors: int = 1  # in which engines keep it, such as keys and values apart [1]
    whole: bool = False  # on every GPU that shares the tokens of a sequence with others, as an index of tokens is

    def tokens(self, tokens: float) -> float:
        """Tokens of a sequence of so many that are kept. [token]"""
        return min(tokens, self.window) if self.window else tokens


class SharedRows(NamedTuple):
    """What GPUs that share the cached tokens of a sequence exchange for each new token."""

    heads: int  # query heads [1]
    query: int  # elements of the query of a head, as scores take it [1]
    output: int  # elements of the output of a head, before it is projected [1]


class AttentionSpec(ABC):
    """One kind of attention as a model's file describes it; ``kind`` is its word there.

    A subclass is a frozen dataclass of the sizes; the class of the same ``kind`` in ``physics.blocks`` counts it.
    """

    __slots__ = ()
    kind: ClassVar[str]
    #: Kind whose formats of projections it takes where a recipe does not name its own.
    projected_as: ClassVar[str] = ""
    norms: ClassVar[int] = 1  # of the hidden states before it [1]
    cache_tensors: ClassVar[int] = 1  # in which engines keep the cache of a layer: keys and values apart are two [1]
    scans: ClassVar[bool] = False  # whether a prompt is walked through in order, so that GPUs cannot share its tokens

    @abstractmethod
    def matmul_params(self, hidden: int) -> int:
        """Weights of the projections. [1]"""

    def other_params(self, hidden: int) -> int:  # noqa: ARG002 - of kinds with biases of the hidden size
        """Biases, norms, convolutions and the like. [1]"""
        return 0

    @property
    def cache_elements(self) -> float:
        """Elements of one token that a layer caches in the format of the cache, windows not yet full. [1]"""
        return 0

    @property
    def cache_parts(self) -> int:
        """GPUs of a TP group that can hold distinct shares of the cache. [1]"""
        return 1

    @property
    def window_tokens(self) -> int:
        """Tokens after which the cache of a sequence stops growing; 0 = never. [token]"""
        return 0

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that positions may rotate: width of the table of positions. [1]"""
        return 0

    @property
    def shared_rows(self) -> SharedRows | None:
        """What GPUs that share the cached tokens of a sequence exchange; None = each of them keeps all tokens."""
        return None

    @property
    def kinks(self) -> tuple[int, ...]:
        """Lengths at which the work of a token begins to grow otherwise: windows, chosen tokens. [token]"""
        return (self.window_tokens,) if self.window_tokens else ()

    @property
    def entry_tokens(self) -> int:
        """Tokens of the largest cached entry: a prefix is cached in whole ones. [token]"""
        return 1

    @property
    def state_bytes(self) -> float:
        """What a layer keeps of a sequence whatever its length: recurrent state, convolution. [B]"""
        return 0.0

    @property
    def recurrent_bytes(self) -> float:
        """Of the state what no cached token tells again, so that a prefix cannot be taken up without it. [B]"""
        return 0.0 if self.stores(1.0) else self.state_bytes

    def stores(self, element_bytes: float) -> tuple[LayerCache, ...]:
        """What a layer caches of each token, one entry for each rule of growing and of sharding; perhaps none."""
        if not self.cache_elements:
            return ()
        held = self.cache_elements * element_bytes
        return (LayerCache(held, self.window_tokens, self.cache_parts, self.cache_tensors),)

    @property
    def distinct_parts(self) -> frozenset[int]:
        """GPUs of a TP group that can hold distinct shares, of each store and of the state. [1]"""
        stored = frozenset(store.parts for store in self.stores(1.0))
        return stored | {self.cache_parts} if self.state_bytes else stored

    def sequence_bytes(self, tokens: float, element_bytes: float) -> float:
        """What a sequence of ``tokens`` tokens keeps in one layer: cache, of which windows saturate, and state. [B]"""
        cached = sum(store.token_bytes * store.tokens(tokens) for store in self.stores(element_bytes))
        return cached + self.state_bytes


class FfnSpec(ABC):
    """One kind of feed-forward layer as a model's file describes it; see ``AttentionSpec``."""

    __slots__ = ()
    kind: ClassVar[str]
    routes: ClassVar[bool] = False  # whether tokens are sent to experts
    norms: ClassVar[int] = 1  # of the hidden states before it [1]

    @abstractmethod
    def params(self, hidden: int, *, active: bool) -> int:
        """All parameters, or those that one token touches. [1]"""

    @abstractmethod
    def token_matmul_params(self, hidden: int) -> int:
        """Weights that one token is multiplied with. [1]"""

    @property
    def inner_norms(self) -> int:
        """Further norms of the hidden size where norms follow each part, too. [1]"""
        return 0


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
