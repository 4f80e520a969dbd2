"""Define field types with units and ranges for spec files, and report faults in one line each.

A schema is made from the frozen dataclass that it fills: its fields say which keys exist, and marks in their
annotations which units and ranges. All faults of a file are collected before any is reported.

Past 400 lines: marks, types and schemas are made of one another, and every check shows what it says of a fault.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WrapValidator,
    create_model,
)
from pydantic_core import CoreSchema, core_schema

from disagg_sim.errors import LONGEST_SHOWN, printable, quoted, unknown_word
from disagg_sim.facts.faults import (
    NEITHER,
    SeveralFaultsError,
    fault_lines,
    message_of,
    out_of_range,
    source_faults,
    value_text,
)
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.units import GB, parse_quantity

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
K = TypeVar("K")

#: A name that may be part of a file's name, and how long it may be: several make up one file's. [1]
PLAIN_NAME = re.compile(r"\w[\w.-]*")
LONGEST_NAME = 80

# The types of a schema are values made at run time, which a static checker cannot follow.
_Annotated: Any = Annotated
_Dict: Any = dict
_Literal: Any = Literal
_Tuple: Any = tuple
_Union: Any = Union


class Strict(BaseModel):
    """Base of all schemas: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)  # one inside another has none


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """Mark of a number with a unit: ``Annotated[float, Quantity("B/s", GB, 100 * TB)]`` reads ``3.35 TB/s``."""

    dimension: str
    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read the text, then hand the number on."""
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def read(self, value: object) -> float:
        """The number in SI units; ``ValueError`` where it has none, another unit, or lies outside the range."""
        number = parse_quantity(value, self.dimension)
        if not (self.low <= number <= self.high):
            text = f"{quoted(value)} = {number:g} {self.dimension}"
            raise ValueError(out_of_range(text, self.low, self.high, self.dimension))
        return number


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Mark of a plain number: ``Annotated[int, Range(1, 1024)]``, or a float in the ``unit`` that its key names."""

    low: float
    high: float
    unit: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the number, then hand it on."""
        inner = handler(source)
        read = self.whole if _core(inner)["type"] == "int" else self.plain
        return core_schema.no_info_before_validator_function(read, inner)

    def whole(self, value: object) -> int:
        """A whole number; ``ValueError`` for all else."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{value_text(value)} is not a whole number")
        if not self.low <= value <= self.high:
            raise ValueError(out_of_range(quoted(value), self.low, self.high, self.unit))
        return value

    def plain(self, value: object) -> float:
        """A number; ``ValueError`` for all else, a quantity with a unit among it."""
        number = plain_number(value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(
                f"{value_text(value)} is not a {'plain ' if self.unit else ''}number{self._converted(value)}"
            )
        if not self.low <= number <= self.high:
            raise ValueError(out_of_range(quoted(number), self.low, self.high, self.unit))
        return float(number)

    def _converted(self, value: object) -> str:
        """What a quantity is in the unit of the key."""
        dimension, scale = {"s": ("s", 1.0), "GB/s": ("B/s", GB)}.get(self.unit, ("", 1.0))
        if not dimension:
            return ""
        try:
            plain = f"{parse_quantity(value, dimension) / scale:g}"
        except ValueError:
            return f"; the key counts in {self.unit}"
        return f"; the key counts in {self.unit}: write {plain}"


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Mark of two ascending numbers: ``Annotated[tuple[float, float] | None, Span(0, 9)]`` reads ``[2.5, 7]``."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read the list; ``null`` where the type allows it."""
        ends = _Annotated[_Tuple[_Annotated[float, Range(self.low, self.high)], ...], Field(strict=False)]
        read = core_schema.no_info_after_validator_function(self.check, handler.generate_schema(ends))
        return core_schema.nullable_schema(read) if type(None) in getattr(source, "__args__", ()) else read

    def check(self, ends: tuple[float, ...]) -> tuple[float, ...]:
        """The two numbers; ``ValueError`` for other counts and orders."""
        if len(ends) != 2:
            raise ValueError(f"{quoted(list(ends))} must hold two numbers, low and high")
        if ends[0] > ends[1]:
            raise ValueError(f"{list(ends)} is not ascending")
        return ends


@dataclasses.dataclass(frozen=True, slots=True)
class OneOf:
    """Mark of a text out of a list, which may be known only when a file is read."""

    names: Iterable[str] | Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the text that was read."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, value: str) -> str:
        """One of the names; ``ValueError`` for all else."""
        names = tuple(self.names() if callable(self.names) else self.names)
        if value not in names:
            raise ValueError(unknown_word(value, names))
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Unless:
    """Mark of a type that one word stands beside: ``Annotated[float, Range(0, 9, "s"), Unless("none", math.inf)]``."""

    word: str
    meaning: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Take the word for its meaning and anything else as the type does; ``null`` is neither."""
        return core_schema.no_info_wrap_validator_function(self._read, handler(source))

    def _read(self, value: object, handler: Callable[[object], Any]) -> Any:
        if value == self.word:
            return self.meaning
        if value is None:
            raise ValueError(f"null is not a value; allowed: {self.word}")
        try:
            return handler(value)
        except ValidationError as error:
            if not isinstance(value, str):
                raise
            raise ValueError(f"{message_of(error.errors()[0])}; allowed, too: {self.word}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class OneKind:
    """Mark of lines whose key ``kind`` says what they make: ``Annotated[Law, OneKind({"normal": Normal})]``."""

    known: Mapping[str, type]  # word of a kind -> its dataclass; read when a schema is made

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read the keys of the kind, then make its dataclass."""
        kinds = tuple(_record(target, kind) for kind, target in self.known.items())
        return handler.generate_schema(_Annotated[_Union[kinds], Field(discriminator="kind")])


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """Mark of a value that files write in another form: ``Annotated[Limits, Written(LimitKeys, limits_of)]``."""

    form: Any  # type of what stands in the file
    build: Callable[[Any], Any] = lambda value: value  # makes the value of it; raises ValueError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read the form, then make the value."""
        return core_schema.no_info_after_validator_function(self.build, handler.generate_schema(self.form))


def _core(schema: Any) -> Any:
    """The schema inside of what wraps it."""
    return _core(schema["schema"]) if "schema" in schema else schema


def _listed(value: object) -> object:
    entries = value if isinstance(value, list) else [value]
    if not entries:
        raise ValueError("the list is empty")
    return entries


def distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    """Require that no value occurs twice."""
    twice = [
        f"{printable(str(value)[:LONGEST_SHOWN])} stands there {count} times"
        for value, count in Counter(values).items()
        if count > 1
    ]
    if twice:
        raise SeveralFaultsError(((), each) for each in twice)
    return values


def distinct_by(name: Callable[[T], str]) -> Callable[[tuple[T, ...]], tuple[T, ...]]:
    """Require that no two values have one name."""

    def require(values: tuple[T, ...]) -> tuple[T, ...]:
        distinct(tuple(map(name, values)))
        return values

    return require


def _not_empty(value: object) -> object:
    if value in ({}, []):
        raise ValueError("is empty")
    return value


def one_spelling(value: object, handler: Callable[[object], dict[Any, Any]]) -> dict[Any, Any]:
    """Read a mapping in which no two keys are spellings of one name.

    >>> one_spelling({"H200-SXM": 3, "h200_sxm": 4}, lambda value: {"h200_sxm": 4})
    Traceback (most recent call last):
    ValueError: 'H200-SXM', 'h200_sxm': two of these are one name
    """
    read = handler(value)
    if isinstance(value, Mapping) and len(read) < len(value):
        raise ValueError(f"{', '.join(map(quoted, value))}: two of these are one name")
    return read


def _is_line(value: str) -> str:
    if "\n" in value or "\x85" in value:
        raise ValueError(f"{quoted(value)} has a line end in it; allowed: one line")
    return value


def plain_name(value: str) -> str:
    """Require a name that may be part of a file's name."""
    if not PLAIN_NAME.fullmatch(value) or len(value) > LONGEST_NAME:
        allowed = f"letters, digits, '_', '.' and '-', up to {LONGEST_NAME} of them"
        raise ValueError(f"{quoted(value)} is no plain name; allowed: {allowed}")
    return value


def _is_title(value: str) -> str:
    if not value.strip() or not value.isprintable() or len(value) > LONGEST_SHOWN:
        raise ValueError(f"{quoted(value)} is not a name; allowed: one line of up to {LONGEST_SHOWN} characters")
    return value


#: Mark of a field that no file has: it is made of others, or is the name of the file.
NOT_IN_FILE: Final = object()
#: Of a list or of ``key: value`` lines, which may not be empty.
NotEmpty = BeforeValidator(_not_empty)
#: A list, or a single value in place of a list of one; not empty.
Several = Annotated[tuple[T, ...], Field(strict=False), BeforeValidator(_listed)]
#: Values of an axis: several, each of which stands there once.
Axis = Annotated[tuple[T, ...], Field(strict=False), BeforeValidator(_listed), AfterValidator(distinct)]
#: ``NAME: value`` lines, one at least.
Named = Annotated[dict[K, T], WrapValidator(one_spelling), NotEmpty]
#: A text in one line, for names and titles.
Line = Annotated[str, AfterValidator(_is_line)]
#: A name that may be part of a file's name.
PlainName = Annotated[str, AfterValidator(plain_name)]
#: A name that stands in headings: one line with something in it.
Title = Annotated[str, AfterValidator(_is_title)]


def plain_number(value: object) -> object:
    """Read a number that was written without a dot, such as 1e-3, which YAML 1.1 reads as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def units_of(target: type) -> Mapping[str, str]:
    """Find the dimension in which each field of a dataclass is written."""
    hints = get_type_hints(target, include_extras=True)
    return {field.name: _dimension(hints[field.name]) for field in dataclasses.fields(target)}


def _dimension(hint: Any) -> str:
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, Quantity):
            return mark.dimension
    return next((unit for part in getattr(hint, "__args__", ()) if (unit := _dimension(part))), "")


def one_of(by: Callable[[Any], str | None], wanted: str) -> Any:
    """Mark a union whose forms have no key ``kind``: ``by`` gives the tag of a value, ``wanted`` stands behind "is"."""
    return Discriminator(by, custom_error_type=NEITHER, custom_error_message=wanted)


def schema_of(*targets: type, kind: str = "") -> type[Strict]:
    """Schema with the fields of dataclasses, whose annotations bear marks of units and ranges."""
    fields: dict[str, Any] = {"kind": _Literal[kind]} if kind else {}
    for target in targets:
        hints = get_type_hints(target, include_extras=True)
        for field in dataclasses.fields(target):
            if NOT_IN_FILE not in getattr(hint := hints[field.name], "__metadata__", ()):
                default = ... if field.default is dataclasses.MISSING else field.default
                if field.default_factory is not dataclasses.MISSING:
                    default = Field(default_factory=field.default_factory)
                fields[field.name] = (_form(hint), default)
    model: type[Strict] = create_model(targets[0].__name__, __base__=Strict, **fields)
    return model


@cache
def keys_of(*targets: type) -> type[Strict]:
    """Schema of a kind of files, made when the first of them is read: few commands read all kinds."""
    return schema_of(*targets)


@cache
def _record(target: type, kind: str = "") -> Any:
    """Type of a mapping that makes a dataclass; an error of its ``__post_init__`` is a fault of the file."""
    tag = "kind" if kind else ""
    made = AfterValidator(lambda model: target(**{key: value for key, value in model if key != tag}))
    return _Annotated[schema_of(target, kind=kind), made]


def _form(hint: Any) -> Any:
    """The type of what a file holds for a type of a dataclass."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(hint)
    if hasattr(hint, "__metadata__"):
        return _Annotated[(_form(hint.__origin__), *hint.__metadata__)]
    parts = tuple(_form(part) for part in getattr(hint, "__args__", ()))
    if get_origin(hint) is tuple:
        return _Annotated[_Tuple[parts], Field(strict=False)]
    if isinstance(hint, UnionType) and type(None) in parts:
        return _Union[parts]
    return _Dict[parts] if get_origin(hint) is Mapping else hint


def spec_of(of: Callable[..., T], path: Path, data: Mapping[str, Any], name: str) -> T:
    """Read a spec from its file; a ``ValueError`` of its values is a fault of the file."""
    kind: Any = of
    fields = dict(validate(keys_of(kind), data, path))
    try:
        return of(name=name, **fields)
    except ValueError as error:
        raise spec_error(path, [str(error)]) from None


def faults_of_sources(of: type, sources: Mapping[str, str], data: Mapping[str, Any], words: Iterable[str]) -> list[str]:
    """Find what the ``sources`` of a file lack or have too many; all values but ``words`` and null need one."""
    told = [key for key in keys_of(of).model_fields if key not in (*words, "sources")]
    return source_faults(sources, told, needed=[key for key in told if data.get(key) is not None])


def sourced_spec(of: Callable[..., T], words: tuple[str, ...], path: Path, data: Mapping[str, Any], name: str) -> T:
    """Read a spec whose values, but ``words`` and null, need a source."""
    spec: Any = spec_of(of, path, data, name)
    kind: Any = of
    if found := faults_of_sources(kind, spec.sources, data, words):
        raise spec_error(path, found)
    return cast(T, spec)


def validate(schema: type[M], data: Mapping[str, Any], path: Path) -> M:
    """Check a file's mapping against a schema."""
    found = checked_or_faults(schema, data)
    if isinstance(found, list):
        raise spec_error(path, found)
    return found


def checked_or_faults(schema: type[M], data: Mapping[str, Any], context: Any = None) -> M | list[str]:
    """Check a mapping against a schema."""
    try:
        return schema.model_validate(data, context=context)
    except ValidationError as error:
        return fault_lines(error, schema, data)
