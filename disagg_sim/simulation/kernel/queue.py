"""Compiled: the queues and the running set of an instance, its KV blocks, and the end of a segment.

An instance has two queues. Prompts wait first in, first out, or by priority; the first ``admitted`` of them hold blocks
and are partly prefilled. Segments that only decode wait in a queue of their own that comes first. The running set is a
binary heap of ``counter at the finish * 2**32 + segment``.
"""

from __future__ import annotations

import math

from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.layout import (
    AWAY,
    BLOCK_TOKENS,
    COMING,
    PROMPTS,
    AdmissionRule,
    FleetState,
    InstanceRecord,
    Mode,
    Scheduling,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.runs import growth_of, itl_bin, own_growth, steps_to_end
from disagg_sim.simulation.kernel.sharing import begin_shared, blocks_of_others, found_of, give_shared

RUNNING, HELD, DONE = (int(status) for status in (SegmentStatus.RUNNING, SegmentStatus.HELD, SegmentStatus.DONE))

MANUAL, PRIORITY = int(Mode.MANUAL), int(Scheduling.PRIORITY)
PROMPT, FIRST_CHUNK, PROMPT_FITS, OUTPUT_FITS = (int(admission) for admission in AdmissionRule)


@inlined
def link(st: FleetState, i: int, s: int, before: int, queue: int) -> None:
    """Put a segment into a queue of an instance behind ``before``; -1 = it is the first."""
    inst = st.inst[i]
    after = inst.first[queue] if before < 0 else st.seg[before].next
    st.seg[s].next = after
    if before < 0:
        inst.first[queue] = s
    else:
        st.seg[before].next = s
    if after < 0:
        inst.last[queue] = s


@inlined
def append(st: FleetState, i: int, s: int, queue: int) -> None:
    """Put a segment last in a queue of an instance."""
    link(st, i, s, st.inst[i].last[queue], queue)


@inner
def by_priority(inst: InstanceRecord) -> bool:
    """Whether an instance serves what waits by priority; batches of a policy keep their order."""
    return inst.scheduling == PRIORITY and inst.mode != MANUAL


@inner
def precedes(st: FleetState, s: int, other: int) -> bool:
    """Whether a segment is served before another by priority; of equal ones the first that came."""
    own, its = st.seg[s].priority, st.seg[other].priority
    return own > its or (own == its and s < other)


@inlined
def enqueue(st: FleetState, i: int, s: int, queue: int) -> None:
    """Let a segment wait in a queue: last, or at the place of its priority, behind the prompts that hold blocks."""
    inst = st.inst[i]
    before = inst.last[queue]
    if by_priority(inst):
        held = inst.last_admitted if queue == PROMPTS and inst.admitted > 0 else -1
        if before != held and precedes(st, s, before):
            before, at = held, inst.first[queue] if held < 0 else st.seg[held].next
            while precedes(st, at, s):
                before, at = at, st.seg[at].next
    link(st, i, s, before, queue)


@inner
def before_of(st: FleetState, i: int, s: int, queue: int) -> int:
    """The segment before another in a queue; -1 = it is the first."""
    before, at = -1, st.inst[i].first[queue]
    while at != s:
        before, at = at, st.seg[at].next
    return int(before)


@inlined
def unlink(st: FleetState, i: int, s: int, before: int, queue: int) -> None:
    """Take a segment out of a queue; ``before`` is the one before it, -1 = it is the first."""
    seg = st.seg[s]
    inst, after = st.inst[i], seg.next
    if before < 0:
        inst.first[queue] = after
    else:
        st.seg[before].next = after
    if inst.last[queue] == s:
        inst.last[queue] = before
    seg.next = -1


@inlined
def push(st: FleetState, i: int, key: int) -> None:
    """Add a key to the running set, which holds RUNNING keys so far."""
    inst = st.inst[i]
    place = inst.running_requests
    while place > 0:
        parent = (place - 1) // 2
        if st.sets[0, i, parent] <= key:
            break
        st.sets[0, i, place] = st.sets[0, i, parent]
        place = parent
    st.sets[0, i, place] = key
    inst.running_requests += 1


@inlined
def remove(st: FleetState, i: int, place: int) -> None:
    """Take the key at a place out of the running set."""
    inst = st.inst[i]
    count = inst.running_requests - 1
    inst.running_requests = count
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


@inlined
def report(st: FleetState, s: int) -> None:
    """Queue a segment for ``run_until`` to return."""
    st.seg[s].next = -1
    if st.world[0].pending_head < 0:
        st.world[0].pending_head = s
    else:
        st.seg[st.world[0].pending_tail].next = s
    st.world[0].pending_tail = s


@inlined
def check_drained(st: FleetState, i: int) -> None:
    """Mark a draining instance that holds nothing any more for ``run_until`` to report."""
    inst = st.inst[i]
    if inst.draining != 1:
        return
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        if (
            rank.running_requests > 0
            or rank.queued_requests > 0
            or rank.first[COMING] >= 0
            or rank.first[AWAY] >= 0
            or rank.free_blocks < rank.total_blocks
        ):
            return
    inst.draining = 2
    st.world[0].pending_events += 1
    st.world[0].soonest_s = -math.inf


@inner
def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens. [block]"""
    return -(-tokens // BLOCK_TOKENS)


@inner
def at_most(st: FleetState, s: int) -> int:
    """Blocks that a segment holds with its last token. [block]"""
    seg = st.seg[s]
    drafts = st.inst[seg.instance].table.drafts
    return blocks_of(most_tokens(seg.context, seg.prompt, seg.generate, drafts))


@inner
def most_tokens(context: int, prompt: int, generate: int, drafts: int) -> int:
    """Places of the cache that a segment takes in its last step, in which no draft may be accepted. [token]"""
    if prompt == 0:
        return context + generate + drafts
    return context + prompt + (generate - 1 + drafts if generate > 1 else 0)


@inner
def _close_up(st: FleetState, i: int, s: int, blocks: int) -> None:
    """A preempted segment takes back so many of its blocks: blocks freed later move up and are overwritten sooner."""
    at = st.inst[i].first[PROMPTS]
    while at >= 0:
        other = st.seg[at]
        if other.kept > 0 and other.lost_from > st.seg[s].lost_from:
            other.lost_from -= blocks
        at = other.next


@inlined
def to_find(st: FleetState, i: int, s: int) -> tuple[int, int]:
    """Tokens of a waiting segment that need no prefill if it begins now, and how many lie in blocks that it shares.

    Of a preempted one, those whose blocks nobody has taken since; at least one is computed again. [token], [token]
    """
    seg = st.seg[s]
    if st.world[0].shared != 0:
        return found_of(st, s)
    if seg.kept == 0:
        return 0, 0
    blocks = seg.kept // BLOCK_TOKENS - max(st.inst[i].taken - seg.lost_from, 0)
    return min(max(blocks, 0) * BLOCK_TOKENS, seg.left - 1), 0


@inlined
def past_of(st: FleetState, s: int) -> int:
    """Tokens before the next piece of a prompt; one that still waits may share some of them. [token]"""
    seg = st.seg[s]
    past: int = seg.cached
    return found_of(st, s)[0] if st.world[0].shared != 0 and past == 0 else past


@inlined
def left_of(st: FleetState, s: int) -> int:
    """Tokens of a prompt that a step computes if it takes all of it. [token]"""
    seg = st.seg[s]
    left: int = seg.left
    return left - found_of(st, s)[0] if st.world[0].shared != 0 else left


@inlined
def blocks_to_begin(st: FleetState, i: int, s: int, piece: int, found: tuple[int, int]) -> int:
    """Blocks that a segment takes to begin; -1 where there is no room. ``found``: the result of ``to_find``.

    ``piece``: most tokens of it in the next step. The watermark stays free unless the instance holds nothing else, so
    that running segments can grow. One whose context comes from elsewhere takes all its blocks, with that of its next
    token. Blocks that others hold need no room.
    """
    inst, seg = st.inst[i], st.seg[s]
    admission = inst.admission
    tokens = seg.cached + seg.left
    ahead: int = 1 + inst.table.drafts  # tokens of a step
    if seg.reserve > 0 and seg.left == 0:
        tokens += ahead
    whole = blocks_of(tokens)
    need = whole
    if admission != PROMPT and seg.left > 0 and seg.reserve == 0:
        need = blocks_of(min(seg.cached + found[0] + piece, tokens))
    free = inst.free_blocks
    growth = growth_of(inst)
    if seg.reserve == 0 and seg.left == 0:
        growth += blocks_of(tokens + ahead) - whole
    wanted = (need if admission == FIRST_CHUNK else whole) + growth
    if admission == OUTPUT_FITS:
        wanted = at_most(st, s) + inst.promised
    if found[1] > 0:
        wanted -= blocks_of_others(st, s, found[1])
    spare = 0 if whole == 0 or free == inst.total_blocks else inst.watermark
    return -1 if wanted > free - spare else need


@inlined
def take_blocks(st: FleetState, i: int, s: int, piece: int) -> bool:
    """Take the blocks that a segment needs to begin (``blocks_to_begin``); return whether there were enough."""
    inst, seg = st.inst[i], st.seg[s]
    admission = inst.admission
    there = to_find(st, i, s)
    found = there[0]
    need = blocks_to_begin(st, i, s, piece, there)
    if need < 0:
        return False
    if st.world[0].shared != 0:
        begin_shared(st, i, s, need, there[1])
        seg.hit += max(min(found, seg.context + seg.prompt) - seg.reached, 0)
    else:
        inst.free_blocks -= need
        inst.taken += need - found // BLOCK_TOKENS
        if found > 0 and by_priority(inst):
            _close_up(st, i, s, found // BLOCK_TOKENS)
    if admission == OUTPUT_FITS:
        inst.promised += at_most(st, s) - need
    seg.blocks = need
    seg.cached += found
    seg.left -= found
    inst.queued_prompt_tokens -= found - seg.expected
    seg.kept = seg.expected = 0
    return True


@inlined
def count_departure(st: FleetState, i: int, s: int) -> None:
    """Count a segment no longer among those that were given to a rank."""
    st.inst[i].requests -= 1
    st.inst[i].request_tokens -= st.seg[s].context + st.seg[s].prompt


@inlined
def release(st: FleetState, i: int, s: int) -> None:
    """Free all blocks of a segment: they are the last to be taken again."""
    if st.world[0].shared != 0:
        give_shared(st, i, s, 0)
    else:
        st.inst[i].free_blocks += st.seg[s].blocks
        st.seg[s].blocks = 0


@inlined
def finish(st: FleetState, i: int, s: int, time: float) -> None:
    """End a segment that is in no queue and not running: its blocks go or are held, and Python hears of it."""
    seg = st.seg[s]
    seg.finish_s = time
    count_departure(st, i, s)
    if st.inst[i].admission == OUTPUT_FITS:  # what it was promised for drafts and did not need
        st.inst[i].promised -= at_most(st, s) - seg.blocks
    if seg.hold == 1:
        seg.status = HELD
    else:
        seg.status = DONE
        release(st, i, s)
    if seg.notify == 1:
        report(st, s)


@inlined
def join(st: FleetState, i: int, s: int) -> None:
    """Let a segment with a full cache decode from the next step on."""
    inst, seg = st.inst[i], st.seg[s]
    counter = inst.counter
    seg.status = RUNNING
    seg.joined = counter
    seg.late_from = inst.late_steps
    st.sets[1, i, inst.groups] = s
    inst.groups += 1
    inst.running_tokens += seg.cached
    if inst.table.drafts > 0:
        inst.growing += own_growth(inst, seg)
        push(st, i, ((counter + steps_to_end(st, i, s)) << 32) | s)
        return
    inst.residue[(seg.cached - counter) % BLOCK_TOKENS] += 1
    push(st, i, ((counter + seg.generate - seg.emitted) << 32) | s)


@inlined
def leave_running(st: FleetState, i: int, s: int) -> None:
    """Settle cache and blocks of a segment that was just taken out of the running set."""
    inst, seg = st.inst[i], st.seg[s]
    seg.late_gaps += inst.late_steps - seg.late_from
    if inst.table.drafts > 0:
        inst.growing -= own_growth(inst, seg)
        inst.running_tokens -= seg.cached
        return
    steps = inst.counter - seg.joined
    inst.residue[(seg.cached - seg.joined) % BLOCK_TOKENS] -= 1
    cached = seg.cached + steps
    inst.running_tokens -= cached
    seg.cached = cached
    seg.emitted += steps
    seg.blocks = -(-cached // BLOCK_TOKENS)


@inlined
def finish_complete(st: FleetState, i: int, time: float) -> None:
    """End all running segments that have emitted their last token."""
    inst = st.inst[i]
    while inst.running_requests > 0 and st.sets[0, i, 0] >> 32 == inst.counter:
        s = st.sets[0, i, 0] & 0xFFFFFFFF
        remove(st, i, 0)
        leave_running(st, i, s)
        finish(st, i, s, time)


@inlined
def complete_prompt(st: FleetState, i: int, s: int, time: float) -> None:
    """The prompt of a segment is in the cache: it emits a token, and ends or decodes."""
    seg = st.seg[s]
    if seg.generate > seg.emitted:
        seg.emitted += 1
        st.inst[i].first_tokens += 1
        if math.isnan(seg.first_token_s):
            seg.first_token_s = time
        if not math.isnan(seg.last_s):
            st.itl[0, itl_bin(time - seg.last_s)] += 1
            seg.late_gaps += time - seg.last_s > st.world[0].gap_limit_s
        seg.last_s = time
    if seg.emitted >= seg.generate:
        finish(st, i, s, time)
    else:
        join(st, i, s)
