"""Tables of techniques on the page of what can be added: where each is asked for, and which go together."""

from __future__ import annotations

from disagg_sim.techniques import registry
from docs.computed import quick, table


@quick
def techniques() -> str:
    """Every technique, and where it is asked for."""
    head = ("technique", "what it does", "plan", "sweep", "explain", "scenario")
    rows = [(each.name, each.title, *map(_code, each.asked)) for each in registry.TECHNIQUES]
    return table(head, rows)


@quick
def technique_pairs() -> str:
    """Every technique with every other: in which commands they go together."""
    names = [each.name for each in registry.TECHNIQUES]
    rows = [(one, *("" if one == other else _together(one, other) for other in names)) for one in names]
    return table(("technique", *names), rows)


def _together(one: str, other: str) -> str:
    """Say in which commands two techniques go together: a tick means in all."""
    commands, found = registry.Keys._fields, [*registry.exclusions(one, other)]
    refused = [name for name in commands if any(name in each.where and not each.part for each in found)]
    if len(refused) == len(commands):
        return "refused"
    parts = ", ".join(dict.fromkeys(f"no {each.part}" for each in found if each.part))
    return ", ".join(filter(None, [parts, refused and f"not in {' and '.join(refused)}"])) or "✓"


@quick
def technique_exclusions() -> str:
    """Why two techniques do not go together."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for each in registry.TECHNIQUES:
        for other in each.excludes:
            what = f"{other.part} ({other.other})" if other.part else other.other
            grouped.setdefault((each.name, ", ".join(other.where), other.why), []).append(what)
    rows = [(name, ", ".join(others), where, why) for (name, where, why), others in grouped.items()]
    return table(("technique", "does not go with", "in", "why"), rows)


def _code(keys: str) -> str:
    """Options and keys as code, with the words around them."""
    return keys if keys[:1].isalpha() and " " in keys and ":" not in keys else f"`{keys}`"
