"""Compiled entry points of the kernel; ``Fleet`` is their Python interface.

Only ``run_until`` forms steps. What comes from outside changes a queue and wakes the instance: an idle one gets an
event at once, a run of decode steps ends with the step in progress. Arrays come by their addresses, see ``home``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.kernel.handover import cancel, count, land, recompute, release, sender_done
from disagg_sim.simulation.kernel.home import feed_at, next_due, queues_at, ranking_at, state_at, whole_numbers
from disagg_sim.simulation.kernel.layout import (
    AHEAD,
    BLOCK_TOKENS,
    CLOSES,
    COMING,
    HOLD,
    LANDED,
    NOTIFY,
    PROMPTS,
    RESERVE,
    Feed,
    Mode,
    Queues,
    Scheduling,
    SegmentStatus,
    State,
    Table,
)
from disagg_sim.simulation.kernel.least import first_up_to, least_of, set_key
from disagg_sim.simulation.kernel.lockstep import form_together, settle_together
from disagg_sim.simulation.kernel.progress import due_s, uncounted, wake
from disagg_sim.simulation.kernel.queue import (
    by_priority,
    check_drained,
    enqueue,
    gone,
    most_tokens,
    remembered,
    unlink,
)
from disagg_sim.simulation.kernel.ranking import least_loaded
from disagg_sim.simulation.kernel.ranks import choose_rank, count_together, gather
from disagg_sim.simulation.kernel.runs import count_run
from disagg_sim.simulation.kernel.steps import form, settle
from disagg_sim.simulation.kernel.times import largest_prefill, pass_part, step_time

QUEUED, DONE, WITHDRAWN = int(SegmentStatus.QUEUED), int(SegmentStatus.DONE), int(SegmentStatus.WITHDRAWN)

MANUAL, PRIORITY = int(Mode.MANUAL), int(Scheduling.PRIORITY)

#: Why ``submit`` refuses: lengths that the instance can never serve; events before the time of submission.
IMPOSSIBLE, LATE = 1, 2

#: What ``run_until`` reports where a request of the feed comes that has to be looked at.
COMES = -(2**62)

#: Actions of ``control``: free held blocks, take a segment back, take notice of new limits; and of segments whose
#: context is elsewhere: nothing comes, the sender is done, compute all of it here.
RELEASE, WITHDRAW, WAKE, CANCEL, SENDER_DONE, RECOMPUTE = range(6)

#: Questions of ``look_up``: time of a step, of a pass through a pipeline, most prefill within a limit.
STEP_TIME, PASS_TIME, LARGEST_PREFILL = range(3)


@inner
def _row(st: State | Queues, s: int) -> int:
    """Where the rank of a segment has its queues and its memory."""
    row: int = st.inst[st.seg[s].instance].rank_at + st.seg[s].rank
    return row


@inner
def _changed(st: State | Queues, i: int) -> None:
    """Bring trees, log and sums over ranks up to date with an instance that may have changed."""
    if st.inst[i].ranks > 1:
        gather(st, i)
    set_key(st.soon, i, st.inst[i].next_s)
    set_key(st.due, i, due_s(st, i))
    st.log[st.world[0].changes % len(st.log)] = i
    st.world[0].changes += 1


@inner
def _close(st: Queues, i: int) -> bool:
    """Close the batch of a policy on all ranks that have a part of it; whether any may begin now."""
    inst, alone = st.inst[i], False
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        if rank.first[PROMPTS] >= 0 and st.seg[rank.last[PROMPTS]].closes == 0:
            st.seg[rank.last[PROMPTS]].closes = 1
            alone = alone or rank.closed == 0
            rank.closed += 1
    return alone


@inner
def _enqueue(st: Queues, row: int, s: int) -> bool:
    """Put a segment into the queue where it belongs; whether it is the first there, else it changes no run."""
    inst, closes = st.inst[row], st.seg[s].closes
    if st.seg[s].left == 0 or st.seg[s].reserve > 0:
        enqueue(st, row, s, COMING)
        return bool(inst.first[COMING] == s)
    enqueue(st, row, s, PROMPTS)
    first = inst.first[PROMPTS] == s or (closes == 1 and inst.closed == 0)
    inst.closed += closes
    return bool(first or (by_priority(inst) and inst.admitted > 0 and st.seg[inst.last_admitted].next == s))


@inner
def _submit(
    st: Queues, s: int, wanted: tuple[int, int, int, int, int, int, int], last_token_s: float, now: float
) -> int:
    """See ``submit``."""
    i, request, context, prompt, generate, hit, flags = wanted
    inst, seg, world = st.inst, st.seg, st.world
    if inst[i].next_s < now:
        return LATE
    if context < 0 or generate < 0 or hit < 0 or prompt < 0 or prompt + generate < 1 or hit > max(prompt - 1, 0):
        return IMPOSSIBLE
    rank = choose_rank(st, i) if inst[i].ranks > 1 else 0
    row = inst[i].rank_at + rank
    if most_tokens(context, prompt, generate, inst[row].table.drafts) > inst[row].total_blocks * BLOCK_TOKENS:
        return IMPOSSIBLE
    one = seg[s]
    one.request, one.instance, one.rank = request, i, rank
    ranked = inst[i].scheduling == PRIORITY and request < len(st.priority)
    one.priority = st.priority[request] if ranked else 0
    one.context, one.prompt, one.generate, one.hit = context, prompt, generate, hit
    one.notify, one.hold, one.closes = (flags & NOTIFY) != 0, (flags & HOLD) != 0, (flags & CLOSES) != 0
    one.reserve = ((flags & RESERVE) != 0) + ((flags & AHEAD) != 0)
    if one.reserve > 0:
        world[0].reserves = 1
    one.status, one.left, one.cached = QUEUED, prompt - hit, context + hit
    one.emitted = one.joined = one.blocks = one.preemptions = one.piece = one.kept = 0
    one.submit_s, one.last_s = now, last_token_s
    one.start_s = one.first_token_s = one.finish_s = math.nan
    inst[row].requests += 1
    inst[row].request_tokens += context + prompt
    inst[i].turn = (rank + 1) % inst[i].ranks
    if one.reserve < 2:
        count(st, row, s, 1)
    alone = _enqueue(st, row, s)
    if inst[i].ranks > 1 and one.closes == 1 and inst[i].mode == MANUAL:
        alone = _close(st, i) or alone
    if alone:
        wake(st, i, now)
    _changed(st, i)
    return 0


@inner
def _come(st: Queues, feed: Feed, now: float) -> bool:
    """The next request of the feed comes, and goes where the load is least; whether it could be placed."""
    request = feed.next
    prompt, total = (
        whole_numbers(feed.prompts_at, feed.requests)[request],
        whole_numbers(feed.totals_at, feed.requests)[request],
    )
    if total > feed.most or feed.submitted == len(st.seg):
        return False
    trees, group, present = ranking_at(feed, st.world[0].instances)
    i = least_loaded(st, trees, group, present, feed.load, prompt if feed.own_tokens == 1 else 1, now)
    generate = total - prompt if feed.whole == 1 else 1
    goes_on = feed.whole == 0 and (total > prompt + 1 or feed.kept == 1)
    flags = feed.hold if goes_on else feed.closes
    _submit(st, feed.submitted, (i, request, 0, prompt, generate, 0, flags), math.nan, now)
    feed.next += 1
    feed.submitted += 1
    return True


@entry
def run_until(home: Ints, limit: float) -> tuple[int, float]:
    """Process events up to ``limit`` in the order of time, or up to the first one to report."""
    st, queues = state_at(home), queues_at(home)
    inst, seg, here = st.inst, st.seg, st.world[0]
    here.soonest_s = -math.inf
    while True:
        if here.pending_head >= 0:
            s = here.pending_head
            here.pending_head = seg[s].next
            return s, here.now_s
        if here.notices > 0:
            for i in range(here.instances):
                if inst[i].draining == 2:
                    inst[i].draining = 0
                    inst[i].active = 0
                    here.notices -= 1
                    return -2 - i, here.now_s
                if inst[i].stalled == 1:
                    inst[i].stalled = 0
                    here.notices -= 1
                    return -2 - here.instances - i, here.now_s
        now = st.soon[1]
        due = next_due(here.feed)
        if due < now and due <= limit:
            if due == limit or not _come(queues, feed_at(here.feed), due):
                return COMES, due
            continue
        if now > limit or now == math.inf:
            here.soonest_s = min(now, due)
            return -1, limit
        first = least_of(st.soon)
        here.now_s = now
        if inst[first].ranks > 1:
            if settle_together(st, first, now):
                form_together(st, first, now)
        elif settle(st, first, now):
            form(st, first, now)
        check_drained(st, first)
        _changed(st, first)


@entry
def submit(
    home: Ints, s: int, wanted: tuple[int, int, int, int, int, int, int], last_token_s: float, now: float
) -> int:
    """Queue segment ``s``: instance, request, context, prompt, tokens to generate, tokens found, flags.

    Returns 0, or why not: ``IMPOSSIBLE``, ``LATE``.
    """
    return _submit(queues_at(home), s, wanted, last_token_s, now)


@inner
def _withdraw(st: Queues, s: int, row: int) -> bool:
    """Take a waiting segment that holds no blocks out of its queue."""
    inst, one = st.inst[row], st.seg[s]
    if one.status != QUEUED or one.blocks > 0 or not math.isnan(one.start_s):
        return False
    queue = COMING if one.left == 0 else PROMPTS
    before, at = -1, inst.first[queue]
    while at != s:
        before, at = at, st.seg[at].next
    unlink(st, row, s, before, queue)
    if queue == PROMPTS and one.closes == 1:
        inst.closed -= 1
        if before >= 0 and st.seg[before].closes == 0:
            st.seg[before].closes = 1
            inst.closed += 1
    inst.queued_requests -= 1
    inst.queued_prompt_tokens -= one.left
    inst.queued_context_tokens -= one.context
    one.status = WITHDRAWN
    gone(st, row, s)
    return True


@entry
def refresh(home: Ints, only: int, now: float) -> None:
    """Count the decode steps that have ended by ``now`` of all instances (``only`` = -1), or of one."""
    st = state_at(home)
    later = np.nextafter(now, math.inf)
    i = first_up_to(st.due, now) if only < 0 else only
    while i >= 0:
        steps = uncounted(st, i, now)
        if steps > 0:
            if st.inst[i].ranks > 1:
                count_together(st, i, steps)
            else:
                count_run(st, i, steps)
            _changed(st, i)
        set_key(st.due, i, max(due_s(st, i), later))
        i = first_up_to(st.due, now) if only < 0 else -1


@entry
def control(home: Ints, action: int, s: int, i: int, now: float) -> bool:
    """Everything that is called seldom, by its number; whether it was done."""
    st, done = queues_at(home), True
    row = _row(st, s) if action != WAKE else i
    if action == RELEASE:
        st.seg[s].status = DONE
        release(st, row, s)
    elif action == WITHDRAW:
        done = _withdraw(st, s, row)
    elif action == CANCEL:
        cancel(st, row, s)
    elif action == SENDER_DONE:
        sender_done(st, row, s)
    elif action == RECOMPUTE:
        recompute(st, row, s)
    if done:
        wake(st, i, now)
    check_drained(st, i)
    _changed(st, i)
    return done


@entry
def hand_over(home: Ints, held: int, s: int, tokens: int, now: float) -> None:
    """The cache of a held segment has landed in the blocks of segment ``s``: those of the sender are free."""
    st = queues_at(home)
    seg, inst = st.seg, st.inst
    sender, i = seg[held].instance, seg[s].instance
    seg[held].status = DONE
    release(st, _row(st, held), held)
    wake(st, sender, now)
    check_drained(st, sender)
    _changed(st, sender)
    inst[i].coming_tokens -= tokens
    row = _row(st, s)
    alone = inst[row].first[LANDED] < 0
    land(st, row, s)
    if alone:
        wake(st, i, now)
    _changed(st, i)


@entry
def coming(home: Ints, i: int, tokens: int) -> None:
    """So many tokens more are in transfer to an instance, or fewer."""
    st = queues_at(home)
    st.inst[i].coming_tokens += tokens
    _changed(st, i)


@entry
def next_rank(home: Ints, i: int) -> int:
    """The rank of an instance that would take a request now."""
    return choose_rank(queues_at(home), i)


@entry
def remembers(home: Ints, s: int) -> int:
    """Tokens at the start of a segment that its instance still has in its memory, in whole blocks. [token]"""
    return remembered(state_at(home), s)


@entry
def waiting(home: Ints, i: int, found: Ints) -> int:
    """Fill in the segments that wait in an instance's queue of prompts, none of it computed; how many there are."""
    st, count = queues_at(home), 0
    inst, seg = st.inst, st.seg
    for row in range(inst[i].rank_at, inst[i].rank_at + inst[i].ranks):
        s = inst[row].first[PROMPTS]
        while s >= 0:
            if seg[s].context == 0 and seg[s].blocks == 0 and math.isnan(seg[s].start_s):
                found[count] = s
                count += 1
            s = seg[s].next
    return count


@entry
def look_up(
    table: Sequence[Table], values: Floats, action: int, step: tuple[int, float, int, int, float, float]
) -> tuple[float, float]:
    """Look up a value in a step table, by the number of the question.

    ``step``: decodes, their mean context, pieces of prefill, its tokens, its past, and a limit [s].
    """
    head = table[0]
    decodes, context, pieces, prefill, past, limit = step
    if action == PASS_TIME:
        return pass_part(head, values, float(pieces), prefill, int(past))
    if action == LARGEST_PREFILL:
        return float(largest_prefill(head, values, decodes, context, int(past), limit, prefill)), 0.0
    longest = -(-prefill // pieces)
    pairs = prefill * (past + 0.5 * prefill / pieces)
    return step_time(head, values, decodes, context, pieces, prefill, longest, pairs), 0.0
