"""A trace that is not held: drawn or read anew, window by window, whenever its requests are needed.

>>> from disagg_sim.workload.synthetic import synthetic_stream
>>> stream = synthetic_stream(rate=2.0, lengths=(512, 64), requests=3, window=2)
>>> [window.input_tokens.tolist() for window in stream.windows()], len(stream)
([[512, 512], [512]], 3)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError, above_zero, whole_number
from disagg_sim.workload.request_columns import Tokens
from disagg_sim.workload.trace import MOST_REQUESTS, Trace, too_many

#: Requests that are held at a time where nothing else is said: 40 B each, 5 MB. [request]
WINDOW = 2**17
#: Most requests of a stream: ten datacenter days. [request]
MOST_STREAMED = 10**9


class Piece(NamedTuple):
    """Some requests, one after another."""

    arrival: Floats  # (requests,) ascending [s]
    input_tokens: Tokens  # (requests,) [token]
    output_tokens: Tokens  # (requests,) [token]


class RequestSource(Protocol):
    """Where the requests of a stream come from."""

    def pieces(self, most: int) -> Iterator[Piece]:
        """All requests from the first on, about ``most`` at once; the same ones for every ``most`` and every call."""


class Count(NamedTuple):
    """What is known of all requests after they have been seen once."""

    requests: int  # [request]
    first_s: float  # arrival [s]
    last_s: float  # [s]
    least: tuple[int, int]  # the shortest prompt and the shortest answer [token]


@dataclass(frozen=True, eq=False, kw_only=True)
class TraceStream:
    """Requests in the order of their arrival, of which a window at a time is held.

    Runs take it in place of a ``Trace`` of the same requests, with the same results; those that need all requests at
    once hold all of it. It knows no sessions, classes, models or prefix blocks.
    """

    sessions: ClassVar[None] = None
    prefix: ClassVar[None] = None
    classes: ClassVar[None] = None
    models: ClassVar[None] = None
    dropped: ClassVar[int] = 0

    name: str
    window: int  # most requests that come at once, from 1 on [request]
    source: RequestSource
    scales: tuple[float, ...] = ()  # by which time stamps are divided, one after another [1]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """``InputError`` for a window below 1."""
        whole_number("window", self.window, most=MOST_STREAMED)

    def windows(self) -> Iterator[Trace]:
        """The requests from the first on, up to ``window`` at once; each window keeps the clock of the whole."""
        last, count = 0.0, 0
        for piece in self.source.pieces(self.window):
            arrival = piece.arrival
            for scale in self.scales:
                arrival = arrival / scale
            for begin in range(0, arrival.size, self.window):
                rows = slice(begin, begin + self.window)
                inputs, outputs = piece.input_tokens[rows], piece.output_tokens[rows]
                found = Trace(arrival=arrival[rows], input_tokens=inputs, output_tokens=outputs, name=self.name)
                if found.arrival[0] < last:
                    raise InputError(
                        f"trace {self.name}: request {count + 1} arrives at {found.arrival[0]:g} s, after one at "
                        f"{last:g} s; allowed: in the order of arrival, where requests are not held"
                    )
                last, count = float(found.arrival[-1]), count + len(found)
                if count > MOST_STREAMED:
                    raise InputError(f"trace {self.name}: more than {MOST_STREAMED:,} requests; allowed: so many")
                yield found

    @cached_property
    def count(self) -> Count:
        """Of all requests, seen once."""
        seen = [Count(len(each), float(each.arrival[0]), each.last_s, each.least) for each in self.windows()]
        if not seen:
            raise InputError(f"trace {self.name} has no request; allowed: one or more")
        return Count(
            sum(each.requests for each in seen),
            seen[0].first_s,
            seen[-1].last_s,
            (min(each.least[0] for each in seen), min(each.least[1] for each in seen)),
        )

    def __len__(self) -> int:
        """Number of requests. [request]"""
        return self.count.requests

    @property
    def least(self) -> tuple[int, int]:
        """The shortest prompt and the shortest answer. [token]"""
        return self.count.least

    @property
    def last_s(self) -> float:
        """Arrival of the last request. [s]"""
        return self.count.last_s

    @property
    def duration(self) -> float:
        """Time from the first arrival to the last. [s]"""
        return self.count.last_s - self.count.first_s

    @property
    def period(self) -> float:
        """As of a ``Trace``. [s]"""
        return self.duration * len(self) / (len(self) - 1) if len(self) > 1 else math.inf

    @property
    def rate(self) -> float:
        """As of a ``Trace``. [request/s]"""
        return len(self) / self.period if self.period > 0 else math.inf

    def scaled(self, rate: float) -> TraceStream:
        """The same requests at ``rate`` times the request rate: time stamps are divided by it. [1]"""
        factor = above_zero("rate", rate)
        found = replace(self, scales=(*self.scales, factor))
        if "count" in self.__dict__:
            count = self.count._replace(first_s=self.count.first_s / factor, last_s=self.count.last_s / factor)
            found.__dict__["count"] = count
        return found

    def head(self, n: int) -> Trace:
        """The first ``n`` requests, or all where there are fewer, in memory. [request]"""
        found, left = [], whole_number("n", n, most=MOST_REQUESTS)
        for window in self.windows():
            found.append(window.head(left) if len(window) > left else window)
            left -= len(found[-1])
            if left == 0:
                break
        return Trace(
            arrival=np.concatenate([each.arrival for each in found]),
            input_tokens=np.concatenate([each.input_tokens for each in found]),
            output_tokens=np.concatenate([each.output_tokens for each in found]),
            name=self.name,
            notes=self.notes,
        )

    def whole(self) -> Trace:
        """All requests, in memory."""
        if len(self) > MOST_REQUESTS:
            raise InputError(too_many(f"trace {self.name} in memory", len(self)))
        return self.head(len(self))


def in_memory(trace: Trace | TraceStream) -> Trace:
    """Hold all requests of a stream; a trace is held as it is."""
    return trace.whole() if isinstance(trace, TraceStream) else trace
