"""Compiled: predict when two instances finish their work, and find the split that makes both times equal.

DynaServe's global scheduler looks at what waits and runs on both instances and plays their passes forward: first come,
first served, decodes before prefill, times from the step table. Runs of equal decode steps are taken in closed form.
Outputs end where they were predicted to. Both instances start on their part of the new request at once, as if
it were two: it is the work that is balanced.

Past 400 lines: one compiled function and what it inlines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.kernel.layout import (
    BLOCK_TOKENS,
    COMING,
    IDLE,
    LANDED,
    MIXED,
    PROMPTS,
    Instance,
    Mode,
    Segment,
    SegmentStatus,
    dtype_of,
)
from disagg_sim.simulation.kernel.runs import steps_time
from disagg_sim.simulation.kernel.times import aware_prefill, step_time

SLO_AWARE = int(Mode.SLO_AWARE)
DONE, LOST, RESERVED = int(SegmentStatus.DONE), int(SegmentStatus.LOST), int(SegmentStatus.RESERVED)


class Entry:
    """A request in the book of splits."""

    tokens: int  # of the prompt [token]
    expected: int  # prompt and predicted output [token]
    split: int  # tokens that exist when the first part ends [token]
    first: int  # instances of the two parts; -1 = none
    second: int
    first_at: int  # their segments once they are there; -1 = not yet
    second_at: int


class Tally:
    """What is kept from call to call."""

    seen: int  # segments of the kernel that the book knows
    open: int  # requests in the list of those with a part that has not come to its instance


class Progress:
    """How far the plan of an instance has been played; ``..._at`` is the first row that is not done."""

    step: int  # steps so far
    run: int  # end of the rows of running ones
    run_at: int
    prompts: int  # of waiting prompts
    prompts_at: int
    decodes: int  # of waiting decodes
    decodes_at: int
    admitted: int  # prompts in prefill, of the first rows
    run_tokens: int  # cached tokens of running ones [token]
    held_tokens: int  # of prompts in prefill, in full [token]
    wait_tokens: int  # prompt tokens to compute [token]
    watch_prompt: int  # row of the part whose end is asked for; -1 = none
    watch_decode: int
    watch_end: int  # its last step; -1 = it has not begun to decode


BOOK, TALLY, PROGRESS = dtype_of(Entry), dtype_of(Tally), dtype_of(Progress)


class Known(NamedTuple):
    """What the scheduler looks at: arrays of the kernel, and its own book."""

    inst: Sequence[Instance]
    seg: Sequence[Segment]
    sets: Ints
    values: Floats
    book: Sequence[Entry]  # by request
    open: Ints  # requests with a part that has not come, the first ``tally.open``
    tally: Sequence[Tally]  # one row


class Wanted(NamedTuple):
    """A new request and the instances that may share it."""

    prompt: int  # [token]
    expected: int  # prompt and predicted output [token]
    first: int
    second: int


class Search(NamedTuple):
    """How a split is searched for."""

    rounds: int  # halvings, at most
    tolerance: float  # difference of the two times, over the later one, at which a split is good enough [1]
    least_s: float  # difference at which it is in any case [s]
    watch: bool  # whether the times are those of the new request's parts alone


class Plan(NamedTuple):
    """What an instance has to do."""

    progress: Sequence[Progress]  # one row
    prompts: Ints  # rows: tokens to compute, tokens cached before, tokens to emit after the first
    decodes: Ints  # rows: tokens cached, tokens to emit
    running: Ints  # rows, sorted: last step, tokens cached less the step at which it joined


@inner
def add_prompt(plan: Plan, left: int, cached: int, generate: int) -> None:
    """A prompt waits: tokens to compute, tokens cached before, tokens to emit after its first."""
    at = plan.progress[0]
    row = plan.prompts[at.prompts]
    row[0], row[1], row[2] = left, cached, generate
    at.prompts += 1
    at.wait_tokens += left


@inner
def add_decode(plan: Plan, cached: int, generate: int) -> None:
    """A request waits to decode: tokens cached, tokens to emit."""
    at = plan.progress[0]
    row = plan.decodes[at.decodes]
    row[0], row[1] = cached, generate
    at.decodes += 1


@inner
def add_part(plan: Plan, have: int, until: int, prompt: int, watch: bool) -> None:
    """A part of a request that is not there yet: from ``have`` to ``until`` existing tokens; maybe one to watch."""
    at = plan.progress[0]
    if have < prompt:
        if watch:
            at.watch_prompt = at.prompts
        add_prompt(plan, min(until, prompt) - have, have, max(until - prompt - 1, 0))
    else:
        if watch:
            at.watch_decode = at.decodes
        add_decode(plan, have - 1, max(until - have, 1))


@inner
def join(plan: Plan, cached: int, generate: int) -> None:
    """Start to decode; the running ones stay sorted by their last step."""
    at, running = plan.progress[0], plan.running
    end = at.step + generate
    row = at.run
    while row > at.run_at and running[row - 1, 0] > end:
        running[row, 0], running[row, 1] = running[row - 1, 0], running[row - 1, 1]
        row -= 1
    running[row, 0], running[row, 1] = end, cached - at.step
    at.run += 1
    at.run_tokens += cached


@inner
def leave(plan: Plan) -> None:
    """Those whose last step this was."""
    at, running = plan.progress[0], plan.running
    while at.run_at < at.run and running[at.run_at, 0] <= at.step:
        at.run_tokens -= running[at.run_at, 1] + at.step
        at.run_at += 1


@inner
def room(at: Progress, inst: Instance, more: int) -> bool:
    """Whether another sequence of ``more`` tokens may start; alone it always may."""
    sequences = at.run - at.run_at + at.admitted
    if sequences == 0:
        return True
    tokens = inst.total_blocks * BLOCK_TOKENS
    return bool(sequences < inst.max_sequences and at.run_tokens + at.held_tokens + more <= tokens)


@inner
def take(plan: Plan, inst: Instance, budget: int) -> tuple[int, int, int, float]:
    """Fill a pass from the waiting prompts: pieces, tokens, longest piece, query-key pairs."""
    at, prompts = plan.progress[0], plan.prompts
    pieces, total, longest, pairs = 0, 0, 0, 0.0
    first = at.prompts_at
    while first + pieces < at.prompts and total < budget:
        left, cached = prompts[first + pieces, 0], prompts[first + pieces, 1]
        if pieces >= at.admitted:
            if not room(at, inst, left + cached):
                break
            at.admitted += 1
            at.held_tokens += left + cached
        piece = min(left, budget - total)
        total += piece
        longest = max(longest, piece)
        pairs += piece * (cached + 0.5 * piece)
        pieces += 1
    return pieces, total, longest, pairs


@inner
def settle(plan: Plan, pieces: int, total: int) -> None:
    """The end of a pass: complete prompts begin to decode."""
    at = plan.progress[0]
    at.wait_tokens -= total
    for _ in range(pieces):
        row = plan.prompts[at.prompts_at]
        piece = min(row[0], total)
        total -= piece
        row[0] -= piece
        row[1] += piece
        if row[0] > 0:
            return
        if at.prompts_at == at.watch_prompt:
            at.watch_end = at.step + row[2]
        at.prompts_at += 1
        at.admitted -= 1
        at.held_tokens -= row[1]
        if row[2] > 0:
            join(plan, row[1], row[2])


@inner
def play(plan: Plan, inst: Instance, values: Floats, stop: int) -> float:
    """Time of all passes until nothing is left, the part to watch is done, or only ``stop`` prompt tokens wait. [s]"""
    at, decodes = plan.progress[0], plan.decodes
    time = 0.0
    while at.wait_tokens > stop or stop < 0:
        while at.decodes_at < at.decodes and room(at, inst, decodes[at.decodes_at, 0]):
            if at.decodes_at == at.watch_decode:
                at.watch_end = at.step + decodes[at.decodes_at, 1]
            join(plan, decodes[at.decodes_at, 0], decodes[at.decodes_at, 1])
            at.decodes_at += 1
        count = at.run - at.run_at
        context = (at.run_tokens + count) / count if count > 0 else 0.0
        pieces, total, longest, pairs = 0, 0, 0, 0.0
        if at.prompts_at < at.prompts:
            budget = max(inst.token_budget - count, 1)
            if inst.mode == SLO_AWARE:
                past = plan.prompts[at.prompts_at, 1]
                budget = aware_prefill(inst.table, values, inst, count, context, past, budget)
            pieces, total, longest, pairs = take(plan, inst, budget)
        if pieces > 0:
            time += step_time(inst.table, values, count, context, pieces, total, longest, pairs)
            at.step += 1
            at.run_tokens += count
            leave(plan)
            settle(plan, pieces, total)
        elif count > 0:
            steps = plan.running[at.run_at, 0] - at.step
            time += steps_time(inst.table, values, count, context, steps)
            at.step += steps
            at.run_tokens += count * steps
            leave(plan)
        else:
            return time
        if 0 <= at.watch_end <= at.step:
            return time
    return time


@inner
def left_of(known: Known, seg: Segment, i: int, emitted: int) -> int:
    """Tokens that a segment on an instance is still expected to emit after ``emitted`` ones. [token]"""
    entry = known.book[seg.request]
    until = entry.split if entry.first == i else entry.expected
    return until - (seg.context + seg.prompt + emitted + (1 if seg.prompt == 0 else 0))


@inner
def arriving(known: Known, i: int, s: int, plan: Plan) -> None:
    """Enter a segment that waits with its context, or for it: the rest of its prompt, or its decode."""
    seg = known.seg[s]
    left = left_of(known, seg, i, seg.emitted)
    if seg.left > 0:
        add_prompt(plan, seg.left, seg.cached, max(left - 1, 0))
    else:
        add_decode(plan, seg.context + seg.emitted, max(left, 1))


@inner
def there(known: Known, i: int, now: float, plan: Plan) -> float:
    """Enter what an instance has; the time until its step in progress ends. [s]"""
    inst, segs = known.inst[i], known.seg
    mixed = inst.run_kind == MIXED  # its step in progress counts as done
    done = 1 if mixed else 0
    keys = np.sort(known.sets[0, i, : inst.running_requests])
    for j in range(inst.running_requests):
        seg = segs[keys[j] & 0xFFFFFFFF]
        steps = inst.counter - seg.joined
        left = left_of(known, seg, i, seg.emitted + steps)
        if left != done or not mixed:  # else it ends with the step in progress
            join(plan, seg.cached + steps + done, max(left - done, 1))
    s = inst.first[COMING]
    while s >= 0:
        if segs[s].reserve < 2:
            arriving(known, i, s, plan)
        s = segs[s].next
    s = inst.first[LANDED]
    while s >= 0:
        arriving(known, i, s, plan)
        s = segs[s].next
    s = inst.first[PROMPTS]
    pieces = inst.pieces if mixed else 0
    while s >= 0:
        seg = segs[s]
        computed = seg.piece if pieces > 0 else 0
        pieces -= 1
        left, cached = seg.left - computed, seg.cached + computed
        after = max(left_of(known, seg, i, seg.emitted) - 1, 0)
        if left > 0:
            add_prompt(plan, left, cached, after)
        elif after > 0:
            add_decode(plan, cached, after)
        s = seg.next
    if inst.run_kind == IDLE:
        return 0.0
    return (inst.run_end_s if mixed else inst.run_start_s) - now


@inner
def promised(known: Known, one: Entry) -> bool:
    """Whether the second part of a request is not on its instance: unknown there, its first at work, or in transfer."""
    s = one.second_at
    if s < 0:
        return True
    there: bool = known.seg[s].reserve < 2 and known.seg[s].status != RESERVED
    return not there


@inner
def coming(known: Known, i: int, plan: Plan) -> None:
    """Enter what was promised to an instance and is not there."""
    for j in range(known.tally[0].open):
        one = known.book[known.open[j]]
        if one.first == i and one.first_at < 0:
            add_part(plan, 0, one.split, one.tokens, False)
        elif one.second == i and promised(known, one):
            add_part(plan, one.split, one.expected, one.tokens, False)


@inner
def refresh_book(known: Known, count: int) -> None:
    """Note which parts have come, and forget requests that ended before their second part."""
    tally, book, segs = known.tally[0], known.book, known.seg
    for s in range(tally.seen, count):
        one = book[segs[s].request]
        if one.first == segs[s].instance:
            one.first_at = s
        elif one.second == segs[s].instance:
            one.second_at = s
    tally.seen = count
    kept = 0
    for j in range(tally.open):
        one = book[known.open[j]]
        status = segs[one.first_at].status if one.first_at >= 0 else -1
        over = one.first_at >= 0 and (one.second < 0 or status in (DONE, LOST))
        if promised(known, one) and not over:
            known.open[kept] = known.open[j]
            kept += 1
    tally.open = kept


@entry
def choose_pair(known: Known, count: int, pairs: Ints) -> int:
    """Note what has come, then the pair with the fewest requests there or promised, the first of several."""
    refresh_book(known, count)
    load = np.zeros(len(known.inst), np.int64)
    for j in range(known.tally[0].open):
        one = known.book[known.open[j]]
        load[one.first if one.first_at < 0 else one.second] += 1
    best, fewest = 0, -1
    for k in range(pairs.shape[0]):
        total = 0
        for side in range(2):
            i = pairs[k, side]
            total += known.inst[i].queued_requests + known.inst[i].running_requests + load[i]
        if fewest < 0 or total < fewest:
            best, fewest = k, total
    return best


@inner
def copy_of(plan: Plan) -> Plan:
    """A plan to play with."""
    return Plan(plan.progress.copy(), plan.prompts.copy(), plan.decodes.copy(), plan.running.copy())  # type: ignore[attr-defined]


@inner
def gather(known: Known, i: int, now: float) -> tuple[float, Plan]:
    """All that an instance was given, and the time until it may begin."""
    inst = known.inst[i]
    most = inst.running_requests + inst.queued_requests + known.tally[0].open + 2
    progress: Any = np.zeros(1, PROGRESS)
    progress[0].watch_prompt = progress[0].watch_decode = progress[0].watch_end = -1
    rows = (np.zeros((most, 3), np.int64), np.zeros((most, 2), np.int64), np.zeros((most, 2), np.int64))
    plan = Plan(progress, rows[0], rows[1], rows[2])
    time = there(known, i, now, plan)
    coming(known, i, plan)
    return time, plan


@entry
def finish_times(known: Known, wanted: Wanted, now: float, search: Search) -> tuple[int, float, float]:
    """Bisection of the split: existing tokens at the end of the first part, and when either instance is done [s].

    From plain disaggregation, up to ``rounds`` halvings of the share of the first part, until both times differ by at
    most ``tolerance`` of the later one, or ``least_s``.
    """
    prompt, expected = wanted.prompt, wanted.expected
    one, other, values, watch = known.inst[wanted.first], known.inst[wanted.second], known.values, search.watch
    t1, plan1 = gather(known, wanted.first, now)
    t2, plan2 = gather(known, wanted.second, now)
    # prompts before the new one are the same for every split: played once, but for those that share its first pass
    t1 += play(plan1, one, values, one.token_budget)
    plan3 = copy_of(plan2)
    t3 = t2 + play(plan3, other, values, other.token_budget)
    low, high = 0.0, 1.0
    ratio = prompt / expected
    split, a, b = prompt, 0.0, 0.0
    for turn in range(search.rounds + 1):
        split = min(max(math.ceil(ratio * expected - 1e-9), 1), expected)
        plan = copy_of(plan1)
        add_part(plan, 0, split, prompt, watch)
        a = t1 + play(plan, one, values, -1)
        b = t3 if split < prompt else t2
        plan = copy_of(plan3 if split < prompt else plan2)
        if split < expected:
            add_part(plan, split, expected, prompt, watch)
        b += play(plan, other, values, -1)
        if watch and split >= expected:
            b = 0.0
        if turn == search.rounds or abs(a - b) <= max(search.tolerance * max(a, b), search.least_s):
            break
        if a > b:
            high = ratio
        else:
            low = ratio
        ratio = 0.5 * (low + high)
    return split, a, b
