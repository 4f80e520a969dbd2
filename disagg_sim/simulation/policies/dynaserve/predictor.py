"""Compiled: predict when two instances finish their work, and find the split that makes both times equal.

Past 400 lines: the plan of an instance, its passes played forward, and the search that asks for both.

Passes are played forward: first come, first served, decodes before prefill, times from the step table, runs of decode
steps in closed form, outputs as predicted, drafts as their mean, attention ranks as one queue. Both instances start on
their part of the new request at once. Of each queue the first ``LOOKED`` are played; the rest goes at their pace.
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
    InstanceRecord,
    Mode,
    Segment,
    dtype_of,
)
from disagg_sim.simulation.kernel.runs import steps_time
from disagg_sim.simulation.kernel.times import aware_prefill, step_time
from disagg_sim.simulation.policies.dynaserve.book import Known, is_pending, known_at, next_promised

SLO_AWARE = int(Mode.SLO_AWARE)
#: Requests of each queue of an instance that are played one by one. [request]
LOOKED = 32
#: Of sums of shares: a whole number of tokens is no less for it. [token]
ROUNDING = 1e-9


class PlanProgress:
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
    rest_tokens: int  # of prompts that wait behind those in the rows [token]
    rest_context: int  # of caches that wait behind those in the rows [token]
    context: int  # of caches that wait in the rows [token]
    waited_s: float  # of a part that waits for memory, from the start of the play [s]
    ahead: float  # part of a token, below 1, by which drafts are ahead of ``step`` [token]


PROGRESS = dtype_of(PlanProgress)


class InstancePlan(NamedTuple):
    """What an instance has to do."""

    progress: Sequence[PlanProgress]  # one row
    prompts: Ints  # rows: tokens to compute, tokens cached before, tokens to emit after the first
    decodes: Ints  # rows: tokens cached, tokens to emit
    running: Ints  # rows, sorted: last step, tokens cached less the step at which it joined


@inner
def add_prompt(plan: InstancePlan, left: int, cached: int, generate: int) -> None:
    """A prompt waits: tokens to compute, tokens cached before, tokens to emit after its first."""
    at = plan.progress[0]
    row = plan.prompts[at.prompts]
    row[0], row[1], row[2] = left, cached, generate
    at.prompts += 1
    at.wait_tokens += left


@inner
def add_decode(plan: InstancePlan, cached: int, generate: int) -> None:
    """A request waits to decode: tokens cached, tokens to emit."""
    at = plan.progress[0]
    row = plan.decodes[at.decodes]
    row[0], row[1] = cached, generate
    at.decodes += 1


@inner
def add_part(plan: InstancePlan, have: int, until: int, prompt: int, watch: bool) -> None:
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
def join(plan: InstancePlan, cached: int, generate: int) -> None:
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
def leave(plan: InstancePlan) -> None:
    """Those whose last step this was."""
    at, running = plan.progress[0], plan.running
    while at.run_at < at.run and running[at.run_at, 0] <= at.step:
        at.run_tokens -= running[at.run_at, 1] + at.step
        at.run_at += 1


@inner
def accepted_tokens(inst: InstanceRecord, values: Floats) -> float:
    """Tokens that a step emits for a sequence on average: 1, with drafts AL(k). [token]"""
    found = 1.0
    for place in range(inst.table.drafts):
        found += values[inst.table.accepted_at + place]
    return found


@inner
def advance(at: PlanProgress, accepted: float, steps: int) -> int:
    """Let every running sequence have emitted the tokens of so many steps; drafts come as their mean. [token]"""
    at.ahead += accepted * steps
    tokens = int(at.ahead + ROUNDING)
    at.ahead -= tokens
    at.step += tokens
    at.run_tokens += tokens * (at.run - at.run_at)
    return tokens


@inner
def room(at: PlanProgress, inst: InstanceRecord, more: int) -> bool:
    """Whether another sequence of ``more`` tokens may start; alone it always may."""
    sequences = at.run - at.run_at + at.admitted
    if sequences == 0:
        return True
    tokens = inst.total_blocks * BLOCK_TOKENS - (sequences + 1) * inst.table.drafts
    return bool(sequences < inst.max_sequences and at.run_tokens + at.held_tokens + more <= tokens)


@inner
def take(plan: InstancePlan, inst: InstanceRecord, budget: int) -> tuple[int, int, int, float]:
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
def settle(plan: InstancePlan, pieces: int, total: int) -> None:
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
def play(plan: InstancePlan, inst: InstanceRecord, values: Floats, stop: int) -> float:
    """Time of all passes until nothing is left, the part to watch is done, or only ``stop`` prompt tokens wait. [s]"""
    at, decodes = plan.progress[0], plan.decodes
    accepted, time = accepted_tokens(inst, values), 0.0
    while at.wait_tokens > stop or stop < 0:
        while at.decodes_at < at.decodes and room(at, inst, decodes[at.decodes_at, 0]):
            if at.decodes_at == at.watch_decode:
                at.waited_s = time
                at.watch_end = at.step + decodes[at.decodes_at, 1]
            join(plan, decodes[at.decodes_at, 0], decodes[at.decodes_at, 1])
            at.decodes_at += 1
        count = at.run - at.run_at
        context = (at.run_tokens + count) / count if count > 0 else 0.0
        pieces, total, longest, pairs = 0, 0, 0, 0.0
        if at.prompts_at < at.prompts:
            budget = max(inst.token_budget - count * (1 + inst.table.drafts), 1)
            if inst.mode == SLO_AWARE:
                past = plan.prompts[at.prompts_at, 1]
                budget = aware_prefill(inst.table, values, inst, count, context, past, budget)
            pieces, total, longest, pairs = take(plan, inst, budget)
        if pieces > 0:
            time += step_time(inst.table, values, count, context, pieces, total, longest, pairs)
            advance(at, accepted, 1)
            leave(plan)
            settle(plan, pieces, total)
        elif count > 0:
            left = plan.running[at.run_at, 0] - at.step
            steps = math.ceil((left - at.ahead) / accepted - ROUNDING)
            tokens = advance(at, accepted, steps)
            time += steps_time(inst.table, values, count, context, tokens) * (steps / tokens)
            leave(plan)
        else:
            return time
        if 0 <= at.watch_end <= at.step:
            return time
    return time


@inner
def copy_of(plan: InstancePlan) -> InstancePlan:
    """A plan to play with, of what is left of another, with room for one part more."""
    at, progress = plan.progress[0], plan.progress.copy()  # type: ignore[attr-defined]
    now = progress[0]
    now.prompts, now.decodes, now.run = at.prompts - at.prompts_at, at.decodes - at.decodes_at, at.run - at.run_at
    now.prompts_at = now.decodes_at = now.run_at = 0
    prompts, decodes = np.empty((now.prompts + 1, 3), np.int64), np.empty((now.decodes + 1, 2), np.int64)
    running = np.empty((now.run + now.prompts + now.decodes + 2, 2), np.int64)
    for row in range(now.prompts):
        for column in range(3):
            prompts[row, column] = plan.prompts[at.prompts_at + row, column]
    for row in range(now.decodes):
        for column in range(2):
            decodes[row, column] = plan.decodes[at.decodes_at + row, column]
    for row in range(now.run):
        for column in range(2):
            running[row, column] = plan.running[at.run_at + row, column]
    return InstancePlan(progress, prompts, decodes, running)


class SplitRequest(NamedTuple):
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
        if turn == search.rounds or abs(a - b) <= max(search.tolerance * max(a, b), search.least_s):
            break
        if a > b:
            high = ratio
        else:
            low = ratio
        ratio = 0.5 * (low + high)
    return split, a, b
