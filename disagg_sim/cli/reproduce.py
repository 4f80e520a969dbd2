"""``disagg-sim reproduce``: the figures and claims of a published study."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.cli.sweep import cores
from disagg_sim.errors import UnknownNameError, nearest

STUDIES = ("beyond-the-buzz",)


def reproduce(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="beyond-the-buzz, arXiv 2506.05508.")],
    out: Annotated[Path, typer.Option(help="Directory of the results; a stopped run goes on there.")],
    figure: Annotated[
        list[str] | None, typer.Option(help="Number of a figure, or where_it_pays; all of them by default.")
    ] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="ideal, optimistic or measured; all of them by default.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes; all cores by default.")] = None,
) -> None:
    """Write every figure of a published study with its data, and whether its claims hold."""
    from disagg_sim.cli.progress import listener
    from disagg_sim.study.claims import PROFILES, holding
    from disagg_sim.study.frontiers import Frontiers
    from disagg_sim.study.reproduce import reproduce as write

    if study not in STUDIES:
        raise UnknownNameError(f"unknown study {study!r}{nearest(study, STUDIES)}; known: {', '.join(STUDIES)}")
    try:
        frontiers = Frontiers(out, jobs=jobs or cores(), listener=listener())
        items = [f"fig{int(name):02d}" if name.isdecimal() else name for name in figure or []]
        done = write(frontiers, items=items, profiles=profile or PROFILES)
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on where this one stopped (results in {out})", file=sys.stderr)
        raise typer.Exit(130) from None
    if done.claims is not None:
        for line in holding(done.claims).to_dict("records"):
            misses = f"; not: {line['misses']}" if line["misses"] else ""
            typer.echo(f"{line['profile']}: {line['holds']} of {line['of']} claims hold{misses}")
        typer.echo(f"read {out / 'claims.csv'}")
    typer.echo(f"{done.design_points:,} design points, {len(done.pictures)} pictures with their data in {out}")
