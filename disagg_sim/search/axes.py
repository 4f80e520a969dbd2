"""Find the axes of a grid: batch sizes up to the memory limit, the chunk sizes of pipelines, and draft tokens.

Every decode point takes the number of draft tokens that is fastest of those that fit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import Sharding
from disagg_sim.errors import check_word
from disagg_sim.physics.memory import decode_bytes, prefill_bytes
from disagg_sim.physics.residents import CachedTokens
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric
from disagg_sim.search.blocks import given_sizes
from disagg_sim.search.mappings import mappings_for, without_pcp
from disagg_sim.search.phase_grid import PHASES
from disagg_sim.workload.lengths import Lengths


class Drafted(NamedTuple):
    """Decode points at one number of draft tokens, or at the fastest of several; arrays of shape (rows, batches)."""

    ttl: Numeric  # [s]
    memory: Numeric  # on the fullest GPU [B]
    microbatches: Numeric  # [1]
    bound: Numeric  # index into ``BOUNDS``
    drafts: Numeric  # [token]

    def or_faster(self, other: Drafted, limit: float) -> Drafted:
        """Take the ``other`` number of drafts where it is faster and fits, or where none fits and it needs less.

        At one batch throughput is proportional to 1/TTL, so the fastest number is the best in both. Takes
        ``limit`` [B].

        Three drafts are faster at both batches, and do not fit at the second:

        >>> none = Drafted(np.array([20e-3, 24e-3]), np.array([100e9, 130e9]), 1, 1, 0)
        >>> three = Drafted(np.array([8e-3, 9e-3]), np.array([105e9, 140e9]), 1, 1, 3)
        >>> none.or_faster(three, 135e9).drafts.tolist()
        [3, 0]
        """
        fits = other.memory <= limit
        better = np.where(self.memory <= limit, fits & (other.ttl < self.ttl), fits | (other.memory < self.memory))
        return Drafted(*(np.where(better, new, old) for new, old in zip(other, self, strict=True)))


def draft_choices(at: Setup) -> tuple[int, ...]:
    """Find the numbers of draft tokens that a search tries, rising: 0 alone without speculation. [token]

    >>> from disagg_sim.physics.setup import setup
    >>> plain, drafted = (setup("deepseek_r1", "h200_sxm", "fp8", speculation=s) for s in (None, "deepseek_r1_mtp"))
    >>> draft_choices(plain), draft_choices(drafted)
    ((0,), (0, 1))
    """
    return (0,) if at.speculation is None else at.speculation.choices


def drafting(at: Setup, mapping: Sharding, drafts: int) -> tuple[Setup, Sharding]:
    """Make setup and mapping of instances with so many draft tokens; with 0 they have no drafter."""
    if at.speculation is not None and not drafts:
        at = undrafted(at)
    return at, replace(mapping, draft_tokens=drafts)


@lru_cache(maxsize=64)
def undrafted(at: Setup) -> Setup:
    """The setup of instances without a drafter; one object, so that all groups of a search share its tables."""
    return replace(at, speculation=None)


#: Chunk sizes that CPP tries. [token]
CHUNK_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
#: Batch sizes per doubling.
BATCHES_PER_DOUBLING = 4
#: No instance serves more sequences than this.
MAX_BATCH = 2**20


def batch_sizes(largest: int) -> Ints:
    """Batches from 1 to at least ``largest``, four a doubling where integers allow. [request]"""
    steps = np.arange(BATCHES_PER_DOUBLING) + BATCHES_PER_DOUBLING
    sizes = np.unique(np.concatenate([steps * 2**k // BATCHES_PER_DOUBLING for k in range(MAX_BATCH.bit_length())]))
    return sizes[: int(np.searchsorted(sizes, largest)) + 1].astype(np.int64)


def batch_axis(at: Setup, mappings: Sharding | list[Sharding], lengths: Lengths, *, phase: str) -> Ints:
    """Find the batch sizes from 1 to the largest that fits any mapping, rising, four a doubling. [request]

    There is at least one, so that a shortfall of memory can be reported; ``phase`` selects the memory.

    Beside 13 GB of weights and runtime the caches of 192 requests, 0.57 GB each, fit into the 135 GB of an H200. Those
    of 224, the next batch, do not:

    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> at = setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> batch_axis(at, Sharding(), lengths(8192, 1024), phase="decode")[[0, 1, 2, -2, -1]].tolist()
    [1, 2, 3, 160, 192]
    """
    check_word("phase", phase, PHASES)
    table = mappings_for(at, mappings)
    tokens = lengths.resident if phase == "decode" else lengths.prompt
    (sizes,) = _batch_axes(at, without_pcp(table) if phase == "decode" else table, tokens, phase, (0,) * len(table))
    return sizes


def batch_axes(at: Setup, table: Sharding, lengths: Lengths, kinds: Ints) -> list[Ints]:
    """Find the batch sizes of decode, or of co-located instances, of several kinds of mappings. [request]

    Four GPUs fit more than four times the requests of one, as they store the weights once:

    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> at = setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> table = Sharding.stack([Sharding(), Sharding(tp_attn=4, tp_ffn=4)])
    >>> [int(axis[-1]) for axis in batch_axes(at, table, lengths(8192, 1024), np.array([0, 1]))]
    [192, 896]
    """
    return list(_batch_axes(at, table, lengths.resident, "decode", tuple(kinds.tolist())))


@lru_cache(maxsize=1024)
def _batch_axes(
    at: Setup, table: Sharding, tokens: CachedTokens, phase: str, kinds: tuple[int, ...]
) -> tuple[Ints, ...]:
    """Find the axis of each kind of rows; cached, as the searches of a plan share mappings."""
    if not kinds:
        return (batch_sizes(1),)
    sizes, mapping = batch_sizes(MAX_BATCH), table.for_grid()
    fewest, drafted = drafting(at, mapping, draft_choices(at)[0])
    batch = sizes[None, :].astype(float)
    if phase == "decode":
        memory = decode_bytes(fewest, drafted, batch, cached=tokens)
    else:
        chunk = np.where(mapping.pp > 1, min(CHUNK_TOKENS), 0)
        memory = prefill_bytes(at, mapping, batch, prompt=tokens, chunk_tokens=chunk)
    fits, doubling = memory <= at.memory_limit, np.isin(sizes, 2 ** np.arange(MAX_BATCH.bit_length()))

    def axis(some: Any) -> Ints:
        upper = np.flatnonzero(some & doubling)
        if not upper.size:
            return batch_sizes(1)
        within = batch_sizes(int(sizes[upper[-1]]) * 2)
        return within[: int(np.flatnonzero(some[: within.size])[-1]) + 1]

    axes = tuple(axis(fits[np.asarray(kinds) == kind].any(axis=0)) for kind in sorted(set(kinds)))
    for each in axes:
        each.setflags(write=False)
    return axes


def with_chunks(table: Sharding, isl: float, chunk_tokens: Any) -> Sharding:
    """List the rows of a prefill grid: all mappings unchunked, then pipelines with each chunk size [token].

    >>> rows = with_chunks(Sharding.stack([Sharding(), Sharding(pp=2)]), 2048, [512, 1024])
    >>> list(zip(rows.pp.tolist(), rows.chunk_tokens.tolist()))
    [(1, 0), (2, 0), (2, 512), (2, 1024)]
    """
    sizes = given_sizes("chunk_tokens", chunk_tokens, least=0) if np.size(chunk_tokens) else np.empty(0, dtype=np.int64)
    deep = np.flatnonzero(table.pp > 1)
    index, chunks = [np.arange(len(table))], [np.zeros(len(table), dtype=np.int64)]
    for size in sizes:
        if 0 < size < isl:
            index.append(deep)
            chunks.append(np.full(deep.size, size, dtype=np.int64))
    return replace(table[np.concatenate(index)], chunk_tokens=np.concatenate(chunks))
