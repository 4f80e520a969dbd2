"""Report faults of a file, one line each: the key, the value, what is allowed or the nearest name.

Checks raise ``ValueError`` where they stand; all faults of a file are collected before any is reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from disagg_sim.errors import LONGEST_SHOWN, REMOVED, DisaggSimError, nearest, quoted, unknown_word

T = TypeVar("T")
#: Cases of a sweep, or runs of a scenario; a study has some hundreds. [1]
MOST_COMBINATIONS = 100_000
#: A key of more characters is a slip, and no list of the allowed ones helps. [1]
LONGEST_KEY = 80
#: Mappings inside each other that are told apart: schemas may hold themselves. [1]
DEEPEST = 8
#: Type of the error of ``one_of``.
NEITHER = "neither"


class SeveralFaultsError(ValueError):
    """Several faults found by one check, each with the keys that lead to it."""

    def __init__(self, found: Iterable[tuple[tuple[str | int, ...], str]]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(said for _, said in self.found))


def out_of_range(value: str, low: float, high: float, unit: str = "") -> str:
    """Write the message for a value outside ``[low, high]``."""
    ends = [str(end) if isinstance(end, int) else f"{end:g}" for end in (low, high)]
    return f"{value} is out of range; allowed: from {ends[0]} to {ends[1]}{unit and f' {unit}'}"


def require_few(key: str, *sizes: int) -> None:
    """Refuse axes that make more combinations than can be listed."""
    if (many := math.prod(sizes)) > MOST_COMBINATIONS:
        raise ValueError(f"{key and f'{key}: '}{many} combinations; allowed: up to {MOST_COMBINATIONS}")


def expected(call: Callable[..., T], *args: Any) -> T:
    """Call a function, an expected failure of it being a fault of the file."""
    try:
        return call(*args)
    except DisaggSimError as error:
        raise ValueError(str(error)) from None


def source_faults(sources: Mapping[str, str], figures: Iterable[str], *, needed: Iterable[str] = ()) -> list[str]:
    """Faults of the ``sources`` of a file: a figure ``needed`` that has none, and keys that are no ``figures``."""
    known = tuple(figures)
    faults = [f"sources: missing key {key!r}" for key in needed if key not in sources]
    return faults + [f"sources: unknown key {quoted(key)}{nearest(key, known)}" for key in sources if key not in known]


def faults_of_call(where: str, call: Callable[..., Any], *args: Any) -> Iterator[str]:
    """Yield the fault that a call raises, with the key that it belongs to; nothing if there is none."""
    try:
        call(*args)
    except (DisaggSimError, ValueError) as error:
        yield _behind(where, str(error))


def fault_lines(error: ValidationError, schema: type[BaseModel], data: Mapping[str, Any]) -> list[str]:
    """A line for each fault of a file's mapping: key, value, what is allowed or the nearest key."""
    levels = list(_levels(schema.model_json_schema()))
    return list(dict.fromkeys(said for item in error.errors() for said in _faults(item, levels, data)))


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


#: A mapping of a file: its key, without numbers of lists, and the keys that it may have.
_Level = tuple[str, tuple[str, ...]]


def _levels(document: Mapping[str, Any]) -> Iterator[_Level]:
    """All mappings of a JSON schema, the file itself ('') first."""
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", document)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        where, part = waiting.pop(0)
        if (name := part.get("$ref", "").rpartition("/")[2]) and (where, name) not in seen:
            seen.add((where, name))
            if where.count(".") < DEEPEST:
                waiting.append((where, document["$defs"][name]))
        below = [part.get("items"), part.get("additionalProperties"), *part.get("prefixItems", [])]
        below += [each for several in ("anyOf", "oneOf", "allOf") for each in part.get(several, [])]
        waiting += [(where, each) for each in below if isinstance(each, Mapping)]
        if keys := part.get("properties"):
            yield where, tuple(keys)
            waiting += [(f"{where}.{key}" if where else key, each) for key, each in keys.items()]


def _faults(item: Any, levels: Sequence[_Level], data: Mapping[str, Any]) -> Iterator[str]:
    kind, location = item["type"], item["loc"]
    if kind in ("extra_forbidden", "missing"):
        *outer, key = location
        where, level = _place(outer, data)
        said = f"unknown key {quoted(key)}{_near(str(key), levels, where, level)}"
        said = f"{key} {REMOVED[key]}" if key in REMOVED else said
        yield _behind(where, said if kind == "extra_forbidden" else f"missing key {key!r}")
    elif kind == "value_error" and isinstance(error := item["ctx"]["error"], SeveralFaultsError):
        for below, said in error.found:
            yield _behind(_place((*location, *below), data)[0], said)
    else:
        where, _ = _place(location, data)
        yield _behind(f"{where}.kind" if kind == "union_tag_invalid" else where, message_of(item))


def _behind(where: str, said: str) -> str:
    """A fault behind its key, further lines of it indented."""
    return (f"{where}: {said}" if where else said).replace("\n", "\n  ")


def _near(key: str, levels: Sequence[_Level], where: str, level: object) -> str:
    """The nearest known key; without one, all keys of the most similar level; of a key of elsewhere, its place."""
    given = {*level} if isinstance(level, Mapping) else set()
    place = re.sub(r"\[\d+\]", "", where)
    homes = [home for home, names in levels if key in names]
    if homes:
        others = [each for each in levels if key not in each[1]]
        here = [names for home, names in others if home == place]
        here = here or [names for _, names in others if {*names} & given]
        names = max(here, key=lambda names: len({*names} & given), default=())
        of = f"another kind of {place}" if place in homes else homes[0] or "the file itself"
        return f"{nearest(key, names)}; it is a key of {of}" + (f"; allowed: {', '.join(names)}" if names else "")
    close = nearest(key, dict.fromkeys(name for _, names in levels for name in names))
    if close or not given or len(key) > LONGEST_KEY:
        return close
    names = max((names for _, names in levels), key=lambda names: len({*names} & given))
    return f"; allowed: {', '.join(names)}" if {*names} & given else ""


def message_of(item: Any) -> str:
    """What pydantic found, without its place."""
    kind, value = str(item["type"]), item["input"]
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "union_tag_not_found":
        return "missing key 'kind'"
    if kind == "union_tag_invalid":
        allowed = [tag.strip("' ") for tag in item["ctx"]["expected_tags"].split(",")]
        return unknown_word(str(item["ctx"]["tag"]), allowed)
    if kind == "too_short":
        return "is empty"
    if kind == NEITHER:
        return f"{value_text(value)} is {item['msg']}"
    wanted = _WANTED.get(kind.partition("_")[0])
    return f"{value_text(value)} is not {wanted}" if wanted else f"{value_text(value)}: {item['msg']}"


def value_text(value: object) -> str:
    """A value as a file writes it, cut when long."""
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else quoted(value)


def _place(location: Sequence[str | int], data: object) -> tuple[str, object]:
    """``("gemm", 3, "t0")`` -> ``gemm[3].t0`` and what stands there; tags of unions, no keys of the file, are left out.

    A value that stands for a list of one has no number.
    """
    text, tagged = "", False
    for part in location:
        if isinstance(part, int) and isinstance(data, list):
            text, data = f"{text}[{part}]", data[part] if part < len(data) else None
        elif isinstance(data, Mapping) and data.get("kind") == part and not tagged:
            tagged = True  # which may be the name of a key, too
        elif isinstance(data, Mapping) and part in data:
            text, data, tagged = (f"{text}.{part}" if text else str(part)), data[part], False
    return (text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."), data
