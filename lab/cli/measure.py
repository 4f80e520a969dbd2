"""``disagg-sim measure``: run micro-benchmarks on this machine's GPU and write a kernel table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.atomic import write_csv
from disagg_sim.cli.progress import listener
from disagg_sim.facts.load import load_system
from lab.calibration.bench.measure import FULL, QUICK, TRIAL
from lab.calibration.bench.measure import measure as run
from lab.calibration.bench.torch_bench import torch_bench
from lab.calibration.kernels.tables import read_tables


def measure(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Kernel table to write (CSV); 'calibrate kernels' reads it.")
    ],
    system: Annotated[str, typer.Option(help="Name of the system's spec, written into every row.")],
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the command.")] = "cuda",
    quick: Annotated[
        bool, typer.Option("--quick", help="Take about a minute: check the device against its data sheet.")
    ] = False,
) -> None:
    """Time GEMM, attention, copies, launches and (with several GPUs) collectives on this machine. Needs PyTorch."""
    spec = load_system(system)
    bench = torch_bench(device)
    plan = TRIAL if device == "cpu" else QUICK if quick else FULL
    rows = run(bench, spec.name, plan, listener("kernels", "measured"))
    write_csv(out, rows)
    forms = ", ".join(f"{len(table.rows)} {table.form.name}" for table in read_tables(out, strict=False))
    typer.echo(f"{out}: measured on {bench.name}: {forms}")
