"""Serving systems from a user's own Python files, named in a scenario."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path

from disagg_sim.errors import DisaggSimError, PolicyError, SpecError
from disagg_sim.facts.yaml_files import shown
from disagg_sim.simulation.faults import own_faults


@cache
def load_policies(path: str) -> None:
    """Import a file that registers serving systems, once in a process.

    Raises
    ------
    SpecError
        A file that is not there or is no Python, whatever it raises, and a system that is none or whose name another
        has; names the line.
    """
    file = Path(path)
    name = f"disagg_sim_policies_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or found is None or found.loader is None:
        raise SpecError(f"{shown(file)}: no such file, or not a Python file (.py)")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with own_faults(shown(file), name):
            found.loader.exec_module(module)
    except PolicyError as error:
        cause = error.__cause__
        if isinstance(cause, SyntaxError) and cause.filename == str(file):
            raise SpecError(f"{shown(file)}: line {cause.lineno}: {cause.msg}") from None
        if isinstance(cause, DisaggSimError):
            raise SpecError(f"{shown(file)}: {cause}") from None
        raise SpecError(str(error)) from cause
