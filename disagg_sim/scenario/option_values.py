"""Read the options that a scenario gives of a policy, of a run, or of what else has options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.faults import SeveralFaultsError
from disagg_sim.facts.schema import plain_number
from disagg_sim.simulation.options import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a scenario may say of a serving policy."""

    name: str
    needs: tuple[str, ...] | None  # parts of a deployment that it takes; None = the text does not show them
    options: Mapping[str, Option | None] = field(default_factory=dict)  # None = the text does not show its values
    whole: bool = True  # whether it has no other options


def read_options(form: Form, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a policy or a run, each a value of the kind of its default and in its range."""
    faults: list[tuple[tuple[str, ...], str]] = []
    found: dict[str, Any] = {}
    for name, value in given.items():
        known = form.options.get(name)
        if known is None:
            if form.whole and name not in form.options:
                near = nearest(name, form.options) or f"; allowed: {', '.join(form.options)}"
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
