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


def _code(keys: str) -> str:
    """Options and keys as code, with the words around them."""
    return keys if keys[:1].isalpha() and " " in keys and ":" not in keys else f"`{keys}`"
