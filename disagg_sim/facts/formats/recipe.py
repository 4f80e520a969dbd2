"""Read ``hw_specs/precision/*.yaml``: formats of operator groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.formats.model import attention_kinds
from disagg_sim.facts.precision import ANY_KIND, FORMATS, PrecisionRecipe
from disagg_sim.facts.schema import checked, choice, line, mapping_of, quantity, schema_of, short_form, validate, values

_format = choice(FORMATS)


def _known_kinds(formats: dict[str, str]) -> dict[str, str]:
    allowed = (*attention_kinds(), ANY_KIND)
    unknown = [kind for kind in formats if kind not in allowed]
    if unknown:
        raise ValueError(
            f"unknown key {quoted(unknown[0])}{nearest(unknown[0], allowed)}; allowed: {', '.join(allowed)}"
        )
    return formats


_by_kind = short_form(
    checked(mapping_of(str, _format, at_least=1), _known_kinds),
    lambda value: {ANY_KIND: value} if isinstance(value, str) else value,
)
_Recipe = schema_of(
    PrecisionRecipe,
    {"attention_projection": _by_kind}
    | dict.fromkeys(("ffn", "expert", "embedding", "head", "router"), _format)
    | dict.fromkeys(("attention", "cache"), choice(("bf16", "fp8")))
    | dict.fromkeys(("dispatch_bytes", "combine_bytes"), quantity("B", 0.5, 4.0))
    | {"title": line()},
    without=("name",),
)


def recipe_of(path: Path, data: Mapping[str, Any], name: str) -> PrecisionRecipe:
    """A precision recipe from its file."""
    return PrecisionRecipe(name=name, **values(validate(_Recipe, data, path)))
