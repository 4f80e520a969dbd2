"""Find the instances that remember the start of a prompt, without asking each of them.

Every block of prompts has a list of the instances that hold it. A prompt is looked up block by block: instances that
hold the first, of these those that hold the second, and so on until nobody is left. What that costs grows with the
instances that hold some of the prompt, not with their number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.simulation.kernel.compiled import entry
from disagg_sim.workload.request_columns import PrefixBlocks


class Lists(NamedTuple):
    """Entries of all blocks, one a block and instance, linked by block; what a look-up writes down."""

    first: Ints  # of each block its newest entry, -1 = none
    next: Ints  # of each entry, -1 = last
    instance: Ints  # of each entry
    held: Ints  # of each entry: whether its block is held still
    depth: Ints  # of each instance: blocks of the prompt found so far [1]


class BlockIndex:
    """Which instances hold which blocks of prompts, until these are dropped.

    Two prompts share their first block of 512 tokens; instance 3 holds the first prompt:

    >>> ids = PrefixBlocks(offsets=[0, 2, 4], ids=[7, 8, 7, 9], block_tokens=512)
    >>> index = BlockIndex(ids)
    >>> for block in index.blocks_of(0):
    ...     index.hold(3, block)
    >>> index.tokens(1, 4).tolist()
    [0, 0, 0, 512]
    """

    def __init__(self, prefix: PrefixBlocks) -> None:
        names, blocks = np.unique(prefix.ids, return_inverse=True)
        self._of, self._offsets = np.ascontiguousarray(blocks, np.int64), prefix.offsets.tolist()
        self._all: list[int] = self._of.tolist()
        self._block_tokens = prefix.block_tokens
        empty = np.zeros(0, np.int64)
        self._lists = Lists(np.full(names.size, -1, np.int64), *[empty] * 4)
        self._entries: dict[int, dict[int, int]] = {}  # by instance: of a block its entry
        self._count, self._filled = 0, 0  # entries; instances of the last answer that are not 0
        self._tokens = self._touched = empty
        self._same: dict[int, int] = {}  # number of a request that has begun again -> its first one

    def _span(self, request: int) -> tuple[int, int]:
        request = self._same.get(request, request)
        return self._offsets[request], self._offsets[request + 1]

    def blocks_of(self, request: int) -> list[int]:
        """The blocks of a prompt, by numbers of the index."""
        start, end = self._span(request)
        return self._all[start:end]

    def again(self, request: int, number: int) -> None:
        """A request begins again under another number, with the same prompt."""
        self._same[number] = request

    def hold(self, instance: int, block: int) -> None:
        """An instance holds a block from now on."""
        while instance >= self._lists.depth.size:
            self._enlarge("depth")
        entries, lists = self._entries.setdefault(instance, {}), self._lists
        at = entries.get(block, -1)
        if at < 0:
            at = entries[block] = self._count
            self._count += 1
            if at == lists.held.size:
                self._enlarge("next", "instance", "held")
                lists = self._lists
            lists.instance[at], lists.next[at] = instance, lists.first[block]
            lists.first[block] = at
        lists.held[at] = 1

    def drop(self, instance: int, block: int) -> None:
        """An instance no longer holds a block."""
        self._lists.held[self._entries[instance][block]] = 0

    def forget(self, instance: int) -> None:
        """An instance holds nothing any more."""
        self._lists.held[list(self._entries.get(instance, {}).values())] = 0

    def tokens(self, request: int, instances: int) -> Ints:
        """Look up what each instance remembers of the start of a prompt. [token]"""
        if self._tokens.size < instances:
            self._tokens, self._touched = np.zeros((2, 2 * instances), np.int64)
            self._filled = 0
        start, end = self._span(request)
        blocks = self._of[start:end]
        self._filled = _look_up(self._lists, blocks, self._block_tokens, self._tokens, self._touched, self._filled)
        return self._tokens[:instances]

    def _enlarge(self, *names: str) -> None:
        """Make room for twice as many rows in some columns."""
        more: dict[str, Any] = {}
        for name in names:
            old = getattr(self._lists, name)
            more[name] = np.concatenate([old, np.zeros(max(old.size, 64), np.int64)])
        self._lists = self._lists._replace(**more)


@entry
def _look_up(lists: Lists, blocks: Ints, block_tokens: int, tokens: Ints, touched: Ints, filled: int) -> int:
    """Fill in ``tokens`` by instance, and ``touched``, those that are not 0; the first ``filled`` of these were so."""
    for k in range(filled):
        tokens[touched[k]] = 0
    filled, reached = 0, 1
    for k in range(len(blocks)):
        if reached == 0:
            break
        reached, at = 0, lists.first[blocks[k]]
        while at >= 0:
            i = lists.instance[at]
            if (k == 0 or lists.depth[i] == k) and lists.held[at] == 1:
                lists.depth[i] = k + 1
                reached += 1
                if k == 0:
                    touched[filled] = i
                    filled += 1
            at = lists.next[at]
    for k in range(filled):
        i = touched[k]
        tokens[i] = lists.depth[i] * block_tokens
        lists.depth[i] = 0
    return filled
