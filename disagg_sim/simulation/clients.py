"""Say which request comes when: at the times of a trace, or when another has ended.

A session whose turn is rejected, or lost with its instance, ends there: its later turns never come, and count as the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from disagg_sim.workload.request_columns import Sessions


class NextRequest(NamedTuple):
    """A request that comes because another has ended."""

    request: int
    wait_s: float  # from that end to its arrival [s]


class Clients(Protocol):
    """Where the requests of a run come from."""

    timed: Sequence[int]  # requests whose arrival the trace says, in the order of arrival
    at_once: Sequence[int]  # requests that come at the start of the run
    hears: bool  # whether the end of a request may bring another

    def following(self, request: int) -> NextRequest | None:
        """What comes because a request has ended, with its last token or without; asked once a request."""
        ...

    def dropped(self, request: int) -> Sequence[int]:
        """Requests that will never come, since this one ended without its last token; asked before ``following``."""
        ...


class OpenLoop:
    """All requests come at the times of the trace, whatever becomes of those before them."""

    def __init__(self, requests: int) -> None:
        self.timed: Sequence[int] = range(requests)
        self.at_once: Sequence[int] = ()
        self.hears = False

    def following(self, request: int) -> NextRequest | None:  # noqa: ARG002 - nothing follows
        """See ``Clients``."""
        return None

    def dropped(self, request: int) -> Sequence[int]:  # noqa: ARG002 - all come
        """See ``Clients``."""
        return ()


class ClosedLoop:
    """So many requests are always there: when one ends, the next of the trace comes."""

    def __init__(self, requests: int, concurrency: int) -> None:
        self.timed: Sequence[int] = ()
        self.at_once: Sequence[int] = range(min(concurrency, requests))
        self.hears = True
        self._rest = iter(range(len(self.at_once), requests))

    def following(self, request: int) -> NextRequest | None:  # noqa: ARG002 - any end calls the next
        """See ``Clients``."""
        after = next(self._rest, None)
        return None if after is None else NextRequest(after, 0.0)

    def dropped(self, request: int) -> Sequence[int]:  # noqa: ARG002 - all come
        """See ``Clients``."""
        return ()


class SessionLoop:
    """Later turns come a think time after the turn before has ended, first ones at the times of the trace."""

    def __init__(self, sessions: Sessions, concurrency: int = 0) -> None:
        previous = sessions.previous()
        later = np.flatnonzero(previous >= 0)
        after = np.full(previous.size, -1)
        after[previous[later]] = later
        self._after: list[int] = after.tolist()
        self._think: list[float] = sessions.think_s.tolist()
        first: list[int] = np.flatnonzero(previous < 0).tolist()
        self.timed: Sequence[int] = () if concurrency else first
        self.at_once: Sequence[int] = first[:concurrency]
        self.hears = True
        self._rest = iter(first[concurrency:] if concurrency else ())

    def following(self, request: int) -> NextRequest | None:
        """See ``Clients``."""
        turn = self._after[request]
        if turn >= 0:
            return NextRequest(turn, self._think[turn])
        begins = next(self._rest, None)
        return None if begins is None else NextRequest(begins, 0.0)

    def dropped(self, request: int) -> Sequence[int]:
        """See ``Clients``."""
        turns, turn = [], self._after[request]
        while turn >= 0:
            turns.append(turn)
            turn = self._after[turn]
        self._after[request] = -1
        return turns
