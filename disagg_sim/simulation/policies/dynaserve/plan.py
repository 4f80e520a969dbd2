"""Compiled: the plan of an instance, what it has to do, and its passes played forward.

First come, first served, decodes before prefill, times from the step table; runs of equal decode steps in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, InstanceRecord, Mode, dtype_of
from disagg_sim.simulation.kernel.runs import steps_time
from disagg_sim.simulation.kernel.times import aware_prefill, step_time

SLO_AWARE = int(Mode.SLO_AWARE)
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
