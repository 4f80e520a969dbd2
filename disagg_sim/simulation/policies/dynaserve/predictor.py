"""Compiled: when two instances will have finished all that they were given, and the split that makes them equal.

DynaServe's global scheduler looks at what waits and runs on both instances and plays their passes forward: first come,
first served, decodes before prefill, times from the step table. Runs of equal decode steps are taken in closed form.
Outputs end where they were predicted to. Both instances start on their part of the new request at once, as if
it were two: it is the work that is balanced.

Past 400 lines: one compiled function and what it inlines.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.kernel.layout import (
    BLOCK_TOKENS,
    CACHED,
    COMING_HEAD,
    CONTEXT,
    COUNTER,
    EMITTED,
    HEAD,
    IDLE,
    INSTANCE,
    JOINED,
    LEFT,
    MAX_SEQUENCES,
    MIXED,
    MODE,
    NEXT,
    PIECE,
    PIECES,
    PROMPT,
    QUEUED,
    REQUEST,
    RUN_END_S,
    RUN_KIND,
    RUN_START_S,
    RUNNING,
    STATUS,
    STEP_LIMIT_S,
    TABLE,
    TOKEN_BUDGET,
    TOTAL_BLOCKS,
    Mode,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.runs import steps_time
from disagg_sim.simulation.kernel.times import largest_prefill, step_time

SLO_AWARE = int(Mode.SLO_AWARE)
DONE, LOST = int(SegmentStatus.DONE), int(SegmentStatus.LOST)

# --- the book of splits: one row a request ----------------------------------------------------------------------
TOKENS = 0  # of the prompt [token]
EXPECTED = 1  # prompt and predicted output [token]
SPLIT = 2  # tokens that exist when the first part ends [token]
FIRST, SECOND = 3, 4  # instances of the two parts; -1 = none
FIRST_AT, SECOND_AT = 5, 6  # their segments once they are there; -1 = not yet
BOOK = 7

# --- what is still open, kept from call to call -------------------------------------------------------------------
SEEN = 0  # segments of the kernel that the book knows
OPEN = 1  # requests in the list of those with a part that has not come to its instance
TALLY = 2

# --- the plan of an instance: integers, then rows of waiting prompts, waiting decodes and running ones --------------
STEP = 0  # steps so far
RUN, RUN_AT = 1, 2  # running ones: end of their rows, and first row that still runs
PROMPTS, PROMPTS_AT = 3, 4
DECODES, DECODES_AT = 5, 6
ADMITTED = 7  # prompts in prefill, of the first rows
RUN_TOKENS = 8  # cached tokens of running ones [token]
HELD_TOKENS = 9  # of prompts in prefill, in full [token]
WAIT_TOKENS = 10  # prompt tokens to compute [token]
WATCH_PROMPT, WATCH_DECODE = 11, 12  # row of the part whose end is asked for; -1 = none
WATCH_END = 13  # its last step; -1 = it has not begun to decode
PLAN = 14


@inner
def add_prompt(plan: Any, prompts: Any, left: int, cached: int, generate: int) -> None:
    """A prompt waits: tokens to compute, tokens cached before, tokens to emit after its first."""
    row = plan[PROMPTS]
    prompts[row, 0], prompts[row, 1], prompts[row, 2] = left, cached, generate
    plan[PROMPTS] = row + 1
    plan[WAIT_TOKENS] += left


@inner
def add_decode(plan: Any, decodes: Any, cached: int, generate: int) -> None:
    """A request waits to decode: tokens cached, tokens to emit."""
    row = plan[DECODES]
    decodes[row, 0], decodes[row, 1] = cached, generate
    plan[DECODES] = row + 1


@inner
def add_part(plan: Any, prompts: Any, decodes: Any, have: int, until: int, prompt: int, watch: bool) -> None:
    """A part of a request that is not there yet: from ``have`` to ``until`` existing tokens; maybe one to watch."""
    if watch:
        plan[WATCH_PROMPT if have < prompt else WATCH_DECODE] = plan[PROMPTS if have < prompt else DECODES]
    if have < prompt:
        end = min(until, prompt)
        add_prompt(plan, prompts, end - have, have, max(until - prompt - 1, 0))
    else:
        add_decode(plan, decodes, have - 1, max(until - have, 1))


@inner
def join(plan: Any, running: Any, cached: int, generate: int) -> None:
    """Start to decode; the running ones stay sorted by their last step."""
    end = plan[STEP] + generate
    row = plan[RUN]
    while row > plan[RUN_AT] and running[row - 1, 0] > end:
        running[row, 0], running[row, 1] = running[row - 1, 0], running[row - 1, 1]
        row -= 1
    running[row, 0], running[row, 1] = end, cached - plan[STEP]
    plan[RUN] += 1
    plan[RUN_TOKENS] += cached


@inner
def leave(plan: Any, running: Any) -> None:
    """Those whose last step this was."""
    while plan[RUN_AT] < plan[RUN] and running[plan[RUN_AT], 0] <= plan[STEP]:
        plan[RUN_TOKENS] -= running[plan[RUN_AT], 1] + plan[STEP]
        plan[RUN_AT] += 1


@inner
def room(plan: Any, most: int, tokens: int, more: int) -> bool:
    """Whether another sequence of ``more`` tokens may start; alone it always may."""
    sequences = plan[RUN] - plan[RUN_AT] + plan[ADMITTED]
    if sequences == 0:
        return True
    return bool(sequences < most and plan[RUN_TOKENS] + plan[HELD_TOKENS] + more <= tokens)


@inner
def take(plan: Any, prompts: Any, row: Any, budget: int) -> tuple[int, int, int, float]:
    """Fill a pass from the waiting prompts: pieces, tokens, longest piece, query-key pairs."""
    tokens = row[TOTAL_BLOCKS] * BLOCK_TOKENS
    pieces, total, longest, pairs = 0, 0, 0, 0.0
    at = plan[PROMPTS_AT]
    while at + pieces < plan[PROMPTS] and total < budget:
        left, cached = prompts[at + pieces, 0], prompts[at + pieces, 1]
        if pieces >= plan[ADMITTED]:
            if not room(plan, row[MAX_SEQUENCES], tokens, left + cached):
                break
            plan[ADMITTED] += 1
            plan[HELD_TOKENS] += left + cached
        piece = min(left, budget - total)
        total += piece
        longest = max(longest, piece)
        pairs += piece * (cached + 0.5 * piece)
        pieces += 1
    return pieces, total, longest, pairs


@inner
def settle(plan: Any, prompts: Any, running: Any, pieces: int, total: int) -> None:
    """The end of a pass: complete prompts begin to decode."""
    plan[WAIT_TOKENS] -= total
    for _ in range(pieces):
        at = plan[PROMPTS_AT]
        piece = min(prompts[at, 0], total)
        total -= piece
        prompts[at, 0] -= piece
        prompts[at, 1] += piece
        if prompts[at, 0] > 0:
            return
        plan[PROMPTS_AT] += 1
        plan[ADMITTED] -= 1
        plan[HELD_TOKENS] -= prompts[at, 1]
        if at == plan[WATCH_PROMPT]:
            plan[WATCH_END] = plan[STEP] + prompts[at, 2]
        if prompts[at, 2] > 0:
            join(plan, running, prompts[at, 1], prompts[at, 2])


@inner
def play(
    plan: Any, prompts: Any, decodes: Any, running: Any, row: Any, limit: float, head: Any, values: Any, stop: int
) -> float:
    """Time of all passes until nothing is left, the part to watch is done, or only ``stop`` prompt tokens wait. [s]"""
    time = 0.0
    tokens = row[TOTAL_BLOCKS] * BLOCK_TOKENS
    while plan[WAIT_TOKENS] > stop or stop < 0:
        while plan[DECODES_AT] < plan[DECODES] and room(plan, row[MAX_SEQUENCES], tokens, decodes[plan[DECODES_AT], 0]):
            if plan[DECODES_AT] == plan[WATCH_DECODE]:
                plan[WATCH_END] = plan[STEP] + decodes[plan[DECODES_AT], 1]
            join(plan, running, decodes[plan[DECODES_AT], 0], decodes[plan[DECODES_AT], 1])
            plan[DECODES_AT] += 1
        count = plan[RUN] - plan[RUN_AT]
        context = (plan[RUN_TOKENS] + count) / count if count > 0 else 0.0
        pieces, total, longest, pairs = 0, 0, 0, 0.0
        if plan[PROMPTS_AT] < plan[PROMPTS]:
            budget = max(row[TOKEN_BUDGET] - count, 1)
            if row[MODE] == SLO_AWARE:
                past = prompts[plan[PROMPTS_AT], 1]
                budget = largest_prefill(head, values, count, context, past, limit, budget)
            pieces, total, longest, pairs = take(plan, prompts, row, budget)
        if pieces > 0:
            time += step_time(head, values, count, context, pieces, total, longest, pairs)
            plan[STEP] += 1
            plan[RUN_TOKENS] += count
            leave(plan, running)
            settle(plan, prompts, running, pieces, total)
        elif count > 0:
            steps = running[plan[RUN_AT], 0] - plan[STEP]
            time += steps_time(head, values, count, context, steps)
            plan[STEP] += steps
            plan[RUN_TOKENS] += count * steps
            leave(plan, running)
        else:
            return time
        if 0 <= plan[WATCH_END] <= plan[STEP]:
            return time
    return time


@inner
def until_of(book: Any, request: int, instance: int) -> int:
    """Existing tokens with which the part of a request on an instance is expected to end. [token]"""
    until: int = book[request, SPLIT] if book[request, FIRST] == instance else book[request, EXPECTED]
    return until


@inner
def there(
    ints: Any,
    floats: Any,
    seg: Any,
    sets: Any,
    book: Any,
    i: int,
    now: float,
    plan: Any,
    prompts: Any,
    decodes: Any,
    running: Any,
) -> float:
    """Enter what an instance has; the time until its step in progress ends. [s]"""
    row = ints[i]
    mixed = row[RUN_KIND] == MIXED  # its step in progress counts as done
    done = 1 if mixed else 0
    keys = np.sort(sets[0, i, : row[RUNNING]])
    for j in range(row[RUNNING]):
        s = keys[j] & 0xFFFFFFFF
        steps = row[COUNTER] - seg[s, JOINED]
        emitted = seg[s, EMITTED] + steps
        exist = seg[s, CONTEXT] + seg[s, PROMPT] + emitted + (1 if seg[s, PROMPT] == 0 else 0)
        left = until_of(book, seg[s, REQUEST], i) - exist
        if left != done or not mixed:  # else it ends with the step in progress
            join(plan, running, seg[s, CACHED] + steps + done, max(left - done, 1))
    s = row[COMING_HEAD]
    while s >= 0:
        have = seg[s, CONTEXT] + 1 + seg[s, EMITTED]
        add_decode(plan, decodes, have - 1, max(until_of(book, seg[s, REQUEST], i) - have, 1))
        s = seg[s, NEXT]
    s = row[HEAD]
    pieces = row[PIECES] if mixed else 0
    while s >= 0:
        computed = seg[s, PIECE] if pieces > 0 else 0
        pieces -= 1
        left, cached = seg[s, LEFT] - computed, seg[s, CACHED] + computed
        exist = seg[s, CONTEXT] + seg[s, PROMPT] + seg[s, EMITTED] + (1 if seg[s, PROMPT] == 0 else 0)
        after = max(until_of(book, seg[s, REQUEST], i) - exist - 1, 0)
        if left > 0:
            add_prompt(plan, prompts, left, cached, after)
        elif after > 0:
            add_decode(plan, decodes, cached, after)
        s = seg[s, NEXT]
    if row[RUN_KIND] == IDLE:
        return 0.0
    begin: float = floats[i, RUN_END_S] if mixed else floats[i, RUN_START_S]
    return begin - now


@inner
def coming(book: Any, open_list: Any, tally: Any, i: int, plan: Any, prompts: Any, decodes: Any) -> None:
    """Enter what was promised to an instance and is not there."""
    for j in range(tally[OPEN]):
        r = open_list[j]
        if book[r, FIRST] == i and book[r, FIRST_AT] < 0:
            add_part(plan, prompts, decodes, 0, book[r, SPLIT], book[r, TOKENS], False)
        elif book[r, SECOND] == i and book[r, SECOND_AT] < 0:
            add_part(plan, prompts, decodes, book[r, SPLIT], book[r, EXPECTED], book[r, TOKENS], False)


@inner
def refresh_book(seg: Any, count: int, book: Any, open_list: Any, tally: Any) -> None:
    """Note which parts have come, and forget requests that ended before their second part."""
    for s in range(tally[SEEN], count):
        r = seg[s, REQUEST]
        if book[r, FIRST] == seg[s, INSTANCE]:
            book[r, FIRST_AT] = s
        elif book[r, SECOND] == seg[s, INSTANCE]:
            book[r, SECOND_AT] = s
    tally[SEEN] = count
    kept = 0
    for j in range(tally[OPEN]):
        r = open_list[j]
        first = book[r, FIRST_AT]
        over = first >= 0 and (book[r, SECOND] < 0 or seg[first, STATUS] == DONE or seg[first, STATUS] == LOST)
        if book[r, SECOND_AT] < 0 and not over:
            open_list[kept] = r
            kept += 1
    tally[OPEN] = kept


@entry
def choose_pair(ints: Any, seg: Any, count: int, book: Any, open_list: Any, tally: Any, pairs: Any) -> int:
    """Note what has come, then the pair with the fewest requests there or promised, the first of several."""
    refresh_book(seg, count, book, open_list, tally)
    load = np.zeros(ints.shape[0], np.int64)
    for j in range(tally[OPEN]):
        r = open_list[j]
        load[book[r, FIRST] if book[r, FIRST_AT] < 0 else book[r, SECOND]] += 1
    best, fewest = 0, -1
    for k in range(pairs.shape[0]):
        total = 0
        for side in range(2):
            i = pairs[k, side]
            total += ints[i, QUEUED] + ints[i, RUNNING] + load[i]
        if fewest < 0 or total < fewest:
            best, fewest = k, total
    return best


@inner
def copy_of(plan: Any, prompts: Any, decodes: Any, running: Any) -> tuple[Any, Any, Any, Any]:
    """A plan to play with."""
    return plan.copy(), prompts.copy(), decodes.copy(), running.copy()


@inner
def gather(
    ints: Any, floats: Any, seg: Any, sets: Any, book: Any, open_list: Any, tally: Any, i: int, now: float
) -> tuple[float, Any, Any, Any, Any]:
    """All that an instance was given, and the time until it may begin."""
    most = ints[i, RUNNING] + ints[i, QUEUED] + tally[OPEN] + 2
    plan = np.zeros(PLAN, np.int64)
    plan[WATCH_PROMPT] = plan[WATCH_DECODE] = plan[WATCH_END] = -1
    prompts = np.zeros((most, 3), np.int64)
    decodes = np.zeros((most, 2), np.int64)
    running = np.zeros((most, 2), np.int64)
    time = there(ints, floats, seg, sets, book, i, now, plan, prompts, decodes, running)
    coming(book, open_list, tally, i, plan, prompts, decodes)
    return time, plan, prompts, decodes, running


@entry
def finish_times(
    ints: Any,
    floats: Any,
    seg: Any,
    sets: Any,
    heads: Any,
    values: Any,
    book: Any,
    open_list: Any,
    tally: Any,
    first: int,
    second: int,
    prompt: int,
    expected: int,
    now: float,
    rounds: int,
    tolerance: float,
    least: float,
    watch: bool,
) -> tuple[int, float, float]:
    """Bisection of the split: existing tokens at the end of the first part, and when either instance is done [s].

    From plain disaggregation, up to ``rounds`` halvings of the share of the first part, until both times differ by at
    most ``tolerance`` of the later one, or ``least``. ``watch``: times of the new request's parts alone.
    """
    t1, plan1, prompts1, decodes1, running1 = gather(ints, floats, seg, sets, book, open_list, tally, first, now)
    t2, plan2, prompts2, decodes2, running2 = gather(ints, floats, seg, sets, book, open_list, tally, second, now)
    head1, head2 = heads[ints[first, TABLE]], heads[ints[second, TABLE]]
    limit1, limit2 = floats[first, STEP_LIMIT_S], floats[second, STEP_LIMIT_S]
    # prompts before the new one are the same for every split: played once, but for those that share its first pass
    t1 += play(plan1, prompts1, decodes1, running1, ints[first], limit1, head1, values, ints[first, TOKEN_BUDGET])
    plan3, prompts3, decodes3, running3 = copy_of(plan2, prompts2, decodes2, running2)
    t3 = t2 + play(plan3, prompts3, decodes3, running3, ints[second], limit2, head2, values, ints[second, TOKEN_BUDGET])
    low, high = 0.0, 1.0
    ratio = prompt / expected
    split, a, b = prompt, 0.0, 0.0
    for turn in range(rounds + 1):
        split = min(max(math.ceil(ratio * expected - 1e-9), 1), expected)
        plan, prompts, decodes, running = copy_of(plan1, prompts1, decodes1, running1)
        add_part(plan, prompts, decodes, 0, split, prompt, watch)
        a = t1 + play(plan, prompts, decodes, running, ints[first], limit1, head1, values, -1)
        b = t3 if split < prompt else t2
        if split < prompt:
            plan, prompts, decodes, running = copy_of(plan3, prompts3, decodes3, running3)
        else:
            plan, prompts, decodes, running = copy_of(plan2, prompts2, decodes2, running2)
        if split < expected:
            add_part(plan, prompts, decodes, split, expected, prompt, watch)
        b += play(plan, prompts, decodes, running, ints[second], limit2, head2, values, -1)
        if watch and split >= expected:
            b = 0.0
        if turn == rounds or abs(a - b) <= max(tolerance * max(a, b), least):
            break
        if a > b:
            high = ratio
        else:
            low = ratio
        ratio = 0.5 * (low + high)
    return split, a, b
