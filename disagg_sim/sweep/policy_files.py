"""Serving systems from a user's own Python files, named in a scenario."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path

from disagg_sim.errors import SpecError
from disagg_sim.facts.yaml_files import shown


@cache
def load_policies(path: str) -> None:
    """Import a file that registers serving systems, once in a process.

    Raises
    ------
    SpecError
        A file that is not there, is no Python, or imports what is not there; names the line.
    InputError
        A system whose name another has.
    """
    file = Path(path)
    name = f"disagg_sim_policies_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or found is None or found.loader is None:
        raise SpecError(f"{shown(file)}: no such file, or not a Python file (.py)")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise SpecError(f"{shown(file)}: line {error.lineno}: {error.msg}") from None
    except ImportError as error:
        raise SpecError(f"{shown(file)}: {error}") from None
