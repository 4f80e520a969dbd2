"""Describe a model by its layers; count its parameters and cache bytes.

Matrix multiplies, norms, biases, routers, sinks and positions are counted, so that the totals of every shipped model
are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

from disagg_sim.errors import InputError, nearest, quoted
from disagg_sim.facts.attention import NoAttention
from disagg_sim.facts.ffn import NoFfn
from disagg_sim.facts.kinds import ATTENTION_KINDS, FFN_KINDS, Count, CountOrNone
from disagg_sim.facts.layers import NONE, LayerKind, Layers
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.schema import NOT_IN_FILE, Line, Range, schema_of, validate
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.notebook import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A vision tower: bidirectional attention over the patches of one image, then a projector.

    The projector maps ``merge`` x ``merge`` patches by two matrices to one embedding of the model.
    """

    layers: Count
    hidden: Count
    width: Count  # of its feed-forward part, two matrices [1]
    patch: Annotated[int, Range(1, 1024)]  # edge of a patch [pixel]
    merge: Annotated[int, Range(1, 16)]  # patches along each edge of the square that becomes one token [1]

    @property
    def matmul_params(self) -> int:
        """Weights of all layers: four square matrices of attention and two matrices of the FFN each. [1]"""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.width)

    def patches(self, height: int, width: int) -> int:
        """Patches of an image, its edges rounded up to whole tokens. [1]"""
        edge = self.patch * self.merge
        return math.ceil(height / edge) * math.ceil(width / edge) * self.merge**2

    def tokens(self, height: int, width: int) -> int:
        """Tokens that an image adds to the prompt. [token]"""
        return self.patches(height, width) // self.merge**2


#: Most layers of one model; the deepest known has about a hundred. [1]
MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Shown):
    """A decoder-only model as a pattern of layers.

    ``layers`` has one ``LayerKind`` per layer, in order: ``(dense,) * 3 + (moe,) * 58`` for DeepSeek-R1.
    """

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    hidden: Count
    vocab: Count
    layers: Annotated[tuple[LayerKind, ...], NOT_IN_FILE]
    tied_embeddings: bool
    layer_norm: bool = False  # LayerNorm with bias (OPT) instead of RMSNorm
    post_norms: bool = False  # also norms after attention and FFN (Gemma)
    learned_positions: CountOrNone = 0  # rows of a learned position table, 0 with rotary [1]
    residual_streams: Annotated[int, Range(1, 64)] = 1  # of hyper-connections (DeepSeek-V4: 4); 1 = plain residual
    attention_residuals: bool = False  # attention over the residuals of earlier layers (Kimi K3)
    encoder_params: Annotated[int, Range(0, 10**12)] = 0  # of encoders of images or sounds beside the text model [1]
    block_scaled_fp8: bool = False  # fp8 checkpoints carry 128x128 block scales (DeepSeek, Kimi)
    max_context: Annotated[int, Range(1, 10**9)]  # input + output [token]
    max_context_sure: bool = True  # whether a published configuration states ``max_context``
    encoder: EncoderSpec | None = None  # vision tower, for encode pools; not counted in the parameters
    recipe: str = ""  # precision recipe of the imported checkpoint; "" = none
    no_recipe: str = ""  # why no recipe fits the imported checkpoint; "" = one does
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

    @cached_property
    def pattern(self) -> tuple[int, ...]:
        """Index in ``kinds`` of each layer."""
        place = {kind: index for index, kind in enumerate(self.kinds)}
        return tuple(place[layer] for layer in self.layers)

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return any(kind.ffn.routes for kind in self.kinds)

    @cached_property
    def attention_kinds(self) -> tuple[str, ...]:
        """Kinds of attention in order of first appearance; each has its own fits."""
        return tuple(dict.fromkeys(k.attention.kind for k in self.kinds if k.attention.kind != NONE))

    @cached_property
    def kinks(self) -> tuple[int, ...]:
        """Context lengths where memory and step time bend, ascending: windows and top-k of sparse attention. [token]"""
        return tuple(sorted({kink for kind in self.kinds for kink in kind.attention.kinks}))

    @cached_property
    def has_windows(self) -> bool:
        """Whether the cache of some layer stops growing."""
        return any(store.window for kind in self.kinds for store in kind.attention.stores(1.0))

    @property
    def linear_cache(self) -> bool:
        """Whether the cache of a sequence is proportional to its length: no windows, no state."""
        return not self.has_windows and not any(kind.attention.state_bytes for kind in self.kinds)

    @property
    def state_bytes(self) -> float:
        """State of a sequence, independent of its length, over all layers. [B]"""
        return sum((c * k.attention.state_bytes for k, c in zip(self.kinds, self.kind_counts, strict=True)), 0.0)

    @property
    def recurrent_bytes(self) -> float:
        """State saved at each point where a cached prefix can be reused, over all layers. [B]"""
        return sum((c * k.attention.recurrent_bytes for k, c in zip(self.kinds, self.kind_counts, strict=True)), 0.0)

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
        """All parameters; tied embedding and head count once. [1]"""
        return self._count(active=False)

    @property
    def active_params(self) -> int:
        """Parameters used by one token; embedding and head count whole. [1]"""
        return self._count(active=True)

    @property
    def linear_params_per_token(self) -> int:
        """P_lin: matrix-multiply weights of the layers used by a token, which costs 2*P_lin FLOP. [1]"""
        total = 0
        for kind, count in zip(self.kinds, self.kind_counts, strict=True):
            layer = kind.attention.matmul_params(self.hidden) + kind.ffn.token_matmul_params(self.hidden)
            total += count * layer
        return total

    def kv_elements_per_token(self) -> float:
        """Cached elements of one token over all layers, before windows are full. [1]"""
        return sum(c * k.attention.cache_elements for k, c in zip(self.kinds, self.kind_counts, strict=True))

    def kv_bytes(self, tokens: float, precision: Precision) -> float:
        """Cache and state of a sequence of ``tokens`` tokens; windows saturate. [B]"""
        layers, size = zip(self.kinds, self.kind_counts, strict=True), precision.cache.bytes
        return sum((count * kind.attention.sequence_bytes(tokens, size) for kind, count in layers), 0.0)

    def kv_bytes_per_token(self, precision: Precision) -> float:
        """Cache of one token over all layers, before windows are full. [B]"""
        layers, size = zip(self.kinds, self.kind_counts, strict=True), precision.cache.bytes
        return sum((count * store.token_bytes for kind, count in layers for store in kind.attention.stores(size)), 0.0)

    def check_context(self, isl: float, osl: float, *, allow_long: bool = False) -> None:
        """Refuse a request beyond the context limit, unless ``allow_long``."""
        if isl + osl > self.max_context and not allow_long:
            raise InputError(
                f"isl {isl:.0f} + osl {osl:.0f} = {isl + osl:.0f} tokens exceed the context limit of {self.name}, "
                f"{self.max_context} tokens; `allow_long_context` of a sweep or a grid waives it, elsewhere a model's "
                "file of your own with a larger max_context"
            )

    def norm_params(self, kind: LayerKind) -> int:
        """Norms of the hidden size in one layer of a kind, and weights of attention over residuals. [1]"""
        norms = kind.norms(behind=self.post_norms) * (2 if self.layer_norm else 1)
        return (norms + self.attention_residuals * 2 * kind.parts) * self.hidden

    def stream_params(self, kind: LayerKind) -> int:
        """Weights that mix the n residual streams in one layer of a kind, in fp32; 0 with one stream. [1]

        Each part maps all n streams to n read, n write and n x n mixing weights (arXiv 2512.24880).
        """
        n = self.residual_streams
        return 0 if n == 1 else kind.parts * ((n * n + 2 * n) * (n * self.hidden + 1) + 3)

    def _count(self, *, active: bool) -> int:
        d = self.hidden
        total = self.embedding_params * (1 if self.tied_embeddings else 2)
        total += d * (2 if self.layer_norm else 1) + self.learned_positions * d + self.attention_residuals * 2 * d
        if (n := self.residual_streams) > 1:  # weights that join the streams before the head
            total += n * (n * d + 1) + 1
        for kind, count in zip(self.kinds, self.kind_counts, strict=True):
            layer = self.norm_params(kind) + self.stream_params(kind) + kind.ffn.params(d, active=active)
            total += count * (layer + kind.attention.matmul_params(d) + kind.attention.other_params(d))
        return total


@cache
def _keys(kinds: tuple[type, ...]) -> Any:  # noqa: ARG001 - a kind registered later needs another schema
    return schema_of(ModelSpec, Layers)


def model_of(path: Path, data: Mapping[str, Any], name: str) -> ModelSpec:
    """Make a model from the content of its file."""
    fields = dict(validate(_keys((*ATTENTION_KINDS.values(), *FFN_KINDS.values())), data, path))
    attention, ffn, runs = (fields.pop(key) for key in ("attention", "ffn", "layers"))
    if (many := sum(run.count * len(run.parts) for run in runs)) > MOST_LAYERS:
        raise spec_error(path, [f"layers: {many} in all; allowed: up to {MOST_LAYERS}"])
    attention, ffn = {NONE: NoAttention(), **attention}, {NONE: NoFfn(), **ffn}
    faults = [
        f"layers[{index}].{group}: {quoted(used)} is unknown{nearest(used, known)}; allowed: {', '.join(known)}"
        for index, run in enumerate(runs)
        for part in run.parts
        for group, used, known in (("attention", part.attention, attention), ("ffn", part.ffn, ffn))
        if used not in known
    ]
    if faults:
        raise spec_error(path, list(dict.fromkeys(faults)))
    layers = (
        kind for run in runs for kind in [LayerKind(attention[p.attention], ffn[p.ffn]) for p in run.parts] * run.count
    )
    return ModelSpec(name=name, layers=tuple(layers), **fields)
