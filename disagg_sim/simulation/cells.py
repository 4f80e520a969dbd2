"""Cut a deployment into cells: equal groups of instances, each with a router and a share of the requests of its own.

A large site is operated so, because no router sees all of it. Request k goes to cell k modulo their number, and a
session to one cell. Nothing passes between cells, so that each is a run by itself, and they may run side by side.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError
from disagg_sim.simulation.deployment import PARTS, ServedDeployment
from disagg_sim.simulation.records import EncodeUse, Instances, Requests, Samples
from disagg_sim.simulation.records_of_run import OF_INSTANCES, joined_decisions, joined_requests
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.run_result import RunResult
from disagg_sim.simulation.totals import Totals, added
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

#: Columns of samples that stay as they were when a cell has nothing left to do; the others are 0 then.
LASTING = ("arrivals", "finished", "gpus", "prefill_gpus", "decode_gpus")


#: Rows of the trace of a run that one of its cells serves, ascending.
Rows = NDArray[np.intp] | range


class Cell(NamedTuple):
    """One of the cells of a run."""

    rows: Rows
    trace: Trace | TraceStream  # of these rows
    deployment: ServedDeployment
    options: RunOptions
    seed: int


def cell_of(
    trace: Trace | TraceStream, deployment: ServedDeployment, options: RunOptions, seed: int, cell: int
) -> Cell:
    """Cut out one of the ``options.cells`` cells.

    >>> import disagg_sim as ds
    >>> from disagg_sim.simulation.run_options import RunOptions
    >>> four = (ds.Replicas(mapping=ds.Sharding(), instances=4),)
    >>> trace = Trace(arrival=[0.0, 1.0, 2.0], input_tokens=[5, 6, 7], output_tokens=[2, 2, 2])
    >>> pool = ServedDeployment(name="pool", gpus=4, colocated=four)
    >>> found = cell_of(trace, pool, RunOptions(cells=2), 0, 1)
    >>> list(found.rows), found.deployment.colocated[0].instances, found.deployment.gpus
    ([1], 2, 2)
    """
    cells = options.cells
    require_cells(trace, deployment, options)
    pool = deployment.encode
    own: dict[str, Any] = {
        part: tuple(replace(each, instances=each.instances // cells) for each in getattr(deployment, part))
        for part in PARTS
    }
    own["encode"] = None if pool is None else replace(pool, instances=pool.instances // cells)
    rows: Rows = range(cell, len(trace), cells)
    if isinstance(trace, TraceStream):
        part: Trace | TraceStream = trace.cell(cell, cells)
    else:
        if trace.sessions is not None:
            rows = np.flatnonzero(np.unique(trace.sessions.session, return_inverse=True)[1] % cells == cell)
        part = trace.take(np.asarray(rows))
    return Cell(
        rows=rows,
        trace=part,
        deployment=replace(deployment, gpus=deployment.gpus // cells, **own),
        options=replace(options, cells=1),
        seed=int(np.random.SeedSequence([seed, cell]).generate_state(1)[0]),
    )


def forget() -> int:
    """Free now what a run has left behind: its parts refer to one another, and Python frees such parts late."""
    return gc.collect()


def require_cells(trace: Trace | TraceStream, deployment: ServedDeployment, options: RunOptions) -> None:
    """Refuse cells that do not divide a run.

    >>> import disagg_sim as ds
    >>> from disagg_sim.simulation.run_options import RunOptions
    >>> one = ServedDeployment(name="two", gpus=2, colocated=(ds.Replicas(mapping=ds.Sharding(), instances=2),))
    >>> trace = Trace(arrival=[0.0], input_tokens=[5], output_tokens=[1])
    >>> require_cells(trace, one, RunOptions(cells=10**6))
    Traceback (most recent call last):
    disagg_sim.errors.InputError: cells 1000000 of 2 colocated instances; allowed: numbers that divide 2
    """
    cells = options.cells
    for name, there in (("failures", options.failures), ("concurrency", options.concurrency), ("models", trace.models)):
        if there:
            raise InputError(f"cells {cells} with {name}; allowed: cells 1")
    counts = [(f"{part} instances", each.instances) for part in PARTS for each in getattr(deployment, part)]
    counts += [] if deployment.encode is None else [("encode instances", deployment.encode.instances)]
    for name, count in [*counts, ("GPUs", deployment.gpus)]:
        if count % cells:
            raise InputError(f"cells {cells} of {count} {name}; allowed: numbers that divide {count}")


def in_whole(piece: Requests, rows: Rows, cell: int, cells: int) -> Requests:
    """Write requests of a cell as those of the whole run.

    Of the second of two cells, which has requests 1, 3 and 5; its instance 0 is number 1:

    >>> columns = {field.name: np.zeros(1, np.int64) for field in fields(Requests)}
    >>> found = in_whole(Requests(**columns | {"request": np.array([2])}), np.array([1, 3, 5]), 1, 2)
    >>> found.request.tolist(), found.decode_instance.tolist()
    ([5], [1])
    """
    columns = {name: getattr(piece, name) for name in OF_INSTANCES}
    columns = {name: np.where(column < 0, -1, cells * column + cell) for name, column in columns.items()}
    request = rows.start + rows.step * piece.request if isinstance(rows, range) else rows[piece.request]
    return replace(piece, request=request, **columns)


def joined_cells(results: Sequence[RunResult], rows: Sequence[Rows], seed: int) -> RunResult:
    """Join the results of all cells into that of the run.

    The result comes with instances in turn, one of each cell, and none where a cell never had so many; GPUs are held
    until the last cell is done.

    >>> import disagg_sim as ds
    >>> from disagg_sim.simulation.run import run
    >>> from disagg_sim.simulation.run_options import RunOptions
    >>> part, at = ds.Replicas(mapping=ds.Sharding(), instances=1), ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> one = ServedDeployment(name="one", gpus=1, colocated=(part,))
    >>> traces = [Trace(arrival=[at_s], input_tokens=[5], output_tokens=[2]) for at_s in (0.0, 1.0)]
    >>> alone = [run(each, one, "vllm", at=at, slo=ds.Slo(ttft=1.0, tpot=1.0)) for each in traces]
    >>> joined_cells(alone, [np.array([1]), np.array([0])], 0).requests.arrival_s.tolist()
    [1.0, 0.0]
    """
    first, cells, end = results[0], len(results), max(each.duration_s for each in results)
    most = max(each.instances.gpus.size for each in results)
    numbers = [cells * np.arange(most) + cell for cell in range(cells)]
    columns = {
        field.name: np.zeros(most * cells, getattr(first.instances, field.name).dtype) for field in fields(Instances)
    }
    for each, number in zip(results, numbers, strict=True):
        stop = each.instances.stop_s
        held = replace(each.instances, stop_s=np.where(stop == each.duration_s, end, stop))
        for name, column in columns.items():
            column[number[: stop.size]] = getattr(held, name)
    kept = first.totals is None
    own = [np.asarray(each).tolist() for each in rows] if kept else []
    logs = [
        [
            line._replace(instance=cells * line.instance + cell, reason=f"cell {cell}: {line.reason}")
            for line in each.decisions
        ]
        for cell, each in enumerate(results)
    ]
    return replace(
        first,
        seed=seed,
        requests=joined_requests([each.requests for each in results], own, numbers) if kept else first.requests,
        itl_counts=np.sum([each.itl_counts for each in results], axis=0),
        samples=_joined_samples([each.samples for each in results]),
        instances=Instances(**columns),
        decisions=joined_decisions(logs),
        duration_s=end,
        wall_s=max(each.wall_s for each in results),
        cpu_s=sum(each.cpu_s for each in results),
        totals=None if kept else reduce(added, (each.totals or Totals() for each in results)),
        encode=_joined_pools([each.encode for each in results if each.encode is not None], end),
    )


def _joined_pools(pools: Sequence[EncodeUse], end: float) -> EncodeUse | None:
    """The encode pools of all cells as one, held until the last is done [s]; None without."""
    if not pools:
        return None
    gpus, busy, flops = (sum(getattr(each, name) for each in pools) for name in ("gpus", "busy_s", "flops"))
    return EncodeUse(gpus=gpus, held_s=end, busy_s=busy, flops=flops)


def _joined_samples(samples: Sequence[Samples]) -> Samples:
    """Sums over the cells at the times of the one that went on longest; of shares the mean, cells being equal."""
    times = max((each.time_s for each in samples), key=len)
    columns = {}
    for field in fields(Samples):
        own = [_at(times, each.time_s, getattr(each, field.name), field.name in LASTING) for each in samples]
        columns[field.name] = np.sum(own, axis=0)
    columns["kv_use"] = columns["kv_use"] / len(samples)
    return Samples(**columns | {"time_s": times})


def _at(times: Floats, known: Floats, values: NDArray[np.generic], lasting: bool) -> NDArray[np.generic]:
    """Values at the last known time, for ever where they last."""
    found = values[np.searchsorted(known, times, side="right") - 1]
    return found if lasting else np.where(times <= known[-1], found, np.zeros_like(found))
