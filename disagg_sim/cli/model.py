"""``disagg-sim model import``: make a model's file of its Hugging Face ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.cli.workers import Offline
from disagg_sim.facts.hub.imported import import_model
from disagg_sim.facts.yaml_files import shown


def import_(
    source: Annotated[
        str, typer.Argument(metavar="FILE|DIR|ORG/NAME", help="A config.json, a directory with one, a name on the hub.")
    ],
    name: Annotated[str, typer.Option(help="Of the model; default: that of the hub or the directory.")] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR|FILE", help="Write the YAML there; default: print it.")
    ] = None,
    offline: Offline = False,  # noqa: ARG001 - its callback answers it
) -> None:
    """Read config.json (and hf_quant_config.json beside it): parameters, recipe, what was assumed, and the YAML.

    Every command takes such a file, too, where it takes the name of a model.
    """
    found = import_model(source, name)
    print_table(list(found.lines()))
    if out is None:
        typer.echo(f"\n{found.yaml}", nl=False)
    else:
        typer.echo(f"\nwritten: {shown(found.write(out))}")
