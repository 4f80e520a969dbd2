"""``traffic/*.yaml``: input and output lengths of requests."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from disagg_sim.facts.schema import (
    checked,
    integer,
    line,
    list_of,
    number,
    numbers,
    schema_of,
    short_form,
    tagged,
    validate,
    values,
)
from disagg_sim.facts.traffic import (
    ConstantLength,
    EmpiricalLength,
    LogNormalLength,
    ParetoLength,
    TrafficCase,
    TrafficSpec,
)

_LENGTHS: dict[str, type[Any]] = {
    "constant": ConstantLength,
    "log_normal": LogNormalLength,
    "pareto": ParetoLength,
    "empirical": EmpiricalLength,
}
_MOST = 10**9  # [token]


def _bounds_ascend(length: Any) -> Any:
    if length.minimum >= length.maximum:
        raise ValueError(f"minimum {length.minimum:g} is not below maximum {length.maximum:g}")
    return length


def _is_quantile_table(length: Any) -> Any:
    p, tokens = length.probabilities, length.tokens
    if len(p) != len(tokens) or len(p) < 2:
        raise ValueError(f"{len(p)} probabilities and {len(tokens)} tokens; needs the same number, at least 2")
    if p[0] != 0.0 or p[-1] != 1.0 or any(a >= b for a, b in pairwise(p)):
        raise ValueError("probabilities must rise strictly from 0 to 1")
    if any(a > b for a, b in pairwise(tokens)):
        raise ValueError("tokens must not fall")
    return length


_tokens = number(1.0, _MOST)
_Constant = schema_of(ConstantLength, {"tokens": integer(1, _MOST)}, kind="constant")
_LogNormal = schema_of(LogNormalLength, {"median": _tokens, "sigma": number(0.0, 10.0)}, kind="log_normal")
_Pareto = schema_of(ParetoLength, {"minimum": _tokens, "maximum": _tokens, "alpha": number(0.01, 100.0)}, kind="pareto")
_Empirical = schema_of(
    EmpiricalLength, {"probabilities": numbers(0.0, 1.0), "tokens": numbers(1.0, _MOST)}, kind="empirical"
)
_length = short_form(
    tagged(_Constant, _LogNormal, checked(_Pareto, _bounds_ascend), checked(_Empirical, _is_quantile_table)),
    lambda value: value if isinstance(value, dict) else {"kind": "constant", "tokens": value},
)
_Case = schema_of(TrafficCase, {"isl": _length, "osl": _length})
_Traffic = schema_of(TrafficSpec, {"title": line(), "cases": list_of(_Case, at_least=1)}, without=("name",))


def traffic_of(path: Path, data: Mapping[str, Any], name: str) -> TrafficSpec:
    """A traffic family from its file; a plain number is a constant length."""
    file: Any = validate(_Traffic, data, path)
    cases = tuple(TrafficCase(isl=_length_of(case.isl), osl=_length_of(case.osl)) for case in file.cases)
    return TrafficSpec(name=name, title=file.title, cases=cases, source=file.source)


def _length_of(length: Any) -> Any:
    return _LENGTHS[length.kind](**values(length, without=("kind",)))
