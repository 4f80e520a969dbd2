"""Collect the records of a run from its arrays, column by column; join those of several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Ints, Mask
from disagg_sim.simulation.cluster import Cluster
from disagg_sim.simulation.kernel.layout import SegmentStatus
from disagg_sim.simulation.records import Instances, Outcome, Requests, TierLoads


def request_records(cluster: Cluster, begin: int = 0, end: int | None = None) -> Requests:
    """One row a request, from the segments that the kernel kept and the transfers that the cluster kept.

    Of those from ``begin`` on and before ``end``, by their numbers in the trace.
    """
    again = {each: first for each, first in cluster.state.first_number.items() if first >= begin}
    numbers = np.arange(begin, cluster.requests if end is None else end)
    if not again:
        return _numbered(cluster, numbers)
    later = [each for each, first in again.items() if first < begin + numbers.size]
    found = _numbered(cluster, np.append(numbers, np.array(later, dtype=np.int64)))
    return one_row_each(found, {numbers.size + at: again[each] - begin for at, each in enumerate(later)})


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
    exposed, transfer, tokens, waited = (
        np.bincount(request, segments[name], minlength=n).astype(float)
        for name in ("exposed_s", "transfer_s", "moved", "blocked_s")
    )
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
        preemptions=np.bincount(request, segments.preemptions, minlength=n).astype(np.int64),
        cached_tokens=np.bincount(request, segments.hit, minlength=n).astype(np.int64),
        segments=count,
        transferred_tokens=tokens.astype(np.int64),
        migrations=np.zeros(n, dtype=np.int64),
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
    counted = ("preemptions", "cached_tokens", "segments", "transferred_tokens")
    columns = {field.name: getattr(records, field.name) for field in fields(records)}
    found = {name: column[:n] for name, column in columns.items()}
    found |= {name: columns[name][rows] for name, rows in chosen.items()}
    found |= {name: np.bincount(owner, columns[name], minlength=n) for name in summed}
    found |= {name: np.bincount(owner, columns[name], minlength=n).astype(np.int64) for name in counted}
    return Requests(**found | {"migrations": np.bincount(owner, minlength=n) - 1})


def tier_records(cluster: Cluster, names: tuple[str, ...]) -> TierLoads | None:
    """What the requests of a cluster loaded from tiers of these names, a row each; None without tiers."""
    if cluster.tiers is None:
        return None
    loaded, first_number = cluster.tiers.loaded, cluster.state.first_number
    n = len(cluster.prompts) - len(first_number)
    row = np.array([first_number.get(each.request, each.request) for each in loaded], dtype=np.int64)
    tokens, sizes = np.zeros((n, len(names)), dtype=np.int64), np.zeros((n, len(names)))
    seconds, again = np.zeros(n), np.zeros(n, dtype=np.int64)
    if loaded:
        np.add.at(tokens, row, np.array([each.tokens for each in loaded]))
        np.add.at(sizes, row, np.array([each.bytes for each in loaded]))
        np.add.at(seconds, row, np.array([each.seconds for each in loaded]))
        np.add.at(again, row, np.array([each.computed for each in loaded]))
    return TierLoads(names=names, tokens=tokens, bytes=sizes, load_s=seconds, computed_again=again)


def late_gaps(clusters: Sequence[Cluster], rows: Sequence[Sequence[int]]) -> Ints:
    """Gaps between tokens of each request that were late, of several models in the order of the trace. [1]"""
    found = []
    for cluster in clusters:
        segments = cluster.fleet.segments
        owner = cluster.state.first_numbers()[segments.request]
        found.append(np.bincount(owner, segments.late_gaps, minlength=cluster.requests).astype(np.int64))
    if len(found) == 1:
        return found[0]
    return np.concatenate(found)[np.argsort(np.concatenate([np.asarray(each) for each in rows]))]


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


#: Columns of requests that name an instance.
OF_INSTANCES = ("prefill_instance", "decode_instance")
#: Records whose columns are arrays of as many rows.
Table = TypeVar("Table", Requests, Instances, TierLoads)


def joined(records: Sequence[Table], places: Sequence[Sequence[int] | Ints]) -> Table:
    """Put the rows of several models in the order of their places in the whole."""
    if len(records) == 1:
        return records[0]
    columns = {field.name: [getattr(each, field.name) for each in records] for field in fields(records[0])}
    order = np.argsort(np.concatenate([np.asarray(each) for each in places]))
    whole: dict[str, Any] = {
        name: np.concatenate(own)[order] for name, own in columns.items() if isinstance(own[0], np.ndarray)
    }
    return replace(records[0], **whole)


def joined_requests(records: Sequence[Requests], rows: Sequence[Sequence[int]], numbers: Sequence[Ints]) -> Requests:
    """Put the requests of several models in the order of the trace; ``numbers`` of their instances in the whole."""
    if len(records) == 1:
        return records[0]
    own = []
    for each, number in zip(records, numbers, strict=True):
        columns = {name: getattr(each, name) for name in OF_INSTANCES}
        own.append(replace(each, **{name: np.where(one < 0, -1, number[one]) for name, one in columns.items()}))
    found = joined(own, rows)
    return replace(found, request=np.arange(found.request.size))
