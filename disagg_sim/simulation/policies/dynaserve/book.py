"""Compiled: the book of splits, what was promised to which instance, and the pair with the fewest requests.

An instance gets to know of a part when its segment comes; until then the part stands in the list of what was promised
to it, in the order of the promises. A call costs the same however many requests there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.simulation.kernel.addresses import addresses_of, carray, pointer, state_at
from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.kernel.layout import InstanceRecord, Segment, SegmentStatus, dtype_of
from disagg_sim.simulation.kernel.ranking import least_of, least_tree, set_key

DONE, LOST, RESERVED = (int(status) for status in (SegmentStatus.DONE, SegmentStatus.LOST, SegmentStatus.RESERVED))
#: ``first_at``, ``second_at`` of a part that has not come, and of one that never will: the answer ended before it.
NOT_YET, NEVER = -1, -2
#: Requests a call that are looked at for an answer that ended before its second part. [request]
SWEPT = 64


class Entry:
    """A request in the book of splits."""

    tokens: int  # of the prompt [token]
    expected: int  # prompt and predicted output [token]
    split: int  # tokens that exist when the first part ends [token]
    first: int  # instances of the two parts; -1 = none
    second: int
    first_at: int  # their segments once they are there; else ``NOT_YET`` or ``NEVER``
    second_at: int
    after_first: int  # what was promised next to the same instance, see ``Promised``; -1 = nothing
    after_second: int


class Promised:
    """What was promised to an instance and has not come: a list of ``2*request + part``, part 0 or 1."""

    head: int  # the oldest that may not have come; -1 = none
    tail: int
    requests: int  # whose next part is to come here [request]
    tokens: int  # of prompts in parts that are to come [token]
    away: int  # 1 = it does not serve: no new request goes to its pair


class BookTotals:
    """What is kept from call to call."""

    seen: int  # segments of the kernel that the book knows
    logged: int  # changes of instances that it knows
    open: int  # requests whose second part is to come, in no order
    swept: int  # place among them where the next look begins


BOOK, TALLY, PROMISED = dtype_of(Entry), dtype_of(BookTotals), dtype_of(Promised)


class Known(NamedTuple):
    """What the scheduler looks at: arrays of the kernel, and its own book."""

    inst: Sequence[InstanceRecord]
    seg: Sequence[Segment]
    sets: Ints
    values: Floats
    book: Sequence[Entry]  # by request
    promised: Sequence[Promised]  # by instance
    open: Ints  # requests whose second part is to come, the first ``tally.open``
    tally: Sequence[BookTotals]  # one row
    order: Floats  # tree of the requests there or promised of each pair of instances, see ``least`` [request]


class Book:
    """The arrays of a book, and where they are."""

    def __init__(self, entries: NDArray[np.void], instances: int) -> None:
        self.entries, self._open = entries, np.zeros(entries.size, np.int64)
        self._promised, self._tally = np.zeros(instances, PROMISED), np.zeros(1, TALLY)
        self._promised["head"] = self._promised["tail"] = -1
        self._order = least_tree(np.zeros(instances // 2))
        self.home = addresses_of(self._arrays)

    @property
    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self.entries, self._promised, self._open, self._tally, self._order

    @property
    def open(self) -> Ints:
        """Requests whose second part is to come, in no order."""
        return self._open[: int(self._tally["open"][0])]

    def grow(self, requests: int) -> None:
        """Make room for more requests."""
        self.entries = np.append(self.entries, np.zeros(requests, BOOK))
        self._open = np.append(self._open, np.zeros(requests, np.int64))
        addresses_of(self._arrays, self.home)

    def note_serving(self, serving: Mask) -> None:
        """Note which instances serve; the next choice looks at all pairs."""
        self._promised["away"] = ~serving[: self._promised.size]
        self._tally["logged"] = -serving.size - 1


@inner
def known_at(home: Ints, own: Ints) -> Known:
    """What stands where a fleet and a book say."""
    st = state_at(home)
    return Known(
        st.inst,
        st.seg,
        st.sets,
        st.values,
        carray(pointer(own[0, 0]), own[0, 1], BOOK),
        carray(pointer(own[1, 0]), own[1, 1], PROMISED),
        carray(pointer(own[2, 0]), own[2, 1], np.int64),
        carray(pointer(own[3, 0]), own[3, 1], TALLY),
        carray(pointer(own[4, 0]), own[4, 1], np.float64),
    )


@inner
def weighed(known: Known, i: int) -> None:
    """Note the requests of the pair of an instance, there or promised; infinite where one of the two is away."""
    pair, total, away = i // 2, 0, 0
    for each in range(2 * pair, 2 * pair + 2):
        away += known.promised[each].away
        total += known.inst[each].queued_requests + known.inst[each].running_requests + known.promised[each].requests
    set_key(known.order, pair, float(total) if away == 0 else np.inf)


@inner
def prompt_tokens(one: Entry, part: int) -> int:
    """Tokens of the prompt that a part computes. [token]"""
    first = min(one.split, one.tokens)
    return first if part == 0 else one.tokens - first


@inner
def append(known: Known, i: int, request: int, part: int) -> None:
    """Promise a part to an instance."""
    mine, node = known.promised[i], 2 * request + part
    if mine.tail < 0:
        mine.head = node
    elif mine.tail % 2 == 0:
        known.book[mine.tail // 2].after_first = node
    else:
        known.book[mine.tail // 2].after_second = node
    mine.tail = node
    mine.tokens += prompt_tokens(known.book[request], part)


@entry
def commit(home: Ints, own: Ints, request: int, lengths: tuple[int, int, int], first: int, second: int) -> None:
    """Note a decision: prompt, prompt and predicted output, and split [token]; the instances, -1 = no second part."""
    known = known_at(home, own)
    one, tally = known.book[request], known.tally[0]
    one.tokens, one.expected, one.split = lengths
    one.first, one.second = first, second
    one.first_at = one.second_at = NOT_YET
    one.after_first = one.after_second = -1
    known.promised[first].requests += 1
    append(known, first, request, 0)
    if second >= 0:
        append(known, second, request, 1)
        known.open[tally.open] = request
        tally.open += 1
    weighed(known, first)


@inner
def is_pending(known: Known, one: Entry, part: int) -> bool:
    """Whether a part is not on its instance: unknown there, its first part at work, or in transfer."""
    s = one.first_at if part == 0 else one.second_at
    if s < 0 or part == 0:
        return bool(s == NOT_YET)
    return bool(known.seg[s].reserve == 2 or known.seg[s].status == RESERVED)


@inner
def arrived(known: Known, count: int) -> None:
    """Note the parts that have come since the last call."""
    tally, segs = known.tally[0], known.seg
    for s in range(tally.seen, count):
        one, i = known.book[segs[s].request], segs[s].instance
        if one.first == i and one.first_at == NOT_YET:
            one.first_at = s
            known.promised[i].requests -= 1
            known.promised[i].tokens -= prompt_tokens(one, 0)
            if one.second >= 0:
                known.promised[one.second].requests += 1
            weighed(known, i)
        elif one.second == i:
            one.second_at = s
    tally.seen = count


@inner
def sweep(known: Known) -> None:
    """Forget requests whose second part has come, or never will: some a call, in turn."""
    tally, at = known.tally[0], known.tally[0].swept
    for _ in range(min(SWEPT, tally.open)):
        if at >= tally.open:
            at = 0
        one = known.book[known.open[at]]
        status = known.seg[one.first_at].status if one.first_at >= 0 else -1
        if one.second_at == NOT_YET and status in (DONE, LOST):
            one.second_at = NEVER
        if is_pending(known, one, 1):
            at += 1
        else:
            known.promised[one.second].requests -= 1
            known.promised[one.second].tokens -= prompt_tokens(one, 1)
            weighed(known, one.second)
            tally.open -= 1
            known.open[at] = known.open[tally.open]
    tally.swept = at


@entry
def choose_pair(home: Ints, own: Ints, count: int) -> int:
    """Note what has come, then the pair with the fewest requests there or promised, the first of several; -1 = none."""
    known, st = known_at(home, own), state_at(home)
    arrived(known, count)
    sweep(known)
    tally, log, changes = known.tally[0], st.log, st.world[0].changes
    if changes - tally.logged > len(log):
        for i in range(0, len(known.promised), 2):
            weighed(known, i)
    else:
        for at in range(tally.logged, changes):
            weighed(known, log[at % len(log)])
    tally.logged = changes
    return least_of(known.order)


@entry
def forget(home: Ints, own: Ints, count: int, request: int, whole: bool) -> None:
    """The second part of a request never comes where it was promised, or neither part does (``whole``).

    ``count`` segments of the kernel there are so far.
    """
    known = known_at(home, own)
    arrived(known, count)
    one, tally = known.book[request], known.tally[0]
    came = one.first_at != NOT_YET
    if whole and not came:
        known.promised[one.first].requests -= 1
        known.promised[one.first].tokens -= prompt_tokens(one, 0)
        one.first_at = NEVER
    for place in range(tally.open):
        if known.open[place] == request:
            known.promised[one.second].requests -= 1 if came else 0
            known.promised[one.second].tokens -= prompt_tokens(one, 1)
            one.second, one.second_at = -1, NEVER
            tally.open -= 1
            known.open[place] = known.open[tally.open]
            break
    weighed(known, one.first)


@inner
def after(known: Known, i: int, node: int) -> int:
    """What was promised to an instance after ``node``, -1 = first of all; -1 = nothing."""
    if node < 0:
        return int(known.promised[i].head)
    one = known.book[node // 2]
    return int(one.after_first if node % 2 == 0 else one.after_second)


@inner
def left_for_good(known: Known, one: Entry, part: int) -> bool:
    """Whether a part is no promise any more: it is on its instance, or never will be."""
    s = one.first_at if part == 0 else one.second_at
    if s < 0 or part == 0:
        return bool(s != NOT_YET)
    return bool(known.seg[s].reserve == 0 and known.seg[s].status != RESERVED)


@inner
def next_promised(known: Known, i: int, node: int) -> int:
    """The part promised to an instance after ``node``, -1 = from the start; -1 = none is left.

    Those that have left for good leave the list.
    """
    mine, at = known.promised[i], after(known, i, node)
    while at >= 0 and left_for_good(known, known.book[at // 2], at % 2):
        if mine.tail == at:
            mine.tail = node
        at = after(known, i, at)
        if node < 0:
            mine.head = at
        elif node % 2 == 0:
            known.book[node // 2].after_first = at
        else:
            known.book[node // 2].after_second = at
    return at
