"""``disagg-sim launch``: write the commands or manifests that start a deployment on a serving engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg_sim.choices import LAUNCHERS
from disagg_sim.cli.explain import chosen_row, read_points
from disagg_sim.cli.explain_pools import OF_TABLE, refuse_given
from disagg_sim.errors import InputError, nearest
from disagg_sim.launch.launch import launch as launched
from disagg_sim.launch.launch import lines_of


def launch(
    source: Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="Results of a sweep, its frontier.csv, or a scenario (.yaml).")
    ],
    engine: Annotated[str, typer.Option(help=f"{', '.join(LAUNCHERS)}.")],
    backend: Annotated[str, typer.Option(help="Engine of Dynamo's workers; default: the one planned for.")] = "",
    row: Annotated[int | None, typer.Option("--row", min=0, help="Row of the table, counted from 0.")] = None,
    case: Annotated[str, typer.Option(help="Only rows of this case.")] = "",
    best: Annotated[bool, typer.Option("--best", help="Take the row of highest throughput.")] = False,
    at_interactivity: Annotated[
        float | None,
        typer.Option("--at-interactivity", metavar="X", help="Take the highest throughput at X tokens/s/user or more."),
    ] = None,
    deployment: Annotated[str, typer.Option(metavar="NAME", help="Deployment of the scenario.")] = "",
    checkpoint: Annotated[str, typer.Option(metavar="NAME|PATH", help="Model to load; default: a published one.")] = "",
    node_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of a node; default: 8, on a rack 4.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; default: print.")] = None,
) -> None:
    """Write commands or manifests of a serving engine for a row of a frontier, or for a deployment of a scenario.

    What the engine cannot express is told, a line each, with the engines that can.
    """
    if source.suffix in (".yaml", ".yml"):
        chooses = {"--row": row is not None, "--case": case, "--best": best}
        refuse_given(chooses | {"--at-interactivity": at_interactivity is not None}, OF_TABLE)
        what = _of_scenario(source, deployment)
    else:
        refuse_given({"--deployment": deployment}, "names one of a scenario, and this is a table; leave it out")
        table = read_points(source, case)
        what = table.loc[[chosen_row(table, row, at_interactivity, best=best)]]
    made = launched(what, engine=engine, backend=backend, checkpoint=checkpoint, node_gpus=node_gpus)
    if out is not None:
        made.write(out)
    typer.echo("\n".join(lines_of(made, out)))


def _of_scenario(path: Path, name: str) -> Any:
    from disagg_sim.scenario.spec import load_scenario  # its policies simulate, an extra

    scenario = load_scenario(str(path), run=False)
    known = {each.name: replace(each, setup=each.setup or scenario.setup) for each in scenario.deployments}
    if not name and len(known) == 1:
        (name,) = known
    if name not in known:
        said = (
            f"no deployment {name!r}{nearest(name, known)}" if name else f"{len(known)} deployments: say --deployment"
        )
        raise InputError(f"{path}: {said}; known: {', '.join(known)}")
    return known[name]
