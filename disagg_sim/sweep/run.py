"""Run plans in directories: compute what the stores lack, then write the tables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path

from disagg_sim.domain import ServingMode
from disagg_sim.errors import InputError, StoreError
from disagg_sim.sweep.backends.run import run_tasks, staying
from disagg_sim.sweep.backends.workers import ATTEMPTS, Workers
from disagg_sim.sweep.compute import BlockTask, compute_blocks, stored_block
from disagg_sim.sweep.grid_cache import MOST_TOGETHER, groups
from disagg_sim.sweep.manifest import read_manifest
from disagg_sim.sweep.plan import POINTS, POOLS, PREFILL, Block, SweepPlan
from disagg_sim.sweep.results import Gathered, SweepResult, collect
from disagg_sim.sweep.spec import ENGINES_MODE
from disagg_sim.sweep.store import Key, Own, RunListener, Store, missing, opened
from disagg_sim.sweep.written import Effort, write_tables

#: Tasks that each worker has at least, before blocks are joined to fewer. [1]
TASKS_PER_WORKER = 4


def run_sweep(
    plan: SweepPlan,
    root: Path,
    *,
    jobs: int | Workers,
    listener: RunListener,
    overwrite: bool = False,
    outside: bool = False,
) -> SweepResult:
    """Compute every block that ``root`` does not hold, then write the tables.

    A sweep without a single feasible case returns, too, and so does one with a block that was given up because its
    workers died; ``SweepResult.require`` says what stands in the way. Returns frontiers of every case and mode in plan
    order, times in s, throughput in token/s.
    """
    (result,) = run_sweeps([(plan, root)], jobs=jobs, listener=listener, overwrite=overwrite, outside=outside)
    return result


def run_sweeps(
    sweeps: Sequence[tuple[SweepPlan, Path]],
    *,
    jobs: int | Workers,
    listener: RunListener,
    overwrite: bool = False,
    outside: bool = False,
) -> tuple[SweepResult, ...]:
    """Run several sweeps, each in a directory of its own; a block that several of them lack is computed once."""
    begun = time.perf_counter()
    with ExitStack() as held:
        jobs = held.enter_context(staying(jobs))
        runs = [_opened(held, plan, root, listener, overwrite=overwrite) for plan, root in sweeps]
        lacking = {block.key: block.points for run in runs for block in run.lacking}
        listener.start(sum(lacking.values()))
        for table in (PREFILL, POINTS, POOLS):  # a case's decode blocks are matched with all its prefill blocks
            _compute(runs, table, jobs, listener)
        listener.finish()
        found = _tabled(runs, outside=outside, begun=begun, jobs=jobs)
    return tuple(found[run.store.root] for run in runs)


@dataclass(slots=True, eq=False)
class _Run:
    """A sweep whose directory is open."""

    plan: SweepPlan
    store: Store
    lacking: list[Block]
    gathered: Gathered
    effort: Effort = field(default_factory=Effort)
    failed: dict[Key, str] = field(default_factory=dict)


def _opened(held: ExitStack, plan: SweepPlan, root: Path, listener: RunListener, *, overwrite: bool) -> _Run:
    planned = {block.key for block in plan.blocks}
    own = Own((PREFILL, POINTS, POOLS), planned, partial(_require_own, plan))
    store = held.enter_context(opened(root, listener, overwrite=overwrite, noun="sweep", own=own))
    for case in plan.cases:
        if case.left_out:
            modes, reasons = zip(*case.left_out, strict=True)
            listener.note(f"{case.case.name}: without {' and '.join(modes)}: {reasons[0]}")
    if ServingMode.COLOCATED in plan.spec.modes and not {ServingMode.PIGGYBACK, ENGINES_MODE} & {*plan.spec.modes}:
        engines = [case.case.decode_setup.overheads for case in plan.cases]
        for title in sorted({each.title for each in engines if each is not None and each.mixed_steps}):
            listener.note(f"modes: colocated stops decode for prompts; {title} mixes both in a step: take engine")
    lacking = missing(plan.blocks, lambda block: (block.key,), store, listener, noun="blocks")
    return _Run(plan, store, lacking, Gathered(plan))


def _tabled(runs: Sequence[_Run], *, outside: bool, begun: float, jobs: int | Workers) -> dict[Path, SweepResult]:
    """Write the tables of runs whose blocks are all there; results by directory."""
    for run in runs:
        known = {block.key for block in run.lacking}
        for block in run.plan.blocks:
            if block.key not in known:
                run.gathered.add(block.key, stored_block(run.store, block))
    arrived = [(run.plan, run.gathered, run.failed) for run in runs]
    results = {
        run.store.root: each for run, each in zip(runs, collect(arrived, outside=outside, jobs=jobs), strict=True)
    }
    for run in runs:
        effort = replace(run.effort, wall_seconds=time.perf_counter() - begun)
        write_tables(results[run.store.root], run.store.root, effort=effort)
    return results


def _compute(runs: Sequence[_Run], table: str, jobs: int | Workers, listener: RunListener) -> None:
    """Compute the blocks of a table that runs lack."""
    takers: dict[Key, list[_Run]] = {}
    blocks: dict[Key, Block] = {}
    for run in runs:
        for block in run.lacking:
            if block.key.table == table and run.failed.keys().isdisjoint(block.candidates):
                takers.setdefault(block.key, []).append(run)
                blocks[block.key] = block

    def task(group: Sequence[Block]) -> BlockTask:
        first, *_ = found = takers[group[0].key]
        there = dict.fromkeys(Store(run.store.root.absolute()) for run in found)
        return BlockTask(tuple(there), tuple(group), first.plan.sources, first.plan.keep)

    def give_up(task: BlockTask, why: str) -> None:
        if len(task.blocks) > 1:  # one of them is to blame
            alone.extend(replace(task, blocks=(block,)) for block in task.blocks)
            return
        (block,) = task.blocks
        for run in takers[block.key]:
            run.failed[block.key] = why
        listener.warn(f"{block.key.relative}: failed {ATTEMPTS} times: {why}")

    alone: list[BlockTask] = []
    alike = groupby(_ordered(blocks), key=lambda key: tuple(map(id, takers[key])))  # that the same runs take
    where = jobs if isinstance(jobs, Workers) else Workers(jobs)
    # so few in a task that all workers have tasks; one where it is not known how many workers there are
    most = 1 if where.address else max(1, min(MOST_TOGETHER, len(blocks) // (TASKS_PER_WORKER * where.jobs)))
    left = [task(group) for _, keys in alike for group in groups(map(blocks.__getitem__, keys), most)]
    while left:
        for done in chain.from_iterable(run_tasks(compute_blocks, left, jobs=jobs, given_up=give_up)):
            listener.advance(done.points)
            first, *_ = takers[done.key]
            first.effort.blocks += 1
            first.effort.points += done.points
            first.effort.seconds += done.seconds
            for run in takers[done.key]:
                run.gathered.add(done.key, done.found)
        left, alone = alone, []


def _ordered(blocks: Mapping[Key, Block]) -> list[Key]:
    """In order of the plan, but that blocks which share a grid follow one another."""
    first: dict[str, int] = {}
    places = {
        key: (first.setdefault(block.scored_as, number), key.name) if block.scored_as else (number, "")
        for number, (key, block) in enumerate(blocks.items())
    }
    return sorted(blocks, key=places.__getitem__)


def _require_own(plan: SweepPlan, store: Store) -> None:
    """Raise ``StoreError`` when the directory holds another sweep."""
    manifest = None
    with suppress(InputError):  # none to be read
        manifest = read_manifest(store.root)
    name, finished = (manifest.name, manifest.cases) if manifest else ("", ())
    cases = dict.fromkeys([*finished, *sorted(store.groups((PREFILL, POINTS)))])
    shared = any(case.case.name in cases for case in plan.cases)
    if cases and (not shared or name not in ("", plan.spec.name)):
        found = f"the sweep {name!r}" if name else "an unfinished sweep"
        common = "" if shared else f", which has no case in common with {plan.spec.name!r}"
        raise StoreError(
            f"{store.root}: holds {found} ({len(cases)} cases, the first {next(iter(cases))}){common}; "
            "give another --out, or --overwrite to remove its results"
        )
