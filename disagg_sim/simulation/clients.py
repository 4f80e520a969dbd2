"""Say which request comes when, at its time or when another has ended; hold those of a stream that are near.

A session whose turn is rejected, or lost with its instance, ends there: its later turns never come, and count as the
same.

A window of a stream is written into its place in columns of the whole when the first of its requests is needed, and
given back once they have left the run. So whoever looks a request up needs not know of windows. Columns of a long run
lie in memory that is reserved and not filled.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.workload.request_columns import Sessions
from disagg_sim.workload.stream import TraceStream


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


#: Bytes of a number in a column. [B]
WIDTH = 8


class SparseColumn:
    """Numbers of all requests, of which some are held; 0 where they are not."""

    def __init__(self, count: int, kind: type[np.generic]) -> None:
        self._begin, self._kind = 0, kind  # bytes before it are given back
        self._memory: Any = None
        if hasattr(mmap, "MADV_DONTNEED"):  # elsewhere nothing is given back
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._memory = mmap.mmap(-1, WIDTH * count, flags=flags)
        self.values: NDArray[Any] = np.zeros(count, kind) if self._memory is None else np.frombuffer(self._memory, kind)

    def release(self, before: int) -> None:
        """Give back the numbers of requests before one, in whole pages."""
        end = WIDTH * before // mmap.PAGESIZE * mmap.PAGESIZE
        if self._memory is not None and end > self._begin:
            self._memory.madvise(mmap.MADV_DONTNEED, self._begin, end - self._begin)
            self._begin = end

    def longer(self, count: int) -> SparseColumn:
        """A column of so many numbers that begins with these."""
        first, found = self._begin // WIDTH, SparseColumn(count, self._kind)
        found.values[first : self.values.size] = self.values[first:]
        found._begin = self._begin
        return found


class RequestWindow:
    """Requests of a stream, in columns of all requests. [s], [token]"""

    def __init__(self, stream: TraceStream, host_s: float) -> None:
        self._count, self._host, self._windows = len(stream), host_s, stream.windows()
        self.high = 0
        kinds = (np.float64, np.float64, np.int64, np.int64, np.int64)
        self._columns = [SparseColumn(self._count, kind) for kind in kinds]
        columns = tuple(column.values for column in self._columns)
        self.arrival_s: Floats = columns[0]
        self.placed_s: Floats = columns[1]
        self.input_tokens: Ints = columns[2]
        self.output_tokens: Ints = columns[3]
        self.tokens: Ints = columns[4]
        self.reach(0)

    def __len__(self) -> int:
        """All requests, held or not. [request]"""
        return self._count

    def reach(self, request: int) -> int:
        """Have a request at hand, if there is one: how many are from the first on, with those given back. [request]"""
        while self.high <= request and self.high < self._count:
            window = next(self._windows)
            rows = slice(self.high, self.high + len(window))
            self.high = rows.stop
            self.arrival_s[rows], self.placed_s[rows] = window.arrival, window.arrival + self._host
            self.input_tokens[rows], self.output_tokens[rows] = window.input_tokens, window.output_tokens
            self.tokens[rows] = window.input_tokens + window.output_tokens
        return self.high

    def release(self, before: int) -> None:
        """Give back the requests before one."""
        for column in self._columns:
            column.release(before)
