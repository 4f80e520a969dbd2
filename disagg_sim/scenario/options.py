"""Find the policies that a scenario may name, shipped or in the user's files; read options of policies and runs.

``run: {failures: {events: [{at_s: 60, instance: 1}], restart_s: 300}}``
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from disagg_sim.errors import DisaggSimError, InputError, PolicyError, SpecError, UnknownNameError, nearest, quoted
from disagg_sim.facts.faults import SeveralFaultsError
from disagg_sim.facts.schema import plain_number
from disagg_sim.facts.yaml_files import shown
from disagg_sim.reading import read_file
from disagg_sim.simulation.faults import is_own, own_faults
from disagg_sim.simulation.options import Option, options_of
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.policy import Policy
from disagg_sim.techniques.availability.play import KINDS, OF_EVENT, FailureEvent, Failures

Place = tuple[str | int, ...]


def read_failures(value: object) -> Failures:
    """Read what fails in a run, times in s."""
    if not isinstance(value, Mapping):
        _refuse((), f"{quoted(value)} is not a mapping of keys such as events, restart_s, migration_limit")
    faults: list[tuple[Place, str]] = []
    given, said, events = value.get("events", ()), {}, []
    if not isinstance(given, list | tuple):
        faults.append((("events",), f"{quoted(given)} is not a list of events such as {{at_s: 60, instance: 1}}"))
        given = ()
    try:
        said = read_options(options_of(Failures), {key: each for key, each in value.items() if key != "events"})
    except SeveralFaultsError as error:
        faults += error.found
    for number, each in enumerate(given):
        try:
            events.append(_event(each))
        except SeveralFaultsError as error:
            faults += [(("events", number, *place), told) for place, told in error.found]
    if faults:
        _refuse_all(faults)
    try:
        return Failures(events=tuple(events), **said)
    except InputError as error:
        _refuse((), str(error))


def _event(value: object) -> FailureEvent:
    """One event of the list."""
    if not isinstance(value, Mapping):
        _refuse((), f"{quoted(value)} is not an event such as {{at_s: 60, instance: 1}}")
    said = read_options(OF_EVENT, value)
    kinds = [kind for kind in KINDS if kind in said]
    if len(kinds) != 1 or "at_s" not in said:
        _refuse((), f"{quoted(dict(value))} says not what fails when; allowed: at_s and one of {', '.join(KINDS)}")
    rest = {key: each for key, each in said.items() if key != kinds[0]}
    try:
        return FailureEvent(kind=kinds[0], number=said[kinds[0]], **rest)
    except InputError as error:
        _refuse((), str(error))


def _refuse(place: Place, told: str) -> NoReturn:
    _refuse_all([(place, told)])


def _refuse_all(faults: Iterable[tuple[Place, str]]) -> NoReturn:
    raise SeveralFaultsError((("failures", *place), told) for place, told in faults)


#: Removed options of shipped policies, and the message about them.
_FIXED = (
    *("low_load", "busy_interval", "patience", "fit_shortest", "fit_longest", "fit_error", "correct", "timeout_share"),
    *("profile_tokens", "most_changes", "sensitivity", "context_tokens", "predictor"),
)
FIXED = "was removed: its default is what the policy does; leave it out"


def read_options(options: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a policy or a run, each a value of the kind of its default and in its range."""
    faults: list[tuple[tuple[str, ...], str]] = []
    found: dict[str, Any] = {}
    for name, value in given.items():
        known = options.get(name)
        if known is None:
            near = nearest(name, options) or f"; allowed: {', '.join(options)}"
            faults.append(((), f"{name} {FIXED}" if name in _FIXED else f"unknown key {quoted(name)}{near}"))
            continue
        read = value if isinstance(known.default, bool | str) else plain_number(value)
        if fault := known.fault(read):
            faults.append(((name,), fault))
        else:
            found[name] = known.like_default(read)
    if faults:
        raise SeveralFaultsError(faults)
    return found


#: Largest policy file: the shipped ones have 20 kB. [B]
MOST_BYTES = 10**6


def _text_of(path: Path) -> bytes:
    """Read a policy file; ``SpecError`` unless it is an ordinary file that ends in .py and is not too large."""
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
    """Import a policy file; return the imported text."""
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
        """Add the policies of a policy file; ``SpecError`` for its faults, which are found only if it may run."""
        self._unread.append(path)  # a file with faults may define any policy
        if self.run:
            load_policies(path)
            self._unread.pop()
        else:
            _text_of(Path(path))

    @property
    def _known(self) -> dict[str, type[Policy]]:
        return {name: kind for name, kind in policies().items() if self.run or not is_own(kind.__module__)}

    def options(self, name: str) -> Mapping[str, Option] | None:
        """Find the options of a policy; None if a file that was not run may define it, else ``UnknownNameError``."""
        kind = self._known.get(name)
        if kind is not None:
            return options_of(kind)
        if self._unread:
            return None
        known = ", ".join(sorted(self._known))
        raise UnknownNameError(f"unknown policy {quoted(name)}{nearest(name, self._known)}; known: {known}")

    def needs(self, name: str) -> tuple[str, ...]:
        """List the parts of a deployment that a policy needs; empty if unknown."""
        kind = self._known.get(name)
        return () if kind is None else kind.needs

    def notes(self) -> tuple[str, ...]:
        """A line for each policy file that was not run."""
        said = "not run; simulate checks its policies and their options"
        return tuple(f"{shown(Path(each))}: {said}" for each in self._unread)
