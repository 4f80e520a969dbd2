"""Compiled: runs of identical decode steps in closed form, and what they do to an instance.

Between two events the running set is fixed and its mean context grows by one token a step, so the time of a step
is linear inside a cell of the step table and k steps sum to a quadratic. The running set is a heap by the counter
of decode steps at which each segment finishes; nothing is touched per step or per token.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import (
    BLOCK_TOKENS,
    BUSY_S,
    COUNTER,
    DECODE_CONTEXT,
    DECODE_S,
    DECODE_STEPS,
    DECODE_TOKENS,
    FIRST_S,
    FREE_BLOCKS,
    GROUPS,
    ITL_BINS,
    ITL_LEAST_S,
    ITL_PER_OCTAVE,
    LAST_S,
    LAST_STEP_S,
    RESIDUE,
    RUN_END_S,
    RUN_START_S,
    RUN_STEPS,
    RUNNING,
    RUNNING_TOKENS,
    TABLE,
)
from disagg_sim.simulation.kernel.times import DECODE_AT, KNOTS, KNOTS_AT, decode_line, decode_time, knot_of

#: Arrays of a fleet, as ``Fleet`` hands them to the kernel.
State = namedtuple("State", "ints floats seg seg_s sets heads values itl world")


@inner
def itl_bin(gap: float) -> int:
    """Bin of a gap between two tokens."""
    if gap <= ITL_LEAST_S:
        return 0
    return min(int(ITL_PER_OCTAVE * math.log2(gap / ITL_LEAST_S)) + 1, ITL_BINS - 1)


@inner
def add_linear_gaps(st: Any, first: float, slope: float, steps: int, weight: int) -> None:
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
def steps_in_cell(head: Any, values: Any, cell: int, context: float, most: int) -> int:
    """Steps, up to ``most``, that start in a cell, the first of them at a mean ``context``; at least one."""
    if cell >= head[KNOTS] - 2:
        return most
    count: int = min(max(math.ceil(values[head[KNOTS_AT] + cell + 1] - context), 1), most)
    return count


@inner
def steps_time(head: Any, values: Any, decodes: int, context: float, steps: int) -> float:
    """Time of ``steps`` decode steps that start at a mean ``context``. [s]"""
    cell = knot_of(head, values, context)
    total = 0.0
    done = 0
    while done < steps:
        left, value, slope = decode_line(head, values, head[DECODE_AT], decodes, cell)
        count = steps_in_cell(head, values, cell, context + done, steps - done)
        total += count * (value + (context + done - left) * slope) + slope * (0.5 * count * (count - 1))
        done += count
        cell += 1
    return total


@inner
def steps_within(head: Any, values: Any, decodes: int, context: float, elapsed: float, most: int) -> int:
    """Most steps, up to ``most``, that end within ``elapsed`` [s]."""
    cell = knot_of(head, values, context)
    done = 0
    before = 0.0
    while done < most:
        left, value, slope = decode_line(head, values, head[DECODE_AT], decodes, cell)
        count = steps_in_cell(head, values, cell, context + done, most - done)
        first = value + (context + done - left) * slope
        total = count * first + slope * (0.5 * count * (count - 1))
        if before + total > elapsed:
            # first*n + slope*n*(n-1)/2 = rest, solved without cancellation, then set right by a step
            rest = max(elapsed - before, 0.0)
            linear = first - 0.5 * slope
            root = math.sqrt(max(linear * linear + 2.0 * slope * rest, 0.0))
            found = min(int(2.0 * rest / (linear + root)), count)
            while found < count and before + (found + 1) * first + slope * (0.5 * found * (found + 1)) <= elapsed:
                found += 1
            while found > 0 and before + found * first + slope * (0.5 * found * (found - 1)) > elapsed:
                found -= 1
            return done + found
        before += total
        done += count
        cell += 1
    return done


@inner
def blocks_for(st: Any, i: int, steps: int) -> int:
    """KV blocks that the running set takes during its next ``steps`` steps: one for each segment every 16."""
    cycles = steps // BLOCK_TOKENS
    taken: int = cycles * st.ints[i, RUNNING]
    counter = st.ints[i, COUNTER]
    for j in range(steps - cycles * BLOCK_TOKENS):
        taken += st.ints[i, RESIDUE + (-(counter + j)) % BLOCK_TOKENS]
    return taken


@inner
def steps_in_memory(st: Any, i: int, most: int) -> int:
    """Decode steps, up to ``most``, for which the free blocks suffice."""
    running, free = st.ints[i, RUNNING], st.ints[i, FREE_BLOCKS]
    cycles: int = free // running
    steps = cycles * BLOCK_TOKENS
    if steps >= most:
        return most
    free -= cycles * running
    counter = st.ints[i, COUNTER]
    while steps < most:
        free -= st.ints[i, RESIDUE + (-(counter + steps)) % BLOCK_TOKENS]
        if free < 0:
            return steps
        steps += 1
    return most


@inner
def count_gaps(st: Any, i: int, start: float, duration: float) -> None:
    """Gaps that one decode step ends: of those that joined since the last one, and of all the others."""
    joined = st.ints[i, GROUPS]
    for j in range(joined):
        s = st.sets[1, i, j]
        last = st.seg_s[s, LAST_S]
        if math.isnan(st.seg_s[s, FIRST_S]):
            st.seg_s[s, FIRST_S] = start + duration
        if not math.isnan(last):
            st.itl[0, itl_bin(duration + (start - last))] += 1
    st.ints[i, GROUPS] = 0
    others = st.ints[i, RUNNING] - joined
    if others > 0:
        st.itl[0, itl_bin(duration + (start - st.floats[i, LAST_STEP_S]))] += others


@inner
def count_steps(st: Any, i: int, steps: int, duration: float) -> None:
    """Let ``steps`` decode steps of the running set have happened: tokens, blocks, counters."""
    running = st.ints[i, RUNNING]
    st.ints[i, FREE_BLOCKS] -= blocks_for(st, i, steps)
    contexts = steps * st.ints[i, RUNNING_TOKENS] + running * (steps * (steps + 1) // 2)
    st.floats[i, DECODE_CONTEXT] += contexts
    st.ints[i, RUNNING_TOKENS] += running * steps
    st.ints[i, COUNTER] += steps
    st.ints[i, DECODE_STEPS] += steps
    st.ints[i, DECODE_TOKENS] += running * steps
    st.floats[i, DECODE_S] += duration


@inner
def count_run(st: Any, i: int, steps: int) -> None:
    """Count the first ``steps`` steps of the decode run of an instance."""
    running = st.ints[i, RUNNING]
    table = st.ints[i, TABLE]
    head, values = st.heads[table], st.values
    context = (st.ints[i, RUNNING_TOKENS] + running) / running
    start = st.floats[i, RUN_START_S]
    first = decode_time(head, values, running, context)
    count_gaps(st, i, start, first)
    duration = first
    cell = knot_of(head, values, context + 1.0)
    done = 1
    while done < steps:
        left, value, slope = decode_line(head, values, head[DECODE_AT], running, cell)
        count = steps_in_cell(head, values, cell, context + done, steps - done)
        gap = value + (context + done - left) * slope
        add_linear_gaps(st, gap, slope, count, running)
        duration += count * gap + slope * (0.5 * count * (count - 1))
        done += count
        cell += 1
    count_steps(st, i, steps, duration)
    end = start + duration
    if steps == st.ints[i, RUN_STEPS]:
        end = st.floats[i, RUN_END_S]
    st.floats[i, BUSY_S] += end - start
    st.floats[i, RUN_START_S] = end
    st.floats[i, LAST_STEP_S] = end
    st.ints[i, RUN_STEPS] -= steps
