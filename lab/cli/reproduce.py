"""``disagg-sim reproduce``: recompute figures and claims of a published study."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from disagg_sim.cli.progress import listener
from disagg_sim.cli.workers import cores
from disagg_sim.errors import InputError, UnknownNameError, nearest
from lab.studies.beyond_the_buzz.evidence import PROFILES
from lab.studies.beyond_the_buzz.frontiers import Frontiers
from lab.studies.beyond_the_buzz.reproduce import reproduce as write
from lab.studies.claims import holding
from lab.studies.papers import HOMES, paper

FRONTIERS = "beyond-the-buzz"  # a study of frontiers; the others simulate traces


def reproduce(
    study: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="beyond-the-buzz (arXiv 2506.05508), or the paper of a serving policy."),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the results; an interrupted run of frontiers resumes there.")],
    figure: Annotated[
        list[str] | None, typer.Option(help="beyond-the-buzz: number of a figure; all of them by default.")
    ] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="beyond-the-buzz: ideal, optimistic or measured; all of them by default.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="beyond-the-buzz: number of worker processes; default: all cores.")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Serving policies: directory of published traces; default: synthetic stand-ins.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Serving policies: short samples; verdicts are not reliable.")
    ] = False,
) -> None:
    """Reproduce a published study: a verdict on every claim, and the figures of beyond-the-buzz with their data."""
    known = (FRONTIERS, *HOMES)
    if study not in known:
        raise UnknownNameError(f"unknown study {study!r}{nearest(study, known)}; known: {', '.join(known)}")
    given = {"--figure": figure, "--profile": profile, "--jobs": jobs, "--traces": traces, "--quick": quick}
    others = ("--traces", "--quick") if study == FRONTIERS else ("--figure", "--profile", "--jobs")
    for option in others:
        if given[option]:
            raise InputError(f"{option} does not go with {study}; leave out {', '.join(others)}")
    if study == FRONTIERS:
        _frontiers(out, figure or [], profile or [], jobs)
        return
    if traces is not None and not traces.is_dir():
        raise InputError(f"--traces {traces}: no such directory")
    from disagg_sim.simulation.kernel.compiled import COMPILING, code_home, on_compilation  # a fifth of the start

    told = listener("experiments", "done")
    if note := code_home().note:
        told.note(note)
    with on_compilation(lambda: told.note(COMPILING)):
        done = paper(study).reproduce(out, traces=traces, listener=told, quick=quick)
    if done.claims is not None:
        _tell_claims(done.claims, out)
    if done.as_authors is not None and len(done.as_authors):
        for engine, part in done.as_authors[done.as_authors["engine"] != ""].groupby("engine", sort=False):
            counts = part["verdict"].value_counts(sort=False)
            counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            typer.echo(f"as its authors set it up, on {engine}: {counted}; read {out / 'as_authors.csv'}")
    typer.echo(f"{done.computed:,} simulations; read {out / 'runs.csv'}")


def _tell_claims(claims: pd.DataFrame, out: Path) -> None:
    for line in holding(claims).to_dict("records"):
        said = [f"{line['profile']}: {line['holds']} of {line['of']} claims hold"]
        for told, column in (
            ("not", "fails"),
            ("with an added rule alone, or without it alone", "added_rule"),
            ("by construction, not counted", "by_construction"),
        ):
            said += [f"{told}: {line[column]}"] if line[column] else []
        typer.echo("; ".join(said))
    typer.echo(f"read {out / 'claims.csv'}")


def _frontiers(out: Path, figure: list[str], profile: list[str], jobs: int | None) -> None:
    """Reproduce "Beyond the Buzz"."""
    try:
        frontiers = Frontiers(out, jobs=jobs or cores(), listener=listener())
        items = [f"fig{int(name):02d}" if name.isdecimal() else name for name in figure]
        done = write(frontiers, items=items, profiles=profile or PROFILES)
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on where this one stopped (results in {out})", file=sys.stderr)
        raise typer.Exit(130) from None
    if done.claims is not None:
        _tell_claims(done.claims, out)
    typer.echo(f"{done.computed:,} design points, {len(done.pictures)} pictures with their data in {out}")
