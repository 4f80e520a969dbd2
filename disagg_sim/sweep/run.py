"""Run a plan into a directory: compute what the store lacks, then write the tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from disagg_sim.errors import StoreError
from disagg_sim.sweep.backends import run_tasks
from disagg_sim.sweep.compute import BlockTask, Done, compute_block
from disagg_sim.sweep.manifest import held_sweep
from disagg_sim.sweep.plan import POINTS, PREFILL, Block, SweepPlan
from disagg_sim.sweep.results import Effort, SweepResult, collect, write_tables
from disagg_sim.sweep.store import State, Store


class Listener(Protocol):
    """Told what a run does; the command line prints it."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def warn(self, text: str) -> None:
        """Something wrong that the run mends by itself."""

    def start(self, points: int) -> None:
        """So many design points are about to be computed."""

    def advance(self, points: int) -> None:
        """So many more of them are stored."""

    def finish(self) -> None:
        """All of them are stored."""


def run_sweep(plan: SweepPlan, root: Path, *, jobs: int, listener: Listener, overwrite: bool = False) -> SweepResult:
    """Compute every block that ``root`` does not hold, then write the tables.

    Parameters
    ----------
    plan : SweepPlan
        What ``plan_sweep`` made of a sweep.
    root : Path
        Directory of the results; made if missing. A run that was interrupted, or killed, goes on where
        it stood.
    jobs : int
        Worker processes. The tables do not depend on it. [1]
    listener : Listener
        Told what happens.
    overwrite : bool
        Whether the results of another sweep in ``root`` may be removed.

    Raises
    ------
    StoreError
        When the directory cannot be written, another run is writing there, or it holds the results of
        another sweep: one of another name, or without a case in common.

    Notes
    -----
    A sweep without a single feasible case returns, too; ``SweepResult.require`` says what stands in the way.
    """
    begun = time.perf_counter()
    store = Store(root)
    store.prepare()
    with store.lock():
        if not overwrite:
            _require_own(plan, store)
        removed = store.clean((PREFILL, POINTS), {block.key.relative for block in plan.blocks})
        if removed:
            listener.note(f"{removed} stored blocks are not part of this sweep: removed")
        for case in plan.cases:
            if case.left_out:
                modes, reasons = zip(*case.left_out, strict=True)
                listener.note(f"{case.case.name}: without {' and '.join(modes)}: {reasons[0]}")
        missing = _missing(plan.blocks, store, listener)
        listener.start(sum(block.points for block in missing))
        done: list[Done] = []
        for table in (PREFILL, POINTS):  # a case's decode blocks are matched with all its prefill blocks
            tasks = [BlockTask(store, block, plan.sources) for block in missing if block.key.table == table]
            for block in run_tasks(compute_block, tasks, jobs=jobs):
                listener.advance(block.points)
                done.append(block)
        listener.finish()
        result = collect(plan, store)
        wall = time.perf_counter() - begun
        computed, spent = sum(block.points for block in done), sum(block.seconds for block in done)
        write_tables(result, root, effort=Effort(len(done), computed, spent, wall))
    return result


def _require_own(plan: SweepPlan, store: Store) -> None:
    """Raise ``StoreError`` when the directory holds another sweep."""
    name, finished = held_sweep(store.root)
    cases = dict.fromkeys([*finished, *sorted(store.groups((PREFILL, POINTS)))])
    shared = any(case.case.name in cases for case in plan.cases)
    if cases and (not shared or name not in ("", plan.spec.name)):
        found = f"the sweep {name!r}" if name else "an unfinished sweep"
        common = "" if shared else f", which has no case in common with {plan.spec.name!r}"
        raise StoreError(
            f"{store.root}: holds {found} ({len(cases)} cases, the first {next(iter(cases))}){common}; "
            "give another --out, or --overwrite to remove its results"
        )


def _missing(blocks: Sequence[Block], store: Store, listener: Listener) -> list[Block]:
    states = {block.key: store.state(block.key) for block in blocks}
    for key, state in states.items():
        if state is State.CORRUPT:
            listener.warn(f"{store.path(key)}: corrupt block, computing it again")
    counts = Counter(states.values())
    if counts[State.UNSEALED]:
        listener.warn(f"{counts[State.UNSEALED]} stored blocks have no checksum: computing them again")
    if counts[State.STALE]:
        listener.note(f"{counts[State.STALE]} stored blocks are stale (their inputs changed): computing them again")
    listener.note(f"{counts[State.STORED]} of {len(blocks)} blocks already stored")
    return [block for block in blocks if states[block.key] is not State.STORED]
