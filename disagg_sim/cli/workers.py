"""Options that several commands share: where tasks run, what a sweep stores, and whether the hub is asked."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from disagg_sim.facts.hub.files import OFFLINE

Jobs = Annotated[int | None, typer.Option(min=1, help="Number of worker processes; default: all cores.")]
Backend = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Where it runs: serial, loky (processes of this machine), dask or ray; default: loky."
    ),
]
Address = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS", help="Of a running cluster: of Dask (tcp://HOST:8786) or Ray (HOST:6379), which need it."
    ),
]
Keep = Annotated[
    str,
    typer.Option(
        metavar="WHAT", help="What is stored: all points, or those near a frontier (frontier); the tables are the same."
    ),
]


def _stay(asked: bool) -> bool:
    """Ask the hub for nothing from now on, here and in workers."""
    if asked:
        os.environ[OFFLINE] = "1"
    return asked


Offline = Annotated[
    bool,
    typer.Option("--offline", callback=_stay, help="Ask the Hugging Face hub for no model, as HF_HUB_OFFLINE=1 does."),
]


def cores() -> int:
    """Count the cores that this process may use. [1]"""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
