"""Compiled: form the next step of an instance, and end a step; its attention ranks, one or several, step together.

Of several ranks each has queues, KV memory and a running set in a row of its own, as each has an engine core of its
own in vLLM; the row of the instance has the run in progress, and sums over its ranks. docs/kernel.md says what a step
of all of them takes.
"""

from __future__ import annotations

import math

from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.handover import next_seen
from disagg_sim.simulation.kernel.layout import (
    AWAY,
    COMING,
    DECODING,
    IDLE,
    LANDED,
    MIXED,
    PASS,
    PROMPTS,
    AdmissionRule,
    FleetState,
    Mode,
)
from disagg_sim.simulation.kernel.pipelines import next_entry, nothing_decodes, pass_through
from disagg_sim.simulation.kernel.queue import (
    blocks_to_begin,
    complete_prompt,
    finish_complete,
    left_of,
    past_of,
    to_find,
    unlink,
)
from disagg_sim.simulation.kernel.ranks import begin, count_run, fullest_running, run_time, unseen, waits, wake
from disagg_sim.simulation.kernel.runs import count_gaps, count_steps, steps_in_memory
from disagg_sim.simulation.kernel.steps import (
    ask_for_chunks,
    begin_one,
    end_pieces,
    make_room,
    may_admit,
    pieces_step,
    pieces_time,
    steps_to_chunk,
    sums_of_pieces,
    take_chunks,
    take_prompts,
)
from disagg_sim.simulation.kernel.times import (
    aware_prefill,
    decode_line,
    decode_time,
    expert_time,
    knot_of,
    linear_time,
    sheet_of,
)

WHOLE_PROMPT, FIRST_CHUNK = int(AdmissionRule.PROMPT), int(AdmissionRule.FIRST_CHUNK)
CHUNKED, SLO_AWARE = int(Mode.CHUNKED), int(Mode.SLO_AWARE)


@inlined
def step_with_pieces(st: FleetState, i: int, decodes: bool) -> float:
    """A step of the pieces of prompts of an instance and, unless they wait, of what runs there. [s]"""
    inst = st.inst[i]
    if inst.ranks > 1:
        return step_all_ranks(st, i, decodes)
    n = inst.running_requests if decodes else 0
    return pieces_step(st, i, inst.pieces, n, (inst.running_tokens + n) / n if n > 0 else 0.0)


@inner
def step_all_ranks(st: FleetState, i: int, decodes: bool) -> float:
    """See ``step_with_pieces``, of several ranks. [s]"""
    inst = st.inst[i]
    head, values, ranks = inst.table, st.values, inst.ranks
    full, total = 0, 0
    if decodes:
        full, total = fullest_running(st, i)
    micro, queries = min(head.pipeline, max(full, 1)), 1 + head.drafts
    fullest, prefill, attention = 0, 0, 0.0
    for row in range(inst.rank_at, inst.rank_at + ranks):
        rank = st.inst[row]
        n = rank.running_requests if decodes else 0
        tokens, pairs = sums_of_pieces(st, row, rank.pieces)
        fullest = max(fullest, -(-n * ranks // micro) * micro * queries + tokens * ranks)
        prefill += tokens
        time = 0.0
        if n > 0:
            context = (rank.running_tokens + n) / n
            left, value, slope = decode_line(head, values, head.scores_at, n * ranks, knot_of(head, values, context))
            time += value + (context - left) * slope
        if rank.pieces > 0:
            time += pieces_time(st, row, rank.pieces, micro, pairs)
        attention = max(attention, time)
    stretch: float = values[head.stretch_at + total]
    total *= queries
    sheet = sheet_of(total, prefill)
    time = linear_time(head, values, sheet, full, fullest) + attention
    time -= expert_time(head, values, sheet, fullest) - expert_time(head, values, sheet, total + prefill)
    least: float = values[head.floor_at + full]
    return stretch * max(time, least)


@inlined
def time_pass(st: FleetState, i: int, now: float) -> float:
    """Note when the tokens of a pass of prompts come; when the next step may begin. [s]"""
    inst = st.inst[i]
    if inst.table.pipeline == 1:
        time: float = step_with_pieces(st, i, False)
        inst.latency_s = time + inst.swapping_s
        return time
    return pass_through(st, i, now)


@inner
def even_budget(st: FleetState, i: int) -> int:
    """Tokens of prefill that every rank of a SLO_AWARE instance may take beside its decodes. [token]

    As if every rank had the most decodes of any, the context of the slowest, and the longest past of a next prompt.
    """
    inst = st.inst[i]
    head = inst.table
    full, _ = fullest_running(st, i)
    most, past, context, longest = 0, 0, 0.0, 0.0
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        n = rank.running_requests
        s = next_seen(st, row, rank.first[PROMPTS])
        if s >= 0 and st.seg[s].there_s <= rank.seen_s:
            most = max(most, rank.token_budget - n * (1 + head.drafts))
            past = max(past, past_of(st, s))
        if n > 0:
            mean = (rank.running_tokens + n) / n
            time = decode_time(head, st.values, n * inst.ranks, mean)
            if time > longest:
                longest, context = time, mean
    if most <= 0:
        return 0
    return -(-aware_prefill(head, st.values, inst, full, context, past, most * inst.ranks) // inst.ranks)


@inner
def can_take(st: FleetState, row: int) -> bool:
    """Whether a rank could take a prompt into the next step."""
    s = next_seen(st, row, st.inst[row].first[PROMPTS])
    if s < 0 or not may_admit(st, row, s):
        return False
    need: int = blocks_to_begin(st, row, s, left_of(st, s), to_find(st, row, s))
    return need >= 0


@inner
def hold_prompts(st: FleetState, i: int) -> int:
    """For how many decode steps prompts wait, because a rank could take one and another could not; 0 = they do not.

    Prompts in progress go on, and others join them; where nothing decodes, nothing waits.
    """
    inst = st.inst[i]
    inst.holds = 0
    able, decodes = 0, False
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        if st.inst[row].admitted > 0:
            inst.held = 0
            return 0
        decodes |= st.inst[row].running_requests > 0
        able += can_take(st, row)
    if able in (0, inst.ranks) or inst.held >= inst.hold_steps or not decodes:
        inst.held = 0
        return 0
    inst.holds = 1
    steps: int = inst.hold_steps - inst.held
    return steps


@inlined
def take_all_ranks(st: FleetState, i: int, now: float) -> int:
    """Take prompts, or pieces of them, for the next step on all ranks; return how many.

    Where an instance limits the prompts of a step, each rank takes its share of the limit, rounded up, until the limit
    is reached; ranks take turns to be the first.
    """
    inst = st.inst[i]
    mode, ranks = inst.mode, inst.ranks
    limit = even_budget(st, i) if mode == SLO_AWARE else 0
    total = 0
    for k in range(ranks):
        row = inst.rank_at + (inst.begins + k) % ranks
        rank = st.inst[row]
        rank.max_prompts = min(-(-inst.max_prompts // ranks), inst.max_prompts - total)
        if mode in (CHUNKED, SLO_AWARE):
            budget = rank.token_budget - rank.running_requests * (1 + inst.table.drafts)
            if mode == SLO_AWARE:
                budget = min(budget, limit)
            rank.pieces = take_chunks(st, row, now, budget)
        else:
            rank.pieces = take_prompts(st, row, now)
        total += rank.pieces
    inst.pieces = total
    if total > 0:
        inst.begins = (inst.begins + 1) % ranks
    return total


@inlined
def decode_steps_left(st: FleetState, i: int) -> int:
    """Decode steps of all ranks before one of them ends a request or lacks a block."""
    inst = st.inst[i]
    steps = 2**62
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        if rank.running_requests > 0:
            steps = min(steps, (st.sets[0, row, 0] >> 32) - rank.counter)
            steps = steps_to_chunk(st, row, steps_in_memory(st, row, steps))
    return steps


@inlined
def was_preempted(st: FleetState, i: int) -> bool:
    """Whether a rank has preempted and so admits no prompt in this step; it may in the next."""
    inst = st.inst[i]
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        if st.inst[row].preempted == 1 and inst.admission != WHOLE_PROMPT:
            return True
    return False


@inner
def may_fit_later(st: FleetState, i: int) -> bool:
    """Whether a prompt that waits for blocks may begin in a run of decode steps, with less free than now.

    Its first chunk needs fewer when blocks in which its start is cached are taken, or when a step leaves it less time.
    """
    inst = st.inst[i]
    if inst.admission != FIRST_CHUNK or inst.mode not in (CHUNKED, SLO_AWARE):
        return False
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        s = rank.first[PROMPTS]
        budget = rank.token_budget - rank.running_requests
        if s < 0 or budget <= 0 or not may_admit(st, row, s):
            continue
        shortens = inst.mode == SLO_AWARE
        fits = blocks_to_begin(st, row, s, 1 if shortens else budget, (0, 0)) >= 0
        if fits and (shortens or to_find(st, row, s)[0] > 0):
            return True
    return False


@inner
def see_all(st: FleetState, i: int) -> None:
    """Let the step that is formed take what is there now."""
    for row in range(st.inst[i].rank_at, st.inst[i].rank_at + st.inst[i].ranks):
        st.inst[row].seen_s = math.inf


@inner
def see_until(st: FleetState, i: int) -> None:
    """Let the next step, which was formed as the one that ends began, take what was there then."""
    inst = st.inst[i]
    steps = inst.run_steps if inst.run_kind == DECODING else 1
    begun = inst.run_start_s + (run_time(st, i, steps - 1) if steps > 1 else 0.0)
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        st.inst[row].seen_s = begun


@inner
def newcomers(st: FleetState, i: int) -> bool:
    """Whether something waits that came after the step was formed and goes into the next one."""
    inst = st.inst[i]
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        if unseen(st, row, PROMPTS) or unseen(st, row, LANDED) or unseen(st, row, COMING):
            return True
    return False


@inlined
def form(st: FleetState, i: int, now: float) -> None:
    """Form the next step of all ranks of an instance, or let it idle."""
    inst = st.inst[i]
    rows = range(inst.rank_at, inst.rank_at + inst.ranks)
    entry = next_entry(st, i)
    inst.pieces = 0
    for row in rows:
        st.inst[row].pieces = st.inst[row].preempted = 0
    if inst.active == 1:
        for row in rows:
            make_room(st, row, now)
        held = hold_prompts(st, i) if inst.hold_steps > 0 else 0
        if held == 0 and entry <= now and take_all_ranks(st, i, now) > 0:
            mixed = inst.mode in (CHUNKED, SLO_AWARE)
            if mixed and (inst.table.pipeline == 1 or not nothing_decodes(st, i)):
                begin_one(st, i, now, MIXED, step_with_pieces(st, i, True))
                return
            begin_one(st, i, now, PASS, time_pass(st, i, now))
            return
        if fullest_running(st, i)[1] > 0:
            if inst.swapping_s > 0.0 or (inst.preempted == 1 and inst.swap_block_s >= 0.0):
                begin_one(st, i, now, MIXED, run_time(st, i, 1))
                return
            alone = st.world[0].step_by_step == 1 or was_preempted(st, i) or inst.table.drafts > 0 or entry > now
            alone = alone or (inst.ahead == 1 and newcomers(st, i))
            steps = 1 if alone or may_fit_later(st, i) else decode_steps_left(st, i)
            if held > 0:
                steps = min(steps, held)
            inst.run_steps = steps
            begin(st, i, now, DECODING, run_time(st, i, steps))
            return
    begin(st, i, now, IDLE, math.inf)
    late, waiting = inst.ahead == 1 and newcomers(st, i), False
    again = late
    see_all(st, i)
    for row in rows:
        again |= st.inst[row].preempted == 1
        waiting |= waits(st, row)
    if again:  # what was preempted made room, or nothing but newcomers waits: it may begin at once
        inst.next_s = now
    if waiting and entry > now:
        inst.next_s = min(inst.next_s, entry)
    elif inst.active == 1 and waiting and not late and inst.stalled < st.world[0].reserves:
        inst.stalled = 1
        st.world[0].pending_events += 1


@inlined
def end_run(st: FleetState, i: int, now: float) -> None:
    """Settle the run of an instance that ends on all its ranks."""
    inst = st.inst[i]
    kind, start = inst.run_kind, inst.run_start_s
    if kind == IDLE:
        return
    if inst.ahead == 1:
        see_until(st, i)
    if kind == DECODING:
        count_run(st, i, inst.run_steps)
    else:
        _, running = fullest_running(st, i)
        inst.busy_s += now - start
        inst.passes += inst.pieces > 0
        if kind == MIXED and running > 0:
            inst.decode_steps += 1
            inst.decode_s += now - start
    emitted = max(start + inst.latency_s, now) if kind == PASS else now
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        if kind == MIXED and rank.running_requests > 0:
            count_gaps(st, row, start, now - start)
            count_steps(st, row, 1)
            rank.last_step_s = now
        if kind != PASS:
            finish_complete(st, row, now)
        if kind != DECODING:
            end_pieces(st, row, now, emitted)
    next_away(st, i)
    if st.world[0].chunk_tokens > 0:
        for row in range(inst.rank_at, inst.rank_at + inst.ranks):
            ask_for_chunks(st, row, now)


@inlined
def next_away(st: FleetState, i: int) -> None:
    """Note when the next segment leaves the last stage of a pipeline, on any rank."""
    inst = st.inst[i]
    inst.leave_s = math.inf
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        s = st.inst[row].first[AWAY]
        if s >= 0:
            inst.leave_s = min(inst.leave_s, st.seg[s].leaves_s)


@inlined
def settle(st: FleetState, i: int, now: float) -> bool:
    """What is due at an instance: segments leave its pipeline, or its run ends; whether it forms a new step now."""
    inst = st.inst[i]
    if inst.leave_s > now:
        end_run(st, i, now)
        return True
    waiting = False
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        waiting |= waits(st, row)
        s = st.inst[row].first[AWAY]
        while s >= 0 and st.seg[s].leaves_s <= now:
            unlink(st, row, s, -1, AWAY)
            complete_prompt(st, row, s, now)
            s = st.inst[row].first[AWAY]
    next_away(st, i)
    inst.next_s = min(inst.run_end_s, inst.leave_s)
    if inst.run_kind == DECODING and waiting:  # for blocks that are free now
        wake(st, i, now, False)
    return bool(inst.run_kind == IDLE)
