"""Define what a kind of attention or feed-forward layer must answer, and register the kinds.

A kind is a spec (``facts.model``: the keys of a model's file) and a block (a class here, registered under the
``kind`` of its spec). Numbers and arrays broadcast; ``tp`` shards over GPUs; nothing here knows hardware.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.attention import NoAttention
from disagg_sim.facts.efficiency import HEADS
from disagg_sim.facts.ffn import NoFfn
from disagg_sim.facts.kinds import AttentionSpec, FfnSpec, LayerCache
from disagg_sim.facts.layers import NONE, LayerKind
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Format, Precision
from disagg_sim.physics.work import AttentionShape, Numeric, Operator, Tokens, Work
from disagg_sim.techniques.experts.physics import ExpertRouting

A = TypeVar("A", bound=AttentionSpec)
F = TypeVar("F", bound=FfnSpec)
Kind = TypeVar("Kind", bound=type[Any])


#: Names of the projections behind scores and values.
OUTWARD = ("o", "kv_b out of values")
#: Name and whole width of matrices, the parts that they are cut into, and their format. [1]
Cut = tuple[str, int, Numeric, Format]


class AttentionBlock(ABC, Generic[A]):
    """One layer's attention on one GPU. The fits of its ``kind`` time its kernels."""

    #: Kinds whose fits time scores and values; None = those of its own kind.
    tables: ClassVar[tuple[str, ...] | None] = None
    #: Parts of it that have kernels of their own beside scores and values (``facts.efficiency.ATTENTION_PARTS``).
    parts: ClassVar[tuple[str, ...]] = ()
    #: Ways to run prefill that a user may force; "auto" takes the fastest at every point.
    forms: ClassVar[tuple[str, ...]] = ("auto",)
    #: Whether the layer has such a part: norms, an all-reduce.
    present: ClassVar[bool] = True
    #: Kernels of a layer outside a CUDA graph: norms, quantisation, cache write and collectives included. [1]
    launches: ClassVar[int] = 9

    def __init__(self, spec: A) -> None:
        self.spec = spec

    @abstractmethod
    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        """Matrix multiplies before and after scores and values, without the all-reduce of the output."""

    def served_projections(
        self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric, absorbed: Numeric
    ) -> list[Operator]:
        """``projections`` as libraries run them, ``absorbed`` of the tokens in latent space where the kind has one."""
        return self.projections(model, precision, tp, tokens)

    @abstractmethod
    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """Alternatives for the scores and values of prompts or chunks of them; the fastest counts at each point."""

    @abstractmethod
    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """Alternatives for the scores and values of the ``queries`` new tokens of each sequence in decode."""

    @abstractmethod
    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        """Weights of the projections that one GPU holds. [1]"""

    @abstractmethod
    def activation_width(self, tp: Numeric) -> Numeric:
        """Elements of a token that are live at once around the kernel. [1]"""

    def elementwise_width(self, tp: Numeric) -> Numeric:
        """Elements of a token that rotary embedding, quantisation and cache write pass through memory. [1]"""
        return self.activation_width(tp)

    @abstractmethod
    def rejects(self, tp: int) -> str | None:
        """Why the heads cannot be cut over ``tp`` GPUs; None if they can."""

    def decode_share(
        self, precision: Precision, tp: Numeric, dcp: Numeric, tokens: Tokens, form: str
    ) -> tuple[list[Operator], ...]:
        """``decode`` of one of ``dcp`` shares of the context: the heads of tp/dcp GPUs on 1/dcp of the tokens."""
        if self.spec.shared_rows is None:
            return self.decode(precision, tp, tokens, form)
        share = replace(tokens, context=np.maximum(tokens.context / dcp, 1.0))
        return self.decode(precision, tp / dcp, share, form)

    def weight_bytes(self, hidden: int, precision: Precision, tp: Numeric) -> Numeric:
        """Weights of the projections on one GPU. [B]"""
        return self.matmul_params(hidden, tp) * precision.projection(self.spec.kind).bytes

    def outward_params(self, hidden: int) -> int:
        """Weights of the projections behind scores and values (``OUTWARD``), of a kind that shares tokens. [1]"""
        return 0

    def inward_copies(self, hidden: int, precision: Precision, tp: Numeric, dcp: Numeric) -> Numeric:
        """What Helix adds to the weights of a GPU: projections before scores are cut over tp/dcp GPUs alone. [B]"""
        if self.spec.shared_rows is None:
            return 0.0
        all_of_it = self.matmul_params(hidden, tp / dcp) - self.matmul_params(hidden, tp)
        outward = self.outward_params(hidden) * (dcp - 1.0) / tp
        return (all_of_it - outward) * precision.projection(self.spec.kind).bytes

    def stores(self, element_bytes: float, tp: Numeric, dcp: Numeric = 1.0) -> list[tuple[LayerCache, Numeric]]:
        """What the layer caches of a token, and the bytes of each on the fullest GPU, ``dcp`` sharing tokens. [B]"""
        found = []
        for store in self.spec.stores(element_bytes):
            shares = dcp if self.spec.shared_rows is not None and not store.whole else 1.0
            found.append((store, store.token_bytes * np.ceil(store.parts / (tp / shares)) / store.parts / shares))
        return found

    def expanded_elements(self, tp: Numeric) -> Numeric:
        """Elements of one token that form ``cached`` keeps beside the cache. [1]"""
        return 0.0

    def state_bytes(self, tp: Numeric) -> Numeric:
        """What one GPU keeps of a sequence, whatever its length. [B]"""
        return self.spec.state_bytes / np.minimum(tp, self.spec.cache_parts)

    def sent(self, tokens: float, element_bytes: float, tp: Numeric, dcp: Numeric = 1.0) -> Numeric:
        """What each GPU of a TP group with a distinct part hands over of a sequence, ``dcp`` sharing tokens. [B]"""
        total: Numeric = 0.0
        for store in self.spec.stores(element_bytes):
            shares = dcp if self.spec.shared_rows is not None and not store.whole else 1.0
            held = store.token_bytes * store.tokens(tokens)
            total = total + held / (np.minimum(tp / shares, store.parts) * shares)
        state = self.spec.state_bytes
        return total + state / np.minimum(tp, self.spec.cache_parts) if state else total

    def rejects_sharing(self, tp: int, dcp: int) -> str | None:
        """Why ``dcp`` of ``tp`` GPUs cannot share the cached tokens; None if they can, or keep all of them."""
        if tp % dcp:
            return f"dcp does not divide tp_attn {tp}"
        if self.spec.shared_rows is None:
            return None
        copies = max(tp // max(store.parts for store in self.spec.stores(1.0)), 1)
        return f"dcp above {copies}, the copies of a KV head" if dcp > copies else None

    @staticmethod
    def sizes(shape: AttentionShape) -> dict[str, Numeric]:
        """Sizes of heads by the names that the kernel tables of this kind give them."""
        return dict(zip(HEADS, (shape.q_heads, shape.kv_heads, shape.head_dim), strict=True))


class FfnBlock(ABC, Generic[F]):
    """One layer's feed-forward part on one GPU."""

    #: Whether the layer has such a part.
    present: ClassVar[bool] = True
    #: Kernels of a layer outside a CUDA graph. [1]
    launches: ClassVar[int] = 7

    def __init__(self, spec: F) -> None:
        self.spec = spec

    @abstractmethod
    def local(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        """What the attention ranks do, the all-reduce included."""

    @abstractmethod
    def weight_bytes(self, hidden: int, precision: Precision, mapping: Sharding) -> Numeric:
        """Weights on one GPU. [B]"""

    @abstractmethod
    def widest(self, hidden: int, mapping: Sharding, tokens: Numeric, all_tokens: Numeric, imbalance: float) -> Numeric:
        """Elements live at once, for the tokens of the fullest attention rank and of all ranks. [1]"""

    def live_width(self, mapping: Sharding) -> Numeric:
        """Elements of a token that the part keeps at once between its own matrices; of routed experts none. [1]"""
        return 0.0

    def workspace(self, hidden: int, mapping: Sharding, all_tokens: Numeric, imbalance: float) -> Numeric:
        """Elements of the workspaces of routed experts, which an engine keeps, for the tokens of all ranks. [1]"""
        return 0.0

    @abstractmethod
    def rejects(self, mapping: Sharding) -> str | None:
        """Why the layer cannot be cut so; None if it can."""

    @abstractmethod
    def cuts(self, precision: Precision, mapping: Sharding) -> list[Cut]:
        """Widths that are cut over GPUs: name, whole width [1], parts [1], format."""

    def least_redundant_slots(self, ep: int) -> int | None:
        """Fewest redundant slots with which ``ep`` ranks hold equally many; None where these would be too many. [1]"""
        return 0

    @abstractmethod
    def format(self, precision: Precision) -> Format:
        """Format of its weights."""

    @property
    @abstractmethod
    def active_width(self) -> int:
        """Width that one token passes through. [1]"""

    @property
    def picks(self) -> int:
        """Experts that a token is sent to; 0 = it stays on its rank. [1]"""
        return 0

    def wire_width(self, hidden: int) -> int:
        """Elements of a token that an exchange sends. [1]"""
        return hidden

    def beside(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        """What may run beside the exchange: shared experts."""
        return []

    def routed(
        self, model: ModelSpec, precision: Precision, mapping: Sharding, tokens: Numeric, routing: ExpertRouting
    ) -> Operator:
        """Grouped GEMMs of the routed experts of a rank; ``tokens`` counts all ranks of the stage."""
        raise NotImplementedError(f"{self.spec.kind} routes no tokens")

    def imbalance(self, mapping: Sharding, skew: float) -> Numeric:
        """Tokens of the fullest expert rank over the mean, where experts are popular by a ``skew``. [1]"""
        return 1.0


#: Kind of a spec -> the block that counts it.
ATTENTION: dict[str, type[AttentionBlock[Any]]] = {}
FFN: dict[str, type[FfnBlock[Any]]] = {}


def _into(known: dict[str, Any], kind: str) -> Callable[[Kind], Kind]:
    """Register a class as the block of a kind."""

    def register(block: Kind) -> Kind:
        known[kind] = block
        return block

    return register


#: Register the block of a kind of attention, or of feed-forward layer: ``@attention("gqa")``.
attention, ffn = partial(_into, ATTENTION), partial(_into, FFN)


class Layer(NamedTuple):
    """The blocks of one kind of layer."""

    attention: AttentionBlock[Any]
    ffn: FfnBlock[Any]
    kind: LayerKind


@lru_cache(maxsize=1024)
def layer_of(kind: LayerKind) -> Layer:
    """Find the blocks of a layer; layers with equal parts share these."""
    return Layer(_block_of(kind.attention), _block_of(kind.ffn), kind)


@lru_cache(maxsize=1024)
def _block_of(spec: AttentionSpec | FfnSpec) -> Any:
    known: dict[str, Any] = ATTENTION if isinstance(spec, AttentionSpec) else FFN
    if spec.kind not in known:
        raise InputError(f"kind {spec.kind!r}: not timed yet; timed: {', '.join(known)}")
    return known[spec.kind](spec)


def layers_of(model: ModelSpec) -> list[tuple[Layer, int]]:
    """Blocks of each kind of layer of a model, and how many layers are of it."""
    return [(layer_of(kind), count) for kind, count in zip(model.kinds, model.kind_counts, strict=True)]


def elementwise(model: ModelSpec, layer: Layer, tp: Numeric, tokens: Numeric) -> Operator:
    """Norms, residual, activation, rotary, quantise and cache write.

    ``16*d + (6*f_act + 6*(n_q+2*n_kv)*h)/tp`` bytes per token, f_act = f or k*d_e plus the shared
    width; MLA counts its two latents instead of the heads (physics page, section 2, an assumption). A layer of one
    part has half of ``16*d``.

    Parameters
    ----------
    model, layer
        d, and widths of the parts of a layer of one kind.
    tp
        GPUs that share them. [1]
    tokens
        New tokens of the attention rank. [token]

    Returns
    -------
    Operator
        Bytes of one GPU, no FLOP. [B]

    Examples
    --------
    A token of Llama-3.1-8B: 16 x 4096 + 6 x 14336 + 6 x (32 + 2 x 8) x 128 B

    >>> from disagg_sim.facts.load import load_model
    >>> from disagg_sim.physics.blocks import layers_of
    >>> llama = load_model("llama_3_1_8b")
    >>> elementwise(llama, next(iter(layers_of(llama)))[0], 1, 1).work.hbm_bytes
    188416.0
    """
    row = layer.attention.elementwise_width(tp)
    per_token = 8.0 * layer.kind.parts * model.hidden + 6.0 * layer.ffn.active_width / tp + 6.0 * row
    if model.residual_streams > 1:  # each part reads all streams and writes them anew, in bf16
        per_token = per_token + 4.0 * layer.kind.parts * model.residual_streams * model.hidden
    return Operator("elementwise", "elementwise", Work(0.0, tokens * per_token))


@attention(NONE)
class Unattended(AttentionBlock[NoAttention]):
    """No attention: no operators, no weights, no cache, and every TP degree is allowed."""

    present = False
    launches = 0

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        return []

    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        return ([],)

    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        return ([],)

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        return 0.0

    def weight_bytes(self, hidden: int, precision: Precision, tp: Numeric) -> Numeric:
        return 0.0

    def activation_width(self, tp: Numeric) -> Numeric:
        return 0.0

    def elementwise_width(self, tp: Numeric) -> Numeric:
        return 0.0

    def rejects(self, tp: int) -> str | None:
        return None


@ffn(NONE)
class Unfed(FfnBlock[NoFfn]):
    """No feed-forward part."""

    present = False
    launches = 0

    def local(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        return []

    def weight_bytes(self, hidden: int, precision: Precision, mapping: Sharding) -> Numeric:
        return 0.0

    def widest(self, hidden: int, mapping: Sharding, tokens: Numeric, all_tokens: Numeric, imbalance: float) -> Numeric:
        return 0.0

    def rejects(self, mapping: Sharding) -> str | None:
        return None

    def cuts(self, precision: Precision, mapping: Sharding) -> list[Cut]:
        return []

    def format(self, precision: Precision) -> Format:
        return precision.ffn

    @property
    def active_width(self) -> int:
        return 0
