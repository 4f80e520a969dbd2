"""Compiled: the entry points of the kernel; ``Fleet`` is their Python face.

Only ``run_until`` forms steps. What comes from outside changes a queue and wakes the instance: an idle one gets an
event at once, a run of decode steps ends with the step in progress. Arrays come one by one, because a call with a
tuple of arrays costs twice as much.
"""

from __future__ import annotations

import math
from typing import Any

from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.kernel.layout import (
    ACTIVE,
    BLOCK_TOKENS,
    BLOCKS,
    CACHED,
    CLOSED,
    CLOSES,
    COMING_HEAD,
    COMING_TAIL,
    CONTEXT,
    DECODING,
    DRAINED,
    DRAINING,
    FINISH_S,
    FIRST_S,
    FREE_BLOCKS,
    GENERATE,
    HEAD,
    HIT,
    HOLD,
    IDLE,
    INSTANCE,
    LAST_S,
    LEAVE_S,
    LEFT,
    NEXT,
    NEXT_S,
    NOTIFY,
    PENDING_HEAD,
    PROMPT,
    QUEUED,
    QUEUED_CONTEXT,
    QUEUED_TOKENS,
    READY,
    REQUEST,
    RUN_END_S,
    RUN_KIND,
    RUN_START_S,
    RUN_STEPS,
    RUNNING,
    RUNNING_TOKENS,
    START_S,
    STATUS,
    SUBMIT_S,
    TABLE,
    TAIL,
    TOTAL_BLOCKS,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.queue import append, check_drained, insert, unlink
from disagg_sim.simulation.kernel.runs import State, count_run, steps_time, steps_within
from disagg_sim.simulation.kernel.steps import form, settle
from disagg_sim.simulation.kernel.times import largest_prefill, pass_part, step_time

QUEUED_STATUS, DONE, WITHDRAWN = int(SegmentStatus.QUEUED), int(SegmentStatus.DONE), int(SegmentStatus.WITHDRAWN)

#: Why ``submit`` refuses: lengths that the instance can never serve; events before the time of submission.
IMPOSSIBLE, LATE = 1, 2

#: Actions of ``control``: count the steps up to now, when a step ends, free held blocks, let a segment start, take one
#: back, take notice of new limits.
REFRESH, STEP_END, RELEASE, ALLOW, WITHDRAW, WAKE = range(6)

#: Questions of ``look_up``: time of a step, of a pass through a pipeline, most prefill within a limit.
STEP_TIME, PASS_TIME, LARGEST_PREFILL = range(3)


@inner
def _context(st: Any, i: int) -> float:
    """Mean context of the next decode step. [token]"""
    context: float = (st.ints[i, RUNNING_TOKENS] + st.ints[i, RUNNING]) / st.ints[i, RUNNING]
    return context


@inner
def _steps_to(st: Any, i: int, now: float) -> int:
    """Steps of a decode run that are not counted yet and end by ``now``, without its last one."""
    head = st.heads[st.ints[i, TABLE]]
    elapsed = now - st.floats[i, RUN_START_S]
    most = st.ints[i, RUN_STEPS] - 1
    if most <= 0 or elapsed <= 0.0:
        return 0
    steps: int = steps_within(head, st.values, st.ints[i, RUNNING], _context(st, i), elapsed, most)
    return steps


@inner
def _end_after(st: Any, i: int, steps: int) -> float:
    """End of the first ``steps`` uncounted steps of a decode run. [s]"""
    end: float = st.floats[i, RUN_END_S]
    if steps < st.ints[i, RUN_STEPS]:
        head = st.heads[st.ints[i, TABLE]]
        end = st.floats[i, RUN_START_S] + steps_time(head, st.values, st.ints[i, RUNNING], _context(st, i), steps)
    return end


@inner
def _wake(st: Any, i: int, now: float) -> None:
    """Let an instance notice a change at ``now``: at once if idle, else at the end of the decode step in progress."""
    st.floats[-1, NEXT_S] = now
    if st.ints[i, RUN_KIND] == IDLE:
        st.floats[i, NEXT_S] = min(st.floats[i, NEXT_S], now)
    elif st.ints[i, RUN_KIND] == DECODING and st.ints[i, RUN_STEPS] > 1:
        steps = _steps_to(st, i, now)
        if steps == 0 or _end_after(st, i, steps) < now:
            steps += 1
        end = _end_after(st, i, steps)
        st.ints[i, RUN_STEPS] = steps
        st.floats[i, RUN_END_S] = end
        st.floats[i, NEXT_S] = min(end, st.floats[i, LEAVE_S])


@inner
def _soonest(st: Any) -> int:
    """The instance with the next event. A function, so that its number is no literal: all would compile twice."""
    first = 0
    for i in range(1, st.ints.shape[0]):
        if st.floats[i, NEXT_S] < st.floats[first, NEXT_S]:
            first = i
    return first


@entry
def run_until(
    ints: Any, floats: Any, seg: Any, seg_s: Any, sets: Any, heads: Any, values: Any, itl: Any, world: Any, limit: float
) -> tuple[int, float]:
    """Process events up to ``limit`` in the order of time, or up to the first one to report."""
    st = State(ints, floats, seg, seg_s, sets, heads, values, itl, world)
    while True:
        if world[PENDING_HEAD] >= 0:
            s = world[PENDING_HEAD]
            world[PENDING_HEAD] = seg[s, NEXT]
            return s, floats[-1, NEXT_S]
        if world[DRAINED] > 0:
            for i in range(ints.shape[0]):
                if ints[i, DRAINING] == 2:
                    ints[i, DRAINING] = 0
                    ints[i, ACTIVE] = 0
                    world[DRAINED] -= 1
                    return -2 - i, floats[-1, NEXT_S]
        first = _soonest(st)
        if floats[first, NEXT_S] > limit or floats[first, NEXT_S] == math.inf:
            return -1, limit
        now = floats[first, NEXT_S]
        floats[-1, NEXT_S] = now
        if settle(st, first, now):
            form(st, first, now)
        check_drained(st, first)


@entry
def submit(
    ints: Any,
    floats: Any,
    seg: Any,
    seg_s: Any,
    sets: Any,
    heads: Any,
    values: Any,
    itl: Any,
    world: Any,
    s: int,
    i: int,
    request: int,
    context: int,
    prompt: int,
    generate: int,
    now: float,
    notify: bool,
    hold: bool,
    last_token_s: float,
    closes: bool,
    ready: bool,
    hit: int,
) -> int:
    """Queue segment ``s`` at instance ``i``; 0, or why not: ``IMPOSSIBLE``, ``LATE``."""
    if floats[i, NEXT_S] < now:
        return LATE
    if context < 0 or generate < 0 or hit < 0 or prompt < 0 or prompt + generate < 1 or hit > max(prompt - 1, 0):
        return IMPOSSIBLE
    if context + prompt + max(generate - 1, 0) + (prompt == 0) > ints[i, TOTAL_BLOCKS] * BLOCK_TOKENS:
        return IMPOSSIBLE
    st = State(ints, floats, seg, seg_s, sets, heads, values, itl, world)
    seg[s, :] = 0
    seg[s, REQUEST] = request
    seg[s, INSTANCE] = i
    seg[s, CONTEXT] = context
    seg[s, PROMPT] = prompt
    seg[s, GENERATE] = generate
    seg[s, HOLD] = hold
    seg[s, NOTIFY] = notify
    seg[s, CLOSES] = closes
    seg[s, READY] = ready
    seg[s, HIT] = hit
    seg[s, LEFT] = prompt - hit
    seg[s, CACHED] = context + hit
    seg_s[s, SUBMIT_S] = now
    seg_s[s, START_S] = math.nan
    seg_s[s, FIRST_S] = math.nan
    seg_s[s, FINISH_S] = math.nan
    seg_s[s, LAST_S] = last_token_s
    ints[i, QUEUED] += 1
    ints[i, QUEUED_TOKENS] += prompt - hit
    ints[i, QUEUED_CONTEXT] += context
    _enqueue(st, i, s, now)
    return 0


@inner
def _enqueue(st: Any, i: int, s: int, now: float) -> None:
    """Put a segment into the queue where it belongs. One that has to wait behind others changes no run."""
    if st.seg[s, LEFT] == 0 or st.seg[s, READY] == 0:
        alone = st.ints[i, COMING_HEAD] < 0
        append(st, i, s, COMING_HEAD, COMING_TAIL)
    else:
        closes = st.seg[s, CLOSES]
        alone = st.ints[i, HEAD] < 0 or (closes == 1 and st.ints[i, CLOSED] == 0)
        append(st, i, s, HEAD, TAIL)
        st.ints[i, CLOSED] += closes
    if alone:
        _wake(st, i, now)


@inner
def _ready(st: Any, s: int, i: int, now: float) -> None:
    """The context of a segment with reserved blocks has come: it may start."""
    st.seg[s, READY] = 1
    st.seg[s, STATUS] = QUEUED_STATUS
    if st.seg[s, LEFT] > 0:
        insert(st, i, s)
    else:
        st.seg[s, NEXT] = st.ints[i, COMING_HEAD]
        if st.ints[i, COMING_HEAD] < 0:
            st.ints[i, COMING_TAIL] = s
        st.ints[i, COMING_HEAD] = s
    _wake(st, i, now)


@inner
def _withdraw(st: Any, s: int, i: int, now: float) -> bool:
    """Take a waiting segment that holds no blocks out of its queue."""
    if st.seg[s, STATUS] != QUEUED_STATUS or st.seg[s, BLOCKS] > 0 or not math.isnan(st.seg_s[s, START_S]):
        return False
    coming = st.seg[s, LEFT] == 0 or st.seg[s, READY] == 0
    head, tail = (COMING_HEAD, COMING_TAIL) if coming else (HEAD, TAIL)
    before, at = -1, st.ints[i, head]
    while at != s:
        before, at = at, st.seg[at, NEXT]
    unlink(st, i, s, before, head, tail)
    if not coming and st.seg[s, CLOSES] == 1:
        st.ints[i, CLOSED] -= 1
        if before >= 0 and st.seg[before, CLOSES] == 0:
            st.seg[before, CLOSES] = 1
            st.ints[i, CLOSED] += 1
    st.ints[i, QUEUED] -= 1
    st.ints[i, QUEUED_TOKENS] -= st.seg[s, LEFT]
    st.ints[i, QUEUED_CONTEXT] -= st.seg[s, CONTEXT]
    st.seg[s, STATUS] = WITHDRAWN
    _wake(st, i, now)
    return True


@entry
def control(
    ints: Any,
    floats: Any,
    seg: Any,
    seg_s: Any,
    sets: Any,
    heads: Any,
    values: Any,
    itl: Any,
    world: Any,
    action: int,
    s: int,
    i: int,
    now: float,
) -> float:
    """Everything that is called seldom, by its number; what it returns depends on it."""
    st = State(ints, floats, seg, seg_s, sets, heads, values, itl, world)
    if action == REFRESH:
        for each in range(ints.shape[0]):
            if ints[each, RUN_KIND] == DECODING:
                steps = _steps_to(st, each, now)
                if steps > 0:
                    count_run(st, each, steps)
        return now
    if action == STEP_END:
        if ints[i, RUN_KIND] == IDLE:
            return now
        return _end_after(st, i, _steps_to(st, i, now) + 1) if ints[i, RUN_KIND] == DECODING else floats[i, RUN_END_S]
    done = 1.0
    if action == RELEASE:
        seg[s, STATUS] = DONE
        ints[i, FREE_BLOCKS] += seg[s, BLOCKS]
        seg[s, BLOCKS] = 0
        _wake(st, i, now)
    elif action == ALLOW:
        _ready(st, s, i, now)
    elif action == WITHDRAW:
        done = 1.0 if _withdraw(st, s, i, now) else 0.0
    else:
        _wake(st, i, now)
    check_drained(st, i)
    return done


@entry
def waiting(ints: Any, seg: Any, seg_s: Any, i: int, found: Any) -> int:
    """Fill in the segments that wait in an instance's queue of prompts, none of it computed; how many there are."""
    count = 0
    s = ints[i, HEAD]
    while s >= 0:
        if seg[s, CONTEXT] == 0 and seg[s, BLOCKS] == 0 and math.isnan(seg_s[s, START_S]):
            found[count] = s
            count += 1
        s = seg[s, NEXT]
    return count


@entry
def look_up(
    head: Any,
    values: Any,
    action: int,
    decodes: int,
    context: float,
    pieces: int,
    prefill: int,
    past: float,
    limit: float,
) -> tuple[float, float]:
    """What a step table says, by the number of the question."""
    if action == PASS_TIME:
        return pass_part(head, values, float(pieces), prefill, int(past))
    if action == LARGEST_PREFILL:
        return float(largest_prefill(head, values, decodes, context, int(past), limit, prefill)), 0.0
    longest = -(-prefill // pieces)
    pairs = prefill * (past + 0.5 * prefill / pieces)
    return step_time(head, values, decodes, context, pieces, prefill, longest, pairs), 0.0
