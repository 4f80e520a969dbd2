"""Compiled: the queues and the running set of an instance, its KV blocks, and the end of a segment.

An instance has two queues. Prompts wait first in, first out; the first ADMITTED of them hold blocks and are partly
prefilled. Segments that only decode, and those whose context is still on the way, wait in a queue of their own that
comes first. The running set is a binary heap of ``counter at the finish * 2**32 + segment``.
"""

from __future__ import annotations

import math
from typing import Any

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import (
    ADMITTED,
    BLOCK_TOKENS,
    BLOCKS,
    CACHED,
    CLOSED,
    CLOSES,
    CONTEXT,
    COUNTER,
    DRAINED,
    DRAINING,
    EMITTED,
    FINISH_S,
    FIRST_S,
    FIRST_TOKENS,
    FREE_BLOCKS,
    GENERATE,
    GROUPS,
    HEAD,
    HOLD,
    JOINED,
    LAST_ADMITTED,
    LAST_S,
    LEAVE_HEAD,
    LEFT,
    NEXT,
    NOTIFY,
    PENDING_HEAD,
    PENDING_TAIL,
    PREEMPTED,
    PREEMPTIONS,
    QUEUED,
    QUEUED_CONTEXT,
    QUEUED_TOKENS,
    READY,
    RESIDUE,
    RUNNING,
    RUNNING_TOKENS,
    STATUS,
    TAIL,
    TOTAL_BLOCKS,
    WATERMARK,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.runs import itl_bin

QUEUED_STATUS, RUNNING_STATUS, HELD, DONE, RESERVED = (
    int(status)
    for status in (
        SegmentStatus.QUEUED,
        SegmentStatus.RUNNING,
        SegmentStatus.HELD,
        SegmentStatus.DONE,
        SegmentStatus.RESERVED,
    )
)


@inner
def append(st: Any, i: int, s: int, head: int, tail: int) -> None:
    """Put a segment last in a queue of an instance, given by its two columns."""
    st.seg[s, NEXT] = -1
    if st.ints[i, head] < 0:
        st.ints[i, head] = s
    else:
        st.seg[st.ints[i, tail], NEXT] = s
    st.ints[i, tail] = s


@inner
def unlink(st: Any, i: int, s: int, before: int, head: int, tail: int) -> None:
    """Take a segment out of a queue; ``before`` is the one before it, -1 = it is the first."""
    after = st.seg[s, NEXT]
    if before < 0:
        st.ints[i, head] = after
    else:
        st.seg[before, NEXT] = after
    if st.ints[i, tail] == s:
        st.ints[i, tail] = before
    st.seg[s, NEXT] = -1


@inner
def push(st: Any, i: int, key: int) -> None:
    """Add a key to the running set, which holds RUNNING keys so far."""
    place = st.ints[i, RUNNING]
    while place > 0:
        parent = (place - 1) // 2
        if st.sets[0, i, parent] <= key:
            break
        st.sets[0, i, place] = st.sets[0, i, parent]
        place = parent
    st.sets[0, i, place] = key
    st.ints[i, RUNNING] += 1


@inner
def remove(st: Any, i: int, place: int) -> None:
    """Take the key at a place out of the running set."""
    count = st.ints[i, RUNNING] - 1
    st.ints[i, RUNNING] = count
    key = st.sets[0, i, count]
    while place > 0 and st.sets[0, i, (place - 1) // 2] > key:
        st.sets[0, i, place] = st.sets[0, i, (place - 1) // 2]
        place = (place - 1) // 2
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and st.sets[0, i, child + 1] < st.sets[0, i, child]:
            child += 1
        if st.sets[0, i, child] >= key:
            break
        st.sets[0, i, place] = st.sets[0, i, child]
        place = child
    st.sets[0, i, place] = key


@inner
def report(st: Any, s: int) -> None:
    """Queue a segment for ``run_until`` to return."""
    st.seg[s, NEXT] = -1
    if st.world[PENDING_HEAD] < 0:
        st.world[PENDING_HEAD] = s
    else:
        st.seg[st.world[PENDING_TAIL], NEXT] = s
    st.world[PENDING_TAIL] = s


@inner
def check_drained(st: Any, i: int) -> None:
    """Mark a draining instance that holds nothing any more for ``run_until`` to report."""
    if (
        st.ints[i, DRAINING] == 1
        and st.ints[i, RUNNING] == 0
        and st.ints[i, QUEUED] == 0
        and st.ints[i, LEAVE_HEAD] < 0
        and st.ints[i, FREE_BLOCKS] == st.ints[i, TOTAL_BLOCKS]
    ):
        st.ints[i, DRAINING] = 2
        st.world[DRAINED] += 1


@inner
def take_blocks(st: Any, i: int, s: int) -> bool:
    """Reserve the blocks of a segment's context and prompt; whether there were enough.

    The watermark stays free unless the instance holds nothing else, so that running segments can grow.
    """
    tokens = st.seg[s, CACHED] + st.seg[s, LEFT]
    need = -(-tokens // BLOCK_TOKENS) - st.seg[s, BLOCKS]
    free = st.ints[i, FREE_BLOCKS]
    growth = st.ints[i, RESIDUE + (-st.ints[i, COUNTER]) % BLOCK_TOKENS]
    if st.seg[s, LEFT] == 0 and st.seg[s, READY] == 1 and tokens % BLOCK_TOKENS == 0:
        growth += 1
    spare = 0 if need == 0 or free == st.ints[i, TOTAL_BLOCKS] else st.ints[i, WATERMARK]
    if need + growth > free - spare:
        return False
    st.ints[i, FREE_BLOCKS] = free - need
    st.seg[s, BLOCKS] += need
    return True


@inner
def finish(st: Any, i: int, s: int, time: float) -> None:
    """End a segment that is in no queue and not running: its blocks go or are held, and Python hears of it."""
    st.seg_s[s, FINISH_S] = time
    if st.seg[s, HOLD] == 1:
        st.seg[s, STATUS] = HELD
    else:
        st.seg[s, STATUS] = DONE
        st.ints[i, FREE_BLOCKS] += st.seg[s, BLOCKS]
        st.seg[s, BLOCKS] = 0
    if st.seg[s, NOTIFY] == 1:
        report(st, s)


@inner
def join(st: Any, i: int, s: int) -> None:
    """Let a segment with a full cache decode from the next step on."""
    counter = st.ints[i, COUNTER]
    st.seg[s, STATUS] = RUNNING_STATUS
    st.seg[s, JOINED] = counter
    st.sets[1, i, st.ints[i, GROUPS]] = s
    st.ints[i, GROUPS] += 1
    st.ints[i, RESIDUE + (st.seg[s, CACHED] - counter) % BLOCK_TOKENS] += 1
    st.ints[i, RUNNING_TOKENS] += st.seg[s, CACHED]
    push(st, i, ((counter + st.seg[s, GENERATE] - st.seg[s, EMITTED]) << 32) | s)


@inner
def leave_running(st: Any, i: int, s: int) -> None:
    """Settle cache and blocks of a segment that was just taken out of the running set."""
    steps = st.ints[i, COUNTER] - st.seg[s, JOINED]
    st.ints[i, RESIDUE + (st.seg[s, CACHED] - st.seg[s, JOINED]) % BLOCK_TOKENS] -= 1
    cached = st.seg[s, CACHED] + steps
    st.ints[i, RUNNING_TOKENS] -= cached
    st.seg[s, CACHED] = cached
    st.seg[s, EMITTED] += steps
    st.seg[s, BLOCKS] = -(-cached // BLOCK_TOKENS)


@inner
def finish_complete(st: Any, i: int, time: float) -> None:
    """End all running segments that have emitted their last token."""
    while st.ints[i, RUNNING] > 0 and st.sets[0, i, 0] >> 32 == st.ints[i, COUNTER]:
        s = st.sets[0, i, 0] & 0xFFFFFFFF
        remove(st, i, 0)
        leave_running(st, i, s)
        finish(st, i, s, time)


@inner
def complete_prompt(st: Any, i: int, s: int, time: float) -> None:
    """The prompt of a segment is in the cache: it emits a token, and ends or decodes."""
    if st.seg[s, GENERATE] > st.seg[s, EMITTED]:
        st.seg[s, EMITTED] += 1
        st.ints[i, FIRST_TOKENS] += 1
        if math.isnan(st.seg_s[s, FIRST_S]):
            st.seg_s[s, FIRST_S] = time
        if not math.isnan(st.seg_s[s, LAST_S]):
            st.itl[0, itl_bin(time - st.seg_s[s, LAST_S])] += 1
        st.seg_s[s, LAST_S] = time
    if st.seg[s, EMITTED] >= st.seg[s, GENERATE]:
        finish(st, i, s, time)
    else:
        join(st, i, s)


@inner
def requeue(st: Any, i: int, s: int) -> None:
    """Put a preempted segment behind the admitted ones; all that was cached has to be computed again."""
    st.seg[s, STATUS] = QUEUED_STATUS
    st.seg[s, LEFT] += st.seg[s, CACHED]
    st.ints[i, QUEUED_TOKENS] += st.seg[s, CACHED]
    st.seg[s, CACHED] = 0
    st.seg[s, PREEMPTED] += 1
    st.ints[i, PREEMPTIONS] += 1
    st.ints[i, FREE_BLOCKS] += st.seg[s, BLOCKS]
    st.seg[s, BLOCKS] = 0


@inner
def insert(st: Any, i: int, s: int) -> None:
    """Put a segment into the prompts' queue behind those that hold blocks: none of them may wait for it."""
    before = st.ints[i, LAST_ADMITTED] if st.ints[i, ADMITTED] > 0 else -1
    after = st.ints[i, HEAD] if before < 0 else st.seg[before, NEXT]
    while after >= 0 and st.seg[after, BLOCKS] > 0:
        before, after = after, st.seg[after, NEXT]
    st.seg[s, NEXT] = after
    if before < 0:
        st.ints[i, HEAD] = s
    else:
        st.seg[before, NEXT] = s
    if after < 0:
        st.ints[i, TAIL] = s
    st.ints[i, CLOSED] += st.seg[s, CLOSES]


@inner
def preempt_newest(st: Any, i: int, last_step: float) -> None:
    """Take the blocks of the segment that came last: one in prefill, else of the running set."""
    if st.ints[i, ADMITTED] > 0:
        s = st.ints[i, LAST_ADMITTED]
        before = -1
        at = st.ints[i, HEAD]
        while at != s:
            before = at
            at = st.seg[at, NEXT]
        st.ints[i, ADMITTED] -= 1
        st.ints[i, LAST_ADMITTED] = before
        requeue(st, i, s)
        return
    place = 0
    for j in range(1, st.ints[i, RUNNING]):
        s, best = st.sets[0, i, j] & 0xFFFFFFFF, st.sets[0, i, place] & 0xFFFFFFFF
        if (st.seg[s, JOINED], s) > (st.seg[best, JOINED], best):
            place = j
    s = st.sets[0, i, place] & 0xFFFFFFFF
    remove(st, i, place)
    fresh = st.seg[s, JOINED] == st.ints[i, COUNTER]
    if fresh:  # no step since it joined: it still stands in the list of those that joined
        j = 0
        while st.sets[1, i, j] != s:
            j += 1
        for later in range(j + 1, st.ints[i, GROUPS]):
            st.sets[1, i, later - 1] = st.sets[1, i, later]
        st.ints[i, GROUPS] -= 1
    else:
        st.seg_s[s, LAST_S] = last_step
    leave_running(st, i, s)
    st.seg[s, CACHED] += 1  # its last token, which was not in the cache yet
    requeue(st, i, s)
    st.ints[i, QUEUED] += 1
    st.ints[i, QUEUED_CONTEXT] += st.seg[s, CONTEXT]
    st.seg[s, CLOSES] = 1
    insert(st, i, s)
