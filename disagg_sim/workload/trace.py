"""A request trace: when requests arrive, how long they are, and which prefix blocks they share.

>>> trace = Trace(arrival=[0.0, 1.5, 3.0], input_tokens=[512, 64, 900], output_tokens=[10, 20, 30])
>>> trace.scaled(2.0).arrival.tolist()
[0.0, 0.75, 1.5]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError, above_zero, whole_number
from disagg_sim.workload.request_columns import Labels, PrefixBlocks, Sessions, Tokens, read_only

#: Default name of a trace.
UNNAMED = "trace"
#: Most requests of a trace: each takes about 100 B in the trace and 1 kB in a simulation, so 10 GB in all. [request]
MOST_REQUESTS = 10**7
#: Latest arrival: 32 years, where a double resolves 0.1 us. Later ones are clock times. [s]
LONGEST_S = 1e9
#: A longer prompt or answer than this is a mistake. [token]
MOST_TOKENS = 10**9


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """Requests in order of arrival: at least one, each with input and output tokens.

    In sessions a turn starts after the previous turn has ended. The ``arrival`` of later turns is that of a recorded
    run, or of a run with instant answers; simulations do not replay it.
    """

    arrival: Floats  # (requests,) ascending, from 0 on [s]
    input_tokens: Tokens  # (requests,) at least 1 [token]
    output_tokens: Tokens  # (requests,) at least 1, the first token included [token]
    prefix: PrefixBlocks | None = None  # of every request, if known
    sessions: Sessions | None = None  # of every request; later turns wait for earlier ones
    classes: Labels | None = None  # service class of every request; None = one SLO for all
    models: Labels | None = None  # model of every request, by name; None = a single model
    name: str = UNNAMED
    notes: tuple[str, ...] = ()  # about requests that a reader dropped, sorted or completed
    dropped: int = 0  # requests without input or output tokens that a reader left out [request]

    def __post_init__(self) -> None:
        """``InputError`` unless the arrays are a sorted list of requests, within the limits of this module."""
        object.__setattr__(self, "arrival", read_only(self.arrival, np.float64))
        for name in ("input_tokens", "output_tokens"):
            object.__setattr__(self, name, self._tokens(name, getattr(self, name)))
        shapes = {self.arrival.shape, self.input_tokens.shape, self.output_tokens.shape}
        if len(shapes) > 1 or self.arrival.ndim != 1:
            raise InputError(f"trace {self.name}: arrays of shapes {sorted(shapes)} are not a list of requests")
        if not self.arrival.size:
            raise InputError(f"trace {self.name} has no request; allowed: one or more")
        if self.arrival.size > MOST_REQUESTS:
            raise InputError(too_many(f"trace {self.name}", self.arrival.size))
        if not (self.arrival[0] >= 0 and np.all(np.diff(self.arrival) >= 0) and math.isfinite(self.arrival[-1])):
            raise InputError(f"trace {self.name}: arrivals must be finite and ascend from 0 s or later")
        if self.arrival[-1] > LONGEST_S:
            raise InputError(
                f"trace {self.name}: an arrival at {self.arrival[-1]:g} s is out of range; allowed: up to "
                f"{LONGEST_S:g} s, counted from the first arrival (at {self.arrival[0]:g} s here)"
            )
        if min(self.input_tokens.min(), self.output_tokens.min()) < 1:
            raise InputError(f"trace {self.name}: lengths below 1 token; allowed: from 1")
        if self.prefix is not None and self.prefix.offsets.size != self.arrival.size + 1:
            raise InputError(f"trace {self.name}: prefix blocks of {self.prefix.offsets.size - 1} requests")
        if self.sessions is not None and self.sessions.session.size != self.arrival.size:
            raise InputError(f"trace {self.name}: sessions of {self.sessions.session.size} requests")
        for kind, labels in (("classes", self.classes), ("models", self.models)):
            if labels is not None and labels.number.size != self.arrival.size:
                raise InputError(f"trace {self.name}: {kind} of {labels.number.size} requests")

    def _tokens(self, name: str, values: ArrayLike) -> Tokens:
        """Lengths as whole numbers; ``InputError`` for others, and for lengths above ``MOST_TOKENS``."""
        given = np.asarray(values)
        if given.dtype.kind not in "iu" and given.size:
            given = given.astype(np.float64)
            if not np.all(given == np.rint(given)):  # nan, too
                bad = given[given != np.rint(given)].flat[0]
                raise InputError(f"trace {self.name}: {name} {bad:g} is not a whole number of tokens")
        if given.size and given.max() > MOST_TOKENS:
            raise InputError(
                f"trace {self.name}: {name} {given.max():g} is out of range; allowed: up to {MOST_TOKENS} tokens"
            )
        return read_only(given, np.int64)

    def __len__(self) -> int:
        """Number of requests. [request]"""
        return int(self.arrival.size)

    def __repr__(self) -> str:
        """Name, requests and duration."""
        return f"Trace({self.name}: {len(self)} requests in {self.duration:g} s)"

    def windows(self) -> Iterator[Trace]:
        """Yield the trace as one window; a ``TraceStream`` yields several."""
        yield self

    @property
    def least(self) -> tuple[int, int]:
        """The shortest prompt and the shortest answer. [token]"""
        return int(self.input_tokens.min()), int(self.output_tokens.min())

    @property
    def last_s(self) -> float:
        """Arrival of the last request. [s]"""
        return float(self.arrival[-1])

    @property
    def duration(self) -> float:
        """Time from the first arrival to the last. [s]"""
        return float(self.arrival[-1] - self.arrival[0])

    @property
    def period(self) -> float:
        """Duration plus one mean gap: the time after which the trace can repeat; inf without a gap. [s]"""
        return self.duration * len(self) / (len(self) - 1) if len(self) > 1 else math.inf

    @property
    def rate(self) -> float:
        """Requests over ``period``; inf where all arrive at once, 0 for a single request. [request/s]"""
        return len(self) / self.period if self.period > 0 else math.inf

    def scaled(self, rate: float) -> Trace:
        """Scale the request rate: divide the arrivals, or the first arrivals of sessions, by ``rate``. [1]

        Times within a session stay, since users think no faster.
        """
        factor = above_zero("rate", rate)
        if not math.isfinite(factor):
            raise InputError(f"rate must be finite, got {rate}")
        if self.sessions is None:
            return replace(self, arrival=self.arrival / factor)
        begin = self.arrival[self.sessions.first()]
        moved = joined([self], begin / factor + (self.arrival - begin))
        return replace(moved, notes=self.notes, dropped=self.dropped)

    def head(self, n: int) -> Trace:
        """Take the first ``n`` requests, or all if there are fewer. [request]"""
        return self.take(np.arange(min(whole_number("n", n), len(self))))

    def between(self, t0: float, t1: float) -> Trace:
        """Take the requests that arrive from ``t0`` to before ``t1``; ``t0`` becomes 0. [s]"""
        first, end = np.searchsorted(self.arrival, [t0, t1]).tolist()
        if first >= end:
            raise InputError(
                f"trace {self.name} has no request from {t0:g} to {t1:g} s; it runs from {self.arrival[0]:g} "
                f"to {self.arrival[-1]:g} s"
            )
        part = self.take(np.arange(first, end))
        return replace(part, arrival=part.arrival - t0)

    def take(self, rows: NDArray[np.intp]) -> Trace:
        """Take requests by ascending row numbers; their times stay."""
        return replace(
            self,
            arrival=self.arrival[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            prefix=self.prefix.take(rows) if self.prefix else None,
            sessions=self.sessions.take(rows) if self.sessions else None,
            classes=self.classes.take(rows) if self.classes else None,
            models=self.models.take(rows) if self.models else None,
        )

    def with_lengths(self, input_tokens: ArrayLike, output_tokens: ArrayLike) -> Trace:
        """Replace the lengths by numbers or arrays of shape (requests,), and drop prefix blocks. [token]"""
        return replace(
            self,
            input_tokens=np.broadcast_to(np.asarray(input_tokens), self.arrival.shape),
            output_tokens=np.broadcast_to(np.asarray(output_tokens), self.arrival.shape),
            prefix=None,
        )

    def frame(self) -> pd.DataFrame:
        """Make a table of requests in the plain CSV form; ``session``, ``think_s``, ``class``, ``model`` if known."""
        columns = {"arrival_s": self.arrival, "input_tokens": self.input_tokens, "output_tokens": self.output_tokens}
        if self.sessions is not None:
            columns |= {"session": self.sessions.session, "think_s": self.sessions.think_s}
        if self.classes is not None:
            columns |= {"class": np.array(self.classes.names)[self.classes.number]}
        if self.models is not None:
            columns |= {"model": np.array(self.models.names)[self.models.number]}
        return pd.DataFrame(columns)


def too_many(what: str, requests: float) -> str:
    """Write the message for more requests than a trace may have."""
    return f"{what}: {requests:,.0f} requests are too many; allowed: up to {MOST_REQUESTS:,}"


def concatenate(traces: Sequence[Trace]) -> Trace:
    """Play traces one after another, each from its first arrival on, with its mean gap after its last arrival.

    Prefix blocks of different traces are different, even with equal ids. ``InputError`` where a trace before the last
    has a single request, and so no gap.
    """
    if not traces:
        raise InputError("nothing to concatenate; allowed: one trace or more")
    periods = [trace.period for trace in traces[:-1]]
    if not all(map(math.isfinite, periods)):
        raise InputError(
            "nothing can follow a trace of a single request, which has no gap; allowed: 2 or more requests"
        )
    starts = traces[0].arrival[0] + np.concatenate([[0.0], np.cumsum(periods)])
    arrivals = [trace.arrival - trace.arrival[0] + start for trace, start in zip(traces, starts, strict=True)]
    return joined(traces, np.concatenate(arrivals))


def joined(traces: Sequence[Trace], arrival: Floats) -> Trace:
    """Join traces with new arrivals of shape (requests of all traces,), sorted; equal arrivals keep their order. [s]"""
    order = np.argsort(arrival, kind="stable")
    ordered = np.array_equal(order, np.arange(order.size))  # then the many prefix blocks need no copy
    prefix, sessions = _joined_prefix(traces), _joined_sessions(traces)
    return Trace(
        arrival=arrival[order],
        input_tokens=np.concatenate([trace.input_tokens for trace in traces])[order],
        output_tokens=np.concatenate([trace.output_tokens for trace in traces])[order],
        prefix=prefix if prefix is None or ordered else prefix.take(order),
        sessions=sessions.take(order) if sessions else None,
        classes=_joined_labels([trace.classes for trace in traces], "classes", order),
        models=_joined_labels([trace.models for trace in traces], "models", order),
        name=" + ".join(dict.fromkeys(trace.name for trace in traces)),
        notes=tuple(dict.fromkeys(note for trace in traces for note in trace.notes)),
        dropped=sum(trace.dropped for trace in traces),
    )


def _joined_labels(labels: Sequence[Labels | None], kind: str, order: NDArray[np.intp]) -> Labels | None:
    """Join labels by their names; ``InputError`` where only some traces have labels."""
    own = [each for each in labels if each is not None]
    if not own:
        return None
    if len(own) < len(labels):
        raise InputError(f"traces with {kind} do not join those without; allowed: {kind} in all, or in none")
    names = tuple(dict.fromkeys(name for each in own for name in each.names))
    places = [np.array([names.index(name) for name in each.names])[each.number] for each in own]
    return Labels(names=names, number=np.concatenate(places)[order])


def _joined_sessions(traces: Iterable[Trace]) -> Sessions | None:
    """Join sessions, numbered on from trace to trace; without sessions each request is its own."""
    numbers, think, base, some = [], [], 0, False
    for trace in traces:
        own, some = trace.sessions, some or trace.sessions is not None
        place = np.unique(own.session, return_inverse=True)[1] if own else np.arange(len(trace))
        numbers.append(place + base)
        think.append(own.think_s if own else np.zeros(len(trace)))
        base += len(trace)
    return Sessions(session=np.concatenate(numbers), think_s=np.concatenate(think)) if some else None


def _joined_prefix(traces: Iterable[Trace]) -> PrefixBlocks | None:
    """Join prefix blocks, with the ids of each trace after all earlier ids."""
    sizes = {trace.prefix.block_tokens for trace in traces if trace.prefix}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise InputError(f"prefix blocks of {sorted(sizes)} tokens do not join; allowed: one size")
    lengths, ids, base = [], [], 0
    for trace in traces:
        if trace.prefix is None:
            lengths.append(np.zeros(len(trace), dtype=np.int64))
            continue
        lengths.append(np.diff(trace.prefix.offsets))
        if trace.prefix.ids.size:
            low, high = int(trace.prefix.ids.min()), int(trace.prefix.ids.max())
            ids.append(trace.prefix.ids + (base - low))
            base += high - low + 1
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    flat = np.concatenate(ids) if ids else np.zeros(0, dtype=np.int64)
    return PrefixBlocks(offsets=offsets, ids=flat, block_tokens=sizes.pop())
