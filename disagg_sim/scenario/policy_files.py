"""Find the serving policies that a scenario may name: registered ones, and those of the user's Python files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from disagg_sim.errors import DisaggSimError, PolicyError, SpecError, UnknownNameError, nearest, quoted
from disagg_sim.facts.yaml_files import shown
from disagg_sim.reading import read_file
from disagg_sim.simulation.faults import is_own, own_faults
from disagg_sim.simulation.options import Option, options_of
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.policy import Policy

#: Largest policy file: the shipped ones have 20 kB. [B]
MOST_BYTES = 10**6


def _text_of(path: Path) -> bytes:
    """The text of a policy file; ``SpecError`` unless it is an ordinary file, Python by its name, and not too large."""
    if path.suffix != ".py" or not path.is_file():
        raise SpecError(f"{shown(path)}: no such file, or not a Python file (.py)")
    try:
        return read_file(path, MOST_BYTES)
    except OSError as error:
        raise SpecError(f"{shown(path)}: cannot be read: {error.strerror}") from None


def load_policies(path: str) -> None:
    """Import a file that registers serving policies, once in a process."""
    path = str(Path(path).absolute())  # one file, imported once, however it is named
    if _imported(path) != _text_of(Path(path)):
        said = "written since this process imported it; start the process, or the workers of the cluster, again"
        raise SpecError(f"{shown(Path(path))}: {said}")


@cache
def _imported(path: str) -> bytes:
    """Import a policy file; its text then."""
    file, text = Path(path), _text_of(Path(path))
    name = f"disagg_sim_policies_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None, "Python loads .py"
    assert found.loader is not None, "Python loads .py"
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with own_faults(shown(file), name):
            found.loader.exec_module(module)
    except PolicyError as error:
        cause = error.__cause__
        if isinstance(cause, SyntaxError) and Path(cause.filename or "").resolve() == file.resolve():
            raise SpecError(f"{shown(file)}: line {cause.lineno}: {cause.msg}") from None
        if isinstance(cause, DisaggSimError):
            raise SpecError(f"{shown(file)}: {cause}") from None
        raise SpecError(str(error)) from cause
    return text


class KnownPolicies:
    """Policies that a scenario may name: shipped ones, and those of its own files if these may run."""

    def __init__(self, run: bool) -> None:
        self.run = run
        self._unread: list[str] = []

    def take(self, path: str) -> None:
        """Add the policies of a policy file; ``SpecError`` for its faults, which show only where it may run."""
        self._unread.append(path)  # a file that has faults may hold any policy
        if self.run:
            load_policies(path)
            self._unread.pop()
        else:
            _text_of(Path(path))

    @property
    def _known(self) -> dict[str, type[Policy]]:
        return {name: kind for name, kind in policies().items() if self.run or not is_own(kind.__module__)}

    def options(self, name: str) -> Mapping[str, Option] | None:
        """Options of a policy; None for one that cannot be known; ``UnknownNameError`` where there is none."""
        kind = self._known.get(name)
        if kind is not None:
            return options_of(kind)
        if self._unread:
            return None
        known = ", ".join(sorted(self._known))
        raise UnknownNameError(f"unknown policy {quoted(name)}{nearest(name, self._known)}; known: {known}")

    def needs(self, name: str) -> tuple[str, ...]:
        """Parts of a deployment that a policy takes; empty where that is not known."""
        kind = self._known.get(name)
        return () if kind is None else kind.needs

    def notes(self) -> tuple[str, ...]:
        """A line for each policy file that was not run."""
        said = "not run; simulate checks its policies and their options"
        return tuple(f"{shown(Path(each))}: {said}" for each in self._unread)
