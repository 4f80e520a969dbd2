"""Hold those requests of a stream that a run may still look at, under the numbers that they have in the whole.

A window is written into its place in columns of the whole (``column``) when the first of its requests is needed, and
given back once they have left the run. So whoever looks a request up needs not know of windows. Columns of a long run
lie in memory that is reserved and not filled.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.workload.stream import TraceStream

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
