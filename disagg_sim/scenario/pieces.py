"""Simulate runs in cells, and runs whose requests leave in pieces: files as they go, and one table at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from disagg_sim.atomic import written
from disagg_sim.parquet import write_parquet
from disagg_sim.scenario.plan import REQUESTS, Run
from disagg_sim.scenario.policy_files import load_policies
from disagg_sim.simulation.cells import Rows, cell_of, forget, in_whole, joined_cells
from disagg_sim.simulation.options import FULL, STREAM
from disagg_sim.simulation.records import Requests, frame_of
from disagg_sim.simulation.run import run as simulate
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.run_result import RunResult
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.store import PIECES, Store
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class PieceFiles:
    """Keeps the requests of a cell of a run in a directory, in a file a piece."""

    folder: Path
    trace: Trace | TraceStream  # of the whole run
    rows: Rows | None  # of the trace, that the cell serves; None = all
    cell: int
    cells: int

    def __call__(self, piece: Requests) -> None:
        """See ``pieces.Sink``."""
        if self.rows is not None:
            piece = in_whole(piece, self.rows, self.cell, self.cells)
        frame, classes = frame_of(piece), self.trace.classes
        if classes is not None:
            frame["class"] = np.array(classes.names)[classes.number[piece.request]]
        with written(self.folder / f"{int(piece.request[0]):010d}.parquet") as handle:
            write_parquet(frame, handle.name, {})


@dataclass(frozen=True, slots=True, eq=False)
class CellTask:
    """A cell of a run."""

    run: Run
    scale: float  # of the rate of its trace [1]
    options: RunOptions  # of the whole run
    cell: int
    folder: Path | None  # where the cell is kept; None = nowhere


def compute_cell(task: CellTask) -> RunResult:
    """Simulate one cell of a run; a run without cells is one."""
    run, options, scenario, folder = task.run, task.options, task.run.scenario, task.folder
    for path in scenario.policy_files:
        load_policies(path)
    whole = trace = run.source.at_rate(scenario.seed, task.scale)
    rows, deployment, seed, sink = None, run.deployment, scenario.seed, None
    if options.cells > 1:
        rows, trace, deployment, own, seed = cell_of(trace, deployment, options, seed, task.cell)
    else:
        own = options
    if folder is not None and options.records == STREAM:
        sink = PieceFiles(folder, whole, rows, task.cell, options.cells)
    result = simulate(
        trace, deployment, run.choice.policy, at=scenario.setup, slo=scenario.slo, seed=seed, options=own, sink=sink
    )
    if options.records != FULL:
        forget()
    return result


def simulated(run: Run, scale: float, options: RunOptions, *, folder: Path | None = None, jobs: int = 1) -> RunResult:
    """Simulate a run, its cells side by side."""
    cells = range(options.cells)
    tasks = [CellTask(run, scale, options, cell, folder and folder / f"{cell}") for cell in cells]
    if len(tasks) == 1:
        return compute_cell(tasks[0])
    found = dict(run_tasks(_numbered, tasks, jobs=jobs))
    trace = run.source.at_rate(run.scenario.seed, scale)
    rows = [cell_of(trace, run.deployment, options, 0, cell).rows for cell in cells]
    return joined_cells([found[cell] for cell in cells], rows, run.scenario.seed)


def _numbered(task: CellTask) -> tuple[int, RunResult]:
    return task.cell, compute_cell(task)


@contextmanager
def piece_folder(store: Store, run: Run) -> Iterator[Path]:
    """The directory in which a run is kept while it goes on; it is removed at the end."""
    key = run.key(REQUESTS)
    folder = store.root / PIECES / key.group / key.name
    for old in folder.glob("*"):  # of a run that was cut off
        shutil.rmtree(old, ignore_errors=True)
    yield folder / key.digest
    shutil.rmtree(folder, ignore_errors=True)
    for above in (folder.parent, folder.parent.parent):
        if above.is_dir() and not above.is_symlink() and not any(above.iterdir()):
            above.rmdir()
