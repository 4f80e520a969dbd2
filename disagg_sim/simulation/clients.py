"""Say which request comes when: at the times of a trace, or when another has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Coming(NamedTuple):
    """A request that comes because another has ended."""

    request: int
    wait_s: float  # from that end to its arrival [s]


class Clients(Protocol):
    """Where the requests of a run come from."""

    timed: Sequence[int]  # requests whose arrival the trace says, in the order of arrival
    at_once: Sequence[int]  # requests that come at the start of the run
    hears: bool  # whether the end of a request may bring another

    def following(self, request: int) -> Coming | None:
        """What comes because a request has ended, with its last token or without; asked once a request."""
        ...


class OpenLoop:
    """All requests come at the times of the trace, whatever becomes of those before them."""

    def __init__(self, requests: int) -> None:
        self.timed: Sequence[int] = range(requests)
        self.at_once: Sequence[int] = ()
        self.hears = False

    def following(self, request: int) -> Coming | None:  # noqa: ARG002 - nothing follows
        """See ``Clients``."""
        return None


class ClosedLoop:
    """So many requests are always there: when one ends, the next of the trace comes."""

    def __init__(self, requests: int, concurrency: int) -> None:
        self.timed: Sequence[int] = ()
        self.at_once: Sequence[int] = range(min(concurrency, requests))
        self.hears = True
        self._rest = iter(range(len(self.at_once), requests))

    def following(self, request: int) -> Coming | None:  # noqa: ARG002 - any end calls the next
        """See ``Clients``."""
        after = next(self._rest, None)
        return None if after is None else Coming(after, 0.0)
