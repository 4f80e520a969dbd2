"""Add the keys of techniques to the schema of a file."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import create_model

from disagg_sim.facts.schema import Axis, Range, Strict, Unless
from disagg_sim.techniques.registry import NONE, Technique, asked_techniques

M = TypeVar("M", bound=Strict)


def with_techniques(keys: type[M], *, axes: bool) -> type[M]:
    """Make the schema with a key for each technique that gives one, before all others; ``axes``: each may be a list."""
    return _made(keys, asked_techniques(), axes) if asked_techniques() else keys


@lru_cache(maxsize=16)
def _made(keys: type[M], techniques: tuple[Technique, ...], axes: bool) -> type[M]:
    added: dict[str, Any] = {each.name: _field(each, axes) for each in techniques}
    first = create_model("TechniqueKeys", __base__=Strict, **added)
    return type(keys.__name__, (keys, first), {"__module__": keys.__module__, "__doc__": keys.__doc__})


def _field(technique: Technique, axes: bool) -> tuple[Any, Any]:
    ask, kind = technique.ask, technique.kind
    assert ask is not None
    low, high = (-math.inf if ask.low is None else ask.low), (math.inf if ask.high is None else ask.high)
    marks = () if kind is str else (Range(low, high),)
    form: Any = Annotated[(kind, *marks, Unless(NONE, None))]
    return (Axis[form], (None,)) if axes else (form, None)
