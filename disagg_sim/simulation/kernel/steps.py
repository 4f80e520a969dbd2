"""Compiled: what an attention rank takes into the next step, how long its prompts take there, and their end.

Of caches whose chunks take blocks at the receiver one by one, a segment whose sender is at work asks for the blocks of
a chunk at the end of the step that completes it; when the sender is done it asks for all that it still needs.
"""

from __future__ import annotations

import math

from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.handover import admit_landed, first_with_context, next_seen, reserved
from disagg_sim.simulation.kernel.layout import AWAY, COMING, PROMPTS, AdmissionRule, FleetState, Mode, SegmentStatus
from disagg_sim.simulation.kernel.preemption import count_swap, extend_blocks, preempt
from disagg_sim.simulation.kernel.queue import (
    append,
    at_most,
    before_of,
    blocks_of,
    complete_prompt,
    enqueue,
    join,
    left_of,
    link,
    take_blocks,
    unlink,
)
from disagg_sim.simulation.kernel.ranks import begin, wake
from disagg_sim.simulation.kernel.runs import growth_of
from disagg_sim.simulation.kernel.sharing import enlist, note_begun, take_more
from disagg_sim.simulation.kernel.submission import changed, row_of
from disagg_sim.simulation.kernel.times import mixed_time, piece_time

WHOLE_PROMPT, OUTPUT_FITS = int(AdmissionRule.PROMPT), int(AdmissionRule.OUTPUT_FITS)
CHUNKED, PREFILL_FIRST, MANUAL, SLO_AWARE = (int(mode) for mode in Mode)
QUEUED, LEAVING = int(SegmentStatus.QUEUED), int(SegmentStatus.LEAVING)
RESERVED = int(SegmentStatus.RESERVED)
#: More tokens than any chunk lacks. [token]
FAR = 2**62


@inlined
def admit_transferred(st: FleetState, i: int, now: float) -> None:
    """Admit, in queue order, segments that only decode or have their context on another instance."""
    inst = st.inst[i]
    s = first_with_context(st, i)
    while s >= 0:
        swapped = st.seg[s].reserve == 0 and st.seg[s].preemptions > 0
        if swapped and inst.preempted == 1:  # nothing comes back in a step for which something went
            return
        if inst.running_requests + inst.admitted >= inst.max_sequences:
            return
        if not (take_blocks(st, i, s, 0) if st.seg[s].asked < 0 else take_chunk_blocks(st, i, s)):
            return
        if swapped:
            count_swap(st, i, s)
        unlink(st, i, s, before_of(st, i, s, COMING), COMING)
        if st.seg[s].reserve > 0:
            reserved(st, i, s)
        else:
            inst.queued_requests -= 1
            inst.queued_context_tokens -= st.seg[s].context
            if math.isnan(st.seg[s].start_s):
                st.seg[s].start_s = now
            if st.world[0].shared != 0:
                enlist(st, i, s, st.seg[s].cached)
            join(st, i, s)
        s = first_with_context(st, i)


@inlined
def may_admit(st: FleetState, i: int, s: int) -> bool:
    """Whether a waiting prompt was there as the step was formed, a sequence slot is free, and no other comes first."""
    inst = st.inst[i]
    if inst.running_requests + inst.admitted >= inst.max_sequences or st.seg[s].there_s > inst.seen_s:
        return False
    if inst.preempted == 1 and inst.admission != WHOLE_PROMPT:
        return False
    first = first_with_context(st, i)
    before = first >= 0 and st.seg[first].reserve < 2 and st.seg[s].priority <= st.seg[first].priority
    return not before


@inlined
def admit_prompt(st: FleetState, i: int, s: int, now: float, piece: int) -> bool:
    """Start prefill of at most ``piece`` tokens of the next prompt, if a sequence slot and blocks are free."""
    inst, seg = st.inst[i], st.seg[s]
    if not may_admit(st, i, s) or not take_blocks(st, i, s, piece):
        return False
    last = inst.last_admitted if inst.admitted > 0 else -1
    if (inst.first[PROMPTS] if last < 0 else st.seg[last].next) != s:  # newcomers stand before it
        unlink(st, i, s, before_of(st, i, s, PROMPTS), PROMPTS)
        link(st, i, s, last, PROMPTS)
    inst.admitted += 1
    inst.last_admitted = s
    if math.isnan(seg.start_s):
        seg.start_s = now
        if st.world[0].shared != 0:
            note_begun(st, s)
    return True


@inlined
def set_piece(st: FleetState, i: int, s: int, piece: int) -> None:
    """Set how many tokens of a prompt a step computes, in blocks already allocated."""
    seg = st.seg[s]
    seg.piece = piece
    if st.world[0].shared != 0 and st.inst[i].late == 0:
        enlist(st, i, s, seg.cached + piece)


@inlined
def take_chunks(st: FleetState, i: int, now: float, budget: int) -> int:
    """Add chunks of prompts, up to ``budget`` tokens in total, to a step of all decodes; return their number."""
    inst = st.inst[i]
    s = inst.first[PROMPTS]
    pieces = 0
    while s >= 0 and budget > 0 and pieces < inst.max_prompts:
        if pieces >= inst.admitted:
            s = next_seen(st, i, s)
            if not admit_prompt(st, i, s, now, budget):
                break
        elif inst.admission != WHOLE_PROMPT and not extend_blocks(st, i, s, min(st.seg[s].left, budget)):
            break
        piece = min(st.seg[s].left, budget)
        set_piece(st, i, s, piece)
        budget -= piece
        pieces += 1
        s = st.seg[s].next
    return pieces


@inner
def take_prompts(st: FleetState, i: int, now: float) -> int:
    """Put whole prompts into one pass; return their number."""
    inst = st.inst[i]
    mode = inst.mode
    if mode == MANUAL and inst.closed == 0:
        return 0
    budget = inst.token_budget
    pieces = 0
    s = inst.first[PROMPTS]
    while s >= 0 and pieces < inst.max_prompts:
        if pieces >= inst.admitted:
            s = next_seen(st, i, s)
        left = st.seg[s].left if pieces < inst.admitted else left_of(st, s)
        if mode == PREFILL_FIRST and pieces > 0 and left > budget:
            break
        if pieces >= inst.admitted:
            if not admit_prompt(st, i, s, now, left):
                break
            left = st.seg[s].left
        elif inst.admission != WHOLE_PROMPT and not extend_blocks(st, i, s, left):
            break
        set_piece(st, i, s, left)
        budget -= left
        pieces += 1
        if mode == MANUAL and st.seg[s].closes == 1:
            break
        s = st.seg[s].next
    return pieces


@inlined
def sums_of_pieces(st: FleetState, i: int, pieces: int) -> tuple[int, float]:
    """Sum tokens and query-key pairs of the first pieces of the queue."""
    tokens, pairs = 0, 0.0
    s = st.inst[i].first[PROMPTS]
    for _ in range(pieces):
        piece = st.seg[s].piece
        tokens += piece
        pairs += piece * (st.seg[s].cached + 0.5 * piece)
        s = st.seg[s].next
    return tokens, pairs


@inner
def pieces_time(st: FleetState, i: int, pieces: int, micro: int, pairs: float) -> float:
    """Time scores and values of the first pieces of the queue, each with its own length and past. [s]

    Each piece is timed as its share of a batch of copies of it that has the query-key ``pairs`` of all pieces. The sum
    is at least the time of the piece with the most pairs alone.
    """
    head, values = st.inst[i].table, st.values
    total, most, longest = 0.0, 0.0, -1
    s = st.inst[i].first[PROMPTS]
    for _ in range(pieces):
        seg = st.seg[s]
        own = seg.piece * (seg.cached + 0.5 * seg.piece)
        if own > most:
            most, longest = own, s
        alike = max(pairs / own, 1.0)
        total += piece_time(head, values, micro, alike, float(seg.piece), float(seg.cached))
        s = seg.next
    if pieces == 1:
        return total
    seg = st.seg[longest]
    return max(total, piece_time(head, values, micro, 1.0, float(seg.piece), float(seg.cached)))


@inlined
def pieces_step(st: FleetState, i: int, pieces: int, running: int, context: float) -> float:
    """Time a step of running segments (at their mean context) and the first pieces of the queue. [s]"""
    head = st.inst[i].table
    tokens, pairs = sums_of_pieces(st, i, pieces)
    micro = min(head.pipeline, max(running, 1))
    attention = pieces_time(st, i, pieces, micro, pairs)
    return mixed_time(head, st.values, running, context, tokens, tokens, attention)


@inner
def only_prefill(st: FleetState, i: int, pieces: int) -> bool:
    """Whether nothing decodes on the instance now or after the pass."""
    inst = st.inst[i]
    if inst.running_requests > 0:
        return False
    s = inst.first[PROMPTS]
    for _ in range(pieces):
        if st.seg[s].generate - st.seg[s].emitted > 1:
            return False
        s = st.seg[s].next
    return True


@inlined
def make_room(st: FleetState, i: int, now: float) -> None:
    """Give running segments the blocks that they need, then admit segments whose context has arrived."""
    inst = st.inst[i]
    while inst.running_requests > 0 and growth_of(inst) > inst.free_blocks:
        preempt(st, i, inst.last_step_s)
    admit_landed(st, i, now)
    admit_transferred(st, i, now)


@inlined
def begin_one(st: FleetState, i: int, now: float, kind: int, time: float) -> None:
    """Begin one step or pass, which takes ``time`` [s] and waits for blocks that are swapped."""
    inst = st.inst[i]
    inst.run_steps = 1
    begin(st, i, now, kind, time + inst.swapping_s)
    inst.swapping_s = 0.0


@inlined
def end_pieces(st: FleetState, i: int, now: float, emitted: float) -> None:
    """Settle the pieces of a step; complete prompts emit their token at ``emitted``, which may be after ``now``."""
    inst = st.inst[i]
    pieces = inst.pieces
    tokens, pairs = sums_of_pieces(st, i, pieces)
    inst.prefill_tokens += tokens
    inst.queued_prompt_tokens -= tokens
    inst.prefill_pairs += pairs
    before = -1
    s = inst.first[PROMPTS]
    for _ in range(pieces):
        after = st.seg[s].next
        st.seg[s].cached += st.seg[s].piece
        st.seg[s].left -= st.seg[s].piece
        if inst.late == 1 and st.world[0].shared != 0:
            enlist(st, i, s, st.seg[s].cached)
        if st.seg[s].left > 0:
            before = s
        else:
            unlink(st, i, s, before, PROMPTS)
            inst.queued_requests -= 1
            inst.queued_context_tokens -= st.seg[s].context
            inst.admitted -= 1
            inst.closed -= st.seg[s].closes
            if inst.last_admitted == s:
                inst.last_admitted = before
            if emitted > now:
                st.seg[s].status = LEAVING
                st.seg[s].leaves_s = emitted
                append(st, i, s, AWAY)
            else:
                complete_prompt(st, i, s, now)
        s = after
    inst.pieces = 0


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
        wake(st, seg.instance, now, False)
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
