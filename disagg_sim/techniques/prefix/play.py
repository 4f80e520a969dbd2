"""Cache prefixes on instances: prompts stay in their KV memory until others take its blocks, by ids of the trace."""

from __future__ import annotations

from typing import Protocol

from disagg_sim.arrays import Ints
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.shared_blocks import SharedBlocks
from disagg_sim.workload.request_columns import PrefixBlocks


class PrefixMemory(Protocol):
    """What instances remember of prompts."""

    #: Tokens from one place at which a prompt can be taken up to the next. [token]
    step: int

    def found(self, instance: int, request: int) -> int:
        """Tokens at the start of a prompt that an instance remembers, in whole blocks. [token]"""

    def found_everywhere(self, request: int) -> Ints:
        """Tokens of a prompt that each instance remembers, as ``found``; valid until the next such question. [token]"""

    def keep(self, instance: int, request: int, segment: int, loaded: int = 0) -> None:
        """An instance gets a prompt, as this segment of its kernel; the first tokens were loaded for it. [token]"""

    def again(self, request: int, number: int) -> None:
        """A request begins again under another number, with the same prompt."""

    def forget(self, instance: int) -> None:
        """An instance has lost its memory."""


class FreeMemory:
    """Prompt blocks in the KV memory of each instance: of requests that it has, and in what it has free.

    As in engines: a prompt is looked up when its instance takes it into a step, and shares the blocks that it finds.
    Its own blocks are found from when they are taken for a step, or have been computed
    (``SchedulerSpec.prefix_found``), or have come from another instance. Free ones keep what they held until they are
    taken, in the order in which they became free. What is asked here is what a router knows when a request comes. Of
    several attention ranks each has its own memory, and the rank that a request gets is chosen without regard to it.

    Prompts of models with recurrent states are taken up at whole ``checkpoint`` tokens alone, where a state was saved;
    these have made the blocks fewer (``kv_blocks``).
    """

    def __init__(self, prefix: PrefixBlocks, fleet: Fleet, checkpoint: int = 1) -> None:
        self._fleet, self._checkpoint, self.step = fleet, checkpoint, checkpoint if checkpoint > 1 else BLOCK_TOKENS
        self._shared = SharedBlocks(prefix, self.step)
        fleet.share_blocks(self._shared)
        self.again, self.blocks_of = self._shared.again, self._shared.blocks_of

    def found(self, instance: int, request: int) -> int:
        """See ``PrefixMemory``."""
        return self._shared.found(self._fleet.home, instance, request) // self._checkpoint * self._checkpoint

    def found_everywhere(self, request: int) -> Ints:
        """See ``PrefixMemory``."""
        found = self._shared.found_everywhere(self._fleet.home, request, len(self._fleet))
        return found // self._checkpoint * self._checkpoint if self._checkpoint > 1 else found

    def keep(self, instance: int, request: int, segment: int, loaded: int = 0) -> None:  # noqa: ARG002  the kernel does
        """See ``PrefixMemory``."""
        self._fleet.ready(segment, loaded)

    def begun(self) -> list[tuple[int, int]]:
        """Instances, and the prompts that they have taken up since the last call, in order."""
        return [self._fleet.whose(segment)[::-1] for segment in self._shared.begun()]

    def forget(self, instance: int) -> None:
        """See ``PrefixMemory``; its memory went with it."""
