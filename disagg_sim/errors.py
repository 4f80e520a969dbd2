"""Expected failures. Each is one clear line; a bug keeps its traceback."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

#: A message shows so many characters of a value; what follows is left out. [1]
LONGEST_SHOWN = 200
#: No word of a message is longer: paths have their room, a name of thousands of letters does not. [1]
LONGEST_WORD = 600
#: Largest whole number that a float holds exactly. [1]
MOST_WHOLE = 2**53


class DisaggSimError(Exception):
    """Base of every failure that a user can mend; the CLI prints its text and exits with 2."""


class SpecError(DisaggSimError):
    """A fact or sweep file is wrong: file, key, value, what is allowed, nearest valid name."""


class TraceError(DisaggSimError):
    """A trace file is wrong: file, line, value, what is allowed."""


class UnknownNameError(DisaggSimError):
    """A model, system, traffic, recipe, profile or engine of that name does not exist."""


class InputError(DisaggSimError):
    """An argument is out of range; the text says what is allowed."""


class InfeasibleError(DisaggSimError):
    """Nothing satisfies the limits; the text says which one binds and by how much."""


class StoreError(DisaggSimError):
    """The results directory cannot be read or written."""


class MissingExtraError(DisaggSimError, ImportError):
    """The package of an extra, or the laboratory, is not installed; the text says what brings it."""


class PolicyError(DisaggSimError):
    """A serving policy wished what cannot be; the text names policy, wish and reason."""

    def __init__(self, text: str, so_far: object = None) -> None:
        super().__init__(text)
        self.so_far = so_far


_STILL = "was removed: forecasts and simulations take copies of experts that have just been placed; leave it out"
_OF_POOL = "is a key of a pool: --pool colocated:tp=4,instances=2"
#: Keys, options and commands of earlier releases, or of engines, with what to use instead.
REMOVED = {
    "popularity_drift_s": _STILL,
    "rebalance_s": _STILL,
    "interference": "was removed: nothing measured says what phases of a mixed step cost each other; leave it out",
    "--popularity-drift": _STILL,
    "--bucket": "was removed: give --out on a disk that all workers share, or an object store that is mounted as one",
    "--no-figures": "was removed: no pictures are written beside tables; disagg-sim report DIR shows them",
    **dict.fromkeys(("--tp", "--dp", "--pp", "--ep", "--instances"), _OF_POOL),
    "store compact": "was removed: every command reads many small files, so nothing needs it",
}


def quoted(value: object) -> str:
    """Show a value from outside as messages do: its ``repr``, cut after ``LONGEST_SHOWN`` characters."""
    try:
        text = repr(value)
    except RecursionError:
        return "a value nested too deeply to be shown"
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number too long to be shown"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"


def printable(text: str) -> str:
    """Write control characters of a text as escapes and cut overlong words; the ends of its lines stay."""
    plain = "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
    return re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: f"{word[0][:LONGEST_WORD]}...", plain)


def given_twice(names: Iterable[str]) -> str:
    """Find the first name that occurs twice.

    Returns the name, or an empty string.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


def nearest(name: object, allowed: Iterable[str]) -> str:
    """Suggest the closest allowed name: ``, did you mean 'x'?``

    A name that goes on where ``name`` ends comes first, by a unit before all: ``b200`` is ``b200_sxm``, not ``gh200``,
    ``rate`` is ``rate_per_s``, not ``rate_scale``. Where nothing is close it is the longest that ``name`` begins with:
    ``sec`` is ``s``. The result is to be put behind a message; empty where there is none.
    """
    names, text = list(allowed), str(name)[:LONGEST_SHOWN]
    longer = [each for each in names if each.startswith(f"{text}_")]
    longer = [each for each in longer if each.endswith(("_s", "_us"))] or longer
    close = difflib.get_close_matches(text, longer or names, n=1, cutoff=0.0 if longer else 0.6)
    close = close or sorted((each for each in names if text.startswith(each)), key=len)[-1:]
    return f", did you mean {str(close[0])!r}?" if close else ""


def unknown_word(value: object, allowed: Sequence[str]) -> str:
    """Say that a value is none of the words: the value, the nearest one, all of them."""
    return f"{quoted(value)} is unknown{nearest(value, allowed)}; allowed: {', '.join(allowed)}"


def check_word(name: str, value: object, allowed: Iterable[str]) -> None:
    """Refuse a value of the argument ``name`` that is none of the words.

    >>> check_word("path", "rial", ("rail", "host"))
    Traceback (most recent call last):
    disagg_sim.errors.InputError: path 'rial' is unknown, did you mean 'rail'?; allowed: rail, host
    """
    words = tuple(map(str, allowed))
    if value not in words:
        raise InputError(f"{name} {unknown_word(value, words)}")


def whole_number(name: str, value: object, least: int = 1, note: str = "", *, most: float = MOST_WHOLE) -> int:
    """Return the argument ``name`` as an int."""
    if type(value) is int and least <= value <= most:  # nearly always
        return value
    number = as_float(value)
    if not number.is_integer() or not least <= number <= most:
        upto = f" to {most}" if most < MOST_WHOLE or number > most else ""
        raise InputError(f"{name} {_shown(value)} is out of range; allowed: whole numbers from {least}{upto}{note}")
    return int(number)


def above_zero(name: str, value: object, unit: str = "") -> float:
    """Return the argument ``name`` as a float.

    >>> above_zero("ftl_limit", 2)
    2.0
    >>> above_zero("ftl_limit", -1, "s")
    Traceback (most recent call last):
    disagg_sim.errors.InputError: ftl_limit must be above 0 s, got -1
    """
    number = as_float(value)
    if not number > 0:
        raise InputError(f"{name} must be above 0{unit and f' {unit}'}, got {_shown(value)}")
    return number


def as_float(value: object) -> float:
    """Turn a real number into a float.

    Returns NaN for all that is no real number.

    >>> as_float(64), as_float("64"), as_float(10**400)
    (64.0, nan, inf)
    """
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.inf


def check_kinds(chosen: Any) -> None:
    """Refuse an object of a dataclass with a value of another kind than its field says.

    A list where the field says tuple becomes one.

    >>> @dataclasses.dataclass
    ... class Wish:
    ...     gpus: int | None
    ...     names: tuple[str, ...] = ()
    >>> check_kinds(Wish(8.0, ("prefill",)))
    >>> check_kinds(Wish(8, (3,)))
    Traceback (most recent call last):
    disagg_sim.errors.InputError: names (3,) is out of range; allowed: several texts
    """
    owner: Any = type(chosen)
    for name, kind in _kinds(owner).items():
        value = getattr(chosen, name)
        if isinstance(value, list) and _is_of(tuple(value), kind):
            object.__setattr__(chosen, name, tuple(value))
        elif not _is_of(value, kind):
            raise InputError(f"{name} {_shown(value)} is out of range; allowed: {_kind_text(kind)}")


@cache
def _kinds(owner: Any) -> dict[str, Any]:
    """Kind of each field of a dataclass."""
    hints = get_type_hints(owner)
    return {each.name: hints[each.name] for each in dataclasses.fields(owner)}


#: One value of a kind and several, in words.
_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "truth values"),
    str: ("a text", "texts"),
    NoneType: ("None", "Nones"),
}


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; any type of number is a whole one where it has no fraction."""
    whole, parts = get_origin(kind) or kind, get_args(kind)
    if whole in (Union, UnionType):
        return any(_is_of(value, part) for part in parts)
    if whole in (int, float):
        plain = isinstance(value, Real) and not isinstance(value, bool)
        return plain and (whole is float or as_float(value).is_integer())
    if not isinstance(whole, type):  # such as Any
        return True
    if not parts or not isinstance(value, whole):
        return isinstance(value, whole)
    held: Any = value
    if whole is tuple and parts[-1] is not ...:
        return len(held) == len(parts) and all(map(_is_of, held, parts))
    columns: list[Any] = [held.keys(), held.values()] if isinstance(held, Mapping) else [held]
    return all(_is_of(each, part) for some, part in zip(columns, parts, strict=False) for each in some)


def _kind_text(kind: Any, *, several: bool = False) -> str:
    """A kind in words."""
    whole, parts = get_origin(kind) or kind, get_args(kind)
    if whole in (Union, UnionType):
        return " or ".join(_kind_text(part) for part in parts)
    if whole in _WORDS:
        return _WORDS[whole][several]
    if whole is tuple and parts[1:] == (...,):
        return f"several {_kind_text(parts[0], several=True)}"
    if whole is tuple:
        return f"tuples of {' and '.join(map(_kind_text, parts))}"
    if len(parts) == 2:
        return f"a mapping of {' to '.join(_kind_text(part, several=True) for part in parts)}"
    return getattr(whole, "__name__", str(whole))


def _shown(value: object) -> str:
    """An argument as messages write it, without quotation marks."""
    try:
        return " ".join(printable(str(value)[:LONGEST_SHOWN]).split("\n"))
    except ValueError:
        return quoted(value)
