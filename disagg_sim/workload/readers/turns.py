"""Read the sessions of a trace file: which rows are turns of one session, and the think time before each.

Two forms. Columns ``session`` and ``think_s`` say it; the arrival of a later turn may then be left empty. BurstGPT has
``Session ID`` and ``Elapsed time``, from a request to the end of its answer: the think time is what passed from there
to the next request of the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disagg_sim.workload.readers.clock import TIME_UNITS, Arrivals, from_column
from disagg_sim.workload.request_columns import Sessions

if TYPE_CHECKING:
    from disagg_sim.workload.readers.columns import Table

#: Columns of sessions in the plain form; the last may be missing.
SESSION, THINK, TURN = "session", "think_s", "turn"
#: Columns of sessions in BurstGPT.
BURST_SESSION, BURST_ELAPSED = "Session ID", "Elapsed time"


def with_turns(table: Table, name: str, unit: str) -> tuple[Arrivals, Sessions]:
    """Read arrivals and sessions, a row each, of columns ``session``, ``think_s`` and, if there, ``turn``, in ``unit``.

    >>> from pathlib import Path
    >>> from disagg_sim.workload.readers.columns import Table
    >>> table = Table(Path("x.csv"), b"arrival_s,session,think_s\\n5,a,\\n,a,2\\n6,b,\\n")
    >>> arrivals, sessions = with_turns(table, "arrival_s", "")
    >>> arrivals.seconds.tolist(), sessions.previous().tolist()
    ([0.0, 2.0, 1.0], [-1, 0, -1])
    """
    table.require((SESSION, THINK))
    number, order, later = _order(table)
    think = _blank_is_zero(table, THINK, later) * TIME_UNITS[unit or "s"]
    empty = (table.text(name) == "").to_numpy() & later
    told = np.flatnonzero(~empty)
    arrivals = from_column(table.part(told), name, unit)
    seconds = np.full(number.size, np.nan)
    seconds[told] = arrivals.seconds
    behind = -np.inf
    for row in order.tolist():
        if empty[row]:
            seconds[row] = behind + think[row]
        elif later[row] and seconds[row] < behind:
            table.refuse(np.arange(number.size) == row, name, "lies before the turn before it")
        behind = seconds[row]
    place = np.searchsorted(told, np.arange(number.size))
    return Arrivals(seconds, lambda row: arrivals.stamp(int(place[row]))), Sessions(session=number, think_s=think)


def of_burstgpt(table: Table, seconds: NDArray[np.float64]) -> Sessions | None:
    """Read the sessions of a BurstGPT trace; ``None`` where it lacks their columns, or no session has two turns.

    A think time that would be negative, of stamps in whole seconds, is 0.

    The answer to the first request ends at 10 + 4 s, the next of the session comes at 20:

    >>> from pathlib import Path
    >>> from disagg_sim.workload.readers.columns import Table
    >>> table = Table(Path("x.csv"), b"Timestamp,Session ID,Elapsed time\\n10,7,4\\n20,7,3\\n21,,\\n")
    >>> found = of_burstgpt(table, np.array([10.0, 20.0, 21.0]))
    >>> found.think_s.tolist(), found.session.tolist()
    ([0.0, 6.0, 0.0], [0, 0, 1])
    """
    if BURST_SESSION not in table.header or BURST_ELAPSED not in table.header:
        return None
    number = _numbers(table, BURST_SESSION)
    elapsed = _blank_is_zero(table, BURST_ELAPSED, np.zeros(number.size, dtype=bool))
    order = np.lexsort((seconds, number))
    follows = np.flatnonzero(np.diff(number[order]) == 0)
    if not follows.size:
        return None
    before, after = order[follows], order[follows + 1]
    think = np.zeros(number.size)
    think[after] = np.maximum(seconds[after] - seconds[before] - elapsed[before], 0.0)
    return Sessions(session=number, think_s=think)


def _numbers(table: Table, name: str) -> NDArray[np.int64]:
    """Sessions numbered from 0 in the order of the file; an empty cell is a session of its own."""
    text = table.text(name).to_numpy(dtype=object)
    alone = np.flatnonzero(text == "")
    text[alone] = [(row,) for row in alone.tolist()]  # equals no text
    known: dict[object, int] = {}
    return np.array([known.setdefault(each, len(known)) for each in text.tolist()], dtype=np.int64)


def _order(table: Table) -> tuple[NDArray[np.int64], NDArray[np.intp], NDArray[np.bool_]]:
    """Number of the session of each row; rows by session, then as in the file; which rows are no first turn."""
    number = _numbers(table, SESSION)
    order = np.argsort(number, kind="stable")
    later = np.zeros(number.size, dtype=bool)
    later[order[1:]] = np.diff(number[order]) == 0
    if TURN in table.header:
        turn, falls = table.numbers(TURN), np.zeros(number.size, dtype=bool)
        falls[order[1:]] = np.diff(turn[order]) <= 0
        table.refuse(falls & later, TURN, "is not above that of the turn before, by the rows of its session")
    return number, order, later


def _blank_is_zero(table: Table, name: str, needed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A column of numbers from 0 on; cells may be empty where they are not needed."""
    given = np.flatnonzero((table.text(name) != "").to_numpy() | needed)
    values = np.zeros(needed.size)
    if given.size:
        part = table.part(given)
        values[given] = part.numbers(name)
        part.refuse(values[given] < 0, name, "is negative; allowed: 0 or more")
    return values
