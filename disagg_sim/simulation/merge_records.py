"""Join the records of clusters that served side by side into those of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from heapq import merge
from operator import attrgetter

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.simulation.records import Decision, Instances, Requests, TierLoads

#: Columns of requests that name an instance.
OF_INSTANCES = ("prefill_instance", "decode_instance")


def joined_requests(records: Sequence[Requests], rows: Sequence[Sequence[int]], numbers: Sequence[Ints]) -> Requests:
    """Put the requests of several models in the order of the trace.

    Returns a row a request of the trace.
    """
    if len(records) == 1:
        return records[0]
    columns = {}
    for field in fields(Requests):
        own = [getattr(each, field.name) for each in records]
        if field.name in OF_INSTANCES:
            own = [np.where(column < 0, -1, number[column]) for column, number in zip(own, numbers, strict=True)]
        whole = np.empty(sum(map(len, rows)), dtype=own[0].dtype)
        for column, place in zip(own, rows, strict=True):
            whole[np.asarray(place)] = column
        columns[field.name] = whole
    columns["request"] = np.arange(columns["request"].size)
    return Requests(**columns)


def joined_loads(records: Sequence[TierLoads | None], rows: Sequence[Sequence[int]]) -> TierLoads | None:
    """Put what the requests of several models loaded in the order of the trace.

    Returns a row a request of the trace.
    """
    there = [each for each in records if each is not None]
    if len(there) < 2:
        return there[0] if there else None
    order = np.argsort(np.concatenate([np.asarray(each) for each in rows]))
    columns = ("tokens", "bytes", "load_s", "computed_again")
    joined = {name: np.concatenate([getattr(each, name) for each in there])[order] for name in columns}
    return TierLoads(names=there[0].names, **joined)


def joined_instances(records: Sequence[Instances], numbers: Sequence[Ints]) -> Instances:
    """Put the instances of several models in the order of their numbers in the whole cluster.

    Returns a row an instance.
    """
    if len(records) == 1:
        return records[0]
    order = np.argsort(np.concatenate(list(numbers)))
    return Instances(
        **{
            field.name: np.concatenate([getattr(each, field.name) for each in records])[order]
            for field in fields(Instances)
        }
    )


def joined_decisions(logs: Sequence[Sequence[Decision]]) -> tuple[Decision, ...]:
    """Merge the decision logs of several models by time.

    Rows of one instant are in the order of the models.

    >>> early, late = (Decision(time, "flip", 0, "flip of instance 0", "") for time in (1.0, 2.0))
    >>> joined_decisions([[late], [early]]) == (early, late)
    True
    """
    return tuple(merge(*logs, key=attrgetter("time_s")))
