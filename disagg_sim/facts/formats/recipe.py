"""``hw_specs/precision/*.yaml``: formats of operator groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg_sim.facts.precision import FORMATS, GroupFormat, PrecisionRecipe
from disagg_sim.facts.schema import choice, line, quantity, schema_of, short_form, validate, values

_format = choice(FORMATS)
_Group = schema_of(GroupFormat, {"gqa": _format, "mla": _format})
_group = short_form(_Group, lambda value: {"gqa": value, "mla": value} if isinstance(value, str) else value)
_GROUPS = ("attention_projection", "ffn", "expert")
_Recipe = schema_of(
    PrecisionRecipe,
    dict.fromkeys(_GROUPS, _group)
    | dict.fromkeys(("embedding", "head", "router"), _format)
    | dict.fromkeys(("attention", "cache"), choice(("bf16", "fp8")))
    | dict.fromkeys(("dispatch_bytes", "combine_bytes"), quantity("B", 0.5, 4.0))
    | {"title": line()},
    without=("name",),
)


def recipe_of(path: Path, data: Mapping[str, Any], name: str) -> PrecisionRecipe:
    """A precision recipe from its file."""
    fields = values(validate(_Recipe, data, path))
    return PrecisionRecipe(name=name, **fields | {key: GroupFormat(**values(fields[key])) for key in _GROUPS})
