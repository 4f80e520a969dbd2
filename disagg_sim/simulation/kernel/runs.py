"""Compiled: compute runs of decode steps in closed form, and apply them to an instance.

Between two events the running set is fixed and its mean context grows by one token a step, so the time of a step
is linear inside a cell of the step table and k steps sum to a quadratic. The running set is a heap by the counter
of decode steps at which each segment finishes; nothing is touched per step or per token.
"""

from __future__ import annotations

import math

from disagg_sim.arrays import Floats
from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.drafts import count_drafted
from disagg_sim.simulation.kernel.layout import (
    BLOCK_TOKENS,
    ITL_BINS,
    ITL_LEAST_S,
    ITL_PER_OCTAVE,
    FleetState,
    InstanceRecord,
    TableRecord,
)
from disagg_sim.simulation.kernel.sharing import take_more
from disagg_sim.simulation.kernel.times import decode_line, knot_of


@inner
def itl_bin(gap: float) -> int:
    """Bin of a gap between two tokens."""
    if gap <= ITL_LEAST_S:
        return 0
    return min(int(ITL_PER_OCTAVE * math.log2(gap / ITL_LEAST_S)) + 1, ITL_BINS - 1)


@inner
def add_linear_gaps(st: FleetState, first: float, slope: float, steps: int, weight: int) -> None:
    """Count gaps ``first + j*slope`` for j below ``steps``, ``weight`` tokens each."""
    done = 0
    while done < steps:
        gap = first + done * slope
        place = itl_bin(gap)
        count = steps - done
        if slope > 0.0 and place < ITL_BINS - 1:
            edge = st.itl[1, place + 1]
            count = min(max(math.ceil((edge - gap) / slope), 1), count)
        st.itl[0, place] += weight * count
        done += count


@inner
def late_of_line(st: FleetState, first: float, slope: float, steps: int) -> int:
    """How many of the gaps ``first + j*slope`` for j below ``steps`` are late."""
    limit = st.world[0].gap_limit_s
    if first > limit:
        return steps
    if slope <= 0.0 or first + (steps - 1) * slope <= limit:
        return 0
    inside = int((limit - first) / slope)  # the last of them but for rounding
    while inside > 0 and first + inside * slope > limit:
        inside -= 1
    while first + (inside + 1) * slope <= limit:
        inside += 1
    return steps - 1 - inside


@inner
def steps_in_cell(head: TableRecord, values: Floats, cell: int, context: float, most: int) -> int:
    """Steps, up to ``most``, that start in a cell, the first of them at a mean ``context``; at least one."""
    if cell >= head.knots - 2:
        return most
    count: int = min(max(math.ceil(values[head.knots_at + cell + 1] - context), 1), most)
    return count


@inner
def steps_time(head: TableRecord, values: Floats, decodes: int, context: float, steps: int) -> float:
    """Time of ``steps`` decode steps that start at a mean ``context``. [s]"""
    cell = knot_of(head, values, context)
    total = 0.0
    done = 0
    while done < steps:
        left, value, slope = decode_line(head, values, head.decode_at, decodes, cell)
        count = steps_in_cell(head, values, cell, context + done, steps - done)
        total += count * (value + (context + done - left) * slope) + slope * (0.5 * count * (count - 1))
        done += count
        cell += 1
    return total


@inner
def steps_of_line(first: float, slope: float, count: int, before: float, elapsed: float) -> int:
    """Most of ``count`` steps, each ``slope`` longer than the one before it, that end within ``elapsed``. [s]

    The first of them begins at ``before``. [s] ``before + first*n + slope*n*(n - 1)/2 = elapsed`` is solved without
    cancellation, then set right by a step.
    """
    rest = max(elapsed - before, 0.0)
    linear = first - 0.5 * slope
    root = math.sqrt(max(linear * linear + 2.0 * slope * rest, 0.0))
    found = min(int(2.0 * rest / (linear + root)), count)
    while found < count and before + (found + 1) * first + slope * (0.5 * found * (found + 1)) <= elapsed:
        found += 1
    while found > 0 and before + found * first + slope * (0.5 * found * (found - 1)) > elapsed:
        found -= 1
    return found


@inner
def growth_of(inst: InstanceRecord) -> int:
    """KV blocks that the running set takes for its next step."""
    if inst.table.drafts > 0:
        return inst.growing
    grows: int = inst.residue[(-inst.counter) % BLOCK_TOKENS]
    return grows


@inlined
def blocks_for(st: FleetState, i: int, steps: int) -> int:
    """KV blocks that the running set takes during its next ``steps`` steps: one for each segment every 16."""
    inst = st.inst[i]
    cycles = steps // BLOCK_TOKENS
    taken: int = cycles * inst.running_requests
    counter = inst.counter
    for j in range(steps - cycles * BLOCK_TOKENS):
        taken += inst.residue[(-(counter + j)) % BLOCK_TOKENS]
    return taken


@inlined
def steps_in_memory(st: FleetState, i: int, most: int) -> int:
    """Decode steps, up to ``most``, for which the free blocks suffice."""
    inst = st.inst[i]
    running, free = inst.running_requests, inst.free_blocks
    cycles: int = free // running
    steps = cycles * BLOCK_TOKENS
    if steps >= most:
        return most
    free -= cycles * running
    counter = inst.counter
    while steps < most:
        free -= inst.residue[(-(counter + steps)) % BLOCK_TOKENS]
        if free < 0:
            return steps
        steps += 1
    return most


@inlined
def count_gaps(st: FleetState, i: int, start: float, duration: float) -> None:
    """Gaps that one decode step ends: of those that joined since the last one, and of all the others."""
    inst, limit = st.inst[i], st.world[0].gap_limit_s
    joined = inst.groups
    others = inst.running_requests - joined
    if others > 0:
        gap = duration + (start - inst.last_step_s)
        st.itl[0, itl_bin(gap)] += others
        inst.late_steps += gap > limit
    for j in range(joined):
        s = st.sets[1, i, j]
        last = st.seg[s].last_s
        if math.isnan(st.seg[s].first_token_s):
            st.seg[s].first_token_s = start + duration
        if not math.isnan(last):
            gap = duration + (start - last)
            st.itl[0, itl_bin(gap)] += 1
            st.seg[s].late_gaps += gap > limit
        st.seg[s].late_from = inst.late_steps
    inst.groups = 0


@inlined
def count_steps(st: FleetState, i: int, steps: int) -> None:
    """Let ``steps`` decode steps of the running set have happened: tokens, blocks, counters. With drafts it is one."""
    inst = st.inst[i]
    if inst.table.drafts > 0:
        count_drafted(st, i)
        return
    running = inst.running_requests
    take_more(st, i, blocks_for(st, i, steps))
    contexts = steps * inst.running_tokens + running * (steps * (steps + 1) // 2)
    inst.decode_context += contexts
    inst.running_tokens += running * steps
    inst.counter += steps
    inst.decode_tokens += running * steps
