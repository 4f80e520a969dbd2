"""``disagg-sim sweep``: compute a sweep into a directory, or count what it would compute."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.atomic import write_text
from disagg_sim.cli.progress import listener
from disagg_sim.cli.workers import Address, Backend, Jobs, Keep, cores
from disagg_sim.question import prices_of
from disagg_sim.report.summary import summary
from disagg_sim.sweep.backends.run import staying
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.fidelity import fidelity_of, write_fidelity
from disagg_sim.sweep.plan import EVERYTHING, SweepPlan, plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep


def sweep(
    name: Annotated[
        str, typer.Argument(metavar="FILE|NAME", help="YAML file of a sweep, or the name of a shipped one.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory of the results; an interrupted run resumes there.")
    ] = None,
    jobs: Jobs = None,
    backend: Backend = "",
    address: Address = "",
    keep: Keep = EVERYTHING,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the design points and stop.")] = False,
    profile: Annotated[str, typer.Option(help="ideal, optimistic or measured; overrides the file.")] = "",
    engine: Annotated[str, typer.Option(help="Serving engine, or 'kernels' for none; overrides the file.")] = "",
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="SYSTEM=USD", help="Price per GPU-hour; overrides the market price. Repeatable."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of another sweep in the directory.")
    ] = False,
    uncertainty: Annotated[
        bool, typer.Option("--uncertainty", help="Add error bars: uncertainty.csv, gain.csv.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON of a versioned schema.")] = False,
) -> None:
    """Compute the Pareto frontiers of every case of a sweep, with mappings, rate matching and KV bandwidth."""
    if out is None and not dry_run:
        raise typer.BadParameter("needed, unless --dry-run is given", param_hint="'--out'")
    try:
        plan = plan_sweep(load_sweep(name, profile=profile, engine=engine, prices=prices_of(price or ())), keep=keep)
        if out is None or dry_run:
            typer.echo(_counts(plan))
        else:
            workers = Workers(jobs or cores(), backend, address)
            with staying(workers) as there:
                said = compute(plan, out, there, overwrite=overwrite, error_bars=uncertainty)
            typer.echo(_document(out) if as_json else said)
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on where this one stopped (results in {out})", file=sys.stderr)
        raise typer.Exit(130) from None


def compute(plan: SweepPlan, out: Path, workers: Workers, *, overwrite: bool, error_bars: bool) -> str:
    """Compute the sweep, and say in one line what came out."""
    told = listener()
    result = run_sweep(plan, out, jobs=workers, listener=told, overwrite=overwrite, outside=True)
    fidelity = fidelity_of(result, out, error_bars=error_bars or plan.spec.uncertainty, jobs=workers)
    write_fidelity(fidelity, out)
    write_text(out / "summary.md", summary(result, fidelity))
    result.require()
    for case in result.cases:
        for mode, verdict in case.verdicts:
            told.warn(f"{case.plan.case.name}: {mode}{': ' if mode else ''}{verdict}")
    total = result.total
    return (
        f"{plan.spec.name}: {len(result.cases)} cases, {total.computed:,} design points, {total.feasible:,} feasible, "
        f"{len(result.frontier)} on the frontiers; read {out / 'summary.md'}, or look: disagg-sim report {out}"
    )


def _document(out: Path) -> str:
    """JSON of the frontiers in a directory."""
    from disagg_sim.report.documents import sweep_json  # of all commands: it imports plans and their simulations
    from disagg_sim.sweep.compare import read_frontier

    return json.dumps(sweep_json(read_frontier(out)), indent=1)


def _counts(plan: SweepPlan) -> str:
    """Print the design points of every case by mode."""
    width = max(len(case.case.name) for case in plan.cases)
    modes = dict.fromkeys(
        mode for case in plan.cases for mode in (*(each.mode for each in case.modes), *dict(case.left_out))
    )
    head = f"{'case':{width}}" + "".join(f"  {mode:>13}" for mode in modes) + f"  {'blocks':>6}"
    rows = []
    for case in plan.cases:
        points = {mode.mode: f"{sum(block.points for block in mode.blocks):,}" for mode in case.modes}
        cells = "".join(f"  {points.get(mode, '-'):>13}" for mode in modes)
        rows.append(f"{case.case.name:{width}}{cells}  {len(case.blocks):>6,}")
    total = f"{plan.points:,} design points in {len(plan.blocks):,} blocks, {len(plan.cases)} cases"
    return "\n".join([head, *rows, total])
