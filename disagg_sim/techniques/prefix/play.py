"""Cache prefixes on instances: the most recent blocks of prompts, by the ids of the trace.

Instances that remember the start of a prompt are found without asking each of them: every block of prompts has a list
of the instances that hold it. A prompt is looked up block by block: instances that hold the first, of these those that
hold the second, and so on until nobody is left. What that costs grows with the instances that hold some of the prompt,
not with their number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.errors import InputError
from disagg_sim.simulation.kernel.compiled import entry
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.shared_blocks import SharedBlocks
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace


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


class Checkpoints(NamedTuple):
    """Where prompts can be taken up again, and what is saved there."""

    tokens: int = 1  # from one to the next [token]
    cost: int = 0  # cached tokens that take as much memory as what one of them saves [token]

    def before(self, tokens: int) -> int:
        """How many lie in so many tokens. [1]"""
        return tokens // self.tokens


#: Every token will do, and nothing is saved.
ANYWHERE = Checkpoints()


class PrefixMemory(Protocol):
    """What instances remember of prompts."""

    #: Tokens from one place at which a prompt can be taken up to the next. [token]
    step: int

    def found(self, instance: int, request: int) -> int:
        """Tokens at the start of a prompt that an instance remembers, in whole blocks. [token]"""

    def found_everywhere(self, request: int) -> Ints:
        """Tokens of a prompt that each instance remembers, as ``found``; valid until the next such question. [token]"""

    def blocks_of(self, request: int) -> list[int]:
        """The blocks of a prompt, by numbers of their own."""

    def keep(self, instance: int, request: int, segment: int, loaded: int = 0) -> None:
        """An instance gets a prompt, as this segment of its kernel; the first tokens were loaded for it. [token]"""

    def again(self, request: int, number: int) -> None:
        """A request begins again under another number, with the same prompt."""

    def forget(self, instance: int) -> None:
        """An instance has lost its memory."""


class PrefixCache:
    """LRU cache of prompt blocks per instance, in addition to the cache of running requests."""

    step = 1

    def __init__(self, prefix: PrefixBlocks, fleet: Fleet, tokens: int, checkpoints: Checkpoints = ANYWHERE) -> None:
        self._index, self._fleet = BlockIndex(prefix), fleet
        self._most, self._block_tokens, self._checkpoints = tokens, prefix.block_tokens, checkpoints
        self._kept: dict[int, OrderedDict[int, int]] = {}  # by instance: of a block what it takes [token]
        self._held: dict[int, int] = {}  # by instance: what all take [token]
        self.again, self.blocks_of = self._index.again, self._index.blocks_of
        self.forgotten: Callable[[int, int], None] | None = None  # told of each block that an instance forgets

    def found(self, instance: int, request: int) -> int:
        """See ``PrefixMemory``."""
        kept = self._kept.get(instance)
        if not kept:
            return 0
        count = 0
        for block in self._index.blocks_of(request):
            if block not in kept:
                break
            count += 1
        return count * self._block_tokens

    def found_everywhere(self, request: int) -> Ints:
        """See ``PrefixMemory``."""
        return self._index.tokens(request, len(self._fleet))

    def keep(self, instance: int, request: int, segment: int, loaded: int = 0) -> None:  # noqa: ARG002  of its own
        """The blocks of a prompt are the newest, the first of them last to be forgotten."""
        kept, held = self._kept.setdefault(instance, OrderedDict()), self._held.get(instance, 0)
        blocks = self._index.blocks_of(request)
        for place in reversed(range(len(blocks))):
            block = blocks[place]
            if block in kept:
                kept.move_to_end(block)
            else:
                kept[block] = size = self._size(place)
                held += size
                self._index.hold(instance, block)
        while held > self._most:
            block, size = kept.popitem(last=False)
            held -= size
            self._index.drop(instance, block)
            if self.forgotten is not None:
                self.forgotten(instance, block)
        self._held[instance] = held

    def _size(self, place: int) -> int:
        """What a block at this place of a prompt takes: its tokens, and what is saved at checkpoints in it. [token]"""
        end = (place + 1) * self._block_tokens
        saved = self._checkpoints.before(end) - self._checkpoints.before(end - self._block_tokens)
        return self._block_tokens + saved * self._checkpoints.cost

    def forget(self, instance: int) -> None:
        """See ``PrefixMemory``."""
        self._kept.pop(instance, None)
        self._held.pop(instance, None)
        self._index.forget(instance)


class FreeMemory:
    """Prompt blocks in the KV memory of each instance: of requests that it has, and in what it has free.

    As in engines: a prompt is looked up when its instance takes it into a step, and shares the blocks that it finds.
    Its own blocks are found from when they are taken for a step, or have been computed
    (``SchedulerSpec.prefix_found``), or have come from another instance. Free ones keep what they held until they are
    taken, in the order in which they became free. What is asked here is what a router knows when a request comes. Of
    several attention ranks each has its own memory, and the rank that a request gets is chosen without regard to it.
    """

    def __init__(self, prefix: PrefixBlocks, fleet: Fleet, step: int = BLOCK_TOKENS) -> None:
        self._fleet, self.step = fleet, step
        self._shared = SharedBlocks(prefix, step)
        fleet.share_blocks(self._shared)
        self.again, self.blocks_of = self._shared.again, self._shared.blocks_of

    def found(self, instance: int, request: int) -> int:
        """See ``PrefixMemory``."""
        return self._shared.found(self._fleet.home, instance, request)

    def found_everywhere(self, request: int) -> Ints:
        """See ``PrefixMemory``."""
        return self._shared.found_everywhere(self._fleet.home, request, len(self._fleet))

    def keep(self, instance: int, request: int, segment: int, loaded: int = 0) -> None:  # noqa: ARG002  the kernel does
        """See ``PrefixMemory``."""
        self._fleet.ready(segment, loaded)

    def begun(self) -> list[tuple[int, int]]:
        """Instances, and the prompts that they have taken up since the last call, in order."""
        return [self._fleet.whose(segment)[::-1] for segment in self._shared.begun()]

    def forget(self, instance: int) -> None:
        """See ``PrefixMemory``; its memory went with it."""


class Checkpointed:
    """A memory whose prompts can be taken up again at whole checkpoints alone, where a state was saved."""

    def __init__(self, memory: PrefixMemory, tokens: int) -> None:
        self.memory, self._tokens = memory, tokens
        self.step = tokens
        self.keep, self.again, self.forget = memory.keep, memory.again, memory.forget
        self.blocks_of = memory.blocks_of

    def found(self, instance: int, request: int) -> int:
        """See ``PrefixMemory``; up to the last checkpoint."""
        return self.memory.found(instance, request) // self._tokens * self._tokens

    def found_everywhere(self, request: int) -> Ints:
        """See ``PrefixMemory``; up to the last checkpoint."""
        return self.memory.found_everywhere(request) // self._tokens * self._tokens


def prefix_memory(
    trace: Trace | TraceStream, fleet: Fleet, tokens: int, *, checkpoints: Checkpoints = ANYWHERE
) -> PrefixMemory:
    """What instances remember: ``tokens`` beside their requests, or, of 0, in their free memory.

    Prompts are taken up again at checkpoints. In the free memory these have made the blocks fewer: ``kv_blocks``.
    """
    if trace.prefix is None:
        key = f"prefix_cache_tokens {tokens}" if tokens else "prefix_cache true"
        raise InputError(f"{key}: trace {trace.name} has no block ids")
    memory: PrefixMemory
    if tokens:
        memory = PrefixCache(trace.prefix, fleet, tokens, checkpoints)
    else:
        memory = FreeMemory(trace.prefix, fleet, BLOCK_TOKENS if checkpoints.tokens == 1 else checkpoints.tokens)
    return memory if checkpoints.tokens == 1 else Checkpointed(memory, checkpoints.tokens)
