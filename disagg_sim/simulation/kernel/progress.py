"""Compiled: how far a run of decode steps has come.

The columns of an instance are those of its last event. Steps of its run that have ended since are counted when somebody
asks for them, or when the run ends.
"""

from __future__ import annotations

import math

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import COMING, DECODING, IDLE, PROMPTS, FleetState, Mode, Queues
from disagg_sim.simulation.kernel.ranks import run_time, run_within
from disagg_sim.simulation.kernel.runs import steps_time, steps_within
from disagg_sim.simulation.kernel.times import decode_time

MANUAL = int(Mode.MANUAL)
#: Share of a time by which arithmetic may miss it. [1]
ROUNDING = 1e-12


@inner
def _context(st: FleetState | Queues, i: int) -> float:
    """Mean context of the next decode step. [token]"""
    inst = st.inst[i]
    context: float = (inst.running_tokens + inst.running_requests) / inst.running_requests
    return context


@inner
def steps_to(st: FleetState | Queues, i: int, now: float) -> int:
    """Steps of a decode run that are not counted yet and end by ``now``, without its last one."""
    inst = st.inst[i]
    head = inst.table
    elapsed = now - inst.run_start_s
    most = inst.run_steps - 1
    if most <= 0 or elapsed <= 0.0:
        return 0
    if inst.ranks > 1:
        return run_within(st, i, elapsed, most)
    steps: int = steps_within(head, st.values, inst.running_requests, _context(st, i), elapsed, most)
    return steps


@inner
def uncounted(st: FleetState | Queues, i: int, now: float) -> int:
    """Decode steps of an instance that have ended and are not in its columns yet."""
    return steps_to(st, i, now) if st.inst[i].run_kind == DECODING else 0


@inner
def end_after(st: FleetState | Queues, i: int, steps: int) -> float:
    """End of the first ``steps`` uncounted steps of a decode run. [s]"""
    inst = st.inst[i]
    end: float = inst.run_end_s
    if steps < inst.run_steps:
        if inst.ranks > 1:
            return inst.run_start_s + run_time(st, i, steps)
        head = inst.table
        end = inst.run_start_s + steps_time(head, st.values, inst.running_requests, _context(st, i), steps)
    return end


@inner
def due_s(st: FleetState | Queues, i: int) -> float:
    """A time before which no step of a decode run ends that is not counted yet and is not its last one. [s]"""
    inst = st.inst[i]
    if inst.run_kind != DECODING or inst.run_steps <= 1:
        return math.inf
    if inst.ranks > 1:
        first = run_time(st, i, 1)
    else:
        first = decode_time(inst.table, st.values, inst.running_requests, _context(st, i))
    return (inst.run_start_s + first) * (1.0 - ROUNDING)


@inner
def wake(st: FleetState | Queues, i: int, now: float) -> None:
    """Let an instance notice a change at ``now``: at once if idle, else at the end of the decode step in progress."""
    inst = st.inst[i]
    st.world[0].now_s = now
    if inst.run_kind == IDLE:
        inst.next_s = min(inst.next_s, now)
    elif inst.run_kind == DECODING and inst.run_steps > 1:
        steps = steps_to(st, i, now)
        if steps == 0 or end_after(st, i, steps) < now:
            steps += 1
        end = end_after(st, i, steps)
        inst.run_steps = steps
        inst.run_end_s = end
        inst.next_s = min(end, inst.leave_s)
    st.world[0].soonest_s = min(st.world[0].soonest_s, inst.next_s)


@inner
def begin(st: FleetState, i: int, now: float, kind: int, duration: float) -> None:
    """Start a run of an instance."""
    inst = st.inst[i]
    inst.run_kind = kind
    inst.run_start_s = now
    inst.run_end_s = now + duration
    inst.next_s = min(now + duration, inst.leave_s)


@inner
def waits(st: FleetState, i: int) -> bool:
    """Whether work waits that would be done if there were room."""
    inst = st.inst[i]
    return bool((inst.first[PROMPTS] >= 0 and (inst.mode != MANUAL or inst.closed > 0)) or inst.first[COMING] >= 0)
