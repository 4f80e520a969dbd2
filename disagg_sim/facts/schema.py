"""What a spec file may hold: field types with units and ranges, and faults told in one line each.

A schema is made from the frozen dataclass that it fills: the dataclass says which keys exist, the
schema adds units and ranges. All faults of a file are collected before any is reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypeVar, Union, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from disagg_sim.errors import LONGEST_SHOWN, nearest, quoted
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.units import parse_quantity

M = TypeVar("M", bound=BaseModel)

# The types of a schema are values made at run time, which a static checker cannot follow.
_Annotated: Any = Annotated
_Dict: Any = dict
_List: Any = list
_Literal: Any = Literal
_Optional: Any = Optional
_Tuple: Any = tuple
_Union: Any = Union


class Strict(BaseModel):
    """Base of all schemas: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Mark of a type whose numbers are written with a unit."""

    dimension: str


def unit_of(annotation: Any) -> str:
    """Dimension of a ``quantity``, or of an optional one: "s", "B/s", ...; "" for every other type."""
    for part in getattr(annotation, "__metadata__", ()):
        if isinstance(part, Unit):
            return part.dimension
    return next((unit for item in getattr(annotation, "__args__", ()) if (unit := unit_of(item))), "")


def quantity(dimension: str, low: float, high: float) -> Any:
    """Type of a number with a unit, e.g. ``quantity("B/s", 1 * GB, 100 * TB)`` for ``3.35 TB/s``; both ends allowed."""

    def read(value: object) -> float:
        number = parse_quantity(value, dimension)
        if not (low <= number <= high):
            raise ValueError(f"{quoted(value)} = {number:g} {dimension} is outside [{low:g}, {high:g}] {dimension}")
        return number

    return Annotated[float, BeforeValidator(read), Unit(dimension)]


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
        if not (low <= value <= high):
            raise ValueError(f"{value:g} is outside [{low:g}, {high:g}]")
        return value

    return Annotated[float, BeforeValidator(read), AfterValidator(check)]


def integer(low: int, high: int) -> Any:
    """Type of a whole number in ``[low, high]``."""

    def check(value: int) -> int:
        if not (low <= value <= high):
            raise ValueError(f"{quoted(value)} is outside [{low}, {high}]")
        return value

    return Annotated[int, AfterValidator(check)]


def choice(allowed: Iterable[str]) -> Any:
    """Type of a text out of a list."""
    names = tuple(allowed)

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"{quoted(value)} is unknown{nearest(value, names)}; allowed: {', '.join(names)}")
        return value

    return Annotated[str, AfterValidator(check)]


def line() -> Any:
    """Type of a text in one line, for names and titles."""

    def check(value: str) -> str:
        if "\n" in value or "\x85" in value:
            raise ValueError(f"{quoted(value)} has a line end in it; allowed: one line")
        return value

    return Annotated[str, AfterValidator(check)]


def span(low: float, high: float) -> Any:
    """Type of a list of two ascending numbers in ``[low, high]``."""

    def check(value: tuple[float, ...]) -> tuple[float, ...]:
        if len(value) != 2:
            raise ValueError(f"{quoted(list(value))} must hold two numbers, low and high")
        if value[0] > value[1]:
            raise ValueError(f"{list(value)} is not ascending")
        return value

    return checked(numbers(low, high), check)


def numbers(low: float, high: float) -> Any:
    """Type of a list of numbers in ``[low, high]``; becomes a tuple."""
    return _Annotated[_Tuple[number(low, high), ...], Field(strict=False)]


def texts(allowed: Iterable[str]) -> Any:
    """Type of a list of texts out of a list; becomes a tuple."""
    return _Annotated[_Tuple[choice(allowed), ...], Field(strict=False)]


def list_of(item: Any, *, at_least: int = 0) -> Any:
    """Type of a list of ``item``."""
    return _Annotated[_List[item], Field(min_length=at_least)]


def mapping_of(key: Any, value: Any, *, at_least: int = 0) -> Any:
    """Type of ``key: value`` lines."""
    return _Annotated[_Dict[key, value], Field(min_length=at_least)]


def optional(item: Any) -> Any:
    """Type of ``item`` or ``null``."""
    return _Optional[item]


def checked(item: Any, check: Callable[[Any], Any]) -> Any:
    """``item`` with a check that needs all of it; the check raises ValueError."""
    return _Annotated[item, AfterValidator(check)]


def short_form(item: Any, expand: Callable[[Any], Any]) -> Any:
    """``item``, which may be written shorter; ``expand`` gives the long form."""
    return _Annotated[item, BeforeValidator(expand)]


def tagged(*items: Any) -> Any:
    """One of several schemas, told apart by their key ``kind``."""
    return _Annotated[_Union[items], Field(discriminator="kind")]


def table(name: str, /, **fields: Any) -> type[Strict]:
    """Schema of ``key: value`` lines; a field is a type, or (type, default)."""
    pairs: Any = {key: field if isinstance(field, tuple) else (field, ...) for key, field in fields.items()}
    model: type[Strict] = create_model(name, __base__=Strict, **pairs)
    return model


def schema_of(target: type, types: Mapping[str, Any], *, without: Sequence[str] = (), kind: str = "") -> type[Strict]:
    """Schema with the fields of a dataclass; ``types`` gives units and ranges, ``kind`` a tag for unions."""
    hints = get_type_hints(target)
    fields: dict[str, Any] = {"kind": _Literal[kind]} if kind else {}
    for field in dataclasses.fields(target):
        if field.name not in without:
            default = ... if field.default is dataclasses.MISSING else field.default
            fields[field.name] = (types.get(field.name, hints[field.name]), default)
    return table(target.__name__, **fields)


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
        unknown = kind == "extra_forbidden"
        said = f"unknown key {quoted(key)}{nearest(str(key), known)}" if unknown else f"missing key {key!r}"
        return f"{where}: {said}" if where else said
    where = _place(item["loc"], data)
    if kind == "value_error":
        return f"{where}: {item['ctx']['error']}"
    if kind == "union_tag_not_found":
        return f"{where}: missing key 'kind'"
    if kind == "union_tag_invalid":
        allowed = [tag.strip("' ") for tag in item["ctx"]["expected_tags"].split(",")]
        tag = str(item["ctx"]["tag"])
        return f"{where}.kind: {quoted(tag)} is unknown{nearest(tag, allowed)}; allowed: {', '.join(allowed)}"
    if kind == "too_short":
        return f"{where}: is empty"
    wanted = _WANTED.get(kind.partition("_")[0])
    return f"{where}: {_said(value)} is not {wanted}" if wanted else f"{where}: {_said(value)}: {item['msg']}"


def _said(value: object) -> str:
    """A value as a file writes it, cut when long."""
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else quoted(value)


def _place(location: Sequence[str | int], data: object) -> str:
    """``("gemm", 3, "t0")`` -> ``gemm[3].t0``; tags of unions, which are no keys of the file, are left out."""
    text = ""
    for part in location:
        if isinstance(part, int) and isinstance(data, list):
            text, data = f"{text}[{part}]", data[part] if part < len(data) else None
        elif isinstance(data, Mapping) and part in data:
            text, data = (f"{text}.{part}" if text else str(part)), data[part]
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."
