"""Read the options that a scenario gives of a policy, of a run and of its failures.

``run: {failures: {events: [{at_s: 60, instance: 1}], restart_s: 300}}``
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from disagg_sim.errors import InputError, nearest, quoted
from disagg_sim.facts.faults import SeveralFaultsError
from disagg_sim.facts.schema import plain_number
from disagg_sim.simulation.options import Option, options_of
from disagg_sim.techniques.availability.play import KINDS, OF_EVENT, FailureEvent, Failures

Place = tuple[str | int, ...]


def read_failures(value: object) -> Failures:
    """Read what fails in a run.

    Returns times in s.

    >>> found = read_failures({"restart_s": 300, "events": [{"at_s": 60, "node": 0}]})
    >>> found.events[0].kind, found.lasts(found.events[0])
    ('node', 300.0)
    """
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


def read_options(options: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a policy or a run, each a value of the kind of its default and in its range."""
    faults: list[tuple[tuple[str, ...], str]] = []
    found: dict[str, Any] = {}
    for name, value in given.items():
        known = options.get(name)
        if known is None:
            near = nearest(name, options) or f"; allowed: {', '.join(options)}"
            faults.append(((), f"unknown key {quoted(name)}{near}"))
            continue
        read = value if isinstance(known.default, bool | str) else plain_number(value)
        if fault := known.fault(read):
            faults.append(((name,), fault))
        else:
            found[name] = known.like_default(read)
    if faults:
        raise SeveralFaultsError(faults)
    return found
