"""Cache prefixes on instances: the most recent blocks of prompts, by the ids of the trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from disagg_sim.arrays import Ints
from disagg_sim.errors import InputError
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.shared_blocks import SharedBlocks
from disagg_sim.simulation.prefix_index import BlockIndex
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace


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

    def keep(self, instance: int, request: int, segment: int, loaded: int = 0) -> None:
        """An instance gets a prompt, as this segment of its kernel; the first tokens were loaded for it. [token]"""
        ...

    def again(self, request: int, number: int) -> None:
        """A request begins again under another number, with the same prompt."""
        ...

    def forget(self, instance: int) -> None:
        """An instance has lost its memory."""
        ...


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
    Takes ``step`` [token].
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
    if tokens:
        memory = PrefixCache(trace.prefix, fleet, tokens, checkpoints)
    else:
        memory = FreeMemory(trace.prefix, fleet, BLOCK_TOKENS if checkpoints.tokens == 1 else checkpoints.tokens)
    return memory if checkpoints.tokens == 1 else Checkpointed(memory, checkpoints.tokens)
