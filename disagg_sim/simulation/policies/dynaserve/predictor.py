"""Compiled: predict when two instances finish their work, and find the split that makes both times equal.

DynaServe's global scheduler looks at what waits and runs on both instances and plays their passes forward: first come,
first served, decodes before prefill, times from the step table. Runs of equal decode steps are taken in closed form.
Outputs end where they were predicted to. Both instances start on their part of the new request at once, as if
it were two: it is the work that is balanced.
With drafts a step emits their mean accepted length for each sequence.
Attention ranks of an instance count as even: what they have is played as if all of it were in one queue.

Of each queue the first ``LOOKED`` are played; what waits behind them goes at the pace of these, so that a
prediction costs the same however long the queue is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.kernel.layout import COMING, IDLE, LANDED, MIXED, PROMPTS, InstanceRecord, Segment
from disagg_sim.simulation.policies.dynaserve.book import Known, is_pending, known_at, next_promised
from disagg_sim.simulation.policies.dynaserve.plan import (
    PROGRESS,
    InstancePlan,
    accepted_tokens,
    add_decode,
    add_part,
    add_prompt,
    copy_of,
    join,
    play,
)

#: Requests of each queue of an instance that are played one by one. [request]
LOOKED = 32


class SplitRequest(NamedTuple):
    """A new request and the instances that may share it."""

    prompt: int  # [token]
    expected: int  # prompt and predicted output [token]
    first: int
    second: int
    paces: tuple[float, float] = (1.0, 1.0)  # times of their passes over those of the step table [1]


class Search(NamedTuple):
    """How a split is searched for."""

    rounds: int  # halvings, at most
    tolerance: float  # difference of the two times, over the later one, at which a split is good enough [1]
    least_s: float  # difference at which it is in any case [s]
    watch: bool  # whether the times are those of the new request's parts alone


@inner
def left_of(known: Known, seg: Segment, i: int, emitted: int) -> int:
    """Tokens that a segment on an instance is still expected to emit after ``emitted`` ones. [token]"""
    entry = known.book[seg.request]
    until = entry.split if entry.first == i else entry.expected
    return until - (seg.context + seg.prompt + emitted + (1 if seg.prompt == 0 else 0))


@inner
def entered(plan: InstancePlan, seg: Segment) -> None:
    """Count a segment that waits as played, not as one of the rest."""
    at = plan.progress[0]
    at.rest_tokens -= seg.left
    at.rest_context -= seg.context
    at.context += seg.context


@inner
def arriving(known: Known, i: int, row: int, queue: int, plan: InstancePlan) -> None:
    """Enter those that wait with their context, or for it: the rest of their prompt, or their decode."""
    s, looked = known.inst[row].first[queue], 0
    while s >= 0 and looked < LOOKED:
        seg = known.seg[s]
        if seg.reserve < 2:
            left = left_of(known, seg, i, seg.emitted)
            if seg.left > 0:
                add_prompt(plan, seg.left, seg.cached, max(left - 1, 0))
            else:
                add_decode(plan, seg.cached, max(left, 1))
            entered(plan, seg)
        s, looked = seg.next, looked + 1


@inner
def there(known: Known, i: int, now: float, plan: InstancePlan) -> float:
    """Enter what an instance has; the time until its step in progress ends. [s]"""
    inst, at = known.inst[i], plan.progress[0]
    mixed = inst.run_kind == MIXED  # its step in progress counts as done
    at.rest_tokens, at.rest_context = inst.queued_prompt_tokens, inst.queued_context_tokens
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        on_rank(known, i, row, mixed, plan)
    if inst.run_kind == IDLE:
        return 0.0
    return (inst.run_end_s if mixed else inst.run_start_s) - now


@inner
def on_rank(known: Known, i: int, row: int, mixed: bool, plan: InstancePlan) -> None:
    """Enter what an attention rank of an instance has; a step in progress, if ``mixed``, counts as done."""
    inst, segs = known.inst[row], known.seg
    drafts = inst.table.drafts > 0  # its segments are up to date
    done = int(accepted_tokens(inst, known.values) + 0.5) if mixed else 0
    keys = np.sort(known.sets[0, row, : inst.running_requests])
    for j in range(inst.running_requests):
        seg = segs[keys[j] & 0xFFFFFFFF]
        steps = 0 if drafts else inst.counter - seg.joined
        left = left_of(known, seg, i, seg.emitted + steps)
        if left > done or left <= 0 or not mixed:  # else it ends with the step in progress
            join(plan, seg.cached + steps + done, max(left - done, 1))
    arriving(known, i, row, COMING, plan)
    arriving(known, i, row, LANDED, plan)
    s, looked = inst.first[PROMPTS], 0
    pieces = inst.pieces if mixed else 0
    while s >= 0 and (looked < LOOKED or pieces > 0):
        seg = segs[s]
        computed = seg.piece if pieces > 0 else 0
        pieces -= 1
        left, cached = seg.left - computed, seg.cached + computed
        after = max(left_of(known, seg, i, seg.emitted) - 1, 0)
        if left > 0:
            add_prompt(plan, left, cached, after)
        elif after > 0:
            add_decode(plan, cached, after)
        entered(plan, seg)
        s, looked = seg.next, looked + 1


@inner
def enter_promised(known: Known, i: int, plan: InstancePlan) -> None:
    """Enter what was promised to an instance and is not there."""
    at, before = plan.progress[0], plan.progress[0].wait_tokens
    node = next_promised(known, i, -1)
    for _ in range(LOOKED):
        if node < 0:
            break
        one = known.book[node // 2]
        if node % 2 == 0:
            add_part(plan, 0, one.split, one.tokens, False)
        elif is_pending(known, one, 1):
            add_part(plan, one.split, one.expected, one.tokens, False)
        node = next_promised(known, i, node)
    at.rest_tokens = max(at.rest_tokens + known.promised[i].tokens - (at.wait_tokens - before), 0)


@inner
def gather(known: Known, i: int, now: float) -> tuple[float, InstancePlan]:
    """All that an instance was given, and the time until it may begin."""
    inst = known.inst[i]
    queued = min(inst.queued_requests, 3 * LOOKED * inst.ranks + max(inst.pieces, 0))
    most = inst.running_requests + queued + LOOKED + 2
    progress: Any = np.zeros(1, PROGRESS)
    progress[0].watch_prompt = progress[0].watch_decode = progress[0].watch_end = -1
    rows = (np.zeros((most, 3), np.int64), np.zeros((most, 2), np.int64), np.zeros((most, 2), np.int64))
    plan = InstancePlan(progress, rows[0], rows[1], rows[2])
    time = there(known, i, now, plan)
    enter_promised(known, i, plan)
    return time, plan


@inner
def queue_time(plan: InstancePlan, inst: InstanceRecord, values: Floats, stop: int) -> float:
    """Play all prompts of a queue but the last ``stop`` tokens; what waits behind them goes at their pace. [s]"""
    at = plan.progress[0]
    before = at.wait_tokens
    time = play(plan, inst, values, stop)
    played = before - at.wait_tokens
    if at.rest_tokens > 0 and played > 0:
        time += time / played * at.rest_tokens
    return time


@entry
def waiting_s(home: Ints, own: Ints, instance: int, now: float) -> float:
    """Time until the prompts that an instance has or was promised are computed. [s]"""
    known = known_at(home, own)
    time, plan = gather(known, instance, now)
    return time + queue_time(plan, known.inst[instance], known.values, 0)


@entry
def finish_times(home: Ints, own: Ints, wanted: SplitRequest, now: float, search: Search) -> tuple[int, float, float]:
    """Bisection of the split: existing tokens at the end of the first part, and when either instance is done [s].

    From plain disaggregation, up to ``rounds`` halvings of the share of the first part, until both times differ by at
    most ``tolerance`` of the later one, or ``least_s``.
    """
    known = known_at(home, own)
    prompt, expected = wanted.prompt, wanted.expected
    one, other, values, watch = known.inst[wanted.first], known.inst[wanted.second], known.values, search.watch
    t1, plan1 = gather(known, wanted.first, now)
    t2, plan2 = gather(known, wanted.second, now)
    # prompts before the new one are the same for every split: played once, but for those that share its first pass
    t1 += queue_time(plan1, one, values, one.token_budget)
    plan3 = copy_of(plan2)
    t3 = t2 + queue_time(plan3, other, values, other.token_budget)
    low, high = 0.0, 1.0
    ratio = prompt / expected
    split, a, b = prompt, 0.0, 0.0
    for turn in range(search.rounds + 1):
        split = min(max(math.ceil(ratio * expected - 1e-9), 1), expected)
        plan = copy_of(plan1)
        add_part(plan, 0, split, prompt, watch)
        a = t1 + play(plan, one, values, -1)
        b = 0.0
        if split < expected or not watch:
            plan = copy_of(plan3 if split < prompt else plan2)
            if split < expected:
                add_part(plan, split, expected, prompt, watch)
            b = (t3 if split < prompt else t2) + play(plan, other, values, -1)
            at = plan.progress[0]
            if at.rest_context > 0:  # caches that wait behind those played get memory at their pace
                b += at.waited_s * at.rest_context / max(at.context, 1)
        a, b = wanted.paces[0] * a, wanted.paces[1] * b
        if turn == search.rounds or abs(a - b) <= max(search.tolerance * max(a, b), search.least_s):
            break
        if a > b:
            high = ratio
        else:
            low = ratio
        ratio = 0.5 * (low + high)
    return split, a, b
