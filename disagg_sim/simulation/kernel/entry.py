"""Compiled entry points of the kernel; ``Fleet`` is their Python interface.

Only ``run_until`` forms steps. Other calls change a queue and wake the instance: an idle instance gets an event at
once, a run of decode steps ends with the current step. ``home`` has the addresses of all arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.kernel.addresses import feed_at, next_due, state_at
from disagg_sim.simulation.kernel.compiled import entry, inlined, inner
from disagg_sim.simulation.kernel.handover import cancel, recompute, sender_done
from disagg_sim.simulation.kernel.layout import (
    COMING,
    FED,
    IN,
    NOT_HANDED,
    OUT,
    PROMPTS,
    FleetState,
    SegmentStatus,
    TableRecord,
)
from disagg_sim.simulation.kernel.links import Links, give_place, links_at, next_end, share
from disagg_sim.simulation.kernel.links import changed as changed_ends
from disagg_sim.simulation.kernel.lockstep import form, settle
from disagg_sim.simulation.kernel.queue import before_of, check_drained, count_departure, release, unlink
from disagg_sim.simulation.kernel.ranking import first_up_to, least_of, set_key
from disagg_sim.simulation.kernel.ranks import choose_rank, count_run, due_s, uncounted, wake
from disagg_sim.simulation.kernel.submission import (
    ASKED_FOR,
    NO_ROOM,
    Moving,
    arrive,
    asked,
    begin,
    changed,
    hand_over_to,
    noted,
    place_next,
    row_of,
    start_next_leg,
    submitted,
)
from disagg_sim.simulation.kernel.times import largest_prefill, pass_part, step_time

QUEUED, DONE, WITHDRAWN = int(SegmentStatus.QUEUED), int(SegmentStatus.DONE), int(SegmentStatus.WITHDRAWN)
RESERVED = int(SegmentStatus.RESERVED)

#: Reports of ``run_until``: a request of the feed arrives that Python must place; arrays of segments, transfers or
#: requests must grow; the last byte of a transfer has arrived (less the number of the transfer).
COMES, ROOM, ARRIVES = -(2**62), -(2**62) + 1, -(2**61)

#: Actions of ``control``: free kept blocks, withdraw a segment, apply new limits; for segments with their context
#: elsewhere: cancel, the sender is done, recompute the context here.
RELEASE, WITHDRAW, WAKE, CANCEL, SENDER_DONE, RECOMPUTE = range(6)

#: Actions of ``look_up``: time of a step, time of a pipelined pass, most prefill tokens within a limit.
STEP_TIME, PASS_TIME, LARGEST_PREFILL = range(3)


@inlined
def _next_report(st: FleetState, links: Links) -> int:
    """Start pending hand-overs; return the next report: a segment, an instance or ``ROOM``; -1 = none."""
    inst, seg, here = st.inst, st.seg, st.world[0]
    while here.pending_head >= 0:
        s = here.pending_head
        after = seg[s].next
        if seg[s].handed == FED:
            became = start_next_leg(st, links, feed_at(here.feed), s, here.now_s)
            if became == NO_ROOM:
                return ROOM
            if became == ASKED_FOR:
                seg[s].handed = NOT_HANDED
        here.pending_head = after
        if seg[s].handed >= 0 and seg[s].status == RESERVED:
            begin(st, links, seg[s].handed, here.now_s)
        elif seg[s].handed != FED:
            return s
    if here.pending_events > 0:
        for i in range(here.instances):
            if inst[i].draining == 2:
                inst[i].draining = inst[i].active = 0
                here.pending_events -= 1
                return -2 - i
            if inst[i].stalled == 1:
                inst[i].stalled = 0
                here.pending_events -= 1
                return -2 - here.instances - i
    return -1


@inlined
def _step(st: FleetState, i: int, now: float) -> None:
    """End the current run of an instance and begin the next."""
    st.world[0].now_s = now
    if settle(st, i, now):
        form(st, i, now)
    check_drained(st, i)
    changed(st, i)


@entry
def run_until(home: Ints, limit: float) -> tuple[int, float]:
    """Process events in order of time, up to ``limit`` or the first report.

    Events at one time: instances, starts and ends of transfers, requests of the feed, then new rates of links. At
    ``limit`` itself rates do not change yet.
    """
    st = state_at(home)
    here = st.world[0]
    links = links_at(here.network)
    here.soonest_s = -math.inf
    while True:
        if here.pending_head >= 0 or here.pending_events > 0:
            report = _next_report(st, links)
            if report != -1:
                return report, here.now_s
        end = links.transfers[links.heap[0]].end_s if links.head[0].moving > 0 else math.inf
        step, due, share_s = st.soon[1], next_due(here.feed), links.head[0].share_s
        now = min(step, end, due, share_s)
        if now > limit or now == math.inf or (now == limit and min(step, end, due) > limit):
            here.soonest_s = now
            return -1, limit
        if step == now:
            _step(st, least_of(st.soon), now)
        elif end == now:
            here.now_s = now
            k = next_end(links, now)
            if k >= 0 and arrive(st, links, k, now):
                return ARRIVES - k, now
        elif due == now:
            if due == -math.inf:
                return ROOM, here.now_s
            if due == limit or not place_next(st, feed_at(here.feed), due):
                return COMES, due
        else:
            share(links, now)


@entry
def submit(
    home: Ints, s: int, wanted: tuple[int, int, int, int, int, int, int], last_token_s: float, now: float
) -> int:
    """Queue segment ``s``: instance, request, context, prompt, output, cached tokens, flags; return 0 or an error."""
    return submitted(state_at(home), s, wanted, last_token_s, now)


@inner
def _withdraw(st: FleetState, s: int, row: int) -> bool:
    """Take a waiting segment without blocks out of its queue; return whether it was."""
    inst, one = st.inst[row], st.seg[s]
    if one.status != QUEUED or one.blocks > 0 or not math.isnan(one.start_s):
        return False
    queue = COMING if one.left == 0 else PROMPTS
    before = before_of(st, row, s, queue)
    unlink(st, row, s, before, queue)
    if queue == PROMPTS and one.closes == 1:
        inst.closed -= 1
        if before >= 0 and st.seg[before].closes == 0:
            st.seg[before].closes = 1
            inst.closed += 1
    inst.queued_requests -= 1
    inst.queued_prompt_tokens -= one.left - one.expected
    inst.queued_context_tokens -= one.context
    one.status = WITHDRAWN
    count_departure(st, row, s)
    return True


@entry
def refresh(home: Ints, only: int, now: float) -> None:
    """Count decode steps that have ended by ``now``, of all instances (``only`` = -1) or of one."""
    st = state_at(home)
    later = np.nextafter(now, math.inf)
    i = first_up_to(st.due, now) if only < 0 else only
    while i >= 0:
        steps = uncounted(st, i, now)
        if steps > 0:
            count_run(st, i, steps)
            changed(st, i)
        set_key(st.due, i, max(due_s(st, i), later))
        i = first_up_to(st.due, now) if only < 0 else -1


@entry
def control(home: Ints, action: int, s: int, i: int, now: float) -> bool:
    """Run one of the rare actions by its number; return whether it was done."""
    st, done = state_at(home), True
    row = row_of(st, s) if action != WAKE else i
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
        recompute(st, row, s, now)
    if done:
        wake(st, i, now, False)
    check_drained(st, i)
    changed(st, i)
    return done


@entry
def expect(home: Ints, i: int, requests: int, tokens: int) -> None:
    """Count prompts whose cached tokens an instance loads, or stops loading: see ``Fleet.expect``."""
    st = state_at(home)
    st.inst[i].loading_requests += requests
    st.inst[i].loading_prompt_tokens += tokens
    changed(st, i)


@entry
def hand_over(home: Ints, held: int, s: int, now: float) -> None:
    """Note that the cache of a kept segment has arrived in the blocks of ``s``; free the blocks of the sender."""
    hand_over_to(state_at(home), held, s, now)


@entry
def ask(
    home: Ints, s: int, wanted: tuple[int, int, int, int, int, int, int], last_token_s: float, cache: Moving, now: float
) -> int:
    """Queue segment ``s``, which pulls its cache as soon as it has blocks; return 0 or an error."""
    st = state_at(home)
    return asked(st, links_at(st.world[0].network), s, wanted, last_token_s, cache, now)


@entry
def move(home: Ints, receiver: int, cache: Moving, now: float) -> int:
    """Begin a transfer to an instance and report its end; return its number, -1 = arrays are full."""
    st = state_at(home)
    links = links_at(st.world[0].network)
    if links.head[0].free < 0:
        return -1
    k = noted(links, receiver, cache, now)
    links.transfers[k].told = 1
    begin(st, links, k, now)
    st.world[0].soonest_s = -math.inf
    return k


@entry
def limit_link(home: Ints, i: int, bandwidth: float, now: float) -> None:
    """Change the bandwidth of the links of an instance. [B/s]"""
    st = state_at(home)
    links = links_at(st.world[0].network)
    links.ports[4 * i + OUT].bandwidth = links.ports[4 * i + IN].bandwidth = bandwidth
    changed_ends(links, i, i, now)
    st.world[0].soonest_s = -math.inf


@entry
def drop(home: Ints, k: int) -> None:
    """Drop the hand-over of a waiting segment."""
    st = state_at(home)
    links = links_at(st.world[0].network)
    st.seg[links.transfers[k].segment].handed = NOT_HANDED
    links.head[0].waiting -= 1
    give_place(links, k)


@entry
def next_rank(home: Ints, i: int) -> int:
    """Find the rank of an instance that takes the next request."""
    return choose_rank(state_at(home), i)


@entry
def waiting(home: Ints, i: int, found: Ints) -> int:
    """Fill in the waiting segments of an instance with nothing computed; return their number."""
    st, count = state_at(home), 0
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
    table: Sequence[TableRecord], values: Floats, action: int, step: tuple[int, float, int, int, float, float]
) -> tuple[float, float]:
    """Look up a value in a step table, by the number of the action.

    ``step``: decodes (of a pass: tokens of a chunk), their mean context; prefill pieces, their tokens, their cached
    tokens; a limit [s].
    """
    head = table[0]
    decodes, context, pieces, prefill, past, limit = step
    if action == PASS_TIME:
        return pass_part(head, values, decodes, float(pieces), prefill, int(past), limit)
    if action == LARGEST_PREFILL:
        return float(largest_prefill(head, values, decodes, context, int(past), limit, prefill)), 0.0
    longest = -(-prefill // pieces)
    pairs = prefill * (past + 0.5 * prefill / pieces)
    return step_time(head, values, decodes, context, pieces, prefill, longest, pairs), 0.0
