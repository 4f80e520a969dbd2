"""Simulate runs whose requests leave in pieces: files as they go, and one table at the end."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from disagg_sim.atomic import written
from disagg_sim.parquet import write_parquet
from disagg_sim.scenario.plan import REQUESTS, Run
from disagg_sim.simulation.options import FULL, STREAM
from disagg_sim.simulation.records import Requests, frame_of
from disagg_sim.simulation.run import run as simulate
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.run_result import RunResult
from disagg_sim.sweep.store import PIECES, Store
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class PieceFiles:
    """Keeps the requests of a run in a directory, in a file a piece."""

    folder: Path
    trace: Trace | TraceStream

    def __call__(self, piece: Requests) -> None:
        """See ``pieces.Sink``."""
        frame, classes = frame_of(piece), self.trace.classes
        if classes is not None:
            frame["class"] = np.array(classes.names)[classes.number[piece.request]]
        with written(self.folder / f"{int(piece.request[0]):010d}.parquet") as handle:
            write_parquet(frame, handle.name, {})


def simulated(run: Run, scale: float, options: RunOptions, *, folder: Path | None = None) -> RunResult:
    """Simulate a run at a scale of its trace's rate [1]; its pieces are kept in a folder, where one is given."""
    scenario, trace = run.scenario, run.source.at_rate(run.scenario.seed, scale)
    sink = PieceFiles(folder, trace) if folder is not None and options.records == STREAM else None
    result = simulate(
        trace,
        run.deployment,
        run.choice.policy,
        at=scenario.setup,
        slo=scenario.slo,
        seed=scenario.seed,
        options=options,
        sink=sink,
    )
    if options.records != FULL:
        gc.collect()  # what a run leaves behind refers to itself, and Python frees it late
    return result


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
