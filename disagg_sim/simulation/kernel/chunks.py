"""Compiled: caches whose chunks take blocks at the receiver one by one, as the sender computes them.

A segment whose sender is at work asks for the blocks of a chunk at the end of the step that completes it. What has been
computed and has no blocks yet waits at the sender, and gets them together. When the sender is done the segment asks for
all that it still needs to go on.
"""

from __future__ import annotations

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import COMING, PROMPTS, AdmissionRule, FleetState, SegmentStatus
from disagg_sim.simulation.kernel.progress import wake
from disagg_sim.simulation.kernel.queue import at_most, blocks_of, enqueue
from disagg_sim.simulation.kernel.runs import growth_of
from disagg_sim.simulation.kernel.sharing import take_more
from disagg_sim.simulation.kernel.submission import changed, row_of

QUEUED, RESERVED = int(SegmentStatus.QUEUED), int(SegmentStatus.RESERVED)
OUTPUT_FITS = int(AdmissionRule.OUTPUT_FITS)
FAR = 2**62


@inner
def _cached_now(st: FleetState, i: int, s: int) -> int:
    """Tokens in the cache of a segment that decodes. [token]"""
    inst, seg = st.inst[i], st.seg[s]
    cached: int = seg.cached if inst.table.drafts > 0 else seg.cached + inst.counter - seg.joined
    return cached


@inner
def _to_chunk(st: FleetState, s: int, cached: int) -> int:
    """Tokens that a segment lacks until its next chunk is complete; ``FAR`` where it sends none. [token]"""
    r = st.seg[s].feeds
    if r < 0:
        return FAR
    seg = st.seg[r]
    if seg.asked < 0 or seg.status not in (QUEUED, RESERVED):
        return FAR
    lacks: int = seg.asked + st.world[0].chunk_tokens - cached
    return lacks


@inner
def steps_to_chunk(st: FleetState, i: int, most: int) -> int:
    """Decode steps, up to ``most``, until one completes a chunk of a cache."""
    steps = most
    if st.world[0].chunk_tokens > 0:
        for j in range(st.inst[i].running_requests):
            s = st.sets[0, i, j] & 0xFFFFFFFF
            steps = min(steps, max(_to_chunk(st, s, _cached_now(st, i, s)), 1))
    return steps


@inner
def ask_for_chunks(st: FleetState, i: int, now: float) -> None:
    """Let the receivers of caches ask for blocks of what the step that ended has completed; the oldest first."""
    inst = st.inst[i]
    while True:
        first, tokens = FAR, 0
        for j in range(inst.running_requests):
            s = st.sets[0, i, j] & 0xFFFFFFFF
            cached = _cached_now(st, i, s)
            if s < first and _to_chunk(st, s, cached) <= 0:
                first, tokens = s, cached
        s = inst.first[PROMPTS]
        for _ in range(inst.admitted):
            if s < first and _to_chunk(st, s, st.seg[s].cached) <= 0:
                first, tokens = s, st.seg[s].cached
            s = st.seg[s].next
        if first == FAR:
            return
        _ask(st, st.seg[first].feeds, tokens, now)


@inner
def _ask(st: FleetState, s: int, computed: int, now: float) -> None:
    """A segment waits for the blocks of what its sender has computed."""
    seg, chunk = st.seg[s], st.world[0].chunk_tokens
    seg.asked = computed // chunk * chunk
    if seg.status != RESERVED:
        return
    row = row_of(st, s)
    seg.status = QUEUED
    enqueue(st, row, s, COMING)
    if st.inst[row].first[COMING] == s:
        wake(st, seg.instance, now)
    changed(st, seg.instance)


@inner
def take_chunk_blocks(st: FleetState, i: int, s: int) -> bool:
    """Take the blocks of the chunks that a segment has asked for, of all when its sender is done; whether it could.

    As in ``queue.blocks_to_begin``, beside those that it has.
    """
    inst, seg = st.inst[i], st.seg[s]
    tokens = seg.asked
    if seg.reserve == 1:
        tokens = seg.cached + seg.left + (1 + inst.table.drafts if seg.left == 0 else 0)
    need = blocks_of(tokens) - seg.blocks
    promise = 0
    wanted = need + growth_of(inst)
    if inst.admission == OUTPUT_FITS:
        promise = at_most(st, s) if seg.blocks == 0 else 0
        wanted = promise + inst.promised
    spare = 0 if inst.free_blocks + seg.blocks == inst.total_blocks else inst.watermark
    if wanted > inst.free_blocks - spare:
        return False
    inst.promised += promise
    take_more(st, i, need)
    seg.blocks += need
    if seg.reserve == 1:
        seg.asked = -1
    return True
