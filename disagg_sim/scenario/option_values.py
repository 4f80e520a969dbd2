"""Read the options that a scenario gives of a policy, of a run, or of what else has options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.faults import SeveralFaultsError
from disagg_sim.facts.schema import plain_number
from disagg_sim.simulation.options import Option


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
