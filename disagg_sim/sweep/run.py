"""Run a plan in a directory: compute what the store lacks, then write the tables."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from disagg_sim.errors import StoreError
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.backends.workers import ATTEMPTS, Workers
from disagg_sim.sweep.compute import BlockTask, compute_block, stored_block
from disagg_sim.sweep.gather import Gathered
from disagg_sim.sweep.keys import Key
from disagg_sim.sweep.manifest import held_sweep
from disagg_sim.sweep.plan import POINTS, POOLS, PREFILL, SweepPlan
from disagg_sim.sweep.results import Effort, SweepResult, collect, write_tables
from disagg_sim.sweep.store import Listener, Own, Store, missing, opened


def run_sweep(
    plan: SweepPlan, root: Path, *, jobs: int | Workers, listener: Listener, overwrite: bool = False
) -> SweepResult:
    """Compute every block that ``root`` does not hold, then write the tables.

    Parameters
    ----------
    plan : SweepPlan
        What ``plan_sweep`` made of a sweep.
    root : Path
        Directory of the results; made if missing. A run that was interrupted, or killed, goes on where
        it stood.
    jobs : int or Workers
        Worker processes of this machine, or a cluster. The tables do not depend on it. [1]
    listener : Listener
        Told what happens.
    overwrite : bool
        Whether the results of another sweep in ``root`` may be removed.

    Returns
    -------
    SweepResult
        Frontiers of every case and mode in plan order, times in s, throughput in token/s.

    Raises
    ------
    StoreError
        When the directory cannot be written, another run is writing there, or it holds the results of
        another sweep: one of another name, or without a case in common.

    Notes
    -----
    A sweep without a single feasible case returns, too, and so does one with a block that was given up because its
    workers died; ``SweepResult.require`` says what stands in the way.

    Examples
    --------
    >>> import tempfile
    >>> from unittest.mock import Mock
    >>> from disagg_sim.sweep.plan import plan_sweep
    >>> from disagg_sim.sweep.spec import load_sweep
    >>> text = '''{name: tiny, models: llama_3_1_8b, systems: {h100_sxm: fp8}, profile: ideal,
    ...   traffic: [{isl: 1024, osl: 128}], modes: [colocated], limits: {max_gpus: 1}}'''
    >>> with tempfile.TemporaryDirectory() as root:
    ...     _ = Path(root, "tiny.yaml").write_text(text)
    ...     result = run_sweep(plan_sweep(load_sweep(f"{root}/tiny.yaml")), Path(root, "out"), jobs=1, listener=Mock())
    >>> [(case.plan.case.name, case.found[0].mode) for case in result.cases]
    [('llama_3_1_8b-h100_sxm-fp8-ideal-1024-128-instance1', 'colocated')]
    """
    begun = time.perf_counter()
    planned = {block.key for block in plan.blocks}
    own = Own((PREFILL, POINTS, POOLS), planned, partial(_require_own, plan))
    with opened(root, listener, overwrite=overwrite, noun="sweep", own=own) as store:
        for case in plan.cases:
            if case.left_out:
                modes, reasons = zip(*case.left_out, strict=True)
                listener.note(f"{case.case.name}: without {' and '.join(modes)}: {reasons[0]}")
        lacking = missing(plan.blocks, lambda block: (block.key,), store, listener, noun="blocks")
        listener.start(sum(block.points for block in lacking))
        there = Store(root.absolute())  # workers of a cluster run in directories of their own
        effort, gathered = Effort(), Gathered(plan)
        failed: dict[Key, str] = {}

        def give_up(task: BlockTask, why: str) -> None:
            failed[task.block.key] = why
            listener.warn(f"{task.block.key.relative}: failed {ATTEMPTS} times: {why}")

        for table in (PREFILL, POINTS, POOLS):  # a case's decode blocks are matched with all its prefill blocks
            blocks = [
                block for block in lacking if block.key.table == table and failed.keys().isdisjoint(block.candidates)
            ]
            tasks = [BlockTask(there, block, plan.sources, plan.keep) for block in blocks]
            for done in run_tasks(compute_block, tasks, jobs=jobs, given_up=give_up):
                listener.advance(done.points)
                gathered.add(done.key, done.found)
                effort = effort.and_of(done.points, done.seconds)
        listener.finish()
        known = {block.key for block in lacking}
        for block in plan.blocks:
            if block.key not in known:
                gathered.add(block.key, stored_block(store, block))
        result = collect(plan, gathered, failed)
        write_tables(result, root, effort=replace(effort, wall_seconds=time.perf_counter() - begun))
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
