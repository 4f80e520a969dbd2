"""Sparse attention: a light index chooses the cached tokens, blocks or entries that a query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from disagg_sim.facts.attention import LatentAttention
from disagg_sim.facts.kinds import AttentionSpec, Count, LayerCache, Window, register

#: Index keys are cached in fp8 with one fp32 scale of so many elements. [1]
SCALED_ELEMENTS, SCALE_BYTES = 128, 4
#: Bytes of an element of a cache of one byte: rotary columns and index keys of MiniMax stay in bf16. [B]
BF16_BYTES = 2
#: Bytes of an element of the compressor's state: fp32. [B]
COMPRESSOR_BYTES = 4


def fp8_key_bytes(elements: int) -> int:
    """Size an index key in fp8 with its scales. [B]"""
    return elements + SCALE_BYTES * -(-elements // SCALED_ELEMENTS)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class DsaAttention(LatentAttention):
    """DeepSeek Sparse Attention (DeepSeek-V3.2, GLM-5): MLA over ``top_k`` tokens that a lightning indexer chooses.

    arXiv 2512.02556, section 2. ``shared_index`` reuses the choice of a layer before (GLM-5.2): no indexer, no index
    cache. ``index_pool`` joins so many tokens to one index key (GLM-5.3-Flash).
    """

    kind: ClassVar[str] = "dsa"
    projected_as: ClassVar[str] = "mla"
    index_heads: Count
    index_dim: Count
    top_k: Count  # chosen tokens of a query [token]
    index_pool: Count = 1  # tokens of one index key [token]
    shared_index: bool = False

    def __post_init__(self) -> None:
        """``ValueError`` where the indexer has no query latent to project from."""
        if not self.q_rank:
            raise ValueError("q_rank 0: the indexer projects its queries from the query latent; allowed: from 1")

    def index_params(self, hidden: int) -> int:
        """Weights of the indexer: queries, key, weights of heads, and of a pool a gate. [1]"""
        if self.shared_index:
            return 0
        queries = self.q_rank * self.index_heads * self.index_dim
        pooled = hidden * self.index_dim if self.index_pool > 1 else 0
        return queries + hidden * (self.index_dim + self.index_heads) + pooled

    def matmul_params(self, hidden: int) -> int:
        """Weights of latent attention and of the indexer. [1]"""
        return LatentAttention.matmul_params(self, hidden) + self.index_params(hidden)

    def other_params(self, hidden: int) -> int:
        """Norms of the latents, of the index key with its bias, and positions of a pool. [1]"""
        own = 2 + (self.index_pool if self.index_pool > 1 else 0)
        return LatentAttention.other_params(self, hidden) + (0 if self.shared_index else own * self.index_dim)

    @property
    def index_bytes(self) -> float:
        """Index key of one token. [B]"""
        return 0.0 if self.shared_index else fp8_key_bytes(self.index_dim) / self.index_pool

    def latent_bytes(self, element_bytes: float) -> float:
        """Latent of one token: rotary columns stay in bf16, a latent in fp8 has scales (FlashMLA: 656 B). [B]"""
        scales = SCALE_BYTES * -(-self.kv_rank // SCALED_ELEMENTS) if element_bytes < BF16_BYTES else 0
        return self.kv_rank * element_bytes + scales + self.rope_dim * BF16_BYTES

    def stores(self, element_bytes: float) -> tuple[LayerCache, ...]:
        """Latents and index keys, whole on every rank of a TP group."""
        latent = LayerCache(self.latent_bytes(element_bytes))
        return (latent, LayerCache(self.index_bytes, whole=True)) if self.index_bytes else (latent,)

    @property
    def kinks(self) -> tuple[int, ...]:
        """Chosen tokens: from there on a query attends to no more. [token]"""
        return (self.top_k,)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class MsaAttention(AttentionSpec):
    """MiniMax Sparse Attention (MiniMax-M3): each KV head attends to ``top_blocks`` blocks that an index chooses.

    arXiv 2606.13392. Every token's index key is scored; the score of a block is that of its best token.
    """

    kind: ClassVar[str] = "msa"
    projected_as: ClassVar[str] = "gqa"
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    index_heads: Count
    index_dim: Count
    block: Count  # tokens of a block [token]
    top_blocks: Count  # chosen blocks of a query, its own among them [1]
    qk_norm: bool = False

    def __post_init__(self) -> None:
        """``ValueError`` unless the KV heads share the query heads evenly."""
        if self.q_heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide q_heads {self.q_heads}")

    def matmul_params(self, hidden: int) -> int:
        """Weights of qkv, output and index projections. [1]"""
        heads = 2 * self.q_heads + 2 * self.kv_heads
        return hidden * (heads * self.head_dim + (self.index_heads + 1) * self.index_dim)

    def other_params(self, hidden: int) -> int:  # noqa: ARG002 - as the base class asks
        """Norms of queries and keys, of the index, too. [1]"""
        return self.qk_norm * 2 * (self.head_dim + self.index_dim)

    @property
    def cache_elements(self) -> int:
        """Keys and values of one token; the index key is apart. [1]"""
        return 2 * self.kv_heads * self.head_dim

    @property
    def cache_parts(self) -> int:
        """KV heads. [1]"""
        return self.kv_heads

    @property
    def chosen(self) -> int:
        """Tokens of the chosen blocks. [token]"""
        return self.block * self.top_blocks

    @property
    def kinks(self) -> tuple[int, ...]:
        """Tokens of the chosen blocks. [token]"""
        return (self.chosen,)

    def stores(self, element_bytes: float) -> tuple[LayerCache, ...]:
        """Keys and values by heads, and the index key in bf16, whole on every rank."""
        cached = LayerCache(self.cache_elements * element_bytes, parts=self.kv_heads, tensors=2)
        return (cached, LayerCache(float(self.index_dim * BF16_BYTES)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention(AttentionSpec):
    """Attention of DeepSeek-V4: one head that is key and value, a window, and beside it entries of several tokens.

    As in ``deepseek_v4`` of huggingface/transformers: queries through a latent, output through ``output_groups``
    block-diagonal matrices of rank ``output_rank``.
    """

    projected_as: ClassVar[str] = "mla"
    q_heads: Count
    q_rank: Count
    head_dim: Count
    rope_dim: Count
    output_rank: Count  # of each group [1]
    output_groups: Count
    window: Window  # [token]

    def matmul_params(self, hidden: int) -> int:
        """Weights of q_a and kv, q_b, both output projections. [1]"""
        wide = self.q_heads * self.head_dim
        joined = self.output_groups * self.output_rank * hidden
        return hidden * (self.q_rank + self.head_dim) + self.q_rank * wide + wide * self.output_rank + joined

    def other_params(self, hidden: int) -> int:  # noqa: ARG002 - as the base class asks
        """Norms of the query latent and of the entry, and sinks. [1]"""
        return self.q_rank + self.head_dim + self.q_heads

    def entry_bytes(self, element_bytes: float) -> float:
        """An entry: its rotary columns stay in bf16 (576 B in fp8). [B]"""
        return (self.head_dim - self.rope_dim) * element_bytes + self.rope_dim * BF16_BYTES

    def stores(self, element_bytes: float) -> tuple[LayerCache, ...]:
        """The window, whole on every rank."""
        return (LayerCache(self.entry_bytes(element_bytes), window=self.window),)

    @property
    def kinks(self) -> tuple[int, ...]:
        """The window. [token]"""
        return (self.window,) if self.window else ()


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class HcaAttention(CompressedAttention):
    """Heavily compressed attention (DeepSeek-V4): all entries of ``ratio`` tokens each are attended to.

    ``ratio`` 0 leaves the window alone.
    """

    kind: ClassVar[str] = "hca"
    ratio: Window  # tokens of an entry [token]; 0 = no entries

    def matmul_params(self, hidden: int) -> int:
        """Weights of attention, and of the values and the gate that make entries of tokens. [1]"""
        compressor = 2 * hidden * self.head_dim if self.ratio else 0
        return CompressedAttention.matmul_params(self, hidden) + compressor

    def other_params(self, hidden: int) -> int:
        """Norms, sinks, and of the compressor a position bias and a norm. [1]"""
        own = (self.ratio + 1) * self.head_dim if self.ratio else 0
        return CompressedAttention.other_params(self, hidden) + own

    @property
    def entry_tokens(self) -> int:
        """Tokens of an entry. [token]"""
        return self.ratio or 1

    @property
    def cache_elements(self) -> float:
        """Elements of an entry over its tokens; the window is apart. [1]"""
        return self.head_dim / self.ratio if self.ratio else 0.0

    @property
    def state_bytes(self) -> float:
        """Values and gates of the tokens of an unfinished entry. [B]"""
        return float(2 * self.ratio * self.head_dim * COMPRESSOR_BYTES)

    def stores(self, element_bytes: float) -> tuple[LayerCache, ...]:
        """The window, and entries."""
        window = CompressedAttention.stores(self, element_bytes)
        return (*window, LayerCache(self.entry_bytes(element_bytes) / self.ratio)) if self.ratio else window


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class CsaAttention(CompressedAttention):
    """Compressed sparse attention (DeepSeek-V4): ``top_k`` of the entries of ``ratio`` tokens, chosen by an index."""

    kind: ClassVar[str] = "csa"
    ratio: Count  # tokens of an entry; entries overlap, so each is made of twice as many [token]
    index_heads: Count
    index_dim: Count
    top_k: Count  # chosen entries of a query [1]

    def index_params(self, hidden: int) -> int:
        """Weights of the index: queries, weights of heads, and a compressor of its own. [1]"""
        queries = self.q_rank * self.index_heads * self.index_dim
        return queries + hidden * (4 * self.index_dim + self.index_heads)

    def matmul_params(self, hidden: int) -> int:
        """Weights of attention, compressor and index. [1]"""
        own = 4 * hidden * self.head_dim + self.index_params(hidden)
        return CompressedAttention.matmul_params(self, hidden) + own

    def other_params(self, hidden: int) -> int:
        """Norms, sinks, and of both compressors a position bias and a norm. [1]"""
        own = (2 * self.ratio + 1) * (self.head_dim + self.index_dim)
        return CompressedAttention.other_params(self, hidden) + own

    @property
    def entry_tokens(self) -> int:
        """Tokens of an entry. [token]"""
        return self.ratio

    @property
    def cache_elements(self) -> float:
        """Elements of an entry over its tokens; window and index are apart. [1]"""
        return self.head_dim / self.ratio

    @property
    def kinks(self) -> tuple[int, ...]:
        """The window, and the tokens of the chosen entries. [token]"""
        return (self.window, self.ratio * self.top_k)

    @property
    def state_bytes(self) -> float:
        """Values and gates of the tokens of two unfinished entries, of the index, too. [B]"""
        return float(4 * self.ratio * (self.head_dim + self.index_dim) * COMPRESSOR_BYTES)

    def stores(self, element_bytes: float) -> tuple[LayerCache, ...]:
        """The window, entries and their index keys."""
        entry, key = self.entry_bytes(element_bytes), fp8_key_bytes(self.index_dim)
        return (
            *CompressedAttention.stores(self, element_bytes),
            LayerCache(entry / self.ratio),
            LayerCache(key / self.ratio),
        )
