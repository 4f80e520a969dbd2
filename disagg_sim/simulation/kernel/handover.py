"""Compiled: segments whose context is on another instance, from the reservation of their blocks to their first step.

Such a segment waits among those that come. When it gets blocks, ``run_until`` reports it, and its cache may move. The
cache lands in these blocks: the segment decodes, or prefills the rest of its prompt, as soon as a sequence is free.
"""

from __future__ import annotations

import math

from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.layout import (
    BLOCK_TOKENS,
    COMING,
    LANDED,
    PROMPTS,
    AdmissionRule,
    FleetState,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.preemption import insert
from disagg_sim.simulation.kernel.queue import (
    at_most,
    before_of,
    blocks_of,
    count_departure,
    enqueue,
    join,
    release,
    report,
    unlink,
)
from disagg_sim.simulation.kernel.sharing import add_free, enlist, memory_of

QUEUED, WITHDRAWN, RESERVED = (
    int(status) for status in (SegmentStatus.QUEUED, SegmentStatus.WITHDRAWN, SegmentStatus.RESERVED)
)
OUTPUT_FITS = int(AdmissionRule.OUTPUT_FITS)


@inlined
def count(st: FleetState, i: int, s: int, sign: int) -> None:
    """Count a segment among those that wait on its instance (1), or no longer (-1)."""
    inst, seg = st.inst[i], st.seg[s]
    inst.queued_requests += sign
    inst.queued_prompt_tokens += sign * (seg.left - seg.expected)
    inst.queued_context_tokens += sign * seg.context


@inner
def _forget_lost(st: FleetState, i: int) -> None:
    """What was overwritten of preempted segments stays lost, although blocks that were just taken are free again."""
    at, taken = st.inst[i].first[PROMPTS], st.inst[i].taken
    while at >= 0:
        seg = st.seg[at]
        if seg.kept > 0 and seg.lost_from < taken:
            seg.kept = max(seg.kept // BLOCK_TOKENS - (taken - seg.lost_from), 0) * BLOCK_TOKENS
            seg.lost_from = taken
        at = seg.next


@inner
def put_back(st: FleetState, i: int, s: int, keep: int) -> None:
    """Free the blocks of a segment that has just joined down to ``keep``: it takes them again with its first step."""
    inst, seg = st.inst[i], st.seg[s]
    over = seg.blocks - keep
    if st.world[0].shared != 0:
        add_free(st, i, memory_of(st, s), over, -1)
    elif inst.keeps == 1 and over > 0:
        _forget_lost(st, i)
    inst.free_blocks += over
    inst.taken -= over
    if inst.admission == OUTPUT_FITS:
        inst.promised += over
    seg.blocks = keep


@inner
def reserved(st: FleetState, i: int, s: int) -> None:
    """A segment, out of its queue, has the blocks for its cache: Python hears of it."""
    seg = st.seg[s]
    seg.status = RESERVED
    if seg.reserve == 1:  # one whose sender still works counts there
        count(st, i, s, -1)
    report(st, s)


@inlined
def next_seen(st: FleetState, i: int, s: int) -> int:
    """The first of a waiting segment and those behind it that was there as the step was formed; itself if none was."""
    at = s
    while at >= 0 and st.seg[at].there_s > st.inst[i].seen_s:
        at = st.seg[at].next
    return s if at < 0 else at


@inlined
def first_with_context(st: FleetState, i: int) -> int:
    """The first that waits with its context and may join or reserve: what came since the step was formed is passed."""
    s = st.inst[i].first[COMING]
    while s >= 0 and st.seg[s].reserve == 0 and st.seg[s].there_s > st.inst[i].seen_s:
        s = st.seg[s].next
    return int(s)


@inlined
def admit_landed(st: FleetState, i: int, now: float) -> None:
    """Let segments whose cache has landed decode, or prefill the rest of their prompt; in their order."""
    inst = st.inst[i]
    s = next_seen(st, i, inst.first[LANDED])
    while s >= 0 and inst.running_requests + inst.admitted < inst.max_sequences:
        seg = st.seg[s]
        if seg.there_s > inst.seen_s:
            return
        unlink(st, i, s, before_of(st, i, s, LANDED), LANDED)
        if st.world[0].shared != 0:
            enlist(st, i, s, seg.cached)
        if math.isnan(seg.start_s):
            seg.start_s = now
        if seg.left > 0:
            insert(st, i, s)
            inst.admitted += 1
            inst.last_admitted = s
        else:
            count(st, i, s, -1)
            put_back(st, i, s, blocks_of(seg.cached))
            join(st, i, s)
        s = next_seen(st, i, inst.first[LANDED])


@inner
def _leave(st: FleetState, i: int, s: int) -> None:
    """Take a segment out of the queue for reservations."""
    unlink(st, i, s, before_of(st, i, s, COMING), COMING)
    if st.seg[s].reserve == 1:
        count(st, i, s, -1)


@inner
def _give_back(st: FleetState, i: int, s: int) -> None:
    """Free what a segment has reserved of its blocks; no chunk of its cache asks for more."""
    seg = st.seg[s]
    if seg.blocks > 0 and st.inst[i].admission == OUTPUT_FITS:
        st.inst[i].promised -= at_most(st, s) - seg.blocks
    release(st, i, s)
    seg.asked = -1


@inner
def cancel(st: FleetState, i: int, s: int) -> None:
    """Nothing comes for a segment that waits for its blocks or holds them."""
    if st.seg[s].status == QUEUED:
        _leave(st, i, s)
    _give_back(st, i, s)
    count_departure(st, i, s)
    st.seg[s].status = WITHDRAWN


@inner
def sender_done(st: FleetState, i: int, s: int) -> None:
    """The sender of a segment has done its part: if it still waits for blocks, it counts among those that wait."""
    seg = st.seg[s]
    seg.reserve = 1
    if seg.status == RESERVED and seg.asked >= 0:  # it has those of its chunks so far
        seg.status = QUEUED
        enqueue(st, i, s, COMING)
    if seg.status == QUEUED:
        count(st, i, s, 1)


@inner
def recompute(st: FleetState, i: int, s: int, now: float) -> None:
    """Give up the cache for which a segment waits: all of it is computed here, as after a preemption."""
    inst, seg = st.inst[i], st.seg[s]
    _leave(st, i, s)
    _give_back(st, i, s)
    seg.left += seg.cached + (seg.left == 0)  # with the token that is not in the cache yet
    seg.reserve = seg.cached = 0
    seg.there_s = now
    seg.preemptions += 1
    inst.preemptions += 1
    count(st, i, s, 1)
    enqueue(st, i, s, PROMPTS)
    inst.closed += seg.closes
