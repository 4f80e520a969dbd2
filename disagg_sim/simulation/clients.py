"""Say which request comes when: at the times of a trace, or when another has ended.

A session whose turn is rejected, or lost with its instance, ends there: its later turns never come, and count as the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from disagg_sim.workload.request_columns import Sessions


class NextRequest(NamedTuple):
    """A request that comes because another has ended."""

    request: int
    wait_s: float  # from that end to its arrival [s]


class Clients:
    """Where the requests of a run come from: so many are always there, or all come at the times of the trace.

    With sessions it is their first turns that come so. A later turn comes a think time after the turn before has ended.
    """

    def __init__(self, requests: int, concurrency: int = 0, sessions: Sessions | None = None) -> None:
        first: Sequence[int] = range(requests)
        self._after: dict[int, int] = {}  # of a turn, the one after it
        self._think: list[float] = []  # before each turn [s]
        if sessions is not None:
            previous = sessions.previous()
            first, later = (np.flatnonzero(each).tolist() for each in (previous < 0, previous >= 0))
            self._after = dict(zip(previous[later].tolist(), later, strict=True))
            self._think = sessions.think_s.tolist()
        #: Requests whose arrival the trace says, in the order of arrival; those that come at the start of the run.
        self.timed, self.at_once = (first[:0], first[:concurrency]) if concurrency else (first, first[:0])
        self.hears = concurrency > 0 or sessions is not None  # whether the end of a request may bring another
        self._rest = iter(first[concurrency:] if concurrency else ())

    def following(self, request: int) -> NextRequest | None:
        """What comes because a request has ended, with its last token or without; asked once a request."""
        turn = self._after.get(request)
        if turn is not None:
            return NextRequest(turn, self._think[turn])
        begins = next(self._rest, None)
        return None if begins is None else NextRequest(begins, 0.0)

    def dropped(self, request: int) -> Sequence[int]:
        """Requests that will never come, since this one ended without its last token; asked before ``following``."""
        turns, turn = [], self._after.pop(request, None)
        while turn is not None:
            turns.append(turn)
            turn = self._after.get(turn)
        return turns
