"""Compiled: what gives way where blocks lack, and where it waits then.

What was cached is computed again, but for blocks that nobody has taken until then, where the engine keeps them; or a
segment that decodes is *swapped* to the host, and comes back before all other segments with a cache (vLLM V0).
"""

from __future__ import annotations

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, COMING, PROMPTS, FleetState, SegmentStatus
from disagg_sim.simulation.kernel.queue import (
    before_of,
    blocks_of,
    by_priority,
    enqueue,
    leave_running,
    link,
    precedes,
    remove,
    unlink,
)
from disagg_sim.simulation.kernel.runs import growth_of
from disagg_sim.simulation.kernel.sharing import give_shared, take_more

QUEUED = int(SegmentStatus.QUEUED)


@inner
def insert(st: FleetState, i: int, s: int) -> None:
    """Put a segment into the prompts' queue behind those that hold blocks: none of them may wait for it."""
    inst = st.inst[i]
    link(st, i, s, inst.last_admitted if inst.admitted > 0 else -1, PROMPTS)
    inst.closed += st.seg[s].closes


@inner
def _give_back(st: FleetState, i: int, s: int, kept: int) -> None:
    """Free the blocks of a segment that is in no queue; all that was cached has to be computed again.

    Unless ``kept`` tokens stay cached: blocks are taken in the order in which they became free, the last of a
    segment first, which may not be full.
    """
    inst, seg = st.inst[i], st.seg[s]
    inst.preempted = 1
    shares = st.world[0].shared != 0
    if inst.keeps == 1 and not shares:
        seg.kept = kept
        seg.lost_from = inst.taken + inst.free_blocks + seg.blocks - kept // BLOCK_TOKENS
    seg.status = QUEUED
    seg.left += seg.cached
    inst.queued_prompt_tokens += seg.cached
    seg.cached = 0
    seg.preemptions += 1
    inst.preemptions += 1
    if shares:
        seg.reached = max(seg.reached, kept)
        give_shared(st, i, s, kept if inst.keeps == 1 else 0)
    else:
        inst.free_blocks += seg.blocks
        seg.blocks = 0


@inner
def _wait_again(st: FleetState, i: int, s: int) -> None:
    """Let a preempted segment wait: before all that have not begun, or at the place of its priority."""
    if by_priority(st.inst[i]):
        enqueue(st, i, s, PROMPTS)
        st.inst[i].closed += st.seg[s].closes
    else:
        insert(st, i, s)


@inner
def _preempt_prompt(st: FleetState, i: int, s: int, before: int) -> None:
    """Take the blocks of a prompt that is partly computed; ``before`` is the one before it in the queue."""
    inst, seg = st.inst[i], st.seg[s]
    unlink(st, i, s, before, PROMPTS)
    inst.admitted -= 1
    if inst.last_admitted == s:
        inst.last_admitted = before
    inst.closed -= seg.closes
    _give_back(st, i, s, seg.cached)
    _wait_again(st, i, s)


@inner
def _preempt_decode(st: FleetState, i: int, place: int, last_step: float) -> None:
    """Take the blocks of the segment at a place of the running set, whose last token came at ``last_step``. [s]"""
    inst = st.inst[i]
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
    if inst.swap_block_s >= 0.0:
        _swap_out(st, i, s)
        return
    kept = st.seg[s].cached
    st.seg[s].cached += 1  # its last token, which was not in the cache yet
    _give_back(st, i, s, kept)
    inst.queued_requests += 1
    inst.queued_context_tokens += st.seg[s].context
    st.seg[s].closes = 1
    _wait_again(st, i, s)


@inner
def _swap_out(st: FleetState, i: int, s: int) -> None:
    """Send the blocks of a segment to the host: it waits for room first of all that have a cache."""
    inst, seg = st.inst[i], st.seg[s]
    seg.status = QUEUED
    count_swap(st, i, s)
    inst.preempted = 1
    inst.preemptions += 1
    seg.preemptions += 1
    inst.free_blocks += seg.blocks
    seg.blocks = 0
    inst.queued_requests += 1
    inst.queued_context_tokens += seg.context
    if by_priority(inst):
        enqueue(st, i, s, COMING)
    else:
        link(st, i, s, -1, COMING)


@inner
def count_swap(st: FleetState, i: int, s: int) -> None:
    """Let the next step wait for the blocks of a segment, to the host or back."""
    inst = st.inst[i]
    inst.swapping_s += inst.swap_first_s + inst.swap_block_s * blocks_of(st.seg[s].cached)


@inner
def preempt(st: FleetState, i: int, last_step: float) -> None:
    """Take the blocks of the segment that gives way: the newest, or that of the lowest priority."""
    if by_priority(st.inst[i]):
        _preempt_lowest(st, i, last_step)
    else:
        _preempt_newest(st, i, last_step)


@inner
def _preempt_newest(st: FleetState, i: int, last_step: float) -> None:
    """Take the blocks of the segment that came last: one in prefill, else of the running set."""
    inst = st.inst[i]
    if inst.admitted > 0:
        _preempt_prompt(st, i, inst.last_admitted, before_of(st, i, inst.last_admitted, PROMPTS))
        return
    place = 0
    for j in range(1, inst.running_requests):
        s, best = st.sets[0, i, j] & 0xFFFFFFFF, st.sets[0, i, place] & 0xFFFFFFFF
        if (st.seg[s].joined, s) > (st.seg[best].joined, best):
            place = j
    _preempt_decode(st, i, place, last_step)


@inner
def _preempt_lowest(st: FleetState, i: int, last_step: float) -> None:
    """Take the blocks of the segment that is served last by priority, one in prefill or of the running set.

    No piece of it is in the step that is formed: only the first prompt asks for blocks of a further piece, since one is
    admitted where those before it end with the step, and a cache that has landed has all blocks of its prompt.
    """
    inst = st.inst[i]
    lowest, before, place = -1, -1, -1
    behind, at = -1, inst.first[PROMPTS]
    for _ in range(inst.admitted):
        if lowest < 0 or precedes(st, lowest, at):
            lowest, before = at, behind
        behind, at = at, st.seg[at].next
    for j in range(inst.running_requests):
        s = st.sets[0, i, j] & 0xFFFFFFFF
        if lowest < 0 or precedes(st, lowest, s):
            lowest, place = s, j
    if place >= 0:
        _preempt_decode(st, i, place, last_step)
    else:
        _preempt_prompt(st, i, lowest, before)


@inner
def extend_blocks(st: FleetState, i: int, s: int, piece: int) -> bool:
    """Take the blocks of the next piece of an admitted prompt; whether it was not preempted for want of them.

    Others give way, or this one itself, the last that does.
    """
    inst, seg = st.inst[i], st.seg[s]
    need = blocks_of(seg.cached + piece) - seg.blocks
    if need <= 0:
        return True
    while need + growth_of(inst) > inst.free_blocks:
        preempt(st, i, inst.last_step_s)
        if seg.blocks == 0:
            return False
    take_more(st, i, need)
    seg.blocks += need
    return True
