"""``disagg-sim calibrate``: fit kernels, their power, spreads and engines to measurements, and count what was run."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_engine, load_system, load_uncertainty
from disagg_sim.facts.yaml_files import is_path
from lab.calibration.kernels.efficiency_yaml import assumptions_of, efficiency_text, find_assumptions, write_efficiency
from lab.calibration.kernels.fit import calibrate_kernels
from lab.calibration.kernels.residuals import FIGURES, by_group, error_table, figures_of, lines_of, part_of
from lab.calibration.kernels.spreads import kernel_spreads, spreads_text, write_spreads
from lab.calibration.kernels.tables import TableError, spec_name
from lab.calibration.power.fit import calibrate_power, power_text, read_power_table, write_power
from lab.calibration.served.bands import served_spreads, with_bands
from lab.calibration.served.engine_fit import FITTED, UNITS, engine_text, fit_engine, write_engine
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.kinds import checked_kinds, evidence_text, write_evidence
from lab.calibration.served.read import read_files


def kernels(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Kernel tables (CSV; docs/calibration.md).")],
    system: Annotated[str, typer.Option(help="Measured system: a name, or its YAML file.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Efficiency file to write.")],
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows to exclude, with conditions and reasons (CSV).")
    ] = None,
    split: Annotated[
        bool, typer.Option("--split/--no-split", help="Hold 30 % of the shapes out of the fits, or fit all rows.")
    ] = True,
    assumptions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Assumptions for what is not measured; default: the shipped file of the system."
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="Name of the data set, written into the file.")] = "own kernel measurements",
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Fit kernel measurements, print residuals, write the efficiency file.

    The same data give the same file; the date in it is that of --date.
    """
    beside = assumptions or find_assumptions(load_system(system if is_path(system) else spec_name(system)).name)
    told = assumptions_of(beside).prefill_keys if beside else ()
    done = calibrate_kernels(files, system, exclude=exclude, split=split, prefill_keys=told)
    spec = write_efficiency(out, efficiency_text(done, data=data, date=date, assumptions=beside, split=split))
    rows = done.residuals[(done.residuals["masked"] == "") & done.residuals["predicted"].notna()]
    keys = ("operator", "framework", "part")
    table = error_table(rows.assign(part=rows["held_out"].map(part_of)), keys)
    print_table(lines_of(table), header=(*keys, "size", "rows", "median", "p90", "bias"), numeric=(4, 5, 6, 7))
    for each in done.left_out:
        typer.echo(str(each))
    fitted, unseen = (sum(getattr(file, key) for file in spec.files) for key in ("fitted", "held_out"))
    dropped = sum(sum(file.dropped.values()) for file in spec.files)
    typer.echo(
        f"{out}: {sum(map(len, done.fits.values()))} fits, {fitted} rows fitted, {unseen} held out, {dropped} dropped"
    )


def power(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Table of power (CSV or Parquet; docs/calibration.md).")],
    system: Annotated[str, typer.Option(help="Measured system.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Power file to write.")],
    data: Annotated[str, typer.Option(help="Name of the data set, written into the file.")] = "own measurements",
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Fit the power of kernels, print the errors by kind and engine, write the power file.

    The same data give the same file; the date in it is that of --date.
    """
    table = read_power_table(file, spec_name(system))
    fit = calibrate_power(table)
    write_power(out, power_text(fit, data=data, date=date))
    keys = ("kind", "framework", "part")
    rows = fit.rows.assign(
        error=fit.rows["predicted"] / fit.rows["watts"] - 1.0, part=fit.rows["held_out"].map(part_of)
    )
    found = by_group(rows, keys, lambda part: {"rows": len(part)} | figures_of(part["error"]))
    print_table(lines_of(pd.DataFrame(found).drop(columns="bias")), header=(*keys, *FIGURES[:-1]), numeric=(3, 4, 5))
    dropped = sum(fit.file.dropped.values())
    typer.echo(
        f"{out}: {len(fit.laws)} laws, {fit.file.fitted} rows fitted, {fit.file.held_out} held out, {dropped} dropped"
    )


def uncertainty(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Uncertainty file to write.")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE...]", help="Kernel tables behind the fits (CSV).")
    ] = None,
    serving: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Served measurements (CSV). Repeatable.")
    ] = None,
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows to exclude, with conditions and reasons (CSV).")
    ] = None,
    efficiency: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of efficiency files; default: the shipped ones.")
    ] = None,
    data: Annotated[str, typer.Option(help="Names of the data sets, written into the file.")] = "own measurements",
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Estimate the spreads behind error bars from the fitted part of the data.

    Kernels of which no table is given keep the shipped spreads, and so do served runs without measurements.
    """
    shipped = load_uncertainty("measured")
    kinds, composed = shipped.kinds, shipped.composed
    if files:
        found, others = kernel_spreads(files, exclude=exclude, efficiency=efficiency)
        kinds = {name: kind if kind.rows else kinds[name] for name, kind in found.items()}
        composed = {**composed, **others}
    spread = replace(shipped, kinds=kinds, composed=composed)
    rows, faults = read_files(serving or [])
    for fault in faults:
        typer.echo(f"warning: left out: {fault}", err=True)
    served = served_spreads(with_bands(evaluate(rows), rows, spread)) if rows else (shipped.shared, shipped.served)
    text = spreads_text(spread, served, data=data, date=date)
    spec = write_spreads(out, text)
    told = [
        (name, f"{kind.shared:.2f}", f"{kind.transfer:.3f}", f"{kind.transfer_across:.3f}", str(kind.rows))
        for name, kind in spec.kinds.items()
    ]
    print_table(told, header=("operators", "shared", "transfer", "across", "rows"), numeric=(1, 2, 3, 4))
    beyond = [
        (name, f"{each.base:.3f}", str(each.rows), kind, ", ".join(f"{level} {f:.2f}" for level, f in levels.items()))
        for name, each in spec.served.items()
        for kind, levels in (*each.levels.items(), ("unseen", each.unseen))
    ]
    print_table(beyond, header=("served", "base", "points", "by", "factors"), numeric=(1, 2))


#: Numbers that can be fitted alone.
Fitted = Enum("Fitted", {name: name for name in FITTED})  # type: ignore[misc]


def engine(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Served measurements (CSV), launch flags.")],
    engine: Annotated[str, typer.Option(help="Engine profile to fit; values that are not fitted stay.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Engine profile to write.")],
    only: Annotated[
        list[Fitted] | None,
        typer.Option(metavar="NAME", help="Fit this number, to all TPOT and TTFT; others stay. Repeatable."),
    ] = None,
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Fit the overheads of an engine to served runs, print them, write its profile.

    Held-out runs are not used. The same data give the same file. Fit the kernels first. Files may be tables of launch
    flags, which say how the rows of the others were launched.
    """
    before = load_engine(engine)
    rows, faults = read_files(files)
    if faults:
        raise TableError("\n".join(faults))
    fit = fit_engine(rows, before.name, only=[each.value for each in only or ()])
    spec = write_engine(out, engine_text(fit, date=date))
    lines = [
        (key, *(f"{getattr(each, key) / UNITS[key][1]:.4g}" for each in (before, spec)), UNITS[key][0] or "1")
        for key in fit.fitted
    ]
    print_table(lines, header=("parameter", "before", "fitted", "unit"), numeric=(1, 2))
    informed = sum(count for _, count in fit.files)
    typer.echo(f"{out}: {fit.lines} numbers of {informed} rows, median error {fit.median_error:.1%}")


def layouts(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Served measurements, and tables of their launch flags.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Evidence file to write.")],
    date: Annotated[str, typer.Option(help="Date of the data, written into the file.")] = "not stated",
) -> None:
    """Count the served runs behind each kind of layout, print them, write the evidence file."""
    rows, faults = read_files(files)
    if faults:
        raise InputError("\n".join(faults))
    kinds = checked_kinds(rows, evaluate(rows))
    if not kinds:
        raise InputError("no run in these files can be compared with a forecast")
    spec = write_evidence(out, evidence_text(kinds, date=date))
    table = [
        (
            *(each.family, each.systems, each.layout, str(each.most_gpus), str(each.rows), str(each.points)),
            *(each.judged_by, "-" if each.error is None else f"{each.error:.1%}"),
        )
        for each in spec.kinds
    ]
    head = ("family", "systems", "layout", "GPUs", "runs", "points", "judged by", "error")
    print_table(table, header=head, numeric=(3, 4, 5, 7))
