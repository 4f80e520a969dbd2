"""Cache prefixes on instances: the most recent blocks of prompts, by the ids of the trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from disagg_sim.arrays import Ints
from disagg_sim.errors import InputError
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.prefix_index import GONE, BlockIndex
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

#: Value of a block that an instance holds beside its memory.
HELD = 0


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
        ...

    def found_everywhere(self, request: int) -> Ints:
        """Tokens of a prompt that each instance remembers, as ``found``; valid until the next such question. [token]"""
        ...

    def blocks_of(self, request: int) -> list[int]:
        """The blocks of a prompt, by numbers of their own."""
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


class PrefixCache:
    """LRU cache of prompt blocks per instance, in addition to the cache of running requests.

    Parameters
    ----------
    prefix : PrefixBlocks
        Ids of the blocks of every prompt.
    fleet : Fleet
        Instances.
    tokens : int
        That an instance keeps. [token]
    checkpoints : Checkpoints
        What a block saves beside its tokens takes the place of further tokens.
    """

    step = 1

    def __init__(self, prefix: PrefixBlocks, fleet: Fleet, tokens: int, checkpoints: Checkpoints = ANYWHERE) -> None:
        self._index, self._fleet = BlockIndex(prefix, in_memory=False), fleet
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
        return self._index.tokens(self._fleet.home, request, len(self._fleet))

    def keep(self, instance: int, request: int, segment: int) -> None:  # noqa: ARG002  its memory is its own
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
                self._index.hold(instance, 0, block, HELD)
        while held > self._most:
            block, size = kept.popitem(last=False)
            held -= size
            self._index.drop(instance, 0, block)
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

    step = 1

    def __init__(self, prefix: PrefixBlocks, fleet: Fleet) -> None:
        self._index = BlockIndex(prefix, in_memory=True)  # a block is in the memory of the segment that used it last
        self._fleet, self._block_tokens = fleet, prefix.block_tokens
        fleet.share_blocks()
        self.again, self.forget, self.blocks_of = self._index.again, self._index.forget, self._index.blocks_of

    def found(self, instance: int, request: int) -> int:
        """See ``PrefixMemory``."""
        rank = self._fleet.next_rank(instance)
        tokens, there = 0, {GONE: 0}  # segment -> tokens of its start that are there
        for block in self._index.blocks_of(request):
            segment = self._index.value(instance, rank, block)
            if segment not in there:
                there[segment] = self._fleet.remembered(segment) * BLOCK_TOKENS
            if there[segment] < tokens + self._block_tokens:
                break
            tokens += self._block_tokens
        return tokens

    def found_everywhere(self, request: int) -> Ints:
        """See ``PrefixMemory``."""
        return self._index.tokens(self._fleet.home, request, len(self._fleet))

    def keep(self, instance: int, request: int, segment: int) -> None:
        """See ``PrefixMemory``."""
        rank = self._fleet.rank_of(segment)
        for block in self._index.blocks_of(request):
            self._index.hold(instance, rank, block, segment)


class Checkpointed:
    """A memory whose prompts can be taken up again at whole checkpoints alone, where a state was saved.

    Parameters
    ----------
    memory : PrefixMemory
        What instances remember.
    tokens : int
        From one checkpoint to the next. [token]
    """

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
    trace: Trace | TraceStream, fleet: Fleet, tokens: int, *, free: bool, checkpoints: Checkpoints = ANYWHERE
) -> PrefixMemory | None:
    """What instances remember: ``tokens`` beside their requests, or in their ``free`` memory, or nothing (None).

    Prompts are taken up again at checkpoints. In the free memory these have made the blocks fewer: ``kv_blocks``.
    """
    if not tokens and not free:
        return None
    if trace.prefix is None:
        key = f"prefix_cache_tokens {tokens}" if tokens else "prefix_cache true"
        raise InputError(f"{key}: trace {trace.name} has no block ids")
    memory: PrefixMemory
    memory = PrefixCache(trace.prefix, fleet, tokens, checkpoints) if tokens else FreeMemory(trace.prefix, fleet)
    return memory if checkpoints.tokens == 1 else Checkpointed(memory, checkpoints.tokens)
