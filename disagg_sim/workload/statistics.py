"""Compute the statistics of a trace: rate, burstiness, lengths, correlation, prefix reuse.

Burstiness is the coefficient of variation of what arrives in a minute, minutes counted from time 0, standard
deviations with the number of minutes as divisor. It is computed with and without the minutes that have no request, as
published figures are of both kinds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.workload.request_columns import PrefixBlocks, Sessions, Tokens
from disagg_sim.workload.trace import Trace

MINUTE = 60.0  # [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStatistics:
    """Lengths of requests. [token]"""

    mean: float
    cv: float  # standard deviation over mean [1]
    p50: float
    p90: float
    p99: float
    maximum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteStatistics:
    """What arrives in a minute; nan where the minutes are too few or all alike."""

    minutes: int  # minutes that are counted [1]
    requests_cv: float  # coefficient of variation of the requests of a minute [1]
    input_cv: float  # of its input tokens [1]
    output_cv: float  # of its output tokens [1]
    correlation: float  # of its input with its output tokens [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    """Sessions of a trace, a request without one counted as a session of one turn."""

    sessions: int  # [1]
    turns: float  # mean of a session [request]
    most_turns: int  # [request]
    think_p50_s: float  # before later turns; nan without one [s]
    think_p90_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Statistics of a trace."""

    name: str
    requests: int
    dropped: int  # rows of zero tokens that the reader left out [request]
    duration_s: float  # first arrival to last [s]
    rate_per_s: float  # nan for a single request [request/s]
    peak_minute: int  # most requests of a minute [request]
    gap_cv: float  # coefficient of variation of the gaps between arrivals [1]
    every_minute: MinuteStatistics  # from time 0 to the last arrival
    busy_minutes: MinuteStatistics  # those with a request
    input_tokens: LengthStatistics
    output_tokens: LengthStatistics
    length_correlation: float  # of a request's input with its output [1]
    prefix_hit_rate: float | None  # blocks found in a cache that keeps all; None without ids [1]
    sessions: SessionStatistics | None  # None where requests come by themselves
    notes: tuple[str, ...]


def trace_statistics(trace: Trace) -> TraceStatistics:
    """Compute the statistics of a trace: rate, burstiness, lengths, correlation and prefix reuse.

    Returns times in s, lengths in tokens, coefficients of variation [1]; nan where the trace is too short for one.
    """
    requests = per_minute(trace.arrival)
    minutes = np.stack(
        [requests, per_minute(trace.arrival, trace.input_tokens), per_minute(trace.arrival, trace.output_tokens)]
    )
    return TraceStatistics(
        name=trace.name,
        requests=len(trace),
        dropped=trace.dropped,
        duration_s=trace.duration,
        rate_per_s=trace.rate if trace.duration > 0 else math.nan,
        peak_minute=int(requests.max()),
        gap_cv=_cv(np.diff(trace.arrival)),
        every_minute=_minutes(minutes),
        busy_minutes=_minutes(minutes[:, requests > 0]),
        input_tokens=_lengths(trace.input_tokens),
        output_tokens=_lengths(trace.output_tokens),
        length_correlation=_correlation(trace.input_tokens, trace.output_tokens),
        prefix_hit_rate=prefix_hit_rate(trace.prefix) if trace.prefix else None,
        sessions=_sessions(trace.sessions) if trace.sessions else None,
        notes=trace.notes,
    )


def per_minute(arrival: Floats, amount: Tokens | None = None) -> Floats:
    """Count the requests of every minute from time 0 on, or add up an amount of theirs."""
    return np.bincount((arrival // MINUTE).astype(np.int64), amount).astype(np.float64)


def prefix_hit_rate(prefix: PrefixBlocks) -> float:
    """Share of all blocks that belong to a prefix seen before, with a cache that keeps everything. [1]

    A request hits with its leading blocks up to the first one that no earlier request had; nan without a block.
    """
    if not prefix.ids.size:
        return math.nan
    owner = np.repeat(np.arange(prefix.offsets.size - 1), np.diff(prefix.offsets))
    _, first, place = np.unique(prefix.ids, return_index=True, return_inverse=True)
    missing = np.cumsum(owner[first][place] == owner)  # blocks that no earlier request had, up to each block
    before = np.concatenate([[0], missing])[prefix.offsets[:-1]]
    return float(np.mean(missing == before[owner]))


def _sessions(sessions: Sessions) -> SessionStatistics:
    turns = np.unique(sessions.session, return_counts=True)[1]
    think = sessions.think_s[sessions.previous() >= 0]
    p50, p90 = np.quantile(think, [0.5, 0.9]).tolist() if think.size else (math.nan, math.nan)
    return SessionStatistics(
        sessions=turns.size, turns=float(turns.mean()), most_turns=int(turns.max()), think_p50_s=p50, think_p90_s=p90
    )


def _minutes(amounts: Floats) -> MinuteStatistics:
    requests, inputs, outputs = amounts
    return MinuteStatistics(
        minutes=requests.size,
        requests_cv=_cv(requests),
        input_cv=_cv(inputs),
        output_cv=_cv(outputs),
        correlation=_correlation(inputs, outputs),
    )


def _lengths(tokens: Tokens) -> LengthStatistics:
    p50, p90, p99 = np.quantile(tokens, [0.5, 0.9, 0.99]).tolist()
    return LengthStatistics(
        mean=float(tokens.mean()), cv=_cv(tokens), p50=p50, p90=p90, p99=p99, maximum=int(tokens.max())
    )


def _cv(values: NDArray[np.float64] | NDArray[np.int64]) -> float:
    mean = float(values.mean()) if values.size else 0.0
    return float(values.std()) / mean if mean > 0 else math.nan


def _correlation(a: NDArray[np.float64] | NDArray[np.int64], b: NDArray[np.float64] | NDArray[np.int64]) -> float:
    if a.size < 2 or not (np.ptp(a) > 0 and np.ptp(b) > 0):
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])
