"""Decide when requests arrive: at a recorded time, or when another has ended; keep a window of a stream in memory.

A session ends with a turn that is rejected, or lost with its instance: its later turns never arrive and get the same
status.

A window of a stream is written into columns of all requests when its first request is needed, and its memory is
released when its requests have left the run, so that callers need not know of windows. The columns are reserved memory.
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
    """A request that arrives because another has ended."""

    request: int
    wait_s: float  # from that end to its arrival [s]


class Clients:
    """Source of the requests of a run: a closed loop of ``concurrency`` requests, or the times of the trace.

    With sessions this applies to first turns; a later turn arrives a think time after the one before has ended.
    """

    def __init__(self, requests: int, concurrency: int, sessions: Sessions | None) -> None:
        first: Sequence[int] = range(requests)
        self._after: dict[int, int] = {}  # of a turn, the one after it
        self._think: list[float] = []  # before each turn [s]
        if sessions is not None:
            previous = sessions.previous()
            first, later = (np.flatnonzero(each).tolist() for each in (previous < 0, previous >= 0))
            self._after = dict(zip(previous[later].tolist(), later, strict=True))
            self._think = sessions.think_s.tolist()
        #: Requests that arrive at recorded times, in order; requests that arrive at the start of the run.
        self.timed, self.at_once = (first[:0], first[:concurrency]) if concurrency else (first, first[:0])
        self.hears = concurrency > 0 or sessions is not None  # whether the end of a request may bring another
        self._rest = iter(first[concurrency:] if concurrency else ())

    def following(self, request: int) -> NextRequest | None:
        """Find the request that arrives because another has ended, completed or not; call once a request."""
        turn = self._after.get(request)
        if turn is not None:
            return NextRequest(turn, self._think[turn])
        begins = next(self._rest, None)
        return None if begins is None else NextRequest(begins, 0.0)

    def dropped(self, request: int) -> Sequence[int]:
        """List the requests that never arrive because this one failed; call before ``following``."""
        turns, turn = [], self._after.pop(request, None)
        while turn is not None:
            turns.append(turn)
            turn = self._after.get(turn)
        return turns


#: Bytes of a number in a column. [B]
WIDTH = 8


class SparseColumn:
    """A column of all requests, of which a window is in memory; the others read as 0."""

    def __init__(self, count: int, kind: type[np.generic]) -> None:
        self._begin, self._kind = 0, kind  # bytes before it are released
        self._memory: Any = None
        if hasattr(mmap, "MADV_DONTNEED"):  # elsewhere nothing is released
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._memory = mmap.mmap(-1, WIDTH * count, flags=flags)
        self.values: NDArray[Any] = np.zeros(count, kind) if self._memory is None else np.frombuffer(self._memory, kind)

    def release(self, before: int) -> None:
        """Release the memory of requests before one, in whole pages."""
        end = WIDTH * before // mmap.PAGESIZE * mmap.PAGESIZE
        if self._memory is not None and end > self._begin:
            self._memory.madvise(mmap.MADV_DONTNEED, self._begin, end - self._begin)
            self._begin = end

    def longer(self, count: int) -> SparseColumn:
        """Copy to a column of ``count`` numbers."""
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
        """All requests, in memory or not. [request]"""
        return self._count

    def reach(self, request: int) -> int:
        """Read the stream up to a request, or to its end; return the number of requests read so far. [request]"""
        while self.high <= request and self.high < self._count:
            window = next(self._windows)
            rows = slice(self.high, self.high + len(window))
            self.high = rows.stop
            self.arrival_s[rows], self.placed_s[rows] = window.arrival, window.arrival + self._host
            self.input_tokens[rows], self.output_tokens[rows] = window.input_tokens, window.output_tokens
            self.tokens[rows] = window.input_tokens + window.output_tokens
        return self.high

    def release(self, before: int) -> None:
        """Release the memory of requests before one."""
        for column in self._columns:
            column.release(before)
