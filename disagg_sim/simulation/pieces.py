"""Take the requests of a run that are over out of it piece by piece, so that its memory does not grow with the trace.

At a sample, once enough segments have come since the last piece, the first requests of the trace leave, as far as all
are over: their records go to whoever takes them, their totals are added up, and the kernel forgets their segments. A
request that stays keeps those behind it. Nothing that follows changes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Protocol

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Slo
from disagg_sim.simulation.classes import RequestLimits
from disagg_sim.simulation.cluster import Cluster
from disagg_sim.simulation.kernel.layout import SegmentStatus
from disagg_sim.simulation.records import Outcome, Requests
from disagg_sim.simulation.records_of_run import request_records
from disagg_sim.simulation.run_result import Totals, added, sketched, totals_of

#: Segments that come between two pieces: some 40 MB of them. [1]
PIECE = 2**17
OVER = (int(SegmentStatus.DONE), int(SegmentStatus.WITHDRAWN), int(SegmentStatus.LOST))


class Sink(Protocol):
    """Takes what leaves a run."""

    def __call__(self, piece: Requests) -> None:
        """Requests in the order of the trace."""


class Pieces:
    """What has left a run so far."""

    def __init__(self, slo: Slo, limits: RequestLimits | None = None, sink: Sink | None = None) -> None:
        self.slo, self.limits, self.sink = slo, limits, sink
        self.totals, self.last_s = Totals(), 0.0
        self._next, self._newest, self._seen, self._kept = 0, -1, 0, 0
        self._looks: list[float] = []  # samples since the last piece [s]
        self._finished: list[int] = []  # requests that had finished at those before them [request]

    def attach(self, cluster: Cluster) -> None:
        """Say which run it is."""
        self._cluster = cluster

    def looked(self, *, now: bool = False) -> None:
        """A sample was taken; a piece leaves if there is enough of it, or in any case ``now``."""
        self._looks.append(self._cluster.engine.now)
        cluster = self._cluster
        if now or len(cluster.fleet.segments) - self._kept >= PIECE:
            order = cluster.state.order
            new = [*order[self._seen :], *cluster.refused, *cluster.lost]
            self._seen = len(order)
            self._newest = max(self._newest, *(each for each in new if each < cluster.requests), -1)
            self._take(self._newest + 1)  # the first request behind all that have come, or never will

    def halve(self) -> None:
        """Every second sample is dropped."""
        del self._finished[1::2]

    def finished(self) -> Ints:
        """Requests that had finished at each sample. [request]"""
        return np.array(self._finished, dtype=np.int64)

    def close(self) -> None:
        """The run is over: all requests leave."""
        cluster, coming = self._cluster, self._cluster.state.coming
        while coming is not None and coming.high < cluster.requests:  # it was cut: these never came
            self._take(coming.high, whole=True)
            coming.release(self._next)
            coming.reach(self._next)
        self._take(cluster.requests, whole=True)

    def _take(self, end: int, *, whole: bool = False) -> None:
        """Let what is over leave, up to a request; ``whole``: all of it."""
        cluster, begin = self._cluster, self._next
        records = request_records(cluster, begin, end)
        self._count(records.finish_s)
        over = records.status == Outcome.COMPLETED
        first = cluster.state.first_number
        ended = np.array([first.get(each, each) for each in (*cluster.refused, *cluster.lost)], dtype=np.int64)
        ended = ended[(ended >= begin) & (ended < end)]
        over[ended - begin] = True
        count = over.size if whole or over.all() else int(over.argmin())
        if count:
            self._next = begin + count
            piece = Requests(**{each.name: getattr(records, each.name)[:count] for each in fields(Requests)})
            limits = self.limits
            if limits is not None:
                own = slice(begin, self._next)
                limits = RequestLimits(ttft=limits.ttft[own], tpot=limits.tpot[own], priority=limits.priority[own])
            self.totals = added(self.totals, sketched(totals_of(piece, self.slo, limits)))
            if self.sink is not None:
                self.sink(piece)
            self._forget()
        self._kept = len(cluster.fleet.segments)

    def _count(self, finish_s: Floats) -> None:
        """Requests that had finished at the samples since the last piece."""
        left = int(self.totals.ended[Outcome.COMPLETED])
        found = left + np.searchsorted(np.sort(finish_s[~np.isnan(finish_s)]), self._looks, side="right")
        self._finished += found.tolist()
        self._looks = []

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
