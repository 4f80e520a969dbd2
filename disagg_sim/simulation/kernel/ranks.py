"""Compiled: what the attention ranks of an instance have together, who of them takes a request, and their decode runs.

The columns of an instance are those of its last event. Steps of its run that have ended since are counted when somebody
asks for them, or when the run ends.
"""

from __future__ import annotations

import math

from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.layout import AWAY, COMING, DECODING, IDLE, PROMPTS, FleetState, Mode, RankChoice
from disagg_sim.simulation.kernel.runs import (
    add_linear_gaps,
    count_gaps,
    count_steps,
    late_of_line,
    steps_in_cell,
    steps_of_line,
)
from disagg_sim.simulation.kernel.times import decode_line, expert_time, knot_of

IN_TURN, FEWEST_TOKENS = int(RankChoice.IN_TURN), int(RankChoice.FEWEST_TOKENS)
#: A request that waits counts as so many that run: vLLM's ``core_client.py``, ``get_core_engine_for_request``. [1]
WAITING_WEIGHT = 4
MANUAL = int(Mode.MANUAL)
#: Share of a time by which arithmetic may miss it. [1]
ROUNDING = 1e-12


@inner
def choose_rank(st: FleetState, i: int) -> int:
    """The rank of an instance that takes the next request, of those that may run one; the first of equals."""
    inst = st.inst[i]
    at, ranks = inst.rank_at, inst.ranks
    if inst.rank_choice == IN_TURN:
        for k in range(ranks):
            next_one: int = (inst.turn + k) % ranks
            if st.inst[at + next_one].max_sequences > 0:
                return next_one
    total, most = 0, 0
    for row in range(at, at + ranks):
        total += st.inst[row].requests
        most = max(most, st.inst[row].requests)
    share = max(-(-(total + 1) // ranks), most)
    best, least = 0, math.inf
    for k in range(ranks):
        rank = st.inst[at + k]
        if rank.max_sequences == 0:
            continue
        if inst.rank_choice == FEWEST_TOKENS:
            score = rank.request_tokens if rank.requests < share else math.inf
        else:
            running = rank.running_requests + rank.admitted + leaving(st, at + k)
            score = float(WAITING_WEIGHT * (rank.requests - running) + running)
        if score < least:
            best, least = k, score
    return best


@inner
def leaving(st: FleetState, row: int) -> int:
    """Prompts of a rank that are in the later stages of its pipeline. [1]"""
    count = 0
    s = st.inst[row].first[AWAY]
    while s >= 0:
        count += 1
        s = st.seg[s].next
    return count


@inner
def gather(st: FleetState, i: int) -> None:
    """Bring the sums of an instance over its ranks to the present."""
    inst = st.inst[i]
    inst.running_requests = inst.running_tokens = inst.queued_requests = inst.queued_prompt_tokens = 0
    inst.queued_context_tokens = inst.free_blocks = inst.prefill_tokens = inst.decode_tokens = 0
    inst.first_tokens = inst.preemptions = 0
    inst.prefill_pairs = inst.decode_context = 0.0
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        inst.running_requests += rank.running_requests
        inst.running_tokens += rank.running_tokens
        inst.queued_requests += rank.queued_requests
        inst.queued_prompt_tokens += rank.queued_prompt_tokens
        inst.queued_context_tokens += rank.queued_context_tokens
        inst.free_blocks += rank.free_blocks
        inst.prefill_tokens += rank.prefill_tokens
        inst.decode_tokens += rank.decode_tokens
        inst.first_tokens += rank.first_tokens
        inst.preemptions += rank.preemptions
        inst.prefill_pairs += rank.prefill_pairs
        inst.decode_context += rank.decode_context


@inlined
def fullest_running(st: FleetState, i: int) -> tuple[int, int]:
    """Sequences of an instance whose ranks all run as many as the one with the most, and those that do run."""
    inst = st.inst[i]
    most, total = 0, 0
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        most = max(most, st.inst[row].running_requests)
        total += st.inst[row].running_requests
    return most * inst.ranks, total


@inlined
def decode_piece(st: FleetState, i: int, done: int, most: int) -> tuple[float, float, int]:
    """The decode step after ``done`` further ones: its time [s], by how much each after it takes longer [s], and for
    how many steps, up to ``most``, that holds.
    """
    inst = st.inst[i]
    if inst.ranks > 1:
        return _piece_of_ranks(st, i, done, most)
    head, values, n = inst.table, st.values, inst.running_requests
    context = (inst.running_tokens + n) / n + done
    cell = knot_of(head, values, context)
    left, value, slope = decode_line(head, values, head.decode_at, n, cell)
    stretch = values[head.stretch_at + n]
    time = stretch * (value + (context - left) * slope)
    return time, stretch * slope, steps_in_cell(head, values, cell, context, most)


@inner
def _piece_of_ranks(st: FleetState, i: int, done: int, most: int) -> tuple[float, float, int]:
    """See ``decode_piece``, of several ranks.

    The rank with the longest scores and values sets the time. It holds until its mean context, or that of another,
    enters the next cell of the table, or until another rank, whose times grow faster, takes longer.
    """
    inst = st.inst[i]
    head, values = inst.table, st.values
    full, total = fullest_running(st, i)
    row_of_full, queries = full * head.knots, 1 + head.drafts
    base = values[head.decode_at + row_of_full] - values[head.scores_at + row_of_full]
    base -= expert_time(head, values, 1, full * queries) - expert_time(head, values, 1, total * queries)
    longest, slope = -math.inf, 0.0
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        n = rank.running_requests
        if n > 0:
            context = (rank.running_tokens + n) / n + done
            cell = knot_of(head, values, context)
            left, value, grows = decode_line(head, values, head.scores_at, n * inst.ranks, cell)
            time = value + (context - left) * grows
            if time > longest or (time == longest and grows > slope):
                longest, slope = time, grows
            most = steps_in_cell(head, values, cell, context, most)
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        n = rank.running_requests
        if n > 0:
            context = (rank.running_tokens + n) / n + done
            left, value, grows = decode_line(
                head, values, head.scores_at, n * inst.ranks, knot_of(head, values, context)
            )
            if grows > slope:
                behind = longest - (value + (context - left) * grows)
                most = int(min(behind / (grows - slope), most - 1.0)) + 1
    stretch = values[head.stretch_at + total]
    return stretch * (base + longest), stretch * slope, most


@inlined
def run_time(st: FleetState, i: int, steps: int) -> float:
    """Time of ``steps`` decode steps of an instance from now on. [s]"""
    total, done = 0.0, 0
    while done < steps:
        first, slope, count = decode_piece(st, i, done, steps - done)
        total += count * first + slope * (0.5 * count * (count - 1))
        done += count
    return total


@inlined
def run_within(st: FleetState, i: int, elapsed: float, most: int) -> int:
    """Most decode steps of an instance, up to ``most``, that end within ``elapsed`` [s]."""
    before, done = 0.0, 0
    while done < most:
        first, slope, count = decode_piece(st, i, done, most - done)
        total = count * first + slope * (0.5 * count * (count - 1))
        if before + total > elapsed:
            return done + steps_of_line(first, slope, count, before, elapsed)
        before += total
        done += count
    return done


@inner
def count_run(st: FleetState, i: int, steps: int) -> None:
    """Count the first ``steps`` steps of the decode run of an instance on all its ranks."""
    inst = st.inst[i]
    start = inst.run_start_s
    first, _, _ = decode_piece(st, i, 0, 1)
    _, running = fullest_running(st, i)
    duration, done, late = first, 1, 0
    while done < steps:
        time, slope, count = decode_piece(st, i, done, steps - done)
        add_linear_gaps(st, time, slope, count, running)
        late += late_of_line(st, time, slope, count)
        duration += count * time + slope * (0.5 * count * (count - 1))
        done += count
    end = start + duration
    if steps == inst.run_steps:
        end = inst.run_end_s
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        if st.inst[row].running_requests > 0:
            count_gaps(st, row, start, first)
            st.inst[row].late_steps += late
            count_steps(st, row, steps)
            st.inst[row].last_step_s = end
    if inst.holds == 1:
        inst.held += steps
    inst.decode_steps += steps
    inst.decode_s += duration
    inst.busy_s += end - start
    inst.run_start_s = end
    inst.run_steps -= steps


@inlined
def steps_to(st: FleetState, i: int, now: float) -> int:
    """Steps of a decode run that are not counted yet and end by ``now``, without its last one."""
    inst = st.inst[i]
    elapsed = now - inst.run_start_s
    most = inst.run_steps - 1
    return 0 if most <= 0 or elapsed <= 0.0 else run_within(st, i, elapsed, most)


@inlined
def uncounted(st: FleetState, i: int, now: float) -> int:
    """Decode steps of an instance that have ended and are not in its columns yet."""
    return steps_to(st, i, now) if st.inst[i].run_kind == DECODING else 0


@inlined
def end_after(st: FleetState, i: int, steps: int) -> float:
    """End of the first ``steps`` uncounted steps of a decode run. [s]"""
    inst = st.inst[i]
    end: float = inst.run_start_s + run_time(st, i, steps) if steps < inst.run_steps else inst.run_end_s
    return end


@inlined
def due_s(st: FleetState, i: int) -> float:
    """A time before which no step of a decode run ends that is not counted yet and is not its last one. [s]"""
    inst = st.inst[i]
    if inst.run_kind != DECODING or inst.run_steps <= 1:
        return math.inf
    return (inst.run_start_s + decode_piece(st, i, 0, 1)[0]) * (1.0 - ROUNDING)


@inlined
def wake(st: FleetState, i: int, now: float, newcomer: bool) -> None:
    """Let an instance notice a change at ``now``: at once if idle, else at the end of the decode step in progress.

    A newcomer is noticed at the end of the step after it, where that is formed already.
    """
    inst = st.inst[i]
    st.world[0].now_s = now
    if inst.run_kind == IDLE:
        inst.next_s = min(inst.next_s, now)
    elif inst.run_kind == DECODING and inst.run_steps > 1:
        steps = steps_to(st, i, now)
        begun = end_after(st, i, steps) if steps > 0 else inst.run_start_s
        if steps == 0 or begun < now:
            steps += 1
        if newcomer and inst.ahead == 1 and begun < now:  # the step in progress is the one that was formed
            steps = min(steps + 1, inst.run_steps)
        end = end_after(st, i, steps)
        inst.run_steps = steps
        inst.run_end_s = end
        inst.next_s = min(end, inst.leave_s)
    st.world[0].soonest_s = min(st.world[0].soonest_s, inst.next_s)


@inlined
def begin(st: FleetState, i: int, now: float, kind: int, duration: float) -> None:
    """Start a run of an instance."""
    inst = st.inst[i]
    inst.run_kind = kind
    inst.run_start_s = now
    inst.run_end_s = now + duration
    inst.next_s = min(now + duration, inst.leave_s)


@inlined
def unseen(st: FleetState, row: int, queue: int) -> bool:
    """Whether the first that waits in a queue of a rank came after the step was formed."""
    s = st.inst[row].first[queue]
    return bool(s >= 0 and st.seg[s].there_s > st.inst[row].seen_s)


@inlined
def waits(st: FleetState, i: int) -> bool:
    """Whether work waits that would be done if there were room."""
    inst = st.inst[i]
    return bool((inst.first[PROMPTS] >= 0 and (inst.mode != MANUAL or inst.closed > 0)) or inst.first[COMING] >= 0)
