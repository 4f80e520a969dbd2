r"""How much of prompts a prefix cache of a size finds: exact LRU over the blocks of a trace, at all sizes at once.

A cache that evicts the least recently used block holds the first c blocks of one stack, whatever c is (R. L. Mattson
et al., IBM Systems Journal 9(2), 1970): a block is found if fewer than c distinct blocks were used since its last use.
Of a prompt the longest start of which every block is found counts. The blocks of a prompt are used at once, the first
of them last to be evicted, as ``techniques.prefix.play`` does.

Distinct blocks since a last use are counted for all uses together: with p_i the last use of the block of use i, they
are :math:`s - p_i - 1 - \#\{j < s : p_j > p_i\}` at the start s of the prompt, an inversion count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from disagg_sim.arrays import Ints
from disagg_sim.errors import InputError
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.trace import Trace

#: Depth of a block that was never used before.
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False, kw_only=True)
class HitCurve:
    """What caches of any size find of the prompts of a trace."""

    input_tokens: Ints  # (requests,) [token]
    offsets: Ints  # (requests + 1,) of the blocks of each
    needed: Ints  # (blocks of all requests,) size from which a block is found, with all before it; ``NEVER`` [block]
    block_tokens: int  # [token]

    def found(self, capacity_tokens: float) -> Ints:
        """Tokens of each prompt, (requests,), that a cache finds; at least one is computed. [token]"""
        blocks = self.needed != NEVER
        if np.isfinite(capacity_tokens):
            blocks &= self.needed <= capacity_tokens // self.block_tokens
        count = np.add.reduceat(np.append(blocks, False), self.offsets[:-1])
        count = np.where(np.diff(self.offsets) > 0, count, 0)
        found: Ints = np.minimum(count * self.block_tokens, self.input_tokens - 1)
        return found

    def share(self, capacity_tokens: float) -> float:
        """Share of all prompt tokens that a cache of a size finds. [1]"""
        return float(self.found(capacity_tokens).sum() / self.input_tokens.sum())


def hit_curve(trace: Trace, caches: ArrayLike | None = None) -> HitCurve:
    """Replay the blocks of a trace through caches of every size.

    Parameters
    ----------
    trace
        With block ids; its requests use their blocks in their order, each at once.
    caches
        (requests,) number of the cache that each request goes to; None = one for all. Sizes are those of each.

    Returns
    -------
    HitCurve
        Of all requests together.

    Raises
    ------
    InputError
        A trace without block ids.

    Examples
    --------
    Two conversations take turns. A cache of one of their prompts forgets it before it comes again, one of both does
    not; the ends of prompts are forgotten first:

    >>> blocks = PrefixBlocks(offsets=[0, 2, 4, 7, 10], ids=[1, 2, 5, 6, 1, 2, 3, 5, 6, 7], block_tokens=512)
    >>> trace = Trace(
    ...     arrival=[0, 1, 2, 3], input_tokens=[1024, 1024, 1536, 1536], output_tokens=[9] * 4, prefix=blocks
    ... )
    >>> curve = hit_curve(trace)
    >>> [curve.found(tokens).tolist() for tokens in (1024, 2048, 2560)]
    [[0, 0, 0, 0], [0, 0, 1024, 512], [0, 0, 1024, 1024]]
    """
    if trace.prefix is None:
        raise InputError(f"trace {trace.name} has no block ids; allowed: one whose prompts name their blocks")
    which = np.zeros(len(trace), dtype=np.int64) if caches is None else np.asarray(caches, dtype=np.int64)
    if which.shape != trace.arrival.shape:
        raise InputError(f"caches of {which.size} requests; the trace {trace.name} has {len(trace)}")
    order = np.argsort(which, kind="stable")  # caches one after the other, which share nothing
    prefix = trace.prefix.take(order)
    counts = np.diff(prefix.offsets)
    request = np.repeat(np.arange(order.size), counts)
    last_first = prefix.offsets[:-1][request] + prefix.offsets[1:][request] - 1 - np.arange(request.size)
    names, block = np.unique(prefix.ids[last_first], return_inverse=True)
    block = np.repeat(which[order], counts) * names.size + block
    needed = np.empty(request.size, dtype=np.int64)
    needed[last_first] = _depths(block, prefix.offsets[:-1][request], request)
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    sorted_back = PrefixBlocks(offsets=prefix.offsets, ids=_running_most(needed, prefix.offsets), block_tokens=1)
    arranged = sorted_back.take(back)
    return HitCurve(
        input_tokens=trace.input_tokens,
        offsets=arranged.offsets,
        needed=arranged.ids,
        block_tokens=trace.prefix.block_tokens,
    )


def _depths(block: Ints, start: Ints, request: Ints) -> Ints:
    """Least size of a cache, in blocks, that holds the block of each use when its prompt begins (``start``)."""
    order = np.argsort(block, kind="stable")
    again = np.diff(block[order]) == 0
    last = np.full(block.size, -1)
    last[order[1:][again]] = order[:-1][again]
    since = _inversions(last) - _inversions(last + request * block.size)  # those before the prompt alone
    return np.where(last >= 0, start - last - since, NEVER)


def _running_most(values: Ints, offsets: Ints) -> Ints:
    """Largest value of each request up to each of its blocks."""
    wide = values.astype(np.float64)
    wide[values == NEVER] = values.size + 1.0
    request = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    most = np.maximum.accumulate(wide + request * (values.size + 2.0)) - request * (values.size + 2.0)
    return np.where(most > values.size, NEVER, np.rint(most).astype(np.int64))


def _inversions(values: Ints) -> Ints:
    """Larger values before each.

    In the order of the values, places are parted into halves, quarters and so on: an element of a right half has behind
    it the larger ones of its left half.

    >>> _inversions(np.array([3, 1, 2, 0])).tolist()
    [0, 1, 1, 3]
    """
    size = values.size
    count = np.zeros(size, dtype=np.int64)
    order, place = np.argsort(values, kind="stable"), np.arange(size)
    width = 1 << max(size - 1, 0).bit_length()
    while width > 1:
        start = order // width * width  # of the part that an element lies in, in both orders
        half = width // 2
        left = order - start < half
        before = np.concatenate([[0], np.cumsum(left)])
        lefts = before[1:] - before[start]
        all_lefts = np.minimum(half, size - start)
        right = ~left
        count[order[right]] += (all_lefts - lefts)[right]
        moved = np.where(left, start + lefts - 1, place + all_lefts - lefts)
        following = np.empty_like(order)
        following[moved] = order
        order, width = following, half
    return count


def routed(trace: Trace, caches: int, *, sticky: bool, seed: int = 0) -> Ints:
    """Send the requests of a trace, (requests,), to numbers of caches that know nothing of their content."""
    rng = np.random.default_rng(seed)
    if not sticky:
        return rng.integers(0, caches, len(trace))
    if trace.sessions is None:
        raise InputError(f"trace {trace.name} has no sessions that could stick to a cache")
    drawn = rng.integers(0, caches, len(trace))
    return drawn[trace.sessions.first()]
