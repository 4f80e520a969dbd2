"""``disagg-sim launch``: write the commands or manifests that start a deployment on a serving engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from disagg_sim.cli.explain import OF_ROWS, OF_TABLE, chosen_row, read_points
from disagg_sim.errors import InputError, nearest
from disagg_sim.launch.launch import launch as launched
from disagg_sim.launch.launch import lines_of
from disagg_sim.question import LaunchQuestion, changed_flags


def launch(asked: LaunchQuestion) -> None:
    """Write what starts a row of a table, or a deployment of a scenario."""
    if asked.source.suffix in (".yaml", ".yml"):
        if flags := changed_flags(asked, *OF_ROWS):
            raise InputError(f"{', '.join(flags)} {OF_TABLE}")
        what = _of_scenario(asked.source, asked.deployment)
    else:
        if asked.deployment:
            raise InputError("--deployment names one of a scenario, and this is a table; leave it out")
        what = chosen_row(read_points(asked.source, asked.case), asked)
    made = launched(
        what, engine=asked.engine, backend=asked.backend, checkpoint=asked.checkpoint, node_gpus=asked.node_gpus
    )
    if asked.out is not None:
        made.write(asked.out)
    typer.echo("\n".join(lines_of(made, asked.out)))


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
