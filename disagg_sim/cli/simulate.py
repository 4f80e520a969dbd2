"""``disagg-sim simulate``: replay request traces through serving policies, into a directory."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.choices import MOST_SEED
from disagg_sim.cli.progress import listener
from disagg_sim.cli.tables import print_table
from disagg_sim.cli.workers import Address, Backend, Jobs, cores
from disagg_sim.report.documents import simulate_json
from disagg_sim.report.lines import not_completed
from disagg_sim.report.simulation import ENERGY_HEADER, write_perfetto, write_run_energy
from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import ScenarioResult, encode_use, require_no_faults, run_scenario
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.simulation.options import NONE
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.workload.stream import MOST_STREAMED


def simulate(
    name: Annotated[
        str, typer.Argument(metavar="FILE|NAME", help="YAML file of a scenario, or the name of a shipped one.")
    ],
    out: Annotated[Path, typer.Option(help="Directory of the results; an interrupted run resumes there.")],
    trace: Annotated[str, typer.Option(metavar="FILE", help="Trace file; overrides the traces of the scenario.")] = "",
    jobs: Jobs = None,
    backend: Backend = "",
    address: Address = "",
    seed: Annotated[int | None, typer.Option(min=0, max=MOST_SEED, help="Seed; overrides the scenario.")] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_STREAMED, help="Requests, or sessions, of each trace; overrides the scenario."),
    ] = None,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Also write a Perfetto/Chrome trace of every run.")
    ] = False,
    energy: Annotated[
        bool, typer.Option("--energy", help="Also write what the instances of every run drew: energy.csv.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of another scenario in the directory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON of a versioned schema.")] = False,
) -> None:
    """Simulate every policy, deployment, trace and rate of a scenario: latencies, attainment, goodput, GPU-hours."""
    try:
        scenario = load_scenario(name, trace=trace, seed=seed)
        if requests is not None:
            scenario = replace(scenario, traces=tuple(each.of_length(requests) for each in scenario.traces))
        plan = plan_scenario(scenario)
        told, workers = listener("requests", "simulated"), Workers(jobs or cores(), backend, address)
        result = run_scenario(plan, out, jobs=workers, listener=told, overwrite=overwrite)
        if perfetto and scenario.run.records == NONE:
            told.note("records: none leaves no requests to draw")
        elif perfetto:
            told.note(f"{write_perfetto(result, out)} Perfetto traces written into {out / 'perfetto'}")
        drawn = write_run_energy(result, out) if energy else []
        if as_json:
            typer.echo(json.dumps(simulate_json(plan.scenario.name, out, result.summary, result.capacity), indent=1))
        else:
            _print_summary(result)
            if drawn:
                print_table(drawn, header=ENERGY_HEADER, numeric=range(3, len(ENERGY_HEADER)))
        require_no_faults(result)
        if not as_json:
            runs = f"{plan.scenario.name}: {len(result.summary)} runs"
            typer.echo(f"{runs}; read {out / 'summary.csv'}, or look: disagg-sim report {out}")
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on where this one stopped (results in {out})", file=sys.stderr)
        raise typer.Exit(130) from None


def _print_summary(result: ScenarioResult) -> None:
    header = ("policy", "deployment", "trace", "rate", "attainment", "goodput", "TTFT p90", "TPOT p90", "GPU-hours")
    table = result.summary.to_dict("records")
    lost = [not_completed(row["rejected"], row["failed"], row["unfinished"]) for row in table]
    rows = [
        (
            row["policy"],
            row["deployment"],
            row["trace"],
            f"x{row['rate_scale']:g}",
            f"{row['slo_attainment']:.1%}",
            f"{row['goodput_requests_per_s']:.3g}/s",
            f"{row['ttft_p90_s']:.3g} s",
            f"{row['tpot_p90_s']:.3g} s",
            f"{row['gpu_hours']:.3g}",
            *([f"{text} of {row['requests']:,}" if text else "-"] if any(lost) else []),
        )
        for row, text in zip(table, lost, strict=True)
    ]
    if rows:
        print_table(rows, header=(*header, *["not completed"] * any(lost)), numeric=range(3, len(header)))
    if any(lost):
        typer.echo("attainment counts requests that were not completed as misses; TTFT and TPOT leave them out")
    for run in result.plan.runs:
        if (use := encode_use(result, run)) is not None:
            typer.echo(
                f"{run.choice.label} on {run.deployment.name} under {run.source.name}, x{run.rate_scale:g}: "
                f"{use.gpus} GPUs encode, busy {use.busy_s / use.gpu_s:.0%} of the time; GPU-hours count them"
            )
    for row in table:
        if row["failed"] or row["availability"] < 1.0:
            typer.echo(
                f"{row['policy']} on {row['deployment']} under {row['trace']}, x{row['rate_scale']:g}: available "
                f"{row['availability']:.2%}, {row['failed']:,} requests lost with their instances, {row['migrated']:,} "
                "began again elsewhere"
            )
    for row in result.capacity.to_dict("records"):
        typer.echo(f"capacity of {row['policy']} on {row['deployment']} under {row['trace']}: {row['note']}")
