"""Cache prefixes on instances: the most recent blocks of prompts, by the ids of the trace."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from disagg_sim.errors import InputError
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.trace import Trace


class PrefixMemory(Protocol):
    """What instances remember of prompts."""

    def found(self, instance: int, request: int) -> int:
        """Tokens at the start of a prompt that an instance remembers, in whole blocks. [token]"""
        ...

    def keep(self, instance: int, request: int, segment: int) -> None:
        """An instance computes a prompt, as this segment of its kernel."""
        ...

    def again(self, request: int, number: int) -> None:
        """A request begins again under another number, with the same prompt."""
        ...

    def forget(self, instance: int) -> None:
        """An instance has lost its memory."""
        ...


class _Blocks:
    """Ids of the blocks of every prompt."""

    def __init__(self, prefix: PrefixBlocks) -> None:
        self._ids: list[int] = prefix.ids.tolist()
        self._offsets: list[int] = prefix.offsets.tolist()
        self.tokens = prefix.block_tokens
        self.same: dict[int, int] = {}  # number of a request that has begun again -> its first one

    def of(self, request: int) -> list[int]:
        request = self.same.get(request, request)
        return self._ids[self._offsets[request] : self._offsets[request + 1]]


class PrefixCache:
    """LRU cache of prompt blocks per instance, in addition to the cache of running requests.

    Parameters
    ----------
    prefix : PrefixBlocks
        Ids of the blocks of every prompt.
    tokens : int
        That an instance keeps. [token]
    """

    def __init__(self, prefix: PrefixBlocks, tokens: int) -> None:
        self._blocks = _Blocks(prefix)
        self._most = tokens // prefix.block_tokens
        self._kept: dict[int, OrderedDict[int, None]] = {}

    def found(self, instance: int, request: int) -> int:
        """See ``PrefixMemory``."""
        kept = self._kept.get(instance)
        if not kept:
            return 0
        count = 0
        for block in self._blocks.of(request):
            if block not in kept:
                break
            count += 1
        return count * self._blocks.tokens

    def keep(self, instance: int, request: int, segment: int) -> None:  # noqa: ARG002  its memory is its own
        """The blocks of a prompt are the newest, the first of them last to be forgotten."""
        kept = self._kept.setdefault(instance, OrderedDict())
        for block in reversed(self._blocks.of(request)):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > self._most:
            kept.popitem(last=False)

    def again(self, request: int, number: int) -> None:
        """See ``PrefixMemory``."""
        self._blocks.same[number] = request

    def forget(self, instance: int) -> None:
        """See ``PrefixMemory``."""
        self._kept.pop(instance, None)


class FreeMemory:
    """Prompt blocks in the KV memory of each instance: of requests that it has, and in what it has free.

    As in vLLM: free blocks keep what they held until they are taken, in the order in which they became free. A request
    that shares blocks with another that still runs is counted with blocks of its own. Of several attention ranks each
    has its own memory, and the rank that a request gets is chosen without regard to it.

    Parameters
    ----------
    prefix : PrefixBlocks
        Ids of the blocks of every prompt.
    fleet : Fleet
        Instances with their blocks.
    """

    def __init__(self, prefix: PrefixBlocks, fleet: Fleet) -> None:
        self._blocks = _Blocks(prefix)
        self._fleet = fleet
        fleet.share_blocks()
        self._last: dict[tuple[int, int], dict[int, int]] = {}  # instance, rank -> id -> segment that used it last

    def found(self, instance: int, request: int) -> int:
        """See ``PrefixMemory``."""
        last = self._last.get((instance, self._fleet.next_rank(instance)))
        if not last:
            return 0
        tokens, there = 0, {-1: 0}  # segment -> tokens of its start that are there
        for block in self._blocks.of(request):
            segment = last.get(block, -1)
            if segment not in there:
                there[segment] = self._fleet.remembered(segment) * BLOCK_TOKENS
            if there[segment] < tokens + self._blocks.tokens:
                break
            tokens += self._blocks.tokens
        return tokens

    def keep(self, instance: int, request: int, segment: int) -> None:
        """See ``PrefixMemory``."""
        last = self._last.setdefault((instance, self._fleet.rank_of(segment)), {})
        for block in self._blocks.of(request):
            last[block] = segment

    def again(self, request: int, number: int) -> None:
        """See ``PrefixMemory``."""
        self._blocks.same[number] = request

    def forget(self, instance: int) -> None:
        """See ``PrefixMemory``."""
        for place in [place for place in self._last if place[0] == instance]:
            del self._last[place]


def prefix_memory(trace: Trace, fleet: Fleet, tokens: int, *, free: bool) -> PrefixMemory | None:
    """What instances remember: ``tokens`` beside their requests, or in their ``free`` memory, or nothing (None)."""
    if not tokens and not free:
        return None
    if trace.prefix is None:
        key = f"prefix_cache_tokens {tokens}" if tokens else "prefix_cache true"
        raise InputError(f"{key}: trace {trace.name} has no block ids")
    return PrefixCache(trace.prefix, tokens) if tokens else FreeMemory(trace.prefix, fleet)
