"""Compiled: what gives way where blocks lack, and where it waits then.

The segment that came last gives way: its blocks become free, and it waits before all that have not begun. What was
cached is computed again, but for blocks that nobody has taken until then, where the engine keeps them.
"""

from __future__ import annotations

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, PROMPTS, Admission, SegmentStatus, State
from disagg_sim.simulation.kernel.queue import blocks_of, leave_running, remove

QUEUED, OUTPUT_FITS = int(SegmentStatus.QUEUED), int(Admission.OUTPUT_FITS)


@inner
def requeue(st: State, i: int, s: int, kept: int) -> None:
    """Put a preempted segment behind the admitted ones; all that was cached has to be computed again.

    Unless ``kept`` tokens stay cached: blocks are taken in the order in which they became free, the last of a
    segment first, which may not be full.
    """
    inst, seg = st.inst[i], st.seg[s]
    inst.preempted = 1
    if inst.keeps == 1:
        seg.kept = kept
        seg.lost_from = inst.taken + inst.free_blocks + seg.blocks - kept // BLOCK_TOKENS
    seg.status = QUEUED
    seg.left += seg.cached
    inst.queued_prompt_tokens += seg.cached
    seg.cached = 0
    seg.preemptions += 1
    inst.preemptions += 1
    inst.free_blocks += seg.blocks
    seg.blocks = 0


@inner
def insert(st: State, i: int, s: int) -> None:
    """Put a segment into the prompts' queue behind those that hold blocks: none of them may wait for it."""
    inst, seg = st.inst[i], st.seg[s]
    before = inst.last_admitted if inst.admitted > 0 else -1
    after = inst.first[PROMPTS] if before < 0 else st.seg[before].next
    seg.next = after
    if before < 0:
        inst.first[PROMPTS] = s
    else:
        st.seg[before].next = s
    if after < 0:
        inst.last[PROMPTS] = s
    inst.closed += seg.closes


@inner
def preempt_newest(st: State, i: int, last_step: float) -> None:
    """Take the blocks of the segment that came last: one in prefill, else of the running set."""
    inst = st.inst[i]
    if inst.admitted > 0:
        s = inst.last_admitted
        before = -1
        at = inst.first[PROMPTS]
        while at != s:
            before = at
            at = st.seg[at].next
        inst.admitted -= 1
        inst.last_admitted = before
        requeue(st, i, s, st.seg[s].cached)
        return
    place = 0
    for j in range(1, inst.running_requests):
        s, best = st.sets[0, i, j] & 0xFFFFFFFF, st.sets[0, i, place] & 0xFFFFFFFF
        if (st.seg[s].joined, s) > (st.seg[best].joined, best):
            place = j
    s = st.sets[0, i, place] & 0xFFFFFFFF
    remove(st, i, place)
    fresh = st.seg[s].joined == inst.counter
    if fresh:  # no step since it joined: it still stands in the list of those that joined
        j = 0
        while st.sets[1, i, j] != s:
            j += 1
        for later in range(j + 1, inst.groups):
            st.sets[1, i, later - 1] = st.sets[1, i, later]
        inst.groups -= 1
    else:
        st.seg[s].last_s = last_step
    leave_running(st, i, s)
    kept = st.seg[s].cached
    st.seg[s].cached += 1  # its last token, which was not in the cache yet
    requeue(st, i, s, kept)
    inst.queued_requests += 1
    inst.queued_context_tokens += st.seg[s].context
    st.seg[s].closes = 1
    insert(st, i, s)


@inner
def extend_blocks(st: State, i: int, s: int, piece: int) -> bool:
    """Take the blocks of the next piece of an admitted prompt; whether it was not preempted for want of them.

    The newest segments give way, maybe this one itself.
    """
    inst, seg = st.inst[i], st.seg[s]
    need = blocks_of(seg.cached + piece) - seg.blocks
    if need <= 0:
        return True
    while need + inst.residue[(-inst.counter) % BLOCK_TOKENS] > inst.free_blocks:
        preempt_newest(st, i, inst.last_step_s)
        if seg.blocks == 0:
            return False
    inst.free_blocks -= need
    inst.taken += need
    if inst.admission == OUTPUT_FITS:
        inst.promised -= need
    seg.blocks += need
    return True
