"""Measure a sweep on 1, 2, 4 and 8 worker processes, and say on paper what more would do.

    python benchmarks/workers.py

Of each run: wall time, CPU time of the process that was started (it plans, hands out tasks, gathers and writes tables)
and CPU time of the workers with their start. Efficiency is wall time on one worker over n times that on n. Other work
on the machine moves it; what does not move is the CPU time of one process over that of n, times min(n, cores)/n, which
is what the cores allow. The last lines are Amdahl's law with the measured parts: wall time = serial + parallel/n.
Serial is the CPU time of the first process beside two workers, although part of it passes while these compute;
parallel is what one process spends beyond it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock, patch

from made import sweep

from disagg_sim.sweep import run as sweep_run
from disagg_sim.sweep.backends.workers import Workers

PROCESSES = (1, 2, 4, 8)
ON_PAPER = (8, 32, 128, 512)
WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


class Run(NamedTuple):
    """One run of the sweep."""

    wall: float  # [s]
    first: float  # CPU time of the process that was started [s]
    workers: float  # CPU time of the workers [s]
    points: int
    task: int  # largest task as it is sent [B]
    result: int  # largest of what comes back [B]

    @property
    def cpu(self) -> float:
        """CPU time of all processes: one worker of a cluster is another process than the first. [s]"""
        return self.first + self.workers


def spent(who: int) -> float:
    """CPU time so far. [s]"""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def measured(points: float, workers: Workers) -> Run:
    """Plan and run a sweep into a new directory, on workers that start for it."""
    tasks, results = [], []
    ask = sweep_run.run_tasks

    def weighed(function, given, **options):
        tasks.extend(len(pickle.dumps(task)) for task in given)
        for done in ask(function, given, **options):
            results.append(len(pickle.dumps(done)))
            yield done

    with tempfile.TemporaryDirectory() as folder, patch.object(sweep_run, "run_tasks", weighed):
        before = *map(spent, WHO), time.perf_counter()
        plan = sweep(points, Path(folder))
        sweep_run.run_sweep(plan, Path(folder, "out"), jobs=workers, listener=Mock())
        wall = time.perf_counter() - before[2]
    if workers.backend == "loky":
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=True)
    first, children = (spent(who) - at for who, at in zip(WHO, before[:2], strict=True))
    size = sum(block.points for block in plan.blocks)
    return Run(wall, first, children, size, max(tasks), max(results))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=float, default=1e7)
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    measured(1e4, Workers(1, "serial"))  # imports, and specs that are read once
    print("| processes | wall [s] | first process, CPU [s] | workers, CPU [s] | by wall | by CPU on", cores, "cores |")
    print("| --- | --- | --- | --- | --- | --- |")
    runs = []
    for n in PROCESSES:
        runs.append(found := measured(given.points, Workers(n)))
        by_wall = runs[0].wall / (n * found.wall)
        by_cpu = runs[0].cpu / found.cpu * min(n, cores) / n
        cpu = f"{found.first:.1f} | {found.workers:.1f}"
        print(f"| {n} | {found.wall:.1f} | {cpu} | {by_wall:.0%} | {by_cpu:.0%} |", flush=True)
    last = runs[1]
    print(f"{last.points:,} points; a task {last.task / 1e3:.1f} kB, its result {last.result / 1e3:.1f} kB at most")
    serial, parallel = last.first, runs[0].cpu - last.first
    print(f"serial {serial:.1f} CPU s, parallel {parallel:.1f} CPU s without the start of workers")
    for n in ON_PAPER:
        faster = (serial + parallel) / (serial + parallel / n)
        print(f"on paper {n:>4} workers: {faster:.1f} times as fast as one, efficiency {faster / n:.0%}")


if __name__ == "__main__":
    main()
