"""Find the instances that remember the start of a prompt, without asking each of them.

Every block of prompts has a list of the places that hold it. A prompt is looked up block by block: places that hold the
first, of these those that hold the second, and so on until nobody is left. What that costs grows with the places that
hold some of the prompt, not with the number of instances.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.kernel.home import state_at
from disagg_sim.simulation.kernel.layout import State
from disagg_sim.simulation.kernel.queue import remembered
from disagg_sim.simulation.kernel.ranks import choose_rank
from disagg_sim.workload.request_columns import PrefixBlocks

#: Value of an entry whose block is not held any more.
GONE = -1


class Lists(NamedTuple):
    """Entries of all blocks, one a block and place, linked by block; what a look-up writes down."""

    first: Ints  # of each block its newest entry, -1 = none
    next: Ints  # of each entry, -1 = last
    place: Ints  # of each entry
    value: Ints  # of each entry: the segment whose memory has the block; ``GONE``
    instance: Ints  # of each place
    rank: Ints  # of each place: the attention rank whose memory it is
    depth: Ints  # of each place: blocks of the prompt found so far [1]
    found: Ints  # places where the first block was found


class BlockIndex:
    """Which places hold which blocks of prompts; a place is the memory of an instance, or of one of its ranks.

    Parameters
    ----------
    prefix
        Ids of the blocks of every prompt.
    in_memory
        Whether a value is the segment in whose KV memory a block lies, as long as nobody takes that; else what is held
        is held until it is dropped.

    Examples
    --------
    Two prompts share their first block of 512 tokens; instance 3 holds the first prompt:

    >>> from disagg_sim.simulation.kernel.fleet import Fleet
    >>> from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
    >>> from disagg_sim.simulation.kernel.step_table import StepTable
    >>> fleet = Fleet([InstanceSpec(table=StepTable.affine(step=1.0), blocks=10)])
    >>> ids = PrefixBlocks(offsets=[0, 2, 4], ids=[7, 8, 7, 9], block_tokens=512)
    >>> index = BlockIndex(ids, in_memory=False)
    >>> for block in index.blocks_of(0):
    ...     index.hold(3, 0, block, 0)
    >>> index.tokens(fleet.home, 1, 4).tolist()
    [0, 0, 0, 512]
    """

    def __init__(self, prefix: PrefixBlocks, *, in_memory: bool) -> None:
        names, blocks = np.unique(prefix.ids, return_inverse=True)
        self._of, self._offsets = np.ascontiguousarray(blocks, np.int64), prefix.offsets.tolist()
        self._all: list[int] = self._of.tolist()
        self._block_tokens, self._in_memory = prefix.block_tokens, in_memory
        empty = np.zeros(0, np.int64)
        self._lists = Lists(np.full(names.size, -1, np.int64), *[empty] * 7)
        self._entries: list[dict[int, int]] = []  # by place: of a block its entry
        self._places: dict[tuple[int, int], int] = {}
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

    def hold(self, instance: int, rank: int, block: int, value: int) -> None:
        """A rank of an instance holds a block, as part of a segment, from now on."""
        key = instance, rank
        place = self._places.get(key, -1)
        if place < 0:
            place = self._places[key] = len(self._entries)
            self._entries.append({})
            if place == self._lists.depth.size:
                self._enlarge("instance", "rank", "depth", "found")
            self._lists.instance[place], self._lists.rank[place] = key
        entries, lists = self._entries[place], self._lists
        at = entries.get(block, -1)
        if at < 0:
            at = entries[block] = self._count
            self._count += 1
            if at == lists.value.size:
                self._enlarge("next", "place", "value")
                lists = self._lists
            lists.place[at], lists.next[at] = place, lists.first[block]
            lists.first[block] = at
        lists.value[at] = value

    def drop(self, instance: int, rank: int, block: int) -> None:
        """A place no longer holds a block."""
        self._lists.value[self._entries[self._places[instance, rank]][block]] = GONE

    def forget(self, instance: int) -> None:
        """An instance holds nothing any more."""
        for (own, _), place in self._places.items():
            if own == instance:
                self._lists.value[list(self._entries[place].values())] = GONE

    def value(self, instance: int, rank: int, block: int) -> int:
        """The segment in whose memory a place holds a block; ``GONE``: it does not."""
        place = self._places.get((instance, rank), -1)
        at = self._entries[place].get(block, -1) if place >= 0 else -1
        return self._lists.value.item(at) if at >= 0 else GONE

    def tokens(self, home: Ints, request: int, instances: int) -> Ints:
        """Look up what each instance remembers of the start of a prompt, on the rank that would take it now.

        Parameters
        ----------
        home
            Of the fleet.
        request
            Whose prompt.
        instances
            How many there are. [1]

        Returns
        -------
        array
            By instance, in whole blocks; valid until the next call. [token]
        """
        if self._tokens.size < instances:
            self._tokens, self._touched = np.zeros((2, 2 * instances), np.int64)
            self._filled = 0
        start, end = self._span(request)
        self._filled = _look_up(
            home,
            self._lists,
            self._of[start:end],
            self._block_tokens,
            self._in_memory,
            self._tokens,
            self._touched,
            self._filled,
        )
        return self._tokens[:instances]

    def _enlarge(self, *names: str) -> None:
        """Make room for twice as many rows in some columns."""
        more: dict[str, Any] = {}
        for name in names:
            old = getattr(self._lists, name)
            more[name] = np.concatenate([old, np.zeros(max(old.size, 64), np.int64)])
        self._lists = self._lists._replace(**more)


@inner
def _holds(st: State, segment: int, tokens: int, in_memory: bool) -> bool:
    """Whether so many tokens of the start of a segment are held."""
    return segment >= 0 and (not in_memory or remembered(st, segment) >= tokens)


@entry
def _look_up(
    home: Ints, lists: Lists, blocks: Ints, block_tokens: int, in_memory: bool, tokens: Ints, touched: Ints, filled: int
) -> int:
    """Fill in ``tokens`` by instance, and ``touched``, those that are not 0; the first ``filled`` of these were so."""
    st = state_at(home)
    for k in range(filled):
        tokens[touched[k]] = 0
    places, reached = 0, 1
    for k in range(len(blocks)):
        if reached == 0:
            break
        reached, at = 0, lists.first[blocks[k]]
        while at >= 0:
            place = lists.place[at]
            if (k == 0 or lists.depth[place] == k) and _holds(st, lists.value[at], (k + 1) * block_tokens, in_memory):
                lists.depth[place] = k + 1
                reached += 1
                if k == 0:
                    lists.found[places] = place
                    places += 1
            at = lists.next[at]
    filled = 0
    for k in range(places):
        place = lists.found[k]
        i = lists.instance[place]
        if not in_memory or st.inst[i].ranks == 1 or choose_rank(st, i) == lists.rank[place]:
            tokens[i] = lists.depth[place] * block_tokens
            touched[filled] = i
            filled += 1
        lists.depth[place] = 0
    return filled
