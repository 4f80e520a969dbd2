"""Compiled: how far a run of decode steps has come.

The columns of an instance are those of its last event. Steps of its run that have ended since are counted when somebody
asks for them, or when the run ends.
"""

from __future__ import annotations

import math

from disagg_sim.simulation.kernel.compiled import inlined
from disagg_sim.simulation.kernel.layout import COMING, DECODING, IDLE, PROMPTS, FleetState, Mode
from disagg_sim.simulation.kernel.ranks import decode_piece, run_time, run_within

MANUAL = int(Mode.MANUAL)
#: Share of a time by which arithmetic may miss it. [1]
ROUNDING = 1e-12


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
def wake(st: FleetState, i: int, now: float) -> None:
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


@inlined
def begin(st: FleetState, i: int, now: float, kind: int, duration: float) -> None:
    """Start a run of an instance."""
    inst = st.inst[i]
    inst.run_kind = kind
    inst.run_start_s = now
    inst.run_end_s = now + duration
    inst.next_s = min(now + duration, inst.leave_s)


@inlined
def waits(st: FleetState, i: int) -> bool:
    """Whether work waits that would be done if there were room."""
    inst = st.inst[i]
    return bool((inst.first[PROMPTS] >= 0 and (inst.mode != MANUAL or inst.closed > 0)) or inst.first[COMING] >= 0)
