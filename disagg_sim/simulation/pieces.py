"""Collect the records of a run from its arrays, column by column, at the end or piece by piece as it goes.

Records go to a sink. Those of a run that keeps them (``records: full``) go at its end; else they go piece by piece, so
that the memory of a run does not grow with its trace: at a sample, once enough segments have come since the last piece,
the first requests of the trace leave, as far as all are over. Their records go to the sink, their totals are added up,
and the kernel forgets their segments. A request that stays keeps those behind it. Nothing that follows changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Ints, Mask
from disagg_sim.domain import Slo
from disagg_sim.simulation.cluster import Cluster
from disagg_sim.simulation.kernel.layout import SegmentStatus
from disagg_sim.simulation.records import (
    Instances,
    Outcome,
    RequestLimits,
    Requests,
    Table,
    TierLoads,
    Totals,
    added,
    one_table,
    rows_of,
    totals_of,
)

#: Segments that come between two pieces: some 40 MB of them. [1]
PIECE = 2**17
OVER = (int(SegmentStatus.DONE), int(SegmentStatus.WITHDRAWN), int(SegmentStatus.LOST))


def request_records(cluster: Cluster, begin: int, end: int | None = None) -> Requests:
    """One row a request from ``begin`` on and before ``end``, of the segments and transfers that were kept."""
    end = cluster.requests if end is None else end
    numbers, first_number = np.arange(begin, end), cluster.state.first_number
    later = [each for each, first in first_number.items() if begin <= first < end]
    found = _numbered(cluster, np.append(numbers, np.array(later, dtype=np.int64)))
    again = {numbers.size + at: first_number[each] - begin for at, each in enumerate(later)}
    return replace(one_row_each(found, again) if later else found, loads=_loads(cluster, begin, end))


def _numbered(cluster: Cluster, numbers: Ints) -> Requests:
    """One row a number, ascending: requests that have begun again have several."""
    n, arrival = numbers.size, cluster.state.arrival_s[numbers]
    inputs, outputs = (column[numbers] for column in cluster.state.lengths)

    def placed(requests: Ints | Sequence[int]) -> tuple[Ints, Mask]:
        """The rows of some requests, and which of them have one."""
        given = np.asarray(requests, dtype=np.int64)
        rows = np.searchsorted(numbers, given)
        rows[rows == n] = 0
        return rows, numbers[rows] == given if n else np.zeros(given.size, np.bool_)

    segments = cluster.fleet.segments
    request, own = placed(segments.request)
    own &= segments.status != SegmentStatus.WITHDRAWN
    segments, request = segments[own], request[own]
    there = segments.context + (segments.prompt == 0)  # tokens of the request that existed before
    order = np.lexsort((there, request))
    segments, there, request = segments[order], there[order], request[order]
    every = np.arange(request.size)
    first, last = np.full(n, -1), np.full(n, -1)
    first[request[::-1]], last[request] = every[::-1], every  # of several the last assignment counts
    completed = (segments.prompt > 0) & (segments.context + segments.prompt == inputs[request])
    begun, computed, shown = first.copy(), np.full(n, -1), np.full(n, -1)
    prefilled = every[completed & ~(np.isnan(segments.finish_s) & np.isnan(segments.first_token_s))]
    begun[request[prefilled]] = computed[request[prefilled]] = prefilled
    emitted = every[~np.isnan(segments.first_token_s)][::-1]
    shown[request[emitted]] = emitted
    exist = segments.context + segments.prompt + segments.generate + (segments.prompt == 0)
    whole = (_taken(exist, last, 0) == inputs + outputs) & (shown >= 0)  # an only token may be dropped by its prefill
    finish = np.where(whole, _taken(segments.finish_s, last), np.nan)
    status = np.where(np.isnan(finish), Outcome.UNFINISHED, Outcome.COMPLETED)
    lost = request[segments.status == SegmentStatus.LOST]
    status[lost[np.isnan(finish[lost])]] = Outcome.FAILED
    for outcome, requests in ((Outcome.FAILED, cluster.lost), (Outcome.REJECTED, cluster.refused)):
        rows, known = placed(requests)
        status[rows[known]] = outcome
    count = np.bincount(request, minlength=n)
    first_token, prefill_token = (_taken(segments.first_token_s, each) for each in (shown, computed))
    exposed, transfer, waited = (
        np.bincount(request, segments[name], minlength=n).astype(float)
        for name in ("exposed_s", "transfer_s", "blocked_s")
    )

    def counted(name: str) -> Ints:
        return np.bincount(request, segments[name], minlength=n).astype(np.int64)

    return Requests(
        request=numbers,
        arrival_s=arrival,
        input_tokens=inputs,
        output_tokens=outputs,
        status=status.astype(np.int64),
        prefill_instance=_taken(segments.instance, begun, -1),
        decode_instance=_taken(segments.instance, last, -1),
        prefill_start_s=_taken(segments.start_s, first),
        prefill_end_s=np.where(np.isnan(prefill_token), _taken(segments.finish_s, computed), prefill_token),
        first_token_s=first_token,
        transfer_s=transfer,
        exposed_transfer_s=exposed,
        reserve_wait_s=waited,
        # a segment that completes the prompt decodes from the first token on
        decode_start_s=np.where(_taken(segments.prompt, last, 0) == 0, _taken(segments.start_s, last), first_token),
        finish_s=finish,
        preemptions=counted("preemptions"),
        cached_tokens=counted("hit"),
        segments=count,
        transferred_tokens=counted("moved"),
        migrations=np.zeros(n, dtype=np.int64),
        late_gaps=counted("late_gaps") if cluster.fleet.gap_limit_s < np.inf else None,
    )


def one_row_each(records: Requests, first_number: Mapping[int, int]) -> Requests:
    """Join the rows of requests that have begun again under other numbers.

    Returns a row a request: its end and last instance by its last row, its first token by the first row that has one,
    transfers, preemptions, segments and cached tokens of all together.
    """
    n = len(records.request) - len(first_number)
    owner, every = np.arange(len(records.request)), np.arange(len(records.request))
    owner[list(first_number)] = list(first_number.values())
    last, shown, begun = np.zeros(n, np.int64), np.full(n, -1), np.full(n, -1)
    last[owner] = every
    for rows, column in ((shown, records.first_token_s), (begun, records.prefill_start_s)):
        there = every[~np.isnan(column)][::-1]
        rows[owner[there]] = there
    shown, begun = np.where(shown < 0, last, shown), np.where(begun < 0, last, begun)
    chosen = {"prefill_instance": shown, "prefill_start_s": begun, "prefill_end_s": shown, "first_token_s": shown}
    chosen |= dict.fromkeys(("status", "decode_instance", "decode_start_s", "finish_s"), last)
    summed = ("transfer_s", "exposed_transfer_s", "reserve_wait_s")
    counted = ("preemptions", "cached_tokens", "segments", "transferred_tokens", "late_gaps")
    columns = {each.name: value for each in fields(records) if (value := getattr(records, each.name)) is not None}
    found = {name: column[:n] for name, column in columns.items()}
    found |= {name: columns[name][rows] for name, rows in chosen.items()}
    found |= {name: np.bincount(owner, columns[name], minlength=n) for name in summed}
    found |= {
        name: np.bincount(owner, columns[name], minlength=n).astype(np.int64) for name in counted if name in columns
    }
    return Requests(**found | {"migrations": np.bincount(owner, minlength=n) - 1})


def _loads(cluster: Cluster, begin: int, end: int) -> TierLoads | None:
    """What requests from ``begin`` on and before ``end`` loaded from tiers, a row each; None without tiers."""
    tiers, first = cluster.tiers, cluster.state.first_number
    if tiers is None:
        return None
    rows = [(first.get(each.request, each.request) - begin, each) for each in tiers.loaded]
    loaded = [(row, each) for row, each in rows if 0 <= row < end - begin]
    row, n, count = np.array([row for row, _ in loaded], dtype=np.int64), end - begin, len(tiers.names)

    def added_up(values: Sequence[Any], kind: type, *more: int) -> NDArray[Any]:
        found: NDArray[Any] = np.zeros((n, *more), kind)
        np.add.at(found, row, np.array(values, kind).reshape(-1, *more))
        return found

    return TierLoads(
        names=tiers.names,
        tokens=added_up([each.tokens for _, each in loaded], np.int64, count),
        bytes=added_up([each.bytes for _, each in loaded], np.float64, count),
        load_s=added_up([each.seconds for _, each in loaded], np.float64),
        computed_again=added_up([each.computed for _, each in loaded], np.int64),
    )


def instance_records(cluster: Cluster, end: float) -> Instances:
    """One row an instance, up to ``end`` [s]."""
    fleet, roster = cluster.fleet, cluster.roster
    fleet.refresh(end)
    views = fleet.views
    stop = np.array(roster.stop_s)
    return Instances(
        role=np.array(roster.role, dtype=np.int64),
        gpus=np.array(roster.gpus, dtype=np.int64),
        start_s=np.minimum(roster.start_s, end),
        stop_s=np.where(np.isnan(stop), end, np.minimum(stop, end)),
        busy_s=views.busy_s.copy(),
        decode_steps=views.decode_steps.copy(),
        decode_s=views.decode_s.copy(),
        prefill_tokens=views.prefill_tokens.copy(),
        decode_tokens=views.decode_tokens.copy(),
        flops=fleet.flops(),
        flips=np.array(roster.flips, dtype=np.int64),
        kv_blocks=views.total_blocks.copy(),
        failed_s=roster.out_of_service(end),
    )


def last_moment(cluster: Cluster) -> float:
    """When the last request of a finished run came or went, or the last wish was met. [s]"""
    order, finish = cluster.state.order, cluster.fleet.segments.finish_s
    arrival = cluster.state.arrival_s[order[-1:] if isinstance(order, range) else order]  # in order: the last is newest
    decided = cluster.roster.decisions[-1].time_s if cluster.roster.decisions else 0.0
    return float(max(arrival.max(initial=0.0), finish[~np.isnan(finish)].max(initial=0.0), decided))


def _taken(column: NDArray[Any], rows: Ints, missing: float = np.nan) -> NDArray[Any]:
    """Values of ``column`` at ``rows``; ``missing`` where a row is -1."""
    if not column.size:
        return np.full(rows.size, missing, dtype=column.dtype)
    return np.where(rows >= 0, column[rows], np.asarray(missing, dtype=column.dtype))


def joined(records: Sequence[Table], places: Sequence[Sequence[int] | Ints]) -> Table:
    """Put the rows of several models in the order of their places in the whole."""
    if len(records) == 1:
        return records[0]
    return rows_of(one_table(records), np.argsort(np.concatenate([np.asarray(each) for each in places])))


def joined_requests(records: Sequence[Requests], rows: Sequence[Sequence[int]], numbers: Sequence[Ints]) -> Requests:
    """Put the requests of several models in the order of the trace; ``numbers`` of their instances in the whole."""
    if len(records) == 1:
        return records[0]
    own = []
    for each, number in zip(records, numbers, strict=True):
        prefill, decode = each.prefill_instance, each.decode_instance
        first, last = (np.where(one < 0, -1, number[one]) for one in (prefill, decode))
        own.append(replace(each, prefill_instance=first, decode_instance=last))
    found = joined(own, rows)
    return replace(found, request=np.arange(found.request.size))


#: Takes requests that are over, in the order of the trace.
Sink = Callable[[Requests], object]


class Pieces:
    """What has left a run of one model so far.

    ``limits`` are those by which totals are judged; ``keeps``: all stays until the end, and no totals are added up.
    """

    def __init__(self, cluster: Cluster, limits: Slo | RequestLimits, sink: Sink | None, *, keeps: bool) -> None:
        self._cluster, self._limits, self._keeps = cluster, limits, keeps
        self._sinks = [sink] if sink is not None else []
        self._kept: list[Requests] = []
        if keeps:
            self._sinks.append(self._kept.append)
        self.totals, self.last_s = Totals(), 0.0
        self._next, self._newest, self._seen, self._segments = 0, -1, 0, 0
        self._looks: list[float] = []  # samples since the last piece [s]
        self._finished: list[int] = []  # requests that had finished at those before them [request]

    def looked(self, *, now: bool = False) -> None:
        """A sample was taken; a piece leaves if there is enough of it, or in any case ``now``."""
        self._looks.append(self._cluster.engine.now)
        cluster = self._cluster
        if not self._keeps and (now or len(cluster.fleet.segments) - self._segments >= PIECE):
            order = cluster.state.order
            new = [*order[self._seen :], *cluster.refused, *cluster.lost]
            self._seen = len(order)
            self._newest = max(self._newest, *(each for each in new if each < cluster.requests), -1)
            self._take(self._newest + 1)  # the first request behind all that have come, or never will

    def halve(self) -> None:
        """Every second sample is dropped."""
        del self._finished[1::2], self._looks[1::2]

    def finished(self) -> Ints:
        """Requests that had finished at each sample. [request]"""
        return np.array(self._finished, dtype=np.int64)

    def close(self) -> Requests:
        """The run is over: all requests leave. Returns those that it keeps."""
        cluster, coming = self._cluster, self._cluster.state.coming
        while coming is not None and coming.high < cluster.requests:  # it was cut: these never came
            self._take(coming.high, whole=True)
            coming.release(self._next)
            coming.reach(self._next)
        self._take(cluster.requests, whole=True)
        return one_table(self._kept or [request_records(cluster, cluster.requests)])

    def _take(self, end: int, *, whole: bool = False) -> None:
        """Let what is over leave, up to a request; ``whole``: all of it."""
        cluster, begin = self._cluster, self._next
        records = request_records(cluster, begin, end)
        finish = np.sort(records.finish_s[~np.isnan(records.finish_s)])
        left = int(self.totals.ended[Outcome.COMPLETED])
        self._finished += (left + np.searchsorted(finish, self._looks, side="right")).tolist()
        self._looks = []
        over = records.status == Outcome.COMPLETED
        first = cluster.state.first_number
        ended = np.array([first.get(each, each) for each in (*cluster.refused, *cluster.lost)], dtype=np.int64)
        ended = ended[(ended >= begin) & (ended < end)]
        over[ended - begin] = True
        count = over.size if whole or over.all() else int(over.argmin())
        if count:
            self._next = begin + count
            piece = rows_of(records, slice(count))
            for sink in self._sinks:
                sink(piece)
            if not self._keeps:
                limits = self._limits
                limits = limits if isinstance(limits, Slo) else rows_of(limits, slice(begin, self._next))
                self.totals = added(self.totals, totals_of(piece, limits))
                self._forget()
        self._segments = len(cluster.fleet.segments)

    def _forget(self) -> None:
        """Drop what the cluster knows of requests that have left."""
        cluster, begin = self._cluster, self._next
        segments = cluster.fleet.segments
        request = segments.request
        if cluster.state.first_number:
            request = cluster.state.first_numbers()[request]
        gone = (request < begin) & np.isin(segments.status, OVER)
        self.last_s = max(self.last_s, float(segments.finish_s[gone & ~np.isnan(segments.finish_s)].max(initial=0.0)))
        cluster.forget(gone, begin)
