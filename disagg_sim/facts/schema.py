"""What a spec file may hold: field types with units and ranges, and faults told in one line each.

A schema is made from the frozen dataclass that it fills: the dataclass says which keys exist, the
schema adds units and ranges. All faults of a file are collected before any is reported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from disagg_sim.errors import nearest
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.units import parse_quantity

M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Base of all schemas: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _within(value: float, low: float, high: float, said: str) -> None:
    if not (low <= value <= high):
        raise ValueError(f"{said} is outside [{low:g}, {high:g}]")


def quantity(dimension: str, low: float, high: float) -> Any:
    """Type of a number with a unit, e.g. ``quantity("B/s", 1 * GB, 100 * TB)`` for ``3.35 TB/s``; both ends allowed."""

    def read(value: object) -> float:
        number = parse_quantity(value, dimension)
        if not (low <= number <= high):
            raise ValueError(f"{value!r} = {number:g} {dimension} is outside [{low:g}, {high:g}] {dimension}")
        return number

    return Annotated[float, BeforeValidator(read)]


def number(low: float, high: float) -> Any:
    """Type of a pure number in ``[low, high]``."""

    def read(value: object) -> object:
        if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
            try:
                return float(value)
            except ValueError:
                return value
        return value

    def check(value: float) -> float:
        if math.isnan(value):
            raise ValueError("nan is not a number")
        _within(value, low, high, f"{value:g}")
        return value

    return Annotated[float, BeforeValidator(read), AfterValidator(check)]


def integer(low: int, high: int) -> Any:
    """Type of a whole number in ``[low, high]``."""

    def check(value: int) -> int:
        if not (low <= value <= high):
            raise ValueError(f"{value} is outside [{low}, {high}]")
        return value

    return Annotated[int, AfterValidator(check)]


def choice(allowed: Iterable[str]) -> Any:
    """Type of a text out of a list."""
    names = tuple(allowed)

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is unknown{nearest(value, names)}; allowed: {', '.join(names)}")
        return value

    return Annotated[str, AfterValidator(check)]


#: Two numbers in ascending order, written as a list.
def span(low: float, high: float) -> Any:
    """Type of a list of two ascending numbers in ``[low, high]``."""

    def check(value: tuple[float, float]) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError(f"[{value[0]:g}, {value[1]:g}] is not ascending")
        return value

    item = number(low, high)
    return Annotated[tuple[item, item], Field(strict=False), AfterValidator(check)]


def schema_of(target: type, *, without: Sequence[str] = (), kind: str = "", **types: Any) -> type[Strict]:
    """Schema with the fields of a dataclass; ``types`` gives units and ranges, ``kind`` a tag for unions."""
    hints = get_type_hints(target)
    fields: dict[str, Any] = {}
    if kind:
        fields["kind"] = (Literal[kind], ...)
    for field in dataclasses.fields(target):
        if field.name not in without:
            default = ... if field.default is dataclasses.MISSING else field.default
            fields[field.name] = (types.get(field.name, hints[field.name]), default)
    model: type[Strict] = create_model(target.__name__, __base__=Strict, **fields)
    return model


def values(model: BaseModel, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a validated schema as keyword arguments of its dataclass."""
    return {key: value for key, value in model if key not in without}


def validate(schema: type[M], data: Mapping[str, Any], path: Path) -> M:
    """Check a file's mapping.

    Raises
    ------
    SpecError
        With every fault of the file.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise spec_error(path, faults(error, schema, data)) from None


def faults(error: ValidationError, schema: type[BaseModel], data: Mapping[str, Any]) -> list[str]:
    """One line for each fault that pydantic found: key, value, what is allowed or the nearest key."""
    known = _keys(schema)
    return list(dict.fromkeys(_fault(item, known, data) for item in error.errors()))


def _keys(schema: type[BaseModel]) -> tuple[str, ...]:
    document = schema.model_json_schema()
    parts = [document, *document.get("$defs", {}).values()]
    return tuple(dict.fromkeys(key for part in parts for key in part.get("properties", {})))


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "'key: value' lines",
    "model": "'key: value' lines",
}


def _fault(item: Any, known: tuple[str, ...], data: Mapping[str, Any]) -> str:
    kind: str = item["type"]
    value = item["input"]
    if kind in ("extra_forbidden", "missing"):
        *outer, key = item["loc"]
        where = _place(outer, data)
        said = f"unknown key {key!r}{nearest(str(key), known)}" if kind == "extra_forbidden" else f"missing key {key!r}"
        return f"{where}: {said}" if where else said
    where = _place(item["loc"], data)
    if kind == "value_error":
        return f"{where}: {item['ctx']['error']}"
    if kind == "union_tag_not_found":
        return f"{where}: missing key 'kind'"
    if kind == "union_tag_invalid":
        allowed = [tag.strip("' ") for tag in item["ctx"]["expected_tags"].split(",")]
        tag = str(item["ctx"]["tag"])
        return f"{where}.kind: {tag!r} is unknown{nearest(tag, allowed)}; allowed: {', '.join(allowed)}"
    if kind == "missing_argument" or kind.endswith(("too_short", "too_long")):
        return f"{where}: {value!r} has the wrong length"
    wanted = _WANTED.get(kind.split("_")[0])
    return f"{where}: {value!r} is not {wanted}" if wanted else f"{where}: {value!r}: {item['msg']}"


def _place(location: Sequence[str | int], data: object) -> str:
    """``("gemm", 3, "t0")`` -> ``gemm[3].t0``; tags of unions, which are no keys of the file, are left out."""
    text = ""
    for part in location:
        if isinstance(part, int) and isinstance(data, list):
            text, data = f"{text}[{part}]", data[part] if part < len(data) else None
        elif isinstance(data, Mapping) and part in data:
            text, data = (f"{text}.{part}" if text else str(part)), data[part]
    return text
