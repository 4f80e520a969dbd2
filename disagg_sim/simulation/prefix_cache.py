"""Cache prefixes on instances: the most recent blocks of prompts, by the ids of the trace."""

from __future__ import annotations

from collections import OrderedDict

from disagg_sim.workload.request_columns import PrefixBlocks


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
        self._ids: list[int] = prefix.ids.tolist()
        self._offsets: list[int] = prefix.offsets.tolist()
        self._block_tokens = prefix.block_tokens
        self._most = tokens // prefix.block_tokens
        self._kept: dict[int, OrderedDict[int, None]] = {}

    def found(self, instance: int, request: int) -> int:
        """Tokens at the start of a prompt that an instance remembers, in whole blocks. [token]"""
        kept = self._kept.get(instance)
        if not kept:
            return 0
        count = 0
        for block in self._blocks(request):
            if block not in kept:
                break
            count += 1
        return count * self._block_tokens

    def keep(self, instance: int, request: int) -> None:
        """An instance computes a prompt: its blocks are the newest, the first of them last to be forgotten."""
        kept = self._kept.setdefault(instance, OrderedDict())
        for block in reversed(self._blocks(request)):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > self._most:
            kept.popitem(last=False)

    def _blocks(self, request: int) -> list[int]:
        return self._ids[self._offsets[request] : self._offsets[request + 1]]
