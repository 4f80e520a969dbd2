"""``disagg-sim sensitivity``: compute which hardware parameter matters where along the frontiers of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.cli.progress import listener
from disagg_sim.cli.tables import print_table
from disagg_sim.cli.workers import Address, Backend, Jobs, Keep, cores
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.fidelity import sweep_elasticities, why_not, write_elasticities
from disagg_sim.sweep.plan import EVERYTHING, plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep


def sensitivity(
    name: Annotated[
        str, typer.Argument(metavar="FILE|NAME", help="YAML file of a sweep, or the name of a shipped one.")
    ],
    out: Annotated[Path, typer.Option(help="Directory of the sweep's results; missing results are computed.")],
    jobs: Jobs = None,
    backend: Backend = "",
    address: Address = "",
    keep: Keep = EVERYTHING,
    profile: Annotated[str, typer.Option(help="ideal, optimistic or measured; overrides the file.")] = "",
) -> None:
    """Compute the elasticities of every frontier of a sweep to FLOP rate, HBM, NVLink, NIC and capacity.

    DIR receives sensitivity.csv (at each frontier point and for each parameter: of TTL, FTL and throughput at the same
    design, and of the frontier at the same interactivity with designs chosen anew).
    """
    told = listener()
    plan = plan_sweep(load_sweep(name, profile=profile), keep=keep)
    workers = Workers(jobs or cores(), backend, address)
    result = run_sweep(plan, out, jobs=workers, listener=told)
    result.require()
    for item in result.cases:
        if reason := why_not(item):
            told.warn(f"{item.plan.case.name}: no elasticities: {reason}")
    tables = sweep_elasticities(result, out, jobs=workers)
    if not tables:
        return
    write_elasticities(tables, out)
    for case_name, table in tables.items():
        middle = table.groupby(["mode", "parameter"], sort=False)[["throughput", "frontier"]].median()
        typer.echo(f"{case_name}: median elasticity along the frontiers")
        print_table(
            (
                (*key, f"{row.throughput:+.2f}", f"{row.frontier:+.2f}")
                for key, row in zip(middle.index, middle.itertuples(), strict=True)
            ),
            header=("mode", "parameter", "same design", "frontier"),
            numeric=(2, 3),
        )
    typer.echo(f"{out / 'sensitivity.csv'}: {len(tables)} cases")
