"""Numbers of all requests of a long run, in memory that is reserved and not filled: only some are held at a time."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Bytes of a number in a column. [B]
WIDTH = 8
#: Numbers that are looked at together. [1]
BLOCK = 2**20


class SparseColumn:
    """Numbers of all requests, of which some are held; 0 where they are not.

    Takes ``count`` [request].
    """

    def __init__(self, count: int, kind: type[np.generic]) -> None:
        self._begin = 0  # bytes before it are given back
        self._reserve(count, kind)

    def _reserve(self, count: int, kind: type[np.generic]) -> None:
        self._kind = kind
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

    def __getstate__(self) -> tuple[int, Any, int, NDArray[Any]]:
        """What is held, from the first number on to the last that is not 0."""
        first = self._begin // WIDTH
        end = first
        for begin in range(first, self.values.size, BLOCK):
            there = np.flatnonzero(self.values[begin : begin + BLOCK])
            end = begin + int(there[-1]) + 1 if there.size else end
        return self.values.size, self._kind, self._begin, self.values[first:end].copy()

    def __setstate__(self, state: tuple[int, Any, int, NDArray[Any]]) -> None:
        """Hold the same."""
        count, kind, begin, held = state
        self._begin = begin
        self._reserve(count, kind)
        self.values[begin // WIDTH : begin // WIDTH + held.size] = held
