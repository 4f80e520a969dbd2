"""Simulate runs in cells, and runs whose requests leave in pieces: files as they go, and one table at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from disagg_sim.parquet import write_parquet
from disagg_sim.scenario.plan import REQUESTS, Run
from disagg_sim.scenario.policy_files import load_policies
from disagg_sim.simulation.cells import cell_of, into_whole, joined_cells
from disagg_sim.simulation.pieces import Sink
from disagg_sim.simulation.records import Requests, RunResult, frame_of
from disagg_sim.simulation.run import STREAM, RunOptions
from disagg_sim.simulation.run import run as simulate
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.store import Store
from disagg_sim.workload.request_columns import Labels

#: Directory of a scenario in which requests wait for the end of their run.
PIECES = "pieces"


@dataclass(frozen=True, slots=True)
class PieceFiles:
    """Writes requests that have left a run into a file a piece, named after the first of them."""

    folder: Path
    classes: Labels | None  # of every request of the run

    def __call__(self, piece: Requests) -> None:
        """See ``pieces.Sink``."""
        frame = frame_of(piece)
        if self.classes is not None:
            frame["class"] = np.array(self.classes.names)[self.classes.number[piece.request]]
        write_parquet(frame, self.folder / f"{int(piece.request[0]):010d}.parquet", {})


@dataclass(frozen=True, slots=True, eq=False)
class CellTask:
    """A cell of a run."""

    run: Run
    scale: float  # of the rate of its trace [1]
    options: RunOptions  # of the whole run
    cell: int
    folder: Path | None  # of its pieces; None = they are dropped, or kept


def compute_cell(task: CellTask) -> RunResult:
    """Simulate one cell of a run; a run without cells is one."""
    run, options, scenario = task.run, task.options, task.run.scenario
    for path in scenario.policy_files:
        load_policies(path)
    trace, deployment, seed = run.source.at_rate(scenario.seed, task.scale), run.deployment, scenario.seed
    sink: Sink | None = None
    if options.records == STREAM and task.folder is not None:
        task.folder.mkdir(parents=True, exist_ok=True)
        sink = PieceFiles(task.folder, trace.classes)
    if options.cells > 1:
        rows, trace, deployment, own, seed = cell_of(trace, deployment, options, seed, task.cell)
        sink = into_whole(sink, rows, task.cell, options.cells) if sink is not None else None
        options = own
    return simulate(
        trace, deployment, run.choice.policy, at=scenario.setup, slo=scenario.slo, seed=seed, options=options, sink=sink
    )


def simulated(run: Run, scale: float, options: RunOptions, *, folder: Path | None = None, jobs: int = 1) -> RunResult:
    """Simulate a run, its cells side by side.

    Parameters
    ----------
    run, scale, options
        What, and at which scale of the rate of its trace [1].
    folder
        Takes the pieces of ``records: stream``.
    jobs
        Processes. [1]

    Returns
    -------
    RunResult
        Of all cells.
    """
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
    """The directory for the pieces of a run, which is removed at the end."""
    folder = store.root / PIECES / run.deployment.name / run.key(REQUESTS).name
    shutil.rmtree(folder, ignore_errors=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    for above in (folder.parent, folder.parent.parent):
        if above.is_dir() and not any(above.iterdir()):
            above.rmdir()


def write_requests(store: Store, run: Run, folder: Path) -> None:
    """Make one table of all pieces, in the order of the trace."""
    parts = sorted(folder.glob("*/*.parquet"))
    by = "request" if run.scenario.run.cells > 1 else ""
    store.write_parts(run.key(REQUESTS), parts, "{}", by=by)
