"""Compiled: how an instance forms its next step, and what the end of one does.

A step is formed at the end of the one before: running segments grow by a block where they need one (the newest are
preempted when there is none), what has come with its context joins, then prompts are taken as the mode says.
"""

from __future__ import annotations

import math
from typing import Any

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import (
    ACTIVE,
    ADMITTED,
    BLOCK_TOKENS,
    BLOCKS,
    BUSY_S,
    CACHED,
    CLOSED,
    CLOSES,
    COMING_HEAD,
    COMING_TAIL,
    CONTEXT,
    COUNTER,
    DECODING,
    FREE_BLOCKS,
    GENERATE,
    HEAD,
    IDLE,
    LAST_ADMITTED,
    LAST_STEP_S,
    LATENCY_S,
    LEAVE_HEAD,
    LEAVE_S,
    LEAVE_TAIL,
    LEAVES_S,
    LEFT,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    MIXED,
    MODE,
    NEXT,
    NEXT_S,
    PASS,
    PASSES,
    PIECE,
    PIECES,
    PREFILL_PAIRS,
    PREFILL_TOKENS,
    QUEUED,
    QUEUED_CONTEXT,
    QUEUED_TOKENS,
    READY,
    RESIDUE,
    RUN_END_S,
    RUN_KIND,
    RUN_START_S,
    RUN_STEPS,
    RUNNING,
    RUNNING_TOKENS,
    START_S,
    STATUS,
    STEP_BY_STEP,
    STEP_LIMIT_S,
    TABLE,
    TAIL,
    TOKEN_BUDGET,
    Mode,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.queue import (
    append,
    complete_prompt,
    finish_complete,
    join,
    preempt_newest,
    report,
    take_blocks,
    unlink,
)
from disagg_sim.simulation.kernel.runs import count_gaps, count_run, count_steps, steps_in_memory, steps_time
from disagg_sim.simulation.kernel.times import CHUNK, HOST_AT, PIPELINE, RANKS, largest_prefill, pass_part, step_time

CHUNKED, PREFILL_FIRST, ONE_PROMPT, MANUAL, SLO_AWARE = (int(mode) for mode in Mode)
RESERVED, LEAVING = int(SegmentStatus.RESERVED), int(SegmentStatus.LEAVING)


@inner
def admit_coming(st: Any, i: int, now: float) -> None:
    """Give blocks to segments that only decode, or whose context is on the way, first in, first out."""
    s = st.ints[i, COMING_HEAD]
    while s >= 0:
        ready = st.seg[s, READY] == 1
        if ready and st.ints[i, RUNNING] + st.ints[i, ADMITTED] >= st.ints[i, MAX_SEQUENCES]:
            return
        if not take_blocks(st, i, s):
            return
        unlink(st, i, s, -1, COMING_HEAD, COMING_TAIL)
        if ready:
            st.ints[i, QUEUED] -= 1
            st.ints[i, QUEUED_CONTEXT] -= st.seg[s, CONTEXT]
            if math.isnan(st.seg_s[s, START_S]):
                st.seg_s[s, START_S] = now
            join(st, i, s)
        else:
            st.seg[s, STATUS] = RESERVED
            report(st, s)
        s = st.ints[i, COMING_HEAD]


@inner
def admit_prompt(st: Any, i: int, s: int, now: float) -> bool:
    """Take the next waiting prompt into prefill if a sequence and its blocks are free."""
    if st.ints[i, RUNNING] + st.ints[i, ADMITTED] >= st.ints[i, MAX_SEQUENCES]:
        return False
    if (st.ints[i, COMING_HEAD] >= 0 and st.seg[s, BLOCKS] == 0) or not take_blocks(st, i, s):
        return False
    st.ints[i, ADMITTED] += 1
    st.ints[i, LAST_ADMITTED] = s
    if math.isnan(st.seg_s[s, START_S]):
        st.seg_s[s, START_S] = now
    return True


@inner
def take_chunks(st: Any, i: int, now: float, head: Any) -> int:
    """Pieces of prompts beside all decodes, up to the token budget or the limit of the step; how many."""
    running = st.ints[i, RUNNING]
    budget = st.ints[i, TOKEN_BUDGET] - running
    s = st.ints[i, HEAD]
    if s < 0 or budget <= 0:
        return 0
    if st.ints[i, MODE] == SLO_AWARE:
        context = (st.ints[i, RUNNING_TOKENS] + running) / running if running > 0 else 0.0
        limit = st.floats[i, STEP_LIMIT_S]
        budget = largest_prefill(head, st.values, running, context, st.seg[s, CACHED], limit, budget)
    ranks = head[RANKS]
    most = budget if ranks == 1 else max(budget // ranks, 1)  # a prompt lives on one DP rank
    pieces = 0
    while s >= 0 and budget > 0 and pieces < st.ints[i, MAX_PROMPTS]:
        if pieces >= st.ints[i, ADMITTED] and not admit_prompt(st, i, s, now):
            break
        piece = min(st.seg[s, LEFT], budget, most)
        st.seg[s, PIECE] = piece
        budget -= piece
        pieces += 1
        s = st.seg[s, NEXT]
    return pieces


@inner
def take_prompts(st: Any, i: int, now: float) -> int:
    """Whole prompts of one pass; how many."""
    mode = st.ints[i, MODE]
    if mode == MANUAL and st.ints[i, CLOSED] == 0:
        return 0
    most = 1 if mode == ONE_PROMPT else st.ints[i, MAX_PROMPTS]
    budget = st.ints[i, TOKEN_BUDGET]
    pieces = 0
    s = st.ints[i, HEAD]
    while s >= 0 and pieces < most:
        left = st.seg[s, LEFT]
        if mode == PREFILL_FIRST and pieces > 0 and left > budget:
            break
        if pieces >= st.ints[i, ADMITTED] and not admit_prompt(st, i, s, now):
            break
        st.seg[s, PIECE] = left
        budget -= left
        pieces += 1
        if mode == MANUAL and st.seg[s, CLOSES] == 1:
            break
        s = st.seg[s, NEXT]
    return pieces


@inner
def sums_of_pieces(st: Any, i: int, pieces: int) -> tuple[int, int, float]:
    """Tokens of the first pieces of the queue, of the longest of them, and query-key pairs."""
    tokens, longest, pairs = 0, 0, 0.0
    s = st.ints[i, HEAD]
    for _ in range(pieces):
        piece = st.seg[s, PIECE]
        tokens += piece
        longest = max(longest, piece)
        pairs += piece * (st.seg[s, CACHED] + 0.5 * piece)
        s = st.seg[s, NEXT]
    return tokens, longest, pairs


@inner
def pipelined_pass(st: Any, i: int, pieces: int, head: Any) -> tuple[float, float]:
    """A pass of prompts through a pipeline: when its last token leaves, and when the next pass may start. [s]

    The prompts of each DP rank go through in as many micro-batches as there are stages, or, cut into chunks, all
    together; those that go together count as equal ones.
    """
    busy = st.values[head[HOST_AT]]
    others = 0.0
    ranks = head[RANKS]
    own = -(-pieces // ranks)
    together = pieces if head[CHUNK] > 0 else -(-own // min(head[PIPELINE], own)) * ranks
    s = st.ints[i, HEAD]
    done = 0
    while done < pieces:
        count = min(together, pieces - done)
        tokens, past = 0, 0
        for _ in range(count):
            tokens += st.seg[s, PIECE]
            past += st.seg[s, CACHED]
            s = st.seg[s, NEXT]
        slowest, rest = pass_part(head, st.values, max(count / ranks, 1.0), -(-tokens // count), past // count)
        busy += slowest
        others = max(others, rest)
        done += count
    return busy + others, busy


@inner
def only_prefill(st: Any, i: int, pieces: int) -> bool:
    """Whether nothing decodes here now, nor after the pass."""
    if st.ints[i, RUNNING] > 0:
        return False
    s = st.ints[i, HEAD]
    for _ in range(pieces):
        if st.seg[s, GENERATE] > 1:
            return False
        s = st.seg[s, NEXT]
    return True


@inner
def begin(st: Any, i: int, now: float, kind: int, duration: float) -> None:
    """Start a run of an instance."""
    st.ints[i, RUN_KIND] = kind
    st.floats[i, RUN_START_S] = now
    st.floats[i, RUN_END_S] = now + duration
    st.floats[i, NEXT_S] = min(now + duration, st.floats[i, LEAVE_S])


@inner
def form(st: Any, i: int, now: float) -> None:
    """Form the next step of an instance, or let it idle."""
    head = st.heads[st.ints[i, TABLE]]
    mode = st.ints[i, MODE]
    st.ints[i, PIECES] = 0
    if st.ints[i, ACTIVE] == 1:
        while st.ints[i, RUNNING] > 0 and (
            st.ints[i, RESIDUE + (-st.ints[i, COUNTER]) % BLOCK_TOKENS] > st.ints[i, FREE_BLOCKS]
        ):
            preempt_newest(st, i, st.floats[i, LAST_STEP_S])
        admit_coming(st, i, now)
        together = mode in (CHUNKED, SLO_AWARE)
        pieces = take_chunks(st, i, now, head) if together else take_prompts(st, i, now)
        running = st.ints[i, RUNNING]
        context = (st.ints[i, RUNNING_TOKENS] + running) / running if running > 0 else 0.0
        if pieces > 0:
            st.ints[i, PIECES] = pieces
            tokens, longest, pairs = sums_of_pieces(st, i, pieces)
            if together:
                time = step_time(head, st.values, running, context, pieces, tokens, longest, pairs)
                st.ints[i, RUN_STEPS] = 1
                begin(st, i, now, MIXED, time)
                return
            if head[PIPELINE] > 1:
                latency, time = pipelined_pass(st, i, pieces, head)
                if not only_prefill(st, i, pieces):
                    time = latency
            else:
                time = step_time(head, st.values, 0, 0.0, pieces, tokens, longest, pairs)
                latency = time
            st.floats[i, LATENCY_S] = latency
            begin(st, i, now, PASS, time)
            return
        if running > 0:
            steps = (st.sets[0, i, 0] >> 32) - st.ints[i, COUNTER]
            steps = 1 if st.world[STEP_BY_STEP] == 1 else steps_in_memory(st, i, steps)
            st.ints[i, RUN_STEPS] = steps
            begin(st, i, now, DECODING, steps_time(head, st.values, running, context, steps))
            return
    begin(st, i, now, IDLE, math.inf)


@inner
def end_pieces(st: Any, i: int, now: float, emitted: float) -> None:
    """Settle the pieces of a step: prompts that are complete emit their token at ``emitted``, maybe later."""
    pieces = st.ints[i, PIECES]
    tokens, _, pairs = sums_of_pieces(st, i, pieces)
    st.ints[i, PASSES] += 1
    st.ints[i, PREFILL_TOKENS] += tokens
    st.ints[i, QUEUED_TOKENS] -= tokens
    st.floats[i, PREFILL_PAIRS] += pairs
    before = -1
    s = st.ints[i, HEAD]
    for _ in range(pieces):
        after = st.seg[s, NEXT]
        st.seg[s, CACHED] += st.seg[s, PIECE]
        st.seg[s, LEFT] -= st.seg[s, PIECE]
        if st.seg[s, LEFT] > 0:
            before = s
        else:
            unlink(st, i, s, before, HEAD, TAIL)
            st.ints[i, QUEUED] -= 1
            st.ints[i, QUEUED_CONTEXT] -= st.seg[s, CONTEXT]
            st.ints[i, ADMITTED] -= 1
            st.ints[i, CLOSED] -= st.seg[s, CLOSES]
            if st.ints[i, LAST_ADMITTED] == s:
                st.ints[i, LAST_ADMITTED] = before
            if emitted > now:
                st.seg[s, STATUS] = LEAVING
                st.seg_s[s, LEAVES_S] = emitted
                append(st, i, s, LEAVE_HEAD, LEAVE_TAIL)
            else:
                complete_prompt(st, i, s, now)
        s = after
    st.ints[i, PIECES] = 0


@inner
def next_leaving(st: Any, i: int) -> None:
    """Note when the first segment of the pipeline's last stage leaves."""
    s = st.ints[i, LEAVE_HEAD]
    st.floats[i, LEAVE_S] = math.inf if s < 0 else st.seg_s[s, LEAVES_S]


@inner
def end_run(st: Any, i: int, now: float) -> None:
    """Settle the run of an instance that ends."""
    kind = st.ints[i, RUN_KIND]
    if kind == DECODING:
        count_run(st, i, st.ints[i, RUN_STEPS])
        finish_complete(st, i, now)
    elif kind == MIXED:
        start = st.floats[i, RUN_START_S]
        st.floats[i, BUSY_S] += now - start
        if st.ints[i, RUNNING] > 0:
            count_gaps(st, i, start, now - start)
            count_steps(st, i, st.ints[i, RUN_STEPS], now - start)
            st.floats[i, LAST_STEP_S] = now
            finish_complete(st, i, now)
        end_pieces(st, i, now, now)
    elif kind == PASS:
        start = st.floats[i, RUN_START_S]
        st.floats[i, BUSY_S] += now - start
        emitted = start + st.floats[i, LATENCY_S]
        end_pieces(st, i, now, emitted if emitted > now else now)
        next_leaving(st, i)


@inner
def settle(st: Any, i: int, now: float) -> bool:
    """What is due at an instance: segments leave its pipeline, or its run ends; whether it forms a new step now."""
    if st.floats[i, LEAVE_S] > now:
        end_run(st, i, now)
        return True
    while st.floats[i, LEAVE_S] <= now:
        s = st.ints[i, LEAVE_HEAD]
        unlink(st, i, s, -1, LEAVE_HEAD, LEAVE_TAIL)
        complete_prompt(st, i, s, now)
        next_leaving(st, i)
    st.floats[i, NEXT_S] = min(st.floats[i, RUN_END_S], st.floats[i, LEAVE_S])
    return bool(st.ints[i, RUN_KIND] == IDLE)
