"""Compiled: compute runs of decode steps in closed form, and apply them to an instance.

The running set is a heap by the counter of decode steps at which each segment finishes; nothing is touched per step or
per token. A step that verifies drafts is an event of its own, and touches every running segment. Position i of k drafts
is accepted where a number drawn from [0, 1) lies below the share m_i of steps in which the first i are all accepted;
the draw belongs to the request and to its place in it.
"""

from __future__ import annotations

import math

from disagg_sim.arrays import Floats
from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.layout import (
    BLOCK_TOKENS,
    ITL_BINS,
    ITL_LEAST_S,
    ITL_PER_OCTAVE,
    FleetState,
    InstanceRecord,
    Segment,
    TableRecord,
)
from disagg_sim.simulation.kernel.sharing import take_more
from disagg_sim.simulation.kernel.times import decode_line, knot_of

#: 32 bits, and the step of a Weyl sequence of them: the odd number next to 2**32 over the golden ratio.
BITS, WEYL = 0xFFFFFFFF, 0x9E3779B9


@inner
def mixed(bits: int) -> int:
    """The 32 bits of a number, each of which changes about half of them: the finaliser of MurmurHash3."""
    found = int(bits) & BITS
    found = ((found ^ (found >> 16)) * 0x85EBCA6B) & BITS
    found = ((found ^ (found >> 13)) * 0xC2B2AE35) & BITS
    return found ^ (found >> 16)


@inner
def drawn(stream: int, request: int, place: int) -> float:
    """A number from [0, 1) for a place of a request in a stream."""
    return mixed(mixed(stream ^ mixed(request + 1)) + place * WEYL) / (BITS + 1.0)


@inner
def step_tokens(st: FleetState, i: int, seg: Segment, cached: int) -> int:
    """Tokens that a step finds for a segment with so many in the cache: those accepted, and one of the model."""
    head = st.inst[i].table
    draw = drawn(st.world[0].stream, seg.request, cached)
    tokens = 1
    while tokens <= head.drafts and draw < st.values[head.accepted_at + tokens - 1]:
        tokens += 1
    return tokens


@inner
def steps_to_end(st: FleetState, i: int, s: int) -> int:
    """Steps in which a segment that joins emits all its tokens."""
    seg = st.seg[s]
    left, cached, steps = seg.generate - seg.emitted, seg.cached, 0
    while left > 0:
        tokens = step_tokens(st, i, seg, cached)
        left -= tokens
        cached += tokens
        steps += 1
    return steps


@inner
def own_growth(inst: InstanceRecord, seg: Segment) -> int:
    """Blocks that a running segment takes for its next step: one token and all drafts may enter the cache."""
    return max(-(-(seg.cached + 1 + inst.table.drafts) // BLOCK_TOKENS) - seg.blocks, 0)


@inner
def count_drafted(st: FleetState, i: int) -> None:
    """Let a step of the running set have happened; tokens beyond the end of a segment are dropped."""
    inst = st.inst[i]
    grown, growing, emitted = 0, 0, 0
    for j in range(inst.running_requests):
        seg = st.seg[st.sets[0, i, j] & 0xFFFFFFFF]
        more = own_growth(inst, seg)
        seg.blocks += more
        grown += more
        tokens = min(step_tokens(st, i, seg, seg.cached), seg.generate - seg.emitted)
        inst.decode_context += tokens * seg.cached + tokens * (tokens + 1) // 2
        seg.cached += tokens
        seg.emitted += tokens
        emitted += tokens
        growing += own_growth(inst, seg)
    inst.growing = growing
    take_more(st, i, grown)
    inst.running_tokens += emitted
    inst.counter += 1
    inst.decode_tokens += emitted


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
    inside = int((limit - first) / slope) - 1  # the last of them, or the one before: by rounding
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
