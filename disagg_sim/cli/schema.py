"""``disagg-sim specs schema``: print the JSON Schema of what a command prints with ``--json``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from disagg_sim.report.schemas import SCHEMAS, json_schema


def schema(command: Annotated[str, typer.Argument(help=f"{', '.join(SCHEMAS)}.")]) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    typer.echo(json.dumps(json_schema(command), indent=1))
