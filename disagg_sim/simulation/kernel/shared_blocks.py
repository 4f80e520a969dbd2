"""Keep the blocks of prompts that instances share in their KV memory, for the kernel (``sharing``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.simulation.kernel.addresses import RUN, SHARED, state_at
from disagg_sim.simulation.kernel.compiled import entry
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.ranks import choose_rank
from disagg_sim.simulation.kernel.sharing import (
    MOST_RANKS,
    UNUSED,
    add_free,
    drop_run,
    list_run,
    memory_of,
    run_of,
    shelf_at,
    tokens_found,
    unname,
)
from disagg_sim.workload.request_columns import PrefixBlocks


class SharedBlocks:
    """Names of the blocks of every prompt, and the runs of KV blocks that hold them."""

    def __init__(self, prefix: PrefixBlocks, step: int) -> None:
        names, numbers = np.unique(prefix.ids, return_inverse=True)
        self._names = np.ascontiguousarray(numbers, np.int64)
        self._starts = np.array(prefix.offsets[:-1], np.int64)
        self._counts: Ints = np.diff(prefix.offsets).astype(np.int64)
        self._named: Ints = np.full(max(names.size, 1), -1, np.int64)
        self._whole = prefix.block_tokens >= BLOCK_TOKENS  # every run has a KV block
        self.row: Any = np.zeros(1, SHARED)
        self.row["unused"], self.row["block_tokens"], self.row["step"] = -1, prefix.block_tokens, step
        self.runs: Any = np.zeros(0, RUN)
        self._buckets: Ints = np.zeros(0, np.int64)
        self._begun: Ints = np.zeros(64, np.int64)
        self._wanted, self._memories, self._blocks, self._read = 0, 0, 0, 0
        self._tokens: Ints = np.zeros(0, np.int64)
        self._touched, self._filled = self._tokens, 0  # instances of the last answer that are not 0
        self._bind()

    def blocks_of(self, request: int) -> list[int]:
        """The blocks of a prompt, by their numbers."""
        start = self._starts[request]
        found: list[int] = self._names[start : start + self._counts[request]].tolist()
        return found

    def again(self, request: int, number: int) -> None:
        """A request begins again under the next number, with the same prompt."""
        assert number == self._starts.size
        self._starts, self._counts = (np.append(each, each[request]) for each in (self._starts, self._counts))
        self._bind()

    def begin(self, home: Ints, instance: int, rows: range, blocks: int) -> None:
        """The memories of an instance, each of so many blocks, are empty. [block]"""
        self._memories += len(rows)
        self._blocks += len(rows) * blocks
        self._make_room(home)
        for rank, row in enumerate(rows):
            _empty(home, row, instance * MOST_RANKS + rank)

    def empty(self, home: Ints, instance: int, rows: range) -> None:
        """An instance has lost what it held."""
        for rank, row in enumerate(rows):
            _empty(home, row, instance * MOST_RANKS + rank)

    def expect(self, home: Ints, request: int, segment: int) -> None:
        """A segment of a request comes: there is room for what it may bring."""
        self._wanted += 2 * (int(self._counts[request]) + 2) if request < self._counts.size else 4
        if segment >= self._begun.size:
            self._begun = np.concatenate([self._begun, np.zeros_like(self._begun)])
            self._bind()
        self._make_room(home)

    def begun(self) -> list[int]:
        """Segments whose prompt was admitted since the last call, in order."""
        first, self._read = self._read, int(self.row["begun"][0])
        found: list[int] = self._begun[first : self._read].tolist()
        return found

    def found(self, home: Ints, instance: int, request: int) -> int:
        """Tokens of a prompt in the memory of the rank of an instance that would take it now. [token]"""
        return _found(home, instance, request)

    def found_everywhere(self, home: Ints, request: int, instances: int) -> Ints:
        """The same of every instance; valid until the next such question. [token]"""
        if self._tokens.size < instances:
            self._tokens, self._touched = np.zeros((2, 2 * instances), np.int64)
            self._filled = 0
        self._filled = _everywhere(home, request, self._tokens, self._touched, self._filled)
        return self._tokens[:instances]

    def _make_room(self, home: Ints) -> None:
        """For runs: two for each name that segments have brought, and no more than there are KV blocks."""
        wanted = min(self._wanted, self._blocks) if self._whole else self._wanted
        wanted += 2 * self._memories + 2
        have = self.runs.size
        if wanted <= have:
            return
        more = np.zeros(max(have, wanted - have, 64), RUN)
        more["name"], more["next"] = UNUSED, np.arange(have + 1, have + more.size + 1)
        more["next"][-1] = self.row["unused"][0]
        self.row["unused"] = have
        self.runs = np.concatenate([self.runs, more])
        self._buckets = np.zeros(2 ** int(self.runs.size - 1).bit_length(), np.int64)
        self._bind()
        _list_all(home)

    def _bind(self) -> None:
        """Say where the arrays are."""
        for name, array, size in (
            ("runs_at", self.runs, "room"),
            ("buckets_at", self._buckets, "buckets"),
            ("named_at", self._named, "named"),
            ("starts_at", self._starts, "requests"),
            ("names_at", self._names, "names"),
        ):
            self.row[name], self.row[size] = array.ctypes.data, array.size
        self.row["counts_at"], self.row["begun_at"] = self._counts.ctypes.data, self._begun.ctypes.data


@entry
def _list_all(home: Ints) -> None:
    """Enter all runs into new buckets."""
    shelf = shelf_at(state_at(home).world[0].shared)
    shelf.buckets[:] = -1
    for k in range(len(shelf.runs)):
        if shelf.runs[k].name >= 0:
            list_run(shelf, k)


@entry
def _empty(home: Ints, row: int, memory: int) -> None:
    """All blocks of a memory are free, and nothing is found in it."""
    st = state_at(home)
    shelf = shelf_at(st.world[0].shared)
    for k in range(len(shelf.runs)):
        run = shelf.runs[k]
        if run.memory == memory and run.name != UNUSED:
            unname(shelf, k)
            drop_run(shelf, k)
    st.inst[row].first_free = st.inst[row].last_free = -1
    add_free(st, row, memory, st.inst[row].total_blocks, -1)


@entry
def _found(home: Ints, instance: int, request: int) -> int:
    """See ``SharedBlocks.found``."""
    st = state_at(home)
    rank = choose_rank(st, instance) if st.inst[instance].ranks > 1 else 0
    return tokens_found(shelf_at(st.world[0].shared), instance * MOST_RANKS + rank, request)


@entry
def _everywhere(home: Ints, request: int, tokens: Ints, touched: Ints, filled: int) -> int:
    """Fill in ``tokens`` by instance, and ``touched``, those that are not 0; the first ``filled`` of these were so."""
    st = state_at(home)
    shelf = shelf_at(st.world[0].shared)
    for k in range(filled):
        tokens[touched[k]] = 0
    filled = 0
    if request >= len(shelf.starts) or shelf.counts[request] == 0:
        return filled
    at = shelf.named[shelf.names[shelf.starts[request]]]
    while at >= 0:
        memory = shelf.runs[at].memory
        i = memory // MOST_RANKS
        if st.inst[i].ranks == 1 or choose_rank(st, i) == memory % MOST_RANKS:
            tokens[i] = tokens_found(shelf, memory, request)
            touched[filled] = i
            filled += 1
        at = shelf.runs[at].older
    return filled


@entry
def distinct_blocks(home: Ints, segments: Ints) -> int:
    """KV blocks that some segments hold, each once. [block]"""
    st = state_at(home)
    shelf, blocks = shelf_at(st.world[0].shared), 0
    for sign in (1, -1):
        for s in segments:
            seg = st.seg[s]
            blocks += seg.blocks - seg.lent if sign == 1 else 0
            for place in range(seg.shared):
                run = shelf.runs[run_of(shelf, memory_of(st, s), shelf.names[shelf.starts[seg.request] + place])]
                if sign * run.holders > 0:
                    blocks += run.blocks if sign == 1 else 0
                    run.holders = -run.holders
    return blocks
