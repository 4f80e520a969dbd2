"""Takes values out of a parsed YAML document and collects everything that is wrong with them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from disagg_sim.errors import LONGEST_SHOWN, DisaggSimError, nearest, printable, quoted
from disagg_sim.facts.yaml_files import PATH_VARIABLE, is_path
from disagg_sim.units import GB, parse_quantity

T = TypeVar("T")
#: A name that may be part of a file's name, and how long it may be: several make up one file's. [1]
PLAIN_NAME = re.compile(r"\w[\w.-]*")
LONGEST_NAME = 80
#: Cases of a sweep, or runs of a scenario; a study has some hundreds. [1]
MOST_COMBINATIONS = 100_000


class Reader:
    """Takes values out of a parsed document and collects what is wrong with them."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def keys(self, where: str, found: Iterable[object], allowed: tuple[str, ...]) -> None:
        """Complain of every key that is not allowed."""
        for key in found:
            if key not in allowed:
                near = nearest(str(key), allowed) or f"; allowed: {', '.join(allowed)}"
                self.faults.append(f"unknown key {quoted(where + str(key))}{near}")

    def choice(self, key: str, value: object, allowed: Iterable[str]) -> str:
        """One of ``allowed``."""
        names = tuple(allowed)
        if value not in names:
            near = nearest(str(value), names) or f"; allowed: {', '.join(names)}"
            self.faults.append(f"{key}: {quoted(value)} is unknown{near}")
        return str(value)

    def number(self, key: str, value: object, *, low: float, high: float, unit: str = "") -> float:
        """A plain number in ``[low, high]``; ``unit`` is what the key counts in."""
        value = plain_number(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.faults.append(f"{key}: {quoted(value)} is not a plain number{_converted(value, unit)}")
        elif not low <= value <= high:
            self.faults.append(f"{key}: {quoted(value)} is outside [{low:g}, {high:g}]{' ' + unit if unit else ''}")
        else:
            return float(value)
        return low

    def whole(self, key: str, value: object, *, low: int, high: int) -> int:
        """A whole number in ``[low, high]``."""
        if isinstance(value, bool) or not isinstance(value, int):
            self.faults.append(f"{key}: {quoted(value)} is not a whole number")
        elif not low <= value <= high:
            self.faults.append(f"{key}: {quoted(value)} is outside [{low}, {high}]")
        else:
            return value
        return low

    def flag(self, key: str, value: object) -> bool:
        """True or false."""
        if not isinstance(value, bool):
            self.faults.append(f"{key}: {quoted(value)} is not true or false")
        return value is True

    def mapping(self, key: str, value: object, allowed: tuple[str, ...]) -> Mapping[str, Any]:
        """A mapping with some of the keys ``allowed``; empty when it is none."""
        if not isinstance(value, Mapping):
            self.faults.append(f"{key}: {quoted(value)} is not a mapping of keys such as {', '.join(allowed)}")
            return {}
        self.keys(f"{key}.", value, allowed)
        return {name: value[name] for name in allowed if name in value}

    def several(self, key: str, value: object, read: Callable[[str, object], T]) -> tuple[T, ...]:
        """Distinct values of an axis: a list of them, or one, each taken by ``read(key, value)``."""
        entries, known = value if isinstance(value, list) else [value], len(self.faults)
        if not entries:
            self.faults.append(f"{key}: the list is empty")
        values = tuple(read(key, entry) for entry in entries)
        return self.distinct(key, values) if len(self.faults) == known else values

    def attempt(self, where: str, call: Any, *args: Any) -> Any:
        """``call(*args)``, its expected failure being one fault of the file, further lines of it indented."""
        try:
            return call(*args)
        except DisaggSimError as error:
            self.faults.append(f"{where}: {error}".replace("\n", "\n  "))
            return None

    def names(self, key: str, value: object, loader: Any) -> tuple[str, ...]:
        """A list of spec names, each loaded once and given back in its canonical spelling."""
        given = value if isinstance(value, list) else [value]
        entries = [entry for entry in given if isinstance(entry, str)]
        if not entries or len(entries) < len(given):
            self.faults.append(f"{key}: {quoted(value)} is not a list of names")
            return ()
        for entry in filter(is_path, entries):
            self.faults.append(f"{key}: {quoted(entry)} is a path; give the name, and its directory in {PATH_VARIABLE}")
        specs = [self.attempt(key, loader, entry) for entry in entries if not is_path(entry)]
        return self.distinct(key, tuple(spec.name for spec in specs if spec is not None))

    def plain_name(self, key: str, value: object) -> str:
        """A name that may be part of a file's name."""
        if not isinstance(value, str) or not PLAIN_NAME.fullmatch(value) or len(value) > LONGEST_NAME:
            allowed = f"letters, digits, '_', '.' and '-', up to {LONGEST_NAME} of them"
            self.faults.append(f"{key}: {quoted(value)} is no plain name; allowed: {allowed}")
        return str(value)

    def title(self, key: str, value: object) -> str:
        """A name that stands in headings: one line with something in it."""
        if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > LONGEST_SHOWN:
            allowed = f"one line of up to {LONGEST_SHOWN} characters"
            self.faults.append(f"{key}: {quoted(value)} is not a name; allowed: {allowed}")
        return str(value)

    def crossed(self, key: str, *sizes: int) -> bool:
        """Whether axes of these sizes make no more combinations than can be listed."""
        many = math.prod(sizes)
        if many > MOST_COMBINATIONS:
            self.faults.append(f"{key}: {many} combinations; allowed: up to {MOST_COMBINATIONS}")
        return many <= MOST_COMBINATIONS

    def distinct(self, key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values, each of which may stand there once."""
        for value, count in Counter(values).items():
            if count > 1:
                self.faults.append(f"{key}: {printable(str(value)[:LONGEST_SHOWN])} stands there {count} times")
        return values


def plain_number(value: object) -> object:
    """YAML 1.1 reads 1e-3 as text: a number all the same."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _converted(value: object, unit: str) -> str:
    dimension, scale = {"s": ("s", 1.0), "GB/s": ("B/s", GB)}.get(unit, ("", 1.0))
    if not dimension:
        return ""
    try:
        plain = f"{parse_quantity(value, dimension) / scale:g}"
    except ValueError:
        return f"; the key counts in {unit}"
    return f"; the key counts in {unit}: write {plain}"
