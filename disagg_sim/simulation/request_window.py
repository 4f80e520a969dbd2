"""Hold those requests of a stream that a run may still look at, under the numbers that they have in the whole.

A window is written into its place in columns of the whole (``column``) when the first of its requests is needed, and
given back once they have left the run. So whoever looks a request up needs not know of windows.
"""

from __future__ import annotations

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.sparse_column import SparseColumn
from disagg_sim.workload.stream import TraceStream


class RequestWindow:
    """Requests of a stream.

    Takes ``arrival_s``, ``placed_s``, ``input_tokens``, ``output_tokens`` and ``tokens`` (columns of all requests;
    ``tokens`` are those of prompt and output [s], [token]).
    """

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
