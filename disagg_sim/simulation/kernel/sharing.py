"""Compiled: blocks of prompts that stay in KV memory, which segments with the same start share.

A *run* is one or more KV blocks that go together: a block of a trace, found by its name, or some that nobody finds.
Runs that no segment holds are free and stand in the order in which they are taken: those that became free first, of
one segment the last ones. Neighbours that nobody finds are one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from disagg_sim.arrays import Ints
from disagg_sim.simulation.kernel.addresses import RUN, SHARED, carray, pointer, whole_numbers
from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, AdmissionRule, BlockRun, FleetState, Shared

OUTPUT_FITS = int(AdmissionRule.OUTPUT_FITS)
#: Ranks of an instance that have a memory of their own, at most. [1]
MOST_RANKS = 2**16
#: A run without a name; one that is not in use.
NAMELESS, UNUSED = -1, -2


class Shelf(NamedTuple):
    """The arrays of shared blocks."""

    head: Sequence[Shared]  # one row
    runs: Sequence[BlockRun]
    buckets: Ints  # first run of each, by memory and name
    named: Ints  # newest run of each name, in any memory
    starts: Ints  # of each request, where its names begin
    counts: Ints  # of each request: how many names
    names: Ints  # of all requests


@inner
def shelf_at(address: int) -> Shelf:
    """Shared blocks, by their address."""
    head = carray(pointer(address), 1, SHARED)
    one = head[0]
    return Shelf(
        head,
        carray(pointer(one.runs_at), one.room, RUN),
        whole_numbers(one.buckets_at, one.buckets),
        whole_numbers(one.named_at, one.named),
        whole_numbers(one.starts_at, one.requests),
        whole_numbers(one.counts_at, one.requests),
        whole_numbers(one.names_at, one.names),
    )


@inner
def memory_of(st: FleetState, s: int) -> int:
    """The number of the memory of a segment's rank."""
    seg = st.seg[s]
    memory: int = seg.instance * MOST_RANKS + seg.rank
    return memory


@inner
def _bucket(shelf: Shelf, memory: int, name: int) -> int:
    """Where a run is listed."""
    mixed = (memory * 1_000_003 + name) * 2_654_435_761
    mixed ^= mixed >> 29
    return mixed & (len(shelf.buckets) - 1)


@inner
def run_of(shelf: Shelf, memory: int, name: int) -> int:
    """The run of a name in a memory; -1 = it is not there."""
    k = shelf.buckets[_bucket(shelf, memory, name)]
    while k >= 0 and (shelf.runs[k].name != name or shelf.runs[k].memory != memory):
        k = shelf.runs[k].chain
    return int(k)


@inner
def list_run(shelf: Shelf, k: int) -> None:
    """Enter a run where it is looked for by its memory and name."""
    run = shelf.runs[k]
    bucket = _bucket(shelf, run.memory, run.name)
    run.chain = shelf.buckets[bucket]
    shelf.buckets[bucket] = k


@inner
def _new(shelf: Shelf, memory: int, size: int) -> int:
    """A run without a name."""
    k = shelf.head[0].unused
    run = shelf.runs[k]
    shelf.head[0].unused = run.next
    run.memory, run.blocks, run.name, run.holders, run.owner = memory, size, NAMELESS, 0, -1
    run.before = run.next = -1
    return int(k)


@inner
def drop_run(shelf: Shelf, k: int) -> None:
    """A run is not in use any more."""
    shelf.runs[k].name, shelf.runs[k].next = UNUSED, shelf.head[0].unused
    shelf.head[0].unused = k


@inner
def unname(shelf: Shelf, k: int) -> None:
    """Nobody finds a run any more."""
    run = shelf.runs[k]
    if run.name < 0:
        return
    bucket = _bucket(shelf, run.memory, run.name)
    at = shelf.buckets[bucket]
    if at == k:
        shelf.buckets[bucket] = run.chain
    else:
        while shelf.runs[at].chain != k:
            at = shelf.runs[at].chain
        shelf.runs[at].chain = run.chain
    if run.newer < 0:
        shelf.named[run.name] = run.older
    else:
        shelf.runs[run.newer].older = run.older
    if run.older >= 0:
        shelf.runs[run.older].newer = run.newer
    run.name = NAMELESS


@inner
def _enter(st: FleetState, shelf: Shelf, i: int, k: int, before: int) -> None:
    """A run is free, behind another; -1 = it is taken first. Neighbours that nobody finds become one."""
    inst, run = st.inst[i], shelf.runs[k]
    after = inst.first_free if before < 0 else shelf.runs[before].next
    run.before, run.next = before, after
    if before < 0:
        inst.first_free = k
    else:
        shelf.runs[before].next = k
    if after < 0:
        inst.last_free = k
    else:
        shelf.runs[after].before = k
    _join(st, shelf, i, before, k)
    if after >= 0:
        _join(st, shelf, i, shelf.runs[after].before, after)


@inner
def _leave(st: FleetState, shelf: Shelf, i: int, k: int) -> None:
    """A run is not free any more."""
    inst, run = st.inst[i], shelf.runs[k]
    before, after = run.before, run.next
    if before < 0:
        inst.first_free = after
    else:
        shelf.runs[before].next = after
    if after < 0:
        inst.last_free = before
    else:
        shelf.runs[after].before = before
    run.before = run.next = -1
    _join(st, shelf, i, before, after)


@inner
def _join(st: FleetState, shelf: Shelf, i: int, first: int, second: int) -> None:
    """Two free runs that follow each other become one where nobody finds either: the first."""
    if first < 0 or second < 0:
        return
    one, other = shelf.runs[first], shelf.runs[second]
    if one.name >= 0 or other.name >= 0 or one.owner >= 0 or other.owner >= 0:
        return
    one.blocks += other.blocks
    one.next = other.next
    if other.next < 0:
        st.inst[i].last_free = first
    else:
        shelf.runs[other.next].before = first
    drop_run(shelf, second)


@inner
def take_free(st: FleetState, i: int, blocks: int) -> None:
    """Take KV blocks that are free: what was found in them is not there any more."""
    if blocks <= 0:
        return
    shelf = shelf_at(st.world[0].shared)
    while blocks > 0:
        k = st.inst[i].first_free
        run = shelf.runs[k]
        unname(shelf, k)
        taken = min(run.blocks, blocks)
        run.blocks -= taken
        blocks -= taken
        if run.blocks == 0:
            if run.owner >= 0:
                st.seg[run.owner].tail = -1
            run.owner = -1
            _leave(st, shelf, i, k)
            drop_run(shelf, k)
        elif run.owner < 0:
            _join(st, shelf, i, k, run.next)


@inlined
def take_more(st: FleetState, i: int, blocks: int) -> None:
    """Take free KV blocks for segments that were admitted."""
    inst = st.inst[i]
    inst.free_blocks -= blocks
    inst.taken += blocks
    if st.world[0].shared != 0:
        take_free(st, i, blocks)
    if inst.admission == OUTPUT_FITS:
        inst.promised -= blocks


@inner
def add_free(st: FleetState, i: int, memory: int, blocks: int, before: int) -> None:
    """KV blocks that nobody finds are free, and taken after the run ``before``; -1 = first."""
    if blocks > 0:
        shelf = shelf_at(st.world[0].shared)
        _enter(st, shelf, i, _new(shelf, memory, blocks), before)


@inner
def _hold(st: FleetState, shelf: Shelf, i: int, k: int) -> None:
    """A segment more holds a run."""
    run = shelf.runs[k]
    if run.holders == 0:
        _leave(st, shelf, i, k)
        st.inst[i].free_blocks -= run.blocks
    run.holders += 1


@inner
def tokens_found(shelf: Shelf, memory: int, request: int) -> int:
    """Tokens at the start of a prompt that are in a memory. [token]"""
    each, tokens = shelf.head[0].block_tokens, 0
    if request >= len(shelf.starts):
        return 0
    for place in range(shelf.counts[request]):
        k = run_of(shelf, memory, shelf.names[shelf.starts[request] + place])
        if k < 0:
            break
        reach, whole = place * each // BLOCK_TOKENS + shelf.runs[k].blocks, (place + 1) * each // BLOCK_TOKENS
        if reach < whole:
            return int(reach * BLOCK_TOKENS)
        tokens = (place + 1) * each
    return int(tokens)


@inner
def found_of(st: FleetState, s: int) -> tuple[int, int]:
    """Tokens of a segment that need no prefill, one at least does; and of them those in blocks that others may share.

    [token], [token]
    """
    seg, shelf = st.seg[s], shelf_at(st.world[0].shared)
    if seg.cached > 0 or seg.reserve > 0 or seg.left <= 1:
        return 0, 0
    named = tokens_found(shelf, memory_of(st, s), seg.request)
    found = max(named, seg.ready)
    if seg.tail >= 0 and seg.kept <= named:
        found = max(found, seg.kept + shelf.runs[seg.tail].blocks * BLOCK_TOKENS)
    step = shelf.head[0].step
    found = min(found, seg.left - 1) // step * step
    return found, min(named, found)


@inner
def blocks_of_others(st: FleetState, s: int, named: int) -> int:
    """KV blocks of so many tokens at the start of a segment that others hold: it needs none for them. [block]"""
    shelf, seg, blocks = shelf_at(st.world[0].shared), st.seg[s], 0
    each = shelf.head[0].block_tokens
    for place in range(-(-named // each)):
        run = shelf.runs[run_of(shelf, memory_of(st, s), shelf.names[shelf.starts[seg.request] + place])]
        if run.holders > 0:
            blocks += min(named // BLOCK_TOKENS - place * each // BLOCK_TOKENS, run.blocks)
    return blocks


@inner
def begin_shared(st: FleetState, i: int, s: int, need: int, named: int) -> None:
    """A segment takes its first blocks, ``need``: those that it shares, those that it had, and free ones."""
    shelf, seg, inst = shelf_at(st.world[0].shared), st.seg[s], st.inst[i]
    each = shelf.head[0].block_tokens
    seg.shared = -(-named // each)
    for place in range(seg.shared):
        _hold(st, shelf, i, run_of(shelf, memory_of(st, s), shelf.names[shelf.starts[seg.request] + place]))
    seg.lent = named // BLOCK_TOKENS
    own = need - seg.lent
    inst.free_blocks -= own
    if seg.tail >= 0:
        run, k = shelf.runs[seg.tail], seg.tail
        run.owner = seg.tail = -1
        if seg.kept <= named:
            again = min(run.blocks, own)
            _leave(st, shelf, i, k)
            rest = run.blocks - again
            drop_run(shelf, k)
            add_free(st, i, memory_of(st, s), rest, -1)
            own -= again
        else:
            _join(st, shelf, i, k, run.next)
            _join(st, shelf, i, run.before, k)
    seg.ready = 0
    take_free(st, i, own)


@inner
def enlist(st: FleetState, i: int, s: int, tokens: int) -> None:
    """The first tokens of a prompt have blocks, which others find from now on; of two of one name one is given back."""
    shelf, seg, memory = shelf_at(st.world[0].shared), st.seg[s], memory_of(st, s)
    if seg.request >= len(shelf.starts):
        return
    each, end = shelf.head[0].block_tokens, min(tokens, seg.context + seg.prompt)
    while seg.shared < shelf.counts[seg.request]:
        place = seg.shared
        until = min((place + 1) * each, seg.context + seg.prompt)
        if until > end or place * each >= until:
            return
        size = until // BLOCK_TOKENS - place * each // BLOCK_TOKENS
        if size == 0 and each >= BLOCK_TOKENS:
            return
        name = shelf.names[shelf.starts[seg.request] + place]
        k = run_of(shelf, memory, name)
        if k < 0:
            k = _new(shelf, memory, size)
            run = shelf.runs[k]
            run.name, run.holders, run.newer, run.older = name, 1, -1, shelf.named[name]
            if run.older >= 0:
                shelf.runs[run.older].newer = k
            shelf.named[name] = k
            list_run(shelf, k)
        elif shelf.runs[k].blocks != size:
            return
        else:
            _hold(st, shelf, i, k)
            st.inst[i].free_blocks += size
            add_free(st, i, memory, size, -1)
        seg.shared += 1
        seg.lent += size


@inner
def give_shared(st: FleetState, i: int, s: int, kept: int) -> None:
    """A segment gives its blocks back, the last first; those of its first ``kept`` tokens stay known to itself."""
    shelf, seg, memory = shelf_at(st.world[0].shared), st.seg[s], memory_of(st, s)
    own = seg.blocks - seg.lent
    st.inst[i].free_blocks += own
    again = max(min(kept // BLOCK_TOKENS - seg.lent, own), 0)
    add_free(st, i, memory, own - again, st.inst[i].last_free)
    if again > 0:
        k = _new(shelf, memory, again)
        shelf.runs[k].owner = s
        _enter(st, shelf, i, k, st.inst[i].last_free)
        seg.tail, seg.kept = k, seg.lent * BLOCK_TOKENS
    for place in range(seg.shared - 1, -1, -1):
        k = run_of(shelf, memory, shelf.names[shelf.starts[seg.request] + place])
        run = shelf.runs[k]
        run.holders -= 1
        if run.holders == 0:
            st.inst[i].free_blocks += run.blocks
            _enter(st, shelf, i, k, st.inst[i].last_free)
    seg.blocks = seg.shared = seg.lent = 0


@inner
def note_begun(st: FleetState, s: int) -> None:
    """Write down that the prompt of a segment was admitted for the first time."""
    head = shelf_at(st.world[0].shared).head[0]
    whole_numbers(head.begun_at, head.begun + 1)[head.begun] = s
    head.begun += 1
